"""The controllers' shell: batches in, policies out, once a second.

Each engine has an `EngineController` of `adapt`, which reads no clock. This module supplies its inputs (batches, overrides, the
clock) and handles its outputs (policies to send, drift alarms). A policy has a time to live and is sent again well before its
end. An engine whose daemon has died therefore falls back by itself.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable

import structlog

from honed.adapt.control.controller import EngineController
from honed.adapt.control.settings import ControllerSettings, Override
from honed.adapt.monitor.drift import Alarm
from honed.adapt.protocol import wire
from honed.adapt.protocol.workloads import workload_of
from honed.daemon.control.shared_controller import SharedController
from honed.daemon.ingest.engines import Engine
from honed.daemon.store.fair_queue import FairQueue

log = structlog.get_logger("honed.steering")

REFRESH_SHARE = 0.25
"""Share of a policy's time to live after which it is sent again unchanged."""
MAX_WAITING_BYTES, BATCH_BYTES = 4 << 20, 4 << 10
"""Size of waiting frames above which batches aren't learned, and what a batch adds to its frame's bytes. So policies stay up to
date, and memory bounded: a decoded batch has ten times its frame's bytes, and takes time however small it is."""

_Waiting = tuple[Engine, wire.EventBatch, int]
"""A batch, and the bytes of its frame."""


class Backlog:
    """Batches that wait, oldest first; engines take turns. Bounded."""

    def __init__(self) -> None:
        self._queue: FairQueue[_Waiting] = FairQueue()

    def __len__(self) -> int:
        return len(self._queue)

    def put(self, engine: Engine, batch: wire.EventBatch, num_bytes: int) -> int:
        """Add a batch. Returns how many were dropped for it, the oldest of those who have most; the last one is kept.

        Args:
            num_bytes: of its frame.
        """
        self._queue.put(engine.engine_id, (engine, batch, num_bytes), num_bytes + BATCH_BYTES)
        dropped = 0
        while self._queue.size > MAX_WAITING_BYTES and len(self) > 1:
            self._queue.drop()
            dropped += 1
        return dropped

    def take(self) -> _Waiting:
        """Remove a batch. Raises IndexError if there is none."""
        return self._queue.take()

    def move(self, engine: Engine, to: Backlog) -> None:
        """Move the batches of an engine's boot before all others of the engine in another backlog."""
        found = self._queue.take_all(engine.engine_id)
        self._queue.put_back(engine.engine_id, [one for one in found if one[0][0] is not engine])
        to._queue.put_back(engine.engine_id, [one for one in found if one[0][0] is engine])


