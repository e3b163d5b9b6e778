"""A core reserved for the target model, as it would have a GPU, so that its speed can be measured separately."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

from benchmarks.server.client_load import Played


@functools.cache
def target_core() -> int:
    """Return the target's core; first call it before anything is pinned. -1 if there is only one core."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0] if len(cores) > 1 else -1


def pin_target() -> dict[str, str]:
    """Keep this process and its children off the target's core; return the environment that gives it to the target."""
    core = target_core()
    if core < 0:
        return {}
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {core})
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core)}


def stolen_share(parts: Iterable[Played]) -> float:
    """Return the share of a run's time in which the host gave the target's core to others; 0 if unknown."""
    parts = list(parts)
    seconds = sum(part.seconds for part in parts)
    return sum(part.stolen_s.get(target_core(), 0.0) for part in parts) / seconds if seconds else 0.0
