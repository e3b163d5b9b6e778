"""The log's delivered tokens are those that requests got. Tokens past a request's end don't count, on any runner.

`pytest -k A3` and `-k A4` choose the two faults; HONED_TEST_RUNNER chooses V1 or V2, see engine.py.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest

from honed.adapt.protocol.step_page import NUM_BYTES, rows_after
from tests.e2e.engine import ARE_DRAFTS_KNOWN, IS_ASYNC, IS_SLOW, RUNNER, K, TestEngine, held_out
from tests.e2e.logged import counted, keys_of, rounds, set_policy, take_batches

pytestmark = [pytest.mark.e2e, pytest.mark.runners]
NUM_REQUESTS = 16
MAX_TOKENS = 10 if IS_SLOW else 40


def prompts(number: int) -> list[str]:
    return held_out(number, 60 if IS_SLOW else 200)


def logged(running: TestEngine, asked: list[Any], **params: Any) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Completions, and the rounds logged meanwhile, which are those that vLLM counted."""
    take_batches(running)
    before = running.counters()
    completions = running.generate(asked, temperature=0.0, **params)
    rows = rounds(take_batches(running))
    after = running.counters()
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    assert sum(row["delivered"] for row in rows) == sum(len(one) - 1 for one in completions), "a prompt gives the first token"
    assert all(row["num_emitted"] == row["accepted"] + 1 for row in rows)
    return completions, rows


@pytest.mark.fault("tokens past a request's end that counted as gain")
def test_A3_sixteen_requests_of_two_tokens_deliver_sixteen_tokens(attached: TestEngine) -> None:
    set_policy(attached, kind="off")  # vLLM drafts past the end, and counts what it accepts there
    completions, rows = logged(attached, prompts(NUM_REQUESTS), max_tokens=2, ignore_eos=True)
    assert [len(one) for one in completions] == [2] * NUM_REQUESTS
    assert sum(row["delivered"] for row in rows) == NUM_REQUESTS
    assert sum(row["num_emitted"] for row in rows) > NUM_REQUESTS, "nothing was accepted past the end: this test shows nothing"


@pytest.mark.fault("tokens past a request's end that counted as gain")
def test_A3_tokens_past_a_stop_token_are_not_delivered(attached: TestEngine) -> None:
    set_policy(attached, kind="off")
    asked = prompts(2)
    whole, rows = logged(attached, asked, max_tokens=MAX_TOKENS, ignore_eos=True)
    # A token that was accepted within a round, and wasn't said before.
    inner = [row["emitted"][i] for row in rows for i in range(row["delivered"] - 1)]
    stops = [token for token in inner if any(token in one and one.index(token) > 1 for one in whole)]
    assert stops, "no draft was accepted: this test shows nothing"
    for stop in dict.fromkeys(stops):
        completions, rows = logged(attached, asked, max_tokens=MAX_TOKENS, stop_token_ids=[stop], ignore_eos=True)
        assert completions == [one[: one.index(stop) + 1] if stop in one else one for one in whole]
        if sum(row["num_emitted"] - row["delivered"] for row in rows):
            break
    else:
        pytest.fail("no round went past a stop token: this test shows nothing")


def most_drafts(rows: list[dict[str, Any]], ends: dict[int, int]) -> list[tuple[int, int]]:
    """Each round's drafts, and the most that its request could take as far as known when the round was scheduled."""
    found, last = [], {}
    for row in rows:
        # A round is at its last known token. Where steps are scheduled ahead, the tokens of the round before
        # aren't known yet, but for the one that is sure.
        known = last.get(row["request"], row["position"]) + 1 if IS_ASYNC else row["position"] + 1
        last[row["request"]] = row["position"] + 1
        found.append((row["k"], ends[row["request"]] - known - 1))
    return found


