"""GPUs of the engines on this machine, and the memory that these will still want there, as their pages say (`step_page`).

No torch here: `honed doctor` reads them too.
"""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from glob import glob
from pathlib import Path
from typing import Protocol

from honed.adapt.protocol.step_page import NUM_BYTES, unpack_gpus

GIVEN_UP_S = 900.0
"""Seconds after which an engine that is down isn't awaited any more: large models take minutes to start."""
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class EngineGpus:
    """One engine's."""

    engine_id: str
    is_alive: bool
    reserves: dict[str, int] | None
    """UUID of a GPU -> bytes that must stay free there; None: the engine hasn't told them."""
    stamp: tuple[int, int] = field(default=(0, 0), compare=False)
    """`stamp_of` its page."""


class FreeGpu(Protocol):
    """A GPU as `nvidia-smi` lists it."""

    @property
    def free(self) -> int:
        """Free bytes."""

    @property
    def uuid(self) -> str:
        """Its UUID, as engines tell it."""


def engine_pages(engines_dir: Path, patterns: Sequence[str], others: Iterable[Path] = ()) -> Iterator[tuple[str, Path, bool]]:
    """Find all engines' pages. Yields the engine's name, the page's path, and whether the trainer yields to the engine.

    Args:
        engines_dir: has a folder for each engine.
        patterns: `trainer.yields_to`, for these engines.
        others: such folders of other daemons. The trainer yields to all engines there. Their names say where they are.
    """
    for folder, place in ((engines_dir, ""), *((other, f" of {other.parent}") for other in others)):
        for page in sorted(glob("*/busy", root_dir=folder)):
            engine_id = os.path.dirname(page)
            is_shared = bool(place) or any(fnmatch.fnmatchcase(engine_id, pattern) for pattern in patterns)
            yield engine_id + place, folder / page, is_shared


def why_unseen(engines_dir: Path) -> str:
    """Reason why engines in a folder may be there and can't be seen; "" if they can."""
    try:
        with os.scandir(engines_dir) as folders:
            for folder in folders:
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    os.close(os.open(os.path.join(folder.path, "busy"), _OPEN))
    except OSError as error:
        return f"{error.filename}: {error.strerror}"
    return ""


def engine_gpus(engines_dir: Path, patterns: Sequence[str] = ("*",), others: Iterable[Path] = ()) -> list[EngineGpus]:
    """Read the pages of all engines, as `engine_pages` finds them; those that can't be read are left out.

    An engine that the trainer doesn't yield to counts only as far as it has told its GPUs.
    """
    found = []
    for name, path, is_shared in engine_pages(engines_dir, patterns, others):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, _OPEN)
            try:
                reserves = unpack_gpus(os.pread(descriptor, NUM_BYTES, 0))
                if reserves is not None or is_shared:
                    stamp = stamp_of(os.fstat(descriptor))
                    found.append(EngineGpus(name, is_held(descriptor), reserves, stamp))
            finally:
                os.close(descriptor)
    return found


class AwaitedEngines:
    """The same without engines that have been seen down for `GIVEN_UP_S`. Call it now and then: it sees no engine otherwise.

    The time begins anew when one that is down starts.

    Args:
        monotonic: seconds.
    """

    def __init__(
        self, engines_dir: Path, patterns: Sequence[str], monotonic: Callable[[], float], others: Sequence[Path] = ()
    ) -> None:
        self._engines_dir, self._patterns, self._others, self._monotonic = engines_dir, patterns, others, monotonic
        self._down_since_s: dict[tuple[str, tuple[int, int]], float] = {}

    def __call__(self) -> list[EngineGpus]:
        """Read the pages now."""
        now_s, found = self._monotonic(), engine_gpus(self._engines_dir, self._patterns, self._others)
        down, before = {one.engine_id: one.stamp for one in found if not one.is_alive}, self._down_since_s
        self._down_since_s = {key: before.get(key, now_s) for key in down.items()}
        given_up = {engine_id for (engine_id, _), since_s in self._down_since_s.items() if now_s - since_s >= GIVEN_UP_S}
        return [one for one in found if one.engine_id not in given_up]


def is_held(descriptor: int) -> bool:
    """Return whether the engine that made the file is alive."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def stamp_of(page: os.stat_result) -> tuple[int, int]:
    """Return what changes when an engine that is down starts."""
    return page.st_ino, page.st_mtime_ns


def reserve_on(gpu: str, engines: Iterable[EngineGpus]) -> int:
    """Bytes of a GPU that living engines will still want.

    Args:
        gpu: its UUID; "": unknown, so it may be any engine's.
    """
    wanted = [engine.reserves for engine in engines if engine.is_alive and engine.reserves]
    return sum(reserves.get(gpu, 0) if gpu else max(reserves.values()) for reserves in wanted)


def owner_of(gpu: str, engines: Iterable[EngineGpus]) -> str:
    """Id of an engine that is down, or only starting, and wants the memory that it had on a GPU; "" if there is none.

    Args:
        gpu: its UUID; "": unknown, so it may be any engine's.
    """
    for engine in engines:
        is_its = engine.reserves is None or (bool(engine.reserves) if not gpu else gpu in engine.reserves)
        if not engine.is_alive and is_its:
            return engine.engine_id
    return ""


def best_gpu(gpus: Mapping[int, FreeGpu], engines: Sequence[EngineGpus]) -> int:
    """Number of the GPU that a training takes: the one with most free memory, of those that no engine will want back."""
    return max(gpus, key=lambda number: (not owner_of(gpus[number].uuid, engines), gpus[number].free))
