"""Alarms that stand until a recalibration has answered them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from honed.adapt.monitor.drift import Alarm
from honed.daemon.ingest.engines import RETURN_S
from honed.daemon.lifecycle.drift_alarms import MAX_ATTEMPTS, RETIRED_S, DriftAlarms, Standing, error_share
from honed.daemon.store.operations import Operation

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
    alarms.answered_by(tried, ["e"], ["b"], now_s)
    tried.state, tried.error = "failed", error
    alarms.tick(now_s)


def test_each_workload_has_its_own_alarm_and_the_newest_counts() -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b", "first"))
    alarms.note("e", alarm("c"))
    alarms.note("f", alarm("b"))
    alarms.note("e", alarm("b", "second"))
    assert [(one.engine_id, one.alarm.workload, one.alarm.text) for one in alarms.due(0.0)] == [
        ("e", "c", "it lost"),
        ("f", "b", "it lost"),
        ("e", "b", "second"),
    ]


def test_replicas_that_saw_the_same_drift_need_no_recalibration_of_their_own() -> None:
    alarms = DriftAlarms(PAUSE_S)
    for engine_id in ("e", "f"):
        for workload in ("b", "c"):
            alarms.note(engine_id, alarm(workload))
    alarms.note("g", replace(alarm("b"), drafter_version="v0002-y"))
    alarms.hold("h", alarm("b"))
    answer = replace(operation(), detail={"parent": "v0001-x", "workloads": ["b"]})
    alarms.answered_by(answer, ["e"], ["b"], 0.0)
    answer.state = "succeeded"
    alarms.tick(1.0)
    alarms.release(is_explained=False)
    assert sorted((one.engine_id, one.alarm.workload) for one in alarms.due(1.0)) == [("e", "c"), ("f", "c"), ("g", "b")]


def test_replicas_whose_samples_are_used_are_answered_together() -> None:
    alarms = DriftAlarms(PAUSE_S)
    for engine_id, since_s in (("e", 300.0), ("f", 200.0), ("g", 100.0)):
        alarms.note(engine_id, replace(alarm("b"), since_s=since_s))
    assert alarms.since_s(["e", "f"], ["b"]) == 200.0
    answer = operation()
    alarms.answered_by(answer, ["e", "f"], ["b"], 0.0)
    assert [one.engine_id for one in alarms.due(1.0)] == ["g"]
    answer.state = "failed"
    alarms.tick(1.0)
    assert sorted(one.engine_id for one in alarms.due(1.0 + PAUSE_S)) == ["e", "f", "g"]


def test_replicas_together_spend_one_error() -> None:
    """An attempt that answers several alarms has the part of the one that has spent most."""
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    judged = replace(operation(), detail={"gate": [{"workload": "b"}]})
    alarms.answered_by(judged, ["e"], ["b"], 0.0)
    judged.state = "failed"
    alarms.tick(1.0)
    alarms.note("f", alarm("b"))
    alarms.note("f", alarm("c"))
    assert (alarms.num_judged("b"), alarms.num_judged("c"), alarms.num_judged("d")) == (1, 0, 0)


def test_alarms_of_an_engine_that_is_gone_for_a_day_are_dropped() -> None:
    saved: list[str] = []
    alarms = DriftAlarms(PAUSE_S, saved.append)
    alarms.note("gone", alarm("b"))
    alarms.hold("gone", alarm("c"))
    alarms.note("there", alarm("b"))
    alarms.note("back", alarm("b"))
    hours = 3600.0
    alarms.drop_retired(["there"], 0.0)
    num_saved = len(saved)
    alarms.drop_retired(["there"], 20 * hours)
    assert len(saved) == num_saved, "nothing has changed"
    alarms.drop_retired(["there", "back"], 21 * hours)
    again = DriftAlarms(PAUSE_S, saved.append)  # the daemon's restart doesn't begin the day anew
    again.load(saved[-1], lambda operation_id: None, 22 * hours)
    again.drop_retired(["there"], 24 * hours)
    assert len(again.view(0.0)) == 4
    again.drop_retired(["there"], 24.1 * hours)
    assert [one["engine_id"] for one in again.view(0.0)] == ["there", "back"], "one that came back counts anew"
    assert "gone" not in saved[-1]


def test_an_engine_has_an_hour_to_come_back_after_the_daemon_was_away_for_days() -> None:
    """Both come up with their machine, and the daemon is ready first."""
    saved: list[str] = []
    alarms = DriftAlarms(PAUSE_S, saved.append)
    alarms.note("e", alarm("b"))
    alarms.drop_retired([], 0.0)
    again = DriftAlarms(PAUSE_S, saved.append)
    now_s = 3 * RETIRED_S
    again.load(saved[-1], lambda operation_id: None, now_s)
    again.drop_retired([], now_s + RETURN_S - 1.0)
    assert again.view(0.0)
    again.drop_retired([], now_s + RETURN_S + 1.0)
    assert not again.view(0.0)


def test_a_recalibration_answers_the_workloads_that_it_is_of() -> None:
    alarms = DriftAlarms(PAUSE_S)
    for workload in ("b", "c"):
        alarms.note("e", alarm(workload))
    alarms.note("f", alarm("b"))
    tried = operation()
    alarms.answered_by(tried, ["e"], ["b"], 0.0)
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


@pytest.mark.fault("a gate that equal candidates pass by luck")
def test_an_alarm_that_comes_again_begins_no_new_attempts() -> None:
    """Else a trial that proves nothing, after which drift is looked for anew, would train without end."""
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    fail(alarms, 10.0)
    alarms.note("e", alarm("b", "again"))
    assert alarms.due(10.0) == []
    (one,) = alarms.due(10.0 + PAUSE_S)
    assert (one.num_failed, one.alarm.text) == (1, "again")
    for _ in range(MAX_ATTEMPTS):
        fail(alarms, 1e6)
    assert alarms.due(1e9) == []
    alarms.note("e", alarm("b", "much later"))
    assert [one.num_failed for one in alarms.due(1e9)] == [0]


def win(
    alarms: DriftAlarms,
    now_s: float,
    gain: float = 1.003,
    *,
    is_cut_short: bool = True,
    other: float = 1.0,
    more: Sequence[dict[str, Any]] = (),
) -> None:
    """A recalibration of b succeeds; `more`: further rows of the gate's table."""
    gate: list[dict[str, Any]] = [{"workload": "a", "parent": 2.0, "candidate": 2.0 * other}]
    gate += [{"workload": "b", "parent": 2.0, "candidate": 2.0 * gain, "must_gain": True}, *more]
    detail = {"parent": "v0001-x", "workloads": ["b"], "gate": gate, "is_cut_short": is_cut_short}
    won = replace(operation(), detail=detail)
    alarms.answered_by(won, ["e"], ["b"], now_s)
    won.state = "succeeded"
    alarms.tick(now_s)


