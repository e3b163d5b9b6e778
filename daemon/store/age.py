"""The clock that ages are counted on: how much time has passed, not what time it is.

A wall clock may start in the wrong year, jump, or be wrong for hours. It then mustn't make data old, nor keep it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from sqlite_utils import Database

BELIEVED_AFTER_S = 86400.0
MOST_DRIFT_S = 60.0


def uptime_s() -> float:
    """Seconds since the machine's start, those of sleep included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class AgeClock:
    """Seconds since the epoch as the database has seen them pass.

    It begins with the wall time, and moves with the machine's uptime. Only a wall clock can tell how long a machine was off:
    that time is added once the wall clock has gone on for `BELIEVED_AFTER_S` without a jump of more than `MOST_DRIFT_S`.

    Args:
        db: holds the clock's state, in `meta`.
        wall: seconds since the epoch.
        uptime: seconds since the machine's start.
    """

    def __init__(self, db: Database, *, wall: Callable[[], float] = time.time, uptime: Callable[[], float] = uptime_s) -> None:
        self._wall, self._uptime = wall, uptime
        saved: dict[str, float] = dict(db.conn.execute("SELECT key, value FROM meta WHERE key LIKE 'age_%'").fetchall())
        up_s = uptime()
        self._booted_s, self._steady_from_s = wall() - up_s, up_s
        """When the machine started, as the wall clock tells it, and since which uptime it tells so."""
        is_same_boot = abs(saved.get("age_booted_s", math.inf) - self._booted_s) <= MOST_DRIFT_S
        slept_s = max(up_s - saved["age_uptime_s"], 0.0) if is_same_boot else 0.0
        self._ahead_s = saved.get("age_s", wall()) + slept_s - up_s
        """This clock less the uptime."""
        self._was_off = bool(saved) and (not is_same_boot or bool(saved["age_was_off"]))
        """True while the time without power isn't known."""
        self._behind_s: float | None = saved.get("age_behind_s")
        """The wall clock less this clock when the wall clock was last believed."""

    def now_s(self) -> float:
        """The present; differences are ages."""
        return self._ahead_s + self._uptime()

    def save(self, db: Database) -> None:
        """Write the state, in the caller's transaction, and look at the wall clock. Call it every few seconds."""
        up_s, unix_s = self._uptime(), self._wall()
        if abs(unix_s - up_s - self._booted_s) > MOST_DRIFT_S:
            self._booted_s, self._steady_from_s = unix_s - up_s, up_s
        if up_s - self._steady_from_s >= BELIEVED_AFTER_S:
            if self._was_off and self._behind_s is not None:
                self._ahead_s += max(unix_s - self._behind_s - self.now_s(), 0.0)
            self._was_off = False
            self._behind_s = unix_s - self.now_s()
        state = {
            "s": self.now_s(),
            "booted_s": self._booted_s,
            "uptime_s": up_s,
            "was_off": self._was_off,
            "behind_s": self._behind_s,
        }
        rows = [(f"age_{name}", value) for name, value in state.items() if value is not None]
        db.conn.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", rows)
