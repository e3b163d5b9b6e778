"""A draft tree in the plainest way, for tests: DDTree's algorithm 1 (arXiv 2604.12989) with a heap of paths.

Letters: D = depths (draft tokens of a block), m = candidates a depth, B = nodes.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """Nodes in the order they were admitted, parents before children; the root (anchor) isn't among them."""

    rank: npt.NDArray[np.int64]  # [B] rank among its depth's candidates, 0 the most likely
    parent: npt.NDArray[np.int64]  # [B] index of the parent, ROOT for children of the anchor
    depth: npt.NDArray[np.int64]  # [B] from 1

    def __len__(self) -> int:
        return len(self.rank)

    def ancestors(self) -> list[list[int]]:
        """List for every node the nodes that it may attend to: its ancestors from the top, then itself."""
        paths: list[list[int]] = []
        for node, parent in enumerate(self.parent.tolist()):
            paths.append([*(paths[parent] if parent != ROOT else []), node])
        return paths

    def children(self) -> dict[tuple[int, int], int]:
        """Map (parent, rank) to the node."""
        pairs = zip(self.parent.tolist(), self.rank.tolist(), strict=True)
        return {pair: node for node, pair in enumerate(pairs)}


def build_tree(log_probs: npt.NDArray[Any], budget: int) -> DraftTree:  # [D, m], most likely first
    """Build the best tree of at most `budget` nodes; ties go to the shallower node, then to the smaller path of ranks."""
    rows = np.asarray(log_probs, np.float64).tolist()
    places: dict[tuple[int, ...], int] = {}
    nodes: list[tuple[int, int, int]] = []
    scores: list[float] = []
    heap: list[tuple[float, int, tuple[int, ...]]] = []

    def push(path: tuple[int, ...]) -> None:
        depth, rank = len(path), path[-1]
        if depth > len(rows) or rank >= len(rows[depth - 1]):
            return
        score = (scores[places[path[:-1]]] if depth > 1 else 0.0) + rows[depth - 1][rank]
        if math.isfinite(score):
            heapq.heappush(heap, (-score, depth, path))

    push((0,))
    while heap and len(nodes) < budget:
        cost, depth, path = heapq.heappop(heap)
        places[path] = len(nodes)
        nodes.append((path[-1], places.get(path[:-1], ROOT), depth))
        scores.append(-cost)
        push((*path[:-1], path[-1] + 1))
        push((*path, 0))
    rank, parent, depths = zip(*nodes, strict=True) if nodes else ((), (), ())
    return DraftTree(np.array(rank, int), np.array(parent, int), np.array(depths, int))
