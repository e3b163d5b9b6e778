"""A stored log as arrays: what `adapt.replay` asks its questions of.

A step's `seconds` are what it cost, scheduling included: the time since the previous step's end where the engine was busy all
the while, else the step's own duration. It was busy if the step has a verify round: that round's request was unfinished when
the previous step ended.

Letters: S = steps, R = verify rounds, Q = requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from honed.adapt.acceptance import Floats, Ints
from honed.adapt.wire import EventBatch

_STEP_COLUMNS = (
    "step", "end_ns", "duration_us", "num_requests", "num_tokens", "num_prefill_tokens", "context_tokens", "num_drafting",
)  # fmt: skip
_ROUND_COLUMNS = ("step", "workload", "position", "num_draft_tokens", "num_accepted_tokens", "num_emitted")
_BOOT_STRIDE = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Log:
    """Steps in order, and their rounds in order of steps."""

    seconds: Floats  # [S] see above
    num_requests: Ints  # [S]
    num_tokens: Ints  # [S]
    num_prefill_tokens: Ints  # [S]
    context_tokens: Ints  # [S]
    block: Ints  # [S] drafted in the step
    step: Ints  # [R] index of the round's step
    request: Ints  # [R] 0 … Q−1; a request whose drafter was swapped counts as two
    position: Ints  # [R]
    drafted: Ints  # [R]
    accepted: Ints  # [R]
    emitted: Ints  # [R]
    is_struck: npt.NDArray[np.bool_]  # [R] a grammar struck out drafts: none beyond would have been verified
    cell: Ints  # [Q] index into `cells`
    cells: tuple[tuple[str, str], ...]
    """(workload, drafter version) of the requests."""

    @cached_property
    def rounds_in_step(self) -> Ints:
        """Rounds of each step, [S]."""
        return np.bincount(self.step, minlength=len(self.seconds))

    @cached_property
    def most_drafted(self) -> int:
        """Longest draft or block in the log."""
        return int(max(self.drafted.max(initial=0), self.block.max(initial=0)))

    @cached_property
    def is_block_fixed(self) -> bool:
        """Tell whether the runner drafts the same block whatever is asked for (vLLM's V2 runner)."""
        if len(np.unique(self.block)) != 1:
            return False
        return bool((self.drafted < self.block[0]).any())


class LogBuilder:
    """Gathers event batches of one engine, in the order of their arrival.

    Args:
        since_unix_ns, until_unix_ns: steps that ended in this span are wanted; the first is included, the second is not.
    """

    def __init__(self, since_unix_ns: float = -np.inf, until_unix_ns: float = np.inf) -> None:
        self._since, self._until = since_unix_ns, until_unix_ns
        self._boots: dict[str, int] = {}
        self._cells: dict[tuple[str, str], int] = {}
        self._steps: list[Ints] = []
        self._rounds: list[Ints] = []
        self._num_steps = 0
        self.first_unix_ns, self.last_unix_ns = 0, 0

    def add(self, batch: EventBatch) -> None:
        """Take in a batch. Raises ValueError, before anything was taken in, when its columns don't fit together."""
        steps = _columns(batch.steps, _STEP_COLUMNS)
        rounds = _columns(batch.rounds, _ROUND_COLUMNS)
        count = rounds.shape[1]
        invalid = np.array(batch.rounds.num_invalid_tokens or [0] * count, dtype=np.int64)
        request = np.array(batch.rounds.request, dtype=np.uint64)
        order = np.argsort(steps[0], kind="stable")
        steps = steps[:, order]
        place = np.searchsorted(steps[0], rounds[0])
        if not len(invalid) == len(request) == count or (count and not 0 <= rounds[1].min() <= rounds[1].max() < len(batch.workloads)):
            raise ValueError("the batch's round columns don't fit together")
        if count and (not steps.shape[1] or (steps[0, np.minimum(place, steps.shape[1] - 1)] != rounds[0]).any()):
            raise ValueError("the batch has a round of a step that it doesn't have")
        unix_ns = batch.sent_unix_ns - (batch.sent_mono_ns - steps[1])
        wanted = (unix_ns >= self._since) & (unix_ns < self._until)
        if not wanted.any():
            return
        boot = self._boots.setdefault(batch.boot_id, len(self._boots))
        names = [(name, batch.drafter_version) for name in batch.workloads]
        cells = np.array([self._cells.setdefault(name, len(self._cells)) for name in names], dtype=np.int64)
        new_place = np.cumsum(wanted) - 1 + self._num_steps
        mine = wanted[place] if count else np.zeros(0, dtype=bool)
        key = (request + np.uint64(boot) * _BOOT_STRIDE).view(np.int64)
        drafted = rounds[3] - np.maximum(invalid, 0)
        columns = [new_place[place] if count else place, key, cells[rounds[1]], rounds[2], drafted, rounds[4], rounds[5], invalid]
        self._rounds.append(np.stack(columns)[:, mine])
        self._steps.append(np.concatenate([steps, np.full((1, steps.shape[1]), boot)])[:, wanted])
        self._num_steps += int(wanted.sum())
        self.first_unix_ns = min(self.first_unix_ns or 1 << 62, int(unix_ns[wanted].min()))
        self.last_unix_ns = max(self.last_unix_ns, int(unix_ns[wanted].max()))

    def log(self) -> Log:
        """Make the log of what was gathered."""
        steps = np.concatenate([np.zeros((len(_STEP_COLUMNS) + 1, 0), dtype=np.int64), *self._steps], axis=1)
        rounds = np.concatenate([np.zeros((8, 0), dtype=np.int64), *self._rounds], axis=1)
        rounds = rounds[:, np.argsort(rounds[0], kind="stable")]
        place, key, cell, position, drafted, accepted, emitted, invalid = rounds
        drafted = np.maximum(drafted, 0)
        accepted = np.clip(accepted, 0, drafted)
        pairs, first, request = np.unique(
            np.stack([key, cell]), axis=1, return_index=True, return_inverse=True
        )  # a request's counts belong to the drafter that made them
        del pairs
        number, end_ns, duration_us, requests, tokens, prefill, context, block, boot = steps
        has_round = np.bincount(place, minlength=len(number)) > 0
        gap = np.diff(end_ns, prepend=end_ns[:1])
        follows = np.diff(number, prepend=number[:1]) == 1
        follows &= np.diff(boot, prepend=boot[:1]) == 0
        seconds = np.where(follows & has_round & (gap > 0), gap, np.maximum(duration_us, 1) * 1000) / 1e9
        return Log(
            seconds, requests, tokens, prefill, context, block, place, request.ravel(), position, drafted, accepted,
            np.where(emitted > 0, np.minimum(emitted, accepted + 1), accepted + 1), invalid > 0, cell[first], tuple(self._cells),
        )  # fmt: skip


def _columns(source: object, names: Sequence[str]) -> Ints:
    lists = [getattr(source, name) for name in names]
    if len({len(one) for one in lists}) > 1:
        raise ValueError("the batch has columns of unequal length")
    try:
        return np.array(lists, dtype=np.int64)
    except OverflowError as error:
        raise ValueError("the batch has a figure that doesn't fit into 64 bits") from error
