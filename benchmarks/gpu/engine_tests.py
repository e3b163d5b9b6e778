"""The tests that need a GPU: those of the real engine as vLLM runs there (V2, async scheduling, CUDA graphs), trees and EAGLE-3
on either runner, and those of kernels and of training.

Each file has a pytest process of its own. Several run at once if there are cores for it: engines of the tiny pair need little
of a card. Verdicts are kept as they come, so a file that is cut off keeps what it showed. Without a GPU one test of the suite
runs on V1, to try this program. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kept import Kept
from benchmarks.server.processes import ROOT

IS_CUDA = torch.cuda.is_available()
Chosen = tuple[str, str, list[str]]
"""Model runner, file, pytest's further words."""
FILES: list[Chosen] = [
    ("v2-async", "tests/e2e/test_cuda_graphs.py", []),
    ("v2-async", "tests/e2e/test_trees_v2.py", []),
    ("v2-async", "tests/e2e/test_trees_windows.py", []),
    ("v2-async", "tests/e2e/test_trees_hybrid.py", []),
    ("v2-async", "tests/e2e/test_trees_dflash2.py", []),
    ("v2-async", "tests/e2e/test_v2_passes.py", []),
    ("v1-async", "tests/e2e/test_trees.py", []),
    ("v1", "tests/e2e/test_trees.py", []),
    ("v2-async", "tests/e2e/test_engine_modes.py", ["-m", "runners"]),
    ("v2-async", "tests/e2e/test_eagle3.py", ["-k", "fused_ones"]),
    ("v1", "tests/e2e/test_eagle3.py", []),
    ("v2-async", "tests/e2e/test_v2_only.py", ["-m", "runners"]),
    ("v2-async", "tests/e2e/test_runner_swaps.py", ["-m", "runners"]),
    ("v2-async", "tests/e2e/test_runner_contract.py", ["-m", "runners"]),
    ("v2-async", "tests/e2e/test_delivered.py", ["-m", "runners"]),
    ("v2-async", "tests/e2e/test_sampling_unchanged.py", ["-m", "runners"]),
    ("v2-async", "tests/e2e/test_attacks.py", ["-m", "runners"]),
    ("v1", "tests/e2e/test_runner_contract.py", ["-m", "runners"]),
]
"""Files that no GPU has run come first."""
ON_GPU = ["-m", "gpu"]
KERNELS: list[Chosen] = [
    *(("v2-async", f"tests/kernels/{folder}", ON_GPU) for folder in ("recurrent", "trees", "verify")),
    ("v2-async", "tests/kernels/training", [*ON_GPU, "-k", "not 33"]),
    ("v2-async", "tests/kernels/training", [*ON_GPU, "-k", "33"]),
    ("v2-async", "tests/recalib/training", [*ON_GPU, "-k", "gradients"]),
    ("v2-async", "tests/recalib/training", [*ON_GPU, "-k", "not gradients"]),
    *(("v2-async", f"tests/kernels/{folder}", ON_GPU) for folder in ("cache", "capture")),
    ("v2-async", "tests/attach/capture", ON_GPU),
    ("v2-async", "tests/attach/swap/test_staging.py", ON_GPU),
]
DRY_FILES: list[Chosen] = [("v1", "tests/e2e/test_runner_contract.py", ["-m", "runners", "-k", "runner_under_test"])]
LOGS = ROOT / "build" / "gpu-logs" / "engine-tests"
ENDING_S = 8.0
FEW_THREADS = {"OMP_NUM_THREADS": "2", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
"""Each process would take all cores."""
VERDICT = re.compile(r"^(?:\[gw\d+\] )?(\S+::\S.*?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
REASON = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?) - (.*)$", re.MULTILINE)

Document = dict[str, Any]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="one test, on V1")
    parser.add_argument("--kernels", action="store_true", help="instead the tests that need no engine")
    parser.add_argument("--out", type=Path, default=None, help="result file, written as files end")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which running files are ended")
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="files at once")
    arguments = parser.parse_args()
    LOGS.mkdir(parents=True, exist_ok=True)
    kept = Kept(arguments.out)
    waiting = list(KERNELS if arguments.kernels else DRY_FILES if arguments.dry else FILES)
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    files: dict[str, Document] = {told(chosen): {"state": "waiting"} for chosen in waiting}
    began_s = time.monotonic()
    while waiting or running:
        while waiting and len(running) < arguments.at_once:
            chosen = waiting.pop(0)
            running[told(chosen)] = start(chosen), time.monotonic()
        is_over = time.monotonic() - began_s > arguments.limit
        if is_over:
            end([process for process, _ in running.values()])
        for name, (process, since_s) in list(running.items()):
            files[name] = {"seconds": round(time.monotonic() - since_s, 1), **verdicts(log_of(name))}
            if process.poll() is not None:
                del running[name]
                files[name] |= {"state": "cut off" if is_over else "ended", "exit": process.returncode}
        waiting = [] if is_over else waiting
        kept.update(**totals(files), files=files)
        time.sleep(0.5)
    is_ok = not waiting and all(one.get("exit") == 0 for one in files.values())
    kept.update(ok=is_ok)
    shown = {name: kept.document[name] for name in ("ok", "passed", "failed", "errors", "skipped")}
    print(json.dumps(shown), flush=True)
    return 0 if is_ok else 1


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Interrupt each pytest, which then says what has failed so far; all have `ENDING_S` together."""
    until_s = time.monotonic() + ENDING_S
    for process in processes:
        process.send_signal(signal.SIGINT)
    for process in processes:
        try:
            process.wait(max(until_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def told(chosen: Chosen) -> str:
    """A file, or a choice of its tests, as the result names it."""
    runner, name, words = chosen
    return f"{name}{', ' + words[-1] if '-k' in words else ''} ({runner})"


def start(chosen: Chosen) -> subprocess.Popen[bytes]:
    """Start one file's pytest; -v prints each verdict as it comes."""
    runner, name, words = chosen
    command = [sys.executable, "-m", "pytest", "-v", "-rfE", "--tb=long", "-p", "no:cacheprovider", "--durations=8"]
    with log_of(told(chosen)).open("wb") as log:
        return subprocess.Popen(
            [*command, *words, name],
            cwd=ROOT,
            env=os.environ | {"HONED_TEST_RUNNER": runner, **FEW_THREADS},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def log_of(name: str) -> Path:
    """The log of a file, or of a folder of files, by the name that the result gives it."""
    return LOGS / f"{re.sub('[^a-z0-9]+', '-', name.removeprefix('tests/')).strip('-')}.log"


def verdicts(log: Path) -> Document:
    """Read the verdicts of a file's tests so far."""
    text = log.read_text(errors="replace")
    seen = dict(VERDICT.findall(text))
    is_one_file = len({test.partition("::")[0] for test in seen}) == 1
    found = {name_of(test, is_one_file): verdict for test, verdict in seen.items()}
    by_kind = {kind: sorted(t for t, v in found.items() if v == kind) for kind in ("FAILED", "ERROR", "SKIPPED")}
    reasons = {name_of(test, is_one_file): why[:300] for test, why in REASON.findall(text)}
    return {
        "passed": sum(v == "PASSED" for v in found.values()),
        "failed": by_kind["FAILED"],
        "errors": by_kind["ERROR"],
        "skipped": by_kind["SKIPPED"],
        "reasons": reasons,
    }


def name_of(test: str, is_one_file: bool) -> str:
    """Leave the file out of a test's id if there is only one."""
    return test.partition("::")[2] if is_one_file else test


def totals(files: dict[str, Document]) -> Document:
    """Add up all files."""
    return {"passed": sum(one.get("passed", 0) for one in files.values())} | {
        kind: sum(len(one.get(kind, [])) for one in files.values()) for kind in ("failed", "errors", "skipped")
    }


if __name__ == "__main__":
    sys.exit(main())
