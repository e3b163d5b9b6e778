"""Reader of the engines' pages: whether requests are unfinished, and the latest steps (`step_page`).

A flag is a hint, not a lock: reading it costs a stat and a read, and a stale 0 costs the engine at most one micro-step. A flag
left at 1 by a dead engine is recognised by the file's lock, which a living engine holds.
"""

from __future__ import annotations

import math
import os
import struct
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path

import structlog

from honed.adapt.protocol.step_page import FLAG, NUM_BYTES, StepRow, rows_after
from honed.recalib.config.engine_gpus import engine_pages, is_held, stamp_of, why_unseen

log = structlog.get_logger("honed.trainer")


class BusyFlagReader:
    """Reads the flag at a path; a missing file (no engine, or one without the attachment) means idle."""

    def __init__(self, path: Path | str) -> None:
        self._path = str(path)
        self._descriptor = -1
        self._raised_ns = self._last_step = 0
        self._identity = (0, 0)

    def is_busy(self) -> bool:
        """Return whether the engine has work now."""
        try:
            self._open()
            is_busy, self._raised_ns = FLAG.unpack(os.pread(self._descriptor, FLAG.size, 0))
            return is_busy and is_held(self._descriptor)
        except (OSError, struct.error):  # not there, a link, too short, or not ours to read
            self.close()
            return False

    def is_alive(self) -> bool:
        """Return whether the engine that made the file is alive, busy or not."""
        try:
            self._open()
            return is_held(self._descriptor)
        except OSError:
            self.close()
            return False

    def stamp(self) -> tuple[int, int] | None:
        """Return what changes when an engine that is down starts; None for one that is alive, or without a file."""
        try:
            return None if self.is_alive() else stamp_of(os.lstat(self._path))
        except OSError:
            return None

    @property
    def raised_s(self) -> float:
        """Time when the flag was last raised, on the clock of `time.monotonic`; 0 if unknown."""
        return self._raised_ns / 1e9

    def new_steps(self) -> list[StepRow]:
        """Return the steps since the last call, as far as the page still has them."""
        if self._descriptor < 0:
            return []
        try:
            rows = rows_after(os.pread(self._descriptor, NUM_BYTES, 0), self._last_step)
        except OSError:
            return []
        self._last_step = rows[-1].number if rows else self._last_step
        return rows

    def close(self) -> None:
        """Close the file; it is opened again when needed."""
        self._raised_ns = self._last_step = 0
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()

    def _open(self) -> None:
        """Open the file, or another one that has its path now."""
        status = os.lstat(self._path)
        if self._descriptor < 0 or (status.st_dev, status.st_ino) != self._identity:
            self.close()
            self._descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            self._identity = (status.st_dev, status.st_ino)


class BusyFlags:
    """The flags of all engines that share the trainer's device: it is busy while one of them has work."""

    def __init__(self, engines_dir: Path, patterns: Sequence[str], others: Sequence[Path] = ()) -> None:
        """Each engine has a folder with its name in `engines_dir`. A pattern is an id; `*` in it matches anything.

        Args:
            others: such folders of other daemons, whose engines all count.
        """
        self._engines_dir, self._patterns, self._others = engines_dir, patterns, others
        self._unseen = dict.fromkeys(others, "")
        self._flags: dict[str, BusyFlagReader] = {}
        self._raised: dict[str, BusyFlagReader] = {}

    def discover(self) -> None:
        """Find engines that have started or stopped."""
        pages = {n: path for n, path, is_shared in engine_pages(self._engines_dir, self._patterns, self._others) if is_shared}
        self._flags = {name: self._flags.get(name) or BusyFlagReader(path) for name, path in pages.items()}
        for folder, before in self._unseen.items():
            if (why := why_unseen(folder)) != before:
                self._tell_unseen(folder, why)

    def is_busy(self) -> bool:
        """Return whether any of them has work now."""
        self._raised = {name: flag for name, flag in self._flags.items() if flag.is_busy()}
        return bool(self._raised)

    def living(self) -> set[str]:
        """Ids of the engines that are alive, of those that `discover` found."""
        return {name for name, flag in self._flags.items() if flag.is_alive()}

    def down(self) -> set[tuple[str, tuple[int, int]]]:
        """Ids of the engines that are down or starting, with what changes as they start."""
        stamps = {name: flag.stamp() for name, flag in self._flags.items()}
        return {(engine_id, stamp) for engine_id, stamp in stamps.items() if stamp is not None}

    @property
    def busy_engines(self) -> Collection[str]:
        """Ids of the engines that `is_busy` last found with work."""
        return self._raised.keys()

    def new_steps(self) -> list[tuple[str, StepRow]]:
        """Return all engines' steps since the last call with their engine's id, in the order of their ends."""
        rows = [(name, row) for name, flag in self._flags.items() for row in flag.new_steps()]
        return sorted(rows, key=lambda one: one[1].end_ns)

    @property
    def raised_s(self) -> float:
        """Start of the work that `is_busy` last saw, as `BusyFlagReader.raised_s`."""
        return min((flag.raised_s for flag in self._raised.values()), default=0.0)

    def _tell_unseen(self, folder: Path, why: str) -> None:
        self._unseen[folder] = why
        if why:
            log.warning(
                "engines of another runtime directory can't be seen: training doesn't yield to them",
                error=why,
                cure="Put the trainer's user into that folder's group, or correct trainer.other_runtime_dirs.",
            )
        else:
            log.info("engines of another runtime directory can be seen", folder=str(folder))


class Idleness:
    """Share of time that no engine on the trainer's device had work, averaged with time constant `memory_s`."""

    def __init__(self, memory_s: float = 60.0) -> None:
        self._memory_s = memory_s
        self._last_s: float | None = None
        self.ratio = 0.0

    def observe(self, is_busy: bool, now_s: float) -> None:
        """Count the time since the previous observation as the state seen now."""
        if self._last_s is None:
            self.ratio = 0.0 if is_busy else 1.0
        else:
            weight = -math.expm1(-max(now_s - self._last_s, 0.0) / self._memory_s)
            self.ratio += weight * ((0.0 if is_busy else 1.0) - self.ratio)
        self._last_s = now_s


class Preemptions:
    """Records how often work arrived while the trainer was computing, and how long the two shared the device."""

    def __init__(self, most_untold: int = 1000) -> None:
        self.count = 0
        self._untold_s: deque[tuple[float, float]] = deque(maxlen=most_untold)

    def observe(self, delay_s: float, computing_s: float) -> None:
        """Record that the trainer stopped this long after work arrived, and computed for part of it; 0 between two units.

        On cores that the engine also uses, most of a delay may be waiting for a core in order to stop. That takes nothing from
        the engine.
        """
        self.count += 1
        self._untold_s.append((delay_s, min(computing_s, delay_s)))

    def take(self) -> tuple[list[float], list[float]]:
        """Return the delays since the last call, and the computing in each, in seconds."""
        found = list(self._untold_s)
        self._untold_s.clear()
        return [delay_s for delay_s, _ in found], [computing_s for _, computing_s in found]
