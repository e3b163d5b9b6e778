"""Estimates of an engine's steps: their times, typical figures, and changes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

import numpy as np

from honed.adapt.protocol.wire import StepColumns
from honed.adapt.steps.step_time import MIN_STEPS, PARAMETERS, StepTimeLearner, StepTimeModel, StepTimeSettings, kind_of
from honed.adapt.steps.step_watch import StepWatch, UsualSteps

_SMOOTHING = 0.02
_SPREAD_STEPS = 64
_MOST_COMPARED = 256
"""Most prompt tokens of a step that may show a changed world. A large chunk's attention takes longer the later it is in a long
prompt, and its place isn't known: successive chunks of one prompt would seem slower and slower."""


class StepBeliefs:
    """Learns from the steps of one engine, in their order."""

    def __init__(self, settings: StepTimeSettings, captured_tokens: Sequence[int]) -> None:
        self._learner = StepTimeLearner(settings, captured_tokens)
        self._watch, self._usual = StepWatch(), UsualSteps()
        self._errors: deque[float] = deque(maxlen=_SPREAD_STEPS)
        self._last_end_ns = 0
        self._num_changes = 0
        self.typical: dict[str, float] = {}
        """Smoothed figures of the latest steps."""

    @property
    def is_young(self) -> bool:
        """Whether there are few data since the start, or since step times changed."""
        return self._learner.is_young

    def model(self) -> StepTimeModel:
        """The current fit, or the empty model."""
        return self._learner.model()

    def new_clock(self) -> None:
        """Start a new clock: the next steps are another process's."""
        self._last_end_ns = 0

    def observe(self, rows: Sequence[tuple[int, ...]]) -> None:
        """Fold in steps, as `step_rows` gives them."""
        model = self._learner.model()
        for end_ns, duration_us, requests, tokens, prefill, drafted, context, block in rows:
            # Asynchronous scheduling starts a step before the previous one ends: the time between ends counts.
            since_last = end_ns - self._last_end_ns if self._last_end_ns else duration_us * 1000
            self._last_end_ns = end_ns
            seconds = min(duration_us * 1000, since_last if since_last > 0 else duration_us * 1000) / 1e9
            self._learner.observe(requests, tokens, context, prefill, drafted, block, seconds)
            if requests <= 0:
                continue
            figures = {"num_requests": requests, "context_tokens": context / requests, "step_seconds": seconds}
            if model.is_ready:
                step = requests, tokens, context, prefill, block, drafted > 0
                predicted = figures["predicted_step_seconds"] = model.seconds(*step)
                if seconds > 0.0 and predicted > 0.0:
                    self._errors.append(abs(math.log(seconds / predicted)))
                kind = kind_of(requests, prefill, drafted, block)
                usual = self._usual.observe(kind, step, seconds, model, predicted)
                is_comparable = prefill <= _MOST_COMPARED
                if is_comparable and (changed_steps := self._watch.observe(seconds, usual, self._learner.shared_deviation)):
                    self._learner.restart(changed_steps, self._watch.factor)
                    self._usual.forget()
                    self._num_changes += 1
                    model = self._learner.model()
            for name, value in figures.items():
                held = self.typical.get(name, value)
                self.typical[name] = held + _SMOOTHING * (value - held)

    def describe(self) -> dict[str, object]:
        """Plain figures for JSON."""
        model = self._learner.model()
        return {
            "is_ready": model.is_ready,
            "num_steps": self._learner.num_steps,
            "least_steps": MIN_STEPS,
            "lengths_seen": self._learner.lengths_seen,
            "parameters": dict(zip(PARAMETERS, model.parameters, strict=False)),
            "measured_seconds": self.typical.get("step_seconds"),
            "predicted_seconds": self.typical.get("predicted_step_seconds"),
            "context_tokens_per_request": self.typical.get("context_tokens"),
            "num_requests": self.typical.get("num_requests"),
            "spread": float(np.median(self._errors)) if len(self._errors) == _SPREAD_STEPS else 0.0,
            "world_changes": self._num_changes,
        }


def step_rows(steps: StepColumns) -> list[tuple[int, ...]]:
    """Turn columns into rows. Raises ValueError when they don't fit together."""
    columns = (
        steps.end_ns,
        steps.duration_us,
        steps.num_requests,
        steps.num_tokens,
        steps.num_prefill_tokens,
        steps.num_draft_tokens,
        steps.context_tokens,
        steps.num_drafting,
    )
    if len({len(column) for column in columns}) > 1:
        raise ValueError("batch has step columns of unequal length")
    return list(zip(*columns, strict=True))
