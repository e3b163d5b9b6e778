from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from honed.attach.trees.eligible import needs_chain
from honed.attach.trees.slots import block_tokens_of


def params(**changes: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**changes)


@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3}])
def test_plain_sampling_takes_trees(changes: dict[str, Any]) -> None:
    assert not needs_chain(params(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"min_p": 0.1},
        {"min_tokens": 3},
        {"bad_words": ["a"]},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"logit_bias": {3: 1.0}},
        {"allowed_token_ids": [3, 4]},
    ],
)
def test_what_looks_at_the_rows_before_keeps_its_chain(changes: dict[str, Any]) -> None:
    assert needs_chain(params(**changes))


def test_a_grammar_and_a_pooling_request_keep_theirs() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    assert needs_chain(params(structured_outputs=StructuredOutputsParams(regex="a+")))
    assert needs_chain(None)


@pytest.mark.parametrize(("block", "slots", "wanted"), [(8, 31, 7), (8, 7, 7), (8, 3, 3), (None, 5, 5), (1, 5, 5)])
def test_a_drafter_drafts_its_block(block: int | None, slots: int, wanted: int) -> None:
    config = SimpleNamespace(hf_config=SimpleNamespace(block_size=block) if block else None)
    given = SimpleNamespace(method="dflash", num_speculative_tokens=slots, draft_model_config=config)
    assert block_tokens_of(given) == wanted


def test_without_a_draft_model_slots_are_tokens() -> None:
    assert block_tokens_of(SimpleNamespace(method="dflash", num_speculative_tokens=4, draft_model_config=None)) == 4
    assert block_tokens_of(None) == 0


@pytest.mark.fault("a drafter's last draft that was never verified")
@pytest.mark.parametrize("method", ["dspark", "ngram", "eagle3", "mtp"])
def test_another_drafters_block_is_its_own_affair(method: str) -> None:
    """DSpark's anchor drafts, too; for ngram vLLM puts the target's config in the drafter's place."""
    config = SimpleNamespace(hf_config=SimpleNamespace(block_size=7))
    assert block_tokens_of(SimpleNamespace(method=method, num_speculative_tokens=7, draft_model_config=config)) == 7
