"""Origin of a kept result: hardware, commit and stolen time."""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.server.processes import ROOT

RESULTS = ROOT / "benchmarks" / "results"
STEAL = 7
"""Index of stolen time among a core's figures in /proc/stat (proc(5))."""


def hardware() -> dict[str, Any]:
    """Describe the hardware."""
    model = "unknown"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {"cpu": model, "cores": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()}


def commit() -> str:
    """Return the repository's commit, with a + if files differ from it; "unknown" if git doesn't say.

    BENCHMARK_COMMIT names it where the files were copied without their repository.
    """
    if told := os.environ.get("BENCHMARK_COMMIT"):
        return told
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty=+", "--exclude=*"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


def stolen_s(stat: Path = Path("/proc/stat")) -> dict[int, float]:
    """Return seconds by core since boot in which it had work and its host ran something else ("steal"), in steps of 10 ms.

    Empty if the kernel doesn't report it.
    """
    if not stat.exists():
        return {}
    found = {}
    for line in stat.read_text().splitlines():
        name, *ticks = line.split()
        if name.startswith("cpu") and name != "cpu" and len(ticks) > STEAL:
            found[int(name.removeprefix("cpu"))] = int(ticks[STEAL]) / os.sysconf("SC_CLK_TCK")
    return found


def stolen_since(before: Mapping[int, float]) -> dict[int, float]:
    """Return the time stolen since `stolen_s` returned `before`."""
    return {core: until_s - before.get(core, until_s) for core, until_s in stolen_s().items()}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of them don't exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def keep(result: Mapping[str, Any], name: str, out: Path | None = None) -> None:
    """Write a result to benchmarks/results, under its benchmark's name and today's date, or to `out`; say where."""
    out = out or RESULTS / f"{name}-{time.strftime('%Y-%m-%d')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {out}")
