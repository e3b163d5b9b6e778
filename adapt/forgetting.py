"""Counts whose memory is long while nothing changes, and short right after something has.

Two memories of the same rounds: a long one, which is what is read, and a short one. Both predict each batch before they
learn from it, and their log-likelihood ratio is added up with forgetting of its own. When the short memory has predicted
better by more than `SWITCH_NATS`, the long one is replaced by it, and grows long again from there. So after a change the
estimate follows within a few hundred rounds, and without one it has the variance of the long memory.

Rounds of one request repeat each other, so the short memory and the score count each by what it says of others: a request's
first rounds most. Hence traffic of another kind is noticed when its requests begin, not when their rounds have added up.

Source: the idea of prequential model choice, Dawid, J. R. Statist. Soc. A 147 (1984), with restarts.
"""

from __future__ import annotations

import math

import numpy as np

from honed.adapt.acceptance import (
    AcceptanceCounts,
    Floats,
    Ints,
    IntsLike,
    chain_estimate,
    reached_and_accepted,
    scale_odds,
)

SWITCH_NATS = 6.0
SHORT_ROUNDS = 150.0
_SCORE_ROUNDS = 800.0


class AdaptiveCounts(AcceptanceCounts):
    """AcceptanceCounts that forget quickly when what they say no longer predicts."""

    def __init__(self, num_spec_tokens: int, forgetting_rounds: float) -> None:
        super().__init__(num_spec_tokens, forgetting_rounds)
        self._short = AcceptanceCounts(num_spec_tokens, min(SHORT_ROUNDS, self.forgetting_rounds))
        self._score = 0.0
        self.num_switches = 0

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
            weights: what each says of others, in independent rounds [R]: those of one request repeat each other. None: 1.
            theta: failure odds of each round's request from its earlier rounds, see `acceptance.count_trials`, [R]. None: 1.
        """
        columns = (num_draft_tokens, num_accepted_tokens, num_invalid_tokens)
        if self._short.weight_rounds >= SHORT_ROUNDS / 4 and self.weight_rounds > 1.5 * self._short.weight_rounds:
            self._judge(*columns, weights, theta)
        self._short.observe(*columns, weights, theta)
        super().observe(*columns, theta=theta)

    def _judge(
        self,
        num_draft_tokens: IntsLike,
        num_accepted_tokens: IntsLike,
        num_invalid_tokens: IntsLike | None,
        weights: Floats | None,
        theta: Floats | None,
    ) -> None:
        rounds = reached_and_accepted(num_draft_tokens, num_accepted_tokens, self.num_spec_tokens, num_invalid_tokens)
        of_rounds = np.ones(len(rounds[0])) if weights is None else weights
        of_requests = np.ones(len(rounds[0])) if theta is None else theta
        short = chain_estimate(self._short.trials, self._short.successes)
        long = chain_estimate(self.trials, self.successes)
        gained = float(of_rounds @ (_log_likelihood(short, of_requests, *rounds) - _log_likelihood(long, of_requests, *rounds)))
        num_rounds = float(np.count_nonzero(np.asarray(num_draft_tokens)) if weights is None else weights.sum())
        self._score = max(self._score * math.exp(-num_rounds / _SCORE_ROUNDS) + gained, 0.0)
        if self._score > SWITCH_NATS:
            self.trials, self.successes = self._short.trials.copy(), self._short.successes.copy()
            self.weight_rounds = self._short.weight_rounds
            self._score = 0.0
            self.num_switches += 1

    def forget(self, factor: float) -> None:
        """Weaken both memories: other weights, other acceptance."""
        self.scale(factor)
        self._short.scale(factor)
        self._score = 0.0


def _log_likelihood(curve: Floats, theta: Floats, reached: Ints, accepted: Ints) -> Floats:
    """Of each round, [R], of requests of those failure odds relative to the curve."""
    acceptance = scale_odds(curve, theta[:, None])
    position = np.arange(1, len(curve) + 1)
    passed, failed = position <= accepted[:, None], (position > accepted[:, None]) & (position <= reached[:, None])
    likelihood: Floats = np.where(passed, np.log(acceptance), np.where(failed, np.log1p(-acceptance), 0.0)).sum(axis=1)
    return likelihood
