"""Records of actions and events for people: the append-only audit table and the timeline's marks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import structlog

from honed.daemon.store.store import Store

log = structlog.get_logger("honed.journal")


class Journal:
    """Writes without waiting, since a full disk must not stop a roll-back. Failed writes are logged."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock

    def audit(self, actor: str, action: str, subject: str = "", reason: str = "", outcome: str = "accepted") -> None:
        """Add a row to the audit table."""
        row = {"t": self._clock(), "actor": actor, "action": action, "subject": subject, "reason": reason}
        row["outcome"] = outcome
        log.info("audit", **{name: value for name, value in row.items() if name != "t"})
        self.insert("audit", row)

    def mark(self, kind: str, text: str, engine_id: str = "") -> None:
        """Put a mark on the timeline: rollback, drift, override, promote, canary, target."""
        self.insert("marks", {"t": self._clock(), "engine_id": engine_id, "kind": kind, "text": text})

    def insert(self, table: str, row: dict[str, Any], key: str = "") -> Future[Any]:
        """Queue one row. With `key`, the column that names it, it replaces an older row, be it after an error of the disk."""
        columns, places = ", ".join(row), ", ".join(f":{name}" for name in row)
        verb = "INSERT OR REPLACE" if key else "INSERT"
        sql = f"{verb} INTO {table} ({columns}) VALUES ({places})"
        submit = partial(self._store.keep, (table, row[key])) if key else self._store.submit
        future = submit(lambda db: db.conn.execute(sql, row) and None)
        future.add_done_callback(lambda done: _complain(table, done))
        return future


def _complain(table: str, done: Future[Any]) -> None:
    error = done.exception()
    if error is not None:
        log.error("a row was not written", table=table, error=str(error))
