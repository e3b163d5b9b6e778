"""A small file that tells the trainer whether the engine has work, and about its latest steps; `step_page` has the layout.

The flag is a hint, not a lock: a trainer that reads a stale 0 runs one more unit of work. The time when it was raised lets the
trainer report how long it took to yield, and the steps what its work costs them. The engine holds a lock (flock) on the file
while it lives, so a killed engine doesn't hold up training.

The file is written with pwrite, not through a map: a map of a file that has shrunk, or of a full tmpfs, kills its process with
SIGBUS. Its block is allocated at the start, so a full filesystem is an OSError there.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from pathlib import Path

from honed.adapt.protocol.step_page import FLAG, NUM_BYTES, StepRow, offset_of, pack_row


class BusyFlag:
    """Writer's side; `path` is made anew, readable by its owner and group. Raises OSError where there is no room for it.

    It is a new file, since an engine that is stopping may still hold the old one's lock. It gets its name once it is locked: no
    link that somebody laid is followed, and no reader's look at the lock keeps us from taking it.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        self._descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            os.posix_fallocate(self._descriptor, 0, NUM_BYTES)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temporary.rename(path)
        except OSError:
            temporary.unlink()
            os.close(self._descriptor)
            raise
        self._raised_ns = self._num_steps = 0
        self._is_busy, self._is_telling = False, True

    def set(self, is_busy: bool) -> None:
        """Set whether there is work; free when that hasn't changed."""
        if is_busy != self._is_busy and self._descriptor >= 0:
            self._is_busy = is_busy
            if is_busy:
                self._raised_ns = time.monotonic_ns()
            os.pwrite(self._descriptor, FLAG.pack(is_busy, self._raised_ns), 0)

    def note_step(self, end_ns: int, duration_us: int, tokens: int, requests: int, waiting: int, prefill_tokens: int) -> None:
        """Tell the trainer of a step; the arguments are those of `StepRow`. If it can't be written, none is told any more.

        In a step whose caches other work has emptied it takes 35 us, so it is done only where a trainer reads it.
        """
        if not self._is_telling:
            return
        self._num_steps += 1
        row = StepRow(self._num_steps, end_ns, duration_us, tokens, requests, waiting, prefill_tokens)
        try:
            os.pwrite(self._descriptor, pack_row(row), offset_of(self._num_steps))
        except OSError:
            self._is_telling = False

    def close(self) -> None:
        """Lower the flag, so that a stopped engine doesn't hold back training."""
        try:
            self.set(False)
        finally:
            descriptor, self._descriptor, self._is_telling = self._descriptor, -1, False
            if descriptor >= 0:  # its number may be another file's by the time of a second call
                os.close(descriptor)
