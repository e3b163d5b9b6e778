"""A core for the target model alone, as it would have a GPU, so that its speed can be told apart from all else."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable

from benchmarks.server.client_load import Played


@functools.cache
def target_core() -> int:
    """The core that the target has to itself; first asked for before anything is pinned. -1 where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0] if len(cores) > 1 else -1


def pin_target() -> dict[str, str]:
    """Keep this process, and what it starts, off the target's core; the environment that gives it to the target."""
    core = target_core()
    if core < 0:
        return {}
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {core})
    return {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": str(core)}


def stolen_share(parts: Iterable[Played]) -> float:
    """How much of a run's time the host gave the target's core to others; 0 where nobody knows."""
    parts = list(parts)
    seconds = sum(part.seconds for part in parts)
    return sum(part.stolen_s.get(target_core(), 0.0) for part in parts) / seconds if seconds else 0.0
