"""Several ranks, several replicas: two tensor-parallel workers behind one engine, two data-parallel engines behind one server.

All of it is vLLM's own, on its CPU build, which joins workers by shared memory or gloo. `make test-parallel` runs it: some two
minutes on two cores, most of which workers start or wait for each other.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from benchmarks.server import client_load, honed_side, vllm_server
from benchmarks.server.processes import Processes, free_port
from honed.adapt.protocol import wire
from honed.daemon.client.client import AdminClient
from honed.recalib.registry.weights_digest import weights_digests
from tests.e2e import test_runner_contract as contract
from tests.e2e.engine import DRAFTER, IS_V2, TestEngine, engine
from tests.e2e.logged import rounds, set_policy, take_batches
from tests.e2e.swapping import perturbed_drafter, swap
from tests.e2e.test_daemon_faults import wait_for

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not os.environ.get("HONED_TEST_PARALLEL"), reason="takes minutes: make test-parallel"),
    pytest.mark.skipif(IS_V2, reason="written for V1: the interpreter would take hours"),
]
UNBOUND = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
"""vLLM would give each worker cores of its own, which a small machine hasn't got."""
APART = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
"""Tests that have an engine in their own process leave a 0 there."""
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


# --- data parallelism ---------------------------------------------------------------------------------------------------------


def counters_by_engine(server: vllm_server.Server) -> dict[str, dict[str, int]]:
    """vLLM's own counters, by its label `engine`."""
    text = httpx2.get(f"{server.url}/metrics", timeout=10.0, trust_env=False).raise_for_status().text
    found: dict[str, dict[str, int]] = {}
    for name, labels, value in re.findall(r"^vllm:spec_decode_num_(\w+?)_total\{([^}]*)\} (\S+)$", text, re.MULTILINE):
        index = re.search(r'engine="(\d+)"', labels)
        if index is not None and "position=" not in labels:
            found.setdefault(f"engine-{index[1]}", {})[name] = int(float(value))
    return found


def stored_by_engine(client: AdminClient) -> dict[str, dict[str, int]]:
    """What the daemon has stored, as vLLM counts; nothing may have been lost."""
    engines: list[dict[str, Any]] = client.get("/v1/engines")
    assert all(engine["lost_rounds"] == 0 for engine in engines)
    names = {"drafts": "rounds", "draft_tokens": "draft_tokens", "accepted_tokens": "accepted_tokens"}
    return {engine["engine_id"]: {name: engine[field] for name, field in names.items()} for engine in engines}


