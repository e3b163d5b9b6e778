"""Draft trees on vLLM's V2 runner: tokens are those without speculation, at temperature 0 and, by the same seed, above it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from honed.attach.trees import runner_v2
from honed.daemon.install.vllm_args import table_for
from honed.kernels.cache import compact_kv
from honed.kernels.trees import top_candidates, tree_attention, tree_build
from honed.kernels.verify import walk_tree
from tests.e2e.beside_trees import answers_in_turn
from tests.e2e.device_waits import device_waits, of_honed
from tests.e2e.engine import DRAFTER, IS_CUDA, IS_SLOW, IS_V2, K, TestEngine, engine, held_out
from tests.e2e.failing import fail_sometimes
from tests.e2e.logged import counted, rounds, set_policy, take_batches, without_tree
from tests.e2e.swapping import wait_until_trees_may_grow, worker_of
from tests.e2e.test_runner_contract import check_likely
from tests.e2e.turns import check_turns, take_turns

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.v2,
    pytest.mark.skipif(not IS_V2, reason="V2's part of trees"),
]
SLOTS = 15
PROMPTS = held_out(2 if IS_SLOW else 8, 60 if IS_SLOW else 300)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12 if IS_SLOW else 48, "ignore_eos": True}
SEEDED: dict[str, Any] = GREEDY | {"temperature": 0.8, "seed": 11}
PENALTIES: dict[str, Any] = GREEDY | {"presence_penalty": 0.7}


def with_graphs(**compilation: Any) -> dict[str, Any]:
    """Options of an engine with full graphs for steps of all slots, of the drafter's block and of no drafts."""
    sizes = {"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 48, 64, 96, 128]}
    return {"enforce_eager": False, "compilation_config": sizes | compilation}


MODES: dict[str, dict[str, Any]] = {"eager": {}}
"""Ways to run a step, each with an engine's options. On a GPU the plainest graphs come first."""
if IS_CUDA:
    MODES["full graphs"] = with_graphs(mode=0, cudagraph_mode="FULL_DECODE_ONLY")
    MODES["compiled"] = with_graphs(cudagraph_mode="FULL_AND_PIECEWISE")


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def references(mode: str) -> dict[str, Any]:
    with engine(None, speculative_config=None, **MODES[mode]) as running:
        return {
            "greedy": running.generate(PROMPTS, **GREEDY),
            "seeded": running.generate(PROMPTS, **SEEDED),
            "penalties": running.generate(PROMPTS[:1], **PENALTIES),
        }


@pytest.fixture(scope="module")
def trees(mode: str, references: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEngine]:
    from honed.attach.trees.runner_v2 import prepare_workers

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HONED_TREES", "1" if mode == "eager" else "graphs")
        prepare_workers(may_have_graphs=True)  # in this process once for all modes
        speculation: dict[str, Any] = {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": SLOTS}
        if mode != "eager":
            speculation["num_speculative_tokens_per_batch_size"] = table_for([SLOTS, K, 0], 8)
        with engine(tmp_path_factory.mktemp("trees") / "run", speculative_config=speculation, **MODES[mode]) as running:
            running.honed._recorder.is_logging_token_ids = True
            wait_until_trees_may_grow(running)
            yield running


@pytest.mark.gpu
@pytest.mark.skipif(not IS_CUDA, reason="needs a CUDA device")
def test_no_step_with_trees_compiles_a_kernel(trees: TestEngine) -> None:
    """First of all tests: others would compile what is missing."""
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    compiled = num_compiled()
    for count in (8, 1, 3):
        for budget in (SLOTS, 6, 2):
            set_policy(trees, static_k=budget, max_k=SLOTS)
            trees.generate(PROMPTS[:count], **GREEDY)
    assert num_compiled() == compiled


def num_compiled() -> int:
    """Kernels of trees that were compiled in this process."""
    jitted = (top_candidates._scan_kernel, top_candidates._merge_kernel, tree_build._tree_build_kernel)
    jitted += (tree_attention._prefix_kernel, tree_attention._tree_kernel, compact_kv._compact_kernel, walk_tree._walk_kernel)
    return sum(len(caches[0]) for kernel in jitted for caches in kernel.device_caches.values())


def test_greedy_tokens_and_events(trees: TestEngine, references: dict[str, Any]) -> None:
    assert "trees" in trees.honed._hello().capabilities, trees.honed._hello().limits
    for budget in (SLOTS, 3):
        set_policy(trees, static_k=budget, max_k=SLOTS)
        take_batches(trees)
        before = trees.counters()
        assert trees.generate(PROMPTS, **GREEDY) == references["greedy"]
        after, batches = trees.counters(), take_batches(trees)
        rows = rounds(batches)
        assert {name: after[name] - before[name] for name in after} == counted(rows)
        assert max(row["k"] for row in rows) == budget
        assert sum(sum(batch.rounds.chain_tokens) for batch in batches) > 0, "no tree was verified"
        assert all(sum(b.rounds.chain_accepted) <= sum(b.rounds.num_accepted_tokens) for b in batches)
    assert trees.honed.errors.count == 0
    assert trees.core.model_executor.driver_worker.worker._honed_errors.count == 0


def test_the_target_s_most_likely_tokens_are_captured_from_the_rows_of_trees(trees: TestEngine) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    assert check_likely(trees, PROMPTS[: 1 if IS_SLOW else 4], GREEDY["max_tokens"]) > 0


def test_steps_with_chains_and_with_trees_take_turns(
    trees: TestEngine, references: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_turns(trees, monkeypatch)
    take_batches(trees)
    before = trees.counters()
    assert trees.generate(PROMPTS, **GREEDY) == references["greedy"]
    after, batches = trees.counters(), take_batches(trees)
    assert {name: after[name] - before[name] for name in after} == counted(rounds(batches))
    check_turns(batches)
    assert not without_tree(batches, K)
    assert trees.honed.errors.count == 0


def caches_of(running: TestEngine) -> list[torch.Tensor]:
    context = worker_of(running).vllm_config.compilation_config.static_forward_context
    return [layer.kv_cache for layer in context.values() if isinstance(getattr(layer, "kv_cache", None), torch.Tensor)]


def test_what_compiles_kernels_beside_the_engine_changes_nothing(trees: TestEngine) -> None:
    caches = caches_of(trees)
    before, count = [cache.clone() for cache in caches], 0
    for run in worker_of(trees)._honed_trees._kernels():
        run()
        count += 1
    assert count >= 3, "growth, and attention of at least one kind"
    assert caches
    assert all(torch.equal(cache, was) for cache, was in zip(caches, before, strict=True))


def test_until_kernels_are_compiled_chains_are_verified(
    trees: TestEngine, references: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    take_batches(trees)
    warm_up = worker_of(trees)._honed_trees._warm_up
    monkeypatch.setattr(warm_up, "is_over", False)
    assert trees.generate(PROMPTS, **GREEDY) == references["greedy"]
    batches = take_batches(trees)
    assert not any(sum(batch.rounds.chain_tokens) for batch in batches)
    assert sum(row["accepted"] for row in rounds(batches)) > 0
    monkeypatch.setattr(warm_up, "is_over", True)
    assert trees.generate(PROMPTS, **GREEDY) == references["greedy"]
    assert any(sum(batch.rounds.chain_tokens) for batch in take_batches(trees))


def test_seeded_tokens_are_those_without_speculation(
    trees: TestEngine, references: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the logits of a batch are too many to draw from at once."""
    monkeypatch.setattr("honed.attach.trees.runner_v2.MOST_DRAWN_BYTES", 1)
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    steps = sampled_steps(trees, monkeypatch)
    assert trees.generate(PROMPTS, **SEEDED) == references["seeded"]
    assert not any(step.has_chains for step in steps if step.has_trees)
    check_sampled(steps, beside_chains=False)


class Sampled(NamedTuple):
    """A step with drafts."""

    has_trees: bool
    has_chains: bool
    num_stock: int
    """Calls of vLLM's rejection sampler."""


def sampled_steps(running: TestEngine, monkeypatch: pytest.MonkeyPatch) -> list[Sampled]:
    """Note steps with drafts from here on."""
    sampler, found, calls = worker_of(running).model_runner.rejection_sampler, list[Sampled](), list[Any]()
    stock, verify, layers = sampler._stock, sampler._verify, worker_of(running)._honed_trees.layers

    def counted_stock(*args: Any) -> Any:
        calls.append(args)
        return stock(*args)

    def noted(given: Any, logits: Any, batch: Any, *args: Any) -> Any:
        calls.clear()
        num_trees = 0 if layers.step is None else len(layers.step.request_ids)
        num_drafted = int((batch.num_draft_tokens_per_req > 0).sum())
        output = verify(given, logits, batch, *args)
        found.append(Sampled(num_trees > 0, num_drafted > num_trees, len(calls)))
        return output

    monkeypatch.setattr(sampler, "_stock", counted_stock)
    monkeypatch.setattr(sampler, "_verify", noted)
    return found


def check_sampled(steps: list[Sampled], *, beside_chains: bool) -> None:
    """vLLM's rejection sampler ran once where there were chains, and not where there were trees alone."""
    with_trees = [step for step in steps if step.has_trees]
    assert any(step.has_chains == beside_chains for step in with_trees), "nothing is shown"
    assert all(step.num_stock == step.has_chains for step in with_trees)


def test_vllms_rejection_sampler_has_no_part_in_steps_of_trees(
    trees: TestEngine, references: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside a request without drafts, which has penalties of its own."""
    from vllm import SamplingParams

    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    steps = sampled_steps(trees, monkeypatch)
    undrafted = SamplingParams(**PENALTIES, extra_args={"honed_max_draft_tokens": 0})
    seeded = SamplingParams(**SEEDED)
    found = trees.llm.generate([PROMPTS[0], *PROMPTS[1:]], [undrafted, *[seeded] * len(PROMPTS[1:])], use_tqdm=False)
    trees.end_steps()
    assert [list(one.outputs[0].token_ids) for one in found] == references["penalties"] + references["seeded"][1:]
    assert not any(step.has_chains for step in steps if step.has_trees)
    check_sampled(steps, beside_chains=False)


def test_vllms_rejection_sampler_verifies_chains_beside_trees(
    trees: TestEngine, references: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    steps = sampled_steps(trees, monkeypatch)
    asked = [SamplingParams(**PENALTIES), *[SamplingParams(**SEEDED)] * len(PROMPTS[1:])]
    found = trees.llm.generate(PROMPTS, asked, use_tqdm=False)
    trees.end_steps()
    assert [list(one.outputs[0].token_ids) for one in found] == references["penalties"] + references["seeded"][1:]
    check_sampled(steps, beside_chains=True)


def test_a_prompt_in_chunks_beside_a_tree_yields_no_token(
    trees: TestEngine, references: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    set_policy(trees, static_k=6, max_k=SLOTS)
    steps = sampled_steps(trees, monkeypatch)
    found = answers_in_turn(trees, monkeypatch, PROMPTS[:2], [SamplingParams(**SEEDED)] * 2, 4)
    assert found == references["seeded"][:2]
    check_sampled(steps, beside_chains=False)


@pytest.mark.parametrize("where", ["_place", "_draw", "walk"])
def test_a_failure_costs_acceptance_and_no_token(
    trees: TestEngine, references: dict[str, Any], where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = trees.core.model_executor.driver_worker.worker._honed_trees
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    take_batches(trees)
    errors = trees.core.model_executor.driver_worker.worker._honed_errors
    fail_sometimes(monkeypatch, runner_v2 if where == "walk" else mine, where, every=4, at=2)
    monkeypatch.setattr(errors, "count", errors.count)
    try:
        # The others leave the tree to vLLM as a chain, whose tokens at a temperature aren't those without speculation.
        name, asked = ("seeded", SEEDED) if where == "walk" else ("greedy", GREEDY)
        assert trees.generate(PROMPTS, **asked) == references[name]
        untold = without_tree(take_batches(trees), K)
        assert untold != []
        assert all(row["trimmed"] == row["k"] - row["accepted"] for row in untold), "its nodes count as a chain's drafts"
    finally:
        mine._num_failures = 0


def test_where_nobody_decides_trees_are_as_large_as_the_chain(trees: TestEngine, references: dict[str, Any], mode: str) -> None:
    set_policy(trees, kind="off")
    take_batches(trees)
    assert trees.generate(PROMPTS, **GREEDY) == references["greedy"]
    longest = max(row["k"] for row in rounds(take_batches(trees)))
    assert longest == K if mode == "eager" else longest <= SLOTS, "vLLM's own table decides beside graphs"


def test_penalties_keep_vllms_own_chain(trees: TestEngine, references: dict[str, Any]) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    take_batches(trees)
    assert trees.generate(PROMPTS[:1], **PENALTIES) == references["penalties"]
    batches = take_batches(trees)
    assert not any(sum(batch.rounds.chain_tokens) for batch in batches)
    assert max(row["k"] for row in rounds(batches)) <= K


def dispatched(running: TestEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, Any]]:
    """For each step of the target's from here on: whether it verifies a tree, and the graph that vLLM chose for it."""
    runner, found = running.core.model_executor.driver_worker.worker.model_runner, []
    prepare = runner.prepare_inputs

    def prepare_inputs(output: Any, state: Any, graph: Any, *args: Any) -> Any:
        found.append((running.core.model_executor.driver_worker.worker._honed_trees._are_trees_scheduled, graph))
        return prepare(output, state, graph, *args)

    monkeypatch.setattr(runner, "prepare_inputs", prepare_inputs)
    return found


@pytest.mark.skipif(IS_CUDA, reason="there graphs are real")
def test_padded_steps_without_full_graphs(
    trees: TestEngine, references: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As beside CUDA graphs: vLLM pads each step. It has full graphs for steps of `SLOTS` drafts, which a CPU couldn't run."""
    from vllm.config.compilation import CUDAGraphMode
    from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

    def graph(mode: CUDAGraphMode, num_tokens: int, **more: Any) -> Any:
        return BatchExecutionDescriptor(cg_mode=mode, num_tokens=num_tokens, **more)

    manager, by_tokens = trees.core.model_executor.driver_worker.worker.model_runner.cudagraph_manager, {}
    for num_tokens in range(1, 129):
        padded = -(-num_tokens // 24) * 24
        uniform = -(-num_tokens // (SLOTS + 1))
        full = graph(CUDAGraphMode.FULL, uniform * (SLOTS + 1), num_reqs=uniform, uniform_token_count=SLOTS + 1)
        by_tokens[num_tokens, 0] = [full, graph(CUDAGraphMode.PIECEWISE, padded, num_reqs=None)]
    monkeypatch.setattr(manager, "_candidates", by_tokens)
    monkeypatch.setattr(manager, "_graphs_captured", True)
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    steps = dispatched(trees, monkeypatch)
    assert trees.generate(PROMPTS, **GREEDY) == references["greedy"]
    chosen = [graph for has_trees, graph in steps if has_trees]
    assert chosen != []
    assert all(graph.cg_mode is CUDAGraphMode.PIECEWISE for graph in chosen)
    assert trees.core.model_executor.driver_worker.worker._honed_errors.count == 0


@pytest.mark.gpu
@pytest.mark.skipif(not IS_CUDA, reason="needs a CUDA device")
def test_graphs_serve_steps_of_trees_and_chains(
    trees: TestEngine, references: dict[str, Any], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mode == "eager":
        pytest.skip("there are none")
    assert trees.honed._hello().captured_lengths == []
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    steps = dispatched(trees, monkeypatch)
    assert trees.generate(PROMPTS, **GREEDY) == references["greedy"]
    of_trees = {graph.cg_mode.name for has_trees, graph in steps if has_trees}
    assert of_trees == {"PIECEWISE" if mode == "compiled" else "NONE"}
    set_policy(trees, static_k=0, max_k=SLOTS)
    del steps[:]
    assert trees.generate(PROMPTS, **GREEDY) == references["greedy"]
    assert "FULL" in {graph.cg_mode.name for _, graph in steps}


@pytest.mark.gpu
@pytest.mark.skipif(not IS_CUDA, reason="needs a CUDA device")
def test_trees_never_wait_for_the_device(trees: TestEngine) -> None:
    set_policy(trees, static_k=SLOTS, max_k=SLOTS)
    trees.generate(PROMPTS, **GREEDY)  # what is set up once is set up
    take_batches(trees)
    with device_waits() as waited:
        trees.generate(PROMPTS, **GREEDY)
    assert sum(sum(batch.rounds.chain_tokens) for batch in take_batches(trees)) > 0, "no tree was verified"
    assert of_honed(waited) == []
