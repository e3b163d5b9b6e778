"""Shared parts of the rules in adapt.lengths.rules: requests, ceilings, limits, and the cleaning of input.

A rule implements one decision, `_choose`, and may learn from rounds, `_learn`. It depends on finished rounds, the batch's
shape, the limits and a seeded generator, never on the drafts to be cut. Nothing raises on odd input: figures are clamped,
unknown requests count as just started, surplus entries of unequal lists are ignored.

Letters: K = configured number of draft tokens, k = draft tokens of one request, bonus token not counted, α = acceptance.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeAlias

import numpy as np

from honed.adapt.lengths.length_policy import Decision, round_down
from honed.adapt.steps.step_time import StepTimeModel

MOST_REQUESTS = 1 << 20
"""If a caller never finishes requests, the oldest beyond so many are forgotten."""
_MOST_TOKENS = 1 << 40

Round: TypeAlias = tuple[str, int, int]
"""Request, drafted (1 … K) and accepted (0 … drafted) tokens of a round that had drafts."""


@dataclass(slots=True)
class Window:
    """Rounds since a length was last judged, in tokens. `length` 0: not judged yet."""

    length: int = 0
    num_rounds: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


@dataclass(slots=True)
class Request:
    """A running request's state for the rules."""

    ceiling: int
    window: Window = field(default_factory=Window)


class LengthRule(ABC):
    """A rule with its memory of requests; satisfies `LengthPolicy`."""

    name: ClassVar[str]
    DRAFTS_ALWAYS: ClassVar[bool] = False
    """Whether it never chooses 0. It learns only from drafts, so it would never leave 0."""

    def __init__(self, num_spec_tokens: int, seed: int = 0) -> None:
        self.num_spec_tokens = max(int(num_spec_tokens), 0)
        self._random = random.Random(seed)
        self._requests: dict[str, Request] = {}
        self._num_ceilings = 0
        self._limit = self._static_k = self.num_spec_tokens
        self._rows: list[tuple[int, int]] = []
        self._model = StepTimeModel()
        self._shared_lengths: list[int] = []

    def set_limits(
        self,
        max_k: int,
        static_k: int,
        table: Sequence[tuple[int, int]],
        model: StepTimeModel,
        shared_lengths: Sequence[int] = (),
    ) -> None:
        """Put a policy's figures in force; the learned state stays.

        Args:
            max_k: most draft tokens of any request.
            static_k: draft tokens of rules without other figures.
            table: rows (largest batch in requests, draft tokens), ascending.
            model: cost of steps, in seconds; with the empty one rules use their documented default costs.
            shared_lengths: lengths allowed where all requests of a step must get the same, ascending from 0; empty where they
                needn't.
        """
        self._limit = within(max_k, 0, self.num_spec_tokens)
        if shared_lengths:
            self._limit = round_down(self._limit, shared_lengths)
        self._shared_lengths = [length for length in shared_lengths if length <= self._limit]
        self._static_k = within(static_k, 0, self._limit)
        self._rows = sorted(table, key=lambda row: row[0])
        self._model = model
        if model.is_ready:
            model.token_seconds(np.array([1]))  # builds the table now rather than in the first decision

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1) -> None:
        """Add a request; a second time changes nothing. These rules ignore workloads."""
        if request_id in self._requests:
            return
        if len(self._requests) >= MOST_REQUESTS:
            self.finish(next(iter(self._requests)))
        limit = min(ceiling, self.num_spec_tokens) if ceiling >= 0 else self.num_spec_tokens
        self._requests[request_id] = Request(limit)
        self._num_ceilings += limit < self.num_spec_tokens

    def finish(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._num_ceilings -= request.ceiling < self.num_spec_tokens

    def observe(
        self,
        request_ids: Sequence[str],
        num_draft_tokens: Sequence[int],
        num_accepted_tokens: Sequence[int],
    ) -> None:
        """Learn from the finished rounds of a step; those without drafts teach nothing."""
        most = self.num_spec_tokens
        rounds = [
            (
                request_id,
                size := drafted if drafted < most else most,
                accepted if 0 <= accepted <= size else 0 if accepted < 0 else size,
            )
            for request_id, drafted, accepted in zip(request_ids, num_draft_tokens, num_accepted_tokens, strict=False)
            if drafted > 0 < most
        ]
        if rounds:
            self._learn(rounds)

    def decide(
        self,
        request_ids: Sequence[str],
        context_tokens: int,
        num_prefill_tokens: int,
        now_s: float,
        contexts: Sequence[int] | None = None,
    ) -> Decision:
        """Choose the draft lengths of the decoding requests of a step; `now_s` and `contexts` are ignored."""
        if not request_ids:
            return Decision([], 0, self.name)
        context, prefill = within(context_tokens, 0, _MOST_TOKENS), within(num_prefill_tokens, 0, _MOST_TOKENS)
        lengths = self._choose(request_ids, context, prefill)
        if self._shared_lengths:
            lengths = [self._share(lengths[0])] * len(lengths)
        if self._num_ceilings:
            get = self._requests.get
            lengths = [
                length if (request := get(request_id)) is None or length < request.ceiling else request.ceiling
                for request_id, length in zip(request_ids, lengths, strict=True)
            ]
        return Decision(lengths, max(lengths), self.name)

    @property
    def _shortest(self) -> int:
        """The shortest allowed length above 0."""
        return self._shared_lengths[1] if len(self._shared_lengths) > 1 else 1

    def _share(self, length: int) -> int:
        return round_down(max(length, self._shortest) if self.DRAFTS_ALWAYS else length, self._shared_lengths)

    @abstractmethod
    def _learn(self, rounds: list[Round]) -> None:
        """Learn from the rounds of one step, one or more."""

    @abstractmethod
    def _choose(self, request_ids: Sequence[str], context_tokens: int, num_prefill_tokens: int) -> list[int]:
        """Choose lengths within 0 … limit for one request or more, the same for all where they are shared.

        Ceilings, and rounding to a shared length, are applied afterwards.
        """


def within(value: int, low: int, high: int) -> int:
    """Return the value, or the end of [low, high] that it lies beyond."""
    return min(max(value, low), high)
