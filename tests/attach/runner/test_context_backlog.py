"""Context rows that nobody reads yet are kept and stored later, as if they had been stored at once."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from honed.attach.runner.context_backlog import MOST_ROWS, PADDING_SLOT_ID, ContextBacklog, latest_only


class Cache:
    """A cache of one number a slot; a row with the padding slot isn't stored, two rows with one slot are an error."""

    def __init__(self) -> None:
        self.rows: dict[int, tuple[float, int]] = {}
        self.num_calls = 0

    def store(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self.num_calls += 1
        used = [slot for slot in slots.tolist() if slot != PADDING_SLOT_ID]
        assert len(used) == len(set(used)), "which of two rows would win is left to the device"
        for state, position, slot in zip(states[:, 0].tolist(), positions.tolist(), slots.tolist(), strict=True):
            if slot != PADDING_SLOT_ID:
                self.rows[slot] = (state, position)


def rows_of(slots: list[int], at: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    count = len(slots)
    states = torch.arange(count, dtype=torch.float32)[:, None] + 1000.0 * at
    return states, torch.arange(count) + at, torch.tensor(slots, dtype=torch.int64)


steps = st.lists(st.lists(st.integers(-1, 40), unique=True, min_size=1, max_size=30), max_size=40)


@given(steps)
def test_stored_late_is_stored_alike(all_slots: list[list[int]]) -> None:
    at_once, late = Cache(), Cache()
    backlog = ContextBacklog(late.store)
    for at, slots in enumerate(all_slots):
        at_once.store(*rows_of(slots, at))
        backlog.add(*rows_of(slots, at))
    backlog.flush()
    assert late.rows == at_once.rows
    assert len(backlog) == 0
    calls = late.num_calls
    backlog.flush()
    assert late.num_calls == calls


def test_many_steps_are_stored_in_one_go() -> None:
    cache = Cache()
    backlog = ContextBacklog(cache.store)
    for at in range(100):
        backlog.add(*rows_of([at], at))
    assert cache.num_calls == 0
    backlog.flush()
    assert cache.num_calls == 1
    assert len(cache.rows) == 100


def test_no_more_than_so_many_rows_are_kept() -> None:
    cache = Cache()
    backlog = ContextBacklog(cache.store)
    for at in range(MOST_ROWS + 1):
        assert len(backlog) <= MOST_ROWS
        backlog.add(*rows_of([at], at))
    assert len(backlog) == 0
    assert len(cache.rows) == MOST_ROWS + 1


def test_a_long_prompt_among_them_is_stored_too() -> None:
    cache = Cache()
    backlog = ContextBacklog(cache.store)
    backlog.add(*rows_of([1, 2, 3], 0))
    backlog.add(*rows_of(list(range(3, 4 * MOST_ROWS)), 1))
    assert len(cache.rows) == 4 * MOST_ROWS - 1
    assert cache.rows[3][0] == 1000.0


def test_of_equal_slots_the_last_stays() -> None:
    assert latest_only(torch.tensor([5, 7, 5, 9, 7, 7])).tolist() == [-1, -1, 5, 9, -1, 7]


def test_where_none_are_to_be_kept_rows_are_stored_at_once() -> None:
    cache = Cache()
    backlog = ContextBacklog(cache.store, most_rows=0)
    for at in range(3):
        backlog.add(*rows_of([at], at))
        assert cache.num_calls == len(cache.rows) == at + 1
    assert len(backlog) == 0
