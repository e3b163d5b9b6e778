"""Removal of old drafter versions from the registry, except those in use or needed for a roll-back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from honed.daemon.ingest.engines import Engines
from honed.daemon.lifecycle.drafters import Drafters
from honed.daemon.lifecycle.rollout import Rollout
from honed.daemon.lifecycle.swaps import Swaps
from honed.recalib.registry.registry import RegistryError

log = structlog.get_logger("honed.old_versions")


class OldVersions:
    """Removes them, in the background.

    Args:
        keep: number of newest versions to keep; 0: all.
    """

    def __init__(
        self,
        keep: int,
        rollout: Rollout,
        *,
        drafters: Drafters,
        engines: Engines,
        swaps: Swaps,
        lock: threading.RLock,
        monotonic: Callable[[], float],
    ) -> None:
        self._keep, self._rollout = keep, rollout
        self._drafters, self._engines, self._swaps, self._lock = drafters, engines, swaps, lock
        self._monotonic = monotonic

    def remove(self) -> None:
        """Prune under the lock, so that no use of a version begins meanwhile; remove the files without it."""
        try:
            if self._keep:
                with self._lock:
                    pruned = self._drafters.registry.prune(self._keep, self._in_use())
                if pruned:
                    log.info("old drafter versions removed", versions=pruned, kept=self._keep)
            self._drafters.registry.sweep()
        except RegistryError as error:
            log.error("old drafter versions can't be removed", error=str(error))

    def _in_use(self) -> set[str]:
        """Versions that connected engines run or are about to run, and versions of running operations."""
        running = {engine.live_version for engine in self._engines.connected(self._monotonic())}
        return (running | self._swaps.versions | self._rollout.versions) - {""}
