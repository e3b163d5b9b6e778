"""Checks that training fits into the memory that vLLM leaves free: compares the trainer's estimate with free memory.

The trainer makes the same estimate at its start (`recalib/config/memory.py`) and refuses a training that doesn't fit.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from honed.daemon.doctor.check import Check, Level
from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.config.engine_gpus import EngineGpus, best_gpu, owner_of, reserve_on
from honed.recalib.config.memory import MemoryEstimate, estimate_and_cures, in_words, usable_bytes, value_bytes
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.config.training import Scope
from honed.recalib.registry.vocabulary import VocabularyTensors

MEMINFO = Path("/proc/meminfo")
SMI = ("nvidia-smi", "--query-gpu=index,memory.total,memory.free,compute_cap,uuid", "--format=csv,noheader,nounits")
CONTEXT_BYTES = 1 << 29
"""Subtracted from free memory: PyTorch, its libraries and its CUDA context."""
STATES_WITH_MEMORY = ("training", "waiting", "gating")
"""States in which a trainer may already hold its training memory."""
TYPICAL = DrafterConfig(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=5,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    block_size=16,
    mask_token_id=151_669,
    target_layer_ids=(1, 9, 17, 25, 33),
    target_hidden_size=4096,
)
"""An 8B target's drafter, used if none is known. Source: config.json of z-lab/Qwen3-8B-DFlash-b16."""


@dataclass(frozen=True, slots=True)
class Need:
    """Memory that one training needs."""

    estimate: MemoryEstimate
    cures: list[tuple[str, MemoryEstimate]]
    """Changes of settings and the estimate with each; cheapest first."""
    limit_bytes: int = 0
    """`trainer.memory_bytes`."""
    guess: str = ""
    """Reason for guessing the drafter; empty if it is known."""

    @property
    def total_bytes(self) -> int:
        """Total."""
        return self.estimate.total_bytes

    @property
    def level(self) -> Level:
        """Level of a check that finds too little memory: of a guess it says nothing sure."""
        return "unknown" if self.guess else "error"

    def __str__(self) -> str:
        guessed = f" (a guess, as for the drafter of an 8B target: {self.guess})" if self.guess else ""
        return f"training takes about {in_words(self.total_bytes)}{guessed}"

    def cure(self, usable: int) -> str:
        """Cheapest change of settings that makes it fit; "" if none does."""
        usable = min(usable, self.limit_bytes or usable)
        able = [text for text, less in self.cures if less.total_bytes <= usable]
        return able[0] if able else ""


def need(
    settings: TrainerSettings,
    config: DrafterConfig | None,
    scope: Scope,
    *,
    is_fused: bool,
    vocabulary: VocabularyTensors,
    guess: str = "",
    has_bfloat16: bool = True,
) -> Need:
    """Memory for training a drafter, by the trainer's own estimate.

    Args:
        config: the drafter's; None: a typical one, and `guess` says why.
        is_fused: whether engines capture fused features instead of the target's separate layers.
        vocabulary: facts of the drafter's files and its target's.
        has_bfloat16: whether the trainer's GPU has it.
    """
    config = config or TYPICAL
    shared_bytes, compute_bytes = value_bytes(settings.device, settings.precision, has_bfloat16)
    estimate, cures = estimate_and_cures(
        config,
        settings.training(scope, config.block_size, config.hidden_size),
        settings.rows_per_micro_step,
        is_fused=is_fused and scope != "full",
        is_head_tied=vocabulary.is_head_tied,
        own_values=vocabulary.own_values,
        shared_bytes=shared_bytes,
        compute_bytes=compute_bytes,
    )
    return Need(estimate, cures, settings.memory_bytes, guess)


def roomiest(listing: str | None, engines: Sequence[EngineGpus] = ()) -> str:
    """Name the GPU that the trainer takes by itself, see `best_gpu`."""
    gpus = _gpus(listing or "")
    return f"cuda:{best_gpu(gpus, engines)}" if gpus else "cuda"


def has_bfloat16(listing: str | None, device: str) -> bool:
    """Tell whether a GPU multiplies bfloat16, as far as the listing says: NVIDIA's do from compute capability 8 on."""
    found = _gpu_of(listing, device)
    return found is None or not found.capability.split(".")[0].isdecimal() or float(found.capability) >= 8.0


def may_fit(listing: str | None, device: str, needed: Need, engines: Sequence[EngineGpus] = ()) -> bool:
    """Tell whether the trainer takes a GPU by itself, as far as the listing says."""
    found = _gpu_of(listing, device)
    if found is None:
        return not _is_limited(needed)
    return not (_is_limited(needed) or owner_of(found.uuid, engines)) and needed.total_bytes <= found.usable(engines)


