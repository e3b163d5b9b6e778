"""GPUs of the engines on this machine, and the memory that these will still want there, as their pages say (`step_page`).

No torch here: `honed doctor` reads them too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from honed.adapt.protocol.step_page import NUM_BYTES, unpack_gpus


@dataclass(frozen=True, slots=True)
class EngineGpus:
    """One engine's."""

    engine_id: str
    is_alive: bool
    reserves: dict[str, int] | None
    """UUID of a GPU -> bytes that must stay free there; None: the engine hasn't told them."""


def engine_gpus(engines_dir: Path) -> list[EngineGpus]:
    """Read the pages of all engines; those that can't be read are left out.

    Args:
        engines_dir: has a folder for each engine.
    """
    found = []
    for path in sorted(engines_dir.glob("*/busy")):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            try:
                page = os.pread(descriptor, NUM_BYTES, 0)
                found.append(EngineGpus(path.parent.name, is_held(descriptor), unpack_gpus(page)))
            finally:
                os.close(descriptor)
    return found


def is_held(descriptor: int) -> bool:
    """Return whether the engine that made the file is alive."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    return False


def reserve_on(gpu: str, engines: Iterable[EngineGpus]) -> int:
    """Bytes of a GPU that living engines will still want.

    Args:
        gpu: its UUID; "": unknown, so it may be any engine's.
    """
    wanted = [engine.reserves for engine in engines if engine.is_alive and engine.reserves]
    return sum(reserves.get(gpu, 0) if gpu else max(reserves.values()) for reserves in wanted)
