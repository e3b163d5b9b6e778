"""Deletion in small rounds: raw batches and roll-ups by bytes and age, records by number. Free pages go back to the disk."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from sqlite_utils import Database

from honed.daemon.settings.sections import StoreSettings
from honed.daemon.store.age import AgeClock
from honed.daemon.store.batch_tables import ADD_RAW_BYTES
from honed.daemon.store.migrations import MOST_AUDITED
from honed.daemon.store.rollups import RESOLUTIONS_S

BATCHES_PER_ROUND = 2000
ROLLUPS_PER_ROUND = 20_000
ROLLUPS_AT_ONCE = 1000
"""Roll-ups that are deleted by size before the size is looked at again."""
PAGES_PER_ROUND = 2000
EVERY_S = 10.0
SOON_S = 0.5
"""Pause between rounds while work is left, so that batches are committed in between."""

MOST_SILENT_BOOTS = 1000
"""Boots that said hello and never sent a batch: so many of the latest are kept."""
_DELETE_SILENT_BOOTS = """
DELETE FROM boots WHERE batches = 0 AND last_seen_unix_ns <
  (SELECT last_seen_unix_ns FROM boots WHERE batches = 0 ORDER BY last_seen_unix_ns DESC LIMIT 1 OFFSET ?)
"""
MOST_EVIDENCE = 200
"""Trials whose evidence over time is kept, the latest; of earlier ones the verdict is kept."""
_DELETE_EVIDENCE = """
DELETE FROM canary_points WHERE operation_id IN (
  SELECT old.operation_id FROM (SELECT operation_id FROM canaries ORDER BY began_unix_s DESC LIMIT -1 OFFSET ?) AS old
  WHERE EXISTS (SELECT 1 FROM canary_points AS point WHERE point.operation_id = old.operation_id) LIMIT 1)
"""
MOST_MARKS, MOST_OPERATIONS = 100_000, 10_000
"""The newest that are kept; of operations, those that go on as well. By number: the wall clock that dates them may be wrong."""
_DELETE_RECORDS = (
    f"DELETE FROM audit WHERE id <= (SELECT max(id) FROM audit) - {MOST_AUDITED}",
    f"DELETE FROM marks WHERE id <= (SELECT max(id) FROM marks) - {MOST_MARKS}",
    f"DELETE FROM operations WHERE rowid <= (SELECT max(rowid) FROM operations) - {MOST_OPERATIONS} "
    "AND finished_unix_s IS NOT NULL AND stage <> 'watching'",
)
SPARED_S = {1: 660, 60: 25 * 3600, 3600: 31 * 86_400}
"""Age up to which sums of a resolution are spared, as views read 10 minutes of seconds and a day of minutes: younger ones go by
size only when no others are left."""
_DELETE_ROLLUPS = """
DELETE FROM rollups WHERE (resolution_s, bucket_s, engine_id, workload, drafter_version) IN (
  SELECT resolution_s, bucket_s, engine_id, workload, drafter_version FROM rollups
  WHERE resolution_s = ? AND stored_s < ? ORDER BY stored_s LIMIT ?)
RETURNING stored_s
"""
ROLLUP_BYTES = "SELECT value FROM meta WHERE key = 'rollup_bytes'"
_CUT = "rollups_cut_"
CUTS = f"SELECT key, value FROM meta WHERE key LIKE '{_CUT}%'"


class Pruning:
    """Deletion rounds, when due.

    Args:
        age: tells what is too old.
        monotonic: seconds.
    """

    def __init__(self, settings: StoreSettings, age: AgeClock, monotonic: Callable[[], float]) -> None:
        self._settings, self._age, self._monotonic = settings, age, monotonic
        self._due_s = float("-inf")

    def due_in_s(self) -> float:
        """Seconds until the next round, 0 or more."""
        return max(self._due_s - self._monotonic(), 0.0)

    def run(self, db: Database) -> None:
        """Run a round if it is due. Don't call it in a transaction."""
        now_s = self._monotonic()
        if now_s < self._due_s:
            return
        self._due_s = now_s + EVERY_S  # in case the database refuses
        with db.atomic():
            self._age.save(db)
            is_full = apply_deletions(db, self._settings, self._age.now_s())
        if _give_pages_back(db) or is_full:
            self._due_s = now_s + SOON_S


