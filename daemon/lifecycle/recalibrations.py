"""Recalibrations: request a candidate from the trainer, follow its training, and start its trial.

    TrainRequest -> TrainResult(version) -> a canary on live traffic (lifecycle.py) -> promoted, or not

At most one runs at a time. Operators request it; so does drift, if the settings allow it. If something blocks it, a
ConflictError names it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec
import structlog

from honed.adapt.control.settings import Override
from honed.adapt.monitor.drift import Alarm
from honed.adapt.protocol import wire
from honed.daemon.errors import START_TRAINER, ConflictError, HonedError, there_are
from honed.daemon.ingest.engines import Engine
from honed.daemon.ingest.trainer import Trainer
from honed.daemon.lifecycle.canaries import Canaries
from honed.daemon.lifecycle.drafters import Drafters
from honed.daemon.lifecycle.drift_alarms import DriftAlarms, Standing, error_share
from honed.daemon.lifecycle.eligible_engines import EligibleEngines
from honed.daemon.lifecycle.lifecycle import Lifecycle
from honed.daemon.lifecycle.rollout import Rollout
from honed.daemon.lifecycle.swaps import Swaps
from honed.daemon.lifecycle.trial import Trial
from honed.daemon.settings.sections import RecalibrationSettings
from honed.daemon.store.journal import Journal
from honed.daemon.store.operations import Operation, Operations
from honed.daemon.store.store import Store

log = structlog.get_logger("honed.recalibrations")

STAGES = {"collecting": "collecting", "training": "training", "gating": "gating"}
_ALARMS = "drift_alarms"
"""Key in the table `meta`."""
COLLECT_SHARE = 1.0
"""Share of requests captured during a recalibration."""
MAX_RESTARTS = 3
"""Trainer restarts within one operation."""


class Recalibrations:
    """The running training, and the alarms that request the next one. Guarded by the service's lock."""

    def __init__(
        self,
        settings: RecalibrationSettings,
        rollout: Rollout,
        *,
        lifecycle: Lifecycle,
        canaries: Canaries,
        trainer: Trainer,
        drafters: Drafters,
        swaps: Swaps,
        eligible: EligibleEngines,
        store: Store,
        operations: Operations,
        journal: Journal,
        lock: threading.RLock,
        in_background: Callable[[Callable[[], None]], object],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
        max_loss: float,
    ) -> None:
        self._settings, self._rollout, self._lifecycle, self._canaries = settings, rollout, lifecycle, canaries
        self._trainer, self._drafters, self._swaps, self._eligible = trainer, drafters, swaps, eligible
        self._store, self._operations, self._journal = store, operations, journal
        self._lock, self._in_background, self._clock, self._monotonic = lock, in_background, clock, monotonic
        self.alarms = DriftAlarms(settings.min_interval_s, self._keep_alarms, lambda: clock() - monotonic(), max_loss)
        self._parent = ""
        self._engine_ids = frozenset[str]()
        """Engines whose samples the training uses."""
        self._request: wire.TrainRequest | None = None
        self._restarts = 0
        self._ended_s = float("-inf")

    def load(self) -> None:
        """Load unanswered drift alarms and the pause; call it after loading operations and trials."""
        ends = [one.finished_unix_s or 0.0 for one in self._operations.listing() if one.kind == "recalibrate"]
        self._ended_s = self._monotonic() - max(self._clock() - max(ends, default=0.0), 0.0)
        for row in self._store.read(f"SELECT value FROM meta WHERE key = '{_ALARMS}'"):
            try:
                self.alarms.load(row["value"], self._operations.find, self._monotonic())
            except msgspec.DecodeError as error:
                log.error("the stored drift alarms can't be read", error=str(error))
        if self._rollout.trial is None:
            self.alarms.release(is_explained=False)

    def recalibrate(
        self,
        *,
        engine_id: str = "",
        workloads: list[str] | None = None,
        scope: str = "",
        max_seconds: float = 0.0,
        reason: str = "",
        actor: str,
        dry_run: bool = False,
        key: str | None = None,
        share: float = 1.0,
        stored: set[tuple[str, str]] | None = None,
    ) -> Operation:
        """Request a candidate from the trainer. Raises ConflictError, UnknownError.

        Args:
            share: this attempt's part of the gate's error, of all attempts that answer the same alarm.
            stored: of `EligibleEngines.stored_workloads`; None for an alarm's workloads, which had rounds.
        """
        if self._rollout.training is not None:
            running = self._rollout.training.operation_id
            raise ConflictError(
                f"recalibration {running} is running, in stage {self._rollout.training.stage!r}",
                cure=f"`honed operations {running}` shows its progress, `honed cancel {running}` cancels it.",
            )
        if (trial := self._rollout.trial) is not None:
            tried = trial.operation_id
            raise ConflictError(
                f"{trial.canary.new} is on trial against {trial.canary.old}",
                cure=f"`honed canary` shows its progress, `honed cancel {tried}` or `honed rollback` ends it.",
            )
        self._rollout.check_no_swap()
        self._rollout.check_nothing_due()
        if not self._trainer.is_connected:
            raise ConflictError("no trainer is connected", cure=START_TRAINER)
        engine = self._eligible.capturing(engine_id)
        if stored is not None:
            self._eligible.check_workloads(engine, workloads or [], stored)
        hello = engine.hello
        assert hello is not None
        active = self._drafters.active
        if not active:
            known = there_are(manifest.version for manifest in self._drafters.registry.versions())
            raise ConflictError(
                f"no drafter version is active, so there is none to start from ({known} in the registry)",
                cure="`honed promote VERSION` makes one active; the first that an engine loads becomes active automatically.",
            )
        if why := self._drafters.fault(active):
            cure = "`honed rollback` goes back to a whole version, `honed promote VERSION` to any other."
            raise ConflictError(f"the active version can't be trained: {why}", cure=cure)
        manifest = self._drafters.manifest(active)
        if not self._drafters.is_for(active, hello):
            made_for = f"method {manifest.method!r} and target {manifest.target_path!r}"
            since = ", which has changed since" if manifest.target_path == hello.target_path else ""
            raise ConflictError(
                f"the active version {active} is for {made_for}, engine {engine.engine_id} has method {hello.method!r} "
                f"and target {hello.target_path!r}{since}",
                cure="`honed drafters` names the version that this engine runs; `honed promote VERSION` makes it active.",
            )
        scope = scope or self._settings.scope
        if scope == "full" and hello.features == "fused" and hello.method != "mtp":
            raise ConflictError(
                f"engine {engine.engine_id} captures fused features, which scope 'full' can't train on",
                cure="Start vLLM with HONED_FEATURES=layers in its environment, or use scope kv-frozen.",
            )
        seconds = max_seconds or self._settings.max_seconds
        operation = self._operations.create(
            "recalibrate",
            "collecting",
            reason,
            actor,
            key,
            engine_id=engine.engine_id,
            workloads=workloads or [],
            parent=active,
            dry_run=dry_run,
            max_seconds=seconds,
        )
        replicas = self._eligible.replicas(engine, active)
        self._rollout.training, self._parent = operation, active
        self._engine_ids = frozenset(one.engine_id for one in replicas)
        self._restarts = 0
        self._request = wire.TrainRequest(
            operation_id=operation.operation_id,
            capture_paths=[one.hello.capture_path for one in replicas if one.hello is not None],
            target_path=hello.target_path,
            parent_version=active,
            scope=scope,
            workloads=workloads or [],
            max_seconds=seconds,
            reason=reason,
            dry_run=dry_run,
            vllm_version=hello.vllm_version,
            error_share=share,
            since_s=self.alarms.since_s(self._engine_ids, workloads or []),
            num_draft_tokens=hello.num_spec_tokens,
            target_sha256=self._drafters.digest_of(hello.target_path),
        )
        self._trainer.tell(self._request)
        if not dry_run:
            self.alarms.answered_by(operation, self._engine_ids, workloads or [], self._monotonic())
        self._journal.audit(actor, "recalibrate", engine.engine_id, reason, operation.operation_id)
        return operation

    def cancel(self, operation_id: str, *, reason: str, actor: str) -> Operation:
        """Cancel a recalibration that isn't in the engines yet, or a running promotion. Raises UnknownError, ConflictError."""
        operation = self._operations.get(operation_id)
        if operation.is_finished:
            raise ConflictError(
                f"operation {operation_id} has ended: {operation.state}",
                cure=f"`honed operations {operation_id}` shows it; `honed rollback` undoes its swap.",
            )
        trial = self._rollout.trial
        if trial is not None and trial.kind == "canary" and trial.operation_id == operation_id:
            self._journal.audit(actor, "cancel", operation_id, reason)
            self._canaries.stop(f"cancelled: {reason}" if reason else "cancelled")
            return operation
        if operation is self._rollout.swapping and operation.kind == "promote":
            self._journal.audit(actor, "cancel", operation_id, reason)
            self._lifecycle.end_promotion(f"cancelled: {reason}" if reason else "cancelled")
            return operation
        if operation is not self._rollout.training:
            raise ConflictError(
                f"operation {operation_id} is in stage {operation.stage!r}, which can't be cancelled",
                cure=f"Wait for its end (`honed operations {operation_id}`), then `honed rollback`.",
            )
        self._trainer.tell(wire.TrainCancel(operation_id=operation_id, reason=reason))
        self._journal.audit(actor, "cancel", operation_id, reason)
        self._end_training("cancelled", reason and f"cancelled: {reason}")
        return operation

    # --- messages of engines and the trainer ----------------------------------------------------------------------------

    def on_trainer(self, message: wire.TrainerHello | wire.TrainerStatus | wire.TrainResult) -> None:
        """Follow the training."""
        operation = self._rollout.training
        if message.operation_id and not isinstance(message, wire.TrainResult):
            self._end_what_nobody_waits_for(message.operation_id)
        if operation is None:
            return
        if isinstance(message, wire.TrainerHello):
            if message.operation_id != operation.operation_id:
                self._ask_again(operation)
        elif message.operation_id != operation.operation_id:
            return
        elif isinstance(message, wire.TrainerStatus):
            operation.stage = STAGES.get(message.state, operation.stage)
            operation.detail.update(msgspec.to_builtins(message))
            operation.detail.pop("type", None)
        else:
            self._on_result(operation, message)

    def _end_what_nobody_waits_for(self, operation_id: str) -> None:
        """Cancel a training that this daemon no longer follows, after its restart or a long silence of the trainer."""
        if self._rollout.training is None or self._rollout.training.operation_id != operation_id:
            reason = "the daemon no longer waits for it"
            self._trainer.tell(wire.TrainCancel(operation_id=operation_id, reason=reason))

    def on_alarm(self, engine: Engine, alarm: Alarm) -> None:
        """Store a drift alarm, to recalibrate once that is allowed and possible."""
        self._journal.mark("drift", alarm.text, engine.engine_id)
        log.warning("drift", engine_id=engine.engine_id, workload=alarm.workload, text=alarm.text)
        if self._swaps.is_in_trial(engine, awake=False):
            self.alarms.hold(engine.engine_id, alarm)
            return
        self.alarms.note(engine.engine_id, alarm)
        self._lifecycle.challenge(alarm)

    def on_trial_end(self, trial: Trial, decision: str) -> None:
        """End the canary's recalibration. Drift found meanwhile may have come from the worse version."""
        if trial.kind == "canary":
            self._ended_s = self._monotonic()
        self.alarms.release(is_explained=decision == "worse")

    def tick(self, now_s: float) -> None:
        """Detect a trainer that is gone (it keeps its deadline itself); answer drift."""
        if self._rollout.training is not None and not self._trainer.is_connected:
            self._end_training("failed", f"the trainer has been silent for {self._trainer.silent_s:.0f} s")
        self.alarms.tick(now_s)
        self.alarms.drop_retired([engine.engine_id for engine in self._eligible.connected()], now_s)
        if not self._settings.automatic or not self._rollout.is_quiet:
            return
        pause_s = self._settings.min_interval_s
        for standing in self.alarms.due(now_s):
            if now_s - self._ended_s < pause_s:
                standing.hindrance = f"the last one ended less than {pause_s:,.0f} s ago (recalibration.min_interval_s)"
            elif self._answer(standing):
                break

    def _answer(self, standing: Standing) -> bool:
        """Try to begin a recalibration; True if begun. The alarm stays while no trainer or engine can do it."""
        engine_id, alarm = standing.engine_id, standing.alarm
        try:
            self.recalibrate(
                engine_id=engine_id,
                workloads=[alarm.workload],
                reason=alarm.text,
                actor="honed",
                share=error_share(self.alarms.num_judged(alarm.workload)),
            )
        except HonedError as error:
            standing.hindrance = f"{error}. {error.cure}" if error.cure else str(error)
            return False
        return True

    def _keep_alarms(self, text: str) -> None:
        self._journal.insert("meta", {"key": _ALARMS, "value": text}, key="key")

    def capture_override(self, engine_id: str, now_s: float) -> Override | None:
        """While a recalibration needs samples, capture from more requests than usual."""
        training = self._rollout.training
        if training is None or training.stage != "collecting" or engine_id not in self._engine_ids:
            return None
        return Override("capture_share", COLLECT_SHARE, now_s + 60.0)

    # --- steps ----------------------------------------------------------------------------------------------------------

    def _on_result(self, operation: Operation, result: wire.TrainResult) -> None:
        gate = msgspec.to_builtins(result.gate)
        detail: dict[str, Any] = {"gate": gate, "version": result.version, "steps": result.steps}
        detail |= {"tokens": result.tokens, "train_seconds": result.train_seconds, "elapsed_s": result.elapsed_s}
        detail |= {"dropped_updates": result.dropped_updates, "is_cut_short": result.is_cut_short}
        if not result.ok or (not result.version and not operation.detail.get("dry_run")):
            self._end_training("failed", result.error or "no candidate passed the gate", **detail)
            return
        if operation.detail.get("dry_run"):
            self._end_training("succeeded", **detail)
            return
        self._in_background(lambda: self._offer(operation, result.version, detail))

    def _offer(self, operation: Operation, version: str, detail: dict[str, Any]) -> None:
        """Start a candidate's trial, unless the operation ended while its files were read. A failure ends the training."""
        try:
            self._drafters.read_ahead(version)
            with self._lock:
                self._begin_trial(operation, version, detail)
        except Exception as error:
            log.exception("a candidate can't be tried out", version=version, error=str(error))
            why = f"{type(error).__name__}: {error}"
            with self._lock:
                try:
                    if self._rollout.trial is not None and self._rollout.trial.operation_id == operation.operation_id:
                        self._canaries.stop(why)
                finally:
                    if self._rollout.training is operation:
                        self._end_training("failed", why, **detail)

    def _begin_trial(self, operation: Operation, version: str, detail: dict[str, Any]) -> None:
        if self._rollout.training is not operation:
            return
        try:
            if (active := self._drafters.active) != self._parent:
                raise ConflictError(f"{active} became active meanwhile; the candidate was made from {self._parent}")
            self._operations.move(operation, **detail)
            self._lifecycle.try_out(operation, version)
        except HonedError as error:
            self._end_training("failed", str(error), **detail)
            return
        self._rollout.training, self._ended_s = None, self._monotonic()

    def _ask_again(self, operation: Operation) -> None:
        """Ask the restarted trainer again. It resumes from its saved state, which may be what kills it."""
        self._restarts += 1
        if self._restarts > MAX_RESTARTS:
            self._end_training("failed", f"the trainer was restarted {self._restarts} times")
            return
        assert self._request is not None
        log.warning("the trainer was restarted, it is asked again", operation_id=operation.operation_id, times=self._restarts)
        self._trainer.tell(self._request)

    def _end_training(self, state: str, error: str = "", **detail: Any) -> None:
        operation = self._rollout.training
        assert operation is not None
        self._rollout.training, self._ended_s = None, self._monotonic()
        self._operations.finish(operation, state, error=error, **detail)
        self._journal.audit("honed", f"recalibrate.{state}", operation.operation_id, error)