class Steering:
    """The controllers of all engines. Guarded by the service's lock, which `observe` and `steer` take themselves.

    Args:
        lock: the service's.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        send: Callable[[bytes, wire.Policy], None],
        on_alarm: Callable[[Engine, Alarm], None],
        *,
        lock: threading.RLock,
        tells_steps: bool = False,
    ) -> None:
        self._settings, self._send, self._on_alarm, self._tells_steps = settings, send, on_alarm, tells_steps
        self._lock = lock
        self._waiting, self._held = Backlog(), Backlog()
        self._is_learning = False
        self.skipped_batches = 0
        """Batches skipped because they arrived faster than the controllers could learn."""
        self.alarms: Counter[tuple[str, str]] = Counter()
        """(engine, workload) -> alarms; the first workloads keep their names, further ones count as OTHER_WORKLOAD."""
        self.errors = 0
        """Failures to learn from a batch or to make a policy."""
        self._failing: dict[str, str] = {}

    def put(self, engine: Engine, batch: wire.EventBatch, num_bytes: int) -> None:
        """Queue a batch, whose frame has `num_bytes`, for the next `observe`."""
        self.skipped_batches += self._waiting.put(engine, batch, num_bytes)

    @property
    def num_waiting(self) -> int:
        """Batches that the controllers are to learn, or are learning."""
        with self._lock:
            return len(self._waiting) + self._is_learning

    def observe(self, limit: int = 100) -> bool:
        """Learn from at most `limit` batches. Returns True if some are left.

        Call it without the lock: frames and requests mustn't wait while a batch is learned.
        """
        for _ in range(limit):
            with self._lock:
                if not self._waiting:
                    break
                engine, batch, num_bytes = self._waiting.take()
                if engine.awaits_controller and not engine.is_replaced:
                    self.skipped_batches += self._held.put(engine, batch, num_bytes)
                    continue
                controller = self.controller(engine)
                if controller is None or batch.seq <= engine.learned_seq:
                    continue
                self._is_learning = True
            try:
                self._learn(engine, controller, batch)
            finally:
                self._is_learning = False
        return bool(self._waiting)

    def _learn(self, engine: Engine, controller: EngineController, batch: wire.EventBatch) -> None:
        turns_ended = controller.turns_ended
        try:
            alarms = controller.observe(batch)
        except Exception as error:
            self.errors += 1
            is_ours = not isinstance(error, ValueError)  # `observe` raises ValueError for inconsistent columns
            why = str(error) or type(error).__name__
            log.warning("can't learn from a batch", engine_id=engine.engine_id, seq=batch.seq, error=why, exc_info=is_ours)
            return
        if not alarms:
            return
        with self._lock:
            if controller is not engine.controller or controller.turns_ended != turns_ended:
                return  # meanwhile the engine, or the trial that explains the alarm, has ended
            for alarm in alarms:
                known = {workload for engine_id, workload in self.alarms if engine_id == engine.engine_id}
                self.alarms[engine.engine_id, workload_of(alarm.workload, known)] += 1
                self._on_alarm(engine, alarm)

    def give(self, engine: Engine, controller: EngineController | None, learned_seq: int) -> None:
        """Give an engine the controller it awaits, which knows this boot's batches up to `learned_seq` from the log."""
        engine.controller, engine.awaits_controller, engine.learned_seq = controller, False, learned_seq
        self._held.move(engine, self._waiting)

    def steer(self, wanted: Iterable[tuple[Engine, list[Override]]], now_s: float) -> None:
        """Send each engine its policy if it changed or needs a refresh. Call it without the lock, as `observe`.

        An engine whose policy can't be made falls back by itself when its last one expires; the others aren't affected.

        Args:
            wanted: engines, with the overrides that are in force for each.
        """
        for engine, overrides in wanted:
            try:
                self._steer(engine, overrides, now_s)
                self._failing.pop(engine.engine_id, None)
            except Exception as error:
                self.errors += 1
                why = f"{type(error).__name__}: {error}"
                if self._failing.get(engine.engine_id) != why:  # otherwise it would be logged once a second
                    self._failing[engine.engine_id] = why
                    log.exception("an engine isn't steered", engine_id=engine.engine_id, error=why)

    def _steer(self, engine: Engine, overrides: list[Override], now_s: float) -> None:
        with self._lock:
            controller = self.controller(engine)
            if controller is None or not self.is_steerable(engine):
                return
            controller.has_trees = engine.hello is not None and "trees" in engine.hello.capabilities
        policy = controller.propose(now_s, overrides)
        with self._lock:
            is_due = now_s - engine.policy_sent_s >= policy.ttl_s * REFRESH_SHARE
            if (policy is not engine.policy or is_due) and controller is engine.controller:
                engine.policy, engine.policy_sent_s = policy, now_s
                self._send(engine.peer, policy)

    def forget(self, engine_id: str) -> None:
        """Drop what is kept of an engine by its id."""
        self._failing.pop(engine_id, None)
        for key in [key for key in self.alarms if key[0] == engine_id]:
            del self.alarms[key]

    def controller(self, engine: Engine) -> EngineController | None:
        """The engine's controller, made on first use; None while its configuration is unknown, and after its boot's end."""
        if engine.is_replaced:
            return None
        if engine.controller is None and engine.hello is not None and not engine.awaits_controller:
            engine.controller = self.new_controller(engine.hello)
        controller: EngineController | None = engine.controller
        return controller

    def new_controller(self, hello: wire.EngineHello) -> EngineController | None:
        """A new controller; None for an engine that doesn't speculate."""
        if hello.num_spec_tokens <= 0:
            return None
        settings = self._settings_for(hello)
        if why := settings.why_no_drafts(hello.num_spec_tokens):
            log.warning("no draft length is left to choose", engine_id=hello.engine_id, why=why)
        engine = hello.engine_id, hello.num_spec_tokens, hello.max_num_seqs
        return SharedController(*engine, settings, tells_steps=self._tells_steps, chain_tokens=hello.chain_tokens)

    def fits(self, controller: EngineController, hello: wire.EngineHello) -> bool:
        """True if the engine's controller still fits its new hello."""
        is_as_long = controller.num_spec_tokens == hello.num_spec_tokens  # it changes as trees begin or end
        return is_as_long and controller.settings == self._settings_for(hello)

    def _settings_for(self, hello: wire.EngineHello) -> ControllerSettings:
        return self._settings.with_graphs(hello.captured_tokens, hello.captured_lengths)

    @staticmethod
    def is_steerable(engine: Engine) -> bool:
        """True if it can use policies: it can set draft lengths, capture, or feed vLLM's own rule."""
        hello = engine.hello
        return hello is not None and bool({"draft_length", "capture", "estimates"} & set(hello.capabilities))
