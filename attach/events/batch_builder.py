"""Turns the log's entries into the columns of an `EventBatch`, on the publisher's thread.

It takes one step at a time on purpose: the engine's thread may wait for the interpreter's lock meanwhile, and each piece of
work delays it by its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from honed.adapt.protocol.wire import RoundColumns, StepColumns
from honed.attach.events.outbox import Losses
from honed.attach.events.request_book import Tracked
from honed.attach.events.step_log import Over, Started, Step, Verified, losses_of


class Batch(NamedTuple):
    """Gathered steps and rounds, and their totals as vLLM counts them."""

    drafter_version: str
    workloads: list[str]
    steps: StepColumns
    rounds: RoundColumns
    holds: Losses


class BatchBuilder:
    """Follows the requests and gathers finished steps as the wire's columns."""

    MAX_ROUNDS = 4096
    MAX_STEPS = 256

    def __init__(self) -> None:
        self._running: dict[str, Tracked] = {}
        self.lost = Losses()
        """Rounds of requests missing in the log: it was full when they started."""
        self._clear()

    def _clear(self) -> None:
        self.drafter_version, self._has_token_ids = "", False
        self.num_steps = 0
        self._holds = Losses()
        self._workloads: dict[str, int] = {}
        self._steps: dict[str, list[Any]] = {name: [] for name in StepColumns.__struct_fields__}
        self._rounds: dict[str, list[Any]] = {name: [] for name in RoundColumns.__struct_fields__}

    @property
    def is_full(self) -> bool:
        """Whether the batch should go now."""
        return self.num_steps >= self.MAX_STEPS or len(self._rounds["step"]) >= self.MAX_ROUNDS

    def fits(self, step: Step) -> bool:
        """Whether the step may join: a batch has one drafter version, token ids for all rounds or none, and a bounded size.

        A lone step always fits.
        """
        if not self.num_steps:
            return True
        if step.has_token_ids != self._has_token_ids:
            return False
        is_small = len(self._rounds["step"]) + len(step.scheduled) <= self.MAX_ROUNDS and self.num_steps < self.MAX_STEPS
        return is_small and step.drafter_version == self.drafter_version

    def note(self, change: Started | Over) -> None:
        """Take in that a request came or went."""
        if isinstance(change, Over):
            self._running.pop(change.request_id, None)
        else:
            self._running[change.request_id] = change.request

    def add(self, step: Step) -> None:
        """Append a step's figures to the columns. A failure drops and counts the batch: its columns differ in length then."""
        held, lost = self._holds, self.lost
        try:
            self._add(step)
        except Exception:
            self._clear()
            self.lost = lost + held + losses_of(step.verified, step.invalid)
            raise

    def _add(self, step: Step) -> None:
        self.drafter_version, self._has_token_ids = step.drafter_version, step.has_token_ids
        self.num_steps += 1
        context_tokens = self._context_tokens(step)
        verified = self._known(step)
        plain = self._plain_rounds(step) if len(step.verified) < len(step.scheduled) else []
        self._holds += losses_of(verified, step.invalid)
        rows = [*verified, *plain]
        num_drafts = sum(map(len, step.drafts.values()))
        num_prefill = max(step.num_tokens - num_drafts - len(rows) - self._num_left(step), 0)
        trimmed = _trimmed(step, rows)
        num_trimmed = sum(trimmed)
        if step.padded:  # the target did compute these
            trimmed = [
                k - step.invalid.get(r, 0) - n if r in step.padded else t for (r, k, n), t in zip(rows, trimmed, strict=True)
            ]
        for name, value in (
            ("step", step.step),
            ("end_ns", step.end_ns),
            ("duration_us", step.duration_us),
            ("num_requests", len(step.scheduled)),
            ("num_tokens", step.num_tokens - num_trimmed),
            ("num_prefill_tokens", num_prefill),
            ("num_draft_tokens", num_drafts - num_trimmed),
            ("context_tokens", context_tokens),
            ("num_drafting", step.num_drafting),
            ("decision", step.decision),
        ):
            self._steps[name].append(value)
        self._add_rounds(step, rows)
        self._rounds["num_trimmed_tokens"] += trimmed
        # A padded round's struck drafts were padding. Behind a trimmed draft none was tried.
        self._rounds["num_struck_tokens"] += [
            0 if trim or r in step.padded else step.struck.get(r, 0) for (r, *_), trim in zip(rows, trimmed, strict=True)
        ]

    def _context_tokens(self, step: Step) -> int:
        # Prompt and output of all requests in the step, as before it; a prompt not computed yet counts whole.
        running = self._running
        return sum(running[request_id].num_tokens for request_id in step.scheduled if request_id in running)

    def _num_left(self, step: Step) -> int:
        """Decode rows computed for nothing: their requests ended, or were preempted, while the step was on its way."""
        running, row_of, drafts = self._running, step.row_of, step.drafts
        left = [r for r in step.scheduled if r not in running or r not in row_of]
        return sum(step.scheduled[request_id] - len(drafts.get(request_id, ())) == 1 for request_id in left)

    def _known(self, step: Step) -> list[Verified]:
        known = [one for one in step.verified if one[0] in self._running]
        if len(known) < len(step.verified):
            self.lost += losses_of((one for one in step.verified if one[0] not in self._running), step.invalid)
        return known

    def _plain_rounds(self, step: Step) -> list[Verified]:
        # Decode steps without drafts (k = 0). A request's first token comes from its prompt: that isn't a decode step.
        rows: list[Verified] = []
        for request_id, num_tokens in step.scheduled.items():
            if request_id in step.drafts:
                continue
            request, index = self._running.get(request_id), step.row_of.get(request_id, len(step.sampled))
            if request is None or index >= len(step.sampled) or not len(step.sampled[index]):
                continue
            if num_tokens == 1 and request.num_tokens > request.num_prompt_tokens:
                rows.append((request_id, 0, 0))
            else:
                request.num_tokens += 1
        return rows

    def _add_rounds(self, step: Step, rows: list[Verified]) -> None:
        requests = [self._running[row[0]] for row in rows]
        names, columns = self._workloads, self._rounds
        columns["step"] += [step.step] * len(rows)
        columns["request"] += [request.key for request in requests]
        columns["workload"] += [names.setdefault(request.workload, len(names)) for request in requests]
        columns["temperature"] += [request.temperature for request in requests]
        columns["position"] += [request.num_tokens - 1 for request in requests]
        columns["num_draft_tokens"] += [row[1] for row in rows]
        columns["num_accepted_tokens"] += [row[2] for row in rows]
        columns["num_invalid_tokens"] += [step.invalid.get(row[0], 0) for row in rows] if step.invalid else [0] * len(rows)
        delivered = [len(step.sampled[step.row_of[row[0]]]) for row in rows]
        columns["num_delivered"] += delivered
        if step.emitted is not None:
            emitted = [step.emitted[step.row_of[row[0]]] for row in rows]
            columns["num_emitted"] += map(len, emitted)
            for row, tokens in zip(rows, emitted, strict=True):
                columns["emitted"] += tokens
                columns["draft"] += step.drafts.get(row[0], ())
        else:
            columns["num_emitted"] += [row[2] + 1 for row in rows]
        if step.trees:
            self._add_trees(step, rows)
        else:
            columns["chain_tokens"] += [0] * len(rows)
            columns["chain_accepted"] += [0] * len(rows)
        for request, num_tokens in zip(requests, delivered, strict=True):
            request.num_tokens += num_tokens

    def _add_trees(self, step: Step, rows: list[Verified]) -> None:
        columns = self._rounds
        for request_id, _, num_accepted in rows:
            tree = step.trees.get(request_id)
            columns["chain_tokens"].append(tree.chain_tokens if tree else 0)
            columns["chain_accepted"].append(tree.chain_accepted if tree else 0)
            if tree:
                columns["nodes"] += tree.nodes[:num_accepted]

    def take(self) -> Batch:
        """Take the gathered batch; the builder is empty afterwards, and still knows the requests."""
        if not any(self._rounds["num_trimmed_tokens"]):
            self._rounds["num_trimmed_tokens"] = []
        if not any(self._rounds["num_struck_tokens"]):
            self._rounds["num_struck_tokens"] = []
        if not any(self._rounds["chain_tokens"]):
            self._rounds["chain_tokens"], self._rounds["chain_accepted"] = [], []
        if self._rounds["num_delivered"] == self._rounds["num_emitted"]:
            self._rounds["num_delivered"] = []
        steps, rounds = StepColumns(**self._steps), RoundColumns(**self._rounds)
        made = Batch(self.drafter_version, list(self._workloads), steps, rounds, self._holds)
        self._clear()
        return made


def _trimmed(step: Step, rows: Sequence[Verified]) -> list[int]:
    """Drafts of each round that the device didn't verify, without those that a grammar rejected."""
    if step.num_verified is None:
        return [0] * len(rows)
    verified, row_of, invalid = step.num_verified, step.row_of, step.invalid
    return [max(0, k - invalid.get(name, 0) - int(verified[row_of[name]])) for name, k, _ in rows]
