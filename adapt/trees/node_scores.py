"""Calibrates a drafter's log-probabilities by the tokens that targets took: node scores per depth and temperature.

A block drafter's log-probability of candidate r at depth d is a marginal: it doesn't know the tokens before, nor the target's
sampling temperature. A tree's budget needs P(target takes r | the walk reached r's parent). Here

    p = σ(w·logit q + b)                    w > 0, one (w, b) for each temperature bucket, branch and depth

The branch is whether the path above is the chain of first candidates or left it. Siblings are scaled to sum to 1 at most, and
w > 0 keeps their order. So scores never grow from a parent to a child nor from a sibling to the next, and the best-first tree
stays the optimum (`draft_tree.build_tree` takes the two branches). Without data w = 1 and b = 0: the identity.

At every node that the walk reached the target emits a token, whether or not the tree had that child. So depth d of a round
teaches about all of its candidates iff the walk reached depth d − 1, and nothing otherwise (right-censored, as chains are).
Sums are kept in bins of logit q and forgotten by rounds of the same temperature bucket. (w, b) is their maximum a posteriori:
every bucket's prior is the fit of all buckets, a depth's prior the fit of the depth before it, since deeper ones are rarer.

Letters: R = rounds, D = depths, m = candidates a depth, C = temperature buckets, S = 2 branches, X = bins.

Source: Platt (1999), "Probabilistic outputs for support vector machines", on the log-odds instead of a margin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from honed.adapt.protocol.arrays import Floats, Ints

TEMPERATURES = (0.0, 0.5, 1.0)
"""Buckets: 0, up to 0.5, up to 1, above."""
UNKNOWN = -1
_FARTHEST = 12.0
_BINS = 48
_LEAST_SLOPE = 0.05
_NEWTON_STEPS = 30


@dataclass(frozen=True, slots=True)
class NodeScoreSettings:
    """Rates at which scores are learned and forgotten."""

    forgetting_rounds: float = 20_000.0
    strength: float = 16.0
    """Weight of a prior in pseudo-trials at even odds, two off in log-odds."""
    refit_rounds: int = 64
    """New rounds before (w, b) is fitted again; half of the rounds seen, if that is less."""


def temperature_bucket(temperature: Floats) -> Ints:
    """Find the bucket of each temperature; NaN counts as 1."""
    known = np.nan_to_num(np.asarray(temperature, dtype=np.float64), nan=1.0)
    return np.searchsorted(np.array(TEMPERATURES), known, side="left").astype(np.int64)


def log_odds(log_probs: Floats) -> Floats:
    """Compute logit q from log q, within ±12; −inf gives the lower edge."""
    log_probs = np.minimum(np.asarray(log_probs, dtype=np.float64), -1e-9)
    with np.errstate(divide="ignore"):
        odds: Floats = np.clip(log_probs - np.log(-np.expm1(log_probs)), -_FARTHEST, _FARTHEST)
    return odds


class NodeScores:
    """Sums of tried and taken candidates, and the maps fitted to them."""

    def __init__(self, num_depths: int, settings: NodeScoreSettings = NodeScoreSettings()) -> None:  # frozen: safe to share
        self.settings, self.num_depths = settings, num_depths
        shape = (len(TEMPERATURES) + 1, 2, num_depths, _BINS)
        self._tried, self._taken, self._odds = np.zeros(shape), np.zeros(shape), np.zeros(shape)  # [C, S, D, X]
        self.num_rounds = 0
        self._fitted_at = 0
        self._fit: Floats = np.broadcast_to(np.array([1.0, 0.0]), (*shape[:3], 2)).copy()  # [C, S, D, (w, b)]

    def observe(self, log_probs: Floats, taken: Ints, temperature: Floats) -> None:
        """Fold in rounds.

        Args:
            log_probs: the drafter's log-probabilities, [R, D, m], most likely first.
            taken: candidate that the target took at each depth, [R, D]; m: none of them; UNKNOWN: not reached, or unknown.
                Depths after an unknown one, or after one where none was taken, are ignored.
            temperature: of each round's request, [R].
        """
        log_probs, taken = np.asarray(log_probs, dtype=np.float64), np.asarray(taken, dtype=np.int64)
        if not taken.size or not log_probs.size:
            return
        num_rounds, depths, width = log_probs.shape
        depths = min(depths, self.num_depths)
        log_probs, taken = log_probs[:, :depths], taken[:, :depths]
        bucket = temperature_bucket(temperature)
        is_inside = (taken >= 0) & (taken < width)
        is_reached = np.ones_like(is_inside)
        is_reached[:, 1:] = np.logical_and.accumulate(is_inside, axis=1)[:, :-1]
        is_off = np.zeros_like(is_inside)
        is_off[:, 1:] = np.logical_or.accumulate(taken > 0, axis=1)[:, :-1]
        for one, count in enumerate(np.bincount(bucket, minlength=len(self._tried)).tolist()):
            for held in (self._tried, self._taken, self._odds):
                held[one] *= np.exp(-count / self.settings.forgetting_rounds)
        odds = log_odds(log_probs)
        use = (is_reached & (taken != UNKNOWN))[:, :, None] & np.isfinite(log_probs)
        where = np.minimum(((odds + _FARTHEST) * (_BINS / (2 * _FARTHEST))).astype(np.int64), _BINS - 1)
        cell = ((bucket[:, None] * 2 + is_off) * self.num_depths + np.arange(depths))[:, :, None] * _BINS + where
        is_taken = taken[:, :, None] == np.arange(width)
        for held, fresh in ((self._tried, None), (self._taken, is_taken[use]), (self._odds, odds[use])):
            held += np.bincount(cell[use], fresh, held.size).reshape(held.shape)
        self.num_rounds += num_rounds

    def scores(self, log_probs: Floats, temperature: float) -> Floats:
        """Calibrate one round's candidates [D, m]: log-probabilities [S, D, m], on the chain and off it.

        Raises:
            ValueError: a NaN, or more depths than the scores have.
        """
        log_probs = np.asarray(log_probs, dtype=np.float64)
        if len(log_probs) > self.num_depths:
            raise ValueError(f"{len(log_probs)} depths, but scores are kept for {self.num_depths}")
        if np.isnan(log_probs).any():
            raise ValueError("log-probabilities must be numbers ≤ 0")
        self._refresh()
        fit = self._fit[int(temperature_bucket(np.array([temperature]))[0]), :, : len(log_probs), None, :]  # [S, D, 1, 2]
        probability = _sigmoid(fit[..., 0] * log_odds(log_probs) + fit[..., 1])
        probability *= np.isfinite(log_probs)
        probability /= np.maximum(probability.sum(axis=-1, keepdims=True), 1.0)
        with np.errstate(divide="ignore"):
            calibrated: Floats = np.log(np.minimum.accumulate(probability, axis=-1))  # rounding must not swap neighbours
        return calibrated

    def maps(self, temperature: float) -> Floats:
        """The (w, b) in force for a temperature, [S, D, 2]."""
        self._refresh()
        fit: Floats = self._fit[int(temperature_bucket(np.array([temperature]))[0])]
        return fit

    def _refresh(self) -> None:
        fresh = self.num_rounds - self._fitted_at
        if not fresh or fresh < min(self.settings.refit_rounds, self._fitted_at / 2):
            return
        self._fitted_at = self.num_rounds
        sums = np.stack([self._tried, self._taken, self._odds])  # [3, C, S, D, X]
        engine = fit_platt(sums.sum(axis=(1, 2, 3)), np.array([1.0, 0.0]), self.settings.strength)  # [2]
        prior = fit_platt(sums.sum(axis=3), engine, self.settings.strength)  # [C, S, 2]
        for depth in range(self.num_depths):
            prior = fit_platt(sums[:, :, :, depth], prior, self.settings.strength)
            self._fit[:, :, depth] = prior


def fit_platt(sums: Floats, prior: Floats, strength: float) -> Floats:
    """Maximise Σ_x taken·log p + (tried − taken)·log(1 − p) less a quadratic pull to the prior, p = σ(w·x + b), w ≥ 0.05.

    The pull has the curvature of `strength` trials at even odds, half of them at x = 2 and half at x = −2. Newton's method,
    each step at most 1 either way.

    Args:
        sums: tried, taken and Σ x of each bin, [3, ..., X].
        prior: (w, b), [..., 2].
    """
    tried, taken, total = sums
    x = np.divide(total, tried, out=np.zeros_like(total), where=tried > 0.0)
    pull_w, pull_b = strength, 0.25 * strength
    prior = np.broadcast_to(prior, (*tried.shape[:-1], 2))
    w0, b0 = prior[..., 0], prior[..., 1]
    w, b = w0.copy(), b0.copy()
    for _ in range(_NEWTON_STEPS):
        p = _sigmoid(w[..., None] * x + b[..., None])
        error, bend = taken - tried * p, tried * p * (1.0 - p)
        grad_w, grad_b = (error * x).sum(-1) - pull_w * (w - w0), error.sum(-1) - pull_b * (b - b0)
        ww, wb, bb = (bend * x * x).sum(-1) + pull_w, (bend * x).sum(-1), bend.sum(-1) + pull_b
        step_w = np.clip((bb * grad_w - wb * grad_b) / (ww * bb - wb * wb), -1.0, 1.0)
        step_w = np.maximum(w + step_w, _LEAST_SLOPE) - w
        step_b = np.clip((grad_b - wb * step_w) / bb, -1.0, 1.0)
        w, b = w + step_w, b + step_b
        if max(np.abs(step_w).max(initial=0.0), np.abs(step_b).max(initial=0.0)) < 1e-9:
            break
    return np.stack([w, b], axis=-1)


def _sigmoid(x: Floats) -> Floats:
    out: Floats = 1.0 / (1.0 + np.exp(-x))
    return out


class NodeCalibration:
    """Expected calibration error of node probabilities that were verified: Σ_bins |Σ predicted − Σ reached| / nodes."""

    def __init__(self, num_bins: int = 20) -> None:
        self._predicted, self._reached = np.zeros(num_bins), np.zeros(num_bins)
        self.num_nodes = 0

    def observe(self, probability: Floats, is_reached: Floats) -> None:
        """Fold in nodes of trees, [B]: the probability that the walk reaches each, and whether (0 or 1) it did."""
        where = np.clip((np.asarray(probability) * len(self._predicted)).astype(np.int64), 0, len(self._predicted) - 1)
        self._predicted += np.bincount(where, probability, len(self._predicted))
        self._reached += np.bincount(where, is_reached, len(self._predicted))
        self.num_nodes += len(where)

    @property
    def error(self) -> float:
        """Mean |predicted − observed| over nodes; NaN before any."""
        return float(np.abs(self._predicted - self._reached).sum()) / self.num_nodes if self.num_nodes else float("nan")

    @property
    def bias(self) -> float:
        """Predicted accepted tokens for each actual one, over all trees; NaN before any was accepted."""
        reached = float(self._reached.sum())
        return float(self._predicted.sum()) / reached if reached else float("nan")
