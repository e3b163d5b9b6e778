"""A stored log as arrays, the input of `adapt.replay.replay`.

A step's `seconds` are its cost, scheduling included: the time since the previous step's end if the engine was busy all the
while, else the step's own duration. It was busy if the step has a verify round: that round's request was unfinished when the
previous step ended.

Letters: S = steps, R = verify rounds, Q = requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from honed.adapt.acceptance.rounds import struck_tokens, trimmed_tokens
from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.protocol.wire import EventBatch

_STEP_COLUMNS = (
    "step",
    "end_ns",
    "duration_us",
    "num_requests",
    "num_tokens",
    "num_prefill_tokens",
    "context_tokens",
    "num_drafting",
)
_ROUND_COLUMNS = ("step", "workload", "position", "num_draft_tokens", "num_accepted_tokens")
_STRIDE = np.array([0xD6E8FEB86659FD93], dtype=np.uint64)
_MOST_CELLS = 4096


@dataclass(frozen=True)
class Log:
    """Steps in order, and their rounds in order of steps. A request whose drafter was swapped counts as two."""

    seconds: Floats  # [S] see above
    num_requests: Ints  # [S]
    num_tokens: Ints  # [S]
    num_prefill_tokens: Ints  # [S]
    context_tokens: Ints  # [S]
    block: Ints  # [S] drafted in the step
    step: Ints  # [R] index of the round's step
    request: Ints  # [R] 0 … Q−1
    position: Ints  # [R]
    drafted: Ints  # [R] without drafts that a grammar struck or vLLM trimmed
    accepted: Ints  # [R]
    emitted: Ints  # [R] up to the request's end
    is_struck: npt.NDArray[np.bool_]  # [R] a grammar struck drafts: none beyond would have been verified
    cell: Ints  # [Q] index into `cells`
    cells: tuple[tuple[str, str], ...]
    """(workload, drafter version)."""

    @cached_property
    def rounds_in_step(self) -> Ints:
        """Rounds of each step, [S]."""
        return np.bincount(self.step, minlength=len(self.seconds))

    @cached_property
    def most_drafted(self) -> int:
        """Longest draft or block in the log."""
        return int(max(self.drafted.max(initial=0), self.block.max(initial=0)))


class LogBuilder:
    """Gathers event batches of one engine, in the order of their arrival.

    Args:
        since_unix_ns, until_unix_ns: span of the wanted steps' ends; the first is included, the second is not.
    """

    def __init__(self, since_unix_ns: float = -np.inf, until_unix_ns: float = np.inf) -> None:
        self._since, self._until = since_unix_ns, until_unix_ns
        self._boots: dict[str, int] = {}
        self._cells: dict[tuple[str, str], int] = {}
        self._steps: list[Ints] = []
        self._rounds: list[Ints] = []
        self._num_steps = 0
        self.num_rounds = 0
        """Rounds of wanted steps."""
        self.num_trees = 0
        """Those among them that verified a draft tree: what another length would have given isn't in their figures."""
        self.first_tree_unix_ns = 0
        """End of the first step with one; 0: none."""
        self.first_unix_ns, self.last_unix_ns = 0, 0
        """Ends of the first and the last step; 0 before there is any."""

    def add(self, batch: EventBatch) -> None:
        """Take in a batch. Raises ValueError, before any of it is taken in, when its columns don't fit together."""
        steps, rounds = _columns(batch.steps, _STEP_COLUMNS), _columns(batch.rounds, _ROUND_COLUMNS)
        steps = steps[:, np.argsort(steps[0], kind="stable")]
        count = rounds.shape[1]
        invalid = np.array(batch.rounds.num_invalid_tokens or [0] * count, dtype=np.int64)
        trimmed, struck = trimmed_tokens(batch.rounds, count), struck_tokens(batch.rounds, count)
        delivered = np.array(batch.rounds.num_delivered or batch.rounds.num_emitted, dtype=np.int64)
        request = np.array(batch.rounds.request, dtype=np.uint64)
        if not len(invalid) == len(request) == len(delivered) == len(batch.rounds.chain_tokens or invalid) == count:
            raise ValueError("the batch has round columns of unequal length")
        if count and not 0 <= rounds[1].min() <= rounds[1].max() < len(batch.workloads):
            raise ValueError("the batch names a workload by an index that its list of workloads doesn't have")
        if not np.isin(rounds[0], steps[0]).all():
            raise ValueError("the batch has a round of a step that it doesn't have")
        unix_ns = batch.sent_unix_ns - (batch.sent_mono_ns - steps[1])
        is_wanted = (unix_ns >= self._since) & (unix_ns < self._until)
        if not is_wanted.any():
            return
        boot = self._boots.setdefault(batch.boot_id, len(self._boots))
        names = [(name, batch.drafter_version) for name in batch.workloads]
        cells = np.array([self._cells.setdefault(name, len(self._cells)) for name in names], dtype=np.int64)
        place = np.searchsorted(steps[0], rounds[0])
        cell = cells[rounds[1]] if count else rounds[1]
        key = (request + (boot * _MOST_CELLS + cell).astype(np.uint64) * _STRIDE).view(np.int64)
        columns = (
            np.cumsum(is_wanted)[place] - 1 + self._num_steps,
            key,
            cell,
            *rounds[2:],
            delivered,
            invalid,
            trimmed,
            struck,
        )
        self._rounds.append(np.stack(columns)[:, is_wanted[place]])
        self._steps.append(np.concatenate([steps, np.full((1, steps.shape[1]), boot)])[:, is_wanted])
        if batch.rounds.chain_tokens:
            is_tree = (np.array(batch.rounds.chain_tokens) > 0) & is_wanted[place]
            self.num_trees += int(is_tree.sum())
            if is_tree.any():
                first_ns = int(unix_ns[place[is_tree]].min())
                self.first_tree_unix_ns = min(self.first_tree_unix_ns or first_ns, first_ns)
        self._num_steps += int(is_wanted.sum())
        self.num_rounds += self._rounds[-1].shape[1]
        self.first_unix_ns = min(self.first_unix_ns or 1 << 62, int(unix_ns[is_wanted].min()))
        self.last_unix_ns = max(self.last_unix_ns, int(unix_ns[is_wanted].max()))

    def log(self) -> Log:
        """Make the log of the gathered batches."""
        steps = np.concatenate([np.zeros((len(_STEP_COLUMNS) + 1, 0), dtype=np.int64), *self._steps], axis=1)
        rounds = np.concatenate([np.zeros((len(_ROUND_COLUMNS) + 5, 0), dtype=np.int64), *self._rounds], axis=1)
        rounds = rounds[:, np.argsort(rounds[0], kind="stable")]
        step, key, cell, position, drafted, accepted, emitted, invalid, trimmed, struck = rounds
        number, end_ns, duration_us, requests, tokens, prefill, context, block, boot = steps
        drafted = np.maximum(drafted - np.maximum(invalid, 0) - trimmed, 0)
        accepted = np.clip(accepted, 0, drafted)
        emitted = np.where(emitted > 0, np.minimum(emitted, accepted + 1), accepted + 1)
        _, first, request = np.unique(key, return_index=True, return_inverse=True)
        since_last = np.diff(end_ns, prepend=end_ns[:1])
        follows = (np.diff(number, prepend=number[:1]) == 1) & (np.diff(boot, prepend=boot[:1]) == 0)
        is_busy = follows & (np.bincount(step, minlength=len(number)) > 0) & (since_last > 0)
        seconds = np.where(is_busy, since_last, np.maximum(duration_us, 1) * 1000) / 1e9
        return Log(
            seconds,
            requests,
            tokens,
            prefill,
            context,
            block,
            step,
            request,
            position,
            drafted,
            accepted,
            emitted,
            (invalid > 0) | (struck > 0),
            cell[first],
            tuple(self._cells),
        )


def _columns(source: object, names: Sequence[str]) -> Ints:
    lists = [getattr(source, name) for name in names]
    if len({len(one) for one in lists}) > 1:
        raise ValueError("the batch has columns of unequal length")
    try:
        return np.array(lists, dtype=np.int64)
    except OverflowError as error:
        raise ValueError("the batch has a figure that doesn't fit into 64 bits") from error
