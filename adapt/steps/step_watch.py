"""Notices that steps take longer or shorter than before: another process on the GPU, new weights, other clocks.

A step is compared with the usual time of such steps, not with the step-time model. The model fits some kinds of steps better
than others, and its misfit shows whenever the batch changes. The model only gives the effect of a longer context within a kind.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from honed.adapt.steps.step_time import Step, StepTimeModel
from honed.adapt.steps.time_groups import GROUP_STEPS

WINDOWS = ((16, 0.45), (64, 0.15))
"""(steps, smallest relative change that counts, as a logarithm): the greater a change, the fewer steps prove it."""
_MANY_GROUPS = 4.0
"""Standard deviations of the time groups (`adapt.steps.time_groups`) that a change has to exceed: what one of them does is
none."""
_MOST_DEMANDED = 3.0
"""Times the smallest change: on a machine whose time groups vary much no more than that has to be shown."""
MIN_AGREEING = 0.8
"""Share of a window's steps that must be off in the same direction by at least half of the change."""
_FEWEST_STEPS = 3
"""Steps of a kind before others are compared with them."""
_QUICK_STEPS, _MEMORY_STEPS = 8.0, 256.0
_MOST_KINDS = 512


class StepWatch:
    """Compares measured step times with expected ones over windows of steps; a few outliers don't matter."""

    def __init__(self) -> None:
        self._errors: deque[float] = deque(maxlen=WINDOWS[-1][0])
        self.factor = 1.0
        """Factor on step times at the last noticed change."""

    def observe(self, measured_s: float, expected_s: float, shared_deviation: float = 0.0) -> int:
        """Fold in a step; return the number of latest steps that show a changed world, or 0.

        Args:
            shared_deviation: standard deviation of what the steps of a time group have in common, relative.
        """
        if measured_s <= 0.0 or expected_s <= 0.0:
            return 0
        self._errors.append(math.log(measured_s / expected_s))
        if len(self._errors) < WINDOWS[0][0]:
            return 0
        every = np.array(self._errors)
        for window, least in WINDOWS:
            if len(every) < window:
                return 0
            errors = every[-window:]
            middle = float(np.median(errors))
            demanded = _MANY_GROUPS * shared_deviation * math.sqrt(GROUP_STEPS / window)
            least = max(least, min(demanded, _MOST_DEMANDED * least))
            if abs(middle) >= least and float(np.mean(errors * math.copysign(1.0, middle) > abs(middle) / 2)) >= MIN_AGREEING:
                self._errors.clear()
                self.factor = math.exp(middle)
                return window
        return 0


@dataclass(slots=True)
class _Usual:
    step: Step
    """The first step of its kind; the others are expressed relative to it."""
    log_seconds: float = 0.0
    num_steps: int = 0
    model: StepTimeModel | None = None
    predicted_s: float = 0.0
    """The model's prediction for the first step."""


class UsualSteps:
    """Usual times of each kind of steps, with a memory of some hundreds of steps."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Usual] = {}

    def observe(self, kind: Hashable, step: Step, seconds: float, model: StepTimeModel, predicted_s: float) -> float:
        """Fold in a step; return the usual time of such a step so far, in seconds; 0 while few of its kind were seen.

        Args:
            model: relates the step to the first of its kind, which had another context.
            predicted_s: its prediction for this step.
        """
        if seconds <= 0.0 or predicted_s <= 0.0:
            return 0.0
        held = self._kinds.pop(kind, None) or _Usual(step)
        if len(self._kinds) >= _MOST_KINDS:  # the kind seen longest ago makes room
            del self._kinds[next(iter(self._kinds))]
        self._kinds[kind] = held
        if held.model is not model:
            held.model, held.predicted_s = model, model.seconds(*held.step)
        ratio = predicted_s / held.predicted_s
        expected_s = ratio * math.exp(held.log_seconds) if held.num_steps >= _FEWEST_STEPS else 0.0
        rate = max(1.0 / (held.num_steps + _QUICK_STEPS), 1.0 / _MEMORY_STEPS) if held.num_steps else 1.0
        held.log_seconds += rate * (math.log(seconds / ratio) - held.log_seconds)
        held.num_steps += 1
        return expected_s

    def forget(self) -> None:
        """Forget the usual times: the world has changed."""
        self._kinds.clear()
