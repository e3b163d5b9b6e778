"""The mix of samples for a micro-step: mostly the workloads that must gain, and always some of the others.

A drafter trained on new traffic alone forgets the old. On the tiny pair, training on a new domain alone cost the old one 14 %
of its acceptance length. So a share of the draws goes to the other workloads, each with equal probability however busy it is.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np

from honed.adapt.protocol.arrays import Floats
from honed.recalib.samples.selection import Selection
from honed.recalib.samples.stretch import Stretch

MUST_GAIN_SHARE = 0.4
"""Share of the draws for workloads that must gain; the rest goes to the others, against forgetting. A larger share gains more
and forgets more. On the tiny pair, with about 90 s of one core, 0.4 multiplied the new workload's acceptance length by 1.60 at
temperature 0 and kept 0.993 of the old one's. At temperature 0.8 the values were 1.08 and 1.004 (`make bench-recalib`)."""


class WorkloadMix:
    """Draws context of about `rows` rows at a time."""

    REFRESH_DRAWS = 64
    """Draws between two reads of the samples: traffic continues during training."""

    def __init__(
        self,
        samples: Selection,
        must_gain: Collection[str],
        must_gain_share: float,
        rows: int,
        seed: int = 0,
    ) -> None:
        self._samples, self._must_gain = samples, frozenset(must_gain)
        self._must_gain_share, self._rows = must_gain_share, rows
        self._rng = np.random.default_rng(seed)
        self._num_draws = 0
        self._held: dict[str, list[Stretch]] = {}
        self._chances: dict[str, Floats] = {}
        """Of each stretch: in proportion to its emitted tokens, as the server's rounds are."""
        self._emitted: dict[str, float] = {}
        """Emitted tokens of each workload."""

    def draw(self) -> list[Stretch]:
        """Draw stretches, or windows of them, for one micro-step; empty if nothing usable is held."""
        if self._num_draws % self.REFRESH_DRAWS == 0 or not self._held:
            self._refresh()
        self._num_draws += 1
        chosen: list[Stretch] = []
        left = self._rows
        while self._held and left >= min(64, self._rows):
            workload = self._choose_workload()
            stretches = self._held[workload]
            stretch = stretches[int(self._rng.choice(len(stretches), p=self._chances[workload]))]
            chosen.append(self._window(stretch, left))
            left -= chosen[-1].num_rows
        return chosen

    def state(self) -> dict[str, Any]:
        """Return what the next draws depend on apart from the samples, as plain JSON."""
        return {"rng": self._rng.bit_generator.state, "num_draws": self._num_draws}

    def load_state(self, state: dict[str, Any]) -> None:
        """Resume from `state`."""
        self._rng.bit_generator.state = state["rng"]
        self._num_draws = int(state["num_draws"])

    def _refresh(self) -> None:
        held = {workload: self._samples.stretches(workload, False) for workload in self._samples.workloads()}
        self._held = {workload: stretches for workload, stretches in held.items() if any(s.num_judged for s in stretches)}
        self._chances, self._emitted = {}, {}
        for workload, stretches in self._held.items():
            emitted = np.array([one.num_judged for one in stretches], float)
            self._emitted[workload] = float(emitted.sum())
            self._chances[workload] = emitted / self._emitted[workload]

    def _choose_workload(self) -> str:
        wanted = [w for w in self._held if w in self._must_gain]
        others = [w for w in self._held if w not in self._must_gain]
        if not wanted:  # any gain counts: in proportion to the traffic
            sizes = np.array([self._emitted[w] for w in others])
            return others[int(self._rng.choice(len(others), p=sizes / sizes.sum()))]
        chosen = wanted if not others or self._rng.random() < self._must_gain_share else others
        return chosen[int(self._rng.integers(len(chosen)))]

    def _window(self, stretch: Stretch, rows: int) -> Stretch:
        """Cut a long stretch. Half of the rows are emitted ones, if there are so many: only these are learned.

        A window from the middle of an answer begins with context, too.
        """
        if stretch.num_rows <= rows:
            return stretch
        first_end = max(stretch.num_prompt_tokens + min(stretch.num_judged, rows // 2), rows)
        end = int(self._rng.integers(first_end, stretch.num_rows + 1))
        window = stretch.cut(slice(end - rows, end))
        return replace(window, num_prompt_tokens=max(window.num_prompt_tokens, rows // 4 if end > rows else 0))
