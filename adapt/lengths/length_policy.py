"""What every rule that chooses draft lengths looks like: the default, and those it is compared with.

Non-anticipating by construction: a rule is told of finished rounds (`observe`) and of a batch's shape (`decide`), never of
the draft tokens that its answer cuts. That, and not the quality of the answer, is what keeps sampled output unbiased.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Decision(NamedTuple):
    """Draft lengths of one step, in the order of the requests that were asked about."""

    num_draft_tokens: list[int]
    block: int
    """The largest of them: what the drafter has to draft; 0: it can be skipped."""
    reason: str


class LengthPolicy(Protocol):
    """A rule with the memory it needs. Nothing raises on odd input: an unknown request is taken up as workload "default"."""

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1) -> None:
        """Take up a request; `ceiling` is the most draft tokens it may get, -1: no limit of its own."""

    def finish(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""

    def observe(
        self,
        request_ids: Sequence[str],
        num_draft_tokens: Sequence[int],
        num_accepted_tokens: Sequence[int],
        features: Sequence[float] | None = None,
    ) -> None:
        """Learn from the finished rounds of a step, one per request; a round may have had no drafts."""

    def decide(
        self,
        request_ids: Sequence[str],
        context_tokens: int,
        num_prefill_tokens: int,
        now_s: float,
        contexts: Sequence[int] | None = None,
    ) -> Decision:
        """Choose the draft lengths of the decoding requests of a step.

        Args:
            context_tokens: sum of the requests' context lengths.
            num_prefill_tokens: prompt tokens that are computed in the same step.
            now_s: any monotonic clock, in seconds.
            contexts: context length of each request, for rules that want them.
        """


def round_down(length: int, lengths: Sequence[int]) -> int:
    """Return the longest of `lengths`, which ascend from 0, that isn't longer; the length itself where there are none."""
    return lengths[bisect_right(lengths, length) - 1] if lengths else length
