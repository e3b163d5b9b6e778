"""The trainer's memory of the traffic: bounded, fair to small and to old workloads, with a held-out part.

Memory is shared by water-filling. When the cap is reached, the stratum (workload, held out or not) that is largest for its
share drops one stretch. So a workload below its fair part never loses to a busy one. No session gets more than
`max_session_share` of the cap, so no single client can decide what is learnt. If allowed, what doesn't fit in memory goes to
disk (`spill`).

Workloads are named as the engine names them (`adapt.protocol.workloads`). A name that makes room for a new label takes its
samples along; until then they stay, however old.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from honed.adapt.protocol.workloads import WorkloadNames
from honed.recalib.config.trainer import SampleSettings
from honed.recalib.samples.hold_out import HoldOut
from honed.recalib.samples.repetition import MAX_LOOP_PERIOD, MIN_LOOP_ROWS, longest_varied_stretch
from honed.recalib.samples.reservoir import Stratum
from honed.recalib.samples.spill import Key, Spill
from honed.recalib.samples.stretch import Stretch


class SampleStore:
    """Stretches by workload and by side of the hold-out."""

    def __init__(
        self,
        settings: SampleSettings,
        hold_out: HoldOut,
        seed: int = 0,
        spill: Spill | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self._hold_out, self.spill, self._monotonic = settings, hold_out, spill, monotonic
        self.cap_bytes = settings.sample_bytes
        self._rng = np.random.default_rng(seed)
        self._strata: dict[tuple[str, bool], Stratum] = {}
        self._names = WorkloadNames(on_lost=self._drop)
        self._sessions: Counter[str] = Counter()
        self._session_bytes: Counter[str] = Counter()
        self.num_bytes = 0
        self.num_refused = 0
        """Stretches too short or too repetitive."""

    def add(self, stretch: Stretch) -> bool:
        """Add a stretch up to the end of its longest part without a loop; return False if too little is left of it.

        What comes before that part is context for it, like a prompt, and isn't learned.
        """
        settings, num_emitted = self.settings, stretch.num_judged
        varied = longest_varied_stretch(stretch.token_ids, stretch.num_prompt_tokens, MAX_LOOP_PERIOD, MIN_LOOP_ROWS)
        num_varied = varied.stop - varied.start
        if not num_varied or num_varied * 2 < num_emitted or varied.stop < settings.min_rows:
            self.num_refused += 1
            return False
        if num_varied < num_emitted:
            stretch = replace(stretch.cut(slice(0, varied.stop)), num_prompt_tokens=varied.start)
        key = self.key_of(stretch)
        stretch = replace(stretch, workload=key[0])
        stratum = self._strata.setdefault(key, Stratum(self._rng))
        stratum.add(stretch)
        self.num_bytes += stretch.num_bytes
        self._sessions[stretch.session] += 1
        self._session_bytes[stretch.session] += stretch.num_bytes
        limit = max(self.settings.max_session_share * self.cap_bytes, stretch.num_bytes)
        while self._session_bytes[stretch.session] > limit:
            self._forget_one(self._stratum_of(stretch.session, stratum).drop_session(stretch.session))
        self._shrink()
        return True

    def hold_to(self, cap_bytes: int) -> None:
        """Hold no more than this from now on."""
        self.cap_bytes = cap_bytes
        self._shrink()

    def key_of(self, stretch: Stretch) -> Key:
        """Key of a stretch: its workload, and its session's side of the hold-out."""
        return self._names(stretch.workload, self._monotonic()), self._hold_out.is_held_out(stretch.session)

    def stretches(self, workload: str, is_held_out: bool) -> list[Stretch]:
        """Return the stretches of one workload on one side, on disk and in memory."""
        stratum = self._strata.get((workload, is_held_out))
        spilled = self.spill.stretches((workload, is_held_out)) if self.spill is not None else ()
        return [*spilled, *(stratum.stretches() if stratum else ())]

    def workloads(self) -> list[str]:
        """Workloads with any stretch, by name."""
        spilled = self.spill.workloads() if self.spill is not None else set()
        return sorted(spilled | {workload for (workload, _), stratum in self._strata.items() if len(stratum)})

    @property
    def num_stretches(self) -> int:
        """Stretches held in memory."""
        return sum(len(stratum) for stratum in self._strata.values())

    @property
    def num_sessions(self) -> int:
        """Number of sessions with any stretch."""
        return len(self._sessions)

    def digest(self, stretches: Iterable[Stretch]) -> str:
        """Identify these rows without revealing their content (`HoldOut.digest`)."""
        return self._hold_out.digest(stretches)

    def forget(self) -> None:
        """Forget everything, on disk too."""
        if self.spill is not None:
            self.spill.purge()
        self._strata.clear()
        self._names = WorkloadNames(on_lost=self._drop)
        self._sessions.clear()
        self._session_bytes.clear()
        self.num_bytes = 0

    def _drop(self, workload: str) -> None:
        """Drop all stretches of a workload that has lost its name."""
        for side in (False, True):
            stratum = self._strata.pop((workload, side), None)
            for stretch in stratum.stretches() if stratum else ():
                self._forget_one(stretch)
        if self.spill is not None:
            self.spill.drop(workload)

    def _stratum_of(self, session: str, first: Stratum) -> Stratum:
        """Find a stratum with a stretch of the session, the given one last: the newest stretch should stay."""
        others = (s for s in self._strata.values() if s is not first and any(x.session == session for x in s.stretches()))
        return next(others, first)

    def _shrink(self) -> None:
        share = self.settings.held_out_share
        while self.num_bytes > self.cap_bytes and self.num_stretches > 1:
            key, stratum = max(
                self._strata.items(), key=lambda item: item[1].num_bytes / (share if item[0][1] else 1.0 - share)
            )
            dropped = stratum.drop_one()
            self._forget_one(dropped)
            if self.spill is not None:
                self.spill.keep(dropped, key)

    def _forget_one(self, stretch: Stretch) -> None:
        self.num_bytes -= stretch.num_bytes
        self._session_bytes[stretch.session] -= stretch.num_bytes
        self._sessions[stretch.session] -= 1
        if not self._sessions[stretch.session]:
            del self._sessions[stretch.session], self._session_bytes[stretch.session]
