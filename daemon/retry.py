"""When to try again what has failed for a cause that may go away: a full disk, a mount that doesn't answer."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 600.0


@dataclass(slots=True)
class Retry:
    """Further attempts at one thing: the first at once, the others after growing pauses."""

    is_wanted: bool = False
    """Set it after each attempt that failed."""
    _next_s: float = float("-inf")
    _pause_s: float = FIRST_PAUSE_S

    def is_due(self, now_s: float) -> bool:
        """Whether to try now, at a monotonic time. If so, the next attempt has to be wanted anew."""
        if not self.is_wanted or now_s < self._next_s:
            return False
        self.is_wanted = False
        self._next_s, self._pause_s = now_s + self._pause_s, min(2.0 * self._pause_s, MAX_PAUSE_S)
        return True
