"""A moving average of weights: less noise than the last weights of a short training.

    shadow = d * shadow + (1 - d) * weights,  d = min(decay, (1 + n) / (10 + n)) at update n = 1, 2, …

The rising d keeps a short training's average from staying near its start.

Source: arXiv 1803.05407, section 3 (averaging); the warm-up of d as in TensorFlow's `ExponentialMovingAverage(num_updates)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class WeightAverage:
    """The average of some parameters, kept in their own type and place."""

    def __init__(self, parameters: Sequence[Tensor], decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ValueError(f"ema_decay must be above 0 and below 1, not {decay}: 0 in the settings switches it off")
        self._parameters, self._decay = parameters, decay
        self.shadow = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Add the weights after update number `num_updates`, counted from 1."""
        decay = min(self._decay, (1 + num_updates) / (10 + num_updates))
        torch._foreach_lerp_(self.shadow, [p.detach() for p in self._parameters], 1.0 - decay)

    @torch.no_grad()
    def copy_to_parameters(self) -> None:
        """Copy the average into the weights."""
        for parameter, average in zip(self._parameters, self.shadow, strict=True):
            parameter.copy_(average)
