"""What the attachment promises on a real engine, the same for every runner and scheduler (see engine.py).

Fewer and shorter requests on V2, which is slow here.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from honed.attach.fed_verification import FedVerification
from honed.attach.graphs import captured
from honed.attach.request_book import key_of
from honed.daemon.vllm_args import table_for
from tests.e2e.engine import DRAFTER, IS_ASYNC, IS_V2, TARGET, K, TestEngine, held_out
from tests.e2e.logged import counted, keys_of, rounds, set_policy, take_batches
from tests.e2e.swapping import worker_of

pytestmark = [pytest.mark.e2e, pytest.mark.runners]
MAX_TOKENS = 10 if IS_V2 else 48
NUM_PROMPTS = 2 if IS_V2 else 6


def prompts() -> list[str]:
    return held_out(NUM_PROMPTS, 60 if IS_V2 else 300)


@pytest.fixture(autouse=True)
def _fresh_log(request: pytest.FixtureRequest) -> None:
    if "attached" in request.fixturenames:
        take_batches(request.getfixturevalue("attached"))


def test_the_runner_under_test_is_the_one_that_runs(attached: TestEngine) -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    hello = attached.honed._hello(0)
    assert hello.runner == ("v2" if IS_V2 else "v1")
    assert isinstance(attached.scheduler, AsyncScheduler) == IS_ASYNC
    assert (attached.core.batch_queue_size == 2) == IS_ASYNC
    assert set(hello.capabilities) == {"events", "draft_length", "capture", "swap"}
    assert hello.limits == []


def test_logged_events_equal_vllms_counters(attached: TestEngine) -> None:
    before = attached.counters()
    set_policy(attached)
    extra = [{"honed_workload": "x"}] * NUM_PROMPTS
    completions = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS, extra=extra)
    rows = rounds(take_batches(attached))
    after = attached.counters()
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    assert {r["workload"] for r in rows} == {"x"}
    by_request: dict[int, list[int]] = {}
    for row in rows:
        accepted, draft = row["accepted"], row["draft"]
        assert row["emitted"][:accepted] == draft[:accepted]
        assert accepted == row["k"] or row["emitted"][accepted] != draft[accepted], "it was refused for being the same"
        by_request.setdefault(row["request"], []).extend(row["emitted"])
    # All but the first token (which prefill emits) come from verify rounds; the last round may overshoot the limit.
    logged = sorted(tuple(tokens[: MAX_TOKENS - 1]) for tokens in by_request.values())
    assert logged == sorted(tuple(c[1:]) for c in completions)


def test_draft_lengths_are_obeyed_per_request_and_change_no_token(attached: TestEngine) -> None:
    set_policy(attached)
    plain = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    take_batches(attached)
    ceilings = [(0, 1, 3, 7, 2, 5)[i % 6] for i in range(NUM_PROMPTS)] if not IS_V2 else [0, 3]
    extra = [{"honed_max_draft_tokens": c, "honed_workload": f"k{c}"} for c in ceilings]
    cut = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS, extra=extra)
    assert cut == plain
    longest: dict[str, int] = {}
    for row in rounds(take_batches(attached)):
        longest[row["workload"]] = max(longest.get(row["workload"], 0), row["k"])
    assert longest == {f"k{c}": c for c in ceilings}


def test_a_static_policy_sets_every_round(attached: TestEngine) -> None:
    set_policy(attached, static_k=2)
    attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    assert {r["k"] for r in rounds(take_batches(attached))} <= {1, 2}  # 1: fewer tokens were left to generate
    set_policy(attached, static_k=0)
    before = attached.counters()
    attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    assert {r["k"] for r in rounds(take_batches(attached))} == {0}
    assert attached.counters() == before
    set_policy(attached)


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


@pytest.mark.skipif(not IS_V2, reason="V1's are held against our own drafter, in test_drafter_equals_vllm.py")
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
    if not IS_V2:
        pytest.skip("only V2 trims drafts on the device")
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification as theirs

    runner = worker_of(attached).model_runner
    monkeypatch.setattr(theirs, "_assign_draft_token_budget_compiled", theirs._assign_draft_token_budget)
    manager = theirs.AdaptiveVerificationManager(runner.req_states, runner.input_buffers.query_start_loc, 1, 1024)
    manager.set_cost_curves([(1, 0.1), (8, 0.1)], [(1, 1.0), (64, 4.0)])
    runner.speculator.draft_token_confidence_probs.copy_(torch.tensor([1.0, 0.5, 0.9, 0.3])[:, None])
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
        assert graded[number].item() == pytest.approx(reached, rel=0.01)  # a little is forgotten
        assert accepted[number].item() == pytest.approx(sum(row["accepted"] for row in mine), rel=0.01)
    assert trimming.cost_tables[1][64] == pytest.approx(9.0)
    fed.turn(False)
    assert trimming.cost_tables is measured


@pytest.mark.skipif(not IS_V2, reason="V1's graphs are not looked at")
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


def test_captured_features_are_the_targets(attached: TestEngine, tmp_path: Path) -> None:
    """Every row equals fc + hidden_norm over a full-precision forward of the target, and only at the right layer."""
    from honed.recalib.checkpoint import load_drafter
    from honed.recalib.ring_reader import RingReader

    set_policy(attached)
    attached.rpc("honed_capture", 1.0, "v-test")
    completions = attached.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS)
    # On CUDA rows are committed a step late.
    attached.generate(prompts()[:1], temperature=0.0, max_tokens=1, extra=[{"honed_capture": 0}])
    attached.rpc("honed_capture", 0.0, "v-test")
    records = RingReader(attached.honed._settings.ring_path).poll(100_000).records
    tokenizer = attached.llm.get_tokenizer()
    drafter = load_drafter(DRAFTER, TARGET)
    layer_ids = drafter.config.target_layer_ids
    num_matched = 0
    for prompt, completion in zip(prompts(), completions, strict=True):
        ids = tokenizer(prompt).input_ids + completion
        hidden = hidden_states(ids)
        expected, shifted = (drafter.fuse(torch.cat([hidden[i + 1 + by] for i in layer_ids], dim=-1)) for by in (0, -1))
        rows = rows_of(records, ids)
        # What the last round emitted was never an input: at most a whole block has no rows.
        assert len(rows) >= len(ids) - K - 1, "committed rows are missing"
        for position, feature in rows.items():
            row = torch.tensor(feature)
            assert torch.allclose(row, expected[position], atol=2e-3, rtol=2e-3), f"row {position} is misaligned"
            assert not torch.allclose(row, shifted[position], atol=5e-2), "the neighbouring layer would have passed too"
            num_matched += 1
    assert num_matched > 50 if not IS_V2 else num_matched > 20


def hidden_states(ids: list[int]) -> list[torch.Tensor]:
    """The target's hidden states [T, H] from transformers in float32: what goes into layer 0, then each layer's output.

    Read by hooks: `output_hidden_states` gives the last layer's after the final norm.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32, local_files_only=True)
    found: list[torch.Tensor] = []
    layers = model.model.layers
    layers[0].register_forward_pre_hook(lambda _, args: found.append(args[0][0]))
    for layer in layers:
        layer.register_forward_hook(lambda _, __, out: found.append((out[0] if isinstance(out, tuple) else out)[0]))
    with torch.no_grad():
        model(torch.tensor([ids]))
    return found


