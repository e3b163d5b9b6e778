"""What is logged as delivered is what requests got, whatever a round sampled past their end; the same on every runner.

`pytest -k A3` chooses these; HONED_TEST_RUNNER chooses V1 or V2, see engine.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.engine import IS_ASYNC, IS_SLOW, K, TestEngine, held_out
from tests.e2e.logged import counted, rounds, set_policy, take_batches

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


def test_A3_sixteen_requests_of_two_tokens_deliver_sixteen_tokens(attached: TestEngine) -> None:
    set_policy(attached, kind="off")  # vLLM drafts past the end, and counts what it accepts there
    completions, rows = logged(attached, prompts(NUM_REQUESTS), max_tokens=2, ignore_eos=True)
    assert [len(one) for one in completions] == [2] * NUM_REQUESTS
    assert sum(row["delivered"] for row in rows) == NUM_REQUESTS
    assert sum(row["num_emitted"] for row in rows) > NUM_REQUESTS, "nothing was accepted past the end: this test shows nothing"


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


@pytest.mark.parametrize("way", ["max_tokens", "max_model_len"])
@pytest.mark.parametrize("policy", [{"static_k": K}, {"kind": "goodput", "static_k": K}, {"kind": "table", "static_k": K}])
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
            assert all(k <= max(most, 0) for k, most in drafts), drafts
            assert sum(k for k, _ in drafts) > 0
        elif way == "max_tokens":
            assert any(k > max(most, 0) for k, most in drafts), "vLLM stops by itself: this test shows nothing"
    assert answers[0] == answers[1], "no token changes"
    assert sum(row["num_emitted"] for row in rows) == sum(row["delivered"] for row in rows) or IS_ASYNC


def test_A3_a_request_of_two_tokens_drafts_nothing(attached: TestEngine) -> None:
    set_policy(attached, static_k=K)
    _, rows = logged(attached, prompts(NUM_REQUESTS), max_tokens=2, ignore_eos=True)
    assert [(row["k"], row["num_emitted"]) for row in rows] == [(0, 1)] * NUM_REQUESTS
