"""Bounded memory of the newest stretches and a uniform sample of older ones.

Half of a stratum holds the newest stretches, in order. Stretches that leave it compete for the other half by Vitter's algorithm
R: after n stretches have left the newer half, each of them is in the older half with the same probability. So a workload that
changed yesterday is represented by today's traffic and by last week's.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from honed.recalib.samples.stretch import Stretch


class Stratum:
    """The stretches of one workload on one side of the hold-out."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._recent: deque[Stretch] = deque()
        self._old: list[Stretch] = []
        self._recent_bytes = self._old_bytes = 0
        self._num_aged = 0

    def __len__(self) -> int:
        return len(self._recent) + len(self._old)

    @property
    def num_bytes(self) -> int:
        """Memory that it holds."""
        return self._recent_bytes + self._old_bytes

    def stretches(self) -> list[Stretch]:
        """Return all stretches, older half first."""
        return [*self._old, *self._recent]

    def add(self, stretch: Stretch) -> None:
        """Add the newest one."""
        self._recent.append(stretch)
        self._recent_bytes += stretch.num_bytes

    def drop_one(self) -> Stretch:
        """Remove one: the newer half passes its oldest on, and the older half stays a uniform sample."""
        assert len(self) > 0
        while self._recent_bytes > self._old_bytes or not self._old:
            aged = self._recent.popleft()
            self._recent_bytes -= aged.num_bytes
            self._num_aged += 1
            if self._recent and self._old_bytes + aged.num_bytes <= self._recent_bytes:
                self._keep(aged)
            elif self._old and self._rng.random() * self._num_aged < len(self._old):
                dropped = self._take(int(self._rng.integers(len(self._old))))
                self._keep(aged)
                return dropped
            else:
                return aged
        return self._take(int(self._rng.integers(len(self._old))))

    def drop_session(self, session: str) -> Stretch:
        """Remove the oldest stretch of one session, which must have one."""
        for at, stretch in enumerate(self._old):
            if stretch.session == session:
                return self._take(at)
        at, stretch = next((i, s) for i, s in enumerate(self._recent) if s.session == session)
        del self._recent[at]
        self._recent_bytes -= stretch.num_bytes
        return stretch

    def _keep(self, stretch: Stretch) -> None:
        self._old.append(stretch)
        self._old_bytes += stretch.num_bytes

    def _take(self, at: int) -> Stretch:
        """Remove from the older half, whose order doesn't matter."""
        self._old[at], self._old[-1] = self._old[-1], self._old[at]
        stretch = self._old.pop()
        self._old_bytes -= stretch.num_bytes
        return stretch
