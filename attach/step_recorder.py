"""Writes down, on the engine's thread, what a step did: its verify rounds as vLLM counts them, its size, its time.

Counts come from the one call where vLLM makes its own (`make_spec_decoding_stats`), so that the two can't differ. Only
references and small integers are gathered here; columns, hashes and encoding are the publisher's.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from honed.attach.request_book import RequestBook
from honed.attach.step_log import Round, Step, StepLog

_NO_TOKENS: list[int] = []


class Plan(NamedTuple):
    """What was decided when a step was scheduled; needed again when its results are there."""

    step: int
    began_ns: int
    reason: str
    block: int
    context_tokens: int
    drafter_version: str = ""
    """Whose drafts the step verifies."""


class StepRecorder:
    """One step at a time: `begin`, `round_verified` for each request that had drafts, `end`.

    Args:
        requests: vLLM's running requests by id.
        book: what is known of them.
        log: where finished steps go.
    """

    def __init__(self, requests: dict[str, Any], book: RequestBook, log: StepLog) -> None:
        self._requests = requests
        self._book = book
        self._log = log
        self.is_logging_token_ids = False
        self._output: Any = None
        self._runner_output: Any = None
        self._rounds: list[Round] = []
        self._ended_ns = 0
        self.spent_ns = 0
        """Time that the calls for the current step took so far."""
        self.request_ids: list[str] = []
        self.num_drafts: list[int] = []
        self.num_accepted: list[int] = []
        """The step's rounds with drafts, as `Decider.observe` takes them: drafts without those that a grammar struck out."""

    def begin(self, output: Any, runner_output: Any) -> None:
        """A step's results are about to be taken in; positions are still the old ones."""
        began_ns = time.perf_counter_ns()
        self._output, self._runner_output = output, runner_output
        self._rounds, self.request_ids, self.num_drafts, self.num_accepted = [], [], [], []
        if len(output.scheduled_spec_decode_tokens) < len(output.num_scheduled_tokens):
            self._note_plain_rounds(output)
        self.spent_ns = time.perf_counter_ns() - began_ns

    def _note_plain_rounds(self, output: Any) -> None:
        # Decode steps without drafts (k = 0). A request's first token comes from its prompt: that is no decode step.
        drafts = output.scheduled_spec_decode_tokens
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            if num_tokens == 1 and request_id not in drafts:
                request = self._requests.get(request_id)
                if request is not None and request.num_output_tokens:
                    self._note(request_id, request, 0, 0, 0)

    def round_verified(self, request_id: str, num_draft: int, num_accepted: int, invalid: dict[str, int] | None) -> None:
        """vLLM has counted a verify round."""
        began_ns = time.perf_counter_ns()
        num_invalid = invalid.get(request_id, 0) if invalid else 0
        if num_draft and self._note(request_id, self._requests[request_id], num_draft, num_accepted, num_invalid):
            self.request_ids.append(request_id)
            self.num_drafts.append(num_draft - num_invalid)
            self.num_accepted.append(num_accepted)
        self.spent_ns += time.perf_counter_ns() - began_ns

    def _note(self, request_id: str, request: Any, num_draft: int, num_accepted: int, num_invalid: int) -> bool:
        tracked = self._book.get(request_id)
        if tracked is None:
            return False
        emitted = drafted = _NO_TOKENS
        num_emitted = num_accepted + 1
        if self.is_logging_token_ids:
            # Copied: vLLM cuts the first list at a stop, and may still change the second.
            emitted = list(self._runner_output.sampled_token_ids[self._runner_output.req_id_to_index[request_id]])
            drafted = list(self._output.scheduled_spec_decode_tokens.get(request_id, ()))
            num_emitted = len(emitted)
        position = request.num_tokens - 1
        self._rounds.append(
            Round(tracked, position, num_draft, num_accepted, num_invalid, num_emitted, emitted, drafted)
        )  # fmt: skip
        return True

    def end(self, plan: Plan) -> None:
        """The step is over: log it. A step without tokens isn't one."""
        began_ns = time.perf_counter_ns()
        output, rounds = self._output, self._rounds
        num_tokens = output.total_num_scheduled_tokens
        if num_tokens:
            now_ns = time.monotonic_ns()
            num_drafts = sum(map(len, output.scheduled_spec_decode_tokens.values()))
            # Under async scheduling steps overlap: a step's own time begins when the one before it ended.
            duration_us = (now_ns - max(plan.began_ns, self._ended_ns)) // 1000
            self._ended_ns = now_ns
            self._log.append(
                Step(
                    step=plan.step,
                    end_ns=now_ns,
                    duration_us=duration_us,
                    num_requests=len(output.num_scheduled_tokens),
                    num_tokens=num_tokens,
                    num_prefill_tokens=max(num_tokens - num_drafts - len(rounds), 0),
                    num_draft_tokens=num_drafts,
                    context_tokens=plan.context_tokens,
                    num_drafting=plan.block,
                    decision=plan.reason,
                    drafter_version=plan.drafter_version,
                    rounds=rounds,
                )
            )
        self._output = self._runner_output = None
        self.spent_ns += time.perf_counter_ns() - began_ns
