"""Notices that steps take longer, or shorter, than they did: another process on the GPU, new weights, other clocks."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

WINDOW = 64
MIN_CHANGE = 0.15
"""Smallest relative change that counts, as a logarithm."""
MIN_AGREEING = 0.8
"""Share of a window's steps that must be off in the same direction by at least half of the change."""


class StepWatch:
    """Compares measured with predicted step times over windows of steps; a few odd steps don't matter."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=WINDOW)
        self.spread = 0.0
        """Half of the window's steps are within ± this of the prediction, relative; 0 before a full window."""

    def observe(self, measured_s: float, predicted_s: float) -> float:
        """Fold in a step; the factor by which the world has changed, 1.0 when it hasn't."""
        if measured_s <= 0.0 or predicted_s <= 0.0:
            return 1.0
        self._errors.append(math.log(measured_s / predicted_s))
        if len(self._errors) < WINDOW:
            return 1.0
        errors = np.array(self._errors)
        middle = float(np.median(errors))
        self.spread = float(np.median(np.abs(errors)))
        if abs(middle) < MIN_CHANGE or float(np.mean(errors * math.copysign(1.0, middle) > abs(middle) / 2)) < MIN_AGREEING:
            return 1.0
        self._errors.clear()
        return math.exp(middle)
