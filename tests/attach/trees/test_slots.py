"""Slots for trees: what they may take of a step, and drafters that vLLM needs whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.attach.trees.slots import fitting


@pytest.mark.fault("trees that take a step's tokens from prompts and other requests")
@given(st.lists(st.integers(0, 63), max_size=40), st.integers(-20, 800), st.integers(0, 16))
def test_the_largest_trees_are_lowered_until_all_have_room(lengths: list[int], room: int, least: int) -> None:
    found = fitting(lengths, room, least)
    assert all(min(length, least) <= new <= length for new, length in zip(found, lengths, strict=True))
    if sum(lengths) <= room:
        assert found == lengths
    else:
        longest = max(found, default=0)
        assert all(new == min(length, longest) for new, length in zip(found, lengths, strict=True)), "an equal cap for all"
        assert sum(found) <= room or longest <= least
        assert longest <= least or sum(min(length, longest + 1) for length in lengths) > room, "there was room for more"


@pytest.mark.fault("a drafter smaller than what vLLM reads of it")
@pytest.mark.parametrize(("adaptive", "sampled"), [(False, "greedy"), (True, "greedy"), (False, "probabilistic")])
def test_a_drafter_of_which_vllm_reads_more_than_tokens_keeps_its_size(
    monkeypatch: pytest.MonkeyPatch, adaptive: bool, sampled: str
) -> None:
    """vLLM reads its confidences and logits for every slot. A smaller drafter has too few, and the engine would end."""
    from honed.attach.trees import runner_v2

    asked: list[int] = []

    def init_speculator(config: Any, *_: Any) -> Any:
        asked.append(config.speculative_config.num_speculative_tokens)
        return SimpleNamespace(draft_logits=None, propose=lambda: None)

    stub = SimpleNamespace(init_speculator=init_speculator)
    monkeypatch.setattr(runner_v2.importlib, "import_module", lambda _: stub)
    runner_v2._prepare_drafters(may_have_graphs=True)
    speculative = SimpleNamespace(
        method="dflash",
        num_speculative_tokens=31,
        enable_adaptive_verification=adaptive,
        draft_sample_method=sampled,
        draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(block_size=8)),
    )
    stub.init_speculator(SimpleNamespace(speculative_config=speculative))
    assert asked == [31 if adaptive or sampled != "greedy" else 7]
