"""What the engine thread writes down of each step, and how that becomes the columns of an `EventBatch`.

The engine thread only appends tuples; everything that costs (columns, encoding, hashing of names) happens on the publisher's
thread. A `deque` is the hand-over: its append and popleft are atomic.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from honed.adapt.wire import RoundColumns, StepColumns
from honed.attach.request_book import Tracked


class Round(NamedTuple):
    """One request's decode rows in one step."""

    request: Tracked
    position: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_invalid_tokens: int
    num_emitted: int
    emitted: list[int]
    draft: list[int]


class Step(NamedTuple):
    """One engine step."""

    step: int
    end_ns: int
    duration_us: int
    num_requests: int
    num_tokens: int
    num_prefill_tokens: int
    num_draft_tokens: int
    context_tokens: int
    num_drafting: int
    decision: str
    drafter_version: str
    rounds: list[Round]


class StepLog:
    """The hand-over from engine thread to publisher thread, bounded in steps.

    When the publisher falls behind, the newest steps are refused and counted: the queue is only as long as the publisher's
    nap, so this means that its thread is dead or starved.
    """

    def __init__(self, max_steps: int = 100_000) -> None:
        self._steps: deque[Step] = deque()
        self._max_steps = max_steps
        self.lost_rounds = 0
        self.lost_draft_tokens = 0
        self.lost_accepted_tokens = 0

    def append(self, step: Step) -> None:
        """Engine thread: add a finished step."""
        if len(self._steps) >= self._max_steps:
            for entry in step.rounds:
                if entry.num_draft_tokens:
                    self.lost_rounds += 1
                    self.lost_draft_tokens += entry.num_draft_tokens - entry.num_invalid_tokens
                    self.lost_accepted_tokens += entry.num_accepted_tokens
            return
        self._steps.append(step)

    def __len__(self) -> int:
        return len(self._steps)

    def take(self, max_rounds: int = 4096) -> list[Step]:
        """Publisher thread: remove the oldest steps, as many as were run by one drafter version and fit `max_rounds`."""
        taken: list[Step] = []
        rounds = 0
        while self._steps:
            first = self._steps[0]
            if taken and (first.drafter_version != taken[0].drafter_version or rounds + len(first.rounds) > max_rounds):
                break
            taken.append(self._steps.popleft())
            rounds += len(first.rounds)
        return taken


def to_columns(steps: list[Step]) -> tuple[list[str], StepColumns, RoundColumns]:
    """Turn steps into the wire's columns: (workloads, steps, rounds)."""
    rounds = [(step.step, entry) for step in steps for entry in step.rounds]
    names: dict[str, int] = {}
    workload = [names.setdefault(entry.request.workload, len(names)) for _, entry in rounds]
    step_columns = StepColumns(
        step=[s.step for s in steps],
        end_ns=[s.end_ns for s in steps],
        duration_us=[s.duration_us for s in steps],
        num_requests=[s.num_requests for s in steps],
        num_tokens=[s.num_tokens for s in steps],
        num_prefill_tokens=[s.num_prefill_tokens for s in steps],
        num_draft_tokens=[s.num_draft_tokens for s in steps],
        context_tokens=[s.context_tokens for s in steps],
        num_drafting=[s.num_drafting for s in steps],
        decision=[s.decision for s in steps],
    )
    round_columns = RoundColumns(
        step=[step for step, _ in rounds],
        request=[r.request.key for _, r in rounds],
        workload=workload,
        position=[r.position for _, r in rounds],
        num_draft_tokens=[r.num_draft_tokens for _, r in rounds],
        num_accepted_tokens=[r.num_accepted_tokens for _, r in rounds],
        num_invalid_tokens=[r.num_invalid_tokens for _, r in rounds],
        temperature=[r.request.temperature for _, r in rounds],
        num_emitted=[r.num_emitted for _, r in rounds],
        emitted=[token for _, r in rounds for token in r.emitted],
        draft=[token for _, r in rounds for token in r.draft],
    )
    return list(names), step_columns, round_columns
