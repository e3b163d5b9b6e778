"""Draft trees where the target has sliding windows beside full layers, and sinks: as gpt-oss, with the tiny pair's weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.e2e.beside_trees import backend_calls
from tests.e2e.engine import DRAFTER, IS_CUDA, IS_SLOW, IS_V2, K, TestEngine, engine, held_out
from tests.e2e.logged import counted, rounds, set_policy, take_batches
from tests.e2e.swapping import wait_until_trees_may_grow
from tests.e2e.test_sampling_unchanged import mend_vllm_cpu

pytestmark = [
    pytest.mark.e2e,
]
SLOTS, WINDOW = 15, 40
NUM_LAYERS = 6
PROMPTS = held_out(2 if IS_SLOW else 8, 200 if IS_SLOW else 500)
ASKED: dict[str, Any] = {"temperature": 0.0, "max_tokens": 20 if IS_SLOW else 60, "ignore_eos": True}


@contextmanager
def windowed_target(has_sinks: bool = True) -> Iterator[None]:
    """Give all of vLLM's Qwen3 layers but the last a window, and all heads sinks.

    Then V1 keeps the drafter's layers in one group of caches, beside that last one.
    """
    from vllm.model_executor.models import qwen3

    make, attention, number = qwen3.Qwen3DecoderLayer.__init__, qwen3.Attention, [0]

    @functools.wraps(make)
    def make_windowed(self: Any, *args: Any, **kwargs: Any) -> None:
        number[0] += 1
        make(self, *args, **(kwargs | {"per_layer_sliding_window": WINDOW if number[0] % NUM_LAYERS else None}))

    def with_sinks(num_heads: int, *args: Any, **kwargs: Any) -> Any:
        sinks = torch.linspace(1.0, 5.0, num_heads, device="cuda" if IS_CUDA else "cpu")
        return attention(num_heads, *args, **kwargs, sinks=sinks)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qwen3.Qwen3DecoderLayer, "__init__", make_windowed)
        if has_sinks:
            patch.setattr(qwen3, "Attention", with_sinks)
        if not IS_CUDA:
            mend_vllm_cpu(patch)
        yield


def answers(running: TestEngine, times: int = 1) -> list[list[list[int]]]:
    return [running.generate(PROMPTS, **ASKED) for _ in range(times)]


@pytest.fixture(scope="module")
def references() -> list[list[int]]:
    """The same target's answers without speculation. Windows and sinks must both change them."""
    found = []
    for is_windowed, has_sinks in ((False, False), (True, False), (True, True)):
        if is_windowed:
            with windowed_target(has_sinks), engine(None, speculative_config=None) as running:
                found += answers(running)
        elif not IS_SLOW:
            with engine(None, speculative_config=None) as running:
                found += answers(running)
    assert all(found[-1] != other for other in found[:-1]), "windows or sinks change nothing here: this test shows nothing"
    return found[-1]


@pytest.fixture(scope="module")
def trees(references: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEngine]:
    speculation = {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": SLOTS}
    with pytest.MonkeyPatch.context() as patch, windowed_target():
        patch.setenv("HONED_TREES", "1")
        if IS_V2:
            from honed.attach.trees.runner_v2 import prepare_workers

            prepare_workers()
        folder = tmp_path_factory.mktemp("trees") / "run"
        with engine(folder, speculative_config=speculation, enable_prefix_caching=True) as running:
            running.honed._recorder.is_logging_token_ids = True
            wait_until_trees_may_grow(running)
            yield running


def test_layers_have_several_kinds_of_cache(trees: TestEngine) -> None:
    hello = trees.honed._hello()
    assert "trees" in hello.capabilities, hello.limits
    groups = trees.core.model_executor.driver_worker.worker.model_runner.kv_cache_config.kv_cache_groups
    assert len({type(group.kv_cache_spec).__name__ for group in groups}) > 1, "this test shows nothing"


@pytest.mark.parametrize("budget", [SLOTS, 3])
def test_tokens_are_those_without_speculation(trees: TestEngine, references: list[list[int]], budget: int) -> None:
    set_policy(trees, static_k=budget, max_k=SLOTS)
    take_batches(trees)
    for _ in range(2):  # the second time on cached prefixes, over slots that were moved
        before = trees.counters()
        assert answers(trees) == [references]
        after, batches = trees.counters(), take_batches(trees)
        rows = rounds(batches)
        assert {name: after[name] - before[name] for name in after} == counted(rows)
        assert sum(row["accepted"] for row in rows) > 0
        columns = [batch.rounds for batch in batches]
        assert any(max(one.nodes, default=0) >= 1 for one in columns), "no path left the chain's first node: nothing was moved"
    assert trees.honed.errors.count == 0


@pytest.mark.skipif(IS_CUDA, reason="what a CPU's backend is given is noted")
def test_a_chain_behind_trees_is_attended_without_their_rows(
    trees: TestEngine, references: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    trees.scheduler.reset_prefix_cache()
    given, last = backend_calls(trees, monkeypatch), len(PROMPTS) - 1
    sampling = [SamplingParams(**ASKED, logprobs=1 if i == last else None) for i in range(len(PROMPTS))]
    found = trees.llm.generate(PROMPTS, sampling, use_tqdm=False)
    trees.end_steps()
    assert [list(one.outputs[0].token_ids) for one in found] == references
    assert {(call.rows, call.num_requests) for call in given if call.are_trees_first} >= {(K + 1, 1)}
    assert trees.honed.errors.count == 0


def test_without_the_window_or_the_sinks_tokens_differ(
    trees: TestEngine, references: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Controls: else the test above would show nothing."""
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    from honed.attach.trees import tree_layers

    monkeypatch.setattr(tree_layers, "_window_of", lambda _: 0)
    if not IS_SLOW:
        assert answers(trees) != [references]
