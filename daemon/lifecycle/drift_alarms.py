"""Drift that waits for a recalibration to answer it.

An alarm is raised once (the detector learns a new reference after it), so it stands here until a version that learned from the
traffic is active: where an attempt fails, another follows, each after a pause twice as long as the one before. After
MAX_ATTEMPTS it is given up, and stands until an operator recalibrates or a newer alarm takes its place.

While two versions take turns an alarm is about both. It waits for what comes of that, and falls only if one was worse.

All of it is kept on disk: the detector, which has a new reference, wouldn't raise the alarm again after a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import structlog

from honed.adapt.monitor.drift import Alarm
from honed.daemon.store.operations import Operation

log = structlog.get_logger("honed.recalibrations")

MAX_ATTEMPTS = 6
"""At one alarm; with the default pause the last comes some eight hours after the first."""


@dataclass(slots=True)
class Standing:
    """An alarm, and what was tried."""

    engine_id: str
    alarm: Alarm
    num_failed: int = 0
    due_s: float = 0.0
    """Monotonic time of the next attempt; 0: at once."""
    hindrance: str = ""
    """Why the latest attempt couldn't begin, or what it failed of."""

    @property
    def is_given_up(self) -> bool:
        return self.num_failed >= MAX_ATTEMPTS

    def view(self, now_s: float) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "engine_id": self.engine_id,
            "workload": self.alarm.workload,
            "text": self.alarm.text,
            "failed_attempts": self.num_failed,
            "due_in_s": None if self.is_given_up else max(self.due_s - now_s, 0.0),
            "hindrance": self.hindrance,
        }


@dataclass(slots=True)
class _Kept:
    """What is on disk; `due_s` is a time of the calendar there, since the monotonic clock ends with the machine."""

    standing: list[Standing]
    held: list[Standing]
    answered: list[Standing]
    operation_id: str
    """Of the recalibration that answers the latter."""


class DriftAlarms:
    """The alarms of all workloads, the oldest first. Guarded by the service's lock.

    Args:
        pause_s: before the second attempt.
        save: takes what is to be kept, as JSON, whenever it has changed.
        unix_ahead_s: seconds by which the calendar's clock is ahead of the monotonic one.
    """

    def __init__(
        self, pause_s: float, save: Callable[[str], object] = lambda text: None, unix_ahead_s: Callable[[], float] = lambda: 0.0
    ) -> None:
        self._pause_s, self._save, self._unix_ahead_s = pause_s, save, unix_ahead_s
        self._standing: dict[tuple[str, str], Standing] = {}
        self._held: dict[tuple[str, str], Standing] = {}
        self._answer: tuple[Operation, list[Standing]] | None = None

    def load(self, text: str, find_operation: Callable[[str], Operation | None], now_s: float) -> None:
        """Take up what was kept, as JSON; what answers alarms is waited for, if it has gone on as well.

        Raises msgspec.DecodeError for a text that can't be read.
        """
        kept = msgspec.json.decode(text, type=_Kept)
        ahead_s = self._unix_ahead_s()
        standing, held, answered = (
            [replace(one, due_s=min(one.due_s - ahead_s, now_s + self._pause_after(one.num_failed))) for one in ones]
            for ones in (kept.standing, kept.held, kept.answered)
        )
        operation = find_operation(kept.operation_id)
        if operation is None:
            standing, answered = standing + answered, []
        else:
            self._answer = operation, answered
        self._standing = {(one.engine_id, one.alarm.workload): one for one in standing}
        self._held = {(one.engine_id, one.alarm.workload): one for one in held}

    def note(self, engine_id: str, alarm: Alarm) -> None:
        """Drift was found: a newer alarm of a workload takes the place of the older one."""
        self._standing.pop((engine_id, alarm.workload), None)
        self._standing[engine_id, alarm.workload] = Standing(engine_id, alarm)
        self._keep()

    def hold(self, engine_id: str, alarm: Alarm) -> None:
        """Drift was found while two versions take turns."""
        self._held[engine_id, alarm.workload] = Standing(engine_id, alarm)
        self._keep()

    def release(self, *, is_explained: bool) -> None:
        """One version is left; `is_explained`: the other was worse, and that may be all that was found."""
        held, self._held = self._held, {}
        if not is_explained:
            for one in held.values():
                self.note(one.engine_id, one.alarm)
        if held:
            self._keep()

    def due(self, now_s: float) -> list[Standing]:
        """The alarms that may be answered now."""
        return [one for one in self._standing.values() if now_s >= one.due_s and not one.is_given_up]

    def answered_by(self, operation: Operation, engine_id: str, workloads: Sequence[str], now_s: float) -> None:
        """A recalibration begins, of these workloads, or, where none is named, of all."""
        self.tick(now_s)
        keys = [key for key in self._standing if key[0] == engine_id and (not workloads or key[1] in workloads)]
        self._answer = operation, [self._standing.pop(key) for key in keys]
        if keys:
            self._keep()

    def tick(self, now_s: float) -> None:
        """See whether the recalibration that answers alarms has ended, its canary included; if it failed, they stand again.

        They don't if it was cancelled: then somebody has taken the matter in hand.
        """
        if self._answer is None or not self._answer[0].is_finished:
            return
        (operation, answered), self._answer = self._answer, None
        if operation.state != "failed":
            self._keep()
            return
        for one in answered:
            one.num_failed += 1
            one.hindrance = operation.error
            one.due_s = now_s + self._pause_after(one.num_failed)
            if one.is_given_up:
                log.warning("drift stays unanswered", workload=one.alarm.workload, attempts=one.num_failed, error=one.hindrance)
            self._standing.setdefault((one.engine_id, one.alarm.workload), one)
        self._keep()

    def _keep(self) -> None:
        operation, answered = self._answer or (None, [])
        ahead_s = self._unix_ahead_s()
        standing, held, answered = (
            [replace(one, due_s=one.due_s + ahead_s) for one in ones]
            for ones in (self._standing.values(), self._held.values(), answered)
        )
        operation_id = operation.operation_id if operation is not None else ""
        self._save(msgspec.json.encode(_Kept(standing, held, answered, operation_id)).decode())

    def _pause_after(self, num_failed: int) -> float:
        return self._pause_s * 2.0 ** max(num_failed - 1, 0)

    def view(self, now_s: float) -> list[dict[str, Any]]:
        """As the API shows them."""
        return [one.view(now_s) for one in (*self._standing.values(), *self._held.values())]
