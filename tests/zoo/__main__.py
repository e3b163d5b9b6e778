"""Runs the zoo: every pair, or those named, each with an engine in a process of its own (`make test-zoo`).

On a GPU every pair runs on V2, and those of EAGLE-3 and MTP on V1 too. The last line is JSON: `families`, for each pair what
held (see `tests.zoo.one`) or, under `error`, why it couldn't run. Exits with 1 unless all held.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.gpu.kept import Kept
from tests.e2e.engine import IS_CUDA
from tests.tools import ROOT
from tests.zoo.pairs import PAIRS

TIMEOUT_S = 1200
TORCHVISION = ROOT / "build" / "zoo"
"""Where `make` has put torchvision, which vLLM imports with models that take images."""
SITE = ROOT / "tests" / "zoo" / "site"
HELD = ("events", "greedy", "capture", "drafts", "idle", "swap", "trained", "kept", "logits", "trees")
NOT_OF_ALL = ("logits", "trees")


def run(pair: str, runner: str, log: Path) -> dict[str, Any]:
    """One pair's result on a model runner; what it wrote besides goes to a file."""
    paths = [str(SITE), str(TORCHVISION), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"OMP_NUM_THREADS": "2"} | os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HONED_TEST_RUNNER": runner}
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.zoo.one", pair],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end after {TIMEOUT_S} s"}
    log.write_text(done.stdout + done.stderr)
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines and lines[-1].startswith("{"):
        result: dict[str, Any] = json.loads(lines[-1])
        return result
    errors = [line for line in done.stderr.splitlines() if "Error" in line]
    return {"error": (errors or [f"exit status {done.returncode}"])[-1].strip()[-300:]}


def runners(pair: str) -> list[str]:
    """Model runners that a pair runs on."""
    if not IS_CUDA:
        return [PAIRS[pair].runner]
    return ["v2"] if PAIRS[pair].method in ("dflash", "dspark") else ["v2", "v1"]


def main() -> int:
    """Run them, and say what held."""
    parser = argparse.ArgumentParser(prog="tests.zoo")
    parser.add_argument("pairs", nargs="*", choices=[[], *PAIRS], metavar="pair", help=", ".join(PAIRS))
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "zoo-logs")
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file, as pairs end")
    parser.add_argument("--at-once", type=int, default=1, help="engines at once")
    asked = parser.parse_args()
    asked.logs.mkdir(parents=True, exist_ok=True)
    kept = Kept(asked.out)
    families: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(asked.at_once) as pool:
        running = {
            pool.submit(run, pair, runner, asked.logs / f"{pair}, {runner}.log"): f"{pair}, {runner}"
            for pair in asked.pairs or PAIRS
            for runner in runners(pair)
        }
        for done in as_completed(running):
            families[running[done]] = found = done.result()
            kept.update(families=families)
            print(f"{running[done]}: {json.dumps(found)}", flush=True)
    print(json.dumps({"families": families}))
    held = (found.get(name, name in NOT_OF_ALL and "error" not in found) for found in families.values() for name in HELD)
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
