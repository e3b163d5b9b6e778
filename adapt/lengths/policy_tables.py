"""A policy's tables for quick use inside the engine, made on another thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from honed.adapt.acceptance.context_shift import NUM_BUCKETS
from honed.adapt.acceptance.depth_calibration import DepthLines
from honed.adapt.acceptance.estimate import EDGE, FIRST_GUESS, information, scale_odds, survival
from honed.adapt.lengths.block_size import PRICED, CurveTable, latency_gains
from honed.adapt.protocol.arrays import Floats
from honed.adapt.protocol.wire import Policy
from honed.adapt.steps.step_time import StepTimeModel

NUM_THETAS, THETA_STEPS = 48, 10.0
_THETAS: Floats = np.exp((np.arange(NUM_THETAS) - NUM_THETAS // 2) / THETA_STEPS)
"""Requests' failure odds relative to their workload's are rounded to steps of 10 %, so that requests share survival curves."""
Records: TypeAlias = npt.NDArray[np.void]


Label: TypeAlias = tuple[str, bool]
"""Workload, and whether the request keeps its chain where others get trees."""


@dataclass(frozen=True, slots=True)
class PolicyTables:
    """A policy's tables: survival curves of every workload and theta. Made on any thread by `of`.

    Letters: W = workloads of the policy (row 0 serves unnamed ones), K = draft tokens.
    """

    policy: Policy | None
    model: StepTimeModel
    row_of_label: dict[Label, int]
    is_latency: bool
    curves: CurveTable  # [W * thetas, K] survival, or its gain in latency, up to the policy's limit
    constants: Floats  # [W] weight of the workload's curve in a request's theta
    on_failure: Floats  # [W, K+1] addition of a failure after n accepted drafts to one Mantel-Haenszel sum
    on_success: Floats  # [W, K+1] addition of n accepted drafts to the other
    shift: Floats  # [W, buckets] steps of theta by context length
    has_shift: bool  # whether any step isn't 0
    limit: int  # most draft tokens of any request
    static_k: int
    fallback_k: int  # once the policy has expired
    hysteresis: float
    shared_lengths: tuple[int, ...]  # see `shared_lengths_of`
    arrived_s: float  # on the engine's monotonic clock: the policy's time to live begins here

    @classmethod
    def of(cls, policy: Policy | None, num_spec_tokens: int, num_tokens: int = 0, arrived_s: float = 0.0) -> PolicyTables:
        """Tabulate a policy, with costs of steps of at least `num_tokens`; its unusable figures are replaced."""
        priors = policy.priors if policy is not None else []
        usable = [_usable_curve(prior.acceptance, num_spec_tokens) for prior in priors]
        acceptance = np.array(usable or [_usable_curve([], num_spec_tokens)])  # [W, K]
        strengths = [within(prior.strength, 0.1, 1e6, 8.0) for prior in priors] or [8.0]
        lines = [DepthLines.usable(prior.depth_intercepts, prior.depth_slopes, num_spec_tokens) for prior in priors]
        scaled = scale_odds(acceptance[:, None, :], _THETAS[:, None])  # [W, thetas, K]
        for line, of_row in zip(lines, scaled, strict=False):
            of_row[:] = line.apply(of_row)
        by_theta = survival(scaled)
        is_latency = policy is not None and policy.kind == "latency"
        if is_latency:
            by_theta = latency_gains(by_theta)
        by_theta = by_theta.reshape(len(acceptance) * NUM_THETAS, num_spec_tokens)
        limit, none = limit_of(policy, num_spec_tokens), np.zeros((len(acceptance), 1))
        shift, has_shift = _usable_shift([prior.context_shift for prior in priors] or [[]])
        return cls(
            policy,
            _usable_model(policy, num_tokens),
            {(prior.workload, prior.keeps_chain): row for row, prior in enumerate(priors)},
            is_latency,
            CurveTable.of(by_theta[:, :limit]),
            np.array([s * information(a) + 1e-9 for s, a in zip(strengths, acceptance, strict=True)]),
            np.concatenate([acceptance, none], axis=1),
            np.concatenate([none, (1.0 - acceptance).cumsum(axis=1)], axis=1),
            shift,
            has_shift,
            limit,
            min(max(policy.static_k, 0), limit) if policy is not None else limit,
            _fallback_of(policy, limit),
            within(policy.hysteresis, 0.0, 10.0, 0.0) if policy is not None else 0.0,
            shared_lengths_of(policy, limit),
            arrived_s,
        )

    def are_equal(self, count: int) -> bool:
        """Whether all requests of a step with so many get the same length."""
        return are_equal(self.policy, count)

    def row_of(self, label: Label) -> int:
        """Row of a label's requests; that of unnamed ones if the policy doesn't know it."""
        keeps_chain = label[1] and ("", True) in self.row_of_label
        return self.row_of_label.get((label[0], keeps_chain), self.row_of_label.get(("", keeps_chain), 0))


def limit_of(policy: Policy | None, num_spec_tokens: int) -> int:
    """Most draft tokens that a policy allows any request."""
    if policy is None:
        return num_spec_tokens
    limit = min(max(policy.max_k, 0), num_spec_tokens)
    return min(limit, policy.request_ceiling) if policy.request_ceiling >= 0 else limit


def _fallback_of(policy: Policy | None, limit: int) -> int:
    if policy is None:
        return limit
    return min(max(policy.static_k if policy.fallback_k < 0 else policy.fallback_k, 0), limit)


def are_equal(policy: Policy | None, count: int) -> bool:
    """Whether all of so many requests in a step get the same length."""
    if policy is None or not policy.equal_lengths:
        return False
    return policy.kind not in PRICED or not 0 <= policy.equal_up_to < count


def shared_lengths_of(policy: Policy | None, limit: int) -> tuple[int, ...]:
    """Lengths allowed where all requests of a step must get the same, ascending from 0; empty where they needn't."""
    if policy is None or not policy.equal_lengths:
        return ()
    lengths = set(range(1, limit + 1))
    if policy.captured_lengths:
        lengths &= set(policy.captured_lengths)
    return (0, *sorted(lengths))


def _usable_model(policy: Policy | None, num_tokens: int) -> StepTimeModel:
    model = StepTimeModel.from_policy(policy) if policy is not None else StepTimeModel()
    if model.is_ready:
        model.prepare(num_tokens)
    return model


def _usable_curve(acceptance: Sequence[float], num_spec_tokens: int) -> Floats:
    """Make K figures in (0, 1) of any input: the last usable one is repeated where they are missing."""
    curve, last = np.empty(num_spec_tokens), FIRST_GUESS
    for position in range(num_spec_tokens):
        value = acceptance[position] if position < len(acceptance) else last
        last = within(value, EDGE, 1.0 - EDGE, last)
        curve[position] = last
    return curve


def _usable_shift(shifts: Sequence[Sequence[float]]) -> tuple[Floats, bool]:
    """Turn factors by context length into steps of theta: 1 for missing or unusable ones."""
    factors = np.ones((len(shifts), NUM_BUCKETS))
    for row, shift in zip(factors, shifts, strict=True):
        usable = [within(value, 0.1, 10.0, 1.0) if value > 0.0 else 1.0 for value in shift[:NUM_BUCKETS]]
        row[: len(usable)] = usable
    return np.log(factors) * THETA_STEPS, bool((factors != 1.0).any())


def within(value: float, low: float, high: float, otherwise: float) -> float:
    """Return the value, or the end of [low, high] that it lies beyond; `otherwise` for NaN and infinities."""
    return min(max(value, low), high) if math.isfinite(value) else otherwise
