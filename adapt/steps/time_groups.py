"""Groups of steps in a row, which have something in common: all slow, or all quick, for reasons that no batch explains.

A neighbour on the host, clocks, a page that is written: each lasts some steps, and what happened to be drafted meanwhile would
seem expensive. So a step's relative residual is taken for the sum of its group's and its own,

    y / ŷ − 1 = u[group] + e,    var(u) = λ·var(e),

a group being `GROUP_STEPS` steps in a row. λ, the variance ratio, is estimated with the fit. Generalised least squares then
compares kinds of steps within a group at full weight, while a group of one kind only counts little more than one step. A steady
machine has λ = 0.

Source: the error components model of Balestra and Nerlove, Econometrica 34 (1966), λ by the method of moments.
"""

from __future__ import annotations

import numpy as np

from honed.adapt.protocol.arrays import Floats, Ints

GROUP_STEPS = 16
_MOST_RATIO = 20.0
_LEAST_OWN_SHARE = 1e-3
_FAR = 3.0
"""Residuals beyond so many times their spread are cut off: outliers tell nothing of groups."""


class TimeGroups:
    """A sample of steps by group. Letters: n = steps, G = groups that have any of them.

    Args:
        numbers: [n] of each step, in the order of time; those that aren't finite belong to no group.
    """

    def __init__(self, numbers: Floats) -> None:
        is_in = np.isfinite(numbers)
        _, group = np.unique(np.floor_divide(numbers[is_in], GROUP_STEPS), return_inverse=True)
        order = np.argsort(group, kind="stable")
        self._steps: Ints = np.flatnonzero(is_in)[order]
        self._starts: Ints = np.flatnonzero(np.diff(group[order], prepend=-1))
        self._counts = np.diff(np.append(self._starts, len(order)))

    def variance_ratio(self, residuals: Floats, spread: float) -> float:
        """Estimate λ from relative residuals [n] of known spread. What all of them share is the fit's error, no group's."""
        num_pairs = int((self._counts * (self._counts - 1)).sum())
        if not num_pairs:
            return 0.0
        own = np.clip(residuals[self._steps], -_FAR * spread, _FAR * spread)
        own -= own.mean()
        squares = float((own**2).sum())
        shared = (float((self._sum(own) ** 2).sum()) - squares) / num_pairs
        every = max(squares / len(own), 1e-12)
        return min(max(shared, 0.0) / max(every - shared, _LEAST_OWN_SHARE * every), _MOST_RATIO)

    def between(self, weighted: Floats, weights: Floats, variance_ratio: float) -> Floats:
        """What groups alone make of the moments XᵀWX, [P, P], to be taken off them.

        Args:
            weighted: X times its weights, [n, P].
            weights: [n].
        """
        sums = self._sum(weighted[self._steps])
        shares = variance_ratio / (1.0 + variance_ratio * self._sum(weights[self._steps]))
        taken: Floats = (sums * shares[:, None]).T @ sums
        return taken

    def _sum(self, values: Floats) -> Floats:
        sums: Floats = np.add.reduceat(values, self._starts, axis=0) if len(values) else values
        return sums
