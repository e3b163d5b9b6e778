"""A small file that tells the trainer whether the engine has work, and about its steps and GPUs; `step_page` has the layout.

The flag is a hint, not a lock: a trainer that reads a stale 0 runs one more unit of work. The time when it was raised lets the
trainer report how long it took to yield, and the steps what its work costs them. The engine holds a lock (flock) on the file
while it lives, so a killed engine doesn't hold up training.

The file is written with pwrite, not through a map: a map of a file that has shrunk, or of a full tmpfs, kills its process with
SIGBUS. Its block is allocated at the start, so a full filesystem is an OSError there. Until there is a file, nothing is told.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from honed.adapt.protocol.step_page import FLAG, GPUS_OFFSET, NUM_BYTES, StepRow, offset_of, pack_gpus, pack_row

RETRY_S = 10.0
"""Time between two tries to make the file."""


def make_folder(folder: Path) -> None:
    """Make an engine's folder. Its group, which is the daemon's and the trainer's, can read it whatever vLLM's umask is.

    Missing parents are made too, closed to others: an engine may start before the daemon.
    """
    for missing in reversed([one for one in folder.parents if not one.exists()]):
        missing.mkdir(mode=0o750, exist_ok=True)
    folder.mkdir(exist_ok=True)
    with contextlib.suppress(PermissionError):  # another user's, from an earlier run
        folder.chmod(folder.stat().st_mode & 0o7777 | 0o750)


def tell_start(path: Path) -> None:
    """Tell the trainer that an engine is starting, before it looks for free memory: its page is of a start from now on.

    The page of its last run gets a new time, and still tells its GPUs. Without one there is an empty page, which nobody holds.
    `BusyFlag` makes another in its place.

    Raises:
        OSError: it can't be written.
    """
    make_folder(path.parent)
    try:
        os.utime(path, follow_symlinks=False)
    except FileNotFoundError:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        os.fchmod(descriptor, 0o640)
        os.close(descriptor)


class BusyFlag:
    """Writer's side; `path` is made anew, readable by its owner and group.

    It is a new file, since an engine that is stopping may still hold the old one's lock. It gets its name once it is locked: no
    link that somebody laid is followed, and no reader's look at the lock keeps us from taking it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._descriptor = path, -1
        self._raised_ns = self._num_steps = 0
        self._is_busy, self._is_telling = False, True
        self._retry_s = 0.0
        self._gpus = b""
        self.problem = ""
        """Reason why there is no file; "": there is one."""
        self.make()

    def make(self) -> None:
        """Make the file if there is none. Tries at most every `RETRY_S`; what went wrong is in `problem`."""
        if self._descriptor >= 0 or time.monotonic() < self._retry_s:
            return
        self._retry_s = time.monotonic() + RETRY_S
        try:
            self._make()
        except OSError as error:
            self.problem = f"{error.filename or self._path}: {error.strerror}"
        else:
            self.problem = ""

    def _make(self) -> None:
        make_folder(self._path.parent)
        temporary = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        try:
            os.fchmod(descriptor, 0o640)  # whatever umask vLLM runs under
            os.posix_fallocate(descriptor, 0, NUM_BYTES)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(descriptor, FLAG.pack(self._is_busy, self._raised_ns), 0)
            os.pwrite(descriptor, self._gpus, GPUS_OFFSET)
            temporary.rename(self._path)
        except OSError:
            os.close(descriptor)
            temporary.unlink()
            raise
        self._descriptor = descriptor

    def set(self, is_busy: bool) -> None:
        """Set whether there is work; free when that hasn't changed."""
        if is_busy != self._is_busy:
            self._is_busy = is_busy
            if is_busy:
                self._raised_ns = time.monotonic_ns()
            if self._descriptor >= 0:
                os.pwrite(self._descriptor, FLAG.pack(is_busy, self._raised_ns), 0)

    def tell_gpus(self, reserves: Mapping[str, int]) -> None:
        """Tell which GPUs the engine uses, and the bytes that it will still want of each; free when nothing has changed."""
        packed = pack_gpus(reserves)
        if packed != self._gpus:
            self._gpus = packed
            if self._descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.pwrite(self._descriptor, packed, GPUS_OFFSET)

    def note_step(self, end_ns: int, duration_us: int, tokens: int, requests: int, waiting: int, prefill_tokens: int) -> None:
        """Tell the trainer of a step; the arguments are those of `StepRow`. If it can't be written, none is told any more.

        In a step whose caches other work has emptied it takes 35 us, so it is done only where a trainer reads it.
        """
        if not self._is_telling or self._descriptor < 0:
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
            descriptor, self._descriptor, self._is_telling, self._retry_s = self._descriptor, -1, False, math.inf
            if descriptor >= 0:  # its number may be another file's by the time of a second call
                os.close(descriptor)
