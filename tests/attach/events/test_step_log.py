"""What the engine's thread writes down is handed over in order, or counted as lost."""

from __future__ import annotations

import tracemalloc

from honed.attach.events.outbox import Losses
from honed.attach.events.step_log import Over, Step, StepLog, TreeRound, losses_of
from tests.attach.step_cases import a_step, started


def test_entries_come_out_in_the_order_in_which_things_happened() -> None:
    log = StepLog()
    entries = [started(), a_step(1), Over("r"), a_step(2, [])]
    for entry in entries:
        log.append(entry)
    assert len(log) == 4
    assert [log.take() for _ in entries] == entries
    assert log.take() is None


def test_a_full_log_counts_what_it_refuses() -> None:
    log = StepLog(max_entries=1)
    log.append(a_step(1))
    log.append(a_step(2, [("r", 3, 2)], plain={"s": 1}))
    log.append(Over("r"))
    assert log.lost == Losses(rounds=1, draft_tokens=3, accepted_tokens=2)
    assert log.take() == a_step(1)
    assert log.take() is None


def test_large_steps_fill_a_log_sooner_and_make_room_again() -> None:
    large = a_step(1, [(f"r{i}", 3, 2) for i in range(40)])
    log = StepLog(max_rows=100)
    log.append(large)
    log.append(large)
    log.append(large)
    log.append(Over("r"))
    assert (len(log), log.lost) == (3, Losses(rounds=40, draft_tokens=120, accepted_tokens=80))
    assert log.take() == large
    log.append(large)
    assert [log.take() for _ in range(4)] == [large, Over("r"), large, None]
    assert log.lost.rounds == 40


def test_a_full_log_leaves_the_engine_its_memory() -> None:
    """Also where each round is a tree of 63 nodes whose token ids are logged."""

    def tokens(seed: int, count: int) -> list[int]:
        return [seed * 1000 + i for i in range(count)]  # integers of their own, as vLLM's

    def step() -> Step:
        names = [f"chatcmpl-{i:032x}" for i in range(64)]
        sampled, drafts = [tokens(i, 7) for i in range(64)], {name: tokens(i, 63) for i, name in enumerate(names)}
        return a_step(1, [(name, 63, 6) for name in names])._replace(
            drafts=drafts,
            sampled=sampled,
            row_of={name: i for i, name in enumerate(names)},
            emitted=list(map(list, sampled)),
            trees={name: TreeRound(list(range(6)), 7, 6) for name in names},
        )

    tracemalloc.start()
    try:
        kept = step()
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes / len(kept.scheduled) * StepLog()._max_rows < 400e6


def test_what_is_lost_is_counted_as_vllm_counts() -> None:
    assert losses_of([("r", 3, 2), ("s", 3, 1)], {"s": 2}) == Losses(rounds=2, draft_tokens=4, accepted_tokens=3)
    assert losses_of([], {}) == Losses()