@pytest.mark.parametrize(("gain", "is_last"), [(1.06, False), (1.04, True)])
def test_after_a_whole_training_that_won_much_another_follows(gain: float, is_last: bool) -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    win(alarms, 0.0, 1.2, is_cut_short=False)
    assert [one["answers"] for one in alarms.view(0.0)] == [1]
    win(alarms, 200.0, gain, is_cut_short=False)
    assert [one["answers"] for one in alarms.view(200.0)] == ([] if is_last else [2])


def test_no_other_follows_once_all_of_them_together_have_cost_another_workload_too_much() -> None:
    """The gate looks at one at a time: twenty of them could each lose what it allows."""
    saved: list[str] = []
    alarms = DriftAlarms(PAUSE_S, saved.append)
    alarms.note("e", alarm("b"))
    for number, expected in enumerate((1, 1, 0)):
        win(alarms, 1000.0 * number, 1.2, other=0.988)
        alarms.load(saved[-1], lambda operation_id: None, 1000.0 * number)
        assert len(alarms.view(1000.0 * number)) == expected
    alarms.note("e", alarm("b"))
    for number in range(10):
        win(alarms, 1000.0 * number, 1.2)
        assert alarms.view(1000.0 * number), "a gain, or no loss, ends nothing"


def test_a_workload_with_too_few_sessions_to_judge_ends_nothing() -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    win(alarms, 0.0, 1.2, more=[{"workload": "c", "parent": 2.0, "candidate": 1.8, "is_judged": False}])
    assert [one["answers"] for one in alarms.view(0.0)] == [1]
    win(alarms, 1000.0, 1.2, more=[{"workload": "c", "parent": 2.0, "candidate": 1.8, "is_judged": True}])
    assert alarms.view(1000.0) == []


