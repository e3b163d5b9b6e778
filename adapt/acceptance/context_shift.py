"""Estimates the effect of the context's length on acceptance: drafters trained on short texts fail more often in long ones.

A round whose context is n tokens long falls into bucket b(n): below 128 tokens, then one for every doubling, the last from
65,536 on. In workload w the failure odds at position j are u_wj · x_wb, with

    x_wb = exp(s_b − s̄_w)

s belongs to the drafter and is shared by all workloads; s̄_w is its mean over the contexts seen in w. So x is 1 for a workload
whose contexts are all alike, and for all workloads without data.

Evidence is failures F and successes S of each workload by bucket and position. u and s are found alternately, from s = 0:

    u_wj = Σ_b F_bj / Σ_b x_wb·S_bj                        as E[F] = u·x·E[S] however often a bucket gets that far
    O_b = Σ_j F_bj·a_j,  E_b = Σ_j S_bj·(1 − a_j)          Mantel–Haenszel sums, a = 1/(1 + u)
    s minimises Σ_wb p_wb·(log O_wb/E_wb − s_b − c_w)² + Σ_b s_b²/σ² + Σ_b (s_b − s_{b−1})²/τ²

with c free, so that only differences within a workload count, and p = (harmonic mean of O and E) / (design effect of
requests). A bucket is shrunk to its neighbours, and all of them to 0. The part that chance explains is removed as a whole: with
Q = Σ p·(y − ȳ_w)² of f degrees of freedom, s is multiplied by max(0, 1 − (f + 2·√(2f))/Q). So where acceptance doesn't depend
on the context, x is usually exactly 1.

A curve counted over all contexts holds their mix, and late positions are reached by the easy ones. The curve at x = 1 has its
failure odds times Σ_b S_bj / Σ_b x_wb·S_bj, with S of the rounds that the curve rests on (`tilt`).

Source: Mantel, Haenszel, J. Natl. Cancer Inst. 22 (1959); positive-part shrinkage: Baranchik, Ann. Math. Stat. 41 (1970).

Letters: B = buckets, K = draft tokens, R = rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from honed.adapt.acceptance.estimate import CHAIN_STRENGTH, RequestTable, scale_odds
from honed.adapt.protocol.arrays import Floats, Ints

NUM_BUCKETS = 11
BITS = 7
"""Contexts below 2^BITS tokens share the first bucket."""
_BUCKETS: Ints = np.array([n.bit_length() for n in range((1 << (NUM_BUCKETS - 2)) + 1)], dtype=np.int64)
FORGETTING_ROUNDS = 100_000.0
"""Long, since separating the context's effect from the requests' takes many requests; a change of weights ends it sooner."""
PRIOR_SPREAD, NEIGHBOUR_SPREAD = 2.0, 0.35
"""σ and τ, in log odds."""
LEAST = 0.02
"""Log odds; an effect that is smaller everywhere isn't worth shipping."""
_TURNS = 6


def buckets_of(context_tokens: Sequence[int] | Ints) -> Ints:
    """Buckets of context lengths, [R]; negative ones are short."""
    return _BUCKETS.take(np.asarray(context_tokens, dtype=np.int64) >> BITS, mode="clip")


def bucket_starts() -> list[int]:
    """Return the shortest context of each bucket."""
    return [0, *(1 << (BITS + i) for i in range(NUM_BUCKETS - 1))]


class ContextCounts:
    """Failures and successes of one workload by bucket and position, with forgetting by rounds."""

    def __init__(self, num_spec_tokens: int, forgetting_rounds: float) -> None:
        self.failures: Floats = np.zeros((NUM_BUCKETS, num_spec_tokens))
        self.successes: Floats = np.zeros((NUM_BUCKETS, num_spec_tokens))
        self.recent: Floats = np.zeros((NUM_BUCKETS, num_spec_tokens))
        """Successes of the rounds that the workload's curve rests on, with its memory."""
        self._recent_rounds = forgetting_rounds

    def observe(self, context_tokens: Ints, reached: Ints, accepted: Ints, weights: Floats | None = None) -> None:
        """Fold in rounds: context length, tried positions, accepted drafts, each [R].

        Args:
            weights: weight of each round in the workload's curve, [R]; None: 1.
        """
        bucket = buckets_of(context_tokens)
        weights = np.ones(len(bucket)) if weights is None else weights
        successes = _at_least(bucket, accepted, self.successes.shape)
        failures = _at_least(bucket, reached, self.failures.shape) - successes
        for held, fresh, age, memory in (
            (self.failures, failures, len(bucket), FORGETTING_ROUNDS),
            (self.successes, successes, len(bucket), FORGETTING_ROUNDS),
            (self.recent, _at_least(bucket, accepted, self.recent.shape, weights), weights.sum(), self._recent_rounds),
        ):
            held *= math.exp(-age / memory)
            held += fresh

    def forget(self, factor: float) -> None:
        """Weaken the counts."""
        self.failures *= factor
        self.successes *= factor
        self.recent *= factor

    @property
    def weight(self) -> Floats:
        """Number of trials in each bucket, [B]."""
        weight: Floats = (self.failures + self.successes).sum(axis=1)
        return weight


