"""What one operation may use of the samples.

A workload that drifted has samples from before and from after. Only the latter are of the traffic that must gain. The earlier
ones count as a workload of their own: a share of the training keeps what they teach, and the gate sees to it that little of it
is lost. Those that may be of either time, since the trainer was restarted in between, are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from honed.recalib.samples.store import SampleStore
from honed.recalib.samples.stretch import Stretch
from honed.recalib.samples.traffic import JointStore

EARLIER = " (earlier)"
"""Ends the name that earlier samples of a workload go by."""


class Selection:
    """The usable stretches of a store, with those of some workloads divided by time.

    Args:
        divided: workloads whose stretches from before `since_s` go by another name.
        since_s: Unix time; 0: nothing is divided.
    """

    def __init__(
        self,
        store: SampleStore | JointStore,
        is_usable: Callable[[Stretch], bool],
        divided: Collection[str] = (),
        since_s: float = 0.0,
    ) -> None:
        self._store, self._is_usable, self._since_s = store, is_usable, since_s
        self._divided = frozenset(divided if since_s > 0.0 else ())
        self._earlier = dict[str, str]()
        """Names of earlier samples -> their workload."""
        for label in sorted(self._divided):
            name = label + EARLIER
            while name in store.workloads():  # clients may name a workload so
                name += "*"
            self._earlier[name] = label

    def workloads(self) -> list[str]:
        """Names of all workloads that may have any."""
        return [*self._store.workloads(), *self._earlier]

    def stretches(self, workload: str, is_held_out: bool) -> list[Stretch]:
        """Those of one workload on one side of the hold-out."""
        label = self._earlier.get(workload, "")
        if not label:
            held = self._store.stretches(workload, is_held_out)
            since_s = self._since_s if workload in self._divided else 0.0
            return [one for one in held if one.earliest_s >= since_s and self._is_usable(one)]
        held = self._store.stretches(label, is_held_out)
        return [replace(one, workload=workload) for one in held if 0 < one.taken_s < self._since_s and self._is_usable(one)]
