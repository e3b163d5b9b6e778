"""Reads the columns of an event batch as arrays, once, and splits them by workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.arrays import Bools, Floats, Ints
from honed.adapt.protocol.wire import EventBatch, RoundColumns


@dataclass(frozen=True, slots=True)
class TreeRounds:
    """Trees that were verified; Q of them, P accepted nodes at most.

    Where the request ended within the round, nodes that the target took past the text's end count as accepted, too: a log
    doesn't say which of the others lie below the end, where nothing was tried. If such rounds were left out, those that ended
    a text by what they accepted would be missing, while those that failed then count.
    """

    num_nodes: Ints  # [Q]
    nodes: Ints  # [Q, P] accepted nodes, −1 past them
    is_whole: Bools  # [Q] whether all of them were delivered

    def __len__(self) -> int:
        return len(self.num_nodes)

    def count(self, room: int, weights: Floats | None = None) -> tuple[Floats, Floats]:
        """Trials and hits by a node's number, [room] each: trees that have the node, and those that the text passes it in.

        Args:
            weights: of each tree, [Q]; None: 1.
        """
        weights = np.ones(len(self)) if weights is None else weights
        sizes: Floats = np.bincount(np.minimum(self.num_nodes, room), weights=weights, minlength=room + 1).astype(np.float64)
        is_hit = (self.nodes >= 0) & (self.nodes < room)
        held = np.broadcast_to(weights[:, None], self.nodes.shape)[is_hit]
        hits: Floats = np.bincount(self.nodes[is_hit], weights=held, minlength=room)[:room].astype(np.float64)
        return np.cumsum(sizes[::-1])[::-1][1:], hits


@dataclass(frozen=True, slots=True)
class Rounds:
    """Verify rounds with at least one draft token, oldest first; every array is [R].

    Of a tree, figures are of the drafter's own chain in it, cut off where the tree has no more of it. So acceptance by position
    means about the same with trees and without. A small tree has more of the chain where the drafter is sure: there it is
    somewhat higher at deep positions.
    """

    request: npt.NDArray[np.uint64]
    num_draft_tokens: Ints
    """Those that a grammar struck included. Where the request ended within the round: those delivered, which were accepted.
    What follows a text's end isn't text."""
    num_accepted_tokens: Ints
    num_invalid_tokens: Ints
    """Drafts never tried: trimmed by vLLM's own adaptive verification, or padding. A draft that a grammar struck was tried."""
    position: Ints
    """Position of the last verified token: about the length of the context."""
    trees: TreeRounds | None = None
    """The trees among them; None: there are none."""
    is_chain: Bools | None = None
    """Which of them verified a chain, not a tree; None: all."""
    undrafted: npt.NDArray[np.uint64] = field(default_factory=lambda: np.zeros(0, dtype=np.uint64))
    """Requests of the workload's rounds without drafts, one a round."""

    def __len__(self) -> int:
        return len(self.request)


def rounds_by_workload(batch: EventBatch) -> Iterator[tuple[str, Rounds]]:
    """Yield each workload's rounds in order of first mention. Raises ValueError when the columns don't fit together."""
    columns = batch.rounds
    drafted = _ints(columns.num_draft_tokens, "num_draft_tokens", len(columns.num_draft_tokens))
    count = len(drafted)
    label = _ints(columns.workload, "workload", count)
    accepted = _ints(columns.num_accepted_tokens, "num_accepted_tokens", count)
    invalid = _ints(columns.num_invalid_tokens or [0] * count, "num_invalid_tokens", count)
    invalid, struck = np.maximum(invalid, 0), struck_tokens(columns, count)
    num_scheduled = np.minimum(invalid, struck)  # of the struck ones
    drafted, invalid = drafted + struck - num_scheduled, invalid - num_scheduled + trimmed_tokens(columns, count)
    nodes, num_nodes = accepted_nodes(columns, accepted), drafted
    is_tree = is_whole = np.zeros(count, dtype=np.bool_)
    if nodes is not None:
        chain = _ints(columns.chain_tokens, "chain_tokens", count)
        is_tree, drafted = chain > 0, np.where(chain > 0, chain, drafted)
        is_whole = (
            _ints(columns.num_delivered, "num_delivered", count) > accepted
            if columns.num_delivered
            else np.ones(count, dtype=np.bool_)
        )
        accepted = np.where(is_tree, _ints(columns.chain_accepted, "chain_accepted", count), accepted)
        invalid = np.where(is_tree, 0, invalid)
    if columns.num_delivered:
        delivered = _ints(columns.num_delivered, "num_delivered", count)
        is_cut = delivered <= accepted
        drafted, accepted = np.where(is_cut, delivered, drafted), np.minimum(delivered, accepted)
        invalid = np.where(is_cut, 0, invalid)
    position = _ints(columns.position or [0] * count, "position", count)
    request = _hashes(columns.request, count)
    if count and not 0 <= label.min() <= label.max() < len(batch.workloads):
        raise ValueError("batch names a workload by an index that its list of workloads doesn't have")
    has_draft, had_none = drafted - invalid > 0, num_nodes == 0
    for index, workload in enumerate(batch.workloads):
        mine = has_draft & (label == index)
        if mine.any():
            figures = request[mine], drafted[mine], accepted[mine], invalid[mine], position[mine]
            trees, is_chain, grown = None, None, mine & is_tree
            if nodes is not None:
                trees, is_chain = TreeRounds(num_nodes[grown], nodes[grown], is_whole[grown]), ~is_tree[mine]
            yield workload, Rounds(*figures, trees, is_chain, request[had_none & (label == index)])


