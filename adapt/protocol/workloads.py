"""Which workload a request counts under. Labels come from clients, so their number is bounded, everywhere by the same rule.

At most MAX_WORKLOADS names are kept apart, DEFAULT_WORKLOAD and OTHER_WORKLOAD among them. The first labels keep their names;
every further one counts as OTHER_WORKLOAD. The engine applies the rule to its requests, the daemon to what its engines send,
and the trainer to the samples that it holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Set

DEFAULT_WORKLOAD = "default"
"""Of requests without a label."""
OTHER_WORKLOAD = "other"
"""Of requests whose label came when MAX_WORKLOADS names were known."""
MAX_WORKLOADS = 64
MAX_LABEL_CHARS = 64
_RESERVED = frozenset({DEFAULT_WORKLOAD, OTHER_WORKLOAD})


def workload_of(label: str, known: Set[str]) -> str:
    """The name that a label counts under while these names are known."""
    if label in known or label in _RESERVED:
        return label
    return label if len(known | _RESERVED) < MAX_WORKLOADS else OTHER_WORKLOAD


class WorkloadNames:
    """The names that are known, for those who never forget one."""

    def __init__(self, known: Iterable[str] = ()) -> None:
        self._known = {*known, *_RESERVED}
        self.num_pooled = 0
        """How often a label was counted as OTHER_WORKLOAD for want of room."""

    def __call__(self, label: str) -> str:
        """The name that a label counts under; a new one becomes known while there is room."""
        if label in self._known:
            return label
        name = workload_of(label, self._known)
        self._known.add(name)
        self.num_pooled += name != label
        return name

    def look_up(self, label: str) -> str:
        """The same, for showing: changes and counts nothing."""
        return workload_of(label, self._known)
