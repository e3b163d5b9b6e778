"""Verify rounds with draft trees, made up: a drafter's candidates, the tree of a budget, and the text's path through it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import msgspec
import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.wire import EventBatch
from tests.adapt.simulate import make_batch
from tests.kernels.draft_tree import ROOT, build_tree

DEPTHS, CANDIDATES = 7, 8


def candidates(rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Log-probabilities [DEPTHS, CANDIDATES] of a calibrated drafter, which is surer at some places than at others."""
    easy, rows = rng.normal(), np.empty((DEPTHS, CANDIDATES))
    for depth in range(DEPTHS):
        scale = np.exp(0.5 * (easy + rng.normal() - 0.15 * depth))
        logits = np.append(-scale * 1.2 * np.arange(CANDIDATES) ** 0.8, -scale * 3.6)  # the last: all other words
        rows[depth] = (logits - np.log(np.exp(logits).sum()))[:CANDIDATES]
    return np.sort(rows, axis=1)[:, ::-1]


def text(rng: np.random.Generator, log_probs: npt.NDArray[np.float64]) -> list[int]:
    """Candidate that the text takes at each depth, CANDIDATES for none; off the chain the drafter knows half as much."""
    ranks: list[int] = []
    for row in np.exp(log_probs):
        chances = row * (0.5 if any(ranks) else 1.0)
        ranks.append(int(np.searchsorted(np.cumsum(chances), rng.random())))
    return ranks


def tree_batch(
    rng: np.random.Generator, budgets: Sequence[int], temperature: float = 1.0, workload: str = "a", version: str = "v1"
) -> EventBatch:
    """A batch with one tree a round; the drafter's logits are divided by `temperature`, which changes no order."""
    chain_tokens, chain_accepted, nodes, accepted = [], [], list[int](), []
    for budget in budgets:
        log_probs = candidates(rng)
        ranks = text(rng, log_probs)
        rest = np.log(np.maximum(1.0 - np.exp(log_probs).sum(axis=1, keepdims=True), 1e-9))
        scaled = np.concatenate([log_probs, rest], axis=1) / temperature
        scaled -= np.log(np.exp(scaled).sum(axis=1, keepdims=True))
        children = build_tree(scaled[:, :-1], budget).children()
        chain, last = list[int](), ROOT
        while (last := children.get((last, 0), ROOT)) != ROOT:
            chain.append(last)
        path, at = list[int](), ROOT
        for rank in ranks:
            if (at := children.get((at, rank), ROOT)) == ROOT:
                break
            path.append(at)
        chain_tokens.append(len(chain))
        chain_accepted.append(sum(takewhile(bool, (a == b for a, b in zip(path, chain, strict=False)))))
        nodes += path
        accepted.append(len(path))
    batch = make_batch(list(budgets), accepted, workload, version)
    rounds = msgspec.structs.replace(batch.rounds, chain_tokens=chain_tokens, chain_accepted=chain_accepted, nodes=nodes)
    return msgspec.structs.replace(batch, rounds=rounds)
