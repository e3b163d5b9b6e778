"""Estimates the acceptance of drafts that were never verified: survival of every request of a log, from the log itself.

A round tries position j iff it drafted j and the j−1 drafts before were accepted: a hazard under right censoring. A policy that
gives easy requests longer drafts shows late positions only on easy requests. So requests and positions are separated: request q
of workload w accepts with a_qj = m_j / (m_j + θ_q·(1 − m_j)). θ_q is the Mantel–Haenszel factor of `adapt.acceptance.estimate`,
shrunk to 1. m_j is estimated with every success weighted by its request's θ: at a given position E[failures of q] =
θ_q · (1 − m_j)/m_j · E[successes of q], however often q was tried there. The two estimates alternate.

The context's length isn't separated (`adapt.acceptance.context_shift` is not used here): its effect on a request is part of the
request's θ, which is assumed constant over its rounds.

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
"""Pseudo-rounds of the engine's curve against a workload's own, as in `ControllerSettings`."""
_TURNS = 4


@dataclass(frozen=True)
class Counts:
    """Trials and successes of each request at each position."""

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

    curves: Floats  # [C, K] conditional acceptance of a request with θ = 1
    strengths: Floats  # [C] pseudo-rounds of a cell's curve against a request's own rounds
    priors: Floats  # [C, K] priors of the curves, with CELL_STRENGTH rounds
    theta: Floats  # [Q] failure odds of a request relative to its cell's


def believe(
    counts: Counts, cell: Ints, num_cells: int, weights: Floats | None = None, rng: np.random.Generator | None = None
) -> Beliefs:
    """Estimate from counts.

    Args:
        weights: weight of each request, [Q]; None: 1.
        rng: draws the priors, so that estimates scatter by their uncertainty where there are few trials.
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
    """Estimate the engine's curve, each position's prior centred on its left neighbour; see `estimate.chain_estimate`."""
    estimate, left = np.empty(len(trials)), FIRST_GUESS
    for position in range(len(trials)):
        prior = float(_drawn(np.array([left]), CHAIN_STRENGTH, rng)[0])
        left = (float(successes[position]) + CHAIN_STRENGTH * prior) / (float(trials[position]) + CHAIN_STRENGTH)
        left = estimate[position] = min(max(left, EDGE), 1.0 - EDGE)
    return estimate


def _drawn(mean: Floats, strength: float, rng: np.random.Generator | None) -> Floats:
    return mean if rng is None else np.clip(rng.beta(strength * mean, strength * (1.0 - mean)), EDGE, 1.0 - EDGE)