@pytest.mark.fault("drafts past what a request can take")
@pytest.mark.parametrize("way", ["max_tokens", "max_model_len"])
@pytest.mark.parametrize(
    "policy",
    [
        {"static_k": K},
        {"kind": "goodput", "static_k": K},
        {"kind": "table", "static_k": K},
        {"kind": "goodput", "static_k": K, "equal_lengths": True, "captured_lengths": [K], "equal_up_to": 0},
    ],
)
def test_A3_nothing_is_drafted_past_what_a_request_can_take(attached: TestEngine, way: str, policy: dict[str, Any]) -> None:
    longest = attached.scheduler.max_model_len
    ids = attached.llm.get_tokenizer()(held_out(2, 4000)[0]).input_ids
    sizes = [longest - n for n in (2, 3, 6, 9)] if way == "max_model_len" else [20] * 6
    asked = [{"prompt_token_ids": (ids * (longest // len(ids) + 1))[:size]} for size in sizes]
    answers = []
    for fields in ({"kind": "off"}, policy):
        set_policy(attached, **fields)
        params = {"max_tokens": 50 if way == "max_model_len" else 6, "ignore_eos": True}
        completions, rows = logged(attached, asked, **params)
        answers.append(completions)
        keys = {row["request"]: row["position"] for row in reversed(rows)}
        ends = {key: longest if way == "max_model_len" else sizes[0] + 6 for key in keys}
        drafts = most_drafts(rows, ends)
        if fields is policy:
            assert [one for one in drafts if one[0] > max(one[1], 0)] == []
            assert sum(k for k, _ in drafts) > 0
        elif way == "max_tokens":
            assert any(k > max(most, 0) for k, most in drafts), "vLLM stops by itself: this test shows nothing"
    assert answers[0] == answers[1], "no token changes"
    assert sum(row["num_emitted"] for row in rows) == sum(row["delivered"] for row in rows) or IS_ASYNC


@pytest.mark.fault("drafts past what a request can take")
def test_A3_a_request_of_two_tokens_drafts_nothing(attached: TestEngine) -> None:
    set_policy(attached, static_k=K)
    _, rows = logged(attached, prompts(NUM_REQUESTS), max_tokens=2, ignore_eos=True)
    assert [(row["k"], row["num_emitted"]) for row in rows] == [(0, 1)] * NUM_REQUESTS


def answered(running: TestEngine, disturb: Callable[[int], None]) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Two requests, step by step with `disturb` before each: completions, and rounds with their requests' numbers."""
    from vllm import SamplingParams

    set_policy(running, static_k=K)
    take_batches(running)
    before, llm_engine, found = running.counters(), running.llm.llm_engine, {}
    for number, prompt in enumerate(prompts(2)):
        # Long enough not to be near its end when it is disturbed: a shorter block is drafted there, with other drafts.
        params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
        llm_engine.add_request(f"request-{number}", prompt, params)
    keys = keys_of(running)
    for step in itertools.count():
        disturb(step)
        found |= {one.request_id: list(one.outputs[0].token_ids) for one in llm_engine.step() if one.finished}
        if not llm_engine.has_unfinished_requests() and not running.core.batch_queue:
            break
    rows = [row | {"number": keys.index(row["request"])} for row in rounds(take_batches(running))]
    after = running.counters()
    assert {name: after[name] - before[name] for name in after} == counted(rows)
    return [found[name] for name in sorted(found)], rows


@pytest.mark.fault("drafts forgotten while a request sat out a step")
@pytest.mark.parametrize("way", ["sits out a step", "is preempted", "an empty step"])
def test_A4_only_the_drafters_own_drafts_teach_once_a_request(
    attached: TestEngine, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler, decider, learned = attached.scheduler, attached.honed._decider, []
    observe = decider.observe
    monkeypatch.setattr(decider, "observe", lambda *args: learned.extend(args[0]) or observe(*args))
    whole, steps = scheduler.max_num_scheduled_tokens, (4, 7)

    def disturb(step: int) -> None:
        if way == "is preempted" and step in steps:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        elif way == "an empty step" and step in steps:
            attached.empty_step(prompts(2)[0])
        elif way == "sits out a step":  # as if others' prompts took the step's tokens
            monkeypatch.setattr(scheduler, "max_num_scheduled_tokens", 1 + K if step in steps else whole)

    undisturbed, expected = answered(attached, lambda _: None)
    learned.clear()
    completions, rows = answered(attached, disturb)
    assert completions == undisturbed, "no token changes"
    assert len(learned) == len([row for row in rows if row["k"] > row["trimmed"]])
    found: dict[int, dict[str, Any]] = {}
    late, normal = [], {(row["number"], row["position"]): row for row in expected}
    for row in rows:
        before, found[row["number"]] = found.get(row["number"]), row
        if before is not None and row["step"] > before["step"] + 1:
            late.append(row)
        if row["trimmed"] == 0 and (same := normal.get((row["number"], row["position"]))) is not None:
            most = min(row["k"], same["k"])
            assert min(row["accepted"], most) == min(same["accepted"], most), "its drafts weren't the drafter's"
            assert not ARE_DRAFTS_KNOWN or row["draft"][:most] == same["draft"][:most]
    assert late, "no request missed a step: this test shows nothing"
    if RUNNER == "v1-async" and way != "is preempted":  # its worker has only the drafts of the step before
        assert all(row["trimmed"] == row["k"] > 0 == row["accepted"] for row in late)
    else:
        assert all(row["trimmed"] == 0 for row in late)


def test_the_trainers_page_has_each_step_where_a_policy_asks_for_it(attached: TestEngine) -> None:
    def told() -> int:
        rows = rows_after(os.pread(attached.honed._busy._descriptor, NUM_BYTES, 0), 0)
        return rows[-1].number if rows else 0

    before = told()
    for tells_steps in (False, True):
        set_policy(attached, tells_steps=tells_steps)
        take_batches(attached)
        attached.generate(prompts(2), temperature=0.0, max_tokens=8)
        steps = sum(len(batch.steps.step) for batch in take_batches(attached))
        assert told() - before == (steps if tells_steps else 0)
    set_policy(attached)
    assert told() > before
