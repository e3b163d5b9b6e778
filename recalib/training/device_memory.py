"""The trainer's device: its free memory, and a limit that keeps our process to its estimate."""

from __future__ import annotations

import gc
from pathlib import Path

import torch

from honed.recalib.config.memory import usable_bytes


def use(name: str) -> torch.device:
    """Return a device with its index, and make it this process's current one, on which Triton launches kernels."""
    device = torch.device(name)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def available_bytes(device: torch.device, limit_bytes: int = 0) -> int:
    """Return what a training may take: nine tenths of the free memory, or the limit if that is lower."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = min(_free_in_machine(Path("/proc/meminfo")), _free_in_cgroup(Path("/sys/fs/cgroup")))
    return usable_bytes(free, limit_bytes)


def hold_to(device: torch.device, num_bytes: int) -> None:
    """Make our own allocations fail above this, before they displace anyone else's; only CUDA supports that."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)


def give_back(device: torch.device) -> None:
    """Free cached memory: PyTorch otherwise keeps it from a server and from the next training."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _free_in_machine(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62


def _free_in_cgroup(folder: Path) -> int:
    """Free memory under this process's own limit, if it has one (cgroup v2)."""
    try:
        name = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].strip("/")
        limit = (folder / name / "memory.max").read_text().strip()
        used = (folder / name / "memory.current").read_text().strip()
    except OSError:
        return 2**62
    return 2**62 if limit == "max" else max(0, int(limit) - int(used))
