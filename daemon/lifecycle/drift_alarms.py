"""Drift alarms that wait for a recalibration.

The detector raises an alarm once and then learns a new reference. The alarm stays here until a version trained on the traffic
is active. A failed attempt is repeated, each time after twice the pause. After MAX_ATTEMPTS the alarm is given up, and stays
until an operator recalibrates or a newer alarm replaces it.

One training may win only a part of what there is. After one that won another follows after the pause, from the version that it
made. The first one that wins nothing, or little although it wasn't cut short, is the last. So is one after which another
workload has lost more than the gate's `max_loss` since the first.

While two versions take turns, an alarm concerns both. It waits for the trial's end and is dropped only if one was worse.

Alarms are kept on disk, because after a restart the detector has its new reference and wouldn't raise them again. Those of an
engine that was away for a day are dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import structlog

from honed.adapt.monitor.drift import Alarm
from honed.daemon.ingest.engines import RETIRED_S, RETURN_S
from honed.daemon.store.operations import Operation
from honed.recalib.gate.gate import GateSettings

log = structlog.get_logger("honed.recalibrations")

MAX_ATTEMPTS = 6
"""Attempts per alarm; with the default pause the last starts about eight hours after the first."""

FIRST_ERROR_SHARE = 0.5
"""The first attempt's part of the gate's error; the others have equal parts of the rest."""


WORTH_MORE = 1.05
"""Gain of a whole training on its own workload after which another one is worth its time, and what it may lose elsewhere."""


def error_share(num_judged: int) -> float:
    """Return the part of the gate's error for an attempt after so many that the gate refused."""
    return (1.0 - FIRST_ERROR_SHARE) / (MAX_ATTEMPTS - 1) if num_judged else FIRST_ERROR_SHARE


@dataclass(slots=True)
class Standing:
    """An alarm and its attempts."""

    engine_id: str
    alarm: Alarm
    num_failed: int = 0
    due_s: float = 0.0
    """Monotonic time of the next attempt; 0: at once."""
    hindrance: str = ""
    """Reason why the latest attempt failed."""
    num_judged: int = 0
    """Attempts whose candidate the gate looked at, each of which spends a part of its error."""
    num_answers: int = 0
    """Recalibrations that won something for it; another one follows."""
    kept: dict[str, float] = field(default_factory=dict)
    """Acceptance lengths of other workloads after all of them, relative to before the first, as the gate judged them."""

    @property
    def is_given_up(self) -> bool:
        return self.num_failed >= MAX_ATTEMPTS

    def view(self, now_s: float) -> dict[str, Any]:
        """Document for the API."""
        return {
            "engine_id": self.engine_id,
            "workload": self.alarm.workload,
            "text": self.alarm.text,
            "failed_attempts": self.num_failed,
            "answers": self.num_answers,
            "due_in_s": None if self.is_given_up else max(self.due_s - now_s, 0.0),
            "hindrance": self.hindrance,
        }


@dataclass(slots=True)
class _Kept:
    """Stored form; `due_s` is Unix time, since the monotonic clock doesn't survive a reboot."""

    standing: list[Standing]
    held: list[Standing]
    answered: list[Standing]
    operation_id: str
    """Recalibration that answers the latter."""
    away_since_unix_s: dict[str, float] = field(default_factory=dict)
    """Engines with alarms that weren't connected."""


