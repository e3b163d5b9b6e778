"""Which workload a request counts under. Labels come from clients, so their number is bounded, everywhere by the same rule.

At most MAX_WORKLOADS names are kept apart, DEFAULT_WORKLOAD and OTHER_WORKLOAD among them. Further labels count as
OTHER_WORKLOAD until a name has been out of use for RECENT_S: then it makes room. The engine applies the rule to its requests,
which then have the same name in events and samples. The daemon applies it to what its engines send, and the trainer to the
samples that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set

DEFAULT_WORKLOAD = "default"
"""Of requests without a label."""
OTHER_WORKLOAD = "other"
"""Of requests whose label came when MAX_WORKLOADS names were in use."""
MAX_WORKLOADS = 64
MAX_LABEL_CHARS = 64
RECENT_S = 600.0
"""A name used so lately keeps its place. Clients with a label for each request can't make more names than this allows."""
_RESERVED = frozenset({DEFAULT_WORKLOAD, OTHER_WORKLOAD})


def workload_of(label: str, known: Set[str]) -> str:
    """The name that a label counts under while these names are known."""
    if label in known or label in _RESERVED:
        return label
    return label if len(known | _RESERVED) < MAX_WORKLOADS else OTHER_WORKLOAD


class WorkloadNames:
    """The names that are known. A new label takes the place of the name that was used longest ago, but for the recent ones.

    Args:
        known: names with a place from the start.
        is_in_use: whether a name must keep its place though no label has asked for it for long.
        on_lost: called with each name that loses its place.
    """

    def __init__(
        self,
        known: Iterable[str] = (),
        is_in_use: Callable[[str], bool] = lambda name: False,
        on_lost: Callable[[str], object] = lambda name: None,
    ) -> None:
        self._used_s = dict.fromkeys((name for name in known if name not in _RESERVED), 0.0)
        """Name -> its latest use, in this order."""
        self._is_in_use, self._on_lost = is_in_use, on_lost
        self.num_pooled = 0
        """How often a label was counted as OTHER_WORKLOAD for want of room."""

    def __call__(self, label: str, now_s: float = 0.0) -> str:
        """The name that a label counts under at this time; without times no name ever loses its place."""
        if label in _RESERVED:
            return label
        if self._used_s.pop(label, None) is None and not self._has_room(now_s):
            self.num_pooled += 1
            return OTHER_WORKLOAD
        self._used_s[label] = now_s
        return label

    def _has_room(self, now_s: float) -> bool:
        while len(self._used_s) >= MAX_WORKLOADS - len(_RESERVED):
            oldest = next(iter(self._used_s), None)
            if oldest is None or now_s - self._used_s[oldest] < RECENT_S:
                return False
            del self._used_s[oldest]
            if self._is_in_use(oldest):
                self._used_s[oldest] = now_s
            else:
                self._on_lost(oldest)
        return True
