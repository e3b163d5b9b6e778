"""Requests beside those with trees: that come later, and what vLLM's backend is given of a step on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from tests.e2e.engine import TestEngine
from tests.e2e.swapping import worker_of


class Given(NamedTuple):
    """A call of the backend for a step with trees."""

    rows: int
    num_requests: int
    are_trees_first: bool
    tree_rows: int


def backend_calls(running: TestEngine, monkeypatch: pytest.MonkeyPatch) -> list[Given]:
    """Note what vLLM's backend for a CPU is given from here on by target layers in steps with trees."""
    from vllm import _custom_ops

    attend, found = _custom_ops.cpu_attention_with_kv_cache, list[Given]()
    layers = worker_of(running)._honed_trees.layers

    def noted(**given: Any) -> Any:
        if (step := layers.step) is not None:
            found.append(Given(len(given["query"]), len(given["seq_lens"]), step.is_first, len(step.rows)))
        return attend(**given)

    monkeypatch.setattr(_custom_ops, "cpu_attention_with_kv_cache", noted)
    return found


def answers_in_turn(
    running: TestEngine, monkeypatch: pytest.MonkeyPatch, prompts: Sequence[str], params: Sequence[Any], chunk: int
) -> list[list[int]]:
    """Answers to requests of which all but the first come once that one drafts, with prompts in chunks of so many tokens."""
    monkeypatch.setattr(running.scheduler.scheduler_config, "long_prefill_token_threshold", chunk)
    llm_engine, ended = running.llm.llm_engine, dict[str, list[int]]()
    running.scheduler.reset_prefix_cache()
    for number, (prompt, of_one) in enumerate(zip(prompts, params, strict=True)):
        llm_engine.add_request(str(number), prompt, of_one)
        for _ in range(0 if number else 200):
            llm_engine.step()
            if any(request.num_output_tokens > 2 for request in running.scheduler.requests.values()):
                break
    while llm_engine.has_unfinished_requests():
        ended |= {one.request_id: list(one.outputs[0].token_ids) for one in llm_engine.step() if one.finished}
    running.end_steps()
    return [ended[str(number)] for number in range(len(prompts))]
