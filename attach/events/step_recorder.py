"""Records, on the engine's thread, a step's verify rounds as vLLM counts them, its size and its time.

Counts come from the one call where vLLM makes its own (`make_spec_decoding_stats`, in `attach/scheduler.py`), so the two can't
differ. Only references are kept here. Work that grows with the requests (rows, positions, columns) is done on the publisher's
thread, from objects that vLLM doesn't change once a step is over.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from honed.attach.events.request_book import Tracked
from honed.attach.events.step_log import DRAFT_IDS, NUM_VERIFIED, TREES, Over, Started, Step, StepLog, TreeRound, Verified

_NOTHING: dict[str, int] = {}


class Plan(NamedTuple):
    """Decisions made when a step was scheduled; needed again with its results.

    It waits on vLLM's output of the scheduler, which travels to the workers, on other hosts too. They get None in its place:
    they have no use for it, and honed may not be installed there.
    """

    step: int
    began_ns: int
    reason: str
    block: int
    drafter_version: str = ""
    """Version whose drafts the step verifies."""
    padded: Collection[str] = ()
    """Requests new to the batch, or back in it, whose drafts are padding. vLLM pads a step when only one token is left to
    compute, so that all rows are alike. And a scheduler that runs ahead counts on drafts that V1's worker has forgotten."""
    struck: Mapping[str, int] = MappingProxyType({})
    """Drafts that a grammar struck, behind those that the step verifies, by request."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class StepRecorder:
    """One step at a time: `begin`; `verified.append` for each request that had drafts; `end`.

    Args:
        log: takes finished steps, and requests that came and went between them.
    """

    def __init__(self, log: StepLog) -> None:
        self._log = log
        self.is_logging_token_ids = False
        self.verified: list[Verified] = []
        """The current step's rounds with drafts: (request id, drafts, accepted)."""
        self.invalid: Mapping[str, int] = _NOTHING
        """Drafts of the current step that a grammar rejected, by request."""
        self.trees: Mapping[str, TreeRound] = {}
        """Trees of the current step's rounds, by request."""
        self._output: Any = None
        self._row_of: Mapping[str, int] = _NOTHING
        self._sampled: Any = ()
        self._emitted: list[list[int]] | None = None
        self._drafts: Any = _NOTHING
        self._num_verified: Any = None
        self._later: list[Started | Over] = []
        """What came and went while the results of the current step are taken in: they are logged first."""
        self._ended_ns = 0
        self.spent_ns = 0
        """Time spent in the calls for the current step so far."""

    def started(self, request_id: str, request: Tracked) -> None:
        """Log a new request, or a session that goes on with more input."""
        self._note(Started(request_id, request))

    def over(self, request_id: str) -> None:
        """Log a request's end."""
        self._note(Over(request_id))

    def _note(self, entry: Started | Over) -> None:
        if self._output is None:
            self._log.append(entry)
        else:
            self._later.append(entry)

    def begin(self, output: Any, runner_output: Any, dropped: Collection[str] = ()) -> None:
        """Begin to take in a step's results, without the requests in `dropped`."""
        began_ns = time.perf_counter_ns()
        self.verified, self.invalid = [], output.num_invalid_spec_tokens or _NOTHING
        self._sampled, self._drafts = runner_output.sampled_token_ids, output.scheduled_spec_decode_tokens
        self._num_verified = getattr(runner_output, NUM_VERIFIED, None)
        self.trees = getattr(runner_output, TREES, {})
        self._emitted = None
        if self.is_logging_token_ids:  # copied: vLLM cuts the first lists where a request ends, and may change the second
            self._emitted = list(map(list, self._sampled))
            self._drafts = _draft_ids(self._drafts, runner_output)
        self._output, self._row_of = output, runner_output.req_id_to_index
        if dropped:
            self._row_of = {request_id: row for request_id, row in self._row_of.items() if request_id not in dropped}
        self.spent_ns = time.perf_counter_ns() - began_ns

    def end(self, plan: Plan) -> Step | None:
        """Log the finished step, and return it. A step without tokens isn't one."""
        began_ns = time.perf_counter_ns()
        output, step = self._output, None
        if output.total_num_scheduled_tokens:
            now_ns = time.monotonic_ns()
            # Under async scheduling steps overlap: a step's own time begins at the end of the one before it.
            duration_us = (now_ns - max(plan.began_ns, self._ended_ns)) // 1000
            self._ended_ns = now_ns
            step = Step(
                plan.step,
                now_ns,
                duration_us,
                output.total_num_scheduled_tokens,
                plan.block,
                plan.reason,
                plan.drafter_version,
                self.verified,
                output.num_scheduled_tokens,
                self._drafts,
                self._sampled,
                self._row_of,
                self.invalid,
                self._num_verified,
                self._emitted,
                plan.padded,
                self.trees,
                plan.struck,
            )
            self._log.append(step)
        self._output = None
        for entry in self._later:
            self._log.append(entry)
        self._later.clear()
        self.spent_ns += time.perf_counter_ns() - began_ns
        return step


def _draft_ids(drafts: Mapping[str, Sequence[int]], runner_output: Any) -> dict[str, list[int]]:
    """Copy of the scheduler's draft token ids, or of the runner's where the scheduler has placeholders."""
    rows = getattr(runner_output, DRAFT_IDS, None)
    if rows is None:
        return {request_id: list(tokens) for request_id, tokens in drafts.items()}
    row_of = runner_output.req_id_to_index
    return {request_id: rows[row_of[request_id], : len(tokens)].tolist() for request_id, tokens in drafts.items()}
