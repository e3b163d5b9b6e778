"""Estimates drafts' acceptance from rounds that were cut off at different lengths.

Position j of a round (from 1) is a *trial* iff draft j−1 was accepted and draft j was verified, and a *success* iff draft j
was accepted. The conditional acceptance a_j = P(draft j accepted | drafts before it accepted) is a hazard under right
censoring. So successes / trials per position is unbiased for any rule that chose k from the past, if requests are alike.
Accepted / drafted is biased: its mean moves with k. Survival is S(j) = a_1 · … · a_j, and the acceptance length is
τ(k) = 1 + S(1) + … + S(k).

If requests differ, a rule that gives successful ones longer drafts sees late positions, or any, only of easy requests. So a
round is compared with θ (below), the expectation from its request's past. With every success weighted by θ, the curve is that
of a request without history. A round that the past predicted fully doesn't change the curve.

Three levels, each shrunk towards the one above:

- engine: position j's Beta prior is centred on position j−1's estimate, since trials never grow with j; so a position that was
  never reached repeats its neighbour.
- workload: prior centred on the engine's curve, its odds scaled by the one factor that explains the workload best.
- request: the workload's curve with its failure odds scaled by one factor θ, since a request is over before K separate
  figures differ from noise: a_j(θ) = m_j / (m_j + θ·(1 − m_j)).

θ is the Mantel–Haenszel common odds ratio, θ = (c + Σ_failures m_j) / (c + Σ_successes (1 − m_j)). Each trial adds
m(1−m)·θ/(m + θ(1−m)) to the mean of the numerator and 1/θ of that to the denominator's. So the ratio is consistent for every
θ, not only near 1. c = strength · Σ_j S(j−1)·m_j·(1−m_j), the contribution of `strength` rounds at θ = 1 to each sum.

Letters: K = configured number of draft tokens, R = rounds, G = requests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.arrays import Bools, Floats, Ints, IntsLike

FIRST_GUESS = 0.6
"""Conditional acceptance of position 1 without data."""
EDGE = 1e-3
"""Estimates stay in [EDGE, 1 − EDGE]: nothing is certain, and logarithms stay finite."""
MOST_THETA = 12.0
"""Failure odds of a request are assumed to be within so many times those of its workload."""
CHAIN_STRENGTH = 4.0
"""Weight of a position's left neighbour at engine level, in pseudo-trials."""
_PATIENCE = 4
"""Batches without a round of a running request that may come between two with some."""


def reached_and_accepted(
    num_draft_tokens: IntsLike,
    num_accepted_tokens: IntsLike,
    num_spec_tokens: int,
    num_invalid_tokens: IntsLike | None = None,
) -> tuple[Ints, Ints]:
    """Turn rounds into the number of positions each one tried and passed, both [R] and within 0 … K.

    `num_invalid_tokens` counts drafts that were never tried, the block's tail.
    """
    drafted = np.asarray(num_draft_tokens, dtype=np.int64)
    if num_invalid_tokens is not None:
        drafted = drafted - np.maximum(np.asarray(num_invalid_tokens, dtype=np.int64), 0)
    drafted = np.clip(drafted, 0, num_spec_tokens)
    accepted = np.clip(np.asarray(num_accepted_tokens, dtype=np.int64), 0, drafted)
    return np.minimum(accepted + 1, drafted), accepted


def count_trials(
    num_draft_tokens: IntsLike,
    num_accepted_tokens: IntsLike,
    num_spec_tokens: int,
    num_invalid_tokens: IntsLike | None = None,
    weights: Floats | None = None,
    theta: Floats | None = None,
) -> tuple[Floats, Floats]:
    """Count trials and successes per position, both [K], optionally weighting each round.

    Args:
        theta: failure odds of each round's request, relative to the wanted curve, from earlier rounds, [R]: a success
            counts so many times. At a given position E[failures] = θ · (1 − m)/m · E[successes]. None: 1.
    """
    reached, accepted = reached_and_accepted(num_draft_tokens, num_accepted_tokens, num_spec_tokens, num_invalid_tokens)
    trials, successes = (_at_least(values, num_spec_tokens, weights) for values in (reached, accepted))
    if theta is None:
        return trials, successes
    weighted = _at_least(accepted, num_spec_tokens, theta if weights is None else weights * theta)
    return trials - successes + weighted, weighted


