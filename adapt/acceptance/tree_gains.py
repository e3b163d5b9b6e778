"""Estimates what each node of a draft tree is worth: the chance that the target's text passes it.

Nodes are numbered from the best on, so the tree of m nodes is the first m of any larger tree. For every m ≤ n, a verified tree
of n nodes tells what its first m would have gained alone: the accepted nodes among them. So hits / trials by a node's number is
unbiased for every budget that was chosen from the past, and the expected gain of m nodes is Σ_{i<m} v_i.

A node's prior is the value of the one before it. As better nodes come first, values that rise from one node to the next are
noise: they are averaged until none does (pool adjacent violators, weighted by trials). Where no tree was so large, values decay
as they do on average before.

Trees are counted with memories of several lengths, and by their information, as chains are (`forgetting`). So both tell of a
request without history and can be compared; counted one by one, trees would tell of hard requests, which take more rounds. The
chains within the same trees tell which memory predicts best: what is asked for with their weights follows a change as soon as
they do.

While chains are verified in the place of trees, only they see a change. Node 0 is the drafter's first token, of a chain as well
as of a tree. So all values' odds are scaled by one factor, with which node 0 has the odds that the latest rounds of either kind
gave the first token. On the tiny pair this took nodes' values from one domain to the other, whose chains accept a seventh as
much, with a sum of 0.56 where trees then showed 0.54.

Letters: N = nodes that a tree has room for, M = memories, Q = trees, P = accepted nodes at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from honed.adapt.acceptance.estimate import EDGE, FIRST_GUESS, scale_odds
from honed.adapt.acceptance.forgetting import SHORTER_STRENGTH, memory_lengths
from honed.adapt.acceptance.rounds import TreeRounds
from honed.adapt.protocol.arrays import Bools, Floats

STRENGTH = 8.0
"""Weight of a prior, in trees."""
_DECAY = 0.85
"""Value of a node over that of the one before it, before any is known."""


class TreeGains:
    """Hits and trials by a node's number, with exponential forgetting.

    Args:
        num_nodes: N.
        forgetting_rounds: independent trees that the longest memory holds.
    """

    def __init__(self, num_nodes: int, forgetting_rounds: float) -> None:
        self._lengths = memory_lengths(forgetting_rounds)
        self._trials: Floats = np.zeros((len(self._lengths), num_nodes))
        self._hits: Floats = np.zeros((len(self._lengths), num_nodes))
        self._firsts: Floats = np.zeros((2, len(self._lengths)))
        """Trials and hits of the first token, in trees and chains."""

    @property
    def trials(self) -> Floats:  # [N]
        """Independent trials that the longest memory holds."""
        longest: Floats = self._trials[-1]
        return longest

    @property
    def is_known(self) -> bool:
        """Whether a tree was seen."""
        return bool(self.trials.any())

    def observe(self, trees: TreeRounds, worth: Floats | None = None) -> None:
        """Fold in verified trees, oldest first.

        Args:
            worth: of each tree, in independent ones, [Q]: those of one request repeat each other. None: 1.
        """
        count, room = len(trees), self._trials.shape[1]
        if not count or not room:
            return
        for number, (weights, kept) in enumerate(self._aged(count, worth)):
            trials, hits = trees.count(room, weights)
            self._trials[number] = kept * self._trials[number] + trials
            self._hits[number] = kept * self._hits[number] + hits

    def observe_firsts(self, is_hit: Bools, worth: Floats | None = None) -> None:  # [R]
        """Fold in whether the first token was accepted, of trees and chains, oldest first; `worth` as for `observe`."""
        for number, (weights, kept) in enumerate(self._aged(len(is_hit), worth)):
            self._firsts[:, number] = kept * self._firsts[:, number] + (weights.sum(), weights @ is_hit)

    def _aged(self, count: int, worth: Floats | None) -> Iterator[tuple[Floats, float]]:
        """Yield for each memory the weights of `count` new rounds, oldest first, and the share that is kept of the others."""
        worth = np.ones(count) if worth is None else worth
        since = worth.sum() - np.cumsum(worth)
        for length in self._lengths:
            yield worth * np.exp(-since / length), math.exp(-worth.sum() / length)

    def forget(self, factor: float) -> None:
        """Weaken what is known, as after a swap of the drafter's weights."""
        self._trials *= factor
        self._hits *= factor
        self._firsts *= factor

    def values(self, weights: Floats | None = None, prior: Floats | None = None) -> Floats:  # [M], [N] -> [N]
        """Chance that each node is passed, never rising.

        Args:
            weights: of the memories, the shortest first; None: the longest one alone.
            prior: of a wider group of requests; None: each node's is that of the one before it.
        """
        values = self._weighted(self._longest(prior), self._trials, self._hits, weights)
        falling: Floats = np.clip(_falling(values, self.trials + STRENGTH), EDGE, 1.0 - EDGE)
        tried, hit = self._firsts[:, :, None]
        if not tried.any():
            return falling
        guess = FIRST_GUESS if prior is None else float(prior[0])
        longest = (hit[-1] + STRENGTH * guess) / (tried[-1] + STRENGTH)
        now = np.clip(self._weighted(longest, tried, hit, weights), EDGE, 1.0 - EDGE)
        then = np.clip(values[:1], EDGE, 1.0 - EDGE)
        scaled: Floats = np.clip(scale_odds(falling, then * (1.0 - now) / (now * (1.0 - then))), EDGE, 1.0 - EDGE)
        return scaled

    def _weighted(self, longest: Floats, trials: Floats, hits: Floats, weights: Floats | None) -> Floats:
        """Shrink each memory's shares to the next longer one's, and weigh them; `weights` None: `longest`."""
        made = [longest]
        for tried, hit in zip(trials[-2::-1], hits[-2::-1], strict=True):
            made.append((hit + SHORTER_STRENGTH * made[-1]) / (tried + SHORTER_STRENGTH))
        return longest if weights is None else weights @ np.array(made[::-1])

    def _longest(self, prior: Floats | None) -> Floats:
        values = np.empty(len(self.trials))
        left, decay = FIRST_GUESS, _DECAY
        for node, (tried, hit) in enumerate(zip(self.trials.tolist(), self._hits[-1].tolist(), strict=True)):
            guess = (left * decay if node else left) if prior is None else float(prior[node])
            value = (hit + STRENGTH * guess) / (tried + STRENGTH)
            if prior is None and node and tried > STRENGTH:
                decay = min(1.0, max(0.5, (value / values[0]) ** (1.0 / node)))
            left = values[node] = value
        return values

    def acceptance(self, weights: Floats | None = None, prior: Floats | None = None) -> Floats:  # [M], [N] -> [N]
        """The same as conditional acceptance, whose running product it is: as if nodes were a chain's tokens."""
        values = self.values(weights, prior)
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
