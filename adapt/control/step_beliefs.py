"""Estimates of an engine's steps: their times, typical figures, and changes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from honed.adapt.protocol.wire import StepColumns
from honed.adapt.steps.step_time import MIN_STEPS, PARAMETERS, Step, StepTimeLearner, StepTimeModel, StepTimeSettings, kind_of
from honed.adapt.steps.step_watch import StepWatch, UsualSteps

_SMOOTHING = 0.02
_SPREAD_STEPS = 64
_SEEN_SINCE = 64
"""A change that one kind of steps shows is believed of the other, unless that was seen within so many steps."""
_MOST_COMPARED = 256
"""Most prompt tokens of a step that may show a changed world. A large chunk's attention takes longer the later it is in a long
prompt, and its place isn't known: successive chunks of one prompt would seem slower and slower."""


class _Step(NamedTuple):
    """Arguments of `StepTimeLearner.observe`."""

    num_requests: int
    num_tokens: int
    context_tokens: int
    num_prefill_tokens: int
    num_draft_tokens: int
    block: int
    seconds: float


class _Side:
    """Learns from steps with trees, or from those without."""

    def __init__(self, settings: StepTimeSettings, captured_tokens: Sequence[int]) -> None:
        self.learner = StepTimeLearner(settings, captured_tokens)
        self.watch, self.usual = StepWatch(), UsualSteps()
        self.last_step = 0
        """Number of the latest such step."""

    def notice_change(self, kind: tuple[int, ...], step: Step, seconds: float, model: StepTimeModel, predicted: float) -> bool:
        """Compare a step with its like; whether the world has changed, and what was learned before counts little now."""
        usual = self.usual.observe(kind, step, seconds, model, predicted)
        if step[3] > _MOST_COMPARED or not (changed := self.watch.observe(seconds, usual, self.learner.shared_deviation)):
            return False
        self.learner.restart(changed, self.watch.factor)
        self.usual.forget()
        return True


