"""Removal of old drafter versions from the registry, except those in use or needed for a roll-back."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from honed.daemon.ingest.engines import Engines
from honed.daemon.lifecycle.drafters import Drafters
from honed.daemon.lifecycle.rollout import Rollout
from honed.daemon.lifecycle.swaps import Swaps
from honed.daemon.store.store import Store
from honed.recalib.registry.registry import RegistryError

log = structlog.get_logger("honed.old_versions")


AWAY_S = 86_400.0
"""After a restart, an engine that was silent for longer than this before the daemon ended counts as gone."""
_SEEN = """
SELECT engine_id, own_version, live_version, max(last_seen_unix_ns) / 1000000000 AS seen_s FROM boots GROUP BY engine_id
"""
_LATEST = """
WITH recent AS (SELECT engine_id, drafter_version, bucket_s FROM rollups WHERE resolution_s = 3600 AND bucket_s >= ?),
newest AS (SELECT engine_id, max(bucket_s) AS bucket_s FROM recent GROUP BY engine_id)
SELECT DISTINCT engine_id, drafter_version AS version FROM recent JOIN newest USING (engine_id, bucket_s)
"""


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
        store: Store,
        lock: threading.RLock,
        clock: Callable[[], float],
    ) -> None:
        self._keep, self._rollout = keep, rollout
        self._drafters, self._engines, self._swaps, self._lock = drafters, engines, swaps, lock
        self._store, self._clock = store, clock
        self._before: dict[str, set[str]] = {}
        """Engine -> versions that it may run since before the daemon's start; of use until it says hello."""

    def load(self) -> None:
        """Read what the engines of its last day ran, since a restart mustn't take it from those that aren't back yet.

        Call it before anything moves an alias, which removes versions. How long the daemon was away doesn't count.
        """
        seen = self._store.read(_SEEN)
        since_s = min(max((row["seen_s"] for row in seen), default=0), self._clock()) - AWAY_S
        for row in seen:
            if row["seen_s"] >= since_s:
                self._before[row["engine_id"]] = {row["own_version"], row["live_version"]}
        for row in self._store.read(_LATEST, (int(since_s),)):
            self._before.setdefault(row["engine_id"], set()).add(row["version"])

    def remove(self) -> None:
        """Prune under the lock, so that no use of a version begins meanwhile; sync, and remove the files, without it."""
        try:
            self._drafters.registry.sync_aliases()
            if self._keep:
                with self._lock:
                    pruned = self._drafters.registry.prune(self._keep, self._in_use())
                if pruned:
                    log.info("old drafter versions removed", versions=pruned, kept=self._keep)
            self._drafters.registry.sweep()
        except RegistryError as error:
            log.error("aliases can't be synced, or old drafter versions can't be removed", error=str(error))

    def _in_use(self) -> set[str]:
        """Versions that engines run, came with or are about to run, and versions of running operations.

        A silent engine may serve on, and come back.
        """
        engines = self._engines.by_id
        running = {version for one in engines.values() for version in (one.live_version, one.boot.own_version)}
        running = running.union(*(versions for engine_id, versions in self._before.items() if engine_id not in engines))
        return (running | self._swaps.versions | self._rollout.versions) - {""}
