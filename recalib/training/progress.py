"""How far an operation has come, and why one can't go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from honed.adapt.protocol import wire

Stage = Literal["collecting", "training", "gating"]


class OperationError(ValueError):
    """Why an operation can't reach its end; one line with cause and cure."""


@dataclass
class Progress:
    """What has been done so far."""

    stage: Stage = "collecting"
    steps: int = 0
    max_steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    train_seconds: float = 0.0
    memory_bytes: int = 0
    """What the training was estimated to take; 0 before that was done."""
    gate: list[wire.GateFigures] = field(default_factory=list)
    blend: float = 1.0
    """How far from the parent (0) to what was trained (1) the judged candidate stands."""
