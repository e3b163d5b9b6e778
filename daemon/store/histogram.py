"""A histogram without labels, filled by one thread."""

from __future__ import annotations

import math
from collections.abc import Iterable


class Histogram:
    """Counts values by upper bounds."""

    def __init__(self, bounds: Iterable[float]) -> None:
        self._bounds = [*bounds, math.inf]
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        index = next(i for i, bound in enumerate(self._bounds) if value <= bound)
        self._counts[index] += 1
        self._sum += value

    def exposition(self) -> tuple[list[tuple[str, float]], float]:
        """Cumulative buckets for Prometheus, and the sum of all values."""
        total, rows = 0, []
        for bound, count in zip(self._bounds, list(self._counts), strict=True):
            total += count
            rows.append(("+Inf" if bound == math.inf else str(bound), float(total)))
        return rows, self._sum
