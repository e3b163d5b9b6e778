"""How much memory a device has left, and holding ourselves to what we said we would take."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from honed.recalib.config.memory import usable_bytes


def available_bytes(device: torch.device, limit_bytes: int = 0) -> int:
    """What a training may take: the limit if there is one, but no more than nine tenths of what is free."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = min(_free_in_machine(Path("/proc/meminfo")), _free_in_cgroup(Path("/sys/fs/cgroup")))
    return usable_bytes(free, limit_bytes)


def hold_to(device: torch.device, num_bytes: int) -> None:
    """Let our own allocations fail above this, before they push out anybody else's; only CUDA can do that."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)


def give_back(device: torch.device) -> None:
    """Let go of what was used: PyTorch keeps freed memory to itself, from a server and from what a next training may take."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_bytes(device: torch.device) -> int:
    """The most that this process had at once on the device, 0 where nobody counts."""
    return int(torch.cuda.max_memory_allocated(device)) if device.type == "cuda" else 0


def _free_in_machine(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62


def _free_in_cgroup(folder: Path) -> int:
    """What this process's own limit leaves, where it has one (cgroup v2)."""
    try:
        name = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].strip("/")
        limit = (folder / name / "memory.max").read_text().strip()
        used = (folder / name / "memory.current").read_text().strip()
    except OSError:
        return 2**62
    return 2**62 if limit == "max" else max(0, int(limit) - int(used))
