"""Size of one unit of work, so that serving gets the device back in time: measured, never assumed.

A unit's time is about a fixed part (the context that everything in it attends to, and launching its kernels) and a part that
grows with its blocks. Both are estimated by recursive least squares, with more weight on slow units, since the slow end
matters. Units are sized for `SHARE` of the budget, since arriving requests slow the current one down. The first units are as
small as possible. Two sizes are needed to tell the parts apart, so another one is tried where all were alike.

Where the fixed part is long, small units would do little else. They get as many blocks as take the same time again, within the
budget; beyond it only if one block is beyond it, too. So a unit never takes more than twice what the smallest would.

Compiling a kernel makes a unit hundreds of times as slow, once. So a unit that is far from what was expected counts only once
several in a row were: then all before them is forgotten.
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
_OUTLIER = 5.0
"""How many times as long, or as short, as expected a unit must be to be odd."""
_ODD_IN_A_ROW = 3
"""So many show that the expectation was wrong."""


class Pace:
    """Sizes units, in blocks.

    Args:
        budget_s: longest time that serving may wait for a unit; 0: units are as large as requested.
    """

    def __init__(self, budget_s: float) -> None:
        self._budget_s = budget_s
        self._largest = self._num_odd = 0
        self._sums = [0.0] * 5  # of weights w, and of w·n, w·n², w·s, w·n·s

    def blocks(self, wanted: int) -> int:
        """Return how many of `wanted` blocks the next unit should do, at least one."""
        if not self._budget_s:
            return wanted
        if not self._largest:
            return 1
        if self._are_alike:
            size = round(self._sums[1] / self._sums[0])
            return min(wanted, size // 2 if size > 1 else 2)
        fixed_s, block_s = self.costs
        if block_s <= 0.0:
            fitting = wanted
        else:
            fitting = math.floor((SHARE * self._budget_s - fixed_s) / block_s)
            worth = math.floor(fixed_s / block_s)
            if fixed_s + block_s <= self._budget_s:
                worth = min(worth, math.floor((self._budget_s - fixed_s) / block_s))
            fitting = max(fitting, worth)
        return max(1, min(wanted, fitting, int(_GROWTH * self._largest)))

    def observe(self, num_blocks: int, seconds: float) -> None:
        """Record the blocks and time of a unit."""
        self._largest = max(self._largest, num_blocks)
        fixed_s, block_s = self.costs
        expected_s = fixed_s + block_s * num_blocks
        is_odd = expected_s > 0.0 and not expected_s / _OUTLIER <= seconds <= expected_s * _OUTLIER
        self._num_odd = self._num_odd + 1 if is_odd else 0
        if is_odd and self._num_odd < _ODD_IN_A_ROW:
            return
        if is_odd:
            self._sums, self._num_odd, expected_s = [0.0] * 5, 0, 0.0
        weight = _SLOW_WEIGHT if seconds > expected_s else 1.0
        new = (1.0, num_blocks, num_blocks**2, seconds, num_blocks * seconds)
        self._sums = [_FORGETTING * old + weight * value for old, value in zip(self._sums, new, strict=True)]

    @property
    def _are_alike(self) -> bool:
        """Whether all units had the same size, so that the parts of their time can't be told apart."""
        weight, n, nn, _, _ = self._sums
        return nn - n * n / weight < 1e-6 * nn

    @property
    def costs(self) -> tuple[float, float]:
        """Return the seconds of a unit without blocks, and of each block."""
        weight, n, nn, s, ns = self._sums
        if not weight:
            return 0.0, 0.0
        if self._are_alike:  # all time is attributed to the blocks
            return 0.0, s / n
        block_s = max((ns - n * s / weight) / (nn - n * n / weight), 0.0)
        return max((s - block_s * n) / weight, 0.0), block_s


def run_through(parts: Generator[None, None, R]) -> R:
    """Run all parts of some work at once; return the generator's result."""
    while True:
        try:
            next(parts)
        except StopIteration as end:
            result: R = end.value
            return result
