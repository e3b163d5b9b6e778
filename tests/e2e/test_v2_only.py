"""What only vLLM's V2 runner does, with either scheduler: idle draft passes, drafts trimmed on the device, CUDA graphs.

Collected where V2 runs only (conftest.py). V1's idle steps are held against our own drafter, in test_drafter_equals_vllm.py.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from honed.attach.engine.graphs import captured
from honed.attach.events.request_book import key_of
from honed.attach.runner.fed_verification import FedVerification
from honed.daemon.install.vllm_args import table_for
from tests.e2e.engine import IS_ASYNC, K, TestEngine
from tests.e2e.logged import counted, keys_of, rounds, set_policy, take_batches
from tests.e2e.swapping import worker_of
from tests.e2e.test_runner_contract import MAX_TOKENS, NUM_PROMPTS, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.runners]


def drafted_at(running: TestEngine, lengths: list[int]) -> dict[tuple[int, int], list[int]]:
    """Drafts by request and position, where steps have these lengths in turn."""
    from vllm import SamplingParams

    take_batches(running)
    llm_engine = running.llm.llm_engine
    for number, prompt in enumerate(prompts()):
        llm_engine.add_request(str(number), prompt, SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True))
    keys = keys_of(running)
    for k in itertools.cycle(lengths):
        if not llm_engine.has_unfinished_requests():
            break
        set_policy(running, static_k=k)
        llm_engine.step()
    rows = rounds(take_batches(running))
    return {(keys.index(row["request"]), row["position"]): row["draft"] for row in rows if row["k"]}


def test_steps_without_drafts_spare_the_draft_pass_and_leave_no_gap(
    attached: TestEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is drafted at a place is the same whether the steps before it drafted or not."""
    drafter = worker_of(attached).model_runner.speculator
    run_model, store, passes = drafter._run_model, drafter._precompute_context_kv, []
    monkeypatch.setattr(drafter, "_run_model", lambda *args, **kwargs: passes.append(1) or run_model(*args, **kwargs))
    always = drafted_at(attached, [1])
    num_passes, passes[:] = len(passes), []
    idling = drafted_at(attached, [0, 0, 1])
    both = sorted(always.keys() & idling.keys())
    assert len(both) >= 6
    assert [idling[at] for at in both] == [always[at] for at in both]
    assert 0 < len(passes) < num_passes / 2

    def store_unless_idle(*args: Any, **kwargs: Any) -> None:
        if drafter._generate_draft.__name__ != "generate_nothing":
            store(*args, **kwargs)

    monkeypatch.setattr(drafter, "_precompute_context_kv", store_unless_idle)
    gaps = drafted_at(attached, [0, 0, 1])
    assert [gaps.get(at) for at in both] != [always[at] for at in both], "a gap changes nothing: this test shows nothing"
    set_policy(attached)


