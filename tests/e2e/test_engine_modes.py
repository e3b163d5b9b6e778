"""However an engine is set up, what is logged is what vLLM counts, positions are true, and no token changes.

On every runner and scheduler (see engine.py), with fewer tokens on V2, which is slow here. ngram is V1's, in a process of its
own, since numba, which it imports, keeps vLLM from starting another engine afterwards. Each way has an engine of its own; what
they all have to answer comes from one without speculation and without honed.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from honed.adapt.lengths.length_policy import Decision
from honed.adapt.protocol.wire import LOST_DRAFTER
from honed.daemon.errors import ConflictError
from honed.daemon.service import Service
from honed.daemon.settings.settings import load
from honed.daemon.views.views import engines
from honed.recalib.samples.ring_reader import RingReader
from tests.e2e.engine import DRAFTER, IS_ASYNC, IS_SLOW, IS_V2, ROOT, K, TestEngine, engine, held_out
from tests.e2e.logged import counted, rounds, set_policy, take_batches
from tests.e2e.swapping import swap, wait_for, wait_until_compiled, wait_until_written, worker_of

pytestmark = [pytest.mark.e2e, pytest.mark.runners]
MAX_TOKENS = 16 if IS_SLOW else 40
SMALL = {"max_model_len": 256, "block_size": 32}
WAYS: dict[str, dict[str, Any]] = {
    "chunked prefill": {"max_num_batched_tokens": 64, "enable_chunked_prefill": True},
    "prefix cache": {"enable_prefix_caching": True},
    "preemption": {"num_gpu_blocks_override": 24 if IS_SLOW and not IS_ASYNC else 26},
}
NGRAM_K = 5
NGRAM: dict[str, dict[str, Any]] = {
    "ngram": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": NGRAM_K, "prompt_lookup_max": 4},
        "enable_prefix_caching": True,
    }
}
IS_NGRAM = os.environ.get("HONED_TEST_WAY") == "ngram"
"""Whether this is the process for it."""
GRAMMAR = "[a-z ,.]{30,200}"


def prompts() -> list[str]:
    """Texts of both domains, the first of which share a beginning."""
    texts = held_out(6, 280)
    return [texts[0], texts[0][:200] + texts[3][:80], *texts[1:]]


def grammar() -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(regex=GRAMMAR)}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[list[int]]]:
    """What the target says, free and under a grammar, without speculation and without honed."""
    with engine(None, speculative_config=None, **SMALL) as plain:
        asked = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
        return {"free": plain.generate(prompts(), **asked), "grammar": plain.generate(prompts(), **asked, **grammar())}


@pytest.mark.parametrize("way", NGRAM if IS_NGRAM else WAYS)
def test_every_way_is_logged_as_vllm_counts_it(way: str, answers: dict[str, list[list[int]]], tmp_path: Path) -> None:
    with engine(tmp_path, **(SMALL | (WAYS | NGRAM)[way])) as running:
        set_policy(running)
        if way != "ngram":
            wait_until_compiled(running)
            running.rpc("honed_capture", 1.0, "stock")
        for _ in range(2):  # the second time the prefix cache is warm
            take_batches(running)
            before, preempted_before = running.counters(), int(metric(running, "vllm:num_preemptions"))
            assert running.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS) == answers["free"]
            rows = rounds(take_batches(running))
            after = running.counters()
            assert {name: after[name] - before[name] for name in after} == counted(rows)
            preempted = int(metric(running, "vllm:num_preemptions"))
            check_positions(running, rows, preempted - preempted_before)
        if way == "preemption":
            assert preempted > preempted_before, "nothing was preempted: this test shows nothing"
        if way == "prefix cache":
            assert metric(running, "vllm:prefix_cache_hits") > 0
        assert sum(r["k"] for r in rows) > 0
        if way == "ngram":
            check_lengths_are_obeyed(running, answers["free"])
            check_padding(running)
        else:
            tokenizer = running.llm.get_tokenizer()
            inputs = [tokenizer(prompt).input_ids for prompt in prompts()]
            check_captured(running, [one + ids for one, ids in zip(inputs, answers["free"], strict=True)])


def test_vllms_own_lengths_by_batch_size_stand_aside_while_honed_decides(
    answers: dict[str, list[list[int]]], tmp_path: Path
) -> None:
    table = [(1, 2, K), (3, 8, 2)]
    speculative = {
        "method": "dflash",
        "model": str(DRAFTER),
        "num_speculative_tokens": K,
        "num_speculative_tokens_per_batch_size": table,
    }
    with engine(tmp_path, speculative_config=speculative, **SMALL) as running:
        longest = []
        for fields in ({"static_k": 5}, {"kind": "off"}, {"static_k": 5}):
            set_policy(running, **fields)
            assert running.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS) == answers["free"]
            batches = take_batches(running)
            full = {
                number
                for batch in batches
                for number, size in zip(batch.steps.step, batch.steps.num_requests, strict=True)
                if size > 4
            }
            # A round verifies what was drafted a step earlier, when the batch was as large or larger.
            longest.append(max(row["k"] for row in rounds(batches) if row["step"] in full))
        assert longest == [5, 2, 5]


def test_what_the_drafter_keeps_is_never_written_over_the_targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter with a sliding window has cache groups of its own, and its blocks share memory with the target's.

    What it keeps while nothing is drafted may belong to blocks that are the target's by the time something is.
    """
    drafter, asked = tmp_path / "drafter", {"temperature": 0.0, "max_tokens": 12 if IS_SLOW else 60}
    shutil.copytree(DRAFTER, drafter)
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"] |= {"use_swa": True, "swa_window_size": 64}
    (drafter / "config.json").write_text(json.dumps(config | {"sliding_window": 64, "use_sliding_window": True}))
    texts = held_out(6 if IS_SLOW else 24, 280)
    with engine(None, speculative_config=None, **SMALL) as plain:
        answers = plain.generate(texts, **asked)
    folder = tmp_path / "run"
    folder.mkdir()
    with engine(folder, drafter=drafter, num_gpu_blocks_override=40, disable_hybrid_kv_cache_manager=False, **SMALL) as running:
        set_policy(running)
        lengths = itertools.chain.from_iterable(itertools.cycle([[3] * 7, [0] * 14]))

        def decide(ids: list[str], *_: Any) -> Decision:
            length = next(lengths)
            return Decision([length] * len(ids), length, "policy")

        monkeypatch.setattr(running.honed._decider, "decide", decide)
        assert len(worker_of(running).model_runner.kv_cache_config.kv_cache_groups) > 1
        for _ in range(1 if IS_SLOW else 2):
            assert running.generate(texts, **asked) == answers
        assert running.honed.errors.count == 0
        assert {0, 3} <= {row["k"] for row in rounds(take_batches(running))}


