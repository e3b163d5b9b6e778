"""One byte in shared memory that says whether the engine has work: how training knows that it must yield.

Writing it costs nanoseconds and can't block. It lives in a file so that the trainer can map it, and it is a hint, not a lock:
a trainer that reads a stale 0 runs one more micro-step.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path


class BusyFlag:
    """The writer's side; `path` is made anew, readable by its owner and group."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            os.ftruncate(descriptor, mmap.PAGESIZE)
            self._map = mmap.mmap(descriptor, mmap.PAGESIZE)
        finally:
            os.close(descriptor)
        self._is_busy = True
        self.set(False)

    def set(self, is_busy: bool) -> None:
        """Say whether there is work; costs nothing when that hasn't changed."""
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            self._map[0] = 1 if is_busy else 0

    def close(self) -> None:
        """Leave the flag down, so that training isn't held back by an engine that is gone."""
        self.set(False)
        self._map.close()
