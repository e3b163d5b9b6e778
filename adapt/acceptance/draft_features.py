"""Learns from finished rounds how the drafter's own confidence predicts a request's acceptance, before its drafts show it.

A round shows f, the mean log-odds of the drafter's top token over its drafts, those behind the rejection included. With s and n
the sum and number of a request's *earlier* rounds' f, and f̄ the workload's mean,

    x = (s − n·f̄) / (n + 1)              shrunk towards the workload by one round
    logit a_j = logit m_j + w·x          m: the workload's curve

w takes one Newton step of this likelihood per batch, over information that is forgotten by rounds. The policy gets
w·(1 − 4 / z²)⁺ with z² = w²·information / design effect: 0 while it could be chance, and w ≥ 0. The decider uses it as the
centre of the request's prior: θ = (c·t + Σ_failures m_j) / (c / t + Σ_successes (1 − m_j)) with t = exp(−w·x / 2), see
`estimate`. Only earlier rounds enter, so lengths don't depend on the drafts that they cut.

Letters: K = configured number of draft tokens, R = rounds.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.arrays import Floats, Ints

MOST_LOG_ODDS = 40.0
"""Features are clamped to ± this: a draft with all of the mass would have infinite log-odds."""
MOST_WEIGHT = 4.0
_SLOTS = 512
_RIDGE = 1.0
_LEAST_Z2 = 4.0


class FeatureRegression:
    """Weight of one workload's features, 0 until they are proven to be informative."""

    def __init__(self, forgetting_rounds: float) -> None:
        self.forgetting_rounds = max(forgetting_rounds, 1.0)
        self._owner = np.zeros(_SLOTS, dtype=np.uint64)
        self._sums: Floats = np.zeros((_SLOTS, 2))  # of f, of rounds
        self._total = self._count = 0.0
        self._weight = self._information = 0.0
        self._design_effect = 1.0

    @property
    def mean(self) -> float:
        """f̄."""
        return self._total / self._count if self._count else 0.0

    @property
    def weight(self) -> float:
        """w as it is sent."""
        z2 = self._weight**2 * self._information / self._design_effect
        return self._weight * (1.0 - _LEAST_Z2 / z2) if z2 > _LEAST_Z2 else 0.0

    def observe(
        self,
        request: npt.NDArray[np.uint64],
        features: Floats,
        reached: Ints,
        accepted: Ints,
        acceptance: Floats,
        design_effect: float = 1.0,
    ) -> None:
        """Fold in rounds, oldest first; those with an infinite or undefined feature are left out.

        Args:
            reached: positions tried, [R].
            acceptance: the workload's curve m, [K].
        """
        keep = np.isfinite(features)
        if not keep.any():
            return
        request, reached, accepted = request[keep], reached[keep], accepted[keep]
        features = np.clip(features[keep], -MOST_LOG_ODDS, MOST_LOG_ODDS)
        earlier = self._earlier(request, features)
        if self._count:
            self._learn((earlier[:, 0] - earlier[:, 1] * self.mean) / (earlier[:, 1] + 1.0), reached, accepted, acceptance)
        self._design_effect = max(design_effect, 1.0)
        fade = math.exp(-len(features) / self.forgetting_rounds)
        self._total, self._count = self._total * fade + float(features.sum()), self._count * fade + len(features)
        self._information *= math.exp(-len(features) / (4.0 * self.forgetting_rounds))

    def _earlier(self, request: npt.NDArray[np.uint64], features: Floats) -> Floats:
        """Sum (f, 1) over each round's earlier ones of the same request, [R, 2], and store the new sums."""
        order = np.argsort(request, kind="stable")
        mine, f = request[order], features[order]
        first = np.concatenate([[True], mine[1:] != mine[:-1]])
        starts = np.flatnonzero(first)
        group = np.cumsum(first) - 1
        sums = np.stack([np.cumsum(f) - f, np.arange(len(f), dtype=np.float64)], axis=1)
        sums -= sums[starts][group]
        slots = (mine[starts] % np.uint64(_SLOTS)).astype(np.int64)
        before = np.where((self._owner[slots] == mine[starts])[:, None], self._sums[slots], 0.0)
        sums += before[group]
        ends = np.concatenate([starts[1:], [len(f)]]) - 1
        self._owner[slots] = mine[starts]  # if two requests share a slot, the last one wins, in both lines
        self._sums[slots] = sums[ends] + np.stack([f[ends], np.ones(len(ends))], axis=1)
        earlier = np.empty_like(sums)
        earlier[order] = sums
        return earlier

    def _learn(self, x: Floats, reached: Ints, accepted: Ints, acceptance: Floats) -> None:
        tried = np.arange(len(acceptance)) < reached[:, None]  # [R, K]
        base = np.log(acceptance / (1.0 - acceptance))
        p = 1.0 / (1.0 + np.exp(-(base + self._weight * x[:, None])))
        surprise = accepted - np.where(tried, p, 0.0).sum(axis=1)
        self._information += float(x**2 @ np.where(tried, p * (1.0 - p), 0.0).sum(axis=1))
        step = float(x @ surprise) / (self._information + _RIDGE)
        self._weight = min(max(self._weight + step, 0.0), MOST_WEIGHT)