def metric(running: TestEngine, name: str) -> float:
    return float(sum(m.value for m in running.llm.get_metrics() if m.name == name))


def check_positions(running: TestEngine, rows: list[dict[str, Any]], num_preemptions: int = 0) -> None:
    """Each round stands where the one before it ended; the first where the prompt did.

    A request that was preempted is computed anew as a prompt, which ends with a token that no round has emitted.
    """
    tokenizer = running.llm.get_tokenizer()
    by_request: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        by_request.setdefault(row["request"], []).append(row)
    first = sorted(found[0]["position"] for found in by_request.values())
    expected = sorted(len(tokenizer(prompt).input_ids) for prompt in prompts())
    late = [found - wanted for found, wanted in zip(first, expected, strict=True)]  # preempted before the first round
    assert min(late) >= 0
    pairs = [pair for found in by_request.values() for pair in itertools.pairwise(found)]
    skipped = [other["position"] - one["position"] - one["num_emitted"] for one, other in pairs]
    assert min(skipped) == 0
    assert sum(skipped) + sum(late) <= num_preemptions, "positions are off by more than preemptions explain"


def check_captured(running: TestEngine, texts: list[list[int]]) -> None:
    """Captured rows stand where they say, and a token's features are the same however they came to be computed."""
    wait_until_written(running)
    by_request: dict[str, list[Any]] = {}
    for record in RingReader(running.honed._settings.ring_path).poll(100_000).records:
        if getattr(record, "token_ids", None) is not None:
            by_request.setdefault(record.request, []).append(record)
    assert len(by_request) == 2 * len(texts)
    features: dict[tuple[int, int], Any] = {}
    for records in by_request.values():
        fitting = [number for number, text in enumerate(texts) if all(fits(record, text) for record in records)]
        assert len(fitting) == 1, "a request's rows are in no text, or in too many"
        for record in records:
            for position, row in enumerate(record.features, record.first_position):
                first = features.setdefault((fitting[0], position), row)
                np.testing.assert_allclose(row, first, atol=2e-3, rtol=2e-3)


