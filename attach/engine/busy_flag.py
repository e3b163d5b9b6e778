"""One byte in shared memory that says whether the engine has work: how training knows that it must yield.

Writing it costs nanoseconds and can't block. It lives in a file so that the trainer can map it, and it is a hint, not a lock:
a trainer that reads a stale 0 runs one more unit of work. Behind the byte is when it was last raised (8 bytes at offset 8,
CLOCK_MONOTONIC in ns, the same in all processes), so that the trainer can say how long it took to yield. The file is locked
(flock) for as long as the engine lives: a reader that gets the lock knows that whoever raised the flag is dead, so a killed
engine doesn't hold training up for good.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import time
from pathlib import Path


class BusyFlag:
    """The writer's side; `path` is made anew, readable by its owner and group."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            path.unlink()  # a new file: the lock on the old one may still be held by an engine that is going
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._map = mmap.mmap(self._descriptor, mmap.PAGESIZE)
        self._is_busy = False

    def set(self, is_busy: bool) -> None:
        """Say whether there is work; costs nothing when that hasn't changed."""
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            if is_busy:
                self._map[8:16] = time.monotonic_ns().to_bytes(8, "little")
            self._map[0] = 1 if is_busy else 0

    def close(self) -> None:
        """Leave the flag down, so that training isn't held back by an engine that is gone."""
        self.set(False)
        self._map.close()
        os.close(self._descriptor)
