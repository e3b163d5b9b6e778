"""The life of a drafter version once it is made: swap in, watch, keep or roll back; and an operator's promote and rollback.

    recalibrate: see recalibrations.py; it ends in the same swap
    promote:     swap -> aliases active, previous -> watch
    rollback:    aliases first, then swap: whatever happens to the command, engines converge to what `active` says

An operation has succeeded when the engines run the new version; the watch goes on behind it. At most one swap is under way;
everything that stands in the way of a request is a ConflictError that says what.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from honed.adapt import wire
from honed.adapt.canary import SwapWatch
from honed.daemon import capable, swaps
from honed.daemon.engines import Engine
from honed.daemon.errors import ConflictError, HonedError
from honed.daemon.operations import Operation
from honed.daemon.swaps import Swap

if TYPE_CHECKING:
    from honed.daemon.service import Service

log = structlog.get_logger("honed.lifecycle")


@dataclass(slots=True)
class Watch:
    """A fresh version under observation, in each engine that runs it."""

    operation: Operation
    version: str
    previous: str
    deadline_s: float
    by_engine: dict[str, SwapWatch] = field(default_factory=dict)


class Lifecycle:
    """Swaps and watches. Guarded by the service's lock."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._settings = service.settings.recalibration
        self.swapping: Operation | None = None
        self.watch: Watch | None = None
        self.rollbacks: Counter[str] = Counter()
        self.promotions: Counter[str] = Counter()
        """Versions made active, by the kind of operation."""

    @property
    def current(self) -> Operation | None:
        """The operation that is under way, a swap before a training."""
        return self.swapping or self._service.recalibrations.training

    # --- what operators (and drift) ask for -----------------------------------------------------------------------------

    def promote(self, version: str, *, reason: str, actor: str, force: bool = False, key: str | None = None) -> Operation:
        """Make a version the active one. `force` does so also while no engine is there to take it.

        Raises:
            UnknownError, ConflictError
        """
        service = self._service
        service.drafters.verified(version)
        if version == service.drafters.active and not force:
            raise ConflictError(
                f"{version} is active already",
                cure="Nothing needs to be done; --force swaps it in again. `honed drafters` shows what is active.",
            )
        engines = self._swappable(version)
        self.check_no_swap()
        if not engines and not force:
            raise ConflictError(
                capable.why_none(service, version),
                cure="`honed engines` lists them; --force makes it active now, and engines follow when they connect.",
            )
        operation = service.operations.create("promote", "swapping", reason, actor, key, version=version)
        service.journal.audit(actor, "promote", version, reason, operation.operation_id)
        if engines:
            self.swap_in(operation, version, engines)
        else:
            self._make_active(version, operation.kind)
            service.operations.finish(operation, "succeeded", note="no engine is connected; they follow when they are")
        return operation

    def roll_back(self, *, reason: str, actor: str, cause: str = "operator", key: str | None = None) -> Operation:
        """Go back to the previous version. Raises ConflictError when there is none."""
        service = self._service
        aliases = service.drafters.aliases()
        active, target = aliases["active"] or "", aliases["previous"] or aliases["floor"] or ""
        if not target or target == active:
            raise ConflictError(
                f"there is no previous drafter to go back to; active is {active or 'none'}",
                cure="`honed drafters` lists the versions; `honed promote VERSION` goes to any of them.",
            )
        self.check_no_swap()
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

    # --- what engines and the trainer say -------------------------------------------------------------------------------

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

    def tick(self, now_s: float) -> None:
        """Deadlines."""
        if self.watch is not None and now_s > self.watch.deadline_s:
            self._keep(self.watch, f"nothing was found against it in {self._settings.watch_max_s:g} s")

    # --- steps ----------------------------------------------------------------------------------------------------------

    def swap_in(self, operation: Operation, version: str, engines: list[Engine]) -> None:
        """Bring a version into engines for an operation; when they all have it, it becomes active and is watched."""
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
            self._make_active(swap.version, operation.kind)
        except HonedError as error:
            service.operations.finish(operation, "failed", error=f"the alias was not moved: {error}")
            return
        service.journal.mark("promote" if operation.kind == "promote" else "swap", f"{watch.previous} -> {swap.version}")
        service.journal.audit("honed", f"{operation.kind}.swapped", swap.version, operation.reason)
        self._end_watch("another version took its place")
        watch.deadline_s = service.monotonic() + self._settings.watch_max_s
        self.watch = watch
        service.operations.finish(operation, "succeeded", stage="watching", version=swap.version, **swaps.figures(swap))

    def _make_active(self, version: str, kind: str) -> None:
        old = self._service.drafters.active
        changes: dict[str, str | None] = {"previous": old} if old and old != version else {}
        self._service.drafters.move(changes | {"active": version, "candidate": None})
        self.promotions[kind] += 1

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

    def check_no_swap(self) -> None:
        """Raises ConflictError while another swap is under way."""
        if self.swapping is not None:
            running = self.swapping.operation_id
            raise ConflictError(
                f"operation {running} is swapping a drafter", cure=f"Wait for its end: `honed operations {running}`."
            )
