"""The parts of `make gpu`, in order of worth: each is a program with a time limit and a result file of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Document = dict[str, Any]


@dataclass(frozen=True)
class Part:
    """One program.

    Args:
        words: command line after Python's; `--out FILE` is added.
        dry_words: the same without a GPU.
        limit_s: time limit; the program is ended after it.
        figures: makes the short figures from its result file.
        is_timed: whether it measures time, so that nothing may run beside it.
        needs_engine: whether it is left out if no engine starts.
    """

    name: str
    about: str
    words: tuple[str, ...]
    dry_words: tuple[str, ...]
    limit_s: float
    figures: Callable[[Document], Document]
    is_timed: bool = True
    needs_engine: bool = False


def of_start(found: Document) -> Document:
    """Figures of `engine-starts`."""
    names = ("vllm", "runner", "capabilities", "limits", "seconds_to_import", "seconds_to_start", "tokens")
    return {name: found[name] for name in names if name in found}


def of_trainer(found: Document) -> Document:
    """Figures of `whole-trainer`."""
    told: Document = {
        "recalibration": found.get("state"),
        "error": found.get("error"),
        "acceptance_length": found.get("acceptance_length"),
        "gains": found.get("gains"),
        "preempt_ms": found.get("preempt_ms"),
        "preemptions": found.get("preemptions"),
        "verified": (found.get("verified") or {}).get("state"),
        "reference": found.get("reference"),
    }
    detail, answers = found.get("detail") or {}, found.get("answers") or {}
    told |= {name: detail.get(name) for name in ("steps", "tokens", "train_seconds", "elapsed_s", "pause_ms")}
    told |= {f"answers_{name}": answers.get(name) for name in ("compared", "differing", "failed")}
    return {name: value for name, value in told.items() if value not in (None, "")}


def of_tests(found: Document) -> Document:
    """Figures of `engine-tests` and `kernel-tests`."""
    files = found.get("files") or {}
    bad = [f"{name}::{test}" for name, one in files.items() for kind in ("failed", "errors") for test in one.get(kind, [])]
    told = {name: found.get(name) for name in ("passed", "failed", "errors", "skipped")}
    return told | {"bad": bad, "cut_off": [name for name, one in files.items() if one.get("exit") is None or one["exit"] < 0]}


def of_zoo(found: Document) -> Document:
    """Figures of `zoo`: pairs of which all held, and what didn't of the others."""
    families = found.get("families") or {}
    wrong = {name: one.get("error") or [key for key, value in one.items() if value is False] for name, one in families.items()}
    return {"held": [name for name, why in wrong.items() if not why], "wrong": {n: why for n, why in wrong.items() if why}}


def of_sizes(found: Document) -> Document:
    """Figures of `server-sizes`."""
    steps = found.get("steps") or {}
    told: Document = {"ratio": {batch: one["ratio"] for batch, one in steps.items()}}
    told |= {"step_ms": {batch: one["step_ms"] for batch, one in steps.items()}}
    if swap := found.get("swap"):
        told["swap"] = {name: swap.get(name) for name in ("pause_ms", "copy_ms", "limit_ms")}
    for shape, one in (found.get("train") or {}).items():
        names = ("tokens_per_s", "whole_micro_step_ms", "unit_ms", "peak_bytes", "estimated_bytes", "warm_up_s")
        told[f"train_{shape}"] = {name: one.get(name) for name in names}
    return told | ({"yield": found["yield"]} if "yield" in found else {})


def of_kernels(found: Document) -> Document:
    """Figures of `kernels`: goals by op, and what failed."""
    goals, failed = {}, []
    for op, rows in (found.get("ops") or {}).items():
        for row in rows:
            if "failed" in row:
                failed.append(f"{op} {row['shape']}: {row['failed']}")
            for goal in row.get("goals", []):
                if "is_met" in goal:
                    goals[f"{op} {row['shape']}: {goal['goal']}"] = [goal["value"], goal["is_met"]]
    return {"ceilings": found.get("ceilings"), "goals": goals, "failed": failed}


