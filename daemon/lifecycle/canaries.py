"""Trials of one drafter version against another on live traffic: whose turn it is, and when a trial ends.

    canary: a recalibration made the new version; `active` is the old one until the new one has proven better
    watch:  the new version is active (an operator promoted it, or it lately regressed); the old one is `previous`

The two take turns in short windows in every engine that can run both. `adapt.monitor.canary` decides the turns and the verdict.
Both versions are staged there, so a turn costs milliseconds. Engines return to `active` by themselves after LEASE_S without a
message. After each pair of windows the evidence is stored, and a restarted daemon continues from it. Weights found worse for a
target are remembered.

The lifecycle applies a verdict to aliases and operations.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import structlog

from honed.adapt.control.controller import EngineController
from honed.adapt.monitor.canary import Canary, CanarySettings
from honed.adapt.protocol.wire import EventBatch
from honed.daemon.errors import HonedError
from honed.daemon.ingest.engines import RETURN_S, Engine, Engines
from honed.daemon.lifecycle import swaps
from honed.daemon.lifecycle.drafters import Drafters
from honed.daemon.lifecycle.rollout import Rollout
from honed.daemon.lifecycle.swaps import Beside, Swap, Swaps
from honed.daemon.lifecycle.trial import Kind, Trial
from honed.daemon.store import canary_tables
from honed.daemon.store.journal import Journal
from honed.daemon.store.operations import Operation
from honed.daemon.store.store import Store

log = structlog.get_logger("honed.canaries")

LEASE_S = 90.0
ABANDONED_S = 86_400.0
"""A trial ends when no engine that can run both versions was connected for so long: it keeps others from being trained."""
PAUSE_S = 2.0
"""Longer silence doesn't count as trial time, so a trial outlasts a night without traffic."""


