"""How two processes that know nothing of each other share a GPU: slices, the cost of a switch, harm against duty.

    slices   a kernel in each process reads the device's clock all the time; in gaps the other process had the device
    harm     one process replays a graph as large as a decode step of Qwen3-8B with 64 requests (its weights' products, 13.9 GB
             read); another does units of work at a duty, jittered. Arms have a random order and several turns, the quiet arm
             twice as many: growth of a step's mean and p99, beside the duty (seconds of units alone, over the arm's)
    kill     SIGKILL ends the second process amid a unit: the first one's steps before and after

Units: `gemm` multiplies 8192 x 8192 bf16 matrices (arithmetic), `stream` adds to large float32 vectors (memory), as an
optimizer does. There is no MPS: the driver slices time. Without a GPU small tensors try the program. The last line of stdout is
JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kept import Kept, in_ms

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
HIDDEN, INNER, QKV, LAYERS, REQUESTS = (4096, 12288, 6144, 36, 64) if IS_CUDA else (64, 192, 96, 4, 64)
GEMM_SIZE, STREAM_FLOATS = (8192, 1 << 28) if IS_CUDA else (128, 1 << 16)
ARMS: tuple[tuple[str, float, float], ...] = (
    ("off", 0.0, 0.0),
    ("off", 0.0, 0.0),
    ("gemm", 5.0, 0.02),
    ("gemm", 5.0, 0.05),
    ("gemm", 1.5, 0.05),
    ("stream", 5.0, 0.02),
    ("stream", 5.0, 0.05),
    ("gemm", 20.0, 0.05),
)
"""Kind of unit, milliseconds of a unit alone, duty."""
WATCH_S, LEAST_GAP_NS, MOST_GAPS = 1.0, 20_000, 4096

Document = dict[str, Any]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="of every arm")
    parser.add_argument("--arm-s", type=float, default=1.2, help="seconds of an arm")
    parser.add_argument("--out", type=Path, default=None, help="result file, written after each stage")
    arguments = parser.parse_args()
    kept = Kept(arguments.out)
    kept.update(device=torch.cuda.get_device_name() if IS_CUDA else "cpu", repeats=arguments.repeats, arm_s=arguments.arm_s)
    context = multiprocessing.get_context("spawn")
    peers: list[tuple[Connection, Any]] = []
    try:
        for work in (decode, units):  # in turn: a unit is timed while nobody else works
            peers.append(start(context, work))
            peers[-1][0].recv()
        if IS_CUDA:
            kept.update(slices=measure_slices(*(connection for connection, _ in peers)))
        kept.update(**measure_harm(peers[0][0], peers[1][0], arguments.repeats, arguments.arm_s))
        kept.update(kill=measure_kill(peers[0][0], *peers[1]))
        kept.update(ok=True)
    finally:
        for connection, process in peers:
            connection.close()
            process.join(10)
            if process.is_alive():
                process.kill()
    print(json.dumps(kept.document), flush=True)
    return 0


def start(context: Any, work: Callable[[Connection], None]) -> tuple[Connection, Any]:
    """Start a process; return it and the connection to it."""
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return ours, process


# --- what the processes do --------------------------------------------------------------------------------------------


def decode(connection: Connection) -> None:
    """Replay decode steps when asked to; answer with each step's beginning and seconds."""
    step = decode_step()
    for _ in range(5):
        step()
    serve(connection, {"play": lambda seconds: play(step, seconds), "watch": watch})