def test_two_replicas_are_two_engines_of_one_daemon(tmp_path: Path) -> None:
    from honed.recalib.registry.registry import Registry

    runtime_dir, state_dir, config = tmp_path / "run", tmp_path / "state", tmp_path / "honed.toml"
    config.write_text(
        f'[paths]\nruntime_dir = "{runtime_dir}"\nstate_dir = "{state_dir}"\n'
        f'[http]\nmetrics_listen = "127.0.0.1:{free_port()}"\n[recalibration]\nautomatic = false\n'
    )
    prompts = client_load.read_prompts(vllm_server.ROOT / "benchmarks" / "tiny" / "prompts_a.jsonl", 12)
    with Processes(tmp_path / "logs") as processes, AdminClient(runtime_dir / "admin.sock") as client:
        daemon, environment = honed_side.start_daemon(processes, config, client)
        args = honed_side.vllm_args(environment)
        flags = [*args["flags"], "--data-parallel-size", "2"]
        server = vllm_server.start(processes, "vllm", extra=flags, environment=args["environment"] | UNBOUND | APART)
        vllm_server.wait(server)

        def engines() -> dict[str, dict[str, Any]]:
            return {engine["engine_id"]: engine for engine in client.get("/v1/engines") if engine["connected"]}

        server.child.wait_until(lambda: set(engines()) == {"engine-0", "engine-1"}, 30.0, "two engines in the daemon")
        assert len({engine["boot_id"] for engine in engines().values()}) == 2

        def play() -> client_load.Played:
            return asyncio.run(
                client_load.play(server.url, prompts, concurrency=8, max_tokens=32, workload="a", ignore_eos=True)
            )

        def assert_conserved() -> None:
            asyncio.run(vllm_server.settled(server))
            counted_by_vllm, deadline_s = counters_by_engine(server), time.monotonic() + 15
            while stored_by_engine(client) != counted_by_vllm and time.monotonic() < deadline_s:
                time.sleep(0.25)
            assert stored_by_engine(client) == counted_by_vllm
            assert min(counts["drafts"] for counts in counted_by_vllm.values()) > 20, "one replica had nothing to do"

        before = play()
        assert before.num_failed == 0
        assert_conserved()
        assert all(engine["policy"]["generation"] > 0 for engine in engines().values())

        registry = Registry(state_dir / "registry")
        other = perturbed_drafter(tmp_path / "other")
        target = str(vllm_server.ROOT / vllm_server.TARGET)
        version = registry.import_checkpoint(other, target_path=target, note="test").version
        operation = client.post(f"/v1/drafters/{version}:promote", {"reason": "test", "force": True})
        done = wait_for(client, operation["operation_id"])
        assert done["state"] == "succeeded", done
        assert {engine["drafter_version"] for engine in engines().values()} == {version}
        logged = [json.loads(line) for line in daemon.log.read_text().splitlines() if "engine swapped" in line]
        assert {(line["engine_id"], line["version"]) for line in logged} >= {("engine-0", version), ("engine-1", version)}
        for engine_id in engines():  # each engine's live weights are the registry's
            asked = client.post(f"/v1/engines/{engine_id}:verify")
            verified = wait_for(client, asked["operation_id"])
            assert verified["state"] == "succeeded", verified

        after = play()
        assert not client_load.differing(before.replies, after.replies), "a swap changed greedy output"
        assert_conserved()


# --- tensor parallelism -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def unbound() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in UNBOUND.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def two_ranks(unbound: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestEngine]:
    with engine(tmp_path_factory.mktemp("run"), **TWO_RANKS) as running:
        running.honed._recorder.is_logging_token_ids = True
        take_batches(running)
        set_policy(running)
        yield running


def of_each_rank(running: TestEngine, method: str, *args: Any) -> list[Any]:
    answers: list[Any] = running.core.model_executor.collective_rpc(method, args=args)
    assert len(answers) == 2
    return answers


def drafts_of(running: TestEngine) -> list[tuple[int, list[int]]]:
    """Every block that was verified for some prompts, and where."""
    take_batches(running)
    running.generate(contract.prompts(), temperature=0.0, max_tokens=contract.MAX_TOKENS)
    found = sorted((row["position"], row["draft"]) for row in rounds(take_batches(running)))
    assert len(found) > 20
    return found


def test_two_ranks_can_do_all_that_one_can(two_ranks: TestEngine) -> None:
    hello = two_ranks.honed._hello()
    assert set(hello.capabilities) == {"events", "draft_length", "capture", "swap"}
    assert hello.limits == []


def test_every_round_is_logged_once_and_draft_lengths_change_no_token(two_ranks: TestEngine) -> None:
    contract.test_logged_events_equal_vllms_counters(two_ranks)
    contract.test_draft_lengths_are_obeyed_per_request_and_change_no_token(two_ranks)
    contract.test_a_static_policy_sets_every_round(two_ranks)


def test_one_rank_captures_and_its_rows_are_the_targets(two_ranks: TestEngine, tmp_path: Path) -> None:
    contract.test_captured_features_are_the_targets(two_ranks, tmp_path, contract.K)
    captured = of_each_rank(two_ranks, "honed_capture", 0.0, "v-test")
    assert captured[0]["rows"] > 0
    assert captured[0]["errors"] == 0
    assert captured[1] == {}


