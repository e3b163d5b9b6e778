"""Steps become columns, nothing of a step gets lost on the way, and positions follow from what came out."""

from __future__ import annotations

import pytest

from honed.attach.events.batch_builder import BatchBuilder
from honed.attach.events.outbox import Losses
from honed.attach.events.step_log import Over, Step
from tests.attach.step_cases import a_step, started


def builder(*steps: Step, requests: str = "rs") -> BatchBuilder:
    made = BatchBuilder()
    for name, workload in zip(requests, "abcdef", strict=False):
        made.note(started(name, workload))
    for step in steps:
        made.add(step)
    return made


def test_columns_have_one_entry_a_step_and_a_round() -> None:
    first = a_step(1, [("r", 3, 2), ("s", 1, 0)], has_token_ids=True)
    second = a_step(2, [("r", 3, 2)])
    workloads, steps, rounds = builder(first, second).take()[1:4]
    assert workloads == ["a", "b"]
    assert steps.step == [1, 2]
    assert (steps.num_requests, steps.num_tokens) == ([2, 1], [6, 4])
    assert (steps.num_draft_tokens, steps.num_prefill_tokens) == ([4, 3], [0, 0])
    assert rounds.step == [1, 1, 2]
    assert rounds.workload == [0, 1, 0]
    assert rounds.request == [ord("r"), ord("s"), ord("r")]
    assert rounds.temperature == [0.5, 0.5, 0.5]
    assert rounds.num_emitted == [3, 1, 3]
    assert rounds.emitted == [100, 101, 7, 7]
    assert rounds.draft == [100, 101, 102, 100]
    assert all(len(getattr(steps, f)) == 2 for f in steps.__struct_fields__)


@pytest.mark.fault("tokens past a request's end that counted as gain")
def test_tokens_past_a_requests_end_were_emitted_but_not_delivered() -> None:
    whole, ending = a_step(1, [("r", 3, 2), ("s", 3, 3)]), a_step(2, [("r", 3, 2), ("s", 3, 0)])
    ending.sampled[0][1:] = []  # as vLLM cuts it: r ends with the first of its three tokens
    for has_token_ids in (False, True):
        steps = [step._replace(emitted=[[100, 101, 7], [7]] if has_token_ids else None) for step in (whole, ending)]
        rounds = builder(*steps[1:]).take().rounds
        assert (rounds.num_accepted_tokens, rounds.num_emitted, rounds.num_delivered) == ([2, 0], [3, 1], [1, 1])
    assert builder(whole).take().rounds.num_delivered == [], "nothing was cut: not worth a column"


def test_positions_follow_from_what_came_out() -> None:
    prompt = a_step(1, [], plain={"r": 40}, silent="r")  # the first half of it
    last = a_step(2, [], plain={"r": 2})  # the other half, and the first token
    made = builder(prompt, last, a_step(3, [("r", 3, 2)]), a_step(4, [], plain={"r": 1}), a_step(5, [("r", 2, 0)]))
    _, _, steps, rounds, _ = made.take()
    assert steps.context_tokens == [40, 40, 41, 44, 45]
    assert rounds.step == [3, 4, 5]
    assert rounds.position == [40, 43, 44]
    assert rounds.num_draft_tokens == [3, 0, 2]


def test_a_prompt_of_one_token_is_no_decode_step() -> None:
    made = BatchBuilder()
    made.note(started("r", prompt=1))
    made.add(a_step(1, [], plain={"r": 1}))
    made.add(a_step(2, [], plain={"r": 1}))
    _, _, steps, rounds, _ = made.take()
    assert (rounds.step, rounds.position) == ([2], [1])
    assert steps.num_prefill_tokens == [1, 0]


def test_a_request_whose_output_was_thrown_away_has_no_round_and_stays_where_it_is() -> None:
    unverified = a_step(1, [("r", 3, 2)])._replace(verified=[])  # scheduled with drafts, and not counted by vLLM
    rounds = builder(unverified, a_step(2)).take()[3]
    assert (rounds.step, rounds.position) == ([2], [39])


def test_a_session_that_gets_more_input_goes_on_from_there() -> None:
    made = builder(a_step(1))
    made.note(started("r", "a", prompt=52))
    made.add(a_step(2, [], plain={"r": 10}))
    made.add(a_step(3))
    assert made.take().rounds.position == [39, 52]


def test_rounds_of_unknown_requests_are_counted_as_lost() -> None:
    made = builder(a_step(1, [("r", 3, 2), ("x", 4, 1)], plain={"y": 1}))
    assert made.lost == Losses(rounds=1, draft_tokens=4, accepted_tokens=1)
    made.note(Over("r"))
    made.add(a_step(2))
    assert made.lost == Losses(rounds=2, draft_tokens=7, accepted_tokens=3)
    batch = made.take()
    assert batch.rounds.request == [ord("r")]
    assert batch.holds == Losses(rounds=1, draft_tokens=3, accepted_tokens=2)


def test_one_batch_has_one_drafter_version_and_a_builder_starts_anew() -> None:
    made = builder()
    for number in (1, 2):
        assert made.fits(a_step(number, version="v1"))
        made.add(a_step(number, version="v1"))
    assert not made.fits(a_step(3, version="v2"))
    batch = made.take()
    assert (batch.drafter_version, batch.steps.step) == ("v1", [1, 2])
    assert made.num_steps == 0
    assert made.fits(a_step(3, version="v2"))
    made.add(a_step(3, [("s", 1, 1)], version="v2"))
    batch = made.take()
    assert (batch.workloads, batch.steps.step, batch.rounds.workload) == (["b"], [3], [0])