class DriftAlarms:
    """The alarms of all workloads, oldest first. Guarded by the service's lock.

    Args:
        pause_s: pause before the second attempt.
        max_loss: the gate's.
        save: called with the alarms as JSON after each change.
        unix_ahead_s: Unix time minus monotonic time.
    """

    def __init__(
        self,
        pause_s: float,
        save: Callable[[str], object] = lambda text: None,
        unix_ahead_s: Callable[[], float] = lambda: 0.0,
        max_loss: float = GateSettings().max_loss,
    ) -> None:
        self._pause_s, self._save, self._unix_ahead_s, self._max_loss = pause_s, save, unix_ahead_s, max_loss
        self._standing: dict[tuple[str, str], Standing] = {}
        self._held: dict[tuple[str, str], Standing] = {}
        self._answer: tuple[Operation, list[Standing]] | None = None
        self._away_since_s: dict[str, float] = {}

    def load(self, text: str, find_operation: Callable[[str], Operation | None], now_s: float) -> None:
        """Load the stored alarms from JSON. Wait for the recalibration that answers them if it was resumed too.

        Raises msgspec.DecodeError for an unreadable text.
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
        earliest_s = now_s - RETIRED_S + RETURN_S  # they come back after the daemon, perhaps both after a week
        self._away_since_s = {
            engine_id: min(max(unix_s - ahead_s, earliest_s), now_s) for engine_id, unix_s in kept.away_since_unix_s.items()
        }
        self._standing = {(one.engine_id, one.alarm.workload): one for one in standing}
        self._held = {(one.engine_id, one.alarm.workload): one for one in held}

    def note(self, engine_id: str, alarm: Alarm) -> None:
        """Add an alarm, which replaces an older one of its workload. One that says the same is due when the older one was."""
        older = self._standing.pop((engine_id, alarm.workload), None)
        one = Standing(engine_id, alarm)
        is_tried = older is not None and not older.is_given_up and not older.num_answers
        if older is not None and is_tried and older.alarm.kind == alarm.kind:
            one = replace(older, alarm=alarm)
        self._standing[engine_id, alarm.workload] = one
        self._keep()

    def hold(self, engine_id: str, alarm: Alarm) -> None:
        """Add an alarm raised while two versions take turns."""
        self._held[engine_id, alarm.workload] = Standing(engine_id, alarm)
        self._keep()

    def release(self, *, is_explained: bool) -> None:
        """Handle a trial's end; `is_explained`: the dropped version was worse, which may explain the alarms."""
        held, self._held = self._held, {}
        if not is_explained:
            for one in held.values():
                self.note(one.engine_id, one.alarm)
        if held:
            self._keep()

    def since_s(self, engine_ids: Collection[str], workloads: Sequence[str]) -> float:
        """Unix time at which the drift of these workloads began on one of these engines; 0: unknown for one of them."""
        began_s = []
        for workload in workloads:
            standing = [self._standing[key] for engine_id in engine_ids if (key := (engine_id, workload)) in self._standing]
            began_s.append(min((one.alarm.since_s for one in standing), default=0.0))
        return min(began_s, default=0.0)

    def num_judged(self, workload: str) -> int:
        """Most attempts that were judged for an alarm of this workload: replicas' alarms are answered together."""
        return max((one.num_judged for one in self._standing.values() if one.alarm.workload == workload), default=0)

    def due(self, now_s: float) -> list[Standing]:
        """Alarms that are due for an attempt."""
        return [one for one in self._standing.values() if now_s >= one.due_s and not one.is_given_up]

    def answered_by(self, operation: Operation, engine_ids: Collection[str], workloads: Sequence[str], now_s: float) -> None:
        """Note that a recalibration of these workloads (none named: all) begins, from these engines' samples."""
        self.tick(now_s)
        keys = [key for key in self._standing if key[0] in engine_ids and (not workloads or key[1] in workloads)]
        self._answer = operation, [self._standing.pop(key) for key in keys]
        if keys:
            self._keep()

    def tick(self, now_s: float) -> None:
        """Check if the alarms' recalibration, canary included, has ended; if it failed, they become due again.

        If it was cancelled, they don't: an operator has taken over. If it succeeded, they do as long as more may be won.
        """
        if self._answer is None or not self._answer[0].is_finished:
            return
        (operation, answered), self._answer = self._answer, None
        if operation.state != "failed":
            if operation.state == "succeeded":
                self._drop_answered(operation)
                self._go_on(operation, answered, now_s)
            self._keep()
            return
        was_judged = bool(operation.detail.get("gate"))
        for one in answered:
            one.num_failed += 1
            one.num_judged += was_judged
            if one.num_answers and (was_judged or one.is_given_up):
                log.info("drift is answered", workload=one.alarm.workload, answers=one.num_answers, last=operation.error)
                continue
            one.hindrance = operation.error
            one.due_s = now_s + self._pause_after(one.num_failed)
            if one.is_given_up:
                log.warning("drift stays unanswered", workload=one.alarm.workload, attempts=one.num_failed, error=one.hindrance)
            self._standing.setdefault((one.engine_id, one.alarm.workload), one)
        self._keep()

    def _go_on(self, operation: Operation, answered: Sequence[Standing], now_s: float) -> None:
        """Let alarms stand for another recalibration if this one was cut short, or won much."""
        gate = operation.detail.get("gate") or []
        won = max((row["candidate"] / row["parent"] for row in gate if row.get("must_gain")), default=1.0)
        if won < WORTH_MORE and not operation.detail.get("is_cut_short"):
            return
        others = [row for row in gate if not row.get("must_gain") and row.get("is_judged", True)]
        ratios = {row["workload"]: row["candidate"] / row["parent"] for row in others}
        for one in answered:
            kept = one.kept | {workload: one.kept.get(workload, 1.0) * ratio for workload, ratio in ratios.items()}
            if min(kept.values(), default=1.0) < 1.0 - self._max_loss:
                log.info("drift is answered: more would cost other workloads", workload=one.alarm.workload, kept=kept)
                continue
            due_s = now_s + self._pause_s
            next_one = Standing(one.engine_id, one.alarm, due_s=due_s, num_answers=one.num_answers + 1, kept=kept)
            self._standing.setdefault((one.engine_id, one.alarm.workload), next_one)

    def _drop_answered(self, operation: Operation) -> None:
        """Drop what other engines said of the version that has been replaced: a replica sees the same traffic drift."""
        workloads = operation.detail.get("workloads")
        for alarms in (self._standing, self._held):
            for key, one in list(alarms.items()):
                is_meant = not workloads or one.alarm.workload in workloads
                if is_meant and one.alarm.drafter_version == operation.detail.get("parent"):
                    del alarms[key]

    def drop_retired(self, connected: Collection[str], now_s: float) -> None:
        """Drop the alarms of retired engines, which nothing can answer; `connected` has the ids of those that are there."""
        away = {key[0] for key in (*self._standing, *self._held)} - set(connected)
        if away != self._away_since_s.keys():
            self._away_since_s = {engine_id: self._away_since_s.get(engine_id, now_s) for engine_id in away}
            self._keep()
        retired = {engine_id for engine_id, since_s in self._away_since_s.items() if now_s - since_s > RETIRED_S}
        if not retired:
            return
        for alarms in (self._standing, self._held):
            for key in [key for key in alarms if key[0] in retired]:
                del alarms[key]
        for engine_id in retired:
            del self._away_since_s[engine_id]
        log.info("alarms of engines that are gone are dropped", engine_ids=sorted(retired))
        self._keep()

    def _keep(self) -> None:
        operation, answered = self._answer or (None, [])
        ahead_s = self._unix_ahead_s()
        standing, held, answered = (
            [replace(one, due_s=one.due_s + ahead_s) for one in ones]
            for ones in (self._standing.values(), self._held.values(), answered)
        )
        operation_id = operation.operation_id if operation is not None else ""
        away = {engine_id: since_s + ahead_s for engine_id, since_s in self._away_since_s.items()}
        self._save(msgspec.json.encode(_Kept(standing, held, answered, operation_id, away)).decode())

    def _pause_after(self, num_failed: int) -> float:
        return self._pause_s * 2.0 ** max(num_failed - 1, 0)

    @property
    def num_unanswered(self) -> int:
        """Alarms for which no recalibration has won anything yet."""
        return sum(not one.num_answers for one in (*self._standing.values(), *self._held.values()))

    def view(self, now_s: float) -> list[dict[str, Any]]:
        """Documents for the API."""
        return [one.view(now_s) for one in (*self._standing.values(), *self._held.values())]