def fits(record: Any, text: list[int]) -> bool:
    first, tokens = record.first_position, record.token_ids.tolist()
    # A request's last round may have accepted more than the request had room for.
    return text[first : first + len(tokens)] == tokens[: max(len(text) - first, 0)]


def check_lengths_are_obeyed(running: TestEngine, expected: list[list[int]]) -> None:
    ceilings = [i % 4 for i in range(len(prompts()))]
    extra = [{"honed_max_draft_tokens": c, "honed_workload": f"k{c}"} for c in ceilings]
    assert running.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS, extra=extra) == expected
    rows = rounds(take_batches(running))
    assert all(row["k"] <= int(row["workload"][1:]) for row in rows)
    assert {row["k"] for row in rows} >= {0, 1, 2}
    hello = running.honed._hello()
    assert set(hello.capabilities) == {"events", "draft_length"}
    assert any("ngram" in limit for limit in hello.limits)
    assert (hello.method, hello.draft_model, hello.drafter_path) == ("ngram", "", ""), "vLLM names the target"


def check_padding(running: TestEngine) -> None:
    """A request that has but one token left to compute when it comes in is padded to K drafts, of which there are none.

    Where the drafter has a cache as well, as DFlash's has, vLLM takes a hit's last block for computed only by a KV transfer.
    """
    taught: list[tuple[str, int, int]] = []
    observe = running.honed._decider.observe

    def noting(*columns: Any) -> None:
        taught.extend(zip(*columns, strict=True))
        observe(*columns)

    running.honed._decider.observe = noting
    ids = running.llm.get_tokenizer()("".join(held_out(2, 280))).input_ids[: 1 + 2 * SMALL["block_size"]]
    asked = {"temperature": 0.0, "max_tokens": MAX_TOKENS}
    first = running.generate([{"prompt_token_ids": ids}], **asked)
    take_batches(running)
    taught.clear()
    before = running.counters()
    assert running.generate([{"prompt_token_ids": ids}], **asked) == first
    rows, after = rounds(take_batches(running)), running.counters()
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    padded = [row for row in rows if row["trimmed"]]
    assert [(row["k"], row["position"], row["trimmed"]) for row in padded] == [(NGRAM_K, len(ids) - 1, NGRAM_K)]
    assert [(k, accepted) for _, k, accepted in taught] == [(row["k"], row["accepted"]) for row in rows[1:] if row["k"]]