def test_a_training_that_was_cut_short_is_followed_by_others_until_one_wins_nothing() -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", replace(alarm("b"), since_s=7.0))
    alarms.note("f", alarm("b"))
    fail(alarms, 0.0)
    for number in range(1, 8):
        win(alarms, now_s := 1000.0 * number)
        (view,) = alarms.view(now_s)
        assert (view["engine_id"], view["failed_attempts"], view["answers"]) == ("e", 0, number)
        assert (view["due_in_s"], view["hindrance"], alarms.num_unanswered) == (PAUSE_S, "", 0)
        (due,) = alarms.due(now_s + PAUSE_S)
        assert (due.alarm.since_s, due.num_judged) == (7.0, 0), "it learns from all samples since the drift began"
    tried = replace(operation(), detail={"gate": [{}]})
    alarms.answered_by(tried, ["e"], ["b"], 9000.0)
    tried.state, tried.error = "failed", "no sure gain"
    alarms.tick(9000.0)
    assert alarms.view(9000.0) == []


def test_what_keeps_the_next_one_from_being_tried_is_no_verdict() -> None:
    saved: list[str] = []
    alarms = DriftAlarms(PAUSE_S, saved.append)
    alarms.note("e", alarm("b"))
    win(alarms, 0.0)
    fail(alarms, 200.0, "too few samples")
    alarms.load(saved[-1], lambda operation_id: None, 200.0)
    (view,) = alarms.view(200.0)
    assert (view["failed_attempts"], view["answers"], view["hindrance"]) == (1, 1, "too few samples")
    for _ in range(MAX_ATTEMPTS - 1):
        fail(alarms, 1e6, "too few samples")
    assert alarms.view(1e6) == [], "what was won stays won: nothing is left to warn of"


def test_drift_after_an_answer_is_answered_at_once() -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    win(alarms, 0.0)
    alarms.note("e", alarm("b", "lost again"))
    (due,) = alarms.due(0.0)
    assert (due.alarm.text, due.num_answers, alarms.num_unanswered) == ("lost again", 0, 1)


def test_the_time_at_which_drift_began_is_that_of_all_the_workloads_asked_for() -> None:
    alarms = DriftAlarms(10.0)
    for workload, since_s in (("a", 500.0), ("b", 300.0), ("c", 0.0)):
        alarms.note("e", replace(alarm(workload), since_s=since_s))
    asked = (["a"], ["a", "b"], ["a", "c"], ["a", "d"], [])
    assert [alarms.since_s(["e"], names) for names in asked] == [500.0, 300.0, 0.0, 0.0, 0.0]
    assert alarms.since_s(["other"], ["a"]) == 0.0


def test_all_attempts_together_have_the_whole_error() -> None:
    shares = [error_share(num_judged) for num_judged in range(MAX_ATTEMPTS)]
    assert sum(shares) == pytest.approx(1.0)
    assert shares[0] == max(shares)


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
    alarms.answered_by(tried, ["e"], ["b"], 0.0)
    alarms.note("e", alarm("b", "worse still"))
    tried.state = "failed"
    alarms.tick(1.0)
    (standing,) = alarms.due(1.0)
    assert (standing.alarm.text, standing.num_failed) == ("worse still", 0)


def test_while_it_is_under_way_it_neither_stands_nor_falls() -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    tried = operation()
    alarms.answered_by(tried, ["e"], ["b"], 0.0)
    alarms.tick(1e9)
    assert alarms.due(1e9) == []
    tried.state = "failed"
    alarms.tick(1e9)
    assert workloads(alarms.due(2e9)) == ["b"]


def test_what_somebody_cancelled_is_not_tried_again() -> None:
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    tried = operation()
    alarms.answered_by(tried, ["e"], ["b"], 0.0)
    tried.state = "cancelled"
    alarms.tick(0.0)
    assert alarms.due(1e9) == []


