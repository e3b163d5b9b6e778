"""Everything that only a CUDA GPU can show: `make gpu`, and then `make gpu RESUME=1`, at most nine minutes each.

Parts run in order of worth, each with a time limit. The result file is written every two seconds, with what the running part
has written so far: a part that is cut off keeps what it showed, and so do the parts of earlier calls. If an engine fails to
start, the parts that need one are left out and the others run. Parts that measure no time run at once if they follow each other
and there are cores for it; the others run alone. Without a GPU smaller parts run on the CPU in the same order, and show nothing
of a GPU.

    python -m benchmarks.gpu                          # in the repository's root
    python -m benchmarks.gpu --only kernels           # these parts
    python -m benchmarks.gpu --resume                 # parts that the result file has no good result of

The last line of stdout is JSON: `parts` {name: {ok, seconds, figures}}.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kept import Kept
from benchmarks.gpu.parts import PARTS, STARTS, Part
from benchmarks.server.measured import commit, hardware
from benchmarks.server.processes import ROOT

Document = dict[str, Any]

LOGS = ROOT / "build" / "gpu-logs"
MOST_S = 540.0
KEEP_S = 2.0
CORES_AT_ONCE = 8
"""From this number of cores on, parts that measure no time run at once."""


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=[part.name for part in PARTS], default=None, help="these parts alone")
    parser.add_argument("--resume", action="store_true", help="leave out parts that have a good result in the result file")
    parser.add_argument("--seconds", type=float, default=MOST_S, help="seconds for all parts together")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: benchmarks/results/gpu-DEVICE-DATE.json)")
    arguments = parser.parse_args()
    is_cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if is_cuda else "cpu"
    out = (arguments.out or default_path(device)).resolve()
    kept = Kept(out, json.loads(out.read_text()) if out.exists() else {})
    earlier = kept.document.get("parts", {})
    wanted = [part for part in PARTS if arguments.only is None or part.name in arguments.only]
    wanted = [part for part in wanted if not (arguments.resume and earlier.get(part.name, {}).get("ok"))]
    asked = {part.name for part in wanted}
    kept.update(
        device=device,
        is_cuda=is_cuda,
        torch=torch.__version__,
        hardware=hardware(),
        commit=commit(),
        when=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        parts=earlier,
    )
    if not is_cuda:
        print("no GPU: a dry run on the CPU, which shows nothing of a GPU", flush=True)
    LOGS.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + (arguments.seconds if is_cuda else 1e9)
    for group in groups(wanted, are_at_once=is_cuda and (os.cpu_count() or 1) >= CORES_AT_ONCE):
        started = kept.document["parts"].get(STARTS) if STARTS in asked else None  # a slow one isn't a failed one
        has_engine = started is None or started["ok"] or bool(started["why"])
        run([part for part in group if has_engine or not part.needs_engine], is_cuda, until_s, kept)
        for part in group:
            if part.needs_engine and not has_engine:
                note(kept, part, {"ok": False, "seconds": 0.0, "why": "no engine starts"})
    show(kept.document)
    shown = {name: {k: v for k, v in one.items() if k != "details"} for name, one in kept.document["parts"].items()}
    print(json.dumps({"device": device, "commit": kept.document["commit"], "parts": shown}), flush=True)
    return 0 if all(kept.document["parts"].get(part.name, {}).get("ok") for part in wanted) else 1


def default_path(device: str) -> Path:
    """Name the result file by device and day; a dry run isn't kept among the results."""
    if device == "cpu":
        return ROOT / "build" / "gpu-dry.json"
    name = device.removeprefix("NVIDIA ").split()[0].lower()
    return ROOT / "benchmarks" / "results" / f"gpu-{name}-{time.strftime('%Y-%m-%d')}.json"


def groups(parts: list[Part], are_at_once: bool) -> list[list[Part]]:
    """Group the parts that run at once; their order is kept."""
    found: list[list[Part]] = []
    for part in parts:
        if found and are_at_once and not part.is_timed and not found[-1][-1].is_timed:
            found[-1].append(part)
        else:
            found.append([part])
    return found


def run(group: list[Part], is_cuda: bool, until_s: float, kept: Kept) -> None:
    """Run a group to its end or to its limits."""
    began_s = time.monotonic()
    running = {}
    for part in group:
        if until_s - began_s < 5.0:
            note(kept, part, {"ok": False, "seconds": 0.0, "why": "no time was left"})
            continue
        print(f"== {part.name}: {part.about}", flush=True)
        result = LOGS / f"{part.name}.json"
        result.unlink(missing_ok=True)
        running[part] = start(part, is_cuda, result), result
    try:
        while running:
            for part, (process, result) in list(running.items()):
                seconds = time.monotonic() - began_s
                is_late = is_cuda and (seconds > part.limit_s or time.monotonic() > until_s)
                row: Document = {"ok": False, "seconds": round(seconds, 1), "why": f"cut off after {seconds:.0f} s"}
                row |= {"beside": [other.name for other in group if other is not part]} if len(group) > 1 else {}
                if process.poll() is None and not is_late:
                    note(kept, part, row | read(part, result), is_over=False)
                    continue
                end(process)
                del running[part]
                row |= {} if is_late else {"ok": process.returncode == 0, "why": ""}
                note(kept, part, row | read(part, result))
            time.sleep(KEEP_S)
    finally:  # Ctrl-C: parts have sessions of their own, so nobody else ends them
        for process, _ in running.values():
            end(process)


def start(part: Part, is_cuda: bool, result: Path) -> subprocess.Popen[bytes]:
    """Start a part's program, in a session of its own."""
    words = [sys.executable, *(part.words if is_cuda else part.dry_words), "--out", str(result)]
    with (LOGS / f"{part.name}.log").open("wb") as log:
        return subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt the program, then kill its whole process group."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read(part: Part, result: Path) -> Document:
    """Return a part's short figures and its whole result; the end of its log if it wrote no result."""
    if not result.exists():
        return {"log": (LOGS / f"{part.name}.log").read_text(errors="replace").splitlines()[-12:]}
    try:
        found = json.loads(result.read_text())
    except ValueError:  # it is being written
        return {}
    try:
        return {**part.figures(found), "details": found}
    except (KeyError, TypeError, AttributeError) as error:
        return {"figures": f"{type(error).__name__}: {error}", "details": found}


def note(kept: Kept, part: Part, row: Document, is_over: bool = True) -> None:
    """Keep a part's row with its commit, device and date: a file can hold parts of several runs."""
    row |= {"commit": kept.document["commit"], "device": kept.document["device"], "when": kept.document["when"]}
    kept.update(parts={**kept.document["parts"], part.name: row})
    if is_over:
        print(f"   {part.name}: {'ok' if row['ok'] else 'NOT OK'}, {row['seconds']} s {row.get('why', '')}", flush=True)


def show(document: Document) -> None:
    """Print a table for people."""
    print(f"\n{document['device']}, commit {document['commit']}")
    for name, row in document["parts"].items():
        print(f"{name:14s} {'ok    ' if row['ok'] else 'NOT OK'} {row['seconds']:7.1f} s {row.get('why', '')}")
        for key, value in row.items():
            if key not in ("ok", "seconds", "why", "details", "commit", "device", "when"):
                print(f"    {key:22s} {json.dumps(value)[:400]}")


if __name__ == "__main__":
    sys.exit(main())
