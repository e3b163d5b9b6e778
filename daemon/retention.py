"""Forgetting, a little at a time: raw batches by bytes and age, roll-ups by age, free pages back to the file system."""

from __future__ import annotations

from typing import Any

from sqlite_utils import Database

from honed.daemon.batch_tables import ADD_RAW_BYTES
from honed.daemon.sections import StoreSettings

BATCHES_PER_ROUND = 2000
PAGES_PER_ROUND = 2000


def apply(db: Database, settings: StoreSettings, now_s: float) -> int:
    """One round: delete, then give pages back. Not to be called in a transaction."""
    with db.atomic():
        deleted = apply_deletions(db, settings, now_s)
    # Needs auto_vacuum=INCREMENTAL, which is set before the first table is made.
    db.conn.execute(f"PRAGMA incremental_vacuum({PAGES_PER_ROUND})").fetchall()
    return deleted


def apply_deletions(db: Database, settings: StoreSettings, now_s: float) -> int:
    """Delete what is too old or too much, at most a round's worth. Returns how many raw batches went."""
    ages = {1: settings.max_age_1s_s, 60: settings.max_age_1min_s, 3600: settings.max_age_1h_s}
    for resolution, age_s in ages.items():
        if age_s:
            db.conn.execute("DELETE FROM rollups WHERE resolution_s = ? AND bucket_s < ?", (resolution, int(now_s - age_s)))
    return _delete_batches(db, settings, now_s)


def _delete_batches(db: Database, settings: StoreSettings, now_s: float) -> int:
    """Delete from the low end of the ids, which grow with arrival, as long as a batch is too old or they are too many."""
    excess = raw_bytes(db) - settings.max_raw_bytes if settings.max_raw_bytes else 0
    oldest_ns = int((now_s - settings.max_raw_age_s) * 1e9) if settings.max_raw_age_s else 0
    last, freed, count = 0, 0, 0
    rows: Any = db.conn.execute(
        "SELECT id, frame_bytes, received_unix_ns FROM batches ORDER BY id LIMIT ?", (BATCHES_PER_ROUND,)
    )
    for batch_id, frame_bytes, received_unix_ns in rows:
        if freed >= excess and received_unix_ns >= oldest_ns:
            break
        last, freed, count = batch_id, freed + frame_bytes, count + 1
    if count:
        db.conn.execute("DELETE FROM batches WHERE id <= ?", (last,))
        db.conn.execute(ADD_RAW_BYTES, (-freed,))
    return count


def raw_bytes(db: Database) -> int:
    """Compressed bytes of the raw batches that are held."""
    return int(db.conn.execute("SELECT value FROM meta WHERE key = 'raw_bytes'").fetchone()[0])
