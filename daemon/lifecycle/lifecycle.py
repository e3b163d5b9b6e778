"""The lifecycle of a drafter version after its training: trial, promotion, roll-back, and operators' requests.

    recalibrate: see recalibrations.py; alias candidate -> canary -> aliases active, previous -> swap; or candidate is dropped
    promote:     swap -> aliases active, previous -> watched against the previous one
    rollback:    aliases first, then swap: engines converge to `active` even if the command is lost
    drift:       if the active version gets worse, it is watched against the previous one

A canary and a watch are the same trial (canaries.py); they differ in the active version. A promotion or a roll-back has
succeeded when the engines run the version; a watch may still continue. At most one swap and one trial run at a time. If
something blocks a request, a ConflictError names it.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Literal

import structlog

from honed.adapt.monitor.drift import Alarm
from honed.daemon.errors import ConflictError, HonedError, UnknownError
from honed.daemon.ingest.engines import Engine
from honed.daemon.lifecycle import swaps
from honed.daemon.lifecycle.canaries import Canaries
from honed.daemon.lifecycle.drafters import Drafters
from honed.daemon.lifecycle.eligible_engines import EligibleEngines
from honed.daemon.lifecycle.rollout import Rollout
from honed.daemon.lifecycle.swaps import Swap, Swaps
from honed.daemon.lifecycle.trial import Due, Trial
from honed.daemon.store.journal import Journal
from honed.daemon.store.operations import PROVEN, Operation, Operations

log = structlog.get_logger("honed.lifecycle")

CHALLENGE_PAIRS = 200
"""Pairs of windows in which a regressed version is compared with the previous one; then it is recalibrated."""
GONE_S = 60.0
"""So soon after a version was taken out, a roll-back has to name the next one: its caller may mean the one that went."""
_RETRY_S = 30.0
"""Pause after a verdict that couldn't be carried out, since the aliases couldn't be moved."""


class Lifecycle:
    """Swaps, trials and their consequences. Guarded by the service's lock."""

    def __init__(
        self,
        rollout: Rollout,
        *,
        canaries: Canaries,
        swaps: Swaps,
        drafters: Drafters,
        eligible: EligibleEngines,
        operations: Operations,
        journal: Journal,
        challenge_pause_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._rollout, self._canaries, self._swaps = rollout, canaries, swaps
        self._drafters, self._eligible = drafters, eligible
        self._operations, self._journal = operations, journal
        self._challenge_pause_s, self._monotonic = challenge_pause_s, monotonic
        self.rollbacks: Counter[str] = Counter()
        self._challenged_s = float("-inf")
        self._gone, self._gone_s = "", float("-inf")
        """The version that was taken out last, and when."""
        self._due_s = 0.0
        """Time of the next try of what is due."""
        self._promoting: Swap | None = None
        """The swap of a running promotion."""
        self.promotions: Counter[str] = Counter()
        """Versions made active, by the kind of operation."""

    def load(self) -> None:
        """Resume the daemon's earlier work as far as possible."""
        resumed = self._canaries.load()
        drafters = self._drafters
        self._operations.load(resumed, drafters.active)
        if self._rollout.trial is None and drafters.alias("candidate"):
            try:
                drafters.move({"candidate": None})
            except HonedError as error:
                log.error("the alias of a candidate without a trial wasn't removed", error=str(error))

    # --- requests of operators, recalibrations and drift ------------------------------------------------------------------

    def promote(
        self, version: str, *, reason: str, actor: str, force: bool = False, key: str | None = None, dry_run: bool = False
    ) -> Operation:
        """Make a version active. `force` does so even if no engine is connected or it failed before, and without watching it;
        `dry_run` only checks.

        Raises:
            UnknownError, ConflictError
        """
        engines = self._eligible.swappable(version, takes_over=True)  # before reading the file: no messages meanwhile
        self._drafters.verified(version)
        if version == self._drafters.active and not force:
            raise ConflictError(
                f"{version} is active already",
                cure="No action is needed; --force swaps it in again. `honed drafters` shows the active version.",
            )
        if (why := self._canaries.why_failed(version)) and not force:
            raise ConflictError(f"{version} isn't offered again: {why}", cure="--force makes it active anyway.")
        self._rollout.check_no_swap()
        if not engines and not force:
            raise ConflictError(
                self._eligible.why_none(version),
                cure="`honed engines` lists them; --force makes it active now, and engines follow when they connect.",
            )
        if dry_run:
            takers = [engine.engine_id for engine in engines]
            return self._operations.planned("promote", reason, actor, version=version, engines=takers)
        operation = self._operations.create("promote", "swapping", reason, actor, key, version=version, force=force)
        self._journal.audit(actor, "promote", version, reason, operation.operation_id)
        self._rollout.swapping = operation  # don't send the engines home first
        self._canaries.stop(f"{version} was promoted by {actor}")
        if engines:
            self._promoting = self._swaps.begin(version, engines, lambda swap: self._promoted(operation, swap))
        else:
            self._rollout.swapping = None
            with self._failing(operation):
                self._make_active(version, operation.kind)
            self._operations.finish(operation, "succeeded", note="no engine is connected; they follow when they are")
        return operation

    def roll_back(
        self,
        *,
        version: str = "",
        is_current: bool = False,
        reason: str,
        actor: str,
        key: str | None = None,
        dry_run: bool = False,
    ) -> Operation:
        """Take a version out: the candidate on trial or the one being promoted, else the active one.

        In place of the active one comes the previous version, else the floor, whichever is whole.

        Args:
            version: the one that is to go; "": the first of these.
            is_current: whether the caller has seen the present state, so that no name is needed.

        Raises:
            ConflictError: the version isn't one of these, it isn't clear which one is meant, or there is none to go back to.
        """
        active = self._drafters.active
        trial, promotion = self._rollout.trial, self._rollout.swapping
        candidate = trial.canary.new if trial is not None and trial.kind == "canary" else ""
        new = candidate
        if not new and active and promotion is not None and promotion.kind == "promote":
            new = promotion.detail["version"]
        self._check_to_go(version, is_current, new, active)
        if new and version in ("", new):
            if dry_run:
                takers = [engine.engine_id for engine in self._eligible.swappable(active)]
                return self._operations.planned("rollback", reason, actor, version=active, rolled_back=new, engines=takers)
            operation = self._operations.create("rollback", "swapping", reason, actor, key, version=active, rolled_back=new)
            self._journal.audit(actor, "rollback", new, reason, operation.operation_id)
            if candidate:
                self._canaries.withdraw(_rolled_back(actor, reason))
            else:
                self.end_promotion(_rolled_back(actor, reason))
            state = "on trial" if candidate else "being promoted"
            self._operations.finish(operation, "succeeded", note=f"{new} was {state}; {active} stays active")
            return operation
        target = self._way_back(active)
        running = self._rollout.swapping
        if running is None or running.kind not in PROVEN or self._rollout.due is not None:
            self._rollout.check_no_swap()  # else its version is active: engines that haven't it yet needn't be waited for
        if dry_run:
            takers = [engine.engine_id for engine in self._eligible.swappable(target)]
            return self._operations.planned("rollback", reason, actor, version=target, rolled_back=active, engines=takers)
        operation = self._operations.create("rollback", "swapping", reason, actor, key, version=target, rolled_back=active)
        self._journal.audit(actor, "rollback", active, reason, operation.operation_id)
        with self._failing(operation):
            self._go_back(target)
        self._rollout.swapping = operation  # the engines are sent home once, below
        if candidate:
            self._canaries.stop(f"{active} was rolled back by {actor}")
        else:
            self._canaries.withdraw(_rolled_back(actor, reason))
        self._went_back(operation, active, "operator")
        return operation

    def _check_to_go(self, version: str, is_current: bool, new: str, active: str) -> None:
        """Raise ConflictError if a roll-back would take out another version than its caller means, as far as that is known."""
        if version and version not in (new, active):
            there = f"{new} is new and {active} active" if new else f"{active or 'none'} is active"
            raise ConflictError(
                f"{version} can't be taken out: {there}",
                cure="It may have gone already: `honed operations` and `honed drafters` show it.",
            )
        ago_s = self._monotonic() - self._gone_s
        if not version and not is_current and ago_s < GONE_S:
            raise ConflictError(
                f"{self._gone} was taken out {ago_s:.0f} s ago, perhaps by somebody else, and {new or active} would go now",
                cure=f"Name the version that is to go: `honed rollback {new or active}`.",
            )

    def _note_gone(self, version: str) -> None:
        self._gone, self._gone_s = version, self._monotonic()

    def _way_back(self, active: str) -> str:
        """The previous version, else the floor, whichever is whole. Raises ConflictError if neither is, with the reasons."""
        aliases = self._drafters.aliases()
        faults = {v: self._drafters.fault(v) for v in (aliases["previous"], aliases["floor"]) if v and v != active}
        target = next((version for version, fault in faults.items() if not fault), "")
        if not target:
            why = "".join(f"; {fault}" for fault in faults.values())
            raise ConflictError(
                f"there is no previous drafter to go back to; active is {active or 'none'}{why}",
                cure="`honed drafters` lists the versions; `honed promote VERSION` goes to any of them.",
            )
        return target

    def _go_back(self, target: str) -> None:
        """Move the aliases first: from then on every engine gets the old version, even if we are killed then."""
        self._drafters.move({"active": target, "previous": None, "candidate": None})
        self._settle_due()

    def _went_back(self, operation: Operation, old: str, cause: str) -> None:
        target = operation.detail["version"]
        self._note_gone(old)
        self.rollbacks[cause] += 1
        self._journal.mark("rollback", f"{old} -> {target}: {operation.reason or cause}")
        self._send_home(target, operation)

    def end_promotion(self, text: str) -> None:
        """Cancel the running promotion, and swap its engines back to the active version; no engine is waited for."""
        operation, swap, active = self._rollout.swapping, self._promoting, self._drafters.active
        assert operation is not None
        self._rollout.swapping = self._promoting = None
        self._note_gone(operation.detail["version"])
        if swap is not None:
            self._swaps.give_up(swap)
        self._operations.finish(operation, "cancelled", error=f"{text}; {active or 'no version'} stays active")
        if active:
            self._send_home(active)

    def try_out(self, operation: Operation, version: str) -> None:
        """Let a candidate take turns with the active version.

        Raises:
            ConflictError: the same weights failed before, a swap or trial is running, a verdict is due, or no engine can run
                both versions.
            UnknownError, StoreError
        """
        active = self._drafters.active
        engines = self._eligible.swappable(version, active)  # before reading the file: no messages meanwhile
        self._drafters.verified(version)
        if why := self._canaries.why_failed(version):
            raise ConflictError(f"these weights aren't offered again: {why}")
        self._rollout.check_no_swap()
        self._rollout.check_nothing_due()
        if self._rollout.trial is not None:
            raise ConflictError(f"{self._rollout.trial.canary.new} is on trial")
        if not engines:
            why = self._eligible.why_none(active, version) if active else "no version is active to compare it with"
            raise ConflictError(f"{why}; `honed promote {version}` makes it active without a trial")
        self._drafters.move({"candidate": version})
        self._operations.move(operation, stage="canary", version=version)
        self._canaries.begin(operation, "canary", active, version)

    def challenge(self, alarm: Alarm) -> None:
        """Compare the active version, if it got worse, with the previous one, if there is one."""
        if alarm.kind != "regressed":
            return
        now_s = self._monotonic()
        aliases = self._drafters.aliases()
        active, previous = aliases["active"], aliases["previous"]
        is_due = now_s - self._challenged_s >= self._challenge_pause_s
        if not (active and previous and active != previous and alarm.drafter_version == active and is_due):
            return
        if not self._rollout.is_quiet or not self._eligible.swappable(active, previous):
            return
        self._challenged_s = now_s
        operation = self._operations.create("watch", "watching", alarm.text, "honed", None, version=active)
        try:
            self._canaries.begin(operation, "watch", previous, active, CHALLENGE_PAIRS)
        except UnknownError as error:
            self._operations.finish(operation, "failed", error=str(error))
        else:
            self._operations.finish(operation, "succeeded", stage="watching")

    # --- steps ----------------------------------------------------------------------------------------------------------

    def _promoted(self, operation: Operation, swap: Swap) -> None:
        """Handle the engines' answers to an operator's promotion."""
        self._rollout.swapping = self._promoting = None
        if swaps.has_failed(swap):
            self._note_gone(swap.version)
            # The next tick brings engines that took it back to `active`, which hasn't moved.
            self._operations.finish(operation, "failed", error=swaps.failure_text(swap), **swaps.figures(swap))
            self._journal.audit("honed", f"{operation.kind}.failed", swap.version, operation.error)
            return
        old = self._drafters.active
        try:
            self._make_active(swap.version, operation.kind)
        except HonedError as error:
            self._operations.finish(operation, "failed", error=f"the alias was not moved: {error}")
            return
        self._journal.mark("promote", f"{old} -> {swap.version}")
        self._journal.audit("honed", f"{operation.kind}.swapped", swap.version, operation.reason)
        is_wanted = bool(old) and old != swap.version and not operation.detail.get("force") and not self._drafters.fault(old)
        is_watched = is_wanted and bool(self._eligible.swappable(swap.version, old))
        figures = swaps.figures(swap) | {"version": swap.version}
        if swap.failures:
            figures["note"] = f"{swaps.failure_text(swap)}; it follows"
        if is_wanted and not is_watched:
            figures["watch"] = f"not watched: {self._eligible.why_none(old, swap.version)}"
        self._operations.finish(operation, "succeeded", stage="watching" if is_watched else "done", **figures)
        if is_watched:
            self._canaries.begin(operation, "watch", old, swap.version)

    def on_trial_end(self, trial: Trial, decision: str, text: str) -> bool:
        """Act on a trial's end; False if the verdict is due, since the aliases couldn't be moved.

        `decision`: better, worse, unproven; without one: withdrawn, stopped (both by an operator), or failed (a swap was
        refused, or its engines are gone).
        """
        operation = self._operations.find(trial.operation_id)
        self._journal.audit("honed", f"{trial.kind}.{decision}", trial.canary.new, text)
        if trial.kind == "canary":
            self._end_canary(trial, operation, decision, text)
        else:
            if operation is not None:
                self._operations.move(operation, stage="done", watch=text)
            if decision == "worse" and self._drafters.active == trial.canary.new:
                self._take_back(trial, text)
            elif self._rollout.swapping is None and self._drafters.active in trial.versions:
                self._send_home(self._drafters.active)
        return self._rollout.due is None

    def _end_canary(self, trial: Trial, operation: Operation | None, decision: str, text: str) -> None:
        new, old = trial.canary.new, trial.canary.old
        is_valid = self._drafters.active == old
        if decision == "better" and not is_valid:
            decision, text = "failed", f"{text}; another version became active meanwhile"
        try:
            if decision == "better":
                self._make_active(new, operation.kind if operation is not None else "recalibrate")
                self._journal.mark("promote", f"{old} -> {new}")
            else:
                self._drafters.move({"candidate": None})
        except HonedError as error:
            if decision == "better" and not self._drafters.fault(new):
                self._rollout.swapping = operation
                self._note_due(trial, "better", text, error)
                return
            log.error("aliases were not moved after a canary", version=new, error=str(error))
            decision, text = "failed", f"{text}; the aliases were not moved: {error}"
        if decision != "better":
            self._note_gone(new)
        if decision in ("worse", "withdrawn"):
            self.rollbacks["canary" if decision == "worse" else "operator"] += 1
            self._journal.mark("rollback", f"{new} -> {old}: {text}")
        if operation is not None and decision != "better":
            state = "cancelled" if decision in ("stopped", "withdrawn") else "failed"
            self._operations.finish(
                operation, state, error=f"{text}; {self._drafters.active} stays active", canary=trial.view()
            )
            operation = None
        elif operation is not None:
            self._operations.move(operation, stage="swapping", canary=trial.view())
        if is_valid and self._rollout.swapping is None:
            self._send_home(self._drafters.active, operation)

    def tick(self, now_s: float) -> None:
        """Once a second: try again what a verdict asks for, if the aliases couldn't be moved."""
        due = self._rollout.due
        if due is None or now_s < self._due_s:
            return
        if due.decision == "better":
            self._rollout.due = self._rollout.swapping = None
            self._end_canary(due.trial, self._operations.find(due.trial.operation_id), "better", due.text)
        elif self._rollout.swapping is not None:
            return
        else:
            self._rollout.due = None
            if self._drafters.active == due.trial.canary.new:
                self._take_back(due.trial, due.text)
        if self._rollout.due is None:
            self._canaries.close(due.trial, due.decision, due.text)

    def _take_back(self, trial: Trial, text: str) -> None:
        """Roll the active version back, which was found worse. Until that is possible it is due, and leaves no operations."""
        active = self._drafters.active
        try:
            target = self._way_back(active)
            self._rollout.check_no_swap()
            self._go_back(target)
        except HonedError as error:
            self._note_due(trial, "worse", text, error)
            return
        operation = self._operations.create("rollback", "swapping", text, "honed", None, version=target, rolled_back=active)
        self._journal.audit("honed", "rollback", active, text, operation.operation_id)
        self._went_back(operation, active, "canary")

    def _note_due(self, trial: Trial, decision: Literal["better", "worse"], text: str, error: HonedError) -> None:
        why = f"{error}. {error.cure}" if error.cure else str(error)
        self._rollout.due, self._due_s = Due(trial, decision, text, why), self._monotonic() + _RETRY_S
        log.error("a verdict can't be carried out yet", error=self._rollout.due.problem)

    def _settle_due(self) -> None:
        """Forget what is due: the active version was changed."""
        due, self._rollout.due = self._rollout.due, None
        if due is not None:
            self._canaries.close(due.trial, due.decision, due.text)

    @contextlib.contextmanager
    def _failing(self, operation: Operation) -> Iterator[None]:
        """Fail the operation if the aliases can't be moved."""
        try:
            yield
        except HonedError as error:
            self._operations.finish(operation, "failed", error=f"the aliases were not moved: {error}")
            raise

    def _send_home(self, version: str, operation: Operation | None = None) -> None:
        """Swap all engines to a version that is `active` by now, and release what they hold for turns."""
        engines: list[Engine] = self._eligible.swappable(version)
        if not engines:
            self._rollout.swapping = None
            if operation is not None:
                self._operations.finish(operation, "succeeded", note="no engine is connected; they follow when they are")
            return
        self._rollout.swapping = operation
        self._swaps.begin(version, engines, lambda swap: self._sent_home(operation, swap))

    def _sent_home(self, operation: Operation | None, swap: Swap) -> None:
        if operation is None:
            return
        if self._rollout.swapping is operation:
            self._rollout.swapping = None
        why = swaps.failure_text(swap)
        if why and self._drafters.active == swap.version:
            why += f"; it is retried until they run {swap.version}"
        is_proven = operation.kind in PROVEN  # its candidate is active
        if why and (is_proven or swap.failures.keys() <= swap.postponed):
            self._operations.finish(operation, "succeeded", note=why, version=swap.version)
        elif why:
            self._operations.finish(operation, "failed", error=why)
        else:
            figures = swaps.figures(swap) | {"version": swap.version}
            self._operations.finish(operation, "succeeded", **figures)

    def _make_active(self, version: str, kind: str) -> None:
        old = self._drafters.active
        is_way_back = bool(old) and old != version and not self._drafters.fault(old)
        changes: dict[str, str | None] = {"previous": old} if is_way_back else {}
        self._drafters.move(changes | {"active": version, "candidate": None})
        self._settle_due()
        self.promotions[kind] += 1


def _rolled_back(actor: str, reason: str) -> str:
    return f"rolled back by {actor}" + (f": {reason}" if reason else "")