def rows_of(records: list[Any], ids: list[int]) -> dict[int, np.ndarray[Any, Any]]:
    """Captured rows by position, of the one request whose tokens these are."""
    requests: dict[str, dict[int, tuple[int, Any]]] = {}
    for record in records:
        if getattr(record, "token_ids", None) is None:
            continue
        for i, token in enumerate(record.token_ids):
            requests.setdefault(record.request, {})[record.first_position + i] = (int(token), record.features[i])
    for rows in requests.values():
        # A request's last round may have accepted more than the request had room for.
        within = {position: row for position, row in rows.items() if position < len(ids)}
        if len(within) > 8 and all(ids[position] == token for position, (token, _) in within.items()):
            return {position: feature for position, (_, feature) in within.items()}
    raise AssertionError("no captured request has these tokens: token ids and positions don't belong together")


def test_a_request_can_opt_out_of_capture(attached: TestEngine) -> None:
    attached.rpc("honed_capture", 1.0, "v-test")
    before = attached.rpc("honed_capture", 1.0, "v-test")["rows"]
    attached.generate(prompts(), temperature=0.0, max_tokens=4, extra=[{"honed_capture": 0}] * NUM_PROMPTS)
    assert attached.rpc("honed_capture", 0.0, "v-test") == {"rows": before} | {
        k: v for k, v in attached.rpc("honed_capture", 0.0, "v-test").items() if k != "rows"
    }
