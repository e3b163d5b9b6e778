"""Where steps that draft nothing are spared the draft pass, and where everything is left to vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from honed.attach.runner.idle_drafts import skip_idle_drafts


class Runner:
    """A V1 runner with a DFlash drafter, as far as it is asked about."""

    name = "v1"

    def __init__(
        self, *, is_hybrid: bool = False, num_groups: int = 1, kv_transfer_config: Any = None, data_parallel_size: int = 1
    ) -> None:
        self.stored: list[list[int]] = []
        self.draft_model = SimpleNamespace(
            combine_hidden_states=lambda states: states,
            precompute_and_store_context_kv=lambda states, positions, slots: self.stored.append(slots.tolist()),
        )
        self.propose = lambda **_: "drafts"
        self.drafter = SimpleNamespace(
            propose=self.propose,
            parallel_drafting=True,
            method="dflash",
            num_speculative_tokens=7,
            vllm_config=SimpleNamespace(
                parallel_config=SimpleNamespace(data_parallel_size=data_parallel_size),
                model_config=SimpleNamespace(is_hybrid=is_hybrid),
                kv_transfer_config=kv_transfer_config,
            ),
        )
        self.asked: list[Any] = []
        self.model_runner = SimpleNamespace(
            _sample=None,
            propose_draft_token_ids=lambda *args: self.asked.append(args),
            use_async_scheduling=False,
            use_aux_hidden_state_outputs=True,
            input_ids=SimpleNamespace(gpu=torch.tensor([7, 8, 0])),
            _get_positions=lambda num_tokens: torch.arange(10, 10 + num_tokens),
            kv_cache_config=SimpleNamespace(kv_cache_groups=[object()] * num_groups),
        )

    def propose_draft_token_ids(self, num_drafted: int, num_to_draft: int) -> Any:
        """Ask for drafts as vLLM does, after a step of two requests that verified so many drafts of the second."""
        output = SimpleNamespace(num_spec_tokens_to_schedule=num_to_draft, total_num_scheduled_tokens=2 + num_drafted)
        cad = SimpleNamespace(slot_mapping=torch.tensor([4, 5, 6, -1]), batch_size=lambda: 2)
        aux = [torch.full((4, 1), 1.0), torch.full((4, 1), 2.0)]
        verified = SimpleNamespace(num_draft_tokens=[0, num_drafted])
        return self.model_runner.propose_draft_token_ids(output, "sampled", None, None, None, aux, verified, cad, "slots")

    def step(self, slot: int, num_speculative_tokens: int) -> Any:
        """Two requests' step, whose tokens have two slots from this one on."""
        metadata = SimpleNamespace(slot_mapping=torch.tensor([slot, slot + 1, -1]), batch_size=lambda: 2)
        return self.drafter.propose(
            num_speculative_tokens=num_speculative_tokens,
            common_attn_metadata=metadata,
            target_positions=torch.tensor([0, 0]),
            target_hidden_states=torch.zeros(2, 4),
        )


def test_rows_are_stored_when_something_is_drafted_again() -> None:
    runner: Any = Runner()
    assert skip_idle_drafts(runner, torch.device("cpu"))
    assert [runner.step(slot, 0).shape for slot in (0, 2)] == [(2, 0), (2, 0)]
    assert runner.stored == []
    assert runner.step(4, 7) == "drafts"
    assert runner.stored == [[0, 1, 2, 3]]


@pytest.mark.parametrize("setting", [{"is_hybrid": True}, {"num_groups": 2}])
def test_where_a_block_may_become_another_layers_rows_are_stored_at_once(setting: dict[str, Any]) -> None:
    runner: Any = Runner(**setting)
    assert skip_idle_drafts(runner, torch.device("cpu"))
    assert runner.step(0, 0).shape == (2, 0)
    assert runner.stored == [[0, 1]]


def test_an_engine_that_is_told_keeps_the_rows_without_laying_out_a_draft_pass() -> None:
    runner: Any = Runner(is_hybrid=True)
    assert skip_idle_drafts(runner, torch.device("cpu"))
    seen: list[dict[str, Any]] = []
    propose = runner.drafter.propose
    runner.drafter.propose = lambda **kwargs: (seen.append(kwargs), propose(**kwargs))[1]
    assert runner.propose_draft_token_ids(num_drafted=0, num_to_draft=0) == [[], []]
    assert (runner.stored, runner.asked) == ([[4, 5]], [])
    given = {name: seen[0][name].tolist() for name in ("target_token_ids", "target_positions", "target_hidden_states")}
    assert given == {"target_token_ids": [7, 8], "target_positions": [10, 11], "target_hidden_states": [[1.0, 2.0]] * 2}
    assert seen[0]["num_rejected_tokens_gpu"] is None


@pytest.mark.parametrize(
    ("num_drafted", "num_to_draft", "is_async", "is_verifying"),
    [(1, 0, False, True), (0, 7, False, True), (0, 0, True, False), (1, 0, True, True)],
)
def test_otherwise_vllm_is_asked(num_drafted: int, num_to_draft: int, is_async: bool, is_verifying: bool) -> None:
    runner: Any = Runner()
    assert skip_idle_drafts(runner, torch.device("cpu"))
    runner.model_runner.use_async_scheduling = is_async
    runner.propose_draft_token_ids(num_drafted, num_to_draft)
    ((_, sampled, *_, verified, _, slots),) = runner.asked
    assert (sampled, slots, verified is not None, runner.stored) == ("sampled", "slots", is_verifying, [])


@pytest.mark.parametrize("setting", [{"kv_transfer_config": object()}, {"data_parallel_size": 2}])
def test_a_pass_that_others_count_on_is_left_alone(setting: dict[str, Any]) -> None:
    runner: Any = Runner(**setting)
    assert not skip_idle_drafts(runner, torch.device("cpu"))
    assert runner.drafter.propose is runner.propose
    assert runner.model_runner._sample is None