def test_all_rounds_of_a_batch_have_token_ids_or_none_has() -> None:
    made = builder()
    without, having = a_step(1, [("r", 3, 2)]), a_step(2, [("r", 3, 2)], has_token_ids=True)
    assert made.fits(having)
    made.add(without)
    assert made.fits(without)
    assert not made.fits(having)
    made.take()
    made.add(having)
    assert made.fits(having)
    assert not made.fits(without)


def test_a_batch_is_bounded_but_a_big_step_still_goes() -> None:
    names = [f"q{i}" for i in range(BatchBuilder.MAX_ROUNDS + 1)]
    made = BatchBuilder()
    for name in names:
        made.note(started(name))
    big = a_step(1, [(name, 1, 0) for name in names])
    assert made.fits(big)
    made.add(big)
    assert made.is_full
    assert not made.fits(a_step(2))
    made.take()
    for number in range(BatchBuilder.MAX_STEPS):
        made.add(a_step(number, []))
    assert made.is_full
    assert not made.fits(a_step(2))


def test_what_a_batch_holds_is_counted_as_vllm_counts() -> None:
    struck_out = a_step(1, [("r", 3, 2), ("s", 3, 1)], plain={}, invalid={"s": 2})
    batch = builder(struck_out, a_step(2, [("s", 3, 1)], invalid={"s": 2})).take()
    assert batch.holds == Losses(rounds=3, draft_tokens=5, accepted_tokens=4)
    assert batch.rounds.num_invalid_tokens == [0, 2, 2]
    assert batch.rounds.num_trimmed_tokens == []


def test_what_the_device_trimmed_was_drafted_but_neither_verified_nor_computed() -> None:
    trimmed = a_step(1, [("r", 5, 2), ("s", 5, 0), ("t", 4, 1)], num_verified=[2, 0, 4], invalid={"s": 2, "t": 1})
    whole = a_step(2, [("r", 3, 3)])
    made = builder()
    made.note(started("t"))
    made.add(trimmed)
    made.add(whole)
    batch = made.take()
    assert batch.holds == Losses(rounds=4, draft_tokens=5 + 3 + 3 + 3, accepted_tokens=6)  # vLLM counts them as drafted
    assert batch.rounds.num_trimmed_tokens == [3, 3, 0, 0]
    assert batch.rounds.num_draft_tokens == [5, 5, 4, 3]
    assert batch.steps.num_draft_tokens == [14 - 6, 3]
    assert batch.steps.num_tokens == [17 - 6, 4]
    assert batch.steps.num_prefill_tokens == [0, 0]


def test_struck_drafts_are_logged_behind_the_verified_ones() -> None:
    struck = {"r": 2, "s": 3, "t": 1, "u": 2}
    step = a_step(
        1,
        [("r", 3, 3), ("t", 4, 0), ("u", 3, 0)],
        plain={"s": 1},
        invalid={"u": 2},
        struck=struck,
        padded=["u"],
        num_verified=[3, 2, 3, 0],
    )
    made = builder(a_step(0, [("s", 1, 0)]))
    made.note(started("t"))
    made.note(started("u"))
    made.take()
    made.add(step)
    batch = made.take()
    assert batch.rounds.num_draft_tokens == [3, 4, 3, 0]
    assert batch.rounds.num_struck_tokens == [2, 0, 0, 3]  # nothing is tried behind a trimmed draft, and padding tells nothing
    assert batch.holds == Losses(rounds=3, draft_tokens=3 + 4 + 1, accepted_tokens=3)


@pytest.mark.fault("requests that left counted as prefill")
def test_requests_that_left_while_a_step_was_under_way_compute_no_prompt() -> None:
    made = builder(a_step(1, [("r", 3, 2)]))
    made.note(started("stale"))
    made.take()
    left = {"aborted": 4, "finished": 1, "stale": 1, "in its prompt": 20}  # tokens
    step = a_step(2, [("r", 3, 2)], plain=left, silent=list(left))
    drafts = dict(step.drafts) | {"aborted": [1, 2, 3]}
    row_of = {name: row for name, row in step.row_of.items() if name != "stale"}  # its tokens are dropped
    made.add(step._replace(drafts=drafts, row_of=row_of))
    batch = made.take()
    assert batch.steps.num_prefill_tokens == [20]
    assert (batch.steps.num_tokens, batch.steps.num_draft_tokens, batch.steps.num_requests) == ([4 + 26], [6], [5])
    assert batch.rounds.num_draft_tokens == [3]


def test_padding_is_computed_and_says_nothing_of_the_drafter() -> None:
    """vLLM counts it as drafted and rejected: it is logged as drafts that were left unverified."""
    batch = builder(a_step(1, [("r", 7, 0), ("s", 7, 1)], padded=["r"])).take()
    assert batch.holds == Losses(rounds=2, draft_tokens=14, accepted_tokens=1)
    assert batch.rounds.num_draft_tokens == [7, 7]
    assert batch.rounds.num_trimmed_tokens == [7, 0]
    assert (batch.steps.num_tokens, batch.steps.num_draft_tokens) == ([16], [14])