class StepBeliefs:
    """Learns from the steps of one engine, in their order.

    Steps that verify draft trees are learned apart from those that verify chains. A step drafts for the next one: where that
    verifies what this one doesn't, its time belongs to neither, and that of a step without drafts to what it drafts for.
    """

    def __init__(self, settings: StepTimeSettings, captured_tokens: Sequence[int]) -> None:
        self._chains, self._trees = _Side(settings, captured_tokens), _Side(settings, captured_tokens)
        self._has_trees, self._num_tree_steps, self._num_steps = False, 0, 0
        self._latest = self._chains
        """The side of the latest step with drafts."""
        self._held: tuple[bool, _Step] | None = None
        """Where there are trees: the latest step, and whether it had any, until the next one tells what it has drafted for."""
        self._errors: deque[float] = deque(maxlen=_SPREAD_STEPS)
        self._last_end_ns = 0
        self._num_changes = 0
        self.typical: dict[str, float] = {}
        """Smoothed figures of the latest steps."""

    @property
    def is_young(self) -> bool:
        """Whether there are few data since the start, or since step times changed."""
        return self._latest.learner.is_young

    def model(self) -> StepTimeModel:
        """The current fit of steps without trees, or the empty model."""
        return self._chains.learner.model()

    def tree_model(self) -> StepTimeModel:
        """The current fit of steps with trees, or the empty model while there were few: the first ones are slow."""
        return self._trees.learner.model() if self._num_tree_steps >= MIN_STEPS else StepTimeModel()

    def new_clock(self) -> None:
        """Start a new clock: the next steps are another process's."""
        self._last_end_ns, self._held = 0, None

    def observe(self, rows: Sequence[tuple[int, ...]], have_trees: Sequence[bool | None] = ()) -> None:
        """Fold in steps, as `step_rows` gives them.

        Args:
            have_trees: whether each verified a draft tree, None: not known; empty: none did.
        """
        models = self.model(), self.tree_model()
        for row, has_trees in zip(rows, have_trees or [False] * len(rows), strict=True):
            end_ns, duration_us, requests, tokens, prefill, drafted, context, block = row
            # Asynchronous scheduling starts a step before the previous one ends: the time between ends counts.
            since_last = end_ns - self._last_end_ns if self._last_end_ns else duration_us * 1000
            self._last_end_ns = end_ns
            seconds = min(duration_us * 1000, since_last if since_last > 0 else duration_us * 1000) / 1e9
            self._has_trees |= has_trees is True
            self._learn(_Step(requests, tokens, context, prefill, drafted, block, seconds), has_trees)
            if requests <= 0 or (has_trees is None and self._has_trees):
                continue
            side, model = (self._trees, models[1]) if has_trees else (self._chains, models[0])
            self._num_steps, side.last_step = self._num_steps + 1, self._num_steps + 1
            figures = {"num_requests": requests, "context_tokens": context / requests, "step_seconds": seconds}
            if model.is_ready:
                step = requests, tokens, context, prefill, block, drafted > 0
                predicted = figures["predicted_step_seconds"] = model.seconds(*step)
                if seconds > 0.0 and predicted > 0.0:
                    self._errors.append(abs(math.log(seconds / predicted)))
                if side.notice_change(kind_of(requests, prefill, drafted, block), step, seconds, model, predicted):
                    self._num_changes += 1
                    other = self._chains if side is self._trees else self._trees
                    if self._num_steps - other.last_step > _SEEN_SINCE:  # it's the same machine
                        other.learner.restart(0, side.watch.factor)
                        other.usual.forget()
                    models = self.model(), self.tree_model()
            for name, value in figures.items():
                held = self.typical.get(name, value)
                self.typical[name] = held + _SMOOTHING * (value - held)

    def _learn(self, step: _Step, has_trees: bool | None) -> None:
        """Learn a step's time, or that of the one before it, which this one tells the kind of."""
        if not self._has_trees:
            self._chains.learner.observe(*step)
            return
        held, self._held = self._held, None if has_trees is None else (has_trees, step)
        self._num_tree_steps += has_trees is True
        if step.num_draft_tokens and has_trees is not None:
            self._latest = self._trees if has_trees else self._chains
        if held is None:
            return
        had_trees, before = held
        if not step.num_draft_tokens:
            sides = [self._trees if had_trees else self._chains] if before.num_draft_tokens else [self._chains, self._trees]
        elif has_trees is None or (before.num_draft_tokens and had_trees != has_trees):
            return
        else:
            sides = [self._trees if has_trees else self._chains]
        for side in sides:
            side.learner.observe(*before)

    def describe(self) -> dict[str, object]:
        """Plain figures for JSON."""
        trees = {"trees": _describe(self._trees.learner)} if self._has_trees else {}
        return {
            **_describe(self._chains.learner),
            **trees,
            "least_steps": MIN_STEPS,
            "measured_seconds": self.typical.get("step_seconds"),
            "predicted_seconds": self.typical.get("predicted_step_seconds"),
            "context_tokens_per_request": self.typical.get("context_tokens"),
            "num_requests": self.typical.get("num_requests"),
            "spread": float(np.median(self._errors)) if len(self._errors) == _SPREAD_STEPS else 0.0,
            "world_changes": self._num_changes,
        }


def _describe(learner: StepTimeLearner) -> dict[str, object]:
    model = learner.model()
    return {
        "is_ready": model.is_ready,
        "num_steps": learner.num_steps,
        "lengths_seen": learner.lengths_seen,
        "parameters": dict(zip(PARAMETERS, model.parameters, strict=False)),
    }


def step_rows(steps: StepColumns) -> list[tuple[int, ...]]:
    """Turn columns into rows. Raises ValueError when they don't fit together."""
    if len(steps.step) != len(steps.end_ns):
        raise ValueError("batch has step columns of unequal length")
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