class Disk:
    """What alarms are kept on, and the clocks: the monotonic one starts anew with each life."""

    def __init__(self) -> None:
        self.text = ""
        self.unix_ahead_s = 1e9

    def save(self, text: str) -> None:
        self.text = text

    def life(self, known: Operation | None = None, now_s: float = 0.0) -> DriftAlarms:
        alarms = DriftAlarms(PAUSE_S, self.save, lambda: self.unix_ahead_s)
        if self.text:
            alarms.load(self.text, lambda operation_id: known if operation_id else None, now_s)
        return alarms


def test_alarms_stand_again_after_a_restart_with_their_attempts_and_their_time() -> None:
    disk = Disk()
    alarms = disk.life()
    for workload in ("b", "c"):
        alarms.note("e", alarm(workload))
    for now_s in (1000.0, 2000.0):
        fail(alarms, now_s)
    before = alarms.view(2000.0)
    disk.unix_ahead_s += 1990.0  # the machine was started again: its clock shows 10
    after = disk.life(now_s=10.0)
    assert after.view(10.0) == before
    assert workloads(after.due(10.0)) == ["c"]
    assert not [one for one in after.due(10.0 + 2 * PAUSE_S - 0.1) if one.alarm.workload == "b"]
    assert workloads(after.due(10.0 + 2 * PAUSE_S)) == ["c", "b"]
    assert after.due(1e9)[1].alarm == alarm("b")


def test_a_calendar_that_was_set_back_delays_no_attempt_by_more_than_its_pause() -> None:
    disk = Disk()
    alarms = disk.life()
    alarms.note("e", alarm("b"))
    fail(alarms, 0.0)
    disk.unix_ahead_s -= 1e6
    assert workloads(disk.life().due(PAUSE_S)) == ["b"]


@pytest.mark.parametrize("state", ["failed", "succeeded", "cancelled", "running"])
def test_what_was_being_answered_stands_again_after_a_restart_if_that_failed(state: str) -> None:
    disk, tried = Disk(), operation()
    alarms = disk.life()
    alarms.note("e", alarm("b"))
    alarms.answered_by(tried, ["e"], ["b"], 0.0)
    tried.state = state
    alarms = disk.life(known=tried)
    assert alarms.due(1e9) == []
    alarms.tick(0.0)
    assert bool(alarms.due(1e9)) == (state == "failed")
    if state == "running":  # its canary went on, and fails now
        tried.state = "failed"
        alarms.tick(0.0)
        assert [one.num_failed for one in alarms.due(1e9)] == [1]
    assert disk.life().due(1e9) == alarms.due(1e9)  # what came of it is kept


def test_an_answer_that_nobody_knows_any_more_was_none() -> None:
    disk = Disk()
    alarms = disk.life()
    alarms.note("e", alarm("b"))
    alarms.answered_by(operation(), "e", ["b"], 0.0)
    assert [one.num_failed for one in disk.life(known=None).due(0.0)] == [0]


@pytest.mark.parametrize("is_explained", [False, True])
def test_what_was_held_is_held_after_a_restart_and_released_for_good(is_explained: bool) -> None:
    disk = Disk()
    disk.life().hold("e", alarm("b"))
    alarms = disk.life()
    assert (alarms.due(1e9), len(alarms.view(0.0))) == ([], 1)
    alarms.release(is_explained=is_explained)
    assert workloads(disk.life().due(0.0)) == ([] if is_explained else ["b"])


def test_a_failure_that_the_next_request_is_the_first_to_see_still_counts() -> None:
    """An operator asks again before the tick: the failed alarms are that request's."""
    alarms = DriftAlarms(PAUSE_S)
    alarms.note("e", alarm("b"))
    tried, again = operation(), operation()
    alarms.answered_by(tried, ["e"], ["b"], 0.0)
    tried.state = "failed"
    alarms.answered_by(again, ["e"], ["b"], 1.0)
    assert alarms.due(1e9) == []
    again.state = "failed"
    alarms.tick(2.0)
    (standing,) = alarms.due(1e9)
    assert (standing.num_failed, standing.due_s) == (2, 2.0 + 2 * PAUSE_S)
