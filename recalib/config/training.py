"""Settings of a drafter's training. No torch here: the trainer's and so the daemon's settings take their names from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Scope = Literal["kv-frozen", "full"]
Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True)
class TrainingSettings:
    """Training settings. The defaults are those measured on the tiny pair (`benchmarks/tiny/README.md`)."""

    scope: Scope = "kv-frozen"
    learning_rate: float = 5e-4
    warmup_updates: int = 20
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    decay_tokens: float = 4.0
    anchors_per_micro_step: int = 32
    micro_steps_per_update: int = 2
    break_share: float = 0.5
    keep_weight: float = 3.0
    """Weight of a kept block relative to a fresh one."""
    cooldown_share: float = 0.25
    """Last part of the training, in which the learning rate falls to zero; needs `remaining` in `step`."""
    precision: Precision = "auto"
    """Type of matrix products; master weights, gradients and optimizer are always float32. "auto": bfloat16 where the device
    multiplies it fast, else float32."""
    gradient_checkpointing: bool = False
    """Compute every layer a second time in the backward pass instead of keeping its activations: less memory, more time."""
    seed: int = 0
