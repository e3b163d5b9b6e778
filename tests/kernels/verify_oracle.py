"""Exact laws of what a verify round emits, by enumeration, and the χ² test against them.

The target is a Markov chain on a small vocabulary: `logits[t]` are those after token t. An outcome is the tuple of tokens that
a round emits; its length tells how many drafts were accepted.

Letters: V = vocabulary, K = draft tokens, n = samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

Law = dict[tuple[int, ...], float]
FALSE_ALARM = 1e-6
"""Of one χ² test. Seeds are fixed, so a test that passes once passes always."""


def softmax(logits: Any) -> np.ndarray[Any, np.dtype[np.float64]]:
    weight = np.exp(np.asarray(logits, dtype=np.float64) - np.max(logits, axis=-1, keepdims=True))
    return np.asarray(weight / weight.sum(axis=-1, keepdims=True))


def chain_law(target: Any, q: Any, previous: int) -> Law:
    """Law of the tokens emitted after `previous`: target [V, V] probabilities, q [K, V] the law of each draft.

    Straight from the definition: accept with min(1, p / q), else draw from norm(max(0, p − q)).
    """
    p = target[previous]
    if not len(q):
        return {(token,): float(share) for token, share in enumerate(p)}
    law: Law = {}
    left = np.maximum(p - q[0], 0.0)
    for draft in np.flatnonzero(q[0]).tolist():
        accept = min(1.0, p[draft] / q[0][draft])
        for tail, share in chain_law(target, q[1:], draft).items():
            _add(law, (draft, *tail), q[0][draft] * accept * share)
        if accept < 1.0:
            for token, share in enumerate(left / left.sum()):
                _add(law, (token,), q[0][draft] * (1.0 - accept) * share)
    return law


def _add(law: Law, outcome: tuple[int, ...], share: float) -> None:
    if share > 0.0:
        law[outcome] = law.get(outcome, 0.0) + float(share)


def outcomes(tokens: torch.Tensor) -> Counter[tuple[int, ...]]:
    """Count the rows of tokens [n, K + 1], −1 past the last."""
    rows, counts = torch.unique(tokens.cpu(), dim=0, return_counts=True)
    return Counter({tuple(t for t in row if t >= 0): n for row, n in zip(rows.tolist(), counts.tolist(), strict=True)})


def p_value(counts: Counter[tuple[int, ...]], law: Law) -> float:
    """Pearson's χ² of the counts against the law; outcomes expected under 5 times are one class. 0 for what can't happen."""
    n = sum(counts.values())
    if any(outcome not in law for outcome in counts):
        return 0.0
    pairs = [(counts[outcome], n * share) for outcome, share in law.items()]
    rare = [pair for pair in pairs if pair[1] < 5.0]
    classes = [pair for pair in pairs if pair[1] >= 5.0]
    if sum(expected for _, expected in rare) >= 5.0:
        classes.append((sum(seen for seen, _ in rare), sum(expected for _, expected in rare)))
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in classes)
    return survival(statistic, len(classes) - 1)


def survival(statistic: float, degrees: int) -> float:
    """P(χ² > statistic)."""
    half = torch.tensor([degrees / 2.0, statistic / 2.0], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def shifted(law: Law, share: float) -> Law:
    """The law with `share` of all mass moved from its likeliest outcome to the next: what a test must find."""
    first, second, *_ = sorted(law, key=lambda outcome: -law[outcome])
    return law | {first: law[first] - share, second: law[second] + share}


def first_token(law: Law, vocab: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    return _tally(((outcome[0], share) for outcome, share in law.items()), vocab)


def _tally(pairs: Iterable[tuple[int, float]], vocab: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    total = np.zeros(vocab)
    for token, share in pairs:
        total[token] += share
    return total
