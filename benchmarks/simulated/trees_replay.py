"""Predicted effect of draft trees on the tiny pair: acceptance by nodes, and speed of tree policies at two costs.

The tiny target answers held-out prompts of both domains, greedily and at temperature 0.8. The drafter lists its eight best
candidates at each of seven depths of every position, and tree policies are replayed on that. Acceptance is exact (the walk
follows the text). Speeds are predicted by two cost models (`honed/adapt/trees/costs.py`), at 1, 4 and 16 requests. No engine
verified a tree here. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.make_tiny.candidates import Pair, candidate_requests
from benchmarks.server.measured import commit, hardware
from benchmarks.server.processes import ROOT
from honed.adapt.replay.replay import Figure
from honed.adapt.trees.candidate_log import CandidateRequest
from honed.adapt.trees.costs import TREE_COSTS
from honed.adapt.trees.replay import TreePrediction, predict, speed_ratio

DEPTHS = 7
BUDGETS = (4, 8, 16, 32, 64)
CHAINS = (1, 2, 3, 5, DEPTHS)
BATCHES = (1, 4, 16)
OTHERS = ("none", "caddtree", "shared", "honed")
SETTINGS = tuple((domain, temperature) for domain in "ab" for temperature in (0.0, 0.8))


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64, help="held-out prompts of each domain and temperature")
    parser.add_argument("--pair", type=Path, default=ROOT / "benchmarks" / "tiny")
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    began_s, pair = time.monotonic(), Pair(arguments.pair)
    rows: dict[str, Any] = {}
    for domain, temperature in SETTINGS:
        requests = list(candidate_requests(pair, domain, temperature, arguments.prompts))
        name = f"{domain}, T={temperature:g}"
        print(f"\n== domain {name}: {len(requests)} requests, {sum(len(r.tokens) for r in requests)} tokens", flush=True)
        rows[name] = {"acceptance": acceptance(requests), "speed": {}}
        for cost in TREE_COSTS:
            for batch in BATCHES:
                rows[name]["speed"][f"{cost} x{batch}"] = speeds(requests, cost, batch)
    result = {
        "rows": rows,
        "summary": summary(rows),
        "prompts": arguments.prompts,
        "hardware": hardware(),
        "commit": commit(),
        "seconds": round(time.monotonic() - began_s, 1),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["summary"] | {"seconds": result["seconds"]}))
    return 0


def acceptance(requests: list[CandidateRequest]) -> dict[str, Any]:
    """Compute τ and calibration by nodes, at one request."""
    rows = {}
    for policy in (f"chain:{DEPTHS}", *(f"{kind}:{nodes}" for nodes in BUDGETS for kind in ("tree", "calibrated"))):
        told = predict(requests, policy, TREE_COSTS["gpu"])
        rows[policy] = {
            "acceptance_length": figure(told.acceptance_length),
            "calibration_error": told.calibration_error,
            "calibration_error_before": told.calibration_error_before,
        }
        length = told.acceptance_length
        errors = (told.calibration_error_before, told.calibration_error)
        says = "" if errors[0] is None else f"   ECE {errors[0]:.4f} -> {errors[1]:.4f}"
        ends = "" if length.low is None else f" [{length.low:.3f} {length.high:.3f}]"
        print(f"  {policy:14s} tau {length.value:.3f}{ends}{says}", flush=True)
    return rows


def speeds(requests: list[CandidateRequest], cost: str, batch: int) -> dict[str, Any]:
    """Predict tokens per second of all policies, and honed's over the best of each kind."""
    names = (*OTHERS, *(f"chain:{k}" for k in CHAINS), *(f"tree:{nodes}" for nodes in BUDGETS))
    told = {name: predict(requests, name, TREE_COSTS[cost], batch) for name in names}
    rivals = {
        "none": told["none"],
        "best chain": best(told, "chain:"),
        "best tree": best(told, "tree:"),
        "caddtree": told["caddtree"],
        "shared": told["shared"],
    }
    ratios = {name: speed_ratio(told["honed"], rival) for name, rival in rivals.items()}
    ours, over = told["honed"], ", ".join(f"{rival.policy} {ratios[name].value:.3f}" for name, rival in rivals.items())
    reached = f"{ours.tokens_per_s.value:7.1f} tok/s, {ours.nodes_per_round:5.2f} nodes"
    print(f"  {cost} x{batch:<3d} {reached}; over {over}", flush=True)
    return {
        "tokens_per_s": {name: figure(row.tokens_per_s, 1) for name, row in told.items()},
        "nodes": {name: round(row.nodes_per_round, 2) for name, row in told.items()},
        "honed_over": {name: figure(ratio) for name, ratio in ratios.items()},
        "best": [rivals["best chain"].policy, rivals["best tree"].policy],
    }


def best(told: dict[str, TreePrediction], kind: str) -> TreePrediction:
    """Return the fastest of a kind, in hindsight."""
    return max((row for name, row in told.items() if name.startswith(kind)), key=lambda row: row.tokens_per_s.value)


def figure(of: Figure, digits: int = 4) -> list[float | None]:
    """Value, lower and upper end; None: not known."""
    return [None if value is None else round(value, digits) for value in (of.value, of.low, of.high)]


def summary(rows: dict[str, Any]) -> dict[str, Any]:
    """τ and calibration by domain and temperature; honed's speed over each rival in all cases: least, median, most."""
    settings = {}
    for name, row in rows.items():
        at, shown = row["acceptance"], (f"chain:{DEPTHS}", "tree:16", "calibrated:16", "tree:64", "calibrated:64")
        errors = [round(at["calibrated:16"][key], 4) for key in ("calibration_error_before", "calibration_error")]
        settings[name] = {policy: at[policy]["acceptance_length"][0] for policy in shown} | {"ece": errors}
    ratios: dict[str, list[float]] = {}
    for row in rows.values():
        for case in row["speed"].values():
            for rival, value in case["honed_over"].items():
                ratios.setdefault(rival, []).append(value[0])
    middle = {rival: round(statistics.median(found), 4) for rival, found in ratios.items()}
    over = {rival: [min(found), middle[rival], max(found)] for rival, found in ratios.items()}
    return {"settings": settings, "honed_over": over}


if __name__ == "__main__":
    sys.exit(main())
