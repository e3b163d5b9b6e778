"""Rules for draft lengths that weigh expected tokens against step times, with one acceptance α for all positions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from honed.adapt.acceptance.estimate import CHAIN_STRENGTH, EDGE, FIRST_GUESS
from honed.adapt.lengths.rules_base import LengthRule, Round


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Compute the tokens of a round if each draft is accepted with the same α: (1 − α^(k+1)) / (1 − α), bonus included.

    α is kept within [EDGE, 1 − EDGE]. Source: arXiv 2211.17192, equation 1.
    """
    alpha = min(max(acceptance, EDGE), 1.0 - EDGE)
    return (1.0 - alpha ** (num_draft_tokens + 1)) / (1.0 - alpha)


class _Priced(LengthRule):
    """One length for all requests, from the costs of this batch's step."""

    def _choose(self, request_ids: Sequence[str], context_tokens: int, num_prefill_tokens: int) -> list[int]:
        count = len(request_ids)
        return [self._length(count, context_tokens, num_prefill_tokens) if self._limit else 0] * count

    @abstractmethod
    def _length(self, num_requests: int, context_tokens: int, num_prefill_tokens: int) -> int:
        """Choose within 0 … limit; the limit is at least 1."""

    def _seconds(self, num_requests: int, length: int, context_tokens: int, num_prefill_tokens: int) -> float:
        """Predict the time of a step in which every request gets `length` draft tokens; the model must be ready."""
        model, tokens = self._model, num_requests * (length + 1) + num_prefill_tokens
        seconds = model.fixed_seconds(num_requests, context_tokens, num_prefill_tokens) + model.seconds_of_tokens(tokens)
        seconds += float(model.draft_seconds(num_requests, length, context_tokens)[-1])
        return seconds * model.kind_factor(num_requests, num_requests * length, num_prefill_tokens)


class Kelly(_Priced):
    """Kelly-optimal drafting, KOD: k* = argmax over 1 … limit of (1 − α^(k+1)) / (1 − α) / (A + B·(k + 1)).

    α is the mean of accepted / drafted: over the last 8 rounds there, an EMA over steps of the same mean age here. That is a
    position's acceptance only at k = 1 and falls as k grows, so long blocks look worse than they are. Its author measured a
    fixed block of 4 ahead of it at every context depth. Despite the name it maximises the rate of tokens, not the expectation
    of a logarithm, and there is no Kelly fraction. A + B·(k + 1) is a line: there fitted to the last 16 step times, here
    through the model's costs of k = 1 and k = limit for this batch. Without a model A = 47 ms and B = 8.7 ms, here and there.
    The first two steps get the limit. It never chooses 0.

    Source: 0xClandestine/mirror-sd, mirror_sd/generate.py, `_kod_optimal_gamma` and `spec_generate`; its gamma is k + 1.
    """

    name = "kelly"
    DRAFTS_ALWAYS = True
    WEIGHT = 2.0 / (8 + 1)
    DEFAULT_A_S, DEFAULT_B_S = 47e-3, 8.7e-3

    def __init__(self, num_spec_tokens: int, seed: int = 0) -> None:
        super().__init__(num_spec_tokens, seed)
        self._rate = 0.0
        self._num_steps = 0

    def _learn(self, rounds: list[Round]) -> None:
        mean = sum([accepted / drafted for _, drafted, accepted in rounds]) / len(rounds)
        self._num_steps += 1
        weight = max(self.WEIGHT, 1.0 / self._num_steps)  # a plain mean until there are enough steps for an EMA
        self._rate += weight * (mean - self._rate)

    def _length(self, num_requests: int, context_tokens: int, num_prefill_tokens: int) -> int:
        limit = self._limit
        if limit == 1 or self._num_steps < 2:
            return limit
        first, slope = self.DEFAULT_A_S + 2.0 * self.DEFAULT_B_S, self.DEFAULT_B_S
        if self._model.is_ready:
            first = self._seconds(num_requests, 1, context_tokens, num_prefill_tokens)
            slope = (self._seconds(num_requests, limit, context_tokens, num_prefill_tokens) - first) / (limit - 1)
        rates = [expected_tokens(self._rate, k) / (first + slope * (k - 1)) for k in range(1, limit + 1)]
        return 1 + rates.index(max(rates))


class Tide(_Priced):
    """On while the expected speed-up S(b) = (1 − α^(γ+1)) / ((1 − α)·(c(b)·γ + β(b))) of a batch of b is above 1, else off.

    γ is the limit; c(b) is the time to draft a token and β(b) that to verify, in units of a step that drafts nothing. So S(b)
    is the expected tokens of a round times the cost of such a step over that of one at γ. Without a model c = 0.1 and β = 1.
    α is the accepted share of reached tokens (accepted ones and the first rejected), forgotten by steps, 0.6 at first.
    `PROBE_SHARE` of the steps that would be off draft anyway, or α could never recover: that is ours.

    Source: TIDE, arXiv 2602.05145, its runtime control of speculation.
    """

    name = "tide"
    FORGETTING = 0.95
    PROBE_SHARE = 0.02
    DEFAULT_C, DEFAULT_BETA = 0.1, 1.0

    def __init__(self, num_spec_tokens: int, seed: int = 0) -> None:
        super().__init__(num_spec_tokens, seed)
        self._accepted = self._reached = 0.0

    @property
    def acceptance(self) -> float:
        """α, with a first guess of the weight of `CHAIN_STRENGTH` tokens."""
        return (self._accepted + CHAIN_STRENGTH * FIRST_GUESS) / (self._reached + CHAIN_STRENGTH)

    def _learn(self, rounds: list[Round]) -> None:
        accepted = sum([accepted for _, _, accepted in rounds])
        rejected = sum([accepted < drafted for _, drafted, accepted in rounds])
        self._accepted = self.FORGETTING * self._accepted + accepted
        self._reached = self.FORGETTING * self._reached + accepted + rejected

    def _length(self, num_requests: int, context_tokens: int, num_prefill_tokens: int) -> int:
        limit = self._limit
        cost = self.DEFAULT_C * limit + self.DEFAULT_BETA
        if self._model.is_ready:
            off = self._seconds(num_requests, 0, context_tokens, num_prefill_tokens)
            cost = self._seconds(num_requests, limit, context_tokens, num_prefill_tokens) / off
        is_on = expected_tokens(self.acceptance, limit) > cost or self._random.random() < self.PROBE_SHARE
        return limit if is_on else 0
