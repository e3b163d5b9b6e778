"""What a kept result says of where it comes from."""

from __future__ import annotations

import math
import os
import platform
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from processes import ROOT


def hardware() -> dict[str, Any]:
    """What it ran on."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}


def commit() -> str:
    """The repository's commit, with a + when files differ from it; "" outside a repository."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip()


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them don't exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]
