"""The life of a drafter version: recalibrate, swap in, watch, keep or roll back; and an operator's promote and rollback.

    recalibrate: TrainRequest -> TrainResult(version) -> alias candidate -> swap -> aliases active, previous -> watch
    promote:     swap -> aliases active, previous -> watch
    rollback:    aliases first, then swap: whatever happens to the command, engines converge to what `active` says

An operation has succeeded when the engines run the new version; the watch goes on behind it. At most one recalibration and
one swap are under way; everything that stands in the way of a request is a ConflictError that says what.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import structlog

from honed.adapt import wire
from honed.adapt.canary import SwapWatch
from honed.adapt.controller import Override
from honed.adapt.drift import Alarm
from honed.daemon import capable, swaps
from honed.daemon.engines import Engine
from honed.daemon.errors import ConflictError, HonedError, UnknownError
from honed.daemon.operations import Operation
from honed.daemon.swaps import Swap

if TYPE_CHECKING:
    from honed.daemon.service import Service

log = structlog.get_logger("honed.lifecycle")

STAGES = {"collecting": "collecting", "training": "training", "gating": "gating"}


@dataclass(slots=True)
class Watch:
    """A fresh version under observation, in each engine that runs it."""

    operation: Operation
    version: str
    previous: str
    deadline_s: float
    by_engine: dict[str, SwapWatch] = field(default_factory=dict)


class Lifecycle:
    """Recalibrations, swaps and watches. Guarded by the service's lock."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._settings = service.settings.recalibration
        self.training: Operation | None = None
        self.swapping: Operation | None = None
        self.watch: Watch | None = None
        self.rollbacks: Counter[str] = Counter()
        self._training_deadline_s = 0.0
        self._parent = ""
        self._engine_id = ""
        self._ended_s = float("-inf")
        self._alarm: tuple[Engine, Alarm] | None = None

    @property
    def current(self) -> Operation | None:
        """The operation that is under way, a swap before a training."""
        return self.swapping or self.training

    # --- what operators (and drift) ask for -----------------------------------------------------------------------------

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
    ) -> Operation:
        """Ask the trainer for a candidate. Raises ConflictError, UnknownError."""
        service = self._service
        if self.training is not None:
            raise ConflictError(f"recalibration {self.training.operation_id} is under way")
        if not service.trainer.is_connected:
            raise ConflictError("no trainer is connected; start honed-trainer (`honed train`)")
        engine = capable.capturing(service, engine_id)
        hello = engine.hello
        assert hello is not None
        active = service.drafters.active
        if not active:
            raise ConflictError("the registry has no active drafter to start from")
        seconds = max_seconds or self._settings.max_seconds
        operation = service.operations.create(
            "recalibrate",
            "collecting",
            reason,
            actor,
            key,
            engine_id=engine.engine_id,
            workloads=workloads or [],
            parent=active,
            dry_run=dry_run,
        )
        self.training, self._parent, self._engine_id = operation, active, engine.engine_id
        self._training_deadline_s = service.monotonic() + seconds + self._settings.grace_s
        service.trainer.tell(
            wire.TrainRequest(
                operation_id=operation.operation_id,
                engine_id=engine.engine_id,
                capture_path=hello.capture_path,
                busy_path=hello.busy_path,
                target_path=hello.target_path,
                parent_version=active,
                parent_path=str(service.drafters.path(active)),
                scope=scope or self._settings.scope,
                workloads=workloads or [],
                max_seconds=seconds,
                reason=reason,
                dry_run=dry_run,
            )
        )
        service.journal.audit(actor, "recalibrate", engine.engine_id, reason, operation.operation_id)
        return operation

    def promote(self, version: str, *, reason: str, actor: str, force: bool = False, key: str | None = None) -> Operation:
        """Make a version the active one. `force` does so also while no engine is there to take it.

        Raises:
            UnknownError, ConflictError
        """
        service = self._service
        service.drafters.verified(version)
        if version == service.drafters.active and not force:
            raise ConflictError(f"{version} is active already")
        engines = self._swappable(version)
        self._check_no_swap()
        if not engines and not force:
            raise ConflictError(capable.why_none(service, version))
        operation = service.operations.create("promote", "swapping", reason, actor, key, version=version)
        service.journal.audit(actor, "promote", version, reason, operation.operation_id)
        if engines:
            self._swap_in(operation, version, engines)
        else:
            self._make_active(version)
            service.operations.finish(operation, "succeeded", note="no engine is connected; they follow when they are")
        return operation

    def roll_back(self, *, reason: str, actor: str, cause: str = "operator", key: str | None = None) -> Operation:
        """Go back to the previous version. Raises ConflictError when there is none."""
        service = self._service
        aliases = service.drafters.aliases()
        active, target = aliases["active"] or "", aliases["previous"] or aliases["floor"] or ""
        if not target or target == active:
            raise ConflictError("there is no previous drafter to go back to")
        self._check_no_swap()
        operation = service.operations.create("rollback", "swapping", reason, actor, key, version=target, rolled_back=active)
        service.journal.audit(actor, "rollback", active, reason, operation.operation_id)
        if self.watch is not None:
            watched = self.watch.operation
            self.watch = None
            service.operations.move(watched, stage="done", watch=f"rolled back: {reason or cause}")
        # Aliases first: from here on every engine is brought to the old version, even if we are killed now.
        service.drafters.move({"active": target, "previous": None, "candidate": None})
        self.rollbacks[cause] += 1
        service.journal.mark("rollback", f"{active} -> {target}: {reason or cause}")
        engines = self._swappable(target)
        if engines:
            self.swapping = operation
            service.swaps.begin(target, engines, lambda swap: self._rolled_back(operation, swap))
        else:
            service.operations.finish(operation, "succeeded", note="no engine is connected; they follow when they are")
        return operation

    def cancel(self, operation_id: str, *, reason: str, actor: str) -> Operation:
        """Give up a recalibration that isn't in the engines yet. Raises UnknownError, ConflictError."""
        service = self._service
        operation = service.operations.get(operation_id)
        if operation.is_finished:
            raise ConflictError(f"operation {operation_id} has ended: {operation.state}")
        if operation is not self.training:
            raise ConflictError(f"operation {operation_id} is in stage {operation.stage!r}, which can't be cancelled")
        service.trainer.tell(wire.TrainCancel(operation_id=operation_id, reason=reason))
        service.journal.audit(actor, "cancel", operation_id, reason)
        self._end_training("cancelled", reason and f"cancelled: {reason}")
        return operation

    # --- what engines and the trainer say -------------------------------------------------------------------------------

    def on_trainer(self, message: wire.TrainerHello | wire.TrainerStatus | wire.TrainResult) -> None:
        """Follow the training."""
        operation = self.training
        if operation is None:
            return
        if isinstance(message, wire.TrainerHello):
            if message.operation_id != operation.operation_id:
                self._end_training("failed", "the trainer was restarted")
        elif message.operation_id != operation.operation_id:
            return
        elif isinstance(message, wire.TrainerStatus):
            operation.stage = STAGES.get(message.state, operation.stage)
            operation.detail.update(msgspec.to_builtins(message))
            operation.detail.pop("type", None)
        else:
            self._on_result(operation, message)

    def on_batch(self, engine: Engine, batch: wire.EventBatch) -> None:
        """Watch a fresh version at work."""
        if self.watch is None or engine.engine_id not in self.watch.by_engine:
            return
        watch = self.watch
        try:
            verdict = watch.by_engine[engine.engine_id].observe(batch)
        except ValueError:
            return
        if verdict.decision == "roll_back":
            self._reject(watch, verdict.text)
        elif all(w.verdict.decision == "keep" for w in watch.by_engine.values()):
            self._keep(watch, verdict.text)

    def on_alarm(self, engine: Engine, alarm: Alarm) -> None:
        """Acceptance drifted: note it, and recalibrate when that is allowed and possible."""
        service = self._service
        service.journal.mark("drift", alarm.text, engine.engine_id)
        log.warning("drift", engine_id=engine.engine_id, workload=alarm.workload, text=alarm.text)
        self._alarm = (engine, alarm)

    def tick(self, now_s: float) -> None:
        """Deadlines."""
        service = self._service
        operation = self.training
        if operation is not None:
            if not service.trainer.is_connected:
                self._end_training("failed", f"the trainer has been silent for {service.trainer.silent_s:.0f} s")
            elif now_s > self._training_deadline_s and not service.trainer.is_paused:
                service.trainer.tell(wire.TrainCancel(operation_id=operation.operation_id, reason="timed out"))
                self._end_training("failed", "the trainer did not finish in time")
        if self.watch is not None and now_s > self.watch.deadline_s:
            self._keep(self.watch, f"nothing was found against it in {self._settings.watch_max_s:g} s")
        if self._alarm is not None and self._settings.automatic and self.current is None and self.watch is None:
            self._answer_alarm(*self._alarm, now_s)

    def _answer_alarm(self, engine: Engine, alarm: Alarm, now_s: float) -> None:
        if now_s - self._ended_s < self._settings.min_interval_s:
            return
        # While nobody is there to do it the alarm stands.
        with contextlib.suppress(ConflictError, UnknownError):
            self.recalibrate(engine_id=engine.engine_id, workloads=[alarm.workload], reason=alarm.text, actor="honed")
            self._alarm = None

    def capture_override(self, engine_id: str, now_s: float) -> Override | None:
        """While a recalibration needs samples, capture from more requests than usual."""
        if self.training is None or engine_id != self._engine_id:
            return None
        return Override("capture_share", self._settings.collect_share, now_s + 60.0)

    # --- steps ----------------------------------------------------------------------------------------------------------

    def _on_result(self, operation: Operation, result: wire.TrainResult) -> None:
        service = self._service
        gate = msgspec.to_builtins(result.gate)
        detail: dict[str, Any] = {"gate": gate, "version": result.version, "steps": result.steps}
        detail |= {"tokens": result.tokens, "train_seconds": result.train_seconds, "elapsed_s": result.elapsed_s}
        if not result.ok or (not result.version and not operation.detail.get("dry_run")):
            self._end_training("failed", result.error or "no candidate passed the gate", **detail)
            return
        if operation.detail.get("dry_run"):
            self._end_training("succeeded", **detail)
            return
        try:
            service.drafters.verified(result.version)
            if (active := service.drafters.active) != self._parent:
                raise ConflictError(f"{active} became active meanwhile; the candidate was made of {self._parent}")
            self._check_no_swap()
            service.drafters.move({"candidate": result.version})
            engines = self._swappable(result.version)
            if not engines:
                why = capable.why_none(service, result.version)
                raise ConflictError(f"{why}; `honed promote {result.version}` when there is one")
        except HonedError as error:
            self._end_training("failed", str(error), **detail)
            return
        self.training, self._ended_s = None, service.monotonic()
        service.operations.move(operation, stage="swapping", **detail)
        self._swap_in(operation, result.version, engines)

    def _end_training(self, state: str, error: str = "", **detail: Any) -> None:
        operation = self.training
        assert operation is not None
        self.training, self._ended_s = None, self._service.monotonic()
        self._service.operations.finish(operation, state, error=error, **detail)
        self._service.journal.audit("honed", f"recalibrate.{state}", operation.operation_id, error)

    def _swap_in(self, operation: Operation, version: str, engines: list[Engine]) -> None:
        watch = Watch(operation, version, self._service.drafters.active, 0.0)
        for engine in engines:
            controller = self._service.steering.controller(engine)
            baselines = controller.baseline() if controller is not None else {}
            watch.by_engine[engine.engine_id] = SwapWatch(
                self._service.settings.watch_settings(), baselines, drafter_version=version
            )
        self.swapping = operation
        self._service.swaps.begin(version, engines, lambda swap: self._swapped(operation, swap, watch))

    def _swapped(self, operation: Operation, swap: Swap, watch: Watch) -> None:
        service = self._service
        self.swapping = None
        if swap.failures:
            # Engines that did take it are brought back to `active`, which hasn't moved, by the next tick.
            service.drafters.move({"candidate": None})
            service.operations.finish(operation, "failed", error=swaps.failure_text(swap), **swaps.figures(swap))
            service.journal.audit("honed", f"{operation.kind}.failed", swap.version, operation.error)
            return
        try:
            self._make_active(swap.version)
        except HonedError as error:
            service.operations.finish(operation, "failed", error=f"the alias was not moved: {error}")
            return
        service.journal.mark("promote" if operation.kind == "promote" else "swap", f"{watch.previous} -> {swap.version}")
        service.journal.audit("honed", f"{operation.kind}.swapped", swap.version, operation.reason)
        self._end_watch("another version took its place")
        watch.deadline_s = service.monotonic() + self._settings.watch_max_s
        self.watch = watch
        service.operations.finish(operation, "succeeded", stage="watching", version=swap.version, **swaps.figures(swap))

    def _make_active(self, version: str) -> None:
        old = self._service.drafters.active
        changes: dict[str, str | None] = {"previous": old} if old and old != version else {}
        self._service.drafters.move(changes | {"active": version, "candidate": None})

    def _rolled_back(self, operation: Operation, swap: Swap) -> None:
        self.swapping = None
        if swap.failures:
            why = f"{swaps.failure_text(swap)}; it is tried again until they run {swap.version}"
            self._service.operations.finish(operation, "failed", error=why)
        else:
            self._service.operations.finish(operation, "succeeded", **swaps.figures(swap))

    def _keep(self, watch: Watch, text: str) -> None:
        self._end_watch(text or "kept")
        self._service.journal.audit("honed", "watch.keep", watch.version, text)

    def _reject(self, watch: Watch, text: str) -> None:
        service = self._service
        service.journal.audit("honed", "watch.roll_back", watch.version, text)
        if service.drafters.active != watch.version:
            self._end_watch("another version is active")
            return
        try:
            self.roll_back(reason=text, actor="honed", cause="canary")
        except HonedError as error:
            log.error("a bad version can't be rolled back", version=watch.version, error=str(error))

    def _end_watch(self, text: str) -> None:
        if self.watch is not None:
            watch, self.watch = self.watch, None
            self._service.operations.move(watch.operation, stage="done", watch=text)

    def _swappable(self, version: str) -> list[Engine]:
        return capable.swappable(self._service, version)

    def _check_no_swap(self) -> None:
        if self.swapping is not None:
            raise ConflictError(f"operation {self.swapping.operation_id} is swapping a drafter")
