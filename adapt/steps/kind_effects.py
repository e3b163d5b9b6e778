"""What kinds of steps cost beside the smooth price: kernels change at sizes that no formula knows.

A step's relative residual is taken for the sum of its kind's, its group's (see `time_groups`) and its own,

    y / ŷ − 1 = v[kind] + u[group] + e,

a kind being batch size and draft tokens per request, rounded. The three variances come from products of residuals: of steps of
one kind in different groups, of different kinds in one group, and of each with itself. The effects are the best linear
predictors given these: a kind that was seen seldom, or in few groups, is drawn to none, and where the smooth price says it all
the variance of kinds is 0.

Source: Henderson, Biometrics 31 (1975), "Best linear unbiased estimation and prediction under a selection model"; variances by
the method of moments, as Balestra and Nerlove (see `time_groups`).

Letters: n = steps, G = kinds.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.steps.time_groups import GROUP_STEPS

_SWEEPS = 30
_FAR = 3.0
"""Residuals beyond so many times their spread are cut off."""
_FEWEST = 3
_LEAST_SHARE = 0.02
"""A variance of kinds below this share of the steps' own is taken for none."""


def kind_effects(residuals: Floats, kind: Ints, numbers: Floats, spread: float) -> Floats:
    """Estimate v, [G].

    Args:
        residuals: y / ŷ − 1 of each step, [n].
        kind: of each step, from 0 without gaps, [n].
        numbers: of each step in the order of time, finite, [n].
        spread: of residuals, robust.
    """
    num_kinds = int(kind.max()) + 1 if len(kind) else 0
    effects: Floats = np.zeros(num_kinds)
    if num_kinds < 2:
        return effects
    typical = _medians(residuals, kind)[kind]
    own = typical + np.clip(residuals - typical, -_FAR * spread, _FAR * spread)
    own = own - own.mean()
    _, group = np.unique(np.floor_divide(numbers, GROUP_STEPS), return_inverse=True)
    of_kinds, of_groups, rest = _variances(own, kind, group)
    if of_kinds <= _LEAST_SHARE * rest:
        return effects
    count, length = np.bincount(kind), np.bincount(group)
    of_group = np.zeros(len(length))
    for _ in range(_SWEEPS):  # Gauss-Seidel on the mixed model's equations
        effects = np.bincount(kind, own - of_group[group]) / (count + rest / of_kinds)
        if of_groups > 0.0:
            of_group = np.bincount(group, own - effects[kind]) / (length + rest / of_groups)
    return effects


def _medians(residuals: Floats, kind: Ints) -> Floats:
    """Median of each kind's residuals, [G]; 0 where fewer than three are known."""
    order = np.lexsort((residuals, kind))
    count = np.bincount(kind)
    first = np.cumsum(count) - count
    ordered = residuals[order]
    middle: Floats = 0.5 * (ordered[first + (count - 1) // 2] + ordered[first + count // 2])
    return np.where(count < _FEWEST, 0.0, middle)


def _variances(own: Floats, kind: Ints, group: npt.NDArray[np.intp]) -> tuple[float, float, float]:
    """Variance between kinds, between groups and of the rest. That of kinds is less by a standard error than it seems."""
    _, both = np.unique(kind * (int(group.max()) + 1) + group, return_inverse=True)
    of_groups = _shared(own, group, both)
    in_both, num_own = np.bincount(both), len(own)
    within = float((own**2).sum()) - float((np.bincount(both, own) ** 2 / in_both).sum())
    every = float((own**2).mean())
    rest = max(within / (num_own - len(in_both)) if num_own > len(in_both) else every, 1e-12)
    kind_of_pair = np.empty(len(in_both), dtype=np.int64)
    kind_of_pair[both] = kind
    count = np.bincount(kind)
    means = np.bincount(kind, own) / count
    of_mean = of_groups * np.bincount(kind_of_pair, in_both.astype(np.float64) ** 2) / count**2 + rest / count
    return _between(means, of_mean), of_groups, rest


def _between(means: Floats, of_mean: Floats) -> float:
    """The variance of what means [G] estimate, given the variances of their errors; less by a standard error.

    Source: the generalised Q statistic of DerSimonian and Laird, set to its upper value for G means, solved by bisection.
    """
    least = len(means) - 1 + np.sqrt(2.0 * (len(means) - 1))

    def excess(between: float) -> float:
        weights = 1.0 / (between + of_mean)
        middle = float((weights * means).sum() / weights.sum())
        return float((weights * (means - middle) ** 2).sum()) - float(least)

    low, high = 0.0, float(means.max() - means.min()) ** 2
    if excess(low) <= 0.0:
        return 0.0
    for _ in range(30):
        between = 0.5 * (low + high)
        low, high = (between, high) if excess(between) > 0.0 else (low, between)
    return low


def _shared(own: Floats, group: npt.NDArray[np.intp], both: npt.NDArray[np.intp]) -> float:
    """What steps of one group have in common, from products of those that share nothing else."""
    num_pairs = _num_pairs(group) - _num_pairs(both)
    return max((_square_sums(own, group) - _square_sums(own, both)) / num_pairs, 0.0) if num_pairs > 0.0 else 0.0


def _square_sums(values: Floats, group: npt.NDArray[np.intp]) -> float:
    return float((np.bincount(group, values) ** 2).sum())


def _num_pairs(group: npt.NDArray[np.intp]) -> float:
    return float((np.bincount(group).astype(np.float64) ** 2).sum())
