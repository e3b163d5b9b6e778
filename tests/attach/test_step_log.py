"""Steps become columns, and nothing of a step gets lost on the way."""

from __future__ import annotations

from honed.attach.request_book import Tracked
from honed.attach.step_log import Round, Step, StepLog, to_columns


def a_round(workload: str = "a", k: int = 3, accepted: int = 2, tokens: bool = False) -> Round:
    emitted = [7, 8, 9][: accepted + 1] if tokens else []
    return Round(Tracked(11, workload, 0.5), 40, k, accepted, 0, accepted + 1, emitted, [7, 8, 5][:k] if tokens else [])


def a_step(number: int, version: str = "v1", rounds: list[Round] | None = None) -> Step:
    return Step(number, 1000 * number, 50, 1, 4, 0, 3, 40, 7, "policy", version, rounds if rounds is not None else [a_round()])


def test_columns_have_one_entry_a_step_and_a_round() -> None:
    first = [a_round("a", tokens=True), a_round("b", k=1, accepted=0, tokens=True)]
    steps = [a_step(1, rounds=first), a_step(2, rounds=[a_round("a")])]
    workloads, step_columns, rounds = to_columns(steps)
    assert workloads == ["a", "b"]
    assert step_columns.step == [1, 2]
    assert rounds.step == [1, 1, 2]
    assert rounds.workload == [0, 1, 0]
    assert rounds.request == [11, 11, 11]
    assert rounds.temperature == [0.5, 0.5, 0.5]
    assert rounds.num_emitted == [3, 1, 3]
    assert rounds.emitted == [7, 8, 9, 7]
    assert rounds.draft == [7, 8, 5, 7]
    assert all(len(getattr(step_columns, f)) == 2 for f in step_columns.__struct_fields__)


def test_one_batch_has_one_drafter_version() -> None:
    log = StepLog()
    for number, version in ((1, "v1"), (2, "v1"), (3, "v2")):
        log.append(a_step(number, version))
    assert [s.step for s in log.take()] == [1, 2]
    assert [s.step for s in log.take()] == [3]
    assert log.take() == []


def test_a_batch_is_bounded_but_a_big_step_still_goes() -> None:
    log = StepLog()
    log.append(a_step(1, rounds=[a_round()] * 10))
    log.append(a_step(2, rounds=[a_round()] * 10))
    assert [s.step for s in log.take(max_rounds=4)] == [1]


def test_a_full_log_counts_what_it_refuses() -> None:
    log = StepLog(max_steps=1)
    log.append(a_step(1))
    log.append(a_step(2, rounds=[a_round(k=3, accepted=2), a_round(k=0, accepted=0)]))
    assert (log.lost_rounds, log.lost_draft_tokens, log.lost_accepted_tokens) == (1, 3, 2)
