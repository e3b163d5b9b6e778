"""How many of the machine's cores this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path


def usable_cores(membership: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Count the cores that this process may run on, and no more than its container's or service's quota allows (cgroup v2)."""
    try:
        names = Path(membership.read_text().strip().rpartition("0::")[2].strip("/")).parts
    except OSError:
        names = ()
    quotas = (_quota(root.joinpath(*names[:depth])) for depth in range(len(names) + 1))
    return max(math.ceil(min(len(os.sched_getaffinity(0)), *quotas)), 1)


def _quota(group: Path) -> float:
    """Cores' worth of time that a control group may take; infinite without a limit."""
    try:
        quota_us, period_us = (group / "cpu.max").read_text().split()
        return int(quota_us) / int(period_us)  # no number: "max"
    except (OSError, ValueError):
        return math.inf
