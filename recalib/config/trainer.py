"""The trainer's settings. No torch here: the daemon nests these values in its own settings."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from honed.adapt.protocol.ranges import COUNT, PROBABILITY, SECONDS, SHARE, Range, Ranges, check_ranges
from honed.recalib.config.presets import decay_tokens, learning_rate
from honed.recalib.config.training import Precision, Scope, TrainingSettings

When: TypeAlias = Literal["idle", "spare", "always"]
SPARE_UNIT_S = 0.005
"""Longest time of a unit that may run beside requests."""
_DEVICE = re.compile(r"auto|cpu|cuda(:(0|[1-9][0-9]?))?")


@dataclass(frozen=True)
class SampleSettings:
    """Settings of the sample store."""

    sample_bytes: int = 2 << 30
    """Memory for samples of all engines together."""
    held_out_share: float = 0.2
    """Share of sessions held out for the gate, and of the memory for them."""
    min_rows: int = 32
    """Minimum rows of a stretch: shorter ones have too few whole blocks for their context."""
    max_rows: int = 2048
    """Maximum rows of a stretch; longer requests are split, as context sets the cost of a micro-step."""
    max_session_share: float = 0.05
    """Largest share of the memory for one session: no single client decides what is learnt."""
    spill_bytes: int = 0
    """Disk, in the state directory, for samples that memory has no room for; 0: none. Prompts can be recovered from them."""
    spill_max_age_s: float = 86400.0
    """Longest time that a sample stays on disk."""

    RANGES: ClassVar[Ranges] = {
        "sample_bytes": COUNT,
        "held_out_share": PROBABILITY,
        "max_session_share": Range(0, 1, excludes_low=True),
        **dict.fromkeys(("min_rows", "max_rows"), COUNT),
        "spill_bytes": Range(0),
        "spill_max_age_s": SECONDS,
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.min_rows > self.max_rows:
            raise ValueError(f"min_rows ({self.min_rows}) must not be more than max_rows ({self.max_rows})")


@dataclass(frozen=True)
class TrainerSettings(SampleSettings):
    """Settings of the trainer process, including how much of the machine it takes."""

    trainer_id: str = "trainer-0"
    """The trainer's name in the log and in metrics."""
    device: str = "auto"
    """cpu, cuda or cuda:N, as PyTorch names it. "auto": the GPU with most free memory if a training fits into that, else
    the CPU; each training anew."""
    yields_to: tuple[str, ...] = ("*",)
    """Ids of the engines on the device or its cores; `*` matches anything. Training runs while none of them has a request,
    or as `when` says. Use `[]` for a device that only the trainer uses."""
    other_runtime_dirs: tuple[str, ...] = ()
    """Runtime directories of other daemons on this host, as `["/run/honed-code"]`. Training yields to all engines there too,
    and leaves free what they will still want of a GPU."""
    when: When = "idle"
    """"idle": while no engine that it yields to has a request. "spare": also beside requests, as long as that slows their
    steps by less than `latency_budget` and `p99_budget`, which is measured all the time. "always": it yields to none."""
    latency_budget: float = 0.02
    """With `when = "spare"`: most time that training may add to the steps of serving beside it, as a share of theirs."""
    p99_budget: float = 0.02
    """The same for the p99 of steps' times over what they should take. It allows less training than the mean. 10: only the
    mean counts."""
    nice: int = 5
    """Added to the process's nice level. With a higher value, the current unit takes longer once requests arrive."""
    torch_threads: int = 0
    """Threads; 0: half of the cores, or of those that a container's quota allows. With all cores, torch's threads spin against
    other processes."""

    decay_tokens: float = 0.0
    """Decay of the loss's weights with the position; 0: derived from the drafter's block size."""
    learning_rate: float = 0.0
    """AdamW's learning rate after the warm-up; 0: derived from the drafter's width. An untrained drafter needs a higher one."""
    warmup_updates: int = 20
    """Updates over which the learning rate rises."""
    anchors_per_micro_step: int = 16
    """Blocks of a micro-step: fewer than in an offline run, but more micro-steps per update."""
    micro_steps_per_update: int = 8
    """Micro-steps whose gradients are summed for one update."""
    break_share: float = 0.5
    """Share of the anchors drawn from positions before rejected draft tokens."""
    precision: Precision = "auto"
    """Type of matrix products. "auto" is bfloat16 on a GPU that has it; master weights are float32."""
    gradient_checkpointing: bool = False
    """Recompute the layers for the gradient instead of keeping their activations: less memory, more time."""
    memory_bytes: int = 0
    """Most memory that a training may take on its device; 0: nine tenths of what is free when it begins, and never what engines
    will still want."""
    save_state_s: float = 60.0
    """Training time between two saves of its state, from which it resumes after its process was killed; 0: never."""
    seed: int = 0
    """Seed of all random choices."""
    max_steps: int = 4000
    """Micro-steps of an operation that doesn't specify a number."""
    rows_per_micro_step: int = 256
    """Context rows of one micro-step. With the anchors they set its cost; a GPU divides it (`preempt_budget_s`)."""
    preempt_budget_s: float = 0.05
    """Longest time that serving waits for a unit on a GPU. Micro-steps are divided by measured times; 0: no division. With
    `when = "spare"` they are divided for 5 ms. No effect on a CPU, where the trainer stops before every operation."""
    max_duty: float = 1.0
    """Largest share of the device's idle time that training uses. The trainer rests after each unit for the remainder."""

    blends: tuple[float, ...] = (1.0, 0.5)
    """Candidates judged in turn, as shares of the way from the parent to the trained weights, while each gains where it must
    and loses too much elsewhere."""

    min_training_tokens: int = 4096
    """Emitted tokens needed before training begins, of the workloads that must gain (of all, if none is named)."""
    collect_s: float = 600.0
    """Longest wait for `min_training_tokens`."""
    deadline_s: float = 3600.0
    """Longest time of an operation outside its training: waiting for samples and for idle time, gating, writing. Time while
    training is paused doesn't count. Training ends once half of what was left at its beginning is over."""
    max_gate_rows: int = 16384
    """Held-out rows judged for each workload, in whole sessions."""

    status_interval_s: float = 1.0
    """Time between two reports to the daemon."""
    tick_s: float = 0.05
    """Time between two polls of the ring and the socket while there is nothing to train."""

    RANGES: ClassVar[Ranges] = {
        **SampleSettings.RANGES,
        "nice": Range(0, 19),
        "torch_threads": Range(0, 1024),
        "learning_rate": Range(0, 1),
        **dict.fromkeys(("decay_tokens", "warmup_updates", "memory_bytes", "seed"), Range(0)),
        "save_state_s": Range(0, 1e9),
        **dict.fromkeys(("anchors_per_micro_step", "micro_steps_per_update", "max_steps"), COUNT),
        "rows_per_micro_step": Range(64),
        "break_share": SHARE,
        "blends": Range(0, 1, excludes_low=True),
        "preempt_budget_s": Range(0, 60),
        "max_duty": Range(0, 1, excludes_low=True),
        "latency_budget": Range(0, 0.5, excludes_low=True),
        "p99_budget": Range(0, 10, excludes_low=True),
        "min_training_tokens": Range(0),
        **dict.fromkeys(("collect_s", "deadline_s"), SECONDS),
        "max_gate_rows": COUNT,
        **dict.fromkeys(("status_interval_s", "tick_s"), Range(0, 60, excludes_low=True)),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _DEVICE.fullmatch(self.device):
            raise ValueError(f"device is {self.device!r}: use auto, cpu, cuda, or cuda:N with a GPU's number, as in cuda:0")
        if not self.blends:
            raise ValueError("blends is empty: at least one candidate must be judged, for example [1.0]")
        if wrong := [one for one in self.other_runtime_dirs if not os.path.isabs(one) or "\0" in one]:
            raise ValueError(f'other_runtime_dirs has {wrong[0]!r}: use absolute paths of folders, as in ["/run/honed-code"]')

    def other_engines_dirs(self, engines_dir: Path) -> list[Path]:
        """Folders of the engines of `other_runtime_dirs`.

        Args:
            engines_dir: the trainer's own, which isn't another even if it is listed.
        """
        listed = dict.fromkeys(os.path.realpath(os.path.join(one, "engines")) for one in self.other_runtime_dirs)
        return [Path(one) for one in listed if one != os.path.realpath(engines_dir)]

    @property
    def unit_s(self) -> float:
        """Longest time of a unit on a GPU; 0: units aren't divided."""
        return min(self.preempt_budget_s or SPARE_UNIT_S, SPARE_UNIT_S) if self.when == "spare" else self.preempt_budget_s

    def training(self, scope: Scope, block_size: int, width: int) -> TrainingSettings:
        """Make the training settings for a drafter of this block size and width."""
        return TrainingSettings(
            scope=scope,
            learning_rate=self.learning_rate or learning_rate(width),
            warmup_updates=self.warmup_updates,
            decay_tokens=self.decay_tokens or decay_tokens(block_size),
            anchors_per_micro_step=self.anchors_per_micro_step,
            micro_steps_per_update=self.micro_steps_per_update,
            break_share=self.break_share,
            precision=self.precision,
            gradient_checkpointing=self.gradient_checkpointing,
            seed=self.seed,
        )
