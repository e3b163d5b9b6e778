"""Trials on disk: state to resume after a restart, failed versions, and the evidence over time."""

from __future__ import annotations

import json
from typing import Any

from sqlite_utils import Database

from honed.daemon.store.store import Store

EVERY_POINT = 500
"""After this many pairs only every tenth is kept."""


def save(db: Database, row: dict[str, Any]) -> None:
    """Write a trial's present state."""
    columns, places = ", ".join(row), ", ".join(f":{name}" for name in row)
    db.conn.execute(f"INSERT OR REPLACE INTO canaries ({columns}) VALUES ({places})", row)


def save_points(db: Database, rows: list[dict[str, Any]]) -> None:
    """Add evidence after a pair of windows."""
    for row in rows:
        columns, places = ", ".join(row), ", ".join(f":{name}" for name in row)
        db.conn.execute(f"INSERT OR REPLACE INTO canary_points ({columns}) VALUES ({places})", row)


def is_kept(pairs: int) -> bool:
    """True if a pair's evidence is stored."""
    return pairs <= EVERY_POINT or pairs % 10 == 0


def unfinished(store: Store) -> list[dict[str, Any]]:
    """Trials without a verdict, newest first; of one that can't be read, the state is empty. Raises StoreError."""
    rows = store.read("SELECT * FROM canaries WHERE decision = '' ORDER BY began_unix_s DESC")
    return [row | {"state": _state_of(row["state"])} for row in rows]


def _state_of(text: str) -> dict[str, Any]:
    try:
        state = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def failed(store: Store) -> dict[str, str]:
    """`Manifest.trial_key` of versions found worse or withdrawn -> reason. Raises StoreError."""
    rows = store.read(
        "SELECT new_key, decision, text FROM canaries WHERE decision IN ('worse', 'withdrawn') ORDER BY began_unix_s"
    )
    return {row["new_key"]: why_failed(row["decision"], row["text"]) for row in rows}


def tried(store: Store) -> set[str]:
    """`Manifest.trial_key` of all versions that had a trial. Raises StoreError."""
    return {row["new_key"] for row in store.read("SELECT DISTINCT new_key FROM canaries")}


def why_failed(decision: str, text: str) -> str:
    """Reason why weights aren't tried again; "" if they may be."""
    if decision == "worse":
        return f"found worse on live traffic: {text}"
    return text if decision == "withdrawn" else ""


def listing(store: Store, limit: int) -> list[dict[str, Any]]:
    """Trials, newest first. Raises StoreError."""
    return store.read(
        "SELECT operation_id, kind, old, new, began_unix_s, ended_unix_s, decision, text FROM canaries "
        "ORDER BY began_unix_s DESC LIMIT ?",
        (limit,),
    )


def points(store: Store, operation_id: str) -> list[dict[str, Any]]:
    """A trial's evidence over time, oldest first; workload "" is all traffic. Raises StoreError."""
    return store.read(
        "SELECT t, pairs, rounds, workload, evidence_worse, evidence_better, change FROM canary_points "
        "WHERE operation_id = ? ORDER BY pairs, workload",
        (operation_id,),
    )