@pytest.mark.skipif(IS_NGRAM or IS_V2 or IS_ASYNC, reason="V1 only, in step, and not in the process that runs it")
def test_ngram_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", __file__, "-k", "every_way"]
    environment = os.environ | {"HONED_TEST_WAY": "ngram"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "1 passed" in done.stdout


def test_grammars_and_requests_that_are_given_up(answers: dict[str, list[list[int]]], tmp_path: Path) -> None:
    from vllm import SamplingParams

    with engine(tmp_path, **SMALL) as running:
        set_policy(running)
        running.honed._recorder.is_logging_token_ids = True
        before = running.counters()
        answered = running.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS, **grammar())
        assert answered == answers["grammar"]
        rows = rounds(take_batches(running))
        after = running.counters()
        assert {name: after[name] - before[name] for name in after} == counted(rows)
        assert answers["grammar"] != answers["free"], "the grammar changes nothing: this test shows nothing"
        assert any(r["struck"] for r in rows), "the grammar strikes nothing: this test shows nothing"
        assert all(r["k"] - r["invalid"] + r["struck"] <= K for r in rows)
        assert all(r["struck"] <= r["invalid"] if IS_ASYNC else not r["invalid"] for r in rows)
        check_positions(running, rows)
        assert all(r["emitted"][: r["accepted"]] == r["draft"][: r["accepted"]] for r in rows)

        llm_engine = running.llm.llm_engine
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
        for number, prompt in enumerate(prompts()):
            llm_engine.add_request(str(number), prompt, params)
        done: dict[int, list[int]] = {}

        def step() -> None:
            finished = [out for out in llm_engine.step() if out.finished]
            done.update({int(out.request_id): list(out.outputs[0].token_ids) for out in finished})

        for _ in range(3):
            step()
        assert len(running.core.batch_queue or ()) == IS_ASYNC  # a step of theirs is under way
        assert not done, "too late: this test shows nothing"
        llm_engine.abort_request(["0", "3"])
        while llm_engine.has_unfinished_requests():
            step()
        assert done == {number: ids for number, ids in enumerate(answers["free"]) if number not in (0, 3)}
        rows = rounds(take_batches(running))
        ended = running.counters()
        assert {name: ended[name] - after[name] for name in after} == counted(rows)
        assert len({row["request"] for row in rows}) == len(prompts())
        check_positions(running, rows)
        assert len(running.honed._requests) == 0
        assert running.honed._publisher._builder._running == {}
        assert running.honed.errors.count == 0


@pytest.mark.fault("a session's later input that moved the rounds of the answer before it")
def test_a_session_that_gets_more_input_while_it_answers(tmp_path: Path) -> None:
    """It gets it once its answer is over. While it waits for its client, the engine is idle."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    with engine(tmp_path, **SMALL) as running:
        set_policy(running)
        ids = running.llm.get_tokenizer().encode(prompts()[0])
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

        def give(tokens: list[int]) -> None:
            running.scheduler.add_request(Request("s", list(tokens), params, None, resumable=True))

        def steps(number: int) -> None:
            for _ in range(number):
                _, is_executed = running.core.step_fn()
                running.core.post_step(is_executed)

        give(ids[:24])
        steps(3)
        session = running.scheduler.requests["s"]
        assert not session.is_finished()
        give(ids[24:30])
        assert len(session.streaming_queue) == 1, "it didn't answer any more: this test shows nothing"
        steps(60)
        assert session.status.name == "WAITING_FOR_STREAMING_REQ"
        assert not running.honed._busy._is_busy
        first = rounds(take_batches(running))
        give(ids[30:36])
        assert running.honed._busy._is_busy
        steps(60)
        rows = first + rounds(take_batches(running))
        drafted = [row for row in rows if row["k"]]
        assert sum(row["num_emitted"] for row in rows) == 3 * 20 - 3, "each answer's first token comes with its prompt"
        positions = [row["position"] for row in rows]
        begins = [0, *(i for i in range(1, len(rows)) if positions[i] != positions[i - 1] + rows[i - 1]["num_emitted"])]
        assert [positions[i] for i in begins] == [24, 24 + 19 + 6, 24 + 19 + 6 + 19 + 6]
        assert any(row["accepted"] < row["k"] for row in drafted)
        assert all(not row["trimmed"] for i, row in enumerate(rows) if i not in begins)
        assert running.honed.errors.count == 0


def test_a_grammar_holds_where_drafting_stops_and_begins(answers: dict[str, list[list[int]]], tmp_path: Path) -> None:
    from vllm import SamplingParams

    with engine(tmp_path, **SMALL) as running:
        params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, **grammar())
        given = completions(running, prompts(), [params] * len(prompts()), itertools.cycle((K, 0, 0, K, K, 0)))
        assert given == answers["grammar"]
        assert running.honed.errors.count == 0


def test_an_override_that_nobody_ends_expires(answers: dict[str, list[list[int]]], tmp_path: Path) -> None:
    with engine(tmp_path, **SMALL) as running:
        for ttl_s, reason in ((1e9, "off"), (0.0, "stale_policy")):
            set_policy(running, kind="off", override="policy", fallback_k=2, ttl_s=ttl_s)
            assert running.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS) == answers["free"]
            batches = take_batches(running)
            assert {name for batch in batches for name in batch.steps.decision} == {reason}
        assert max(max(batch.rounds.num_draft_tokens, default=0) for batch in batches) == 2
        assert running.honed.errors.count == 0


def test_a_budget_for_thinking_ends_the_thinking_of_its_own_request(tmp_path: Path) -> None:
    from vllm import SamplingParams
    from vllm.config.reasoning import ReasoningConfig

    start, end = "<think>", "</think>"
    options = SMALL | {"reasoning_config": ReasoningConfig(reasoning_start_str=start, reasoning_end_str=end)}
    budgets = (None, 5, None, 0)
    asked = [SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, thinking_token_budget=budget) for budget in budgets]
    with engine(None, speculative_config=None, **options) as plain:
        encode = plain.llm.get_tokenizer().encode
        thinking = [{"prompt_token_ids": encode(text) + encode(start, add_special_tokens=False)} for text in prompts()[:4]]
        expected = completions(plain, thinking, asked)
        forced = encode(end, add_special_tokens=False)
    has_ended = [any(ids[i : i + len(forced)] == forced for i in range(len(ids))) for ids in expected]
    assert has_ended == [budget is not None for budget in budgets]
    with engine(tmp_path, **options) as running:
        assert completions(running, thinking, asked, itertools.repeat(0)) == expected
        assert running.honed.errors.count == 0


def completions(
    running: TestEngine, given: list[Any], params: list[Any], lengths: Iterator[int] | None = None
) -> list[list[int]]:
    """Token ids of each prompt's completion, served together; before each step honed is told its draft length."""
    llm_engine, done = running.llm.llm_engine, dict[int, list[int]]()
    for number, (prompt, asked) in enumerate(zip(given, params, strict=True)):
        llm_engine.add_request(str(number), prompt, asked)
    while llm_engine.has_unfinished_requests():
        if lengths is not None:
            set_policy(running, static_k=next(lengths))
        done.update({int(out.request_id): list(out.outputs[0].token_ids) for out in llm_engine.step() if out.finished})
    return [done[number] for number in range(len(given))]


