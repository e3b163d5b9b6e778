"""Writing a batch to the tables `batches`, `boots` and `rollups`: exactly once, all three in one transaction."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from itertools import chain
from typing import Any

from sqlite_utils import Database

from honed.adapt.protocol.wire import EventBatch, WireError, decode_to_daemon
from honed.daemon.store.rollups import COUNT_COLUMNS, POSITION_COLUMNS, RESOLUTIONS_S, BatchCounts, Counts

_ADD_COUNTS = ", ".join(
    [f"{name} = {name} + excluded.{name}" for name in COUNT_COLUMNS]
    + [f"{name} = add_positions({name}, excluded.{name})" for name in POSITION_COLUMNS]
)
_COLUMNS = (*COUNT_COLUMNS, *POSITION_COLUMNS)
_NAMED = ", ".join(f":{name}" for name in _COLUMNS)

INSERT_BATCHES = """
INSERT INTO batches (engine_id, boot_id, seq, received_unix_ns, sent_unix_ns, stored_s, drafter_version, steps,
  rounds, draft_tokens, accepted_tokens, malformed, bytes, frame_bytes, frame)
VALUES """
_ROWS_AT_ONCE = (16, 4, 1)
_BATCH = "(?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
ADD_RAW_BYTES = "UPDATE meta SET value = value + ? WHERE key = 'raw_bytes'"
ADD_TO_ROLLUP = f"""
INSERT INTO rollups (resolution_s, bucket_s, engine_id, workload, drafter_version, stored_s, {", ".join(_COLUMNS)})
VALUES (:resolution_s, :bucket_s, :engine_id, :workload, :drafter_version, :stored_s, {_NAMED})
ON CONFLICT DO UPDATE SET {_ADD_COUNTS}
"""
ADD_TO_BOOT = f"""
INSERT INTO boots (engine_id, boot_id, first_seen_unix_ns, last_seen_unix_ns, committed_seq, batches, lost_rounds,
  lost_draft_tokens, lost_accepted_tokens, lost_batches, missing_batches, malformed_batches, {", ".join(_COLUMNS)})
VALUES (:engine_id, :boot_id, :seen, :seen, :committed_seq, :batches, :lost_rounds, :lost_draft_tokens,
  :lost_accepted_tokens, :lost_batches, :missing_batches, :malformed_batches, {_NAMED})
ON CONFLICT (engine_id, boot_id) DO UPDATE SET
  last_seen_unix_ns = max(last_seen_unix_ns, excluded.last_seen_unix_ns),
  committed_seq = max(committed_seq, excluded.committed_seq),
  batches = batches + excluded.batches,
  lost_rounds = max(lost_rounds, excluded.lost_rounds),
  lost_draft_tokens = max(lost_draft_tokens, excluded.lost_draft_tokens),
  lost_accepted_tokens = max(lost_accepted_tokens, excluded.lost_accepted_tokens),
  lost_batches = max(lost_batches, excluded.lost_batches),
  missing_batches = missing_batches + excluded.missing_batches,
  malformed_batches = malformed_batches + excluded.malformed_batches, {_ADD_COUNTS}
"""
SAVE_HELLO = """
INSERT INTO boots (engine_id, boot_id, first_seen_unix_ns, last_seen_unix_ns, hello) VALUES (?1, ?2, ?3, ?3, ?4)
ON CONFLICT (engine_id, boot_id) DO UPDATE SET last_seen_unix_ns = ?3, hello = ?4
"""
SAVE_FACTS = """
INSERT INTO boots (engine_id, boot_id, first_seen_unix_ns, last_seen_unix_ns, own_version, target_updates)
VALUES (?1, ?2, unixepoch() * 1000000000, unixepoch() * 1000000000, ?3, ?4)
ON CONFLICT (engine_id, boot_id) DO UPDATE SET own_version = ?3, target_updates = ?4
"""
SAVE_SEEN = "UPDATE boots SET live_version = ?3, last_seen_unix_ns = ?4 WHERE engine_id = ?1 AND boot_id = ?2"


BATCH_BYTES, CELL_BYTES = 2 << 10, 1 << 10
"""Bytes that a waiting batch takes beside its frame, and bytes of each cell of its counts."""


@dataclass(slots=True)
class StoredBatch:
    """A batch to be written: its frame and its sums. The decoded columns would take many times the frame's bytes."""

    engine_id: str
    boot_id: str
    seq: int
    sent_unix_ns: int
    drafter_version: str
    losses: dict[str, int]
    """The engine's totals of dropped data in this boot, as columns."""
    frame: bytes
    received_unix_ns: int
    counts: BatchCounts
    missing: int = 0
    """Sequence numbers right before this one that will never arrive."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it takes in memory, about."""
        return len(self.frame) + BATCH_BYTES + CELL_BYTES * len(self.counts.cells)

    @staticmethod
    def of(batch: EventBatch, frame: bytes, received_unix_ns: int, counts: BatchCounts, missing: int = 0) -> StoredBatch:
        """Make one of a decoded batch and its frame."""
        losses = {
            "lost_rounds": batch.lost_rounds,
            "lost_draft_tokens": batch.lost_draft_tokens,
            "lost_accepted_tokens": batch.lost_accepted_tokens,
            "lost_batches": batch.lost_batches,
        }
        about = batch.engine_id, batch.boot_id, batch.seq, batch.sent_unix_ns, batch.drafter_version
        return StoredBatch(*about, losses, frame, received_unix_ns, counts, missing)