def _give_pages_back(db: Database) -> bool:
    """Free one round's pages; True if more are left. Needs auto_vacuum=INCREMENTAL, set before the first table is made."""
    before = _num_free_pages(db)
    db.conn.execute(f"PRAGMA incremental_vacuum({PAGES_PER_ROUND})").fetchall()
    return PAGES_PER_ROUND <= _num_free_pages(db) < before


def _num_free_pages(db: Database) -> int:
    return int(db.conn.execute("PRAGMA freelist_count").fetchone()[0])


def apply_deletions(db: Database, settings: StoreSettings, now_s: float) -> bool:
    """Delete data above the age or size limits, at most one round's. True if that was a full round's: more may be left.

    Args:
        now_s: of the AgeClock.
    """
    db.conn.execute(_DELETE_SILENT_BOOTS, (MOST_SILENT_BOOTS,))
    db.conn.execute(_DELETE_EVIDENCE, (MOST_EVIDENCE,))
    for records in _DELETE_RECORDS:
        db.conn.execute(records)
    room = ROLLUPS_PER_ROUND
    for resolution, age_s in settings.max_rollup_age_s.items():
        if age_s < math.inf:
            room -= len(_delete_rollups(db, resolution, now_s - age_s, room))
    if settings.max_rollup_bytes:
        room -= _delete_excess_rollups(db, settings.max_rollup_bytes, now_s, room)
    return _delete_batches(db, settings, now_s) == BATCHES_PER_ROUND or room == 0


def _delete_rollups(db: Database, resolution: int, before_s: float, most: int) -> list[int]:
    """Delete the oldest of a resolution. Returns when each was stored, on the clock that ages are counted on."""
    return [row[0] for row in db.conn.execute(_DELETE_ROLLUPS, (resolution, int(before_s), most)).fetchall()]


def _delete_excess_rollups(db: Database, max_bytes: int, now_s: float, most: int) -> int:
    """Delete the finest and oldest while all together are too large, and note how far back they went. Returns their number."""
    count = 0
    for spared_s in (SPARED_S, dict.fromkeys(RESOLUTIONS_S, 0)):
        for resolution in RESOLUTIONS_S:
            while rollup_bytes(db) > max_bytes and count < most:
                at_once = min(ROLLUPS_AT_ONCE, most - count)
                if not (gone := _delete_rollups(db, resolution, now_s - spared_s[resolution], at_once)):
                    break
                count += len(gone)
                db.conn.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (f"{_CUT}{resolution}", max(gone) + resolution))
    return count


def cut_at_s(rows: list[dict[str, Any]]) -> dict[int, float]:
    """Since when the sums of each resolution that were deleted by size are whole, on the clock that ages are counted on.

    Args:
        rows: of the query CUTS.
    """
    return {int(row["key"].removeprefix(_CUT)): row["value"] for row in rows}


def _delete_batches(db: Database, settings: StoreSettings, now_s: float) -> int:
    """Delete batches from the lowest id, which is the oldest arrival, while one is too old or they are too many."""
    excess = raw_bytes(db) - settings.max_raw_bytes if settings.max_raw_bytes else 0
    oldest_s = int(now_s - settings.max_raw_age_s) if settings.max_raw_age_s else 0
    last, freed, count = 0, 0, 0
    rows: Any = db.conn.execute("SELECT id, frame_bytes, stored_s FROM batches ORDER BY id LIMIT ?", (BATCHES_PER_ROUND,))
    for batch_id, frame_bytes, stored_s in rows:
        if freed >= excess and stored_s >= oldest_s:
            break
        last, freed, count = batch_id, freed + frame_bytes, count + 1
    if count:
        db.conn.execute("DELETE FROM batches WHERE id <= ?", (last,))
        db.conn.execute(ADD_RAW_BYTES, (-freed,))
    return count


def raw_bytes(db: Database) -> int:
    """Compressed bytes of the stored raw batches."""
    return int(db.conn.execute("SELECT value FROM meta WHERE key = 'raw_bytes'").fetchone()[0])


def rollup_bytes(db: Database) -> int:
    """Bytes that the roll-ups take on disk, about."""
    return int(db.conn.execute(ROLLUP_BYTES).fetchone()[0])