@pytest.fixture
def trimming(attached: TestEngine, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's own manager in its own runner; only estimates and costs are made up, and vLLM doesn't start it on a CPU."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as theirs

    runner = worker_of(attached).model_runner
    monkeypatch.setattr(theirs, "_assign_draft_token_budget_compiled", theirs._assign_draft_token_budget)
    manager = theirs.AdaptiveVerificationManager(runner.req_states, runner.input_buffers.query_start_loc, 1, 1024)
    manager.set_cost_curves([(1, 0.1), (8, 0.1)], [(1, 1.0), (64, 4.0)])
    confidences = runner.speculator.draft_token_confidence_probs
    confidences.copy_(torch.tensor([1.0, 0.5, 0.9, 0.3]).repeat(len(confidences) // 4)[:, None])
    monkeypatch.setattr(runner, "adaptive_verification", manager)
    return manager


def test_drafts_that_vllms_adaptive_verification_trims_are_logged_so(
    attached: TestEngine, trimming: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = worker_of(attached).model_runner
    set_policy(attached)
    with monkeypatch.context() as without:
        without.setattr(runner, "adaptive_verification", None)
        plain = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    take_batches(attached)
    verified: dict[int, list[int]] = {}
    reallocate, secret = trimming.reallocate_drafts, attached.honed._requests.secret

    def noted(req_ids: list[str], idx_mapping: torch.Tensor) -> Any:
        found = reallocate(req_ids, idx_mapping)
        for request_id, count in zip(req_ids, trimming._batch_draft_capacity[: len(req_ids)].tolist(), strict=True):
            verified.setdefault(int.from_bytes(key_of(request_id, secret)), []).append(count)
        return found

    monkeypatch.setattr(trimming, "reallocate_drafts", noted)
    before = attached.counters()
    cut = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    after = attached.counters()
    rows = rounds(take_batches(attached))
    assert cut == plain
    assert {name: after[name] - before[name] for name in after} == counted(rows), "vLLM counts what it trims as drafted"
    logged: dict[int, list[int]] = {}
    for row in rows:
        assert row["accepted"] <= row["k"] - row["trimmed"]
        if row["k"]:
            logged.setdefault(row["request"], []).append(row["k"] - row["trimmed"])
    assert logged == {key: counts[: len(logged.get(key, ()))] for key, counts in verified.items()}
    assert {row["trimmed"] > 0 for row in rows} == {True, False}


def test_vllms_adaptive_verification_can_be_fed(attached: TestEngine, trimming: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, failures = worker_of(attached).model_runner, []
    for owner, name in ((runner, "execute_model"), (runner.speculator, "observe_verification")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # undone afterwards
    set_policy(attached)
    plain = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    measured = trimming.cost_tables
    fed = FedVerification(runner)
    fed.wrap(failures.append)
    fed.turn(True)
    fed.set_costs([(1, 0.1), (4, 0.2)], [(1, 1.0), (2, 1.1), (64, 9.0)])
    take_batches(attached)
    extra = [{"honed_workload": f"w{i}"} for i in range(NUM_PROMPTS)]
    assert attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS, extra=extra) == plain
    rows = rounds(take_batches(attached))
    assert failures == []
    graded, accepted, _ = fed.levels._sums.sum(dim=2)
    for i in range(NUM_PROMPTS):
        mine = [row for row in rows if row["workload"] == f"w{i}" and row["k"]]
        number = fed._numbers[f"w{i}"]
        reached = sum(min(row["accepted"] + 1, row["k"] - row["trimmed"]) for row in mine)
        assert reached > 0
        # A little is forgotten; scheduled ahead, a round may be under way when its request turns out to have ended.
        assert 0.99 * reached <= graded[number].item() <= reached + (K + 1 if IS_ASYNC else 0)
        assert accepted[number].item() == pytest.approx(sum(row["accepted"] for row in mine), rel=0.01)
    assert trimming.cost_tables[1][64] == pytest.approx(9.0)
    fed.turn(False)
    assert trimming.cost_tables is measured


@pytest.mark.parametrize("is_any_mix", [False, True])
def test_the_graphs_that_vllm_would_capture_are_read(
    attached: TestEngine, monkeypatch: pytest.MonkeyPatch, is_any_mix: bool
) -> None:
    """vLLM's own list of shapes, for the table that `honed vllm-args --graphs` prints; nothing is captured on a CPU."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.worker.gpu import cudagraph_utils

    config = worker_of(attached).vllm_config
    monkeypatch.setattr(config.speculative_config, "num_speculative_tokens_per_batch_size", table_for([K, 3, 0], 4))
    monkeypatch.setattr(config.compilation_config, "cudagraph_capture_sizes", [1, 2, 4, 8, 16, 32])
    monkeypatch.setattr(config.compilation_config, "max_cudagraph_capture_size", 32)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, raising=False)
    manager = cudagraph_utils.CudaGraphManager(
        config, torch.device("cpu"), CUDAGraphMode.FULL_AND_PIECEWISE, K + 1, varlen_decode=is_any_mix
    )
    manager.graphs = dict.fromkeys(manager._capture_descs[CUDAGraphMode.FULL])
    found = captured(SimpleNamespace(cudagraph_manager=manager))
    assert found.lengths == ([] if is_any_mix else [0, 3, K])
    assert set(found.token_counts) >= {1, 4, 8, 16}
