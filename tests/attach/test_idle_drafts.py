"""Where steps that draft nothing are spared the draft pass, and where everything is left to vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from honed.attach.idle_drafts import skip_idle_drafts


class Runner:
    """A V1 runner with a DFlash drafter, as far as it is asked about."""

    name = "v1"

    def __init__(self, *, is_hybrid: bool = False, kv_transfer_config: Any = None, data_parallel_size: int = 1) -> None:
        self.stored: list[list[int]] = []
        self.draft_model = SimpleNamespace(
            combine_hidden_states=lambda states: states,
            precompute_and_store_context_kv=lambda states, positions, slots: self.stored.append(slots.tolist()),
        )
        self.propose = lambda **_: "drafts"
        self.drafter = SimpleNamespace(
            propose=self.propose, parallel_drafting=True, method="dflash", num_speculative_tokens=7,
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(data_parallel_size=data_parallel_size),
                model_config=SimpleNamespace(is_hybrid=is_hybrid), kv_transfer_config=kv_transfer_config,
            ),
        )  # fmt: skip
        self.model_runner = SimpleNamespace(_sample=None, propose_draft_token_ids=None)

    def step(self, slot: int, num_speculative_tokens: int) -> Any:
        """Two requests' step, whose tokens have two slots from this one on."""
        metadata = SimpleNamespace(slot_mapping=torch.tensor([slot, slot + 1, -1]), batch_size=lambda: 2)
        return self.drafter.propose(
            num_speculative_tokens=num_speculative_tokens, common_attn_metadata=metadata,
            target_positions=torch.tensor([0, 0]), target_hidden_states=torch.zeros(2, 4),
        )  # fmt: skip


def test_rows_are_stored_when_something_is_drafted_again() -> None:
    runner: Any = Runner()
    assert skip_idle_drafts(runner, torch.device("cpu"))
    assert [runner.step(slot, 0).shape for slot in (0, 2)] == [(2, 0), (2, 0)]
    assert runner.stored == []
    assert runner.step(4, 7) == "drafts"
    assert runner.stored == [[0, 1, 2, 3]]


def test_where_vllm_copies_blocks_that_are_not_full_rows_are_stored_at_once() -> None:
    runner: Any = Runner(is_hybrid=True)
    assert skip_idle_drafts(runner, torch.device("cpu"))
    assert runner.step(0, 0).shape == (2, 0)
    assert runner.stored == [[0, 1]]


@pytest.mark.parametrize("setting", [{"kv_transfer_config": object()}, {"data_parallel_size": 2}])
def test_a_pass_that_others_count_on_is_left_alone(setting: dict[str, Any]) -> None:
    runner: Any = Runner(**setting)
    assert not skip_idle_drafts(runner, torch.device("cpu"))
    assert runner.drafter.propose is runner.propose
    assert runner.model_runner._sample is None