class Canaries:
    """Begins, runs and ends the rollout's trial; knows failed versions. Guarded by the service's lock.

    Args:
        on_end: called with (trial, decision, text), and returns whether that is carried out; the rollout has no trial by then.
        hears_others: whether other hosts' evidence may decide, too.
    """

    def __init__(
        self,
        settings: CanarySettings,
        rollout: Rollout,
        *,
        engines: Engines,
        drafters: Drafters,
        swaps: Swaps,
        controller_of: Callable[[Engine], EngineController | None],
        store: Store,
        journal: Journal,
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        on_end: Callable[[Trial, str, str], bool],
        hears_others: bool = False,
    ) -> None:
        self._settings, self._rollout, self._hears_others = settings, rollout, hears_others
        self._engines, self._drafters, self._swaps, self._controller_of = engines, drafters, swaps, controller_of
        self._store, self._journal, self._clock, self._monotonic = store, journal, clock, monotonic
        self._on_end = on_end
        self._coin = secrets.SystemRandom()
        self._failed: dict[str, str] = {}
        self.latest: Trial | None = None
        """The trial that began last since the daemon's start, running or not."""

    # --- beginning and ending -----------------------------------------------------------------------------------------

    def begin(self, operation: Operation, kind: Kind, old: str, new: str, max_pairs: int = 0) -> None:
        """Let two versions take turns from now on. Raises UnknownError for a version that doesn't exist."""
        assert self._rollout.trial is None
        settings = self._settings
        if not self._drafters.shares_cache(old, new):
            settings = dataclasses.replace(settings, window_s=settings.reset_window_s)
        if max_pairs:
            settings = dataclasses.replace(settings, max_pairs=min(max_pairs, settings.max_pairs))
        most = max(self._engines.drafts_most(self._monotonic()).values(), default=1)
        now_s = self._monotonic()
        self._rollout.trial = self.latest = Trial(
            operation.operation_id,
            kind,
            Canary(settings, old, new, max(most, 1), old_begins=self._toss_coin(), hears_others=self._hears_others),
            self._drafters.manifest(new).trial_key,
            self._clock(),
            now_s,
        )
        self._save(self._rollout.trial)
        self._journal.mark("canary", f"{new} takes turns with {old}")
        self.tick(now_s)

    def stop(self, text: str) -> None:
        """End the trial without a verdict."""
        if self._rollout.trial is not None:
            self._end(self._rollout.trial, "stopped", text)

    def withdraw(self, text: str) -> None:
        """End the trial after an operator's roll-back. The new version isn't tried again, whatever the evidence."""
        if self._rollout.trial is not None:
            self._end(self._rollout.trial, "withdrawn", text)

    def why_failed(self, version: str) -> str:
        """Reason why the version's weights aren't tried again; "" if they may be. Raises UnknownError."""
        return self._failed.get(self._drafters.manifest(version).trial_key, "")

    def tell_of_trial(self, controller: EngineController) -> None:
        """Tell a new controller which versions take turns, if any."""
        if self._rollout.trial is not None:
            controller.take_turns(self._rollout.trial.versions)
        else:
            controller.end_turns()

    def load(self) -> set[str]:
        """Resume trials after the daemon was stopped or killed. Returns the resumed operations.

        Aliases move before the verdict is written, so aliases and evidence show a lost verdict.
        """
        self._failed = canary_tables.failed(self._store)
        rows = canary_tables.unfinished(self._store)
        for row in rows[1:]:
            self._write_end(row, "stopped", "a newer one took its place")
        if not rows:
            return set()
        row, aliases = rows[0], self._drafters.aliases()
        active, candidate = aliases["active"], aliases["candidate"]
        if row["kind"] == "canary" and active == row["new"]:
            self._write_end(row, "better", "promoted just before the daemon ended")
        elif row["kind"] == "canary" and candidate != row["new"]:
            is_worse = self._decision_of(row) == "worse"
            self._write_end(row, "worse" if is_worse else "stopped", "taken back just before the daemon ended")
        elif row["kind"] == "watch" and active != row["new"]:
            self._write_end(row, "worse", "rolled back just before the daemon ended")
        else:
            return self._resume(row)
        return set()

    def _restored(self, row: dict[str, Any]) -> Canary:
        """Canary of a row. Raises HonedError, KeyError, TypeError or ValueError for an invalid one."""
        settings, state = self._settings, row["state"]
        if not self._drafters.shares_cache(row["old"], row["new"]):
            settings = dataclasses.replace(settings, window_s=settings.reset_window_s)
        settings = dataclasses.replace(settings, max_pairs=min(state["max_pairs"], settings.max_pairs))
        return Canary.restored(settings, state["canary"], old_begins=self._toss_coin(), hears_others=self._hears_others)

    def _decision_of(self, row: dict[str, Any]) -> str:
        """Decision by the stored evidence."""
        try:
            return self._restored(row).verdict.decision
        except (HonedError, KeyError, TypeError, ValueError):
            return ""

    def _resume(self, row: dict[str, Any]) -> set[str]:
        state, now_s = row["state"], self._monotonic()
        try:
            canary = self._restored(row)
            away_s = self._clock() - float(state["fitting_unix_s"])
            trial = Trial(
                row["operation_id"],
                row["kind"],
                canary,
                row["new_key"],
                row["began_unix_s"],
                now_s,
                float(state["active_s"]),
                # It was stored with the latest pair of windows: engines without traffic may have been there since.
                fitting_s=now_s - min(max(away_s, 0.0), ABANDONED_S - RETURN_S),
            )
        except (HonedError, KeyError, TypeError, ValueError) as error:
            log.warning("a trial can't be resumed", new=row["new"], error=f"{type(error).__name__}: {error}")
            self._write_end(row, "failed", f"it can't be resumed: {error}")
            return set()
        self._rollout.trial = self.latest = trial
        log.info("trial resumed", old=canary.old, new=canary.new, pairs=canary.pairs)
        return {row["operation_id"]}

    # --- turns --------------------------------------------------------------------------------------------------------

    def on_batch(self, engine: Engine, batch: EventBatch) -> None:
        """Count a batch of either version from an engine that takes part; it may complete a window."""
        trial = self._rollout.trial
        if trial is None or batch.drafter_version not in trial.versions or not self._swaps.is_in_trial(engine, awake=False):
            return
        try:
            trial.canary.observe(batch)
        except ValueError:
            return
        now_s = self._monotonic()
        trial.active_s += min(max(now_s - trial.heard_s, 0.0), PAUSE_S)
        trial.heard_s = now_s
        self._end_window_if_over(trial, now_s)

    def tick(self, now_s: float) -> None:
        """Handle deadlines, and engines that came or went."""
        trial = self._rollout.trial
        if trial is None:
            return
        verdict = trial.canary.verdict
        if verdict.decision != "undecided":  # before a restart, but not carried out
            self._end(trial, verdict.decision, verdict.text)
        elif trial.active_s >= trial.canary.settings.max_s:
            verdict = trial.canary.give_up(f"shows no proven difference in {trial.active_s:.0f} s of traffic")
            self._end(trial, verdict.decision, verdict.text)
        elif self._is_abandoned(trial, now_s):
            self._end(trial, "failed", f"no engine that can run both was connected for {ABANDONED_S / 3600:.0f} hours")
        elif not trial.is_swapping:
            self._end_window_if_over(trial, now_s)
            if self._rollout.trial is trial and not trial.is_swapping:
                self._serve_turn(trial, now_s)

    def _end_window_if_over(self, trial: Trial, now_s: float) -> None:
        """End the window if it is over."""
        canary = trial.canary
        if trial.is_swapping or not canary.is_window_over(now_s - trial.window_began_s):
            return
        pairs, trial.window_began_s = canary.pairs, now_s
        verdict = canary.turn(old_begins=self._toss_coin())
        if canary.pairs != pairs:
            self._note(trial)
        if verdict.decision != "undecided":
            self._end(trial, verdict.decision, verdict.text)
        else:
            self._serve_turn(trial, now_s)

    def _serve_turn(self, trial: Trial, now_s: float) -> None:
        """Swap the engines to the version whose turn it is, and renew their leases."""
        serving = trial.canary.serving
        engines = [engine for engine in self._engines.connected(self._monotonic()) if self._swaps.is_in_trial(engine)]
        for engine in engines:
            if (controller := self._controller_of(engine)) is not None:
                controller.take_turns(trial.versions)
        stray = [engine for engine in engines if engine.live_version != serving]
        if not engines or (not stray and now_s - trial.sent_s < LEASE_S / 2):
            return
        trial.is_swapping, trial.sent_s = True, now_s
        beside = Beside(trial.other, trial.home, LEASE_S)
        try:
            self._swaps.begin(serving, stray or engines, lambda swap: self._on_turn(trial, swap), beside)
        except HonedError as error:
            self._end(trial, "failed", str(error))

    def _on_turn(self, trial: Trial, swap: Swap) -> None:
        if self._rollout.trial is not trial:
            return
        trial.is_swapping, trial.window_began_s = False, self._monotonic()
        if swap.refused:
            self._end(trial, "failed", swaps.failure_text(swap))

    def _is_abandoned(self, trial: Trial, now_s: float) -> bool:
        """Whether the engines that could run both versions are gone for good; one that sleeps is there."""
        there = self._engines.connected(now_s)
        if trial.fitting_s is None or any(self._swaps.is_in_trial(engine, awake=False) for engine in there):
            trial.fitting_s = now_s
        return now_s - trial.fitting_s > ABANDONED_S

    # --- on paper -----------------------------------------------------------------------------------------------------

    def _end(self, trial: Trial, decision: str, text: str) -> None:
        self._rollout.trial = None
        for engine in self._engines.by_id.values():
            if (controller := self._controller_of(engine)) is not None:
                controller.end_turns()
        log.info("trial is over", old=trial.canary.old, new=trial.canary.new, decision=decision, text=text)
        self._journal.mark("canary", f"{trial.canary.new}: {decision}: {text}")
        # Aliases first, here and in `load`: engines follow them.
        if why := canary_tables.why_failed(decision, text):
            self._failed[trial.new_key] = why
        is_done = True
        try:
            is_done = self._on_end(trial, decision, text)
        finally:
            if is_done:
                self.close(trial, decision, text)
            else:
                self._save(trial)  # a restarted daemon comes to the same verdict, and carries it out

    def close(self, trial: Trial, decision: str, text: str) -> None:
        """Store that a trial is over, since its verdict was carried out."""
        self._write_end(self._row(trial), decision, text)

    def _write_end(self, row: dict[str, Any], decision: str, text: str) -> None:
        if why := canary_tables.why_failed(decision, text):
            self._failed[row["new_key"]] = why
        self._keep(row | {"decision": decision, "text": text, "ended_unix_s": self._clock(), "state": "{}"})

    def _note(self, trial: Trial) -> None:
        """Store the evidence of a pair of windows."""
        canary, now = trial.canary, self._clock()
        self._save(trial)
        if canary_tables.is_kept(canary.pairs):
            about = {"operation_id": trial.operation_id, "t": now, "pairs": canary.pairs, "rounds": canary.rounds}
            rows = [about | {"workload": name, **figures} for name, figures in canary.figures().items()]
            self._store.submit(lambda db: canary_tables.save_points(db, rows)).add_done_callback(_complain)

    def _save(self, trial: Trial) -> None:
        self._keep(self._row(trial))

    def _row(self, trial: Trial) -> dict[str, Any]:
        settings = trial.canary.settings
        state = {"canary": trial.canary.state(), "active_s": trial.active_s, "max_pairs": settings.max_pairs}
        away_s = self._monotonic() - trial.fitting_s if trial.fitting_s is not None else 0.0
        state["fitting_unix_s"] = self._clock() - away_s
        return {
            "operation_id": trial.operation_id,
            "kind": trial.kind,
            "old": trial.canary.old,
            "new": trial.canary.new,
            "new_key": trial.new_key,
            "began_unix_s": trial.began_unix_s,
            "ended_unix_s": None,
            "decision": "",
            "text": "",
            "state": json.dumps(state),
        }

    def _keep(self, row: dict[str, Any]) -> None:
        state = "canaries", row["operation_id"]
        self._store.keep(state, lambda db: canary_tables.save(db, row)).add_done_callback(_complain)

    def _toss_coin(self) -> bool:
        return self._coin.random() < 0.5


def _complain(done: Future[Any]) -> None:
    if (error := done.exception()) is not None:
        log.error("a trial was not written", error=str(error))
