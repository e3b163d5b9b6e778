"""Long operations (recalibrations, promotions, roll-backs): their state on disk and for the API."""

from __future__ import annotations

import json
import secrets
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import structlog

from honed.daemon.errors import UnknownError, there_are
from honed.daemon.store.store import Store

log = structlog.get_logger("honed.operations")

FINISHED = frozenset({"succeeded", "failed", "cancelled"})
PROVEN = frozenset({"recalibrate", "adopt"})
"""Kinds whose version is swapped in only after a trial, as the active one: they have succeeded by then."""
KEPT_IN_MEMORY = 500
"""The newest; those that go on are kept beside them."""
PLANNED = "planned"
"""Stage and id of a dry run's operation."""


@dataclass(slots=True)
class Operation:
    """An operation. `state` ends at succeeded, failed or cancelled; `stage` may continue to "watching" and "done"."""

    operation_id: str
    kind: str
    state: str
    stage: str
    created_unix_s: float
    reason: str
    actor: str
    finished_unix_s: float | None = None
    idempotency_key: str | None = None
    detail: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    request_hash: str = ""
    """Hash of the request that began it, so that its key can't serve another one."""

    @property
    def is_finished(self) -> bool:
        return self.state in FINISHED

    @property
    def is_planned(self) -> bool:
        """True for a dry run."""
        return self.stage == PLANNED

    @property
    def goes_on(self) -> bool:
        """True while it runs or its version is watched."""
        return not self.is_finished or self.stage == "watching"

    def view(self) -> dict[str, Any]:
        """Document for the API."""
        return {name: getattr(self, name) for name in Operation.__slots__ if name not in ("idempotency_key", "request_hash")}


class Operations:
    """All known operations, newest last. Guarded by the service's lock."""

    def __init__(self, store: Store, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._by_id: dict[str, Operation] = {}
        self.ended: Counter[tuple[str, str]] = Counter()
        """(kind, state) -> operations ended since the daemon started."""

    def load(self, resumed: Collection[str] = (), active: str = "") -> None:
        """Read earlier operations. Those running when the daemon ended have failed, except resumed ones.

        Args:
            active: the version that engines follow; an operation that was swapping it in has succeeded.
        """
        newest = "SELECT operation_id FROM operations ORDER BY rowid DESC LIMIT ?"
        ends = ", ".join(f"'{state}'" for state in sorted(FINISHED))
        goes_on = f"state NOT IN ({ends}) OR stage = 'watching'"
        rows = self._store.read(
            f"SELECT * FROM operations WHERE {goes_on} OR operation_id IN ({newest}) ORDER BY rowid", (KEPT_IN_MEMORY,)
        )
        for row in rows:
            if (operation := _stored(row)) is None:
                continue
            self._by_id[operation.operation_id] = operation
            if operation.operation_id in resumed:
                continue
            is_active = operation.kind in PROVEN or (bool(active) and operation.detail.get("version") == active)
            if not operation.is_finished and operation.stage == "swapping" and is_active:
                self.finish(operation, "succeeded", note="the daemon was restarted; engines follow when they are connected")
            elif not operation.is_finished:
                self.finish(operation, "failed", error="daemon restarted")
            elif operation.stage == "watching":
                operation.detail["watch"] = "ended by a restart of the daemon"
                self.move(operation, stage="done")

    def create(self, kind: str, stage: str, reason: str, actor: str, key: str | None, **detail: Any) -> Operation:
        """Begin an operation."""
        operation = Operation(
            f"op-{secrets.token_hex(6)}", kind, "running", stage, self._clock(), reason, actor, None, key, detail
        )
        self._by_id[operation.operation_id] = operation
        ended = [one.operation_id for one in self._by_id.values() if not one.goes_on]
        for operation_id in ended[: max(len(self._by_id) - KEPT_IN_MEMORY, 0)]:
            del self._by_id[operation_id]
        self._save(operation)
        return operation

    def planned(self, kind: str, reason: str, actor: str, **detail: Any) -> Operation:
        """Answer of a dry run; it isn't stored."""
        now = self._clock()
        return Operation(PLANNED, kind, "succeeded", PLANNED, now, reason, actor, now, detail=detail | {"dry_run": True})

    def note_request(self, operation: Operation, request_hash: str) -> None:
        """Store the request's hash."""
        operation.request_hash = request_hash
        self._save(operation)

    def by_key(self, key: str | None) -> Operation | None:
        """The operation begun by an earlier request with the same idempotency key. Raises StoreError."""
        if key is None:
            return None
        for operation in self._by_id.values():
            if operation.idempotency_key == key:
                return operation
        rows = self._store.find("SELECT * FROM operations WHERE idempotency_key = ?", (key,))
        return _stored(rows[0]) if rows else None

    def get(self, operation_id: str) -> Operation:
        """Raises UnknownError."""
        try:
            return self._by_id[operation_id]
        except KeyError as error:
            why = f"no operation {operation_id!r}; {there_are(self._by_id)}"
            raise UnknownError(why, cure="`honed operations` lists them.") from error

    def find(self, operation_id: str) -> Operation | None:
        """The operation; None if unknown or no longer known."""
        return self._by_id.get(operation_id)

    def listing(self) -> list[Operation]:
        """Newest first."""
        return list(reversed(self._by_id.values()))

    def move(self, operation: Operation, *, stage: str | None = None, **detail: Any) -> None:
        """Store progress."""
        if stage is not None:
            operation.stage = stage
        operation.detail.update(detail)
        self._save(operation)

    def finish(self, operation: Operation, state: str, *, stage: str = "done", error: str = "", **detail: Any) -> None:
        """End it; `stage` may name a step that still follows."""
        operation.state, operation.stage, operation.error = state, stage, error
        operation.finished_unix_s = self._clock()
        self.ended[operation.kind, state] += 1
        operation.detail.update(detail)
        level = log.warning if state == "failed" else log.info
        level("operation ended", operation_id=operation.operation_id, kind=operation.kind, state=state, error=error)
        self._save(operation)

    def _save(self, operation: Operation) -> None:
        row = {name: getattr(operation, name) for name in Operation.__slots__}
        row["detail"] = json.dumps(operation.detail)
        columns, places = ", ".join(row), ", ".join(f":{name}" for name in row)
        changes = ", ".join(f"{name} = excluded.{name}" for name in row)
        sql = f"INSERT INTO operations ({columns}) VALUES ({places}) ON CONFLICT (operation_id) DO UPDATE SET {changes}"
        state = "operations", operation.operation_id
        self._store.keep(state, lambda db: db.conn.execute(sql, row) and None).add_done_callback(
            lambda done: done.exception() and log.error("an operation was not written", error=str(done.exception()))
        )


def _stored(row: dict[str, Any]) -> Operation | None:
    """The operation in a row; None, with a warning, if its detail can't be read."""
    try:
        return Operation(**(row | {"detail": dict(json.loads(row["detail"]))}))
    except (ValueError, TypeError, RecursionError) as error:
        log.warning("a stored operation can't be read", operation_id=row["operation_id"], error=str(error))
        return None