def steps_with_trees(batch: EventBatch) -> list[bool | None]:
    """Whether each step of a batch verified a draft tree.

    None: it had drafts, but no round tells of them. They were of requests that had ended.
    """
    rounds, steps = batch.rounds, batch.steps
    found = {step for step, chain in zip(rounds.step, rounds.chain_tokens, strict=False) if chain > 0}
    told = {step for step, k in zip(rounds.step, rounds.num_draft_tokens, strict=False) if k > 0}
    drafted = zip(steps.step, steps.num_draft_tokens, strict=False)
    return [step in found if step in told or not k else None for step, k in drafted]


def accepted_nodes(columns: RoundColumns, accepted: Ints) -> Ints | None:  # [R] -> [R, P]
    """The accepted nodes of each round, −1 past them and where there was no tree; None: no round had one.

    Raises:
        ValueError: the columns of trees don't fit the others.
    """
    if not columns.chain_tokens and not columns.nodes:
        return None
    count = len(accepted)
    chain = _ints(columns.chain_tokens, "chain_tokens", count)
    kept = _ints(columns.chain_accepted, "chain_accepted", count)
    num_nodes = np.array(columns.num_draft_tokens, dtype=np.int64)
    flat, held = np.array(columns.nodes, dtype=np.int64), np.where(chain > 0, accepted, 0)
    if len(flat) != held.sum() or (kept > np.minimum(chain, accepted)).any() or (chain > num_nodes).any():
        raise ValueError("batch columns chain_tokens, chain_accepted and nodes don't fit the drafts and the accepted tokens")
    place = np.arange(int(held.max(initial=0)))
    nodes = np.full((count, len(place)), -1, dtype=np.int64)
    nodes[place < held[:, None]] = flat
    if (
        (nodes >= num_nodes[:, None]).any()
        or (np.diff(nodes, axis=1)[place[1:] < held[:, None]] <= 0).any()
        or (flat < 0).any()
    ):
        raise ValueError("batch column nodes names a node that its tree doesn't have, or one before its parent")
    return nodes


def trimmed_tokens(columns: RoundColumns, count: int) -> Ints:
    """Drafts of each of `count` rounds that vLLM's own adaptive verification trimmed, [R]; ValueError as above."""
    return _optional(columns.num_trimmed_tokens, "num_trimmed_tokens", count)


def struck_tokens(columns: RoundColumns, count: int) -> Ints:
    """Drafts of each of `count` rounds that a grammar struck behind the verified ones, [R]; ValueError as above."""
    return _optional(columns.num_struck_tokens, "num_struck_tokens", count)


def _optional(values: Sequence[int], name: str, count: int) -> Ints:
    if not values:
        return np.zeros(count, dtype=np.int64)
    return np.maximum(_ints(values, name, count), 0)


def _ints(values: Sequence[int], name: str, count: int) -> Ints:
    if len(values) != count:
        raise ValueError(f"batch column {name} has {len(values)} entries, the others {count}")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise ValueError(f"batch column {name} has a figure that doesn't fit into 64 bits") from error


def _hashes(values: Sequence[int], count: int) -> npt.NDArray[np.uint64]:
    if len(values) != count:
        raise ValueError(f"batch column request has {len(values)} entries, the others {count}")
    try:
        return np.array(values, dtype=np.uint64)
    except OverflowError as error:
        raise ValueError("batch column request has a figure that isn't an unsigned 64-bit hash") from error
