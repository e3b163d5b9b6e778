"""Durations for which honed held the engine's thread: the last ones, cheap to record."""

from __future__ import annotations

import numpy as np


class Latency:
    """The last `size` durations of one kind of work; written by one thread, read by another (a torn read is harmless)."""

    def __init__(self, size: int = 4096) -> None:
        self._ns = [0] * size
        self._count = 0

    def record(self, duration_ns: int) -> None:
        """Add one duration."""
        self._ns[self._count % len(self._ns)] = duration_ns
        self._count += 1

    def quantiles_us(self) -> tuple[float, float]:
        """(p50, p99) of the held durations, in microseconds; zeros when there are none."""
        held = self._ns[: min(self._count, len(self._ns))]
        if not len(held):
            return 0.0, 0.0
        p50, p99 = np.quantile(held, (0.5, 0.99))
        return float(p50) / 1e3, float(p99) / 1e3
