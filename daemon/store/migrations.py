"""The database's layout as a list of migrations, so that every older database opens and is upgraded.

A released migration is never edited. Each runs in one transaction with the record that it ran.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pysqlite3 import complete_statement
from sqlite_utils import Database
from sqlite_utils.migrations import Migrations

from honed.daemon.errors import StartError

migrations = Migrations("honed")

_ROLLUP_BYTES = """(50 + 6 * (
    2 * octet_length(row.engine_id || row.workload || row.drafter_version) + octet_length(
      row.drafted_by_position || row.tried_by_position || row.accepted_by_position || row.beyond_by_position)) / 5)"""
"""Bytes that a roll-up takes on disk, about: its names twice, for the index, and a fifth for what pages leave empty."""
_NEW_BYTES, _OLD_BYTES = (_ROLLUP_BYTES.replace("row", name) for name in ("NEW", "OLD"))

MOST_AUDITED = 100_000
"""Rows of the audit table that can't be deleted: the newest."""

SCHEMA_1 = f"""
CREATE TABLE meta (key TEXT PRIMARY KEY, value NUMERIC NOT NULL) WITHOUT ROWID;
INSERT INTO meta VALUES ('raw_bytes', 0);    -- sum of batches.frame_bytes, kept by every insert and delete
INSERT INTO meta VALUES ('rollup_bytes', 0); -- that the roll-ups and their index take, about; triggers keep it

CREATE TABLE boots (
  engine_id TEXT NOT NULL, boot_id TEXT NOT NULL,
  first_seen_unix_ns INTEGER NOT NULL, last_seen_unix_ns INTEGER NOT NULL,
  hello TEXT,                                -- JSON of the last EngineHello, NULL when only batches were seen
  own_version TEXT NOT NULL DEFAULT '',      -- of the checkpoint that vLLM loaded; empty: not known
  live_version TEXT NOT NULL DEFAULT '',     -- that it ran by a status of the hour before it was last seen
  target_updates INTEGER NOT NULL DEFAULT 0, -- of the target's weights, as far as they were acted on
  committed_seq INTEGER NOT NULL DEFAULT 0,  -- highest sequence number stored: the source of every Ack
  batches INTEGER NOT NULL DEFAULT 0,
  rounds INTEGER NOT NULL DEFAULT 0,         -- with at least one draft token, as vLLM counts drafts
  draft_tokens INTEGER NOT NULL DEFAULT 0,
  accepted_tokens INTEGER NOT NULL DEFAULT 0,
  delivered_tokens INTEGER NOT NULL DEFAULT 0,
  plain_rounds INTEGER NOT NULL DEFAULT 0,
  tree_rounds INTEGER NOT NULL DEFAULT 0,    -- with a draft tree; then what of the sums above belongs to these
  tree_nodes INTEGER NOT NULL DEFAULT 0,
  tree_accepted_tokens INTEGER NOT NULL DEFAULT 0,
  chain_accepted_tokens INTEGER NOT NULL DEFAULT 0, -- that the drafter's own chain in them would have got
  drafted_by_position TEXT NOT NULL DEFAULT '[]',
  tried_by_position TEXT NOT NULL DEFAULT '[]',
  accepted_by_position TEXT NOT NULL DEFAULT '[]',
  beyond_by_position TEXT NOT NULL DEFAULT '[]',
  lost_rounds INTEGER NOT NULL DEFAULT 0,    -- the engine's own totals of what it had to drop
  lost_draft_tokens INTEGER NOT NULL DEFAULT 0,
  lost_accepted_tokens INTEGER NOT NULL DEFAULT 0,
  lost_batches INTEGER NOT NULL DEFAULT 0,
  missing_batches INTEGER NOT NULL DEFAULT 0,   -- sequence numbers that neither came nor were declared lost
  malformed_batches INTEGER NOT NULL DEFAULT 0, -- decoded, but the columns contradicted each other
  PRIMARY KEY (engine_id, boot_id)
) WITHOUT ROWID;

CREATE TABLE batches (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  engine_id TEXT NOT NULL, boot_id TEXT NOT NULL, seq INTEGER NOT NULL,
  received_unix_ns INTEGER NOT NULL, sent_unix_ns INTEGER NOT NULL,
  stored_s INTEGER NOT NULL,                 -- of the clock that ages are counted on (age.py)
  drafter_version TEXT NOT NULL,
  steps INTEGER NOT NULL, rounds INTEGER NOT NULL, draft_tokens INTEGER NOT NULL, accepted_tokens INTEGER NOT NULL,
  malformed TEXT NOT NULL DEFAULT '',
  bytes INTEGER NOT NULL,                    -- of the frame, uncompressed
  frame_bytes INTEGER NOT NULL,              -- compressed
  frame BLOB NOT NULL,                       -- zlib of the frame exactly as it came: msgpack of wire.EventBatch
  UNIQUE (engine_id, boot_id, seq)
);

CREATE TABLE rollups (
  resolution_s INTEGER NOT NULL, bucket_s INTEGER NOT NULL,
  engine_id TEXT NOT NULL, workload TEXT NOT NULL, drafter_version TEXT NOT NULL,
  rounds INTEGER NOT NULL, draft_tokens INTEGER NOT NULL, accepted_tokens INTEGER NOT NULL,
  delivered_tokens INTEGER NOT NULL, plain_rounds INTEGER NOT NULL,
  tree_rounds INTEGER NOT NULL, tree_nodes INTEGER NOT NULL,
  tree_accepted_tokens INTEGER NOT NULL, chain_accepted_tokens INTEGER NOT NULL,
  drafted_by_position TEXT NOT NULL, tried_by_position TEXT NOT NULL, accepted_by_position TEXT NOT NULL,
  beyond_by_position TEXT NOT NULL,
  stored_s INTEGER NOT NULL,                 -- first time, of the clock that ages are counted on
  PRIMARY KEY (resolution_s, bucket_s, engine_id, workload, drafter_version)
) WITHOUT ROWID;
CREATE INDEX rollups_by_age ON rollups (resolution_s, stored_s);
CREATE TRIGGER rollups_insert AFTER INSERT ON rollups BEGIN
  UPDATE meta SET value = value + {_NEW_BYTES} WHERE key = 'rollup_bytes';
END;
CREATE TRIGGER rollups_update AFTER UPDATE ON rollups WHEN {_NEW_BYTES} <> {_OLD_BYTES} BEGIN
  UPDATE meta SET value = value + {_NEW_BYTES} - {_OLD_BYTES} WHERE key = 'rollup_bytes';
END;
CREATE TRIGGER rollups_delete AFTER DELETE ON rollups BEGIN
  UPDATE meta SET value = value - {_OLD_BYTES} WHERE key = 'rollup_bytes';
END;

CREATE TABLE operations (
  operation_id TEXT PRIMARY KEY, kind TEXT NOT NULL, state TEXT NOT NULL, stage TEXT NOT NULL,
  created_unix_s REAL NOT NULL, finished_unix_s REAL, reason TEXT NOT NULL, actor TEXT NOT NULL,
  idempotency_key TEXT UNIQUE, detail TEXT NOT NULL, error TEXT NOT NULL,
  request_hash TEXT NOT NULL DEFAULT ''      -- what the idempotency key stood for: it is refused for anything else
);

CREATE TABLE overrides (
  name TEXT PRIMARY KEY, value TEXT NOT NULL, until_unix_s REAL NOT NULL,
  reason TEXT NOT NULL, actor TEXT NOT NULL, created_unix_s REAL NOT NULL,
  number INTEGER NOT NULL                    -- rises with each that is set, as the clock may not
) WITHOUT ROWID;

CREATE TABLE audit (
  id INTEGER PRIMARY KEY AUTOINCREMENT, t REAL NOT NULL, actor TEXT NOT NULL, action TEXT NOT NULL,
  subject TEXT NOT NULL, reason TEXT NOT NULL, outcome TEXT NOT NULL
);
CREATE TRIGGER audit_no_update BEFORE UPDATE ON audit BEGIN SELECT RAISE(ABORT, 'audit is append-only'); END;
CREATE TRIGGER audit_no_delete BEFORE DELETE ON audit WHEN OLD.id > (SELECT max(id) FROM audit) - {MOST_AUDITED} BEGIN
  SELECT RAISE(ABORT, 'audit is append-only');
END;

CREATE TABLE marks (
  id INTEGER PRIMARY KEY AUTOINCREMENT, t REAL NOT NULL, engine_id TEXT NOT NULL, kind TEXT NOT NULL, text TEXT NOT NULL
);
CREATE INDEX marks_t ON marks (t);

CREATE TABLE canaries (                      -- trials of a drafter version against another on live traffic
  operation_id TEXT PRIMARY KEY,
  kind TEXT NOT NULL,                        -- canary: the new version was not active yet; watch: it was
  old TEXT NOT NULL, new TEXT NOT NULL,
  new_key TEXT NOT NULL,                     -- Manifest.trial_key: what failed is not offered again
  began_unix_s REAL NOT NULL, ended_unix_s REAL,
  decision TEXT NOT NULL,                    -- empty while it goes on; better, worse, unproven, withdrawn, stopped or failed
  text TEXT NOT NULL,
  state TEXT NOT NULL                        -- JSON: what is needed to go on after a restart
) WITHOUT ROWID;

CREATE TABLE canary_points (                 -- evidence after each pair of windows
  operation_id TEXT NOT NULL, t REAL NOT NULL, pairs INTEGER NOT NULL, rounds INTEGER NOT NULL,
  workload TEXT NOT NULL,                    -- empty: all traffic
  evidence_worse REAL NOT NULL, evidence_better REAL NOT NULL,  -- log10 of the e-values
  change REAL NOT NULL,
  PRIMARY KEY (operation_id, pairs, workload)
) WITHOUT ROWID;
"""


@migrations()  # type: ignore[untyped-decorator]
def m001_initial(db: Any) -> None:
    """The first layout. Statements run one by one: executescript would commit the surrounding transaction."""
    for statement in split_statements(SCHEMA_1):
        db.conn.execute(statement)


def check_known(db: Any, path: Path) -> None:
    """Refuse a database upgraded by a newer release. Raises StartError."""
    known = {migration.name for migration in migrations.pending(Database(memory=True))}
    done = {migration.name for migration in migrations.applied(db)}
    if unknown := sorted(done - known):
        raise StartError(
            f"database {path} was written by a newer honed ({', '.join(unknown)}): install that one, or restore the copy from "
            "before the upgrade"
        )


def split_statements(script: str) -> list[str]:
    """Split a script at semicolons that end a statement (a trigger's inner ones don't)."""
    statements, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if pending.strip() and complete_statement(pending):
            statements.append(pending.strip())
            pending = ""
    assert not pending.strip(), pending
    return statements
