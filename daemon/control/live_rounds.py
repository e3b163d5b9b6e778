"""Rounds since the daemon started, by engine, workload and drafter version, for the acceptance metrics.

Each combination adds about thirty samples to a scrape, 4 KB of text. Versions come and go, so at most `limit` are kept. The one
whose rounds are oldest is dropped first. If it returns, its counters start at 0, which `rate()` handles as a reset. While all
are in use, as with many engines of many workloads, new ones count as the workload OTHER_WORKLOAD of their engine and version:
taking turns at the places would reset the counters all the time.
"""

from __future__ import annotations

from dataclasses import replace

from honed.adapt.protocol.workloads import OTHER_WORKLOAD, RECENT_S
from honed.daemon.store.rollups import Counts

Cell = tuple[str, str, str]
"""Engine id, workload, drafter version."""

MOST_CELLS = 1024
"""E.g. 8 engines of 62 workloads while two versions take turns."""


class LiveRounds:
    """The cells, least recently touched first. Guarded by the service's lock."""

    def __init__(self, limit: int = MOST_CELLS) -> None:
        self._limit = limit
        self._cells: dict[Cell, Counts] = {}
        self._touched_s: dict[Cell, float] = {}
        self.pooled_rounds = 0
        """Rounds counted as OTHER_WORKLOAD for want of room, plain ones included."""

    def add(self, cell: Cell, counts: Counts, now_s: float) -> None:
        """Add rounds to a cell, at a monotonic time."""
        if cell not in self._cells and not self._has_room(now_s):
            engine_id, _, version = cell
            cell = engine_id, OTHER_WORKLOAD, version
            self.pooled_rounds += counts.rounds + counts.plain_rounds
        held = self._cells.pop(cell, None)
        if held is None:
            held = Counts()
            if len(self._cells) >= self._limit:
                oldest = next(iter(self._cells))
                del self._cells[oldest], self._touched_s[oldest]
        held.add(counts)
        self._cells[cell], self._touched_s[cell] = held, now_s

    def _has_room(self, now_s: float) -> bool:
        return len(self._cells) < self._limit or now_s - self._touched_s[next(iter(self._cells))] >= RECENT_S

    def snapshot(self) -> list[tuple[Cell, Counts]]:
        """Copy of the cells, sorted by name, for rendering without the lock."""
        # Arrays aren't copied: adding replaces them.
        return sorted(((cell, replace(counts)) for cell, counts in self._cells.items()), key=lambda pair: pair[0])

    def workloads(self) -> set[tuple[str, str]]:
        """Engine id and workload of each cell."""
        return {(engine_id, workload) for engine_id, workload, _ in self._cells}
