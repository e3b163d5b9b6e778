"""What the engine thread writes down of each step, and how that becomes the columns of an `EventBatch`.

The engine thread only appends tuples; everything that costs (columns, encoding, hashing of names) happens on the publisher's
thread. A `deque` is the hand-over: its append and popleft are atomic.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from honed.adapt.wire import RoundColumns, StepColumns
from honed.attach.outbox import Losses
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
        self.lost = Losses()

    def append(self, step: Step) -> None:
        """Engine thread: add a finished step."""
        if len(self._steps) >= self._max_steps:
            self.lost += losses_of(step.rounds)
            return
        self._steps.append(step)

    def __len__(self) -> int:
        return len(self._steps)

    def take(self) -> Step | None:
        """Publisher thread: remove the oldest step; None when there is none."""
        return self._steps.popleft() if self._steps else None


class BatchBuilder:
    """Gathers finished steps as the wire's columns, step by step.

    A little at a time on purpose: this runs while the engine's thread may be waiting for the interpreter's lock, and what
    is done in one go holds it up for that long.
    """

    MAX_ROUNDS = 4096
    MAX_STEPS = 256

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.drafter_version = ""
        self.num_steps = 0
        self.holds = Losses()
        self._workloads: dict[str, int] = {}
        self._steps: dict[str, list[Any]] = {name: [] for name in StepColumns.__struct_fields__}
        self._rounds: dict[str, list[Any]] = {name: [] for name in RoundColumns.__struct_fields__}

    @property
    def is_full(self) -> bool:
        """Whether the batch should go now."""
        return self.num_steps >= self.MAX_STEPS or len(self._rounds["step"]) >= self.MAX_ROUNDS

    def fits(self, step: Step) -> bool:
        """Whether the step may join: a batch was run by one drafter version, and is bounded (a lone step always fits)."""
        if not self.num_steps:
            return True
        is_small = len(self._rounds["step"]) + len(step.rounds) <= self.MAX_ROUNDS and self.num_steps < self.MAX_STEPS
        return is_small and step.drafter_version == self.drafter_version

    def add(self, step: Step) -> None:
        """Append a step's figures to the columns."""
        self.drafter_version = step.drafter_version
        self.num_steps += 1
        for name, column in self._steps.items():
            column.append(getattr(step, name))
        rounds, names, columns = step.rounds, self._workloads, self._rounds
        columns["step"] += [step.step] * len(rounds)
        columns["request"] += [r.request.key for r in rounds]
        columns["workload"] += [names.setdefault(r.request.workload, len(names)) for r in rounds]
        columns["temperature"] += [r.request.temperature for r in rounds]
        for name in ("position", "num_draft_tokens", "num_accepted_tokens", "num_invalid_tokens", "num_emitted"):
            columns[name] += [getattr(r, name) for r in rounds]
        for r in rounds:
            columns["emitted"] += r.emitted
            columns["draft"] += r.draft
        self.holds += losses_of(rounds)

    def take(self) -> tuple[list[str], StepColumns, RoundColumns]:
        """(workloads, steps, rounds) of what was gathered; the builder is empty afterwards."""
        made = list(self._workloads), StepColumns(**self._steps), RoundColumns(**self._rounds)
        self._clear()
        return made


def losses_of(rounds: Sequence[Round]) -> Losses:
    """What vLLM has counted for these rounds, should they get lost."""
    drafted = [r for r in rounds if r.num_draft_tokens]
    return Losses(
        rounds=len(drafted),
        draft_tokens=sum(r.num_draft_tokens - r.num_invalid_tokens for r in drafted),
        accepted_tokens=sum(r.num_accepted_tokens for r in drafted),
    )