@dataclass(slots=True)
class _Boot:
    counts: Counts
    values: dict[str, int]


def insert(db: Database, group: list[StoredBatch], now_s: float) -> int:
    """Store new batches and add their sums. Returns the number of new ones.

    Args:
        now_s: of the AgeClock.
    """
    committed: dict[tuple[str, str], int] = {}
    boots: dict[tuple[str, str], _Boot] = {}
    rollups: dict[tuple[int, int, str, str, str], Counts] = {}
    rows: list[tuple[Any, ...]] = []
    raw_bytes = 0
    for item in group:
        counts = item.counts
        key = (item.engine_id, item.boot_id)
        if key not in committed:
            committed[key] = committed_seq(db, *key)
        # Pruning deletes raw batches, so the boot's highest number, not the batch table, identifies duplicates.
        if item.seq <= committed[key]:
            continue
        committed[key] = item.seq
        total = counts.total
        compressed = zlib.compress(item.frame, 1)
        when = item.received_unix_ns, item.sent_unix_ns, int(now_s), item.drafter_version
        what = counts.steps, total.rounds, total.draft_tokens, total.accepted_tokens, counts.malformed
        rows.append((*key, item.seq, *when, *what, len(item.frame), len(compressed), compressed))
        raw_bytes += len(compressed)
        boot = boots.setdefault(key, _Boot(Counts(), {"batches": 0, "missing_batches": 0, "malformed_batches": 0}))
        boot.counts.add(total)
        boot.values["batches"] += 1
        boot.values["missing_batches"] += item.missing
        boot.values["malformed_batches"] += bool(counts.malformed)
        boot.values |= {"committed_seq": item.seq, "seen": item.received_unix_ns, **item.losses}
        for (second, workload), cell in counts.cells.items():
            for resolution in RESOLUTIONS_S:
                where = (resolution, second - second % resolution, item.engine_id, workload, item.drafter_version)
                rollups.setdefault(where, Counts()).add(cell)
    _insert_rows(db, rows)
    for (engine_id, boot_id), boot in boots.items():
        row: dict[str, Any] = {"engine_id": engine_id, "boot_id": boot_id, **boot.values, **boot.counts.row()}
        db.conn.execute(ADD_TO_BOOT, row)
    for (resolution, bucket, engine_id, workload, version), sums in rollups.items():
        row = {"resolution_s": resolution, "bucket_s": bucket, "engine_id": engine_id, "workload": workload}
        db.conn.execute(ADD_TO_ROLLUP, row | {"drafter_version": version, "stored_s": int(now_s)} | sums.row())
    if raw_bytes:
        db.conn.execute(ADD_RAW_BYTES, (raw_bytes,))
    return sum(boot.values["batches"] for boot in boots.values())


def _insert_rows(db: Database, rows: list[tuple[Any, ...]]) -> None:
    """Insert rows by few statements: after each one this thread waits for the interpreter, which others use.

    There are few kinds of them: SQLite's driver keeps each kind with what was last inserted by it.
    """
    at = 0
    for size in _ROWS_AT_ONCE:
        while len(rows) - at >= size:
            db.conn.execute(INSERT_BATCHES + ", ".join([_BATCH] * size), [*chain.from_iterable(rows[at : at + size])])
            at += size


def read_frame(frame: bytes) -> EventBatch | None:
    """The batch in a stored frame; None for what isn't one."""
    try:
        message = decode_to_daemon(zlib.decompress(frame))
    except (zlib.error, WireError):
        return None
    return message if isinstance(message, EventBatch) else None


def refuse(db: Database, item: StoredBatch) -> None:
    """Count a batch that can't be stored as malformed, and skip its number, so that nothing waits for it."""
    row = {
        "engine_id": item.engine_id,
        "boot_id": item.boot_id,
        "seen": item.received_unix_ns,
        "committed_seq": item.seq,
        "batches": 1,
        "missing_batches": item.missing,
        "malformed_batches": 1,
        **dict.fromkeys(item.losses, 0),
        **Counts().row(),
    }
    db.conn.execute(ADD_TO_BOOT, row)


def committed_seq(db: Database, engine_id: str, boot_id: str) -> int:
    """Highest stored sequence number of a boot; 0 if none."""
    row = db.conn.execute(
        "SELECT committed_seq FROM boots WHERE engine_id = ? AND boot_id = ?", (engine_id, boot_id)
    ).fetchone()
    return int(row[0]) if row else 0


def save_facts(db: Database, engine_id: str, boot_id: str, own_version: str, target_updates: int) -> None:
    """Store what is known of a boot, be it before its hello is stored."""
    db.conn.execute(SAVE_FACTS, (engine_id, boot_id, own_version, target_updates))


def save_seen(db: Database, engine_id: str, boot_id: str, live_version: str, unix_ns: int) -> None:
    """Store that an engine is there, and what it runs."""
    db.conn.execute(SAVE_SEEN, (engine_id, boot_id, live_version, unix_ns))


def save_hello(db: Database, engine_id: str, boot_id: str, hello_json: str, unix_ns: int) -> None:
    """Store an engine's hello, so that a restarted daemon knows it before the engine sends it again."""
    db.conn.execute(SAVE_HELLO, (engine_id, boot_id, unix_ns, hello_json))
