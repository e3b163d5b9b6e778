"""What a predicted acceptance is worth at each depth: a line per position, learned from every round.

A workload's curve is that of a request of which nothing is known yet, mostly told by requests' first rounds, and a request
scales its failure odds by one factor at all depths (`acceptance`). Where later rounds run otherwise than first ones, or a
request that does well at the first position does no better than others at the fourth, what comes of the two is off by depth:

    logit P(draft j accepted | drafts before it accepted) = α_j + β_j · logit a_j(θ)

with a_j(θ) as predicted before the round. Each position's line is a logistic regression over rounds that reached it, drawn to
the line given (that of the engine as a whole, and that to α = 0, β = 1), on counts by bins of the prediction that fade with
newer rounds. θ is still learned against the curve itself: a line says only what follows from it.

Source: Platt, Advances in Large Margin Classifiers (1999), "Probabilistic outputs for support vector machines".

Letters: K = draft tokens, R = rounds, B = bins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from honed.adapt.acceptance.estimate import EDGE
from honed.adapt.protocol.arrays import Floats, Ints

_FORGETTING_ROUNDS = 2000.0
_STRENGTH = 4.0
"""Inverse variance of α_j and of β_j around the line that they are drawn to."""
_BINS = np.linspace(-5.0, 5.0, 41)
_LOGITS: Floats = np.concatenate([_BINS[:1], (_BINS[1:] + _BINS[:-1]) / 2.0, _BINS[-1:]])
_SWEEPS = 5
MOST_INTERCEPT, SLOPES = 3.0, (0.1, 3.0)
"""A line's intercept is within ± the one, its slope within the others: acceptance never falls when the curve rises."""


@dataclass(frozen=True, eq=False)
class DepthLines:
    """α_j and β_j, both [K]."""

    intercepts: Floats
    slopes: Floats

    @classmethod
    def none(cls, num_spec_tokens: int) -> DepthLines:
        """Predictions are taken as they are."""
        return cls(np.zeros(num_spec_tokens), np.ones(num_spec_tokens))

    @classmethod
    def usable(cls, intercepts: Sequence[float], slopes: Sequence[float], num_spec_tokens: int) -> DepthLines:
        """Make lines of whatever came: none of another number of figures than K, or with one that is no number."""
        found = np.zeros(num_spec_tokens), np.ones(num_spec_tokens)
        if len(intercepts) == len(slopes) == num_spec_tokens and np.isfinite([*intercepts, *slopes]).all():
            found = np.clip(intercepts, -MOST_INTERCEPT, MOST_INTERCEPT), np.clip(slopes, *SLOPES)
        return cls(*found)

    @property
    def are_none(self) -> bool:
        """Whether predictions are taken as they are."""
        return not self.intercepts.any() and bool((self.slopes == 1.0).all())

    def apply(self, acceptance: Floats) -> Floats:
        """What predicted conditional acceptance [..., K] is worth, within (0, 1)."""
        if self.are_none:
            return acceptance
        odds = np.exp(self.intercepts) * (acceptance / (1.0 - acceptance)) ** self.slopes
        worth: Floats = np.clip(odds / (1.0 + odds), EDGE, 1.0 - EDGE)
        return worth

    def rows(self) -> list[list[float]]:
        """[α_j, β_j] of each depth."""
        return [list(row) for row in zip(self.intercepts.tolist(), self.slopes.tolist(), strict=True)]

    def rounded(self) -> DepthLines:
        """The same to two places."""
        return DepthLines(np.round(self.intercepts, 2) + 0.0, np.round(self.slopes, 2))


def count_rounds(acceptance: Floats, reached: Ints, accepted: Ints) -> tuple[Floats, Floats]:
    """Count trials and successes by depth and bin of the prediction, both [K, B]; see `DepthCalibration.observe`."""
    depth = acceptance.shape[1]
    shape, position = (depth, len(_LOGITS)), np.arange(1, depth + 1)
    where = np.digitize(np.log(acceptance / (1.0 - acceptance)), _BINS) + len(_LOGITS) * np.arange(depth)
    trials, successes = (
        np.bincount(where[position <= most[:, None]], minlength=shape[0] * shape[1]).reshape(shape).astype(np.float64)
        for most in (reached, accepted)
    )
    return trials, successes


class DepthCalibration:
    """Learns the lines of a workload, or of several together."""

    def __init__(self, num_spec_tokens: int) -> None:
        self._trials: Floats = np.zeros((num_spec_tokens, len(_LOGITS)))
        self._successes: Floats = np.zeros_like(self._trials)
        self._lines = DepthLines.none(num_spec_tokens)

    def observe(self, acceptance: Floats, reached: Ints, accepted: Ints, design_effect: float = 1.0) -> None:
        """Fold in rounds, oldest first.

        Args:
            acceptance: conditional acceptance as predicted before each round, without lines, [R, K].
            reached: positions that each round tried, [R]; `accepted`: those that it passed, [R].
            design_effect: by how much rounds repeat each other; each counts so many times less.
        """
        self.add(count_rounds(acceptance, reached, accepted), len(acceptance), design_effect)

    def add(self, counts: tuple[Floats, Floats], num_rounds: int, design_effect: float = 1.0) -> None:
        """The same for rounds that were counted by `count_rounds`."""
        decay = float(np.exp(-num_rounds / _FORGETTING_ROUNDS))
        for held, fresh in zip((self._trials, self._successes), counts, strict=True):
            held *= decay
            held += fresh / max(design_effect, 1.0)

    def lines(self, around: DepthLines | None = None) -> DepthLines:
        """Fit the lines, drawn to others; None: to none."""
        prior = around or DepthLines.none(len(self._trials))
        intercepts, slopes = self._lines.intercepts.copy(), self._lines.slopes.copy()
        for _ in range(_SWEEPS):  # Newton's
            chance = 1.0 / (1.0 + np.exp(-(intercepts[:, None] + slopes[:, None] * _LOGITS)))
            missing, weight = self._successes - self._trials * chance, self._trials * chance * (1.0 - chance)
            gradient = missing.sum(axis=1) - _STRENGTH * (intercepts - prior.intercepts)
            slope_gradient = missing @ _LOGITS - _STRENGTH * (slopes - prior.slopes)
            own, both, of_slope = weight.sum(axis=1) + _STRENGTH, weight @ _LOGITS, weight @ _LOGITS**2 + _STRENGTH
            determinant = own * of_slope - both**2
            intercepts += (of_slope * gradient - both * slope_gradient) / determinant
            slopes += (own * slope_gradient - both * gradient) / determinant
            intercepts, slopes = np.clip(intercepts, -MOST_INTERCEPT, MOST_INTERCEPT), np.clip(slopes, *SLOPES)
        self._lines = DepthLines(intercepts, slopes)
        return self._lines
