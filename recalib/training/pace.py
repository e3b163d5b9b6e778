"""Size of one unit of work, so that serving gets the device back in time: measured, never assumed.

A unit's time is about a fixed part (the context that everything in it attends to) and a part that grows with its blocks. Both
are estimated by recursive least squares, with more weight on slow units, since the slow end matters. Units are sized for
`SHARE` of the budget, since arriving requests slow the current one down. The first units are as small as possible.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TypeVar

R = TypeVar("R")

SHARE = 0.6
_FORGETTING = 0.97
_SLOW_WEIGHT = 4.0
_GROWTH = 2.0
"""Limit of a unit's blocks, relative to the largest measured one."""


class Pace:
    """Sizes units, in blocks.

    Args:
        budget_s: longest time that serving may wait for a unit; 0: units are as large as requested.
    """

    def __init__(self, budget_s: float) -> None:
        self._goal_s = SHARE * budget_s
        self._largest = 0
        self._sums = [0.0] * 5  # of weights w, and of w·n, w·n², w·s, w·n·s

    def blocks(self, wanted: int) -> int:
        """Return how many of `wanted` blocks the next unit should do, at least one."""
        if not self._goal_s:
            return wanted
        if not self._largest:
            return 1
        fixed_s, block_s = self.costs
        fitting = math.floor((self._goal_s - fixed_s) / block_s) if block_s > 0 else wanted
        return max(1, min(wanted, fitting, int(_GROWTH * self._largest)))

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Record the blocks and time of a unit."""
        self._largest = max(self._largest, num_blocks)
        fixed_s, block_s = self.costs
        is_slow = seconds > fixed_s + block_s * num_blocks
        weight = _SLOW_WEIGHT if is_slow else 1.0
        new = (1.0, num_blocks, num_blocks**2, seconds, num_blocks * seconds)
        self._sums = [_FORGETTING * old + weight * value for old, value in zip(self._sums, new, strict=True)]

    @property
    def costs(self) -> tuple[float, float]:
        """Return the seconds of a unit without blocks, and of each block."""
        weight, n, nn, s, ns = self._sums
        if not weight:
            return 0.0, 0.0
        scatter = nn - n * n / weight
        if scatter < 1e-6 * nn:  # all of one size: the parts can't be separated, so all time is attributed to the blocks
            return 0.0, s / n
        block_s = max((ns - n * s / weight) / scatter, 0.0)
        return max((s - block_s * n) / weight, 0.0), block_s


def run_through(parts: Generator[None, None, R]) -> R:
    """Run all parts of some work at once; return the generator's result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: R = end.value
            return result