def _at_least(values: Ints, num_spec_tokens: int, weights: Floats | None) -> Floats:
    """Weight of the rounds whose value is ≥ 1, ≥ 2, … ≥ K."""
    histogram = np.bincount(values, weights=weights, minlength=num_spec_tokens + 1)
    return np.cumsum(histogram[::-1].astype(np.float64))[::-1][1:]


class AcceptanceCounts:
    """Trials and successes per position with exponential forgetting by rounds.

    A round n rounds ago weighs exp(−n / forgetting_rounds), however rounds were batched.
    """

    def __init__(self, num_spec_tokens: int, forgetting_rounds: float) -> None:
        self.num_spec_tokens = num_spec_tokens
        self.forgetting_rounds = max(forgetting_rounds, 1.0)
        self.trials: Floats = np.zeros(num_spec_tokens)
        self.successes: Floats = np.zeros(num_spec_tokens)
        self.num_rounds = 0

    def observe(
        self,
        num_draft_tokens: IntsLike,
        num_accepted_tokens: IntsLike,
        num_invalid_tokens: IntsLike | None = None,
        weights: Floats | None = None,
        theta: Floats | None = None,
    ) -> None:
        """Fold in rounds, oldest first. Rounds without drafts teach nothing and don't age the rest.

        Args:
            weights: of each round, [R]; older rounds age by as much. None: 1 for each.
            theta: see `count_trials`, [R].
        """
        drafted = np.asarray(num_draft_tokens, dtype=np.int64)
        keep = drafted > 0
        drafted, accepted = drafted[keep], np.asarray(num_accepted_tokens, dtype=np.int64)[keep]
        invalid = None if num_invalid_tokens is None else np.asarray(num_invalid_tokens, dtype=np.int64)[keep]
        if not len(drafted):
            return
        weights = np.ones(len(drafted)) if weights is None else weights[keep]
        until = np.cumsum(weights)
        kept = weights * np.exp((until - until[-1]) / self.forgetting_rounds)
        trials, successes = count_trials(
            drafted, accepted, self.num_spec_tokens, invalid, kept, None if theta is None else theta[keep]
        )
        self.scale(float(np.exp(-until[-1] / self.forgetting_rounds)))
        self.trials += trials
        self.successes += successes
        self.num_rounds += len(drafted)

    def scale(self, factor: float) -> None:
        """Weaken the counts, as after a swap of the drafter's weights."""
        self.trials *= factor
        self.successes *= factor


def chain_estimate(trials: Floats, successes: Floats, strength: float = CHAIN_STRENGTH) -> Floats:
    """Estimate conditional acceptance [K] with each position's Beta prior centred on its left neighbour."""
    estimate = np.empty(len(trials))
    left = FIRST_GUESS
    for position, (tried, passed) in enumerate(zip(trials.tolist(), successes.tolist(), strict=True)):
        left = (passed + strength * left) / (tried + strength)
        estimate[position] = left
    return np.clip(estimate, EDGE, 1.0 - EDGE)


def shrunk_estimate(trials: Floats, successes: Floats, parent: Floats, strength: float) -> Floats:
    """Estimate conditional acceptance [K] with a Beta prior centred on the parent's curve at this level's own odds."""
    prior = scale_odds(parent, odds_ratio(trials, successes, parent, strength))
    return np.clip((successes + strength * prior) / (trials + strength), EDGE, 1.0 - EDGE)


def odds_ratio(trials: Floats, successes: Floats, parent: Floats, strength: float) -> float:
    """Estimate the factor θ on the parent's failure odds, shrunk to 1 by `strength` rounds."""
    if not len(parent):
        return 1.0
    constant = strength * information(parent)
    failures = trials - successes
    return float((constant + failures @ parent) / (constant + successes @ (1.0 - parent)))


def information(acceptance: Floats) -> float:
    """Compute what one round at θ = 1 adds to each Mantel–Haenszel sum: Σ_j S(j)·(1−m_j)."""
    return float(survival(acceptance) @ (1.0 - acceptance))


def scale_odds(acceptance: Floats, theta: float | Floats) -> Floats:
    """Multiply the failure odds of a curve by θ: a(θ) = m / (m + θ(1 − m)), always within (0, 1)."""
    scaled: Floats = acceptance / (acceptance + theta * (1.0 - acceptance))
    return scaled


