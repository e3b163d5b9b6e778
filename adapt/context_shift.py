"""Estimates how acceptance depends on the length of the context: drafters trained on short texts fail more often in long ones.

A round whose context is n tokens long falls into bucket b(n): below 128 tokens, then one for every doubling, the last from
65,536 on. In workload w the failure odds of bucket b are those of w's curve times

    x_wb = exp(s_b − s̄_w)

s belongs to the drafter and is shared by all workloads. s̄_w is its mean over the contexts that w was seen at, since w's curve
holds it already. So x is 1 for a workload whose contexts are all alike, and for everybody while nothing is known.

Evidence is the Mantel–Haenszel sums of `adapt.acceptance`, of each workload and bucket: O = Σ_failures m_j,
E = Σ_successes (1 − m_j), y = log O/E, with precision p = (harmonic mean of O and E) / (design effect of requests). s minimises

    Σ_wb p_wb·(y_wb − s_b − c_w)² + Σ_b s_b²/σ² + Σ_b (s_b − s_{b−1})²/τ²

over s and c: only what differs within a workload counts, a bucket leans on its neighbours, and all of them on 0. What luck
explains is taken off as a whole: with Q = Σ p·(y − ȳ_w)² of f degrees of freedom, s is multiplied by
max(0, 1 − (f + 2·√(2f))/Q), so that where acceptance doesn't depend on the context, x is as a rule exactly 1.

Source: Mantel, Haenszel, J. Natl. Cancer Inst. 22 (1959); positive-part shrinkage: Baranchik, Ann. Math. Stat. 41 (1970).

Letters: B = buckets, K = draft tokens, R = rounds, W = workloads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from honed.adapt.acceptance import Floats, Ints, RequestTable, scale_odds

NUM_BUCKETS = 11
_BITS = 7
_BUCKETS: Ints = np.array([n.bit_length() for n in range(1 << (NUM_BUCKETS - 1))], dtype=np.int64)
FORGETTING_ROUNDS = 100_000.0
"""Long, since it takes many requests to tell the context's part from theirs; a change of weights ends it sooner."""
PRIOR_SPREAD, NEIGHBOUR_SPREAD = 1.0, 0.35
"""σ and τ, in log odds."""
LEAST = 0.02
"""Log odds; a dependence that is smaller everywhere isn't worth shipping."""


def bucket_of(context_tokens: int) -> int:
    """Return the bucket of a context length; negative ones are short."""
    return min((max(context_tokens, 0) >> _BITS).bit_length(), NUM_BUCKETS - 1)


def buckets_of(context_tokens: Sequence[int] | Ints) -> Ints:
    """Return the buckets of context lengths, [R]; the same as `bucket_of`."""
    contexts = np.asarray(context_tokens, dtype=np.int64) >> _BITS
    return _BUCKETS.take(contexts, mode="clip")


def bucket_starts() -> list[int]:
    """Return the shortest context of each bucket."""
    return [0, *(1 << (_BITS + i) for i in range(NUM_BUCKETS - 1))]


class ContextCounts:
    """Mantel–Haenszel sums of one workload by bucket, with forgetting by rounds."""

    def __init__(self) -> None:
        self.failed: Floats = np.zeros(NUM_BUCKETS)  # O
        self.passed: Floats = np.zeros(NUM_BUCKETS)  # E

    def observe(self, curve: Floats, context_tokens: Ints, verified: Ints, accepted: Ints) -> None:
        """Fold in rounds.

        Args:
            curve: conditional acceptance as it was believed before these rounds, [K].
            context_tokens: context length of each round, [R].
            verified: drafts that each round verified, [R].
            accepted: drafts that each round accepted, [R].
        """
        bucket = buckets_of(context_tokens)
        failed = np.append(curve, 0.0)[accepted] * (accepted < verified)
        passed = np.append(0.0, np.cumsum(1.0 - curve))[accepted]
        self.forget(math.exp(-len(bucket) / FORGETTING_ROUNDS))
        self.failed += np.bincount(bucket, failed, NUM_BUCKETS)
        self.passed += np.bincount(bucket, passed, NUM_BUCKETS)

    def forget(self, factor: float) -> None:
        """Weaken what is known."""
        self.failed *= factor
        self.passed *= factor

    @property
    def weight(self) -> Floats:
        """What there is to go by in each bucket, [B]: the harmonic mean of both sums; half a trial is added to either."""
        failed, passed = self.failed + 0.5, self.passed + 0.5
        weight: Floats = np.maximum(2.0 * failed * passed / (failed + passed) - 0.5, 0.0)
        return weight

    @property
    def log_odds(self) -> Floats:
        """y, [B]."""
        log_odds: Floats = np.log((self.failed + 0.5) / (self.passed + 0.5))
        return log_odds


def trials_design_effect(requests: RequestTable, strength: float) -> float:
    """Estimate by how much trials of one request, at whichever position, repeat each other: 1 + (n̄ − 1) / (1 + strength)."""
    tried = requests.trials.sum(axis=1)
    total = float(tried.sum())
    return 1.0 + max(float(tried @ tried) / total - 1.0, 0.0) / (1.0 + strength) if total > 0.0 else 1.0


def estimate_effect(evidence: Sequence[tuple[ContextCounts, float]]) -> Floats:
    """Estimate s, [B], from every workload's (counts, design effect)."""
    precision, wanted = np.zeros((NUM_BUCKETS, NUM_BUCKETS)), np.zeros(NUM_BUCKETS)
    surprise, freedom = 0.0, 0
    for counts, design_effect in evidence:
        p = counts.weight / max(design_effect, 1.0)
        total = float(p.sum())
        if total <= 0.0:
            continue
        y = counts.log_odds
        y = y - float(p @ y) / total
        precision += np.diag(p) - np.outer(p, p) / total
        wanted += p * y
        surprise += float(p @ y**2)
        freedom += int(np.count_nonzero(p)) - 1
    bound = freedom + 2.0 * math.sqrt(2.0 * freedom)
    if surprise <= bound:
        return np.zeros(NUM_BUCKETS)
    effect: Floats = np.linalg.solve(precision + _PRIOR_PRECISION, wanted)
    return effect * (1.0 - bound / surprise)


def _prior_precision() -> Floats:
    steps = np.diff(np.eye(NUM_BUCKETS), axis=0)
    precision: Floats = np.eye(NUM_BUCKETS) / PRIOR_SPREAD**2 + steps.T @ steps / NEIGHBOUR_SPREAD**2
    return precision


_PRIOR_PRECISION = _prior_precision()


def shift_for(effect: Floats, weight: Floats) -> list[float]:
    """Return x, the factor on the failure odds in each bucket, [B], for curves of rounds with so much weight in each.

    Empty where the context makes no difference worth a word.
    """
    total = float(weight.sum())
    relative = effect - (float(weight @ effect) / total if total > 0.0 else 0.0)
    if float(np.abs(relative).max()) < LEAST:
        return []
    return [round(value, 3) for value in np.exp(relative).tolist()]


def shifted_curves(curve: Floats, shift: Sequence[float], context_tokens: Ints) -> Iterator[tuple[Ints, Floats]]:
    """Yield (rounds, conditional acceptance [K] that holds for them) until every round of [R] has come up once."""
    if not shift:
        yield np.arange(len(context_tokens)), curve
        return
    bucket = buckets_of(context_tokens)
    for number in np.unique(bucket).tolist():
        yield np.flatnonzero(bucket == number), scale_odds(curve, shift[number])
