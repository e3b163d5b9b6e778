"""Whether training fits into the memory that vLLM leaves: an estimate of the need, held against what is free."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from honed.daemon.doctor import Check

MEMINFO = Path("/proc/meminfo")
SMI = ("nvidia-smi", "--query-gpu=index,memory.total,memory.free", "--format=csv,noheader,nounits")
WORKSPACE_BYTES = 1 << 30
"""What PyTorch, its CUDA context and its libraries take before anything is trained."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What the need depends on."""

    parameters: int
    """Of the drafter."""
    vocab_size: int
    hidden_size: int
    block_size: int
    anchors: int
    """Blocks of a micro-step."""


def needed_bytes(shape: Shape) -> int:
    """About how much memory a micro-step takes on its device.

    16 bytes a parameter (float32: weight, gradient, Adam's two moments), the target's embedding and head in float32, and three
    float32 copies of the logits of all drafted positions, which outweigh every other activation.
    """
    weights = 16 * shape.parameters
    shared = 2 * 4 * shape.vocab_size * shape.hidden_size
    logits = 3 * 4 * shape.anchors * shape.block_size * shape.vocab_size
    return weights + shared + logits + WORKSPACE_BYTES


def check_gpu(listing: str | None, device: str, needed: int) -> Iterator[Check]:
    """Whether the device that the trainer is set to has room.

    Args:
        listing: what `SMI` printed; None when it couldn't be run.
        device: "cuda" or "cuda:N"
    """
    if listing is None:
        yield Check("GPU memory", "unknown", "nvidia-smi can't be run", "Install the driver's tools to have this checked.")
        return
    index = int(device.partition(":")[2] or 0)
    rows = {int(row[0]): (int(row[1]) << 20, int(row[2]) << 20) for row in _rows(listing)}
    if index not in rows:
        text = f"trainer.device is {device}, the machine's GPUs are {', '.join(map(str, rows)) or 'none'}"
        yield Check("GPU memory", "error", text, "Set trainer.device to one of them, or to cpu.")
        return
    total, free = rows[index]
    text = f"{_gib(free)} of {_gib(total)} are free on GPU {index}; training takes about {_gib(needed)}"
    if free < needed:
        share = max(0.0, (needed - free) / total)
        cure = f"Lower vLLM's --gpu-memory-utilization by {share + 0.005:.2f} and restart it; or set trainer.device to cpu."
        yield Check("GPU memory", "error", text, cure)
    else:
        yield Check("GPU memory", "ok", text)


def check_host(meminfo: str, needed: int, sample_bytes: int, *, trains_here: bool) -> Iterator[Check]:
    """Whether the machine's memory has room for the samples, and for training where that is on the CPU."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    if match is None:
        return
    available = int(match[1]) << 10
    wanted = sample_bytes + (needed if trains_here else 0)
    text = f"{_gib(available)} are available; samples{' and training' if trains_here else ''} take up to {_gib(wanted)}"
    if available < wanted:
        cure = "Lower trainer.sample_bytes, or give the machine more memory: the trainer is the first to be killed."
        yield Check("memory", "warning", text, cure)
    else:
        yield Check("memory", "ok", text)


def gpu_listing() -> str | None:
    """What nvidia-smi says; None where there is none."""
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _rows(listing: str) -> Iterator[list[str]]:
    for line in listing.splitlines():
        fields = [field.strip() for field in line.split(",")]
        if len(fields) == 3 and all(field.isdecimal() for field in fields):
            yield fields


def _gib(number: int) -> str:
    return f"{number / 2**30:.1f} GiB"