def test_without_a_daemon_nothing_changes_and_one_that_comes_late_gets_every_round(
    answers: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What was kept for it is stored, what there was no room for is counted, and from then on its policy is followed."""
    folder = tmp_path_factory.mktemp("d")  # short: a unix socket's path may have 107 bytes
    with engine(folder, **SMALL) as running:

        def answer() -> None:
            assert running.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS) == answers["free"]

        outbox = running.honed._publisher._outbox
        room, outbox._max_bytes = outbox._max_bytes, 0
        answer()
        wait_for(lambda: outbox.lost.rounds == running.counters()["num_drafts"])
        lost, outbox._max_bytes = outbox.lost, room
        answer()
        status = running.honed._status(0)
        assert (status.fallback, status.errors, status.policy_generation) == ("no_policy", 0, 0)
        assert running.counters()["num_drafts"] > lost.rounds > 0

        service = late_daemon(folder)
        try:
            wait_for(lambda: stored_and_lost(service) == running.counters())
            wait_for(lambda: running.honed._pending_policy is not None or running.honed._policy is not None)
            answer()
            wait_for(lambda: stored_and_lost(service) == running.counters())
            (seen,) = engines(service)
            assert (seen["lost_rounds"], seen["lost_draft_tokens"]) == (lost.rounds, lost.draft_tokens)
            assert seen["missing_batches"] == seen["malformed_batches"] == seen["errors"] == 0
            assert running.honed._policy.generation > 0
        finally:
            service.stop()


@pytest.mark.skipif(IS_NGRAM or IS_V2, reason="V1 only: the same code on both, and ngram has no drafter")
def test_a_drafter_that_vllm_threw_away_in_its_sleep_is_brought_back(
    answers: dict[str, list[list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Level 2: on a GPU the memory is gone, and what comes back is anything. Here the test writes that."""
    folder = tmp_path_factory.mktemp("d")
    service = late_daemon(folder)
    try:
        with engine(folder, **SMALL) as running:

            def seen(name: str) -> Any:
                found = next(iter(engines(service)), {})
                return found.get(name)

            running.core.sleep(1)  # before anything was asked of it
            running.honed._has_news = True
            running.honed.before_schedule()
            assert not running.honed._workers.is_attached, "on a GPU the weights that it looks at aren't there"
            running.core.wake_up()
            assert running.honed._workers.is_attached
            assert running.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS) == answers["free"]
            wait_for(lambda: seen("drafter_version"))
            version, weights = seen("drafter_version"), running.checksum()

            worker = worker_of(running)
            others = {part.data_ptr() for part in worker._honed_side.swapper.live_parts()}
            others |= {one.data_ptr() for one in worker.get_model().parameters()}
            drafter = worker._honed_side.runner.draft_model
            own = [one.data for one in drafter.parameters() if one.numel() and one.data_ptr() not in others]
            assert own, "a parameter that no swap sets"
            for parameter in own:
                parameter.fill_(0.5)
            running.core.sleep(2)
            assert os.pread(running.honed._busy._descriptor, 1, 0) == b"\1", "the trainer keeps off the device, too"
            report = running.honed.commands._report
            refused = swap(running, "other", DRAFTER)
            running.honed.commands._report = report
            assert (refused.ok, refused.detail) == (False, {"asleep": "1"})
            wait_for(lambda: seen("asleep"))
            with service.lock, pytest.raises(ConflictError, match="sleeps"):
                service.checksums.verify(seen("engine_id"), reason="", actor="test")
            assert "sleeps" in service.eligible.why_none(version)
            for _, live, _ in worker_of(running)._honed_side.swapper._live():
                if live.dim() == 1:
                    live.zero_()
            for parameter in own:
                parameter.zero_()
            assert running.checksum() != weights

            running.core.wake_up()
            assert os.pread(running.honed._busy._descriptor, 1, 0) == b"\0"
            wait_for(lambda: seen("drafter_version") == LOST_DRAFTER)

            def is_back() -> bool:
                running.honed.before_schedule()  # an engine in this process has no thread of its own that is idle
                return bool(seen("drafter_version") == version)

            wait_for(is_back)
            assert not seen("asleep")
            assert running.checksum() == weights
            assert all((parameter == 0.5).all() for parameter in own)
            assert running.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS) == answers["free"]
            assert running.honed.errors.count == 0
    finally:
        service.stop()


