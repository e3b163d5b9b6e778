"""Compares predicted survival with the observed one, before the prediction learns from it.

Source: Guo et al., arXiv 1706.04599, "On Calibration of Modern Neural Networks" (expected calibration error).
"""

from __future__ import annotations

import numpy as np

from honed.adapt.protocol.arrays import Floats, Ints

BINS = 20


class Reliability:
    """Predicted against observed survival, in bins of the prediction, with exponential forgetting by rounds."""

    def __init__(self, forgetting_rounds: float = 20_000.0) -> None:
        self._forgetting_rounds = forgetting_rounds
        self._weight: Floats = np.zeros(BINS)
        self._predicted: Floats = np.zeros(BINS)
        self._observed: Floats = np.zeros(BINS)

    def observe(self, predicted: Floats, verified: Ints, accepted: Ints) -> None:
        """Fold in rounds.

        Args:
            predicted: survival S(j) of each round as predicted before it, [R, K].
            verified: drafts that each round verified, [R].
            accepted: drafts that each round accepted, [R].
        """
        positions = np.arange(1, predicted.shape[1] + 1)
        trials = (verified[:, None] >= positions).astype(np.float64)
        successes = (accepted[:, None] >= positions).astype(np.float64)
        where = np.minimum((predicted * BINS).astype(np.int64), BINS - 1).ravel()
        decay = float(np.exp(-len(verified) / self._forgetting_rounds))
        for held, fresh in ((self._weight, trials), (self._predicted, trials * predicted), (self._observed, successes)):
            held *= decay
            held += np.bincount(where, fresh.ravel(), BINS)

    @property
    def error(self) -> float:
        """Expected calibration error: mean |predicted − observed| survival, weighted by frequency; NaN before any round."""
        total = float(self._weight.sum())
        return float(np.abs(self._predicted - self._observed).sum()) / total if total else float("nan")

    def bins(self) -> list[tuple[float, float, float]]:
        """(mean predicted, mean observed, weight in draft positions) of each bin that isn't empty."""
        rows = zip(self._predicted.tolist(), self._observed.tolist(), self._weight.tolist(), strict=True)
        return [(round(p / w, 4), round(o / w, 4), round(w, 1)) for p, o, w in rows if w >= 1.0]
