"""What a restarted daemon knows of the versions that engines ran."""

from __future__ import annotations

from honed.daemon.lifecycle import old_versions
from honed.daemon.store.rollups import Counts
from honed.daemon.store.store import Store

HOUR_S = 3600


def test_engines_ran_the_versions_of_the_last_hour_that_each_has(store: Store) -> None:
    """For each row all rows were read again: many engines and workloads held up the daemon's start."""
    cells = [
        (HOUR_S, 1, "early", "chat", "v1"),
        (HOUR_S, 2, "early", "chat", "v2"),
        (HOUR_S, 2, "early", "code", "v2"),
        (HOUR_S, 2, "early", "code", "v3"),
        (60, 5, "early", "chat", "v9"),
        (HOUR_S, 3, "late", "chat", "v1"),
        (HOUR_S, 4, "late", "chat", ""),
        (HOUR_S, 0, "before", "chat", "v1"),
    ]
    row = Counts().row()
    names = ["resolution_s", "bucket_s", "engine_id", "workload", "drafter_version", *row, "stored_s"]
    sql = f"INSERT INTO rollups ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
    rows = [(resolution_s, hour * HOUR_S, *cell, *row.values(), 0) for resolution_s, hour, *cell in cells]
    store.write(lambda db: db.conn.executemany(sql, rows) and None)
    found = store.read(old_versions._LATEST, (HOUR_S,))
    assert sorted((one["engine_id"], one["version"]) for one in found) == [("early", "v2"), ("early", "v3"), ("late", "")]
    plan = store.read(f"EXPLAIN QUERY PLAN {old_versions._LATEST}", (HOUR_S,))
    assert not [step for step in plan if "CORRELATED" in step["detail"]]