def late_daemon(runtime_dir: Path) -> Service:
    state_dir = runtime_dir / "state"
    state_dir.mkdir()
    flags = {
        "paths": {"state_dir": state_dir, "runtime_dir": runtime_dir},
        "http": {"metrics_listen": ""},
        "recalibration": {"automatic": False},
    }
    service = Service(load(None, flags, env={}), daemon_id="late")
    service.start()
    return service


def stored_and_lost(service: Service) -> dict[str, int]:
    """What the daemon knows of its one engine, as vLLM counts."""
    seen = next(iter(engines(service)), None)
    names = {"num_drafts": "rounds", "num_draft_tokens": "draft_tokens", "num_accepted_tokens": "accepted_tokens"}
    return {name: int(seen[ours] + seen[f"lost_{ours}"]) for name, ours in names.items()} if seen else {}


@pytest.mark.skipif(IS_NGRAM or IS_V2, reason="V1 only, and not in the process that runs ngram")
def test_an_unknown_vllm_is_only_observed(
    answers: dict[str, list[list[int]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.__version__", "0.99.0")
    with engine(tmp_path, **SMALL) as running:
        set_policy(running, static_k=2)
        before = running.counters()
        assert running.generate(prompts(), temperature=0.0, max_tokens=MAX_TOKENS) == answers["free"]
        batches, after = take_batches(running), running.counters()
        rows = rounds(batches)
        assert {reason for batch in batches for reason in batch.steps.decision} == {"observe"}
        assert {name: after[name] - before[name] for name in after} == counted(rows)
        assert max(row["k"] for row in rows) == K  # the policy's length cut nothing
        hello = running.honed._hello()
        assert hello.capabilities == ["events"]
        assert "vLLM 0.99.0 is outside the range honed was made for" in hello.limits[0]
        assert running.honed._status(0).fallback == "observe_only"
        refused = swap(running, "other", DRAFTER)
        assert "honed is not attached to this worker" in refused.error
        assert running.honed.errors.count == 0
