"""The daemon as a process under load, killed, and attacked: nothing is lost, nothing is unhandled, memory stays.

- traffic: 8 engines send 20,000 verify rounds a second for an hour, and 100,000 a second for a minute in every ten. Metrics,
  the status page's document and the status are read every second. Each round sent must be in the database at the end.
- kills: SIGKILL 1,000 times while 4 engines send, one time in ten during the start. Each acknowledged batch must be in the
  database, and none twice.
- fuzz: 10,000,000 mutated frames of all messages to engine.sock and 1,000,000 mutated requests to both HTTP listeners. No
  exception may be unhandled, and an honest engine's batches must be acknowledged within a second.

Engines speak real ZeroMQ and keep batches until they are acknowledged, as vLLM's publisher does. All of it takes
hours on two cores. The last line of stdout is JSON; the command ends with 1 when a part hasn't passed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.server.measured import commit, hardware
from benchmarks.server.processes import Processes
from benchmarks.soak import fuzz, kills, traffic


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=("traffic", "kills", "fuzz"), default=None, help="these parts alone")
    parser.add_argument("--seconds", type=float, default=3600.0, help="length of the part traffic")
    parser.add_argument("--cycles", type=int, default=1000, help="kills")
    parser.add_argument("--frames", type=int, default=10_000_000, help="mutated frames")
    parser.add_argument("--requests", type=int, default=1_000_000, help="mutated requests")
    parser.add_argument("--seed", type=int, default=0, help="of the mutations; another one for another part of them")
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file")
    arguments = parser.parse_args()
    parts = {
        "traffic": lambda processes, folder: traffic.run(processes, folder, arguments.seconds),
        "kills": lambda processes, folder: kills.run(processes, folder, arguments.cycles),
        "fuzz": lambda processes, folder: fuzz.run(processes, folder, arguments.frames, arguments.requests, arguments.seed),
    }
    result: dict[str, Any] = {}
    for name in arguments.only or parts:
        with tempfile.TemporaryDirectory(prefix="honed-soak-") as folder, Processes(Path(folder) / "logs") as processes:
            result[name] = parts[name](processes, Path(folder))
        print(f"{name}: {json.dumps(result[name])}", flush=True)
    passed = all(figures["passed"] for figures in result.values())
    result |= {"passed": passed, "hardware": hardware(), "commit": commit(), "when": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
