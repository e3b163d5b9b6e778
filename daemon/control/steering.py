"""The controllers' shell: batches in, policies out, once a second.

Each engine has an `EngineController` of `adapt`, which is pure; here are its inputs (batches, the operator's overrides, the
clock) and its outputs (policies to send, drift alarms to act on). A policy has a time to live; it is sent again well before
that runs out, so an engine whose daemon has died falls back by itself.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from honed.adapt.control.controller import EngineController
from honed.adapt.control.settings import ControllerSettings, Override
from honed.adapt.monitor.drift import Alarm
from honed.adapt.protocol import wire
from honed.daemon.ingest.engines import Engine

log = structlog.get_logger("honed.steering")

REFRESH_SHARE = 0.25
"""Of a policy's time to live, after which an unchanged one is sent again."""
MAX_WAITING_BATCHES = 1000


class Steering:
    """Controllers of all engines. Guarded by the service's lock."""

    def __init__(
        self,
        settings: ControllerSettings,
        send: Callable[[bytes, wire.Policy], None],
        on_alarm: Callable[[Engine, Alarm], None],
    ) -> None:
        self._settings, self._send, self._on_alarm = settings, send, on_alarm
        self._waiting: deque[tuple[Engine, wire.EventBatch]] = deque()
        self.skipped_batches = 0
        """Batches that the controllers never saw because they came faster than they could be learned from."""
        self.alarms: Counter[tuple[str, str]] = Counter()
        self.errors = 0
        """Batches that taught nothing, and policies that couldn't be made."""
        self._failing: dict[str, str] = {}

    def put(self, engine: Engine, batch: wire.EventBatch) -> None:
        """Note a batch to learn from at the next `observe`."""
        if len(self._waiting) >= MAX_WAITING_BATCHES:
            self._waiting.popleft()
            self.skipped_batches += 1
        self._waiting.append((engine, batch))

    def observe(self, limit: int = 100) -> bool:
        """Learn from at most `limit` batches. Returns whether some are left."""
        for _ in range(min(limit, len(self._waiting))):
            engine, batch = self._waiting.popleft()
            controller = self.controller(engine)
            if controller is None:
                continue
            try:
                alarms = controller.observe(batch)
            except Exception as error:
                self.errors += 1
                is_ours = not isinstance(error, ValueError)  # what `observe` says of a batch whose columns don't fit together
                why = str(error) or type(error).__name__
                log.warning("a batch taught nothing", engine_id=engine.engine_id, seq=batch.seq, error=why, exc_info=is_ours)
                continue
            for alarm in alarms:
                self.alarms[engine.engine_id, alarm.workload] += 1
                self._on_alarm(engine, alarm)
        return bool(self._waiting)

    def steer(self, engines: Iterable[Engine], overrides: list[Override], now_s: float) -> None:
        """Send each engine its policy, if it changed or is due to be refreshed.

        An engine whose policy can't be made falls back by itself when its last one runs out; the others don't notice.
        """
        for engine in engines:
            try:
                self._steer(engine, overrides, now_s)
                self._failing.pop(engine.engine_id, None)
            except Exception as error:
                self.errors += 1
                why = f"{type(error).__name__}: {error}"
                if self._failing.get(engine.engine_id) != why:  # else it would be told once a second
                    self._failing[engine.engine_id] = why
                    log.exception("an engine isn't steered", engine_id=engine.engine_id, error=why)

    def _steer(self, engine: Engine, overrides: list[Override], now_s: float) -> None:
        controller = self.controller(engine)
        if controller is None or not self.is_steerable(engine):
            return
        policy = controller.propose(now_s, overrides)
        is_due = now_s - engine.policy_sent_s >= policy.ttl_s * REFRESH_SHARE
        if policy is not engine.policy or is_due:
            engine.policy, engine.policy_sent_s = policy, now_s
            self._send(engine.peer, policy)

    def controller(self, engine: Engine) -> EngineController | None:
        """The engine's controller, made when it is first needed; None while it isn't known what is to be steered, or how."""
        if engine.controller is None and engine.hello is not None and not engine.awaits_controller:
            engine.controller = self.new_controller(engine.hello)
        controller: EngineController | None = engine.controller
        return controller

    def new_controller(self, hello: wire.EngineHello) -> EngineController | None:
        """A controller that has seen nothing yet; None for an engine that doesn't speculate."""
        if hello.num_spec_tokens <= 0:
            return None
        settings = self._settings_for(hello)
        if why := settings.why_no_drafts(hello.num_spec_tokens):
            log.warning("no draft length is left to choose", engine_id=hello.engine_id, why=why)
        return EngineController(hello.engine_id, hello.num_spec_tokens, hello.max_num_seqs, settings)

    def fits(self, controller: EngineController, hello: wire.EngineHello) -> bool:
        """Whether a controller that was made for this engine is still the right one, now that it says this of itself."""
        return controller.settings == self._settings_for(hello)

    def _settings_for(self, hello: wire.EngineHello) -> ControllerSettings:
        return self._settings.with_graphs(hello.captured_tokens, hello.captured_lengths)

    def beliefs(self, engine: Engine) -> dict[str, Any]:
        """What the engine's controller believes, JSON-able."""
        controller = self.controller(engine)
        return dict(controller.beliefs()) if controller is not None else {}

    def headline(self, engine: Engine) -> dict[str, float | None]:
        """The few figures of `beliefs` that metrics show; cheap."""
        controller = self.controller(engine)
        return controller.headline() if controller is not None else {}

    @staticmethod
    def is_steerable(engine: Engine) -> bool:
        """Whether policies mean anything to it: it can set draft lengths, capture, or feed vLLM's own rule."""
        hello = engine.hello
        return hello is not None and bool({"draft_length", "capture", "estimates"} & set(hello.capabilities))
