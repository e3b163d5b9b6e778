from __future__ import annotations

from honed.adapt.protocol import wire
from honed.daemon.control.load_history import HELD_S, MOST_ENGINES, SLOT_S, LoadHistory


def steps(*rows: tuple[int, int]) -> wire.StepColumns:
    """(requests, draft tokens) of each step."""
    return wire.StepColumns(num_requests=[r for r, _ in rows], num_draft_tokens=[d for _, d in rows])


def test_steps_are_summed_by_slot() -> None:
    history = LoadHistory()
    history.add("e", steps((2, 6), (4, 4)), budget=3, now_s=1001.0)
    history.add("e", steps((2, 0)), budget=1, now_s=1004.9)
    history.add("e", steps((1, 7)), budget=7, now_s=1005.0)
    first, second = history.slots("e", 0)
    assert (first.t, first.steps, first.requests, first.draft_tokens, first.budget) == (1000, 3, 8, 10, 3)
    assert (first.requests_per_step, first.draft_tokens_per_request) == (8 / 3, 10 / 8)
    assert (second.t, second.requests_per_step, second.draft_tokens_per_request) == (1005, 1, 7)
    assert history.slots("e", 1001) == [second]
    assert history.slots("nobody", 0) == []


def test_an_hour_is_held_and_a_clock_that_is_set_back_goes_on() -> None:
    history = LoadHistory()
    for second in range(0, 2 * HELD_S, SLOT_S):
        history.add("e", steps((1, 1)), 1, second)
    held = history.slots("e", 0)
    assert (len(held), held[0].t) == (HELD_S // SLOT_S, HELD_S)
    last_s = 2 * HELD_S - SLOT_S
    history.add("e", steps((1, 1)), 1, last_s - SLOT_S)
    assert history.slots("e", last_s)[-1].steps == 2, "a step back within a slot"
    for second in (last_s - 600, last_s - 600 + SLOT_S):
        history.add("e", steps((1, 1)), 1, second)
    later = history.slots("e", last_s - 605)
    assert [(slot.t - last_s, slot.steps) for slot in later] == [(-605, 1), (-600, 2), (-595, 1)]
    history.add("e", steps((1, 1)), 1, 10.0)
    assert [slot.t for slot in history.slots("e", 0)] == [10]


def test_engines_are_bounded() -> None:
    history = LoadHistory()
    for number in range(MOST_ENGINES + 3):
        history.add(f"e{number}", steps((1, 1)), 1, 0.0)
    assert history.slots(f"e{MOST_ENGINES - 1}", 0)
    assert not history.slots(f"e{MOST_ENGINES}", 0)


def test_engines_that_are_gone_make_room() -> None:
    """Sixty-four of earlier names once kept all later ones from being shown until the daemon was started again."""
    history = LoadHistory()
    for number in range(MOST_ENGINES):
        history.add(f"e{number}", steps((1, 1)), 1, float(number > 0) * 10.0)
    history.add("new", steps((1, 1)), 1, HELD_S + 5.0)
    assert history.slots("new", 0)
    assert not history.slots("e0", 0)
    assert history.slots("e1", 0)
