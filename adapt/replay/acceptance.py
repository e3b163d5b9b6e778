"""What drafts that were never verified would have come to: survival of every request of a log, from the log itself.

Position j is tried by a round iff the j−1 drafts before it were accepted and it was drafted: a hazard under right censoring.
A policy that gives easy requests longer drafts is seen at late positions on easy requests only, so requests and positions are
told apart: request q of workload w accepts with a_qj = m_j / (m_j + θ_q·(1 − m_j)). θ_q is the Mantel–Haenszel factor of
`adapt.acceptance.estimate`, drawn to 1; m_j is estimated with every success weighted by its request's θ, since at a given
position E[failures of q] = θ_q · (1 − m_j)/m_j · E[successes of q] however often q was tried there. The two are found in turn.

The length of the context isn't told apart (`adapt.acceptance.context_shift` is not in use here): what it does to a request is
part of its θ, which is taken to hold from its first round to its last.

Letters: Q = requests, C = cells (workload and drafter version), K = draft tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from honed.adapt.acceptance.estimate import (
    CHAIN_STRENGTH,
    EDGE,
    FIRST_GUESS,
    information,
    odds_ratio,
    scale_odds,
    strength_between,
)
from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.replay.log import Log

CELL_STRENGTH = 24.0
"""Pseudo-rounds that the engine's curve weighs against a workload's own, as in `ControllerSettings`."""
_TURNS = 4


@dataclass(frozen=True)
class Counts:
    """How often each request tried and passed each position."""

    trials: Floats  # [Q, K]
    successes: Floats  # [Q, K]

    @classmethod
    def of(cls, log: Log, num_spec_tokens: int) -> Counts:
        """Count a log's rounds."""
        reached = np.minimum(log.accepted + 1, log.drafted)
        return cls(*(_at_least(log.request, values, len(log.cell), num_spec_tokens) for values in (reached, log.accepted)))


def _at_least(request: Ints, values: Ints, num_requests: int, num_spec_tokens: int) -> Floats:
    width = num_spec_tokens + 1
    histogram = np.bincount(request * width + np.minimum(values, num_spec_tokens), minlength=num_requests * width)
    table = histogram.reshape(num_requests, width).astype(np.float64)
    return np.cumsum(table[:, ::-1], axis=1)[:, ::-1][:, 1:]


@dataclass(frozen=True)
class Beliefs:
    """Estimated acceptance of every cell and every request."""

    curves: Floats  # [C, K] conditional acceptance of a request of θ = 1
    strengths: Floats  # [C] pseudo-rounds of a cell's curve against a request's own rounds
    priors: Floats  # [C, K] what the curves were drawn to, by CELL_STRENGTH rounds
    theta: Floats  # [Q] failure odds of a request relative to its cell's


def believe(
    counts: Counts, cell: Ints, num_cells: int, weights: Floats | None = None, rng: np.random.Generator | None = None
) -> Beliefs:
    """Estimate from counts.

    Args:
        weights: how often each request counts, [Q]; None: once.
        rng: draws what the priors stand for, so that estimates scatter as much as is unknown where little was tried.
    """
    weights = np.ones(len(cell)) if weights is None else weights
    trials, successes = counts.trials, counts.successes
    engine = _chain(weights @ trials, weights @ successes, rng)
    curves, strengths, thetas = np.tile(engine, (num_cells, 1)), np.full(num_cells, CELL_STRENGTH), np.ones(len(cell))
    priors = curves.copy()
    for number in range(num_cells):
        mine = np.flatnonzero(cell == number)
        if not len(mine):
            continue
        t, s, w = trials[mine], successes[mine], weights[mine]
        prior = scale_odds(engine, odds_ratio(w @ t, w @ s, engine, CELL_STRENGTH))
        prior = _drawn(prior, CELL_STRENGTH, rng)
        strength = strength_between(t, s)
        theta = np.ones(len(mine))
        for _ in range(_TURNS):
            passed, failed = (w * theta) @ s, w @ (t - s)
            curve = np.clip((passed + CELL_STRENGTH * prior) / (passed + failed + CELL_STRENGTH), EDGE, 1.0 - EDGE)
            constant = strength * information(curve)
            theta = (constant + (t - s) @ curve) / (constant + s @ (1.0 - curve))
        curves[number], strengths[number], priors[number], thetas[mine] = curve, strength, prior, theta
    return Beliefs(curves, strengths, priors, thetas)


def _chain(trials: Floats, successes: Floats, rng: np.random.Generator | None) -> Floats:
    """Estimate the engine's curve, each position's prior centred on its left neighbour; see `acceptance.chain_estimate`."""
    estimate, left = np.empty(len(trials)), FIRST_GUESS
    for position in range(len(trials)):
        prior = float(_drawn(np.array([left]), CHAIN_STRENGTH, rng)[0])
        left = (float(successes[position]) + CHAIN_STRENGTH * prior) / (float(trials[position]) + CHAIN_STRENGTH)
        left = estimate[position] = min(max(left, EDGE), 1.0 - EDGE)
    return estimate


def _drawn(mean: Floats, strength: float, rng: np.random.Generator | None) -> Floats:
    return mean if rng is None else np.clip(rng.beta(strength * mean, strength * (1.0 - mean)), EDGE, 1.0 - EDGE)
