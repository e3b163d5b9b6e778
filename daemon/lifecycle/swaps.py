"""Swaps a drafter version into running engines, and keeps every engine at the active one.

A swap is a command to each engine, and its answer. If an engine goes away meanwhile, its reported version after its return
decides whether to ask again. An engine that runs another version than `active` (after its restart, the daemon's restart or a
half-failed swap) is swapped to it, with growing pauses between attempts, unless that version is damaged. While two versions
take turns, canaries.py decides which one an engine runs that can run both. An engine whose drafter got weights through vLLM's
own endpoints is left alone until an operator promotes a version.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import structlog

from honed.adapt.protocol import wire
from honed.daemon.errors import HonedError
from honed.daemon.ingest.engines import Engine, Engines
from honed.daemon.lifecycle.drafters import Drafters
from honed.daemon.lifecycle.rollout import Rollout

log = structlog.get_logger("honed.swaps")

MAX_PAUSE_S, MOST_DOUBLINGS = 60.0, 6
TIMEOUT_S = 330.0
"""Longest time for an engine to answer; it takes up to five minutes to read the weights from a slow disk."""
LOST_S = 60.0
"""Longest time for an engine to come back that was lost during the swap."""
_NOT_NOW = {"asleep", "foreign"}
"""Refusals that don't concern the version: the engine sleeps, or its drafter isn't honed's."""


class Beside(NamedTuple):
    """The version that another one takes turns with. Both stay staged; without messages the engine returns to `home`."""

    version: str
    home: str
    """The active one of the two."""
    lease_s: float


@dataclass(slots=True)
class Swap:
    """A swap of one version into some engines."""

    version: str
    engine_ids: list[str]
    on_done: Callable[[Swap], None]
    failures: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    """Engines that answered with a failure instead of not answering."""
    postponed: set[str] = field(default_factory=set)
    """Engines that fell asleep meanwhile, or got weights from somebody else: they follow later. They are in `failures`, too."""
    figures: dict[str, float] = field(default_factory=dict)
    """Maximum over the engines: pause_ms, stage_ms."""
    waiting: set[str] = field(default_factory=set)
    is_turn: bool = False
    """True for a turn in a trial."""


@dataclass(slots=True)
class _Sent:
    engine_id: str
    swap: Swap
    command: wire.SwapCommand
    since_s: float


@dataclass(slots=True)
class _Attempts:
    count: int = 0
    next_s: float = 0.0


