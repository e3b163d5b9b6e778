"""Estimates what each node of a draft tree is worth: the chance that the target's text passes it.

Nodes are numbered from the best on, so the tree of m nodes is the first m of any larger tree. For every m ≤ n, a verified tree
of n nodes tells what its first m would have gained alone: the accepted nodes among them. So hits / trials by a node's number is
unbiased for every budget that was chosen from the past, and the expected gain of m nodes is Σ_{i<m} v_i.

A node's prior is the value of the one before it. As better nodes come first, values that rise from one node to the next are
noise: they are averaged until none does (pool adjacent violators, weighted by trials). Where no tree was so large, values decay
as they do on average before.

Letters: N = nodes that a tree has room for, Q = trees, P = accepted nodes at most.
"""

from __future__ import annotations

import numpy as np

from honed.adapt.acceptance.estimate import EDGE, FIRST_GUESS
from honed.adapt.acceptance.rounds import TreeRounds
from honed.adapt.protocol.arrays import Floats

STRENGTH = 8.0
"""Weight of a prior, in trees."""


class TreeGains:
    """Hits and trials by a node's number, with exponential forgetting by trees."""

    def __init__(self, num_nodes: int, forgetting_rounds: float) -> None:
        self.trials: Floats = np.zeros(num_nodes)
        self.hits: Floats = np.zeros(num_nodes)
        self._forgetting = max(forgetting_rounds, 1.0)

    @property
    def is_known(self) -> bool:
        """Whether a tree was seen."""
        return bool(self.trials.any())

    def observe(self, trees: TreeRounds) -> None:
        """Fold in verified trees, oldest first."""
        count, room = len(trees), len(self.trials)
        if not count or not room:
            return
        weights = np.exp((np.arange(count) - count) / self._forgetting)
        sizes = np.bincount(np.minimum(trees.num_nodes, room), weights=weights, minlength=room + 1)
        is_hit = (trees.nodes >= 0) & (trees.nodes < room)
        held = np.broadcast_to(weights[:, None], trees.nodes.shape)[is_hit]
        self.forget(float(np.exp(-count / self._forgetting)))
        self.trials += np.cumsum(sizes[::-1])[::-1][1:]
        self.hits += np.bincount(trees.nodes[is_hit], weights=held, minlength=room)[:room]

    def forget(self, factor: float) -> None:
        """Weaken what is known, as after a swap of the drafter's weights."""
        self.trials *= factor
        self.hits *= factor

    def values(self, prior: Floats | None = None) -> Floats:  # [N]
        """Chance that each node is passed, never rising.

        Args:
            prior: of a wider group of requests; None: each node's is that of the one before it.
        """
        values = np.empty(len(self.trials))
        left, decay = FIRST_GUESS, 1.0
        for node, (tried, hit) in enumerate(zip(self.trials.tolist(), self.hits.tolist(), strict=True)):
            guess = left * decay if prior is None else float(prior[node])
            value = (hit + STRENGTH * guess) / (tried + STRENGTH)
            if prior is None and node and tried > STRENGTH:
                decay = min(1.0, max(0.5, (value / values[0]) ** (1.0 / node)))
            left = values[node] = value
        falling: Floats = np.clip(_falling(values, self.trials + STRENGTH), EDGE, 1.0 - EDGE)
        return falling

    def acceptance(self, prior: Floats | None = None) -> Floats:  # [N]
        """The same as conditional acceptance, whose running product it is: as if nodes were a chain's tokens."""
        values = self.values(prior)
        conditional: Floats = np.clip(values / np.concatenate(([1.0], values[:-1])), EDGE, 1.0 - EDGE)
        return conditional


def _falling(values: Floats, weights: Floats) -> Floats:
    """The closest values that never rise, by weighted least squares (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, count
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        mean, total, count = value, weight, 1
        while pools and pools[-1][0] < mean:
            other, more, many = pools.pop()
            mean, total, count = (mean * total + other * more) / (total + more), total + more, count + many
        pools.append((mean, total, count))
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])