def survival(acceptance: Floats) -> Floats:
    """Compute S(j) = Π_{i≤j} a_i along the last axis."""
    return np.cumprod(acceptance, axis=-1, dtype=np.float64)


def acceptance_length(acceptance: Floats, num_draft_tokens: int | None = None) -> float:
    """Compute τ = 1 + Σ_{j≤k} S(j), bonus token included."""
    return 1.0 + float(survival(np.asarray(acceptance, dtype=np.float64))[:num_draft_tokens].sum())


def strength_between(trials: Floats, successes: Floats, low: float = 2.0, high: float = 512.0) -> float:
    """Estimate the pseudo-rounds of a workload's curve against a request's own, from G requests [G, K].

    Requests with per-position acceptance Beta(M·m_j, M·(1−m_j)) have intraclass correlation ρ = 1 / (M + 1). The ANOVA
    estimator ρ = (B − W) / (B + (n₀ − 1)·W) with the mean squares between (B) and within (W) requests, sums taken over
    positions, gives M = 1/ρ − 1, kept within `low` … `high`. With too few data it is `high`: then requests don't differ yet.

    Source: Ridout, Demétrio, Firth, Biometrics 55 (1999), "Estimating intraclass correlation for binary data".
    """
    total = trials.sum(axis=0)
    groups = (trials > 0).sum(axis=0)
    use = (groups >= 2) & (total > groups)
    if not use.any():
        return high
    n, s, total, groups = trials[:, use], successes[:, use], total[use], groups[use]
    mean = s.sum(axis=0) / total
    own = s / np.maximum(n, 1e-9)
    between = float((n * (own - mean) ** 2).sum()) / float((groups - 1).sum())
    within = float((n * own * (1.0 - own)).sum()) / float((total - groups).sum())
    size = float(((total - (n**2).sum(axis=0) / total) / np.maximum(groups - 1, 1)).mean())
    scatter = between + (size - 1.0) * within
    rho = (between - within) / scatter if scatter > 0.0 else 0.0
    return float(np.clip(1.0 / rho - 1.0, low, high)) if rho > 0.0 else high


def _before(group: Ints, values: Floats) -> Floats:
    """Sum the values of the earlier rounds of each round's group, [R]."""
    order = np.argsort(group, kind="stable")
    sorted_group, in_order = group[order], values[order]
    sums = np.cumsum(in_order) - in_order
    sums -= sums[np.searchsorted(sorted_group, sorted_group)]
    before = np.empty(len(values))
    before[order] = sums
    return before


