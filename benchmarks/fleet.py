"""Canaries of many hosts that share their evidence: error rates, and rounds that each host needs, against hosts on their own.

Every host compares the same two versions on its own traffic, as in `benchmarks.canary`. Every `HEARD` pairs of windows each
hears what the others have found so far, and follows them as `adapt.monitor.canary` does: only after `LEAST_PAIRS` pairs of
its own, and only where its own traffic points the same way. A host that has decided tells no more. Cases: equal versions, a
gain of 5 %, a loss of 10 %, and a gain of 5 % everywhere but on a tenth of the hosts, which lose 10 %. A fleet of equal
versions errs if a single host does. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.canary import CURVES, window
from benchmarks.server.measured import commit, hardware
from honed.adapt.monitor.canary import LEAST_PAIRS, LOG_DOUBT, CanarySettings
from honed.adapt.monitor.evidence import Evidence
from honed.adapt.protocol.arrays import Floats

HOSTS = (1, 10, 100, 1000)
SIMULATED = 20_000
"""Hosts of each case, over all fleets; fleets at least."""
LEAST_FLEETS = 20
HEARD = 15
CASES: dict[str, tuple[float, float]] = {
    "a/a": (0.0, 0.0),
    "+5 %": (0.05, 0.05),
    "-10 %": (-0.10, -0.10),
    "+5/-10 %": (0.05, -0.10),
}
"""Change on nine tenths of the hosts, and on the others."""
OTHERS = 0.1
CURVE = "medium"


def simulate(case: str, hosts: int, fleets: int, is_shared: bool, seed: int = 0) -> dict[str, Any]:
    """Run fleets to their hosts' verdicts, all at once."""
    settings, rng = CanarySettings(), np.random.default_rng(seed)
    old = np.array(CURVES[CURVE])
    most, few = CASES[case]
    is_other = np.arange(hosts) < round(hosts * OTHERS)
    groups = [(np.flatnonzero(~is_other), most), (np.flatnonzero(is_other), few)]
    evidence = Evidence(len(old), (fleets, hosts))
    half = math.log(2.0) if is_shared else 0.0
    bars = np.array([settings.log_bar(way) + half for way in ("worse", "better")])
    decided, needed = np.zeros((fleets, hosts), np.int8), np.zeros((fleets, hosts))  # 1 worse, 2 better, 3 unproven
    told = evidence.log_bets
    sums: Floats | None = None
    pairs = 0
    while not decided.all():
        counts: list[Floats] = [np.zeros((fleets, hosts, len(old))) for _ in range(4)]
        for members, change in groups:
            for place, curve in ((0, old), (2, np.clip(old * (1.0 + change), 0.0, 0.995))):
                rounds = np.full(fleets * len(members), settings.window_rounds)
                for offset, column in enumerate(window(rng, curve, rounds)):
                    counts[place + offset][:, members] = column.reshape(fleets, len(members), len(old))
        evidence.add(*evidence.weigh(*counts))
        pairs += 1
        is_open = decided == 0
        own = evidence.log_e
        worse, better = own[..., 0] >= bars[0], own[..., 1] >= bars[1]
        if is_shared and pairs % HEARD == 0:
            told = np.where(is_open[..., None, None], evidence.log_bets, told)
            sums = told.sum(axis=1, keepdims=True)
        if sums is not None and pairs >= LEAST_PAIRS:
            joined = evidence.log_e_with(sums - told)
            worse |= (joined[..., 0] >= bars[0]) & (evidence.change < 0.0)
            better |= (joined[..., 1] >= bars[1]) & (evidence.change > 0.0)
        better &= own[..., 0] < LOG_DOUBT
        found = np.where(worse, 1, np.where(better, 2, 3 if pairs >= settings.max_pairs else 0))
        is_new = is_open & (found > 0)
        needed[is_new] = pairs * 2 * settings.window_rounds
        decided[is_new] = found[is_new]
    shares = {name: float(np.mean(decided[:, ~is_other] == value)) for name, value in (("promoted", 2), ("rolled_back", 1))}
    result: dict[str, Any] = shares | {
        "any_promoted": float(np.mean((decided == 2).any(axis=1))),
        "any_rolled_back": float(np.mean((decided == 1).any(axis=1))),
        "median_rounds": float(np.median(needed[:, ~is_other])),
    }
    if is_other.any() and few != most:
        result |= {
            "others_promoted": float(np.mean(decided[:, is_other] == 2)),
            "others_rounds": float(np.median(needed[:, is_other])),
        }
    return result


def run(hosts: tuple[int, ...], simulated: int) -> dict[str, Any]:
    """Run all cases, shared and alone."""
    found: dict[str, Any] = {}
    for case in CASES:
        for count in hosts:
            fleets = max(simulated // count, LEAST_FLEETS if count > 1 else 0)
            made = simulate(case, count, fleets, is_shared=count > 1, seed=count)
            found.setdefault(case, {})[count] = made | {"fleets": fleets}
            print(f"{case}, {count} hosts: {made}", flush=True)
    return found


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=list(HOSTS))
    parser.add_argument("--simulated", type=int, default=SIMULATED, help="hosts of each case, over all fleets")
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file")
    arguments = parser.parse_args()
    result = {
        "cases": run(tuple(arguments.hosts), arguments.simulated),
        "curve": CURVE,
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result["cases"]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
