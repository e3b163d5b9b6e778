"""Interface of all rules that choose draft lengths, and the lengths that a policy dictates.

Non-anticipating by construction: a rule gets finished rounds (`observe`) and a batch's shape (`decide`), never the draft tokens
that its answer cuts. This keeps sampled output unbiased, whatever the quality of the answer.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from honed.adapt.protocol.wire import Policy


class Decision(NamedTuple):
    """Draft lengths of one step, in the order of the given requests."""

    num_draft_tokens: list[int]
    block: int
    """The largest of them, which the drafter must draft; 0: it can be skipped."""
    reason: str
    has_trees: bool = False
    """Whether the drafts are to be the nodes of trees."""


class LengthPolicy(Protocol):
    """A rule with its memory. Nothing raises on odd input: an unknown request is added as workload "default"."""

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1) -> None:
        """Add a request; `ceiling` is its most draft tokens, -1: no limit of its own."""

    def finish(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""

    def observe(
        self,
        request_ids: Sequence[str],
        num_draft_tokens: Sequence[int],
        num_accepted_tokens: Sequence[int],
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


def dictated_length(policy: Policy, count: int, limit: int) -> int:
    """Return the draft tokens that kinds without prices give each of so many requests, within 0 … limit.

    "table" is as vLLM's `num_speculative_tokens_per_batch_size`: the first row whose batch is large enough, else the last.
    Other kinds, and a table without rows, give `static_k`. vLLM counts every request scheduled in the step, this decoding ones.
    """
    length = policy.static_k
    if policy.kind == "table" and policy.table:
        length = next((row[1] for row in policy.table if count <= row[0]), policy.table[-1][1])
    return min(max(length, 0), limit)
