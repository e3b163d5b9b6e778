"""How the trainer is set up. No torch here: the daemon nests these values in its own settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from honed.adapt.protocol.ranges import COUNT, PROBABILITY, SECONDS, SHARE, Range, Ranges, check_ranges
from honed.recalib.config.presets import decay_tokens
from honed.recalib.config.training import MAX_DENOISING_STEPS, Loss, MaskSchedule, Precision, Scope, TrainingSettings


@dataclass(frozen=True)
class SampleSettings:
    """Which samples are kept."""

    sample_bytes: int = 2 << 30
    """Memory for samples, all engines together."""
    held_out_share: float = 0.2
    """Sessions that are kept for judging, and their part of the memory."""
    min_rows: int = 32
    """Shorter stretches hold too few whole blocks to be worth their context."""
    max_rows: int = 2048
    """Longer requests are split: the context sets the cost of a micro-step."""
    max_session_share: float = 0.05
    """Part of the memory that one session may have: no single client decides what is learnt."""
    max_loop_period: int = 16
    """Longest period, in tokens, of a repetition that is kept out of the samples; 0: none is."""
    min_loop_rows: int = 32
    """Rows of a repetition from which on it is one."""
    spill_bytes: int = 0
    """Disk, in the state directory, for samples that memory has no room for; 0: none. They are prompts in disguise."""
    spill_max_age_s: float = 86400.0
    """How long a sample may stay on disk."""
    max_workloads: int = 64
    """Further labels go under "other": labels come from clients."""

    RANGES: ClassVar[Ranges] = {
        "sample_bytes": COUNT,
        "held_out_share": PROBABILITY,
        "max_session_share": Range(0, 1, excludes_low=True),
        **dict.fromkeys(("min_rows", "max_rows", "min_loop_rows", "max_workloads"), COUNT),
        **dict.fromkeys(("max_loop_period", "spill_bytes"), Range(0)),
        "spill_max_age_s": SECONDS,
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.min_rows > self.max_rows:
            raise ValueError(f"min_rows ({self.min_rows}) must not be more than max_rows ({self.max_rows})")


@dataclass(frozen=True)
class TrainerSettings(SampleSettings):
    """What the trainer process does, and how much of the machine it takes."""

    trainer_id: str = "trainer-0"
    """Its name in the log and in metrics."""
    device: str = "cpu"
    """cpu, cuda or cuda:N, as PyTorch names it."""
    yields_to: tuple[str, ...] = ("*",)
    """Engines on that device or its cores: training goes on while none of them has a request. Ids, in which `*` matches
    anything; none (`[]`) for a device that the trainer has to itself."""
    nice: int = 5
    """Added to the process's nice level. The higher, the longer what it is in the midst of takes it when requests arrive."""
    torch_threads: int = 0
    """0: half of the cores. With all of them, torch's threads spin against whoever else works: on two busy cores that
    made 300 micro-steps take over two minutes instead of twelve seconds."""

    loss: Loss = "ce"
    """"ce": cross-entropy that falls with the position; "dpace": the same, weighted by what depends on a position; "hybrid":
    KL and total variation; "acceptance": minus the expected acceptance length; "kl": needs the target's last hidden state."""
    decay_tokens: float = 0.0
    """How fast weights fall with the position; 0: what the drafter's block size asks for."""
    learning_rate: float = 5e-4
    """Of AdamW, after the warm-up."""
    warmup_updates: int = 20
    """Updates over which the learning rate rises."""
    anchors_per_micro_step: int = 16
    """Smaller than an offline run would take, with more micro-steps per update for it."""
    micro_steps_per_update: int = 8
    """Gradients that are added up for one update."""
    break_share: float = 0.5
    """Part of the anchors that is drawn where rounds broke off."""
    ema_decay: float = 0.0
    """0: no moving average; the cool-down of the learning rate does its work already."""
    precision: Precision = "auto"
    """Of products: "auto" is bfloat16 on a GPU that has it; master weights are float32."""
    gradient_checkpointing: bool = False
    """Compute the layers again for the gradient rather than keep what they computed: less memory, more time."""
    denoising_steps: int = 1
    """Passes that draft a block. vLLM has one; more train the drafter for blocks that are partly revealed."""
    mask_schedule: MaskSchedule = "cosine"
    """How many tokens stay masked after each pass."""
    memory_bytes: int = 0
    """The most that a training may take on its device; 0: nine tenths of what is free when it begins."""
    save_state_s: float = 60.0
    """Training between two savings of its state, from which it goes on after its process was killed; 0: never."""
    seed: int = 0
    """Of what is drawn at random."""
    max_steps: int = 4000
    """Micro-steps of an operation that doesn't say."""
    rows_per_micro_step: int = 256
    """Context rows of one micro-step. With the anchors it is what a micro-step costs, which is divided on a GPU
    (`preempt_budget_s`)."""
    preempt_budget_s: float = 0.05
    """For GPUs: how long serving may have to wait for one. Micro-steps are divided for it, by measuring them; 0: they aren't.
    On a CPU it has no effect: the trainer stops before every operation."""
    max_duty: float = 1.0
    """Most of the time that training may be at work where the device is otherwise idle; it rests after each unit of work for
    the remainder."""
    must_gain_share: float = 0.4
    """Part of the draws that go to the workloads that must gain; the rest replays the others, against forgetting. A larger
    share gains more and forgets more. On the tiny pair, with some 90 s of one core and at temperature 0, 0.4 gained 1.54 times
    the new workload's acceptance length and kept 0.992 of the old one's; at temperature 0.8 1.09 times, and 0.988
    (`make bench-recalib`)."""

    blends: tuple[float, ...] = (1.0, 0.5)
    """Candidates that are judged in turn until one passes: this share of the way from the parent to what was trained."""

    min_training_rows: int = 4096
    """Rows of the workloads that must gain (of all, if none is named) before training begins."""
    collect_s: float = 600.0
    """How long an operation waits for them."""
    deadline_s: float = 3600.0
    """How long an operation may take beside its training: waiting for samples and for idle time, gating, writing. While
    training is paused, time doesn't count."""
    max_gate_rows: int = 16384
    """Held-out rows judged for each workload, whole sessions."""

    status_interval_s: float = 1.0
    """Between two reports to the daemon."""
    tick_s: float = 0.05
    """How often the ring and the socket are looked after while there is nothing to train."""

    RANGES: ClassVar[Ranges] = {
        **SampleSettings.RANGES,
        "nice": Range(0, 19),
        "torch_threads": Range(0, 1024),
        "learning_rate": Range(0, 1, excludes_low=True),
        **dict.fromkeys(("decay_tokens", "warmup_updates", "memory_bytes", "seed"), Range(0)),
        "save_state_s": Range(0, 1e9),
        "ema_decay": Range(0, 1, excludes_high=True),
        "denoising_steps": Range(1, MAX_DENOISING_STEPS),
        **dict.fromkeys(("anchors_per_micro_step", "micro_steps_per_update", "max_steps", "rows_per_micro_step"), COUNT),
        **dict.fromkeys(("break_share", "must_gain_share"), SHARE),
        "blends": Range(0, 1, excludes_low=True),
        "preempt_budget_s": Range(0, 60),
        "max_duty": Range(0, 1, excludes_low=True),
        "min_training_rows": Range(0),
        **dict.fromkeys(("collect_s", "deadline_s"), SECONDS),
        "max_gate_rows": COUNT,
        **dict.fromkeys(("status_interval_s", "tick_s"), Range(0, 60, excludes_low=True)),
    }

    def training(self, scope: Scope, block_size: int) -> TrainingSettings:
        """How to train a drafter with such blocks."""
        return TrainingSettings(
            scope=scope,
            loss=self.loss,
            learning_rate=self.learning_rate,
            warmup_updates=self.warmup_updates,
            decay_tokens=self.decay_tokens or decay_tokens(block_size),
            anchors_per_micro_step=self.anchors_per_micro_step,
            micro_steps_per_update=self.micro_steps_per_update,
            break_share=self.break_share,
            ema_decay=self.ema_decay,
            precision=self.precision,
            gradient_checkpointing=self.gradient_checkpointing,
            denoising_steps=self.denoising_steps,
            mask_schedule=self.mask_schedule,
            seed=self.seed,
        )
