"""The trainer's device: its free memory, and a limit that keeps our process to its estimate."""

from __future__ import annotations

import gc
import os
import subprocess
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import UUID

import torch

from honed.recalib.config.compiler import lacks_for_kernels
from honed.recalib.config.engine_gpus import EngineGpus, best_gpu, owner_of
from honed.recalib.config.memory import GIB, in_words, usable_bytes

AUTO = "auto"
LEAST_BYTES = 2 * GIB


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as `nvidia-smi` sees it."""

    free: int
    """Bytes."""
    uuid: str


def devices_of(name: str, engines: Sequence[EngineGpus] = ()) -> list[torch.device]:
    """Return the devices that `trainer.device` allows, in the order in which they are tried.

    Of GPUs it is the one with most room, of those that no engine will want back at its start if there are any.
    """
    if name != AUTO:
        return [torch.device(name)]
    gpus = [torch.device("cuda")] if torch.cuda.is_available() else []
    seen = gpus_seen()
    if gpus and len(seen) > 1:
        gpus = [torch.device("cuda", best_gpu(seen, engines))]
    return [*gpus, torch.device("cpu")]


def gpus_seen() -> dict[int, Gpu]:
    """The GPUs that this process may use, by PyTorch's numbers; empty where `nvidia-smi` doesn't say.

    A CUDA context, which PyTorch needs to tell, would take half a gigabyte of each.
    """
    query = ("nvidia-smi", "--query-gpu=index,uuid,memory.free", "--format=csv,noheader,nounits")
    free: dict[str, Gpu] = {}
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        for line in listed.splitlines():
            index, uuid, mebibytes = (part.strip() for part in line.split(","))
            free[index] = free[uuid] = Gpu(int(mebibytes) << 20, uuid.removeprefix("GPU-").lower())
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        names = [name.strip() for name in visible.split(",")] if visible else [name for name in free if name.isdecimal()]
        return {number: free[_whole(name, free)] for number, name in enumerate(names)}
    except (OSError, ValueError, KeyError, subprocess.SubprocessError):
        return {}


def _whole(name: str, known: Iterable[str]) -> str:
    """A GPU's number, or its UUID, of which CUDA takes the beginning, too."""
    return name if name.isdecimal() else next((one for one in known if one.startswith(name)), name)


class DeviceError(RuntimeError):
    """A GPU on which a training isn't worth a try."""


def check_gpu(device: torch.device, engines: Sequence[EngineGpus] = ()) -> None:
    """Look at a GPU from outside.

    Args:
        engines: those on this machine.

    Raises:
        DeviceError: an engine that is down will want it back, nothing compiles its kernels, or less than LEAST_BYTES are free,
            as far as `nvidia-smi` says.
    """
    seen = gpus_seen().get(device.index or 0)
    if owner := owner_of(seen.uuid if seen is not None else "", engines):
        raise DeviceError(
            f"{owner} isn't running, and will want the memory of {device} at its start: start it, or if it won't come back "
            "wait a quarter of an hour, or remove its folder below `engines` in the runtime directory"
        )
    if lacks := lacks_for_kernels(Path(sysconfig.get_path("include"))):
        raise DeviceError(f"there is {' and '.join(lacks)}, which kernels are compiled with: install gcc and Python's headers")
    free = seen.free if seen is not None else LEAST_BYTES
    if free < LEAST_BYTES:
        raise DeviceError(f"{in_words(free)} are free on {device}, and a training needs {in_words(LEAST_BYTES)} at least")


def use(device: torch.device) -> torch.device:
    """Return the device with its index, and make it this process's current one, on which Triton launches kernels."""
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def available_bytes(device: torch.device, limit_bytes: int = 0, reserve: int = 0) -> int:
    """Return what a training may take, see `usable_bytes`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = min(_free_in_machine(Path("/proc/meminfo")), _free_in_cgroup(Path("/sys/fs/cgroup")))
    return usable_bytes(free, limit_bytes, reserve)


def uuid_of(device: torch.device) -> str:
    """A GPU's UUID, as engines tell it; "" where it isn't known."""
    try:
        return str(UUID(str(torch.cuda.get_device_properties(device).uuid)))
    except (AttributeError, ValueError, RuntimeError):
        return ""


def hold_to(device: torch.device, num_bytes: int) -> None:
    """Make our own allocations fail above this, before they displace anyone else's; only CUDA supports that."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)


def give_back() -> None:
    """Free cached memory: PyTorch otherwise keeps it from a server and from the next training."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def _free_in_machine(path: Path) -> int:
    for line in path.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 2**62


def _free_in_cgroup(folder: Path) -> int:
    """Free memory under this process's own limit, if it has one (cgroup v2).

    The kernel counts files that were read or written as used memory, until it needs the room.
    """
    try:
        name = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].strip("/")
        own = folder / name
        limit, used = ((own / file).read_text().strip() for file in ("memory.max", "memory.current"))
        if limit == "max":
            return 2**62
        held = dict(line.split() for line in (own / "memory.stat").read_text().splitlines())
    except OSError:
        return 2**62
    cached = int(held.get("active_file", 0)) + int(held.get("inactive_file", 0)) - int(held.get("file_dirty", 0))
    return max(0, int(limit) - max(0, int(used) - max(0, cached)))
