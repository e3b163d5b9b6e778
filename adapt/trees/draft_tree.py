"""Builds the best draft tree to verify from a block drafter's single pass.

The drafter gives a distribution for every depth. With independent depths, a node's path probability is Π q_d(u_d). The
probability that the walk reaches it is at most that under the target's agreement. A tree's expected acceptance length is
E[τ] = 1 + Σ_nodes exp(score). Scores never grow from parent to child nor from a sibling to the next. So popping the best node
from a heap and pushing its next sibling and its first child yields the best `tree_budget` nodes: the optimum under this model.
Ties go to the shallower node, then to the lexicographically smaller path of ranks.

A candidate's probability may depend on whether the path above it is the chain of first candidates (`off_chain`): once the
target has taken another token, the drafter's deeper predictions are worth less. Scores still never grow along either step
(siblings share their parent's row, a child adds a log-probability ≤ 0), so the result is the optimum of that model too.

With `is_chain_first` the top-1 chain enters the tree before anything else (as far as the budget goes), so a tree never verifies
less than the chain would. The rest is best-first among what remains.

Letters: D = depths (draft tokens of a block), m = candidates a depth, B = nodes.

Source: arXiv 2604.12989 (DDTree), its Algorithm 1.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

import numpy as np

from honed.adapt.protocol.arrays import Floats, Ints

ROOT = -1


@dataclass(frozen=True, slots=True)
class DraftTree:
    """Nodes in the order they were admitted, parents before children; the root (anchor) isn't among them."""

    rank: Ints  # [B] rank among its depth's candidates, 0 the most likely
    parent: Ints  # [B] index of the parent, ROOT for children of the anchor
    depth: Ints  # [B] from 1
    score: Floats  # [B] log-probability of the path

    def __len__(self) -> int:
        return len(self.rank)

    def ancestors(self) -> list[list[int]]:
        """List for every node the nodes that it may attend to: its ancestors from the top, then itself."""
        paths: list[list[int]] = []
        for node, parent in enumerate(self.parent.tolist()):
            paths.append([*(paths[parent] if parent != ROOT else []), node])
        return paths

    def children(self) -> dict[tuple[int, int], int]:
        """Map (parent, rank) to the node: one look-up per step of the verifying walk."""
        pairs = zip(self.parent.tolist(), self.rank.tolist(), strict=True)
        return {pair: node for node, pair in enumerate(pairs)}

    def rescored(self, log_probs: Floats) -> Floats:
        """Score the same nodes with other log-probabilities [D, m], [B]."""
        scores: list[float] = []
        for parent, own in zip(self.parent.tolist(), log_probs[self.depth - 1, self.rank].tolist(), strict=True):
            scores.append(own + (scores[parent] if parent != ROOT else 0.0))
        return np.array(scores, dtype=np.float64)


def expected_acceptance_length(tree: DraftTree) -> float:
    """Compute E[τ] = 1 + Σ exp(score), bonus token included, under independent marginals."""
    return 1.0 + float(np.exp(tree.score).sum())


def build_tree(
    log_probs: Floats, tree_budget: int, *, off_chain: Floats | None = None, is_chain_first: bool = False
) -> DraftTree:
    """Build the best tree of at most `tree_budget` nodes.

    Args:
        log_probs: [D, m] log-probabilities of each depth's candidates, most likely first; −inf marks a candidate that must
            not be drafted.
        off_chain: the same for nodes below one that isn't a first candidate; None: the same figures.

    Raises:
        ValueError: a depth's candidates aren't sorted, or there is a NaN or a log-probability above 0.
    """
    log_probs = _checked(log_probs)
    below = log_probs if off_chain is None else _checked(off_chain)
    if below.shape != log_probs.shape:
        raise ValueError(f"log-probabilities off the chain are {below.shape}, those on it {log_probs.shape}")
    return _Builder(log_probs, below, tree_budget).build(is_chain_first)


def _checked(log_probs: Floats) -> Floats:
    log_probs = np.asarray(log_probs, dtype=np.float64)
    if log_probs.ndim != 2:
        raise ValueError(f"log-probabilities must be [depths, candidates], not {log_probs.ndim}-dimensional")
    if np.isnan(log_probs).any() or (log_probs > 1e-6).any():
        raise ValueError("log-probabilities must be numbers ≤ 0")
    if (log_probs[:, 1:] > log_probs[:, :-1]).any():
        raise ValueError("candidates of a depth must be sorted, most likely first")
    return log_probs


class _Builder:
    """The heap, and the nodes so far. An entry is (−score, depth, path of ranks, parent)."""

    def __init__(self, log_probs: Floats, off_chain: Floats, tree_budget: int) -> None:
        self._rows, self._off_chain = log_probs.tolist(), off_chain.tolist()
        self._budget = max(tree_budget, 0)
        self._heap: list[tuple[float, int, tuple[int, ...], int]] = []
        self._nodes: list[tuple[int, int, int, float]] = []

    def build(self, is_chain_first: bool) -> DraftTree:
        self._push(ROOT, 0.0, ())
        while self._heap and len(self._nodes) < self._budget:
            if is_chain_first and len(self._nodes) < len(self._rows):
                # A chain node's rank-0 child is in the heap as soon as the node is admitted.
                entry = next((e for e in self._heap if e[2] == (0,) * (len(self._nodes) + 1)), None)
                if entry is None:
                    is_chain_first = False
                    continue
                self._heap.remove(entry)
                heapq.heapify(self._heap)
            else:
                entry = heapq.heappop(self._heap)
            self._admit(*entry)
        columns = list(zip(*self._nodes, strict=True)) or [(), (), (), ()]
        return DraftTree(
            np.array(columns[0], dtype=np.int64),
            np.array(columns[1], dtype=np.int64),
            np.array(columns[2], dtype=np.int64),
            np.array(columns[3], dtype=np.float64),
        )

    def _admit(self, cost: float, depth: int, path: tuple[int, ...], parent: int) -> None:
        node = len(self._nodes)
        self._nodes.append((path[-1], parent, depth, -cost))
        above = self._nodes[parent][3] if parent != ROOT else 0.0
        self._push(parent, above, (*path[:-1], path[-1] + 1))
        self._push(node, -cost, (*path, 0))

    def _push(self, parent: int, above: float, path: tuple[int, ...]) -> None:
        """Push a candidate node. `path` has one more rank than its parent's; the root's first child has path (0,)."""
        path = path or (0,)
        depth, rank = len(path), path[-1]
        if depth > len(self._rows) or rank >= len(self._rows[depth - 1]):
            return
        rows = self._off_chain if any(path[:-1]) else self._rows
        score = above + rows[depth - 1][rank]
        if math.isfinite(score):
            heapq.heappush(self._heap, (-score, depth, path, parent))