def test_a_bad_checkpoint_is_refused_before_any_rank_touches_a_weight(two_ranks: TestEngine, tmp_path: Path) -> None:
    """Shapes are those of the whole tensors: what a rank could still cut its part from is refused, too."""
    from safetensors.torch import load_file, save_file

    before = two_ranks.checksums()
    folder = perturbed_drafter(tmp_path / "wide")
    tensors = load_file(folder / "model.safetensors")
    name = "layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].repeat(2, 1)}, folder / "model.safetensors")
    result = swap(two_ranks, "wide", folder)
    assert not result.ok
    assert name in result.error
    assert two_ranks.checksums() == before


def test_a_swap_under_way_is_at_the_same_step_on_both_ranks(two_ranks: TestEngine, tmp_path: Path) -> None:
    other = perturbed_drafter(tmp_path / "other")
    plain = two_ranks.generate(contract.prompts(), temperature=0.0, max_tokens=contract.MAX_TOKENS)
    take_batches(two_ranks)
    result, at_step, answered = swap_while_generating(two_ranks, "other", other)
    assert result.ok, result.error
    assert answered == plain, "a swap changed the output"
    # Both ranks had run as many steps as the scheduler had planned; requests were running before and after.
    assert result.detail["steps"] == f"{at_step} {at_step}"
    # What the last step before it had drafted was verified by the step after it: by the next one, the new drafter's.
    versions = [(step, batch.drafter_version) for batch in take_batches(two_ranks) for step in batch.steps.step]
    assert next(step for step, version in versions if version == "other") == at_step + 2
    assert versions[0][0] < at_step


def swap_while_generating(running: TestEngine, version: str, folder: Path) -> tuple[wire.CommandResult, int, list[list[int]]]:
    """The swap's result, the number of steps planned when it was done, and what the requests under way were answered."""
    from vllm import SamplingParams

    results: list[tuple[wire.CommandResult, int]] = []
    honed, llm_engine = running.honed, running.llm.llm_engine
    honed.commands._report = lambda result: results.append((result, honed._step))
    params = SamplingParams(temperature=0.0, max_tokens=contract.MAX_TOKENS)
    for number, prompt in enumerate(contract.prompts()):
        llm_engine.add_request(f"{number}", prompt, params)
    answers: dict[str, list[int]] = {}
    num_steps = 0
    while llm_engine.has_unfinished_requests():
        num_steps += 1
        if num_steps == 4:
            weights = wire.DrafterWeights(version=version, path=str(folder))
            honed.commands.put(wire.SwapCommand(command_id="1", weights=weights, drops_cache=False))
        for output in llm_engine.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)
    assert results, "the requests were over before the swap: make them longer"
    return *results[0], [answers[str(number)] for number in range(len(contract.prompts()))]


def test_swapped_parts_are_and_draft_as_a_fresh_load(two_ranks: TestEngine, tmp_path: Path) -> None:
    other = perturbed_drafter(tmp_path / "other")
    assert swap(two_ranks, "stock", DRAFTER).ok
    stock, stock_drafts = two_ranks.checksums(), drafts_of(two_ranks)
    assert swap(two_ranks, "other", other).ok
    swapped, swapped_drafts = two_ranks.checksums(), drafts_of(two_ranks)
    # Put together from both ranks' parts, the weights are the file's.
    for sums, folder in ((stock, DRAFTER), (swapped, other)):
        assert len(set(sums)) == 1
        assert sums[0] in weights_digests(folder / "model.safetensors")
    assert swapped != stock
    assert swapped_drafts != stock_drafts

    assert swap(two_ranks, "stock", DRAFTER).ok
    assert drafts_of(two_ranks) == stock_drafts
    with engine(tmp_path / "fresh", drafter=other, **TWO_RANKS) as fresh:
        fresh.honed._recorder.is_logging_token_ids = True
        set_policy(fresh)
        assert fresh.checksums() == swapped
        assert drafts_of(fresh) == swapped_drafts
