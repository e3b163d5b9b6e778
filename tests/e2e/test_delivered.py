"""What is logged as delivered is what requests got, whatever a round sampled past their end; the same on every runner.

`pytest -k A3` and `-k A4` choose the two faults; HONED_TEST_RUNNER chooses V1 or V2, see engine.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.engine import IS_SLOW, TestEngine, held_out
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
