"""The device ops of `honed.kernels`: time, share of the device's ceiling, ratio to the best alternative, peak memory.

On a GPU every op runs at a server's sizes. On a CPU the plain twins run at smaller sizes, and a server's sizes are listed as
not measured: a twin's time says nothing about a kernel's. A table goes to stderr; the last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.kernels import attention, cache, training, trees, verify
from benchmarks.kernels.case import Case, Goal, Run, Work
from benchmarks.kernels.timing import Ceilings, captured, measure_ceilings, peak_bytes, take_turns
from benchmarks.server.measured import commit, hardware

FAMILIES = (verify, trees, attention, cache, training)
"""Training comes last: its compiled alternatives take a minute, and the end may be cut off."""
NOT_MEASURED = "not measured"
OP = "op"

Row = dict[str, Any]


def main() -> int:
    """Entry point."""
    cases = [case for family in FAMILIES for case in family.CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--ops", nargs="*", default=None, help=f"only these of {sorted({case.op for case in cases})}")
    parser.add_argument("--rounds", type=int, default=None, help="turns of every candidate; 30 on a GPU, 9 on a CPU")
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file, op by op")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rounds = arguments.rounds or (30 if device.type == "cuda" else 9)
    ceilings = measure_ceilings(device, rounds)
    say(
        f"{name_of(device)}: copies {ceilings.bytes_per_s / 1e9:.1f} GB/s, multiplies {ceilings.flops_per_s / 1e12:.2f} TFLOP/s"
    )
    ops: dict[str, list[Row]] = {}
    result = {
        "device": name_of(device),
        "kind": device.type,
        "ceilings": {"copy_gb_s": round(ceilings.bytes_per_s / 1e9, 2), "matmul_tflops": round(ceilings.flops_per_s / 1e12, 3)},
        "rounds": rounds,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "ops": ops,
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    for case in cases:
        if arguments.ops is None or case.op in arguments.ops:
            row = measure(case, device, rounds, ceilings)
            ops.setdefault(case.op, []).append(row)
            say(line_of(case.op, row))
            if arguments.out is not None:  # keep finished measurements if the rest is interrupted
                arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({"device": result["device"], "ops": ops}))
    return 0


def measure(case: Case, device: torch.device, rounds: int, ceilings: Ceilings) -> Row:
    """One row of the table."""
    goals = [{"goal": goal.text, "value": NOT_MEASURED} for goal in case.goals]
    row: Row = {"shape": case.shape, "on": case.on, "time_us": NOT_MEASURED, "goals": goals}
    if case.on != device.type:
        return row
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    failed: dict[str, str] = {}
    try:
        work = case.make(device)
    except Exception as error:  # one case that can't be made shouldn't stop the others
        return row | {"failed": {OP: in_short(error)}}
    candidates = ready(work, device, failed)
    if OP not in candidates:
        return row | {"failed": failed}
    times = take_turns(device, candidates, rounds)
    median_s = float(np.median(times[OP]))
    row |= {
        "time_us": spread(times[OP] * 1e6),
        "bytes": work.bytes_moved,
        "flops": work.flops,
        "ceiling_share": round(ceilings.floor_s(work.bytes_moved, work.flops) / median_s, 3),
        "alternatives": {
            name: {"time_us": spread(times[name] * 1e6), "ratio": spread(times[name] / times[OP])}
            for name in work.alternatives
            if name in times
        },
        "yardsticks": {
            name: {"time_us": spread(times[name] * 1e6), "cost": spread(times[OP] / times[name])}
            for name in work.yardsticks
            if name in times
        },
    }
    if work.has_peak:
        row["peak_bytes"] = {name: peak_bytes(device, run) for name, run in candidates.items() if name not in work.yardsticks}
    if failed:
        row["failed"] = failed
    row["goals"] = [verdict(goal, row) for goal in case.goals]
    return row


def ready(work: Work, device: torch.device, failed: dict[str, str]) -> dict[str, Run]:
    """Return the candidates that run here; reasons for the others go to `failed`."""
    candidates: Mapping[str, Run] = {OP: work.run, **work.alternatives, **work.yardsticks}
    usable: dict[str, Run] = {}
    for name, run in candidates.items():
        try:
            run()
            is_graphed = work.is_graphed and device.type == "cuda" and name not in work.alternatives
            usable[name] = captured(run) if is_graphed else run
        except Exception as error:  # out of memory, or unsupported by a library: the others can still be compared
            failed[name] = in_short(error)
    return usable


def in_short(error: Exception) -> str:
    """Format an error's kind and the first line of its text."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


def verdict(goal: Goal, row: Row) -> Row:
    """Judge a goal."""
    value = figure(goal.figure, row)
    if value is None:
        return {"goal": goal.text, "value": NOT_MEASURED}
    return {"goal": goal.text, "value": round(value, 3), "is_met": goal.is_met(value)}


def figure(name: str, row: Row) -> float | None:
    """Return a measured row's figure by its name in goals; None if it wasn't measured."""
    kind, _, of = name.partition(":")
    if kind == "time_us":
        return float(row["time_us"]["median"])
    if kind == "ceiling_share":
        return float(row["ceiling_share"])
    if kind == "ratio":
        chosen = of or best_alternative(row)
        return float(row["alternatives"][chosen]["ratio"]["median"]) if chosen in row["alternatives"] else None
    if kind == "cost":
        return float(row["yardsticks"][of]["cost"]["median"]) if of in row["yardsticks"] else None
    if kind == "peak_share":
        peaks = row.get("peak_bytes", {})
        return peaks[OP] / max(peaks[of], 1) if of in peaks else None
    raise ValueError(f"no figure {name!r}")


def best_alternative(row: Row) -> str | None:
    """The fastest alternative."""
    times = {name: values["time_us"]["median"] for name, values in row["alternatives"].items()}
    return min(times, key=lambda name: times[name]) if times else None


def spread(values: np.ndarray) -> dict[str, float]:
    """Median and quartiles, to four digits."""
    low, median, high = (float(f"{x:.4g}") for x in np.quantile(values, (0.25, 0.5, 0.75)))
    return {"median": median, "low": low, "high": high}


def line_of(op: str, row: Row) -> str:
    """Format a row for people."""
    head = f"{op:17s} {row['shape']:48s} "
    if "failed" in row and row["time_us"] == NOT_MEASURED:
        return f"{head}FAILED {row['failed'][OP]}"
    if row["time_us"] == NOT_MEASURED:
        return head + NOT_MEASURED
    times = row["time_us"]
    work = f"{row['flops'] / 1e9:.3g} GFLOP" if row["flops"] else f"{row['bytes'] / 1e6:.3g} MB"
    parts = [
        f"{times['median']:.4g} us ({times['low']:.4g} … {times['high']:.4g}), {work}",
        f"{row['ceiling_share']:.2f} of the ceiling",
    ]
    if best := best_alternative(row):
        parts.append(f"{row['alternatives'][best]['ratio']['median']:.2f}× as fast as {best}")
    parts += [f"{values['cost']['median']:.2f}× {name}" for name, values in row["yardsticks"].items()]
    if "peak_bytes" in row:
        parts.append("peak MB " + ", ".join(f"{name} {size / 1e6:.0f}" for name, size in row["peak_bytes"].items()))
    parts += [f"{g['goal']}: {'yes' if g['is_met'] else 'NO'}" for g in row["goals"] if "is_met" in g]
    return head + "; ".join(parts)


def name_of(device: torch.device) -> str:
    """Name the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {hardware()['cpu']}"


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
