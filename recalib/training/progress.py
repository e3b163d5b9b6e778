"""Progress of an operation, and the error of one that can't continue."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from honed.adapt.protocol import wire

Stage = Literal["collecting", "training", "gating"]


class OperationError(ValueError):
    """Reason why an operation can't finish; one line with cause and cure."""


@dataclass
class Progress:
    """Work done so far."""

    stage: Stage = "collecting"
    steps: int = 0
    max_steps: int = 0
    tokens: int = 0
    loss: float = 0.0
    dropped_updates: int = 0
    """Updates whose loss or gradient wasn't finite."""
    train_seconds: float = 0.0
    is_cut_short: bool = False
    """Whether waiting ended the training before its limits (`max_steps`, `max_seconds`)."""
    is_saving: bool = False
    """Whether the next unit only writes the training's state to the disk."""
    carried_s: float = 0.0
    """Seconds since the request that another process spent on it, of which this one's clock knows nothing."""
    memory_bytes: int = 0
    """Estimated memory of the training; 0 before the estimate."""
    device_reason: str = ""
    """Why it isn't on the device that `trainer.device` prefers; empty if it is."""
    gate: list[wire.GateFigures] = field(default_factory=list)
    blend: float = 1.0
    """Position of the judged candidate between the parent (0) and the trained weights (1)."""
