"""Files of samples that an earlier process left, and that no feed has taken up yet: they have the same limits as the others.

Their engine may come back, and then takes them up. Or it is gone, or has another name.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path


class LeftFiles:
    """The files below a folder, as they are at the start.

    Args:
        folder: with FOLDER/ENGINE/KIND/<time>-<random>.safetensors, see `spill`.
        max_age_s: files older than this are removed, and at a start those that a wrong clock has dated later than now.
        clock: seconds since the epoch.
        uptime: seconds, which no wrong clock changes.
    """

    def __init__(
        self,
        folder: Path,
        max_age_s: float,
        clock: Callable[[], float] = time.time,
        uptime: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._max_age_s, self._uptime = max_age_s, uptime
        found: list[tuple[float, int, Path]] = []
        for path in folder.glob("*/*/*"):
            try:
                age_s, num_bytes = clock() - int(path.name.split("-")[0]) / 1e9, path.stat().st_size
            except (ValueError, OSError):
                age_s, num_bytes = -1.0, 0
            if age_s < 0.0:
                _remove(path)
            else:
                found.append((uptime() - age_s, num_bytes, path))
        self._held = deque(sorted(found))

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(num_bytes for _, num_bytes, _ in self._held)

    def expire(self, taken_up: Collection[Path], max_bytes: int) -> None:
        """Remove files that are too old, and the oldest beyond the size limit.

        Args:
            taken_up: engines' folders whose files are others' from now on.
        """
        self._held = deque(one for one in self._held if one[2].parents[1] not in taken_up)
        oldest_s, num_bytes = self._uptime() - self._max_age_s, self.num_bytes
        while self._held and (self._held[0][0] < oldest_s or num_bytes > max_bytes):
            _, of_file, path = self._held.popleft()
            num_bytes -= of_file
            _remove(path)

    def forget(self) -> None:
        """Note that all of them were removed."""
        self._held.clear()


def _remove(path: Path) -> None:
    """Remove a file, and its folders if they are empty then."""
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()
        path.parents[1].rmdir()
