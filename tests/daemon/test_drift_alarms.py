"""Alarms that stand until a recalibration has answered them."""

from __future__ import annotations

import pytest

from honed.adapt.drift import Alarm
from honed.daemon.drift_alarms import MAX_ATTEMPTS, DriftAlarms, Standing
from honed.daemon.operations import Operation

PAUSE_S = 100.0


def alarm(workload: str, text: str = "it lost") -> Alarm:
    return Alarm("regressed", workload, "v0001-x", (1,), 3.0, 500, 1.2, 1.9, text)


def operation() -> Operation:
    return Operation("op-1", "recalibrate", "running", "collecting", 0.0, "", "honed")


def workloads(found: list[Standing]) -> list[str]:
    return [one.alarm.workload for one in found]


def fail(alarms: DriftAlarms, now_s: float, error: str = "no gain") -> None:
    """A recalibration of b begins and fails."""
    tried = operation()
    alarms.answered_by(tried, "e", ["b"], now_s)
    tried.state, tried.error = "failed", error
    alarms.tick(now_s)


def test_each_workload_has_its_own_alarm_and_the_newest_counts() -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b", "first"))
    alarms.note("e", alarm("c"))
    alarms.note("f", alarm("b"))
    alarms.note("e", alarm("b", "second"))
    assert [(one.engine_id, one.alarm.workload, one.alarm.text) for one in alarms.due(0.0)] == [
        ("e", "c", "it lost"), ("f", "b", "it lost"), ("e", "b", "second"),
    ]  # fmt: skip


def test_a_recalibration_answers_the_workloads_that_it_is_of() -> None:
    alarms = DriftAlarms(PAUSE_S)
    for workload in ("b", "c"):
        alarms.note("e", alarm(workload))
    alarms.note("f", alarm("b"))
    tried = operation()
    alarms.answered_by(tried, "e", ["b"], 0.0)
    assert [(one.engine_id, one.alarm.workload) for one in alarms.due(0.0)] == [("e", "c"), ("f", "b")]
    tried.state = "succeeded"
    alarms.answered_by(operation(), "e", [], 1.0)  # of all of that engine's
    assert [(one.engine_id, one.alarm.workload) for one in alarms.due(1e9)] == [("f", "b")]


def test_what_failed_is_tried_again_after_pauses_that_double_and_not_for_ever() -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    now_s, pauses = 0.0, []
    while alarms.due(1e9):
        fail(alarms, now_s)
        if standing := alarms.due(1e9):
            assert alarms.view(now_s)[0]["hindrance"] == "no gain"
            assert not alarms.due(standing[0].due_s - 0.1)
            pauses.append(alarms.view(now_s)[0]["due_in_s"])
            now_s = standing[0].due_s
    assert pauses == [PAUSE_S * 2**n for n in range(MAX_ATTEMPTS - 1)]
    (given_up,) = alarms.view(now_s)
    assert (given_up["failed_attempts"], given_up["due_in_s"], given_up["hindrance"]) == (MAX_ATTEMPTS, None, "no gain")
    alarms.note("e", alarm("b", "worse still"))
    assert [one.alarm.text for one in alarms.due(now_s)] == ["worse still"]


@pytest.mark.parametrize("is_explained", [False, True])
def test_what_is_found_while_two_versions_take_turns_waits_for_the_end_of_that(is_explained: bool) -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("a"))
    for text in ("first", "second"):
        alarms.hold("e", alarm("b", text))
    assert workloads(alarms.due(1e9)) == ["a"]
    assert [(one["workload"], one["text"]) for one in alarms.view(0.0)] == [("a", "it lost"), ("b", "second")]
    alarms.release(is_explained=is_explained)
    assert workloads(alarms.due(0.0)) == (["a"] if is_explained else ["a", "b"])
    alarms.release(is_explained=False)
    assert len(alarms.view(0.0)) == (1 if is_explained else 2)


def test_a_newer_alarm_is_not_replaced_by_the_one_that_failed() -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    tried = operation()
    alarms.answered_by(tried, "e", ["b"], 0.0)
    alarms.note("e", alarm("b", "worse still"))
    tried.state = "failed"
    alarms.tick(1.0)
    (standing,) = alarms.due(1.0)
    assert (standing.alarm.text, standing.num_failed) == ("worse still", 0)


def test_while_it_is_under_way_it_neither_stands_nor_falls() -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    tried = operation()
    alarms.answered_by(tried, "e", ["b"], 0.0)
    alarms.tick(1e9)
    assert alarms.due(1e9) == []
    tried.state = "failed"
    alarms.tick(1e9)
    assert workloads(alarms.due(2e9)) == ["b"]


def test_what_somebody_cancelled_is_not_tried_again() -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    tried = operation()
    alarms.answered_by(tried, "e", ["b"], 0.0)
    tried.state = "cancelled"
    alarms.tick(0.0)
    assert alarms.due(1e9) == []


def test_a_failure_that_the_next_request_is_the_first_to_see_still_counts() -> None:
    """An operator asks again before the tick: the failed alarms are that request's."""
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    tried, again = operation(), operation()
    alarms.answered_by(tried, "e", ["b"], 0.0)
    tried.state = "failed"
    alarms.answered_by(again, "e", ["b"], 1.0)
    assert alarms.due(1e9) == []
    again.state = "failed"
    alarms.tick(2.0)
    (standing,) = alarms.due(1e9)
    assert (standing.num_failed, standing.due_s) == (2, 2.0 + 2 * PAUSE_S)