def decode_step() -> Callable[[], None]:
    """Make the products of a decode step, as a graph; a call ends when the device is done."""
    dtype = torch.bfloat16 if IS_CUDA else torch.float32

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device=DEVICE, dtype=dtype) * 0.02

    shapes = ((HIDDEN, QKV), (HIDDEN, HIDDEN), (HIDDEN, 2 * INNER), (INNER, HIDDEN))
    layers = [[weight(*shape) for shape in shapes] for _ in range(LAYERS)]
    x, inner = weight(REQUESTS, HIDDEN), weight(REQUESTS, INNER)

    def once() -> None:
        for qkv, out, up, down in layers:
            x @ qkv, x @ out, x @ up, inner @ down

    if not IS_CUDA:
        return once
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        once()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def play(step: Callable[[], None], seconds: float) -> list[tuple[float, float]]:
    """Play steps for this time."""
    found, until_s = [], time.monotonic() + seconds
    while (began_s := time.monotonic()) < until_s:
        step()
        found.append((began_s, time.monotonic() - began_s))
    return found


def units(connection: Connection) -> None:
    """Do units at a duty when asked to; answer with their number, and milliseconds of one alone."""
    a, b = (torch.randn(GEMM_SIZE, GEMM_SIZE, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    big, change = (torch.randn(STREAM_FLOATS, device=DEVICE) for _ in range(2))
    parts: dict[str, Callable[[], object]] = {"gemm": lambda: torch.mm(a, b, out=c), "stream": lambda: big.add_(change)}
    alone_s = {name: seconds_alone(part) for name, part in parts.items()}
    draw = random.Random(2)

    def work(kind: str, unit_ms: float, duty: float, seconds: float) -> Document:
        count = max(1, round(unit_ms / 1e3 / alone_s[kind]))
        unit_s, until_s, done = count * alone_s[kind], time.monotonic() + seconds, 0
        held_s = []
        while time.monotonic() < until_s:
            time.sleep(unit_s * (1.0 / duty - 1.0) * draw.uniform(0.5, 1.5))
            began_s = time.monotonic()
            for _ in range(count):
                parts[kind]()
            synchronize()
            held_s.append(time.monotonic() - began_s)
            done += 1
        return {"units": done, "unit_ms": 1e3 * unit_s, "held_ms": in_ms(held_s)}

    serve(connection, {"work": work, "watch": watch, "alone_ms": lambda: {n: 1e3 * s for n, s in alone_s.items()}})


def seconds_alone(part: Callable[[], object]) -> float:
    """Return its median seconds while nobody else works (the other process waits to be asked)."""
    part()
    synchronize()
    times = []
    for _ in range(7):
        began_s = time.monotonic()
        for _ in range(4):
            part()
        synchronize()
        times.append((time.monotonic() - began_s) / 4)
    return sorted(times)[3]


def serve(connection: Connection, does: dict[str, Callable[..., Any]]) -> None:
    """Follow commands until the connection ends."""
    synchronize()
    connection.send("ready")
    while True:
        try:
            name, *words = connection.recv()
        except EOFError:
            return
        connection.send(does[name](*words))


def synchronize() -> None:
    """Wait for the device."""
    if IS_CUDA:
        torch.cuda.synchronize()


def watch(seconds: float) -> list[tuple[int, int]]:
    """Return the kernel's own beginning and end in nanoseconds, then its gaps: from, until."""
    from benchmarks.gpu.device_clock import watch_clock

    gaps = torch.zeros(2 * MOST_GAPS + 2, dtype=torch.int64, device=DEVICE)
    watch_clock[(1,)](gaps, 1_000, LEAST_GAP_NS, MOST_GAPS, num_warps=1)  # compiles
    gaps.zero_()
    watch_clock[(1,)](gaps, int(seconds * 1e9), LEAST_GAP_NS, MOST_GAPS, num_warps=1)
    torch.cuda.synchronize()
    pairs = gaps.view(-1, 2).tolist()
    return [pair for pair in pairs if pair[0]]


# --- what is measured -------------------------------------------------------------------------------------------------


def ask(connection: Connection, *words: Any) -> Any:
    """Send a process a command; return its answer."""
    connection.send(words)
    return connection.recv()


def measure_slices(one: Connection, other: Connection) -> Document:
    """Let both watch at once. A slice lies between two gaps, a switch between the slices of the two."""
    ask(one, "watch", 0.01), ask(other, "watch", 0.01)
    alone = ask(one, "watch", 0.2)
    one.send(("watch", WATCH_S))
    other.send(("watch", WATCH_S))
    seen = [one.recv(), other.recv()]
    slices = [slices_of(gaps) for gaps in seen]
    shared = (max(s[0][0] for s in slices if s), min(s[-1][1] for s in slices if s)) if all(slices) else (0, 0)
    inside = [[s for s in own if shared[0] < s[0] and s[1] < shared[1]] for own in slices]
    ends = sorted((end, begin, who) for who, own in enumerate(inside) for begin, end in own)
    switches_s = []
    for (end, _, who), (_, begin, other_who) in itertools.pairwise(ends):
        if who != other_who and begin >= end:
            switches_s.append((begin - end) / 1e9)
    lengths_s = [(end - begin) / 1e9 for own in inside for begin, end in own]
    return {
        "slice_ms": in_ms(lengths_s),
        "switch_ms": in_ms(switches_s),
        "slices": [len(own) for own in inside],
        "gaps_alone": max(0, len(alone) - 1),
        "first": [own[:12] for own in slices],
    }


def slices_of(gaps: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return when a process had the device. The first row has its kernel's beginning and end."""
    (began, ended), *rest = gaps
    points = [began, *(point for gap in rest for point in gap), ended]
    return list(zip(points[::2], points[1::2], strict=True))


def measure_harm(steps: Connection, other: Connection, repeats: int, arm_s: float) -> Document:
    """Measure steps beside each arm."""
    order = [arm for arm in ARMS for _ in range(repeats)]
    random.Random(1).shuffle(order)
    seen: dict[tuple[str, float, float], list[float]] = {}
    done: dict[tuple[str, float, float], list[Document]] = {}
    ask(steps, "play", 0.5)
    for arm in order:
        kind, unit_ms, duty = arm
        if duty:
            other.send(("work", kind, unit_ms, duty, arm_s))
        played = ask(steps, "play", arm_s)
        seen.setdefault(arm, []).extend(seconds for _, seconds in played)
        if duty:
            done.setdefault(arm, []).append(other.recv())
    off = in_ms(seen["off", 0.0, 0.0])
    arms = []
    for arm, seconds in seen.items():
        kind, _, duty = arm
        row: Document = {"kind": kind, "duty_asked": duty, "steps": len(seconds), "step_ms": in_ms(seconds)}
        if duty:
            unit_ms, count = done[arm][0]["unit_ms"], sum(one["units"] for one in done[arm])
            given = count * unit_ms / 1e3 / (arm_s * repeats)
            harm = row["step_ms"]["mean"] / off["mean"] - 1.0
            row |= {
                "unit_ms": round(unit_ms, 3),
                "units": count,
                "duty": round(given, 5),
                "harm_mean": round(harm, 5),
                "harm_p99": round(row["step_ms"]["p99"] / off["p99"] - 1.0, 5),
                "harm_over_duty": round(harm / given, 3) if given else None,
                "held_ms": done[arm][0]["held_ms"],
            }
        arms.append(row)
    return {"arms": sorted(arms, key=lambda row: (row["kind"], row["duty_asked"])), "alone_ms": ask(other, "alone_ms")}


def measure_kill(steps: Connection, other: Connection, process: Any) -> Document:
    """Measure steps around a SIGKILL of the other process, which works without a pause."""
    other.send(("work", "gemm", 50.0, 0.95, 60.0))
    steps.send(("play", 2.0))
    time.sleep(1.0)
    killed_s = time.monotonic()
    os.kill(process.pid, signal.SIGKILL)
    try:
        played = steps.recv()
    except EOFError:
        return {"lives": False}
    before, after = ([s for began, s in played if (began < killed_s) == is_before] for is_before in (True, False))
    again = [seconds for _, seconds in ask(steps, "play", 0.3)]
    return {"lives": True, "before_ms": in_ms(before), "after_ms": in_ms(after), "again_ms": in_ms(again)}


if __name__ == "__main__":
    sys.exit(main())