def check_gpu(
    listing: str | None, device: str, needed: Need, *, is_auto: bool = False, engines: Sequence[EngineGpus] = ()
) -> Iterator[Check]:
    """Check that the trainer's device has enough free memory.

    Args:
        listing: output of `SMI`; None if it couldn't be run.
        device: "cuda" or "cuda:N"
        is_auto: the trainer takes the CPU where it hasn't.
        engines: those on this machine.
    """
    if listing is None:
        yield Check("GPU memory", "unknown", "nvidia-smi can't be run", "Install the driver's tools for this check.")
        return
    index, found = _index_of(device), _gpu_of(listing, device)
    if found is None:
        text = f"trainer.device is {device}, the machine's GPUs are {', '.join(map(str, _gpus(listing))) or 'none'}"
        yield Check("GPU memory", "error", text, "Set trainer.device to one of them, or to cpu.")
        return
    if is_auto and (owner := owner_of(found.uuid, engines)):
        kept = f"GPU {index} is kept for its start, for a quarter of an hour"
        text = f"{owner} isn't running, and {kept}: a training takes the CPU meanwhile"
        cure = "Start it; or if it won't come back, wait, or remove its folder below `engines` in the runtime directory."
        yield Check("GPU memory", "warning", text, cure)
        return
    total, usable, reserve = found.total, found.usable(engines), reserve_on(found.uuid, engines)
    left = f"{in_words(usable)} of it for training"
    left += f" (engines will still want {in_words(reserve)})" if reserve else ""
    text = f"{in_words(found.free)} of {in_words(total)} are free on GPU {index}, {left}; {needed}"
    if needed.total_bytes > usable:
        share = (needed.total_bytes - usable) / usable_bytes(total)
        cure = f"Lower vLLM's --gpu-memory-utilization by {share + 0.005:.2f} and restart it"
        if is_auto:
            yield Check("GPU memory", "ok", f"{text}: it trains on the CPU. {cure} for the GPU.")
            return
        cure += f"; or {needed.cure(usable) or 'set trainer.device to cpu'}."
        yield Check("GPU memory", needed.level, f"{text}, and is refused", cure)
    elif _is_limited(needed) and not is_auto:
        yield from _check_limit("GPU memory", needed)
    else:
        yield Check("GPU memory", "ok", text)


def check_host(meminfo: str, needed: Need | None, sample_bytes: int) -> Iterator[Check]:
    """Check that free memory holds the samples, and the training if it is on the CPU.

    Args:
        needed: None if training is on a GPU.
    """
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", meminfo, re.MULTILINE)
    if match is None:
        return
    available = int(match[1]) << 10
    text = f"{in_words(available)} are available; samples take up to {in_words(sample_bytes)}"
    usable = left = available - sample_bytes
    if needed is not None:
        usable = _usable(usable)
        text += f", and of the rest training may take {in_words(usable)}; {needed}"
    if usable < (needed.total_bytes if needed else 0):
        more = "add memory: where it runs out, the kernel kills the trainer first"
        able = needed.cure(usable) if needed else ""
        cure = f"Lower trainer.sample_bytes, or {more}" + (f"; or {able}." if able else ".")
        yield Check("memory", "unknown" if needed and needed.guess and left >= 0 else "warning", text, cure)
    elif needed is not None and _is_limited(needed):
        yield from _check_limit("memory", needed)
    else:
        yield Check("memory", "ok", text)


def _check_limit(subject: str, needed: Need) -> Iterator[Check]:
    text = f"trainer.memory_bytes allows {in_words(needed.limit_bytes)}; {needed}, and is refused"
    able = needed.cure(needed.limit_bytes)
    cure = f"Raise trainer.memory_bytes to {needed.total_bytes}" + (f"; or {able}." if able else ".")
    yield Check(subject, needed.level, text, cure)


def _is_limited(needed: Need) -> bool:
    return 0 < needed.limit_bytes < needed.total_bytes


def _usable(free: int, reserve: int = 0) -> int:
    return usable_bytes(max(0, free - CONTEXT_BYTES), reserve=reserve)


def gpu_listing() -> str | None:
    """Output of nvidia-smi; None without it."""
    try:
        done = subprocess.run(SMI, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _index_of(device: str) -> int:
    return int(device.partition(":")[2] or 0)


@dataclass(frozen=True, slots=True)
class _Gpu:
    """A row of the listing; sizes in bytes."""

    total: int
    free: int
    capability: str
    uuid: str

    def usable(self, engines: Sequence[EngineGpus]) -> int:
        """Bytes that a training may take."""
        return _usable(self.free, reserve_on(self.uuid, engines))


def _gpu_of(listing: str | None, device: str) -> _Gpu | None:
    return None if listing is None else _gpus(listing).get(_index_of(device))


def _gpus(listing: str) -> dict[int, _Gpu]:
    rows = ([field.strip() for field in line.split(",")] for line in listing.splitlines())
    whole = (row for row in rows if len(row) == 5 and all(field.isdecimal() for field in row[:3]))
    return {
        int(index): _Gpu(int(total) << 20, int(free) << 20, capability, uuid.removeprefix("GPU-").lower())
        for index, total, free, capability, uuid in whole
    }
