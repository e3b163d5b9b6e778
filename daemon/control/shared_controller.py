"""A controller that one thread may teach while others ask."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from honed.adapt.control.controller import EngineController, Event
from honed.adapt.control.settings import Override
from honed.adapt.protocol.wire import EventBatch, Policy


class SharedController(EngineController):
    """An EngineController with a lock of its own. It is taken last: who holds it waits for no other.

    `take_turns` and `end_turns` don't wait for it.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._lock = threading.Lock()

    def observe(self, batch: EventBatch) -> list[Event]:
        """As the parent's."""
        with self._lock:
            return super().observe(batch)

    def propose(self, now_s: float, override: Override | Sequence[Override] | None = None) -> Policy:
        """As the parent's."""
        with self._lock:
            return super().propose(now_s, override)

    def beliefs(self) -> dict[str, object]:
        """As the parent's."""
        with self._lock:
            return super().beliefs()

    def headline(self) -> dict[str, float | None]:
        """As the parent's."""
        with self._lock:
            return super().headline()