def of_slices(found: Document) -> Document:
    """Figures of `time-slices`."""
    arms = {
        f"{row['kind']} {row.get('unit_ms', 0):.1f} ms {row['duty_asked']:.0%}": {
            name: row[name] for name in ("duty", "harm_mean", "harm_p99", "harm_over_duty") if name in row
        }
        or row["step_ms"]
        for row in found.get("arms", [])
    }
    slices = found.get("slices") or {}
    return {"slice_ms": slices.get("slice_ms"), "switch_ms": slices.get("switch_ms"), "arms": arms, "kill": found.get("kill")}


def of_tree_steps(found: Document) -> Document:
    """Figures of `tree-steps`."""
    return {name: found.get(name) for name in ("seconds_to_start", "steps", "pays", "gains")}


STARTS = "engine-starts"
"""If this part fails, the others that need an engine are left out."""
ZOO = (
    *("full", "mtp, gated", "eagle3", "dflash2", "dspark", "mixed", "sliding, causal", "reduced vocabulary"),
    *("qwen3.5", "mtp, hybrid", "gpt-oss", "gemma4", "qwen3-moe", "eagle3, residual normed"),
)
"""Pairs that differ in what runs on the device, in order of worth."""
PARTS = (
    Part(
        STARTS,
        "an engine with honed attached starts and answers",
        ("-m", "benchmarks.gpu.engine_starts"),
        ("-m", "benchmarks.gpu.engine_starts"),
        100.0,
        of_start,
    ),
    Part(
        "whole-trainer",
        "recalibrate, gate, canary, swap, verify beside a running engine",
        ("-m", "benchmarks.gpu.whole_trainer"),
        ("-m", "benchmarks.gpu.whole_trainer", "--dry"),
        300.0,
        of_trainer,
        is_timed=False,
        needs_engine=True,
    ),
    Part(
        "engine-tests",
        "tests of CUDA graphs, of V2 with async scheduling, of trees, and of EAGLE-3",
        ("-m", "benchmarks.gpu.engine_tests", "--limit", "290"),
        ("-m", "benchmarks.gpu.engine_tests", "--dry"),
        300.0,
        of_tests,
        is_timed=False,
        needs_engine=True,
    ),
    Part(
        "kernels",
        "device ops against their goals",
        ("-m", "benchmarks.kernel_bench", "--rounds", "15"),
        ("-m", "benchmarks.kernel_bench", "--device", "cpu", "--rounds", "1"),
        55.0,
        of_kernels,
    ),
    Part(
        "tree-steps",
        "what steps with draft trees cost at the size of Qwen3-8B",
        ("-m", "benchmarks.gpu.tree_steps"),
        ("-m", "benchmarks.gpu.tree_steps", "--shape", "small", "--batches", "1", "2", "--contexts", "64", "--turns", "2"),
        200.0,
        of_tree_steps,
        needs_engine=True,
    ),
    Part(
        "kernel-tests",
        "kernels beside their twins, training, capture and staging on the device",
        ("-m", "benchmarks.gpu.engine_tests", "--kernels", "--limit", "180", "--at-once", "4"),
        ("-m", "benchmarks.gpu.engine_tests", "--kernels", "--dry"),
        190.0,
        of_tests,
        is_timed=False,
    ),
    Part(
        "zoo",
        "toy pairs of published kinds of target and drafter: captured, trained on the device, swapped",
        ("-m", "tests.zoo", "--at-once", "4", *ZOO),
        ("-m", "tests.zoo", "full"),
        260.0,
        of_zoo,
        is_timed=False,
        needs_engine=True,
    ),
    Part(
        "server-sizes",
        "honed at the size of Qwen3-8B",
        ("-m", "benchmarks.server_sizes", "--rounds", "2", "--bursts", "6", "--also-train"),
        (
            *("-m", "benchmarks.server_sizes", "--shape", "small"),
            *("--batches", "1", "4", "--rounds", "1", "--bursts", "1", "--updates", "1", "--also-train"),
        ),
        230.0,
        of_sizes,
        needs_engine=True,
    ),
    Part(
        "time-slices",
        "two processes on one device: slices, switches, harm and duty",
        ("-m", "benchmarks.gpu.time_slices"),
        ("-m", "benchmarks.gpu.time_slices", "--repeats", "1", "--arm-s", "0.3"),
        35.0,
        of_slices,
    ),
)
