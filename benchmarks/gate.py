"""Error and power of the gate over the whole procedure that answers a drift alarm: up to six attempts, two blends each.

`benchmarks.simulated.gate_procedure` has the model. For each number of held-out sessions there are candidates that equal their
parent, and candidates that gain 2 to 21 % of the acceptance length. The figures are the shares of procedures in which one
passes, at the first attempt and at any. Half an hour on one core. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.server.measured import commit, hardware, keep
from benchmarks.simulated.gate_procedure import acceptance_length, simulate
from honed.recalib.gate.gate import GateSettings

SESSIONS = (6, 8, 12, 20, 40)
CHANGES = (0.0, 0.05, 0.1, 0.2, 0.4)
"""True gains, in log-odds of acceptance."""


def run(runs: int) -> dict[str, Any]:
    """Run all cases."""
    parent = acceptance_length(0.0)
    figures: dict[str, Any] = {}
    for change in CHANGES:
        gain = acceptance_length(change) / parent
        passed = {str(n): asdict(simulate(n, change, runs, seed=n)) for n in SESSIONS}
        figures[f"{100 * (gain - 1):+.1f} %"] = passed
        print(f"gain {gain:.3f}: {passed}", flush=True)
    return figures


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=2000, help="procedures of each kind")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: benchmarks/results)")
    arguments = parser.parse_args()
    figures = run(arguments.runs)
    equal = figures["+0.0 %"]
    result = {
        "equal_passed": {n: one["any_attempt"] for n, one in equal.items()},
        "gains": figures,
        "runs": arguments.runs,
        "settings": asdict(GateSettings()),
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    keep(result, "gate", arguments.out)
    print(json.dumps({name: result[name] for name in ("equal_passed", "gains", "runs")}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
