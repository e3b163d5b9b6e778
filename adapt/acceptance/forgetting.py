"""Counts with a long memory while nothing changes, and a short one right after a change.

The same rounds are counted with memories of several lengths. The longest has its own estimate; every other is shrunk to the
next longer one. Each predicts a batch before it learns from it, and its predictions set its weight. A small share of the weight
is always redistributed, so the currently best memory soon has most of it: a short one after a change, else the longest. So the
estimate follows a change within a few dozen independent rounds, and without a change it has the variance of the long memory.

Rounds of one request repeat each other, so each counts by its information about others: a request's first rounds most. Hence
traffic of another kind is noticed when its requests begin, not when their rounds have added up. A few long requests don't
outweigh many others.

Source: Herbster, Warmuth, Machine Learning 32 (1998), "Tracking the best expert" (fixed share).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from honed.adapt.acceptance.estimate import AcceptanceCounts, chain_estimate, reached_and_accepted, scale_odds, shrunk_estimate
from honed.adapt.protocol.arrays import Floats, Ints, IntsLike

_SHORT_ROUNDS = (20.0, 200.0)
"""Independent rounds that the shorter memories hold: those of a dozen requests where they differ much."""
_SHARED, _MOST_SHARED = 0.005, 0.05
"""Share of the weight that is redistributed per independent round, and at most at once."""
SHORTER_STRENGTH = 4.0
"""Weight of the next longer memory, in pseudo-rounds."""


def memory_lengths(forgetting_rounds: float) -> list[float]:
    """Independent rounds that each memory holds, the shortest first."""
    return sorted({*(rounds for rounds in _SHORT_ROUNDS if rounds < forgetting_rounds), max(forgetting_rounds, 1.0)})


class AdaptiveCounts:
    """Counts that forget quickly when they no longer predict. Letters: M = memories, K, R as in `estimate`.

    Args:
        forgetting_rounds: independent rounds that the longest memory holds.
    """

    def __init__(self, num_spec_tokens: int, forgetting_rounds: float) -> None:
        self.num_spec_tokens = num_spec_tokens
        lengths = memory_lengths(forgetting_rounds)
        self._memories = [AcceptanceCounts(num_spec_tokens, rounds) for rounds in lengths]
        self.weights: Floats = np.full(len(lengths), 1.0 / len(lengths))
        """Weights of the memories, the shortest first, [M]."""

    @property
    def num_rounds(self) -> int:
        """Rounds seen so far."""
        return self._memories[-1].num_rounds

    @property
    def trials(self) -> Floats:
        """Independent trials per position that the longest memory holds, [K]."""
        return self._memories[-1].trials

    @property
    def effective_trials(self) -> Floats:
        """Independent trials per position that the estimate rests on, [K]: those of which one memory would be as sure.

        A memory's trials are among the longer ones', so the covariance of two memories is the longer one's variance.
        """
        trials = np.maximum([one.trials for one in self._memories], 1.0)
        variances = 1.0 / np.maximum(trials[:, None], trials)  # [M, M, K]
        effective: Floats = 1.0 / np.einsum("a,b,abk->k", self.weights, self.weights, variances)
        return effective

    def estimate(self, longest: Callable[[Floats, Floats], Floats] = chain_estimate) -> Floats:
        """Estimate conditional acceptance, [K].

        Args:
            longest: estimates from the longest memory's trials and successes.
        """
        made: Floats = self.weights @ self._estimates(longest)
        return made

    def _estimates(self, longest: Callable[[Floats, Floats], Floats]) -> Floats:  # [M, K]
        *shorter, last = self._memories
        made = [longest(last.trials, last.successes)]
        for one in reversed(shorter):
            made.append(shrunk_estimate(one.trials, one.successes, made[-1], SHORTER_STRENGTH))
        return np.array(made[::-1])

    def observe(
        self,
        num_draft_tokens: IntsLike,
        num_accepted_tokens: IntsLike,
        num_invalid_tokens: IntsLike | None = None,
        weights: Floats | None = None,
        theta: Floats | None = None,
    ) -> None:
        """Fold in rounds, oldest first.

        Args:
            weights: information of each round, in independent rounds [R]: those of one request repeat each other. None: 1.
            theta: failure odds of each round's request from its earlier rounds, see `estimate.count_trials`, [R]. None: 1.
        """
        columns = (num_draft_tokens, num_accepted_tokens, num_invalid_tokens)
        rounds = reached_and_accepted(num_draft_tokens, num_accepted_tokens, self.num_spec_tokens, num_invalid_tokens)
        of_rounds = (rounds[0] > 0).astype(np.float64) if weights is None else weights
        of_requests = np.ones(len(of_rounds)) if theta is None else theta
        gained = np.array(
            [of_rounds @ _log_likelihood(curve, of_requests, *rounds) for curve in self._estimates(chain_estimate)]
        )
        posterior = self.weights * np.exp(gained - gained.max())
        shared = min(_SHARED * float(of_rounds.sum()), _MOST_SHARED)
        self.weights = (1.0 - shared) * posterior / posterior.sum() + shared / len(posterior)
        for memory in self._memories:
            memory.observe(*columns, weights=weights, theta=theta)

    def forget(self, factor: float) -> None:
        """Weaken all memories, for new weights of the drafter."""
        for memory in self._memories:
            memory.scale(factor)
        self.weights = np.full(len(self._memories), 1.0 / len(self._memories))


def _log_likelihood(curve: Floats, theta: Floats, reached: Ints, accepted: Ints) -> Floats:
    """Log-likelihood of each round, [R], with its request's failure odds relative to the curve."""
    acceptance = scale_odds(curve, theta[:, None])
    position = np.arange(1, len(curve) + 1)
    passed, failed = position <= accepted[:, None], (position > accepted[:, None]) & (position <= reached[:, None])
    likelihood: Floats = np.where(passed, np.log(acceptance), np.where(failed, np.log1p(-acceptance), 0.0)).sum(axis=1)
    return likelihood
