"""Counts verify rounds: a batch in, sums by second and workload out.

Positions count from 0 for the first draft token. Of the rounds with at least one draft token,

    drafted[j]  = rounds whose draft was longer than j
    tried[j]    = of these, rounds that verified draft j and accepted all drafts before it: the trials of a_j
    accepted[j] = of these, rounds that also accepted draft j: the successes of a_j

so a_j = accepted[j] / tried[j] for any draft lengths. Of a draft tree they are those of the drafter's own chain in it, and tell
about the drafter whatever the tree's size; `beyond` has the accepted nodes that the chain lacks. Without trees Σ drafted are
the draft tokens and Σ accepted the accepted ones.
A round without draft tokens is a plain decode step; it counts in `plain_rounds` and `delivered_tokens` only.

These are vLLM's own counts, but for `delivered_tokens`: vLLM also accepts tokens past a request's end, which nobody gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from honed.adapt.acceptance.rounds import accepted_nodes
from honed.adapt.protocol.wire import EventBatch

RESOLUTIONS_S = (1, 60, 3600)
MAX_DRAFT_TOKENS = 4096
"""A longer draft marks a batch as malformed."""

Ints = NDArray[np.int64]


class MalformedBatchError(ValueError):
    """The batch decodes but its columns contradict each other."""


def no_positions() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(slots=True)
class Counts:
    """Sums over verify rounds, which can be added."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    delivered_tokens: int = 0
    plain_rounds: int = 0
    tree_rounds: int = 0
    tree_nodes: int = 0
    tree_accepted_tokens: int = 0
    chain_accepted_tokens: int = 0
    """Of trees: tokens that the drafter's own chain in them would have got."""
    drafted: Ints = field(default_factory=no_positions)  # [K]
    tried: Ints = field(default_factory=no_positions)  # [K]
    accepted: Ints = field(default_factory=no_positions)  # [K]
    beyond: Ints = field(default_factory=no_positions)  # [K]
    """Rounds with more than j accepted tokens, without those whose chain alone has so many; empty without trees."""

    def add(self, other: Counts) -> None:
        """Add `other` to this in place."""
        self.rounds += other.rounds
        self.draft_tokens += other.draft_tokens
        self.accepted_tokens += other.accepted_tokens
        self.delivered_tokens += other.delivered_tokens
        self.plain_rounds += other.plain_rounds
        self.tree_rounds += other.tree_rounds
        self.tree_nodes += other.tree_nodes
        self.tree_accepted_tokens += other.tree_accepted_tokens
        self.chain_accepted_tokens += other.chain_accepted_tokens
        self.drafted = add_positions(self.drafted, other.drafted)
        self.tried = add_positions(self.tried, other.tried)
        self.accepted = add_positions(self.accepted, other.accepted)
        self.beyond = add_positions(self.beyond, other.beyond)

    @property
    def emitted_tokens(self) -> int:
        """Tokens that vLLM sampled, past a request's end too."""
        return self.rounds + self.accepted_tokens + self.plain_rounds

    @property
    def acceptance_length(self) -> float:
        """vLLM's own figure, bonus token included: 1 + accepted / rounds; 0 without rounds."""
        return 1.0 + self.accepted_tokens / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Tokens delivered per round with drafts: a plain round delivers one; 0 without rounds."""
        return (self.delivered_tokens - self.plain_rounds) / self.rounds if self.rounds else 0.0

    @property
    def acceptance_rate(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def draft_tokens_per_round(self) -> float:
        return self.draft_tokens / self.rounds if self.rounds else 0.0

    @property
    def tree_share(self) -> float:
        """Share of the rounds with drafts that verified a draft tree; 0 without rounds."""
        return self.tree_rounds / self.rounds if self.rounds else 0.0

    def accepted_histogram(self) -> Ints:
        """Rounds by number of accepted drafts, 0 … K."""  # [K + 1]
        at_least = np.concatenate(([self.rounds], add_positions(self.accepted, self.beyond), [0]))
        histogram: Ints = at_least[:-1] - at_least[1:]
        return histogram

    def row(self) -> dict[str, Any]:
        """Database columns."""
        return {
            "rounds": self.rounds,
            "draft_tokens": self.draft_tokens,
            "accepted_tokens": self.accepted_tokens,
            "delivered_tokens": self.delivered_tokens,
            "plain_rounds": self.plain_rounds,
            "tree_rounds": self.tree_rounds,
            "tree_nodes": self.tree_nodes,
            "tree_accepted_tokens": self.tree_accepted_tokens,
            "chain_accepted_tokens": self.chain_accepted_tokens,
            "drafted_by_position": to_json(self.drafted),
            "tried_by_position": to_json(self.tried),
            "accepted_by_position": to_json(self.accepted),
            "beyond_by_position": to_json(self.beyond),
        }

    @classmethod
    def from_sums(cls, row: dict[str, Any]) -> Counts:
        """From the columns SUMS and, if there, POSITION_SUMS of a query. Sums of no rows are 0."""
        found: dict[str, Any] = {name: row[name] or 0 for name in COUNT_COLUMNS}
        found |= {name.partition("_")[0]: sum_json(row[name] or "") for name in POSITION_COLUMNS if name in row}
        return cls(**found)

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Counts:
        """From database columns (of `boots` or `rollups`)."""
        return cls(
            row["rounds"],
            row["draft_tokens"],
            row["accepted_tokens"],
            row["delivered_tokens"],
            row["plain_rounds"],
            row["tree_rounds"],
            row["tree_nodes"],
            row["tree_accepted_tokens"],
            row["chain_accepted_tokens"],
            from_json(row["drafted_by_position"]),
            from_json(row["tried_by_position"]),
            from_json(row["accepted_by_position"]),
            from_json(row["beyond_by_position"]),
        )


COUNT_COLUMNS = (
    "rounds",
    "draft_tokens",
    "accepted_tokens",
    "delivered_tokens",
    "plain_rounds",
    "tree_rounds",
    "tree_nodes",
    "tree_accepted_tokens",
    "chain_accepted_tokens",
)
POSITION_COLUMNS = ("drafted_by_position", "tried_by_position", "accepted_by_position", "beyond_by_position")
SUMS = ", ".join(f"sum({name}) AS {name}" for name in COUNT_COLUMNS)
POSITION_SUMS = ", ".join(f"group_concat({name}) AS {name}" for name in POSITION_COLUMNS)
"""Columns of a query over many rows of `boots` or `rollups`, for `Counts.from_sums`."""


@dataclass(slots=True)
class BatchCounts:
    """Sums of a batch: by (second, workload), and total."""

    cells: dict[tuple[int, str], Counts] = field(default_factory=dict)
    total: Counts = field(default_factory=Counts)
    steps: int = 0
    malformed: str = ""


def add_positions(a: Ints, b: Ints) -> Ints:
    """a + b, with the shorter padded by zeros."""
    if len(a) < len(b):
        a, b = b, a
    out = a.copy()
    out[: len(b)] += b
    return out


def to_json(positions: Ints) -> str:
    return msgspec.json.encode(positions.tolist()).decode()


def from_json(text: str) -> Ints:
    return np.array(msgspec.json.decode(text, type=list[int]), dtype=np.int64)


def sum_json(texts: str) -> Ints:
    """Sum of JSON lists that commas separate, the shorter padded by zeros."""
    lists = msgspec.json.decode(f"[{texts}]", type=list[list[int]])
    return np.array([sum(column) for column in zip_longest(*lists, fillvalue=0)], dtype=np.int64)


def add_json(a: str | None, b: str | None) -> str:
    """SQL function add_positions(a, b): both are JSON lists of integers."""
    return to_json(add_positions(from_json(a or "[]"), from_json(b or "[]")))


def count_batch(batch: EventBatch, received_unix_ns: int, bounded: Callable[[str], str] = str) -> BatchCounts:
    """Sum a batch up.

    Args:
        batch: as received.
        received_unix_ns: wall time of arrival; no round is placed after it.
        bounded: maps a workload label to itself or, with too many labels, to a common one.

    Raises:
        MalformedBatchError: columns of unequal lengths, more accepted than drafted, workloads out of range, …
    """
    scheduled = _column(batch.rounds.num_draft_tokens, "num_draft_tokens")
    num_rounds = len(scheduled)
    out = BatchCounts(steps=len(batch.steps.step))
    if num_rounds == 0:
        return out
    accepted = _column(batch.rounds.num_accepted_tokens, "num_accepted_tokens", num_rounds)
    workload = _column(batch.rounds.workload, "workload", num_rounds)
    # vLLM counts a round whose drafts a grammar struck as a draft, if any was scheduled, but not the struck ones as drafted.
    invalid = batch.rounds.num_invalid_tokens
    drafted = scheduled - _column(invalid, "num_invalid_tokens", num_rounds) if invalid else scheduled
    trimmed = batch.rounds.num_trimmed_tokens
    verified = drafted - _column(trimmed, "num_trimmed_tokens", num_rounds) if trimmed else drafted
    struck = batch.rounds.num_struck_tokens
    judged = verified + _column(struck, "num_struck_tokens", num_rounds) if struck else verified
    emitted = _column(batch.rounds.num_emitted, "num_emitted", num_rounds) if batch.rounds.num_emitted else accepted + 1
    ended = batch.rounds.num_delivered
    delivered = _column(ended, "num_delivered", num_rounds) if ended else emitted
    is_shrinking = (drafted <= scheduled).all() and (verified <= drafted).all()
    if verified.min() < 0 or (judged < verified).any() or not is_shrinking or delivered.min() < 0:
        raise MalformedBatchError("a round's number of tokens is out of range")
    if max(scheduled.max(), judged.max()) > MAX_DRAFT_TOKENS:
        raise MalformedBatchError("a round has too many drafts")
    if (delivered > emitted).any():
        raise MalformedBatchError("a round delivered more than it emitted")
    if accepted.min() < 0 or (accepted > verified).any():
        raise MalformedBatchError("a round accepted more than was drafted")
    chains = no_positions(), no_positions()
    try:
        if accepted_nodes(batch.rounds, accepted) is not None:
            chains = np.array(batch.rounds.chain_tokens), np.array(batch.rounds.chain_accepted)
    except ValueError as error:
        raise MalformedBatchError(str(error)) from error
    if workload.min() < 0 or workload.max() >= len(batch.workloads):
        raise MalformedBatchError("a round names a workload that the batch doesn't list")
    names = [bounded(name) for name in batch.workloads]
    second = _seconds(batch, received_unix_ns, num_rounds)
    keys, cell = np.unique(second * len(names) + workload, return_inverse=True)
    width = int(np.maximum(drafted, judged).max()) + 1
    table = _tabulate(cell.reshape(-1), len(keys), width, scheduled > 0, drafted, judged, accepted, delivered, chains)
    for key, counts in zip(keys.tolist(), table, strict=True):
        where = (key // len(names), names[key % len(names)])
        out.cells.setdefault(where, Counts()).add(counts)
        out.total.add(counts)
    return out


def _tabulate(
    cell: Ints,
    num_cells: int,
    width: int,
    is_draft: NDArray[np.bool_],
    drafted: Ints,
    judged: Ints,
    accepted: Ints,
    delivered: Ints,
    chains: tuple[Ints, Ints],
) -> list[Counts]:
    """Counts of each cell, from the rounds' columns.

    Args:
        judged: drafts that the target verified or a grammar struck.
        chains: columns of the chain in each tree, empty without trees.
    """
    is_tried = judged > 0

    def sums(values: Ints) -> list[int]:
        added: list[int] = np.bincount(cell, weights=values, minlength=num_cells).astype(np.int64).tolist()
        return added

    def at_least(values: Ints, rows: NDArray[np.bool_]) -> Ints:  # [num_cells, width]: rounds with values ≥ column
        flat = np.bincount(cell[rows] * width + values[rows], minlength=num_cells * width)
        table: Ints = flat.reshape(num_cells, width)[:, ::-1].cumsum(axis=1)[:, ::-1]
        return table

    rounds, plain = sums(is_draft.astype(np.int64)), sums((~is_draft).astype(np.int64))
    sum_drafted, sum_accepted, sum_delivered = sums(drafted), sums(accepted), sums(delivered)
    trees, beyond = [[0] * num_cells] * 4, np.zeros((num_cells, 1), dtype=np.int64)
    if len(chains[0]):
        is_tree = chains[0] > 0
        trees = [sums(values * is_tree) for values in (np.ones_like(drafted), drafted, accepted, chains[1])]
        beyond = at_least(accepted, is_draft)
        drafted, judged = np.where(is_tree, chains[0], drafted), np.where(is_tree, chains[0], judged)
        accepted = np.where(is_tree, chains[1], accepted)
        beyond = beyond - at_least(accepted, is_draft)
    longest = int(np.maximum(drafted, judged).max())
    by_drafted, by_accepted = at_least(drafted, is_draft), at_least(accepted, is_draft)
    by_tried = at_least(np.minimum(judged - 1, accepted), is_tried)
    return [
        Counts(
            rounds[i],
            sum_drafted[i],
            sum_accepted[i],
            sum_delivered[i],
            plain[i],
            trees[0][i],
            trees[1][i],
            trees[2][i],
            trees[3][i],
            by_drafted[i, 1 : longest + 1].copy(),
            by_tried[i, :longest].copy(),
            by_accepted[i, 1 : longest + 1].copy(),
            beyond[i, 1:].copy(),
        )
        for i in range(num_cells)
    ]


def _column(values: list[int], name: str, length: int | None = None) -> Ints:
    if length is not None and len(values) != length:
        raise MalformedBatchError(f"column {name} has {len(values)} rows, not {length}")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise MalformedBatchError(f"column {name} has a number beyond 64 bits") from error


def _seconds(batch: EventBatch, received_unix_ns: int, num_rounds: int) -> Ints:
    """Wall second of each round: its step's end plus the difference of the two clocks at sending."""
    step_of_round = _column(batch.rounds.step, "step", num_rounds)
    steps = _column(batch.steps.step, "steps.step")
    end_ns = _column(batch.steps.end_ns, "steps.end_ns", len(steps))
    sent = min(batch.sent_unix_ns, received_unix_ns)
    wall = np.full(num_rounds, sent, dtype=np.int64)
    if len(steps):
        order = np.argsort(steps, kind="stable")
        at = np.minimum(np.searchsorted(steps[order], step_of_round), len(steps) - 1)
        index = order[at]
        ago = np.clip(batch.sent_mono_ns - end_ns[index], 0, 86400 * 10**9)
        wall = np.where(steps[index] == step_of_round, sent - ago, wall)
    return wall // 10**9