class Swaps:
    """All running swaps. Guarded by the service's lock.

    Args:
        on_refusal: called with a version that an engine refused: its files may be damaged.
    """

    def __init__(
        self,
        engines: Engines,
        drafters: Drafters,
        rollout: Rollout,
        send: Callable[[bytes, wire.SwapCommand], None],
        monotonic: Callable[[], float],
        on_refusal: Callable[[str], object],
    ) -> None:
        self._engines, self._drafters, self._rollout, self._send = engines, drafters, rollout, send
        self._monotonic, self._on_refusal = monotonic, on_refusal
        self._sent: dict[str, _Sent] = {}
        self._attempts: dict[str, _Attempts] = {}
        self.results: Counter[str] = Counter()
        self.last_pause_s = 0.0

    def begin(self, version: str, engines: list[Engine], on_done: Callable[[Swap], None], beside: Beside | None = None) -> Swap:
        """Send a version to engines; call `on_done` once all have answered or timed out.

        Raises:
            HonedError: the version doesn't exist.
        """
        weights = self._weights(version)
        turns = self._turns(beside) if beside is not None else None
        swap = Swap(version, [engine.engine_id for engine in engines], on_done, is_turn=beside is not None)
        swap.waiting.update(swap.engine_ids)
        for engine in engines:
            self._drop(engine.engine_id)
            command = wire.SwapCommand(
                command_id=secrets.token_hex(8),
                weights=weights,
                drops_cache=not self._drafters.shares_cache(engine.live_version, version),
                takes_over=engine.has_foreign_drafter,
                turns=turns,
            )
            self._sent[command.command_id] = _Sent(engine.engine_id, swap, command, self._monotonic())
            self._send(engine.peer, command)
        return swap

    def give_up(self, swap: Swap) -> None:
        """Forget a swap: late answers don't count, and `on_done` isn't called."""
        for sent in [sent for sent in self._sent.values() if sent.swap is swap]:
            del self._sent[sent.command.command_id]

    def _turns(self, beside: Beside) -> wire.Turns:
        return wire.Turns(beside=self._weights(beside.version), home_version=beside.home, lease_s=beside.lease_s)

    def _weights(self, version: str) -> wire.DrafterWeights:
        path = str(self._drafters.path(version))
        return wire.DrafterWeights(version=version, path=path, sha256=self._drafters.manifest(version).sha256)

    @property
    def versions(self) -> set[str]:
        """Versions being swapped into engines."""
        return {sent.swap.version for sent in self._sent.values()}

    def on_result(self, result: wire.CommandResult) -> None:
        """Handle an engine's answer."""
        sent = self._sent.pop(result.command_id, None)
        if sent is None:
            return
        engine = self._engines.by_id.get(sent.engine_id)
        if result.ok:
            if engine is not None:
                engine.live_version = sent.swap.version
            for name, value in result.figures.items():
                sent.swap.figures[name] = max(value, sent.swap.figures.get(name, value))
            self.last_pause_s = result.figures.get("pause_ms", 0.0) / 1000.0
            tell = log.debug if sent.swap.is_turn else log.info
            tell("engine swapped", engine_id=sent.engine_id, version=sent.swap.version, steps=result.detail.get("steps", ""))
        is_postponed = not result.ok and bool(_NOT_NOW & result.detail.keys())
        if is_postponed:
            sent.swap.postponed.add(sent.engine_id)
        elif not result.ok:
            sent.swap.refused.add(sent.engine_id)
            self._on_refusal(sent.swap.version)
        failure = "" if result.ok else result.error or "the engine gave no reason"
        self._settle(sent, failure, "postponed" if is_postponed else "")

    def on_engine(self, engine: Engine, now_s: float) -> None:
        """Handle an engine's return: its version shows whether the swap happened; if not, ask again."""
        self._attempts.pop(engine.engine_id, None)
        for sent in [s for s in self._sent.values() if s.engine_id == engine.engine_id]:
            if engine.live_version == sent.swap.version:
                del self._sent[sent.command.command_id]
                self._settle(sent, "")
            else:
                sent.since_s = now_s
                self._send(engine.peer, sent.command)

    def forget(self, engine_id: str) -> None:
        """Drop what is kept of an engine by its id."""
        self._attempts.pop(engine_id, None)

    def tick(self, now_s: float) -> None:
        """Give up overdue swaps; swap stray engines to the active version."""
        for sent in list(self._sent.values()):
            engine = self._engines.by_id.get(sent.engine_id)
            is_there = engine is not None and self._engines.is_connected(engine, now_s)
            most_s, since_s = TIMEOUT_S, sent.since_s
            if not is_there:
                most_s, since_s = LOST_S, max(since_s, engine.last_seen_s if engine is not None else since_s)
            if now_s - since_s > most_s and sent.command.command_id in self._sent:
                del self._sent[sent.command.command_id]
                why = "did not answer the swap command" if is_there else "was lost during the swap"
                self._settle(sent, f"it {why} (waited {most_s:g} s)")
        self._reconcile(now_s)

    def _reconcile(self, now_s: float) -> None:
        active = self._drafters.active
        if self._drafters.fault(active):
            active = ""
        # Those of a swap that goes on aren't at the active version yet, or no longer; the others needn't wait for its end.
        busy = {engine_id for sent in self._sent.values() for engine_id in sent.swap.engine_ids}
        for engine in self._engines.connected(now_s):
            if engine.engine_id in busy:
                continue
            attempts = self._attempts.setdefault(engine.engine_id, _Attempts())
            if engine.live_version == active:
                attempts.count = 0
            elif engine.live_version and now_s >= attempts.next_s:
                if self.is_in_trial(engine) or not (wanted := self._wanted(engine, active)):  # both read manifests
                    attempts.count = 0
                    continue
                attempts.next_s = now_s + min(MAX_PAUSE_S, 2.0**attempts.count)
                attempts.count = min(attempts.count + 1, MOST_DOUBLINGS)
                log.info("engine isn't at its version", engine_id=engine.engine_id, runs=engine.live_version, wanted=wanted)
                try:
                    self.begin(wanted, [engine], self._log_reconciled)
                except HonedError as error:
                    log.error("a version can't be used", version=wanted, error=str(error))

    def _wanted(self, engine: Engine, active: str) -> str:
        """The version that an engine should run now: `active`, or else what it came with if it has lost its weights; ""."""
        if active and self.fits(engine, active):
            return active
        own = engine.boot.own_version
        return own if engine.live_version == wire.LOST_DRAFTER and own and self.fits(engine, own) else ""

    def fits(self, engine: Engine, version: str, *, takes_over: bool = False, awake: bool = True) -> bool:
        """True if an engine can take a version now: it can swap, is awake, and serves the version's target with its method.

        Args:
            takes_over: also if its drafter's weights aren't from honed.
            awake: without it, also if it sleeps.
        """
        if not engine.can_swap or (engine.is_asleep and awake):
            return False
        if engine.has_foreign_drafter and not takes_over:
            return False
        return self._drafters.is_for(version, engine.hello)

    def is_in_trial(self, engine: Engine, *, awake: bool = True) -> bool:
        """True if an engine takes part in the running trial: it can run both versions."""
        trial = self._rollout.trial
        return trial is not None and all(self.fits(engine, version, awake=awake) for version in trial.versions)

    def _settle(self, sent: _Sent, failure: str, excuse: str = "") -> None:
        """Note an engine's answer. `excuse`: what a failure is that isn't one of the swap, "replaced" or "postponed"."""
        swap = sent.swap
        self.results[excuse or ("failed" if failure else "turn" if swap.is_turn else "ok")] += 1
        if failure:
            swap.failures[sent.engine_id] = failure
        if failure and not excuse:
            log.warning("swap failed", engine_id=sent.engine_id, version=swap.version, error=failure)
        swap.waiting.discard(sent.engine_id)
        if not swap.waiting:
            swap.on_done(swap)

    def _drop(self, engine_id: str) -> None:
        """End an older swap of an engine that gets a newer one."""
        for sent in [s for s in self._sent.values() if s.engine_id == engine_id]:
            del self._sent[sent.command.command_id]
            self._settle(sent, "another swap took its place", "replaced")

    @staticmethod
    def _log_reconciled(swap: Swap) -> None:
        if not swap.failures:
            log.info("engine is at its version again", engine_id=swap.engine_ids[0], version=swap.version)


def has_failed(swap: Swap) -> bool:
    """Whether an engine didn't take the version, though it could, or none has taken it."""
    return bool(swap.failures.keys() - swap.postponed) or swap.failures.keys() >= set(swap.engine_ids)


def failure_text(swap: Swap) -> str:
    """Failures, engine by engine."""
    return "; ".join(f"engine {engine_id}: {why}" for engine_id, why in sorted(swap.failures.items()))


def figures(swap: Swap) -> dict[str, Any]:
    """The swap's part in an operation."""
    return dict(swap.figures)
