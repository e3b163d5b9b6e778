"""Times, peak memory, and a device's ceilings: copy bandwidth and matrix products, measured in the same run.

Candidates take turns, round by round, and ratios are taken within a round: a machine that slows down slows both sides. On a GPU
the L2 cache is emptied before each turn. On a CPU only the process's own time counts, so that other work on the machine doesn't
change it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.kernels.case import Run

SHORTEST_S = 2e-3
"""Minimum duration of a turn on a CPU."""
L2_BYTES = 256 << 20
COPY_BYTES = {"cuda": 1 << 30, "cpu": 256 << 20}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}
MATMUL_DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}


@dataclass(frozen=True)
class Ceilings:
    """The highest rates that this device reached in this run."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, bytes_moved: int, flops: int) -> float:
        """Shortest time for this much work: the longer of moving and multiplying."""
        return max(bytes_moved / self.bytes_per_s, flops / self.flops_per_s)


def measure_ceilings(device: torch.device, rounds: int) -> Ceilings:
    """Measure copy bandwidth (bytes read and written) and the rate of a large square matrix product."""
    kind = device.type
    a, b = (torch.ones(COPY_BYTES[kind], dtype=torch.uint8, device=device) for _ in range(2))
    x, y = (torch.randn(2 * (MATMUL_SIZE[kind],), device=device).to(MATMUL_DTYPE[kind]) for _ in range(2))
    product = torch.empty_like(x)
    times = take_turns(device, {"copy": lambda: a.copy_(b), "matmul": lambda: torch.mm(x, y, out=product)}, rounds)
    fastest = {name: float(np.min(values)) for name, values in times.items()}
    return Ceilings(2 * COPY_BYTES[kind] / fastest["copy"], 2 * MATMUL_SIZE[kind] ** 3 / fastest["matmul"])


def take_turns(device: torch.device, candidates: Mapping[str, Run], rounds: int) -> dict[str, np.ndarray]:
    """Time every candidate in every round, in seconds, after a warm-up."""
    if device.type == "cuda":
        return _turns_on_gpu(device, candidates, rounds)
    inner = {name: _repeats(run) for name, run in candidates.items()}
    times = {name: np.zeros(rounds) for name in candidates}
    for i in range(rounds):
        for name, run in candidates.items():
            began_s = time.process_time()
            for _ in range(inner[name]):
                run()
            times[name][i] = (time.process_time() - began_s) / inner[name]
    return times


def _repeats(run: Run) -> int:
    run()
    began_s = time.process_time()
    run()
    return max(1, math.ceil(SHORTEST_S / max(time.process_time() - began_s, 1e-6)))


def _turns_on_gpu(device: torch.device, candidates: Mapping[str, Run], rounds: int) -> dict[str, np.ndarray]:
    flush = torch.empty(L2_BYTES, dtype=torch.uint8, device=device)
    for run in candidates.values():
        for _ in range(3):  # compiles, tunes, fills the allocator
            run()
    torch.cuda.synchronize(device)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in candidates}
    for _ in range(rounds):
        for name, run in candidates.items():
            flush.zero_()  # also lets the host run ahead, so that launches aren't timed
            began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            began.record()
            run()
            ended.record()
            events[name].append((began, ended))
    torch.cuda.synchronize(device)
    return {name: np.array([a.elapsed_time(b) / 1e3 for a, b in pairs]) for name, pairs in events.items()}


def captured(run: Run) -> Run:
    """Capture the same work in a CUDA graph."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def peak_bytes(device: torch.device, run: Run) -> int:
    """Peak memory of PyTorch's allocator during the run, beyond the memory already in use."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    changes = [(e.start_ns(), e.nbytes()) for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    return int(np.cumsum([0, *(size for _, size in sorted(changes))]).max())