def _at_least(bucket: Ints, values: Ints, shape: tuple[int, ...], weights: Floats | None = None) -> Floats:
    """Count the rounds, or add up their weights, whose value is ≥ 1, ≥ 2, … ≥ K in each bucket, [B, K]."""
    width = shape[1] + 1
    histogram = np.bincount(bucket * width + values, weights, minlength=NUM_BUCKETS * width).reshape(NUM_BUCKETS, width)
    counts: Floats = np.cumsum(histogram[:, ::-1], axis=1)[:, ::-1][:, 1:].astype(np.float64)
    return counts


def trials_design_effect(requests: RequestTable, strength: float) -> float:
    """Estimate how much trials of one request, at any position, repeat each other: 1 + (n̄ − 1) / (1 + strength)."""
    tried = requests.trials.sum(axis=1)
    total = float(tried.sum())
    return 1.0 + max(float(tried @ tried) / total - 1.0, 0.0) / (1.0 + strength) if total > 0.0 else 1.0


def estimate_effect(evidence: Sequence[tuple[ContextCounts, float]]) -> Floats:
    """Estimate s, [B], from every workload's (counts, design effect)."""
    seen = [(counts, max(most, 1.0)) for counts, most in evidence if np.count_nonzero(counts.weight >= 1.0) > 1]
    effect: Floats = np.zeros(NUM_BUCKETS)
    share = 0.0
    for _ in range(_TURNS if seen else 0):
        precision, wanted, surprise, freedom = _PRIOR_PRECISION.copy(), np.zeros(NUM_BUCKETS), 0.0, 0
        for counts, design_effect in seen:
            p, y = _evidence(counts, np.exp(effect))
            p /= design_effect
            total = float(p.sum())
            y -= float(p @ y) / total
            precision += np.diag(p) - np.outer(p, p) / total
            wanted += p * y
            surprise += float(p @ y**2)
            freedom += int(np.count_nonzero(p)) - 1
        bound = freedom + 2.0 * math.sqrt(2.0 * freedom)
        effect[:] = np.linalg.solve(precision, wanted)
        share = max(1.0 - bound / surprise, 0.0) if surprise > 0.0 else 0.0
    return effect * share


def _evidence(counts: ContextCounts, factor: Floats) -> tuple[Floats, Floats]:
    """Return (harmonic mean of O and E, log O/E), each [B]; half a trial is added to each sum, and less than one is none."""
    odds = (counts.failures.sum(axis=0) + 0.5) / (factor @ counts.successes + 0.5)  # u
    failed = counts.failures @ (1.0 / (1.0 + odds)) + 0.5
    passed = counts.successes @ (odds / (1.0 + odds)) + 0.5
    weight = np.where(counts.weight >= 1.0, 2.0 * failed * passed / (failed + passed) - 0.5, 0.0)
    return weight, np.log(failed / passed)


def _prior_precision() -> Floats:
    steps = np.diff(np.eye(NUM_BUCKETS), axis=0)
    precision: Floats = np.eye(NUM_BUCKETS) / PRIOR_SPREAD**2 + steps.T @ steps / NEIGHBOUR_SPREAD**2
    return precision


_PRIOR_PRECISION = _prior_precision()


def shift_for(effect: Floats, weight: Floats) -> list[float]:
    """Return x, the factor on the failure odds in each bucket, [B], for a workload with these trials in each bucket.

    Empty where the context makes no notable difference.
    """
    total = float(weight.sum())
    relative = effect - (float(weight @ effect) / total if total > 0.0 else 0.0)
    if float(np.abs(relative).max()) < LEAST:
        return []
    return [round(value, 3) for value in np.exp(relative).tolist()]


def tilt(shift: Sequence[float], successes: Floats) -> Floats:
    """Factor on the failure odds that turns a curve of all contexts into the one at x = 1, [K], from successes [B, K].

    With next to no data a position repeats its left neighbour.
    """
    count, weighted, left = successes.sum(axis=0), np.asarray(shift) @ successes, 1.0
    factors = np.empty(len(count))
    for position, (one, x) in enumerate(zip(count.tolist(), weighted.tolist(), strict=True)):
        left = factors[position] = (one + CHAIN_STRENGTH) / (x + CHAIN_STRENGTH / left)
    return factors


def shifted_curves(curve: Floats, shift: Sequence[float], context_tokens: Ints) -> Iterator[tuple[Ints, Floats]]:
    """Yield (rounds, their conditional acceptance [K]) until every round of [R] has come up once."""
    if not shift:
        yield np.arange(len(context_tokens)), curve
        return
    bucket = buckets_of(context_tokens)
    for number in np.unique(bucket).tolist():
        yield np.flatnonzero(bucket == number), scale_odds(curve, shift[number])
