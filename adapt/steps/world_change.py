"""What a change of the world did to prices: to all of them alike, or to some more than to others.

When steps begin to take so many times longer, or less, little has been seen of most kinds of steps yet. Where all of them
changed alike (other clocks, a neighbour on the host) what they cost beside each other is as it was, and no choice of draft
lengths changes. Where they didn't (other weights, a process on the same device) the old prices mislead. Until enough was seen
of several draft lengths nobody can tell; and a machine whose last changes were harmless is likely to go on like that.

With m_l the logarithm of how many times longer steps of draft length l take since then, beside what was foretold of them,

    m_l = μ + c_l + e_l,    var(c) = τ²,    var(e_l) = s_l²  by the steps and spells (`adapt.steps.spells`) that were seen,

τ² is estimated by the method of moments and drawn to what former changes made of it. A step from before the change is then one
whose price is off by τ, beside its own scatter.

Source: DerSimonian and Laird, Controlled Clinical Trials 7 (1986), "Meta-analysis in clinical trials" (τ², the sums).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from honed.adapt.steps.spells import SPELL_STEPS

_FIRST_GUESS = 0.3
"""τ of a change of which nothing is known yet, on a machine that hasn't had any."""
_GUESS_WEIGHT = 0.25
"""What that weighs against former changes, in changes."""
_PRIOR_WEIGHT = 0.1
"""What τ² of former changes weighs against what is seen of this one, in draft lengths beyond the first."""
_MOST_STEPS = 64
"""Of a draft length that are looked at."""
_MEDIAN_COST = 1.57
"""Variance of a median over that of a mean."""


class Scatter(NamedTuple):
    """How steps scatter around their prices, relative."""

    own: float = 0.03
    """Standard deviation of a step."""
    likeness: float = 0.0
    """Variance of spells over the steps' own."""


class Difference(NamedTuple):
    """What is believed of a change."""

    shift: float
    """μ: the logarithm of how many times longer steps take."""
    variance: float
    """τ²: of what differs from that between draft lengths."""
    evidence: float
    """Draft lengths beyond the first that say so, each up to 1."""


class History:
    """What former changes of a machine's world did, as far as could be told."""

    def __init__(self) -> None:
        self._sum, self._weight = _GUESS_WEIGHT * _FIRST_GUESS**2, _GUESS_WEIGHT

    @property
    def variance(self) -> float:
        """τ² that is to be expected of the next."""
        return self._sum / self._weight

    def note(self, change: Difference) -> None:
        """Take in what came of a change."""
        weight = min(change.evidence, 1.0)
        self._sum += weight * change.variance
        self._weight += weight


class WorldChange:
    """The latest change of the world, and what has been seen since.

    Args:
        number: of the last step before it.
        factor: how many times longer steps seemed to take when it was noticed.
        expected_variance: `History.variance`.
    """

    def __init__(self, number: float, factor: float, scatter: Scatter, expected_variance: float) -> None:
        self.number = number
        self._first_shift, self._scatter, self._expected = math.log(factor), scatter, expected_variance
        self._seen: dict[int, tuple[list[float], set[int]]] = {}
        self._difference: Difference | None = None

    def knows(self, num_drafts: int) -> bool:
        """Whether enough was seen of a draft length."""
        return num_drafts in self._seen and len(self._seen[num_drafts][0]) >= _MOST_STEPS

    def observe(self, num_drafts: int, number: float, error: float) -> None:
        """Take in a step since then.

        Args:
            num_drafts: per request, rounded.
            number: of the step, in the order of time.
            error: logarithm of how many times longer it took than was foretold before the change.
        """
        if not self.knows(num_drafts):
            errors, spells = self._seen.setdefault(num_drafts, ([], set()))
            errors.append(error)
            spells.add(int(number // SPELL_STEPS))
            self._difference = None

    @property
    def difference(self) -> Difference:
        """What is believed of it now."""
        if self._difference is None:
            self._difference = self._estimate((errors, len(spells)) for errors, spells in self._seen.values())
        return self._difference

    def _estimate(self, seen: Iterable[tuple[list[float], int]]) -> Difference:
        own, likeness = self._scatter.own**2, self._scatter.likeness
        found = [(float(np.median(errors)), own * (_MEDIAN_COST / len(errors) + likeness / spells)) for errors, spells in seen]
        if not found:
            return Difference(self._first_shift, self._expected, 0.0)
        middles, squares = np.array(found).T
        shares = self._expected / (self._expected + squares)
        shift, evidence = float(shares @ middles / shares.sum()), max(float(shares.sum()) - 1.0, 0.0)
        between = 0.0
        if len(found) > 1:
            weights = 1.0 / squares
            spread = float(weights @ (middles - weights @ middles / weights.sum()) ** 2)
            between = (spread - (len(found) - 1)) / float(weights.sum() - (weights**2).sum() / weights.sum())
        known = _PRIOR_WEIGHT * self._expected + evidence * max(between, 0.0)
        return Difference(shift, known / (_PRIOR_WEIGHT + evidence), evidence)
