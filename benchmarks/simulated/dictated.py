"""Fixed draft lengths, and those of vLLM's own table, in the simulated engine."""

from __future__ import annotations

from collections.abc import Sequence

from honed.adapt.lengths.length_policy import Decision, dictated_length
from honed.adapt.protocol.wire import Policy


class Dictated:
    """Gives all requests `length` draft tokens; with a table the length of the first row whose batch is large enough."""

    def __init__(self, num_spec_tokens: int, length: int, table: Sequence[tuple[int, int]] = ()) -> None:
        kind = "table" if table else "static"
        self._policy = Policy(1, 1.0, kind, static_k=length, max_k=num_spec_tokens, table=list(table))

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1) -> None:
        """Ignore a request's start."""

    def finish(self, request_id: str) -> None:
        """Ignore a request's end."""

    def observe(self, request_ids: Sequence[str], num_draft_tokens: Sequence[int], num_accepted_tokens: Sequence[int]) -> None:
        """Learn nothing."""

    def decide(
        self,
        request_ids: Sequence[str],
        context_tokens: int,
        num_prefill_tokens: int,
        now_s: float,
        contexts: Sequence[int] | None = None,
    ) -> Decision:
        """Give the length for so many requests."""
        count = len(request_ids)
        length = dictated_length(self._policy, count, self._policy.max_k)
        return Decision([length] * count, length if count else 0, self._policy.kind)
