"""Notices that steps take longer, or shorter, than they did: another process on the GPU, new weights, other clocks."""

from __future__ import annotations

import math
from collections import deque

import numpy as np

WINDOWS = ((16, 0.45), (64, 0.15))
"""(steps, smallest relative change that counts, as a logarithm): the greater a change, the fewer steps prove it."""
MIN_AGREEING = 0.8
"""Share of a window's steps that must be off in the same direction by at least half of the change."""


class StepWatch:
    """Compares measured with predicted step times over windows of steps; a few odd steps don't matter."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=WINDOWS[-1][0])
        self.spread = 0.0
        """Half of the longest window's steps are within ± this of the prediction, relative; 0 before there are so many."""
        self.factor = 1.0
        """How much longer steps took after the last change that was noticed."""

    def observe(self, measured_s: float, predicted_s: float) -> int:
        """Fold in a step; the number of latest steps that show the world to have changed, 0 when it hasn't."""
        if measured_s <= 0.0 or predicted_s <= 0.0:
            return 0
        self._errors.append(math.log(measured_s / predicted_s))
        if len(self._errors) < WINDOWS[0][0]:
            return 0
        every = np.array(self._errors)
        for window, least in WINDOWS:
            if len(every) < window:
                return 0
            errors = every[-window:]
            middle = float(np.median(errors))
            if abs(middle) >= least and float(np.mean(errors * math.copysign(1.0, middle) > abs(middle) / 2)) >= MIN_AGREEING:
                self._errors.clear()
                self.factor = math.exp(middle)
                return window
        self.spread = float(np.median(np.abs(every)))
        return 0
