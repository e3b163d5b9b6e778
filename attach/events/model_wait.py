"""Times when the engine's thread waits for the model, so other threads work then: there is one interpreter's lock.

A thread keeps the lock until it waits for something, or for 5 ms. If another thread processes a step's figures just when the
next results arrive, it delays the engine for that long.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_POLL_S = 2e-4
_ALWAYS = -1


class ModelWait:
    """Set by the engine's thread when it waits; read by other threads to see whether there is time for work."""

    def __init__(self) -> None:
        self._began_ns = _ALWAYS
        self._typical_ns = 0.0

    def begin(self) -> None:
        """Engine thread: a step is under way."""
        self._began_ns = time.perf_counter_ns()

    def end(self) -> None:
        """Engine thread: there is work again."""
        began_ns, self._began_ns = self._began_ns, 0
        if began_ns > 0:
            self._typical_ns += (time.perf_counter_ns() - began_ns - self._typical_ns) / 16

    def rest(self) -> None:
        """Engine thread: no request is left, but those that wait for their clients."""
        self._began_ns = _ALWAYS

    def may_have_room(self, needed_ns: float) -> bool:
        """Any thread: whether a wait of the usual length has so much time at all."""
        return needed_ns < self._typical_ns

    def has_room(self, needed_ns: float) -> bool:
        """Any thread: whether a wait of the usual length has so much time left."""
        began_ns = self._began_ns
        if began_ns <= 0:
            return began_ns == _ALWAYS
        return time.perf_counter_ns() - began_ns + needed_ns < self._typical_ns


class Pieces:
    """One thread's work in pieces, each done while the engine's thread waits, if it does so soon enough."""

    def __init__(self, model_wait: ModelWait) -> None:
        self._model_wait = model_wait
        self._needed_ns: dict[str, float] = {}
        self._until_s = 0.0

    def begin(self, patience_s: float) -> None:
        """Wait for so long in all from here on."""
        self._until_s = time.monotonic() + patience_s

    @contextmanager
    def one(self, kind: str) -> Iterator[None]:
        """Wait until there is time for a piece of this kind, by the length of the latest ones; then time the piece."""
        needed_ns = self._needed_ns.get(kind, 0.0)
        while (
            self._model_wait.may_have_room(needed_ns)
            and not self._model_wait.has_room(needed_ns)
            and time.monotonic() < self._until_s
        ):
            time.sleep(_POLL_S)
        began_ns = time.perf_counter_ns()
        yield
        self._needed_ns[kind] = needed_ns + (time.perf_counter_ns() - began_ns - needed_ns) / 4
        time.sleep(0)  # lets the engine's thread have the interpreter's lock, should it wait for it
