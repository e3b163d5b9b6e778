"""Counts the drafts that a grammar strikes before they are verified (structured outputs).

vLLM keeps of a request's drafts the longest prefix that its grammar allows. The first draft behind it was made, and could never
be accepted: the round tried it, and it was refused. A scheduler that waits for the drafts never schedules the struck ones. One
that runs ahead has scheduled placeholders, and pads the kept drafts with -1.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


class StruckDrafts:
    """The running requests that have a grammar, and their struck drafts until they are scheduled."""

    def __init__(self) -> None:
        self._with_grammar: set[str] = set()
        self._struck: dict[str, tuple[int, int]] = {}
        """Drafts kept and struck, of requests that have yet to be scheduled with them."""

    def start(self, request: Any) -> None:
        """Take in a new request."""
        if request.use_structured_output:
            self._with_grammar.add(request.request_id)

    def finish(self, request_id: str) -> None:
        """Forget a request; an unknown one is fine."""
        self._with_grammar.discard(request_id)
        self._struck.pop(request_id, None)

    def drop(self, request_id: str) -> None:
        """Forget a request's drafts: vLLM has dropped them."""
        self._struck.pop(request_id, None)

    def offered(self, request_ids: Sequence[str], drafts: Sequence[Sequence[int]]) -> dict[str, int]:
        """Count the drafts, without padding, of the requests with a grammar, before it judges them."""
        mine = self._with_grammar
        return {r: _num_drafts(tokens) for r, tokens in zip(request_ids, drafts, strict=True) if r in mine} if mine else {}

    def judged(self, offered: Mapping[str, int], requests: Mapping[str, Any]) -> None:
        """Note what the grammars left of the offered drafts, which wait on the requests to be scheduled."""
        for request_id, num_offered in offered.items():
            request = requests.get(request_id)
            kept = num_offered if request is None or request.is_prefill_chunk else len(request.spec_token_ids)
            if kept < num_offered:
                self._struck[request_id] = kept, num_offered - kept
            else:
                self._struck.pop(request_id, None)

    def scheduled(self, output: Any) -> dict[str, int]:
        """Take the struck drafts of the requests in a step, if it verifies all the kept ones: none is tried behind a gap."""
        found: dict[str, int] = {}
        for request_id in self._struck.keys() & output.num_scheduled_tokens.keys():
            kept, struck = self._struck.pop(request_id)
            if len(output.scheduled_spec_decode_tokens.get(request_id, ())) == kept:
                found[request_id] = struck
        return found

    def unjudged(self, output: Any) -> list[str]:
        """Requests with a grammar whose drafts of a step it never saw: vLLM left placeholders, and accepts none."""
        drafts, invalid = output.scheduled_spec_decode_tokens, output.num_invalid_spec_tokens or ()
        mine = self._with_grammar & drafts.keys() if self._with_grammar else ()
        return [r for r in mine if r not in invalid and drafts[r] and drafts[r][0] < 0]


def struck_in_output(offered: Mapping[str, int], output: Any) -> dict[str, int]:
    """Struck drafts of a step that was scheduled with placeholders, which are now the kept drafts and padding."""
    drafts, invalid = output.scheduled_spec_decode_tokens, output.num_invalid_spec_tokens
    found = {}
    for request_id in offered.keys() & invalid.keys():
        scheduled = len(drafts[request_id])
        if (struck := min(offered[request_id], scheduled) - (scheduled - invalid[request_id])) > 0:
            found[request_id] = struck
    return found


def with_struck(
    verified: Sequence[tuple[str, int, int]],
    invalid: Mapping[str, int],
    struck: Mapping[str, int],
    answered: Collection[str],
) -> list[tuple[str, int, int]]:
    """Rounds as they teach: with the struck drafts, without padding; and those of `answered` requests with no kept draft."""
    rounds = [(r, drafts - invalid.get(r, 0) + struck.get(r, 0), accepted) for r, drafts, accepted in verified]
    had_drafts = {request_id for request_id, *_ in verified} if struck else set()
    rounds += [(r, struck[r], 0) for r in struck if r not in had_drafts and r in answered]
    return [one for one in rounds if one[1] > 0]


def _num_drafts(tokens: Sequence[int]) -> int:
    return next((i for i, token in enumerate(tokens) if token < 0), len(tokens))