class RequestTable:
    """Counts of a bounded number of recent requests, for estimating the spread between requests.

    Direct-mapped by the request's hash, so memory is fixed. A request keeps its slot while it has rounds, and for
    `_PATIENCE` batches more. The rounds of others that fall into it teach nothing: which ones is chance. Else two requests that
    run at once would erase each other's counts with every batch, and seem new for ever.
    """

    def __init__(self, num_spec_tokens: int, num_slots: int = 512) -> None:
        self.num_spec_tokens = num_spec_tokens
        self.owner = np.zeros(num_slots, dtype=np.uint64)
        self._until = np.zeros(num_slots, dtype=np.int64)
        """Batch from which another request may take the slot over though its owner may still run."""
        self._num_batches = 0
        self.trials: Floats = np.zeros((num_slots, num_spec_tokens))
        self.successes: Floats = np.zeros((num_slots, num_spec_tokens))

    def observe(self, requests: npt.NDArray[np.uint64], reached: Ints, accepted: Ints) -> None:
        """Add rounds to their requests' counts."""
        if not len(requests):
            return
        keys, group, slots = self._find(requests)
        holds = self._holds(keys, slots)
        newcomers = slots[holds & (self.owner[slots] != keys)]
        self.trials[newcomers] = 0.0
        self.successes[newcomers] = 0.0
        self.owner[slots[holds]] = keys[holds]
        self._num_batches += 1
        self._until[slots[holds]] = self._num_batches + _PATIENCE
        rows, mine = slots[group], holds[group]
        positions = np.arange(1, self.num_spec_tokens + 1)
        np.add.at(self.trials, rows[mine], positions <= reached[mine, None])
        np.add.at(self.successes, rows[mine], positions <= accepted[mine, None])

    def _find(self, requests: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], Ints, Ints]:
        """Unique requests, the index of each round's request among them, and their slots; these may be another's."""
        keys, group = np.unique(requests, return_inverse=True)
        return keys, group, (keys % np.uint64(len(self.owner))).astype(np.int64)

    def _holds(self, keys: npt.NDArray[np.uint64], slots: Ints) -> Bools:
        """Whether each of a batch's requests has its slot, or gets it with this batch."""
        holds: Bools = self.owner[slots] == keys
        is_held = self._until > self._num_batches
        is_held[slots[holds]] = True
        asking = np.flatnonzero(~is_held[slots])
        _, first = np.unique(slots[asking], return_index=True)
        holds[asking[first]] = True
        return holds

    def places(self, requests: npt.NDArray[np.uint64]) -> tuple[Ints, Ints]:
        """The slot of each round's request [R], and the slots that get a new owner with these rounds."""
        keys, group, slots = self._find(requests)
        return slots[group], slots[self._holds(keys, slots) & (self.owner[slots] != keys)]

    def strength(self, most_trials: float = np.inf) -> float:
        """Estimate the pseudo-rounds of a workload's curve against a request's own.

        Args:
            most_trials: trials at a position that a request weighs as, at most. Where those that are accepted seldom get few
                drafts, the many trials of the others would make all look alike.
        """
        share = np.minimum(most_trials / np.maximum(self.trials, 1.0), 1.0)
        return strength_between(self.trials * share, self.successes * share)

    def design_effect(self, strength: float) -> float:
        """Estimate how much rounds of one request repeat each other: 1 + (n̄ − 1)·ρ, with n̄ its mean trials."""
        tried = self.trials[:, 0]
        total = float(tried.sum())
        if total <= 0.0:
            return 1.0
        size = float((tried**2).sum()) / total
        return 1.0 + max(size - 1.0, 0.0) / (1.0 + strength)

    def information(self, requests: npt.NDArray[np.uint64], reached: Ints, strength: float) -> Floats:
        """Information of each of these rounds [R] about their workload, in independent rounds.

        n rounds of one request equal n / (1 + (n − 1)·ρ) rounds of as many requests, with the correlation
        ρ = 1 / (strength + 1): a request's first round counts fully, its tenth next to nothing where requests differ much.
        Rounds of requests without a slot have none: 0.
        """
        if not len(requests):
            return np.zeros(0)
        keys, group, slots = self._find(requests)
        known = np.where(self.owner[slots] == keys, self.trials[slots, 0], 0.0)
        tries = (reached > 0).astype(np.float64)
        earlier = known[group] + _before(group, tries)
        rho = 1.0 / (1.0 + strength)
        gained: Floats = (earlier + 1.0) / (1.0 + earlier * rho) - earlier / (1.0 + (earlier - 1.0) * rho)
        return gained * tries * self._holds(keys, slots)[group]

    def theta(self, requests: npt.NDArray[np.uint64], reached: Ints, accepted: Ints, curve: Floats, strength: float) -> Floats:
        """Failure odds of each round's request, relative to the curve, from its rounds before [R]; 1 for its first."""
        if not len(requests):
            return np.ones(0)
        keys, group, slots = self._find(requests)
        is_known = (self.owner[slots] == keys).astype(np.float64)
        successes = self.successes[slots]
        failed = is_known * ((self.trials[slots] - successes) @ curve)
        passed = is_known * (successes @ (1.0 - curve))
        # For these rounds: a failure adds the curve at its position, n accepted drafts the sum of 1 − curve up to there.
        fails = np.where(reached > accepted, curve[np.maximum(reached, 1) - 1], 0.0)
        passes = np.concatenate([[0.0], np.cumsum(1.0 - curve)])[accepted]
        constant = strength * information(curve)
        theta = (constant + failed[group] + _before(group, fails)) / (constant + passed[group] + _before(group, passes))
        clipped: Floats = np.clip(theta, 1.0 / MOST_THETA, MOST_THETA)
        return clipped

    def clear(self) -> None:
        """Forget all requests."""
        self.owner[:] = 0
        self.trials[:] = 0.0
        self.successes[:] = 0.0
