"""Rules for draft lengths that use no costs: at most they count requests, rounds and accepted tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from honed.adapt.lengths.rules_base import LengthRule, Round, Window, within


class Static(LengthRule):
    """The same `static_k` draft tokens for every request."""

    name = "static"

    def _learn(self, rounds: list[Round]) -> None:
        return

    def _choose(self, request_ids: Sequence[str], context_tokens: int, num_prefill_tokens: int) -> list[int]:
        return [self._static_k] * len(request_ids)


class Table(Static):
    """Draft length by batch size: the first row whose batch is large enough; above the last row the last; no rows: static_k.

    vLLM counts every request scheduled in the step, this rule decoding ones. A gap between ranges continues the one before.

    Source: vLLM 0.32 `num_speculative_tokens_per_batch_size`, vllm/v1/spec_decode/dynamic/utils.py.
    """

    name = "table"

    def _choose(self, request_ids: Sequence[str], context_tokens: int, num_prefill_tokens: int) -> list[int]:
        length = self._static_k
        if self._rows:
            row = bisect_left(self._rows, len(request_ids), key=lambda row: row[0])
            length = self._rows[min(row, len(self._rows) - 1)][1]
        return [within(length, 0, self._limit)] * len(request_ids)


class Threshold(LengthRule):
    """One draft token less below 60 % of drafts accepted, one more above 90 %, never less than 1.

    A request is judged on `WINDOW_ROUNDS` rounds and then starts a new window, so that a length is judged on its own
    rounds. Until its first window is full it gets the engine's length. That starts at K and is judged the same way on all
    rounds of `WINDOW_ROUNDS` steps. Where a step's requests must get the same length, all get the engine's. The rule's
    weakness: accepted / drafted falls as k grows, however good the drafter.

    Source: the rule that AitherOS gives for its block size (aitherium.com, "DFlash", April 2026); the window is ours.
    """

    name = "threshold"
    DRAFTS_ALWAYS = True
    WINDOW_ROUNDS = 8
    SHRINK_BELOW, GROW_ABOVE = 0.6, 0.9

    def __init__(self, num_spec_tokens: int, seed: int = 0) -> None:
        super().__init__(num_spec_tokens, seed)
        self._engine = Window(self.num_spec_tokens)

    def _learn(self, rounds: list[Round]) -> None:
        engine_length, limit, requests = self._engine.length, self._limit, self._requests
        all_drafted = all_accepted = 0
        for request_id, drafted, accepted in rounds:
            all_drafted += drafted
            all_accepted += accepted
            request = requests.get(request_id)
            if request is None:
                self.start(request_id)
                request = requests[request_id]
            window = request.window
            window.num_rounds += 1
            window.num_drafted += drafted
            window.num_accepted += accepted
            if window.num_rounds >= self.WINDOW_ROUNDS:
                self._judge(window, window.length or engine_length, min(limit, request.ceiling))
        window = self._engine
        window.num_rounds += 1
        window.num_drafted += all_drafted
        window.num_accepted += all_accepted
        if window.num_rounds >= self.WINDOW_ROUNDS:
            self._judge(window, engine_length, limit)

    def _judge(self, window: Window, length: int, cap: int) -> None:
        rate = window.num_accepted / window.num_drafted
        move = (rate > self.GROW_ABOVE) - (rate < self.SHRINK_BELOW)
        window.length = max(min(min(length, cap) + move, cap), self._shortest)
        window.num_rounds = window.num_drafted = window.num_accepted = 0

    def _choose(self, request_ids: Sequence[str], context_tokens: int, num_prefill_tokens: int) -> list[int]:
        limit, get = self._limit, self._requests.get
        young = min(self._engine.length, limit)
        if self._shared_lengths:
            return [young] * len(request_ids)
        return [
            young
            if (request := get(request_id)) is None or not (length := request.window.length)
            else length
            if length < limit
            else limit
            for request_id in request_ids
        ]


class EmaTiers(LengthRule):
    """Tiers 1, 3, 7, 15, … K for the whole engine; an EMA of the accepted tokens of a round moves between them.

    Down to the tier below, of p tokens, while EMA ≤ p − 0.5 + DOWN; up from a tier of k tokens while EMA > k − 0.5 + UP. It is
    judged every 5 steps after the first 10, and starts at K with EMA = K − 1. SGLang now gives ranges of batch sizes
    their own EMA and tiers, tuned to its hardware; here one set serves all, as in its first version.

    Source: SGLang `AdaptiveStepSlot`, python/sglang/srt/speculative/adaptive_spec_params.py at 015c872, and its page
    advanced_features/adaptive_speculative_decoding; pull request 21599.
    """

    name = "ema"
    DRAFTS_ALWAYS = True
    WEIGHT = 0.2
    WARMUP_STEPS, INTERVAL_STEPS = 10, 5
    UP, DOWN = 0.0, -0.25
    """Tokens beyond the border, which lies half a token below a tier."""

    def __init__(self, num_spec_tokens: int, seed: int = 0) -> None:
        super().__init__(num_spec_tokens, seed)
        most = self.num_spec_tokens
        self.tiers = [2**power - 1 for power in range(1, most.bit_length() + 1) if 2**power - 1 < most] + [most]
        self._tier = len(self.tiers) - 1
        self._accepted = most - 1.0
        self._num_steps = 0

    def _learn(self, rounds: list[Round]) -> None:
        mean = sum([accepted for _, _, accepted in rounds]) / len(rounds)
        self._accepted += self.WEIGHT * (mean - self._accepted)
        self._num_steps += 1
        steps = self._num_steps - self.WARMUP_STEPS
        if steps > 0 and steps % self.INTERVAL_STEPS == 0:
            self._move()

    def _move(self) -> None:
        tiers = self.tiers
        while self._tier > 0 and self._accepted <= tiers[self._tier - 1] - 0.5 + self.DOWN:
            self._tier -= 1
        while self._tier < len(tiers) - 1 and self._accepted > tiers[self._tier] - 0.5 + self.UP:
            self._tier += 1

    def _choose(self, request_ids: Sequence[str], context_tokens: int, num_prefill_tokens: int) -> list[int]:
        return [min(self.tiers[self._tier], self._limit)] * len(request_ids)
