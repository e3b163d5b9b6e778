from __future__ import annotations

import contextlib
import itertools
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pysqlite3
import pytest
from sqlite_utils import Database
from structlog.testing import capture_logs

from honed.adapt.protocol import wire
from honed.daemon.errors import StartError, StoreError
from honed.daemon.settings.sections import StoreSettings
from honed.daemon.store import batch_tables, canary_tables, pruning
from honed.daemon.store import store as store_module
from honed.daemon.store.age import AgeClock
from honed.daemon.store.batch_tables import StoredBatch
from honed.daemon.store.database import check_sqlite_version, connect, why_not
from honed.daemon.store.migrations import MOST_AUDITED, SCHEMA_1, migrations, split_statements
from honed.daemon.store.pruning import Pruning
from honed.daemon.store.rollups import count_batch
from honed.daemon.store.store import LEAST_GROUP, Store
from tests.daemon.conftest import Clock, wait_for
from tests.daemon.fake_engine import make_batch


def stored(batch: wire.EventBatch, received_s: float | None = None) -> StoredBatch:
    received_ns = time.time_ns() if received_s is None else int(received_s * 1e9)
    return StoredBatch.of(batch, wire.encode(batch), received_ns, count_batch(batch, received_ns))


def put(store: Store, *batches: StoredBatch) -> None:
    for batch in batches:
        assert store.put(batch)
    assert store.drain(20)


def left_after(passes: Pruning, store: Store, clock: Clock, table: str, num_rounds: int) -> list[tuple[int, float]]:
    """Run rounds of pruning when they are due: the rows of a table that are left after each, and the time until the next."""
    left = []
    for _ in range(num_rounds):
        store.write(passes.run)
        left.append((store.read(f"SELECT count(*) AS n FROM {table}")[0]["n"], passes.due_in_s()))
        clock.now += passes.due_in_s()
    return left


def test_a_batch_is_counted_where_it_is_stored(store: Store) -> None:
    put(store, stored(make_batch(1)), stored(make_batch(2)))
    assert [row["seq"] for row in store.read("SELECT seq FROM batches ORDER BY id")] == [1, 2]
    boot = store.read("SELECT * FROM boots")[0]
    assert (boot["committed_seq"], boot["batches"], boot["rounds"], boot["accepted_tokens"]) == (2, 2, 16, 24)
    for resolution in (1, 60, 3600):
        rows = store.read("SELECT * FROM rollups WHERE resolution_s = ?", (resolution,))
        assert sum(row["rounds"] for row in rows) == 16
        assert all(row["bucket_s"] % resolution == 0 for row in rows)


def test_the_same_batch_is_stored_once(store: Store) -> None:
    put(store, stored(make_batch(1)), stored(make_batch(1)))
    put(store, stored(make_batch(1)))
    assert store.read("SELECT count(*) AS n FROM batches")[0]["n"] == 1
    assert store.read("SELECT rounds FROM boots")[0]["rounds"] == 8
    assert store.read("SELECT sum(rounds) AS n FROM rollups WHERE resolution_s = 60")[0]["n"] == 8


def test_a_batch_stays_stored_once_when_retention_has_deleted_it(store: Store) -> None:
    put(store, stored(make_batch(1)))
    store.write(lambda db: db.conn.execute("DELETE FROM batches") and None)
    put(store, stored(make_batch(1)))
    assert store.read("SELECT rounds FROM boots")[0]["rounds"] == 8


def test_two_boots_of_one_engine_have_their_own_numbers(store: Store) -> None:
    put(store, stored(make_batch(1, boot_id="a")), stored(make_batch(1, boot_id="b")))
    assert store.read("SELECT count(*) AS n FROM batches")[0]["n"] == 2


def test_the_frame_is_kept_as_it_came(store: Store) -> None:
    batch = make_batch(1)
    put(store, stored(batch))
    frame = zlib.decompress(store.read("SELECT frame FROM batches")[0]["frame"])
    assert wire.decode_to_daemon(frame) == batch


def test_on_commit_sees_only_what_another_connection_can_read(folder: Path) -> None:
    seen: list[int] = []
    holder: list[Store] = []

    def on_commit(group: list[StoredBatch]) -> None:
        rows = holder[0].read("SELECT max(committed_seq) AS seq FROM boots")
        assert rows[0]["seq"] == group[-1].seq
        seen.extend(item.seq for item in group)

    store = Store(folder / "honed.db", StoreSettings(commit_interval_s=0.0), on_commit=on_commit)
    holder.append(store)
    store.start()
    put(store, *[stored(make_batch(seq)) for seq in range(1, 51)])
    store.close()
    assert seen == list(range(1, 51))


def test_a_full_queue_says_no_instead_of_waiting(folder: Path) -> None:
    store = Store(folder / "honed.db", StoreSettings(queue_bytes=1 << 20))
    big = stored(make_batch(1, rounds=30_000))
    answers = [store.put(big) for _ in range(20)]  # the writer isn't started: nothing leaves the queue
    assert answers[0]
    assert not answers[-1]
    store.close()


@pytest.mark.fault("an engine that floods the daemon")
def test_an_engine_that_floods_the_store_delays_only_itself(folder: Path) -> None:
    groups: list[list[tuple[str, int]]] = []

    def on_commit(group: list[StoredBatch]) -> None:
        groups.append([(item.engine_id, item.seq) for item in group])

    store = Store(folder / "honed.db", StoreSettings(queue_bytes=1 << 20, commit_interval_s=0.0), on_commit=on_commit)
    seq = 1
    while store.put(flood := stored(make_batch(seq))):
        seq += 1
    half = (1 << 19) // flood.num_bytes
    assert abs(seq - 1 - half) <= 1, "the other half is for others"
    for number in (1, 2):
        assert store.put(stored(make_batch(number, engine_id="quiet")))
    store.start()
    assert store.drain(60)
    store.close()
    assert [one for one in groups[0] if one[0] == "quiet"] == [("quiet", 1), ("quiet", 2)]
    assert len(groups[0]) == LEAST_GROUP
    assert [one[1] for group in groups for one in group if one[0] != "quiet"] == list(range(1, seq))


def test_a_slow_disk_is_asked_seldom(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same few batches for each sync, a busy daemon on a slow disk would fall behind for good."""
    transaction, num_syncs = store._transaction, 0

    @contextlib.contextmanager
    def slow() -> Iterator[None]:
        nonlocal num_syncs
        with transaction():
            yield
        num_syncs += 1
        time.sleep(0.1)

    monkeypatch.setattr(store, "_transaction", slow)
    for seq in range(1, 1001):
        assert store.put(stored(make_batch(seq)))
    assert store.drain(60)
    assert num_syncs < 20, "40 in groups of the least size"


def test_batches_wait_in_memory_while_the_disk_refuses(folder: Path, clock: Clock) -> None:
    acked: list[int] = []
    store = Store(
        folder / "honed.db",
        StoreSettings(commit_interval_s=0.0),
        clock=clock,
        on_commit=lambda group: acked.extend(item.seq for item in group),
    )
    store.start()
    # SQLite itself refuses: the database may not grow any more.
    store.write(lambda db: db.conn.execute("PRAGMA max_page_count = 1").fetchall() and None)
    for seq in (1, 2):
        assert store.put(stored(make_batch(seq, rounds=3000)))
    wait_for(lambda: store.is_failing, "the refusal")
    assert store.errors
    assert "full" in store.last_error
    assert acked == []
    assert store.queued_batches == 2
    wait_for(lambda: _lift_cap(store), "the disk to have room again")
    assert store.drain(20)
    store.close()
    assert acked == [1, 2]
    assert not store.is_failing


def set_meta(value: int) -> Callable[[Any], None]:
    return lambda db: db.conn.execute("INSERT OR REPLACE INTO meta VALUES ('state', ?)", (value,)) and None


def test_the_last_of_a_state_is_stored_once_the_disk_takes_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A short error of the disk dropped what an operation or a trial had come to, and a restart brought back what it was."""
    store.keep("state", set_meta(1)).result(20)
    check, calls = store._files.check, 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        raise pysqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(store._files, "check", fail)
    states = [store.keep("state", set_meta(value)) for value in (2, 3)]
    with pytest.raises(StoreError, match="disk I/O error"):
        store.write(lambda db: None)  # who waits is told at once
    wait_for(lambda: calls >= 3, "another try")
    states.append(store.keep("state", set_meta(4)))
    monkeypatch.setattr(store._files, "check", check)
    for state in states:
        state.result(20)
    assert store.read("SELECT value FROM meta WHERE key = 'state'") == [{"value": 4}]


def disk_error() -> None:
    raise pysqlite3.OperationalError("disk I/O error")


def test_a_store_without_batches_fails_and_recovers_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looked was told that all was well, while no hello and no state was written."""
    assert store.drain(20)
    with monkeypatch.context() as broken:
        broken.setattr(store._files, "check", disk_error)
        waiting = store.keep("state", set_meta(1))
        wait_for(lambda: store.is_failing, "the refusal")
    waiting.result(20)
    assert not store.is_failing
    with store._changed:
        store.is_failing = True  # as after a job that isn't retried, and then nothing more to store
        store._pruning._due_s = float("-inf")
        store._changed.notify_all()
    wait_for(lambda: not store.is_failing, "the next look at the disk")


def test_facts_of_a_boot_are_kept_though_its_hello_is_not(store: Store) -> None:
    store.write(lambda db: batch_tables.save_facts(db, "engine-0", "boot", "v-own", 7))
    store.write(lambda db: batch_tables.save_hello(db, "engine-0", "boot", "{}", 2 * 10**18))
    store.write(lambda db: batch_tables.save_facts(db, "engine-0", "boot", "v-own", 8))
    (row,) = store.read("SELECT * FROM boots")
    assert (row["own_version"], row["target_updates"], row["hello"]) == ("v-own", 8, "{}")
    assert 0 < row["first_seen_unix_ns"] < row["last_seen_unix_ns"]


def test_a_failing_disk_has_rest_whatever_comes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch of each engine was another try, and another line in the journal."""
    monkeypatch.setattr(store_module, "RETRY_S", 60.0)
    put(store, stored(make_batch(1)))
    with monkeypatch.context() as broken, capture_logs() as logged:
        broken.setattr(store._files, "check", disk_error)
        store.put(stored(make_batch(2)))
        wait_for(lambda: store.errors, "the refusal")
        for seq in range(3, 13):
            store.put(stored(make_batch(seq)))
            time.sleep(0.01)
        assert store.errors == 1
        store.close()
    assert [entry["event"] for entry in logged] == ["commit failed; the batches wait in memory"]


def test_a_failing_disk_is_logged_seldom(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.001)
    with monkeypatch.context() as broken, capture_logs() as logged:
        broken.setattr(store._files, "check", disk_error)
        state = store.keep("state", set_meta(1))
        store.put(stored(make_batch(1)))
        wait_for(lambda: store.errors > 20, "many tries")
    state.result(20)
    assert store.drain(20)
    assert len(logged) <= 3


def test_a_state_that_cannot_be_stored_is_not_retried_for_ever(store: Store) -> None:
    with pytest.raises(StoreError, match="NOT NULL"):
        store.keep("state", lambda db: db.conn.execute("INSERT INTO operations (operation_id) VALUES ('x')")).result(20)


def test_closing_waits_for_no_disk(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(folder / "honed.db", StoreSettings(commit_interval_s=0.0))
    store.start()

    def fail() -> None:
        raise pysqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(store._files, "check", fail)
    state = store.keep("state", set_meta(1))
    wait_for(lambda: store.errors, "the refusal")
    store.close()
    assert not store.is_alive
    with pytest.raises(StoreError, match="disk I/O error"):
        state.result(20)


def _lift_cap(store: Store) -> bool:
    store.write(lambda db: db.conn.execute("PRAGMA max_page_count = 100000").fetchall() and None)
    return True


def test_a_batch_that_spoils_its_transaction_does_not_take_the_others_along(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    insert = batch_tables.insert

    def spoiled(db: Any, group: list[StoredBatch], now_s: float) -> int:
        if any(item.seq == 2 for item in group):
            raise ValueError("unstorable")
        return insert(db, group, now_s)

    monkeypatch.setattr(batch_tables, "insert", spoiled)
    acked: list[int] = []
    store = Store(
        folder / "honed.db",
        StoreSettings(commit_interval_s=1.0),
        on_commit=lambda group: acked.extend(item.seq for item in group),
    )
    for seq in (1, 2, 3):
        store.put(stored(make_batch(seq)))
    store.start()
    assert store.drain(20)
    assert acked == [1, 2, 3]
    boots = store.read("SELECT committed_seq, batches, rounds, malformed_batches FROM boots")
    assert boots == [{"committed_seq": 3, "batches": 3, "rounds": 16, "malformed_batches": 1}]
    assert store.read("SELECT seq FROM batches ORDER BY id") == [{"seq": 1}, {"seq": 3}]
    store.close()


@pytest.mark.parametrize(
    "error", [pysqlite3.DatabaseError("database disk image is malformed"), pysqlite3.OperationalError("x")]
)
def test_batches_wait_while_the_database_is_damaged(folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    insert, is_damaged = batch_tables.insert, True

    def damaged(db: Any, group: list[StoredBatch], now_s: float) -> int:
        if is_damaged and group[-1].seq >= 2:
            raise error
        return insert(db, group, now_s)

    monkeypatch.setattr(batch_tables, "insert", damaged)
    acked: list[int] = []
    store = Store(folder / "honed.db", StoreSettings(), on_commit=lambda group: acked.extend(item.seq for item in group))
    store.start()
    put(store, stored(make_batch(1)))
    for seq in (2, 3):
        assert store.put(stored(make_batch(seq)))
    wait_for(lambda: store.is_failing, "the refusal")
    assert acked == [1]
    is_damaged = False
    assert store.drain(20)
    store.close()
    assert acked == [1, 2, 3]


def test_what_went_into_a_file_that_is_gone_is_not_acknowledged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, insert = folder / "honed.db", batch_tables.insert
    acked: list[int] = []
    store = Store(
        path,
        StoreSettings(commit_interval_s=0.0),
        on_commit=lambda group: acked.extend(item.seq for item in group),
    )
    store.start()
    put(store, stored(make_batch(1)))

    def lose(db: Any, group: list[StoredBatch], now_s: float) -> int:
        count = insert(db, group, now_s)
        path.unlink()
        return count

    monkeypatch.setattr(batch_tables, "insert", lose)
    store.put(stored(make_batch(2)))
    wait_for(lambda: store.errors or acked != [1], "the refusal")
    store.close()
    assert acked == [1]


def test_jobs_run_in_a_transaction_of_their_own(store: Store) -> None:
    def broken(db: Any) -> None:
        db.conn.execute("INSERT INTO marks (t, engine_id, kind, text) VALUES (1, '', 'swap', 'x')")
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        store.write(broken)
    assert store.read("SELECT * FROM marks") == []
    with pytest.raises(StoreError, match="no such table"):
        store.write(lambda db: db.conn.execute("INSERT INTO nowhere VALUES (1)"))


@pytest.mark.fault("a thousand hellos at once")
def test_many_jobs_cost_one_commit(store: Store) -> None:
    """A thousand hellos mustn't hold up batches for a thousand syncs of the disk."""
    statements: list[str] = []
    go_on, inside = threading.Event(), threading.Event()
    store.write(lambda db: db.conn.set_trace_callback(statements.append))
    waiting = store.submit(lambda db: (inside.set(), go_on.wait(20)))
    assert inside.wait(20)

    def broken(db: Any) -> None:
        batch_tables.save_hello(db, "broken", "boot", "{}", 1)
        raise ValueError("no")

    def hello(number: int) -> Callable[[Any], None]:
        return lambda db: batch_tables.save_hello(db, f"engine-{number}", "boot", "{}", 1)

    jobs = [store.submit(hello(number)) for number in range(1000)]
    bad = store.submit(broken)
    go_on.set()
    waiting.result(20)
    for job in jobs:
        job.result(20)
    with pytest.raises(ValueError, match="no"):
        bad.result(20)
    assert statements.count("COMMIT") <= 4
    names = [row["engine_id"] for row in store.read("SELECT engine_id FROM boots")]
    assert len(names) == 1000
    assert "broken" not in names


def test_a_disk_that_fails_at_the_commit_fails_every_job(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        raise pysqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(store._files, "check", gone)
    jobs = [store.submit(lambda db: None) for _ in range(3)]
    for job in jobs:
        with pytest.raises(StoreError, match="disk I/O error"):
            job.result(20)


def test_the_audit_table_only_grows(store: Store) -> None:
    store.write(lambda db: db.conn.execute("INSERT INTO audit VALUES (1, 1.0, 'me', 'promote', 'v', '', 'ok')") and None)
    for sql in ("DELETE FROM audit", "UPDATE audit SET actor = 'you'"):
        with pytest.raises(StoreError, match="append-only"):
            store.write(lambda db, sql=sql: db.conn.execute(sql) and None)


def test_closing_commits_what_is_queued(folder: Path) -> None:
    store = Store(folder / "honed.db", StoreSettings(commit_interval_s=1.0))
    store.start()
    for seq in range(1, 101):
        store.put(stored(make_batch(seq)))
    store.close()
    reader = connect(folder / "honed.db", read_only=True)
    assert reader.conn.execute("SELECT committed_seq FROM boots").fetchone()[0] == 100
    reader.close()
    assert not store.put(stored(make_batch(101)))
    with pytest.raises(StoreError, match="closed"):
        store.write(lambda db: None)


def test_readers_do_not_wait_for_the_writer(store: Store) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(db: Any) -> None:
        inside.set()
        assert go_on.wait(20)

    future = store.submit(slow)
    assert inside.wait(20)
    assert store.read("SELECT count(*) AS n FROM boots") == [{"n": 0}]
    go_on.set()
    future.result(20)


@pytest.mark.fault("a database deleted while it is in use")
@pytest.mark.parametrize("suffix", ["", "-wal", "-shm"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_nothing_is_committed_into_a_file_that_is_gone(folder: Path, suffix: str, is_replaced: bool) -> None:
    committed: list[int] = []
    store = Store(
        folder / "honed.db",
        StoreSettings(commit_interval_s=0.0),
        on_commit=lambda batches: committed.extend(item.seq for item in batches),
    )
    store.start()
    put(store, stored(make_batch(1)))
    path = folder / f"honed.db{suffix}"
    path.unlink()
    if is_replaced:
        path.write_bytes(b"")
    assert store.put(stored(make_batch(2)))
    wait_for(lambda: store.is_failing, "the loss to be noticed")
    assert committed == [1]
    assert f"honed.db{suffix} was deleted or replaced" in store.last_error
    with pytest.raises(StoreError, match="deleted or replaced"):
        store.write(lambda db: None)
    store.close()
    assert committed == [1]


# --- pruning --------------------------------------------------------------------------------------------------------


def insert(store: Store, batch: StoredBatch, age_s: float = 0.0) -> None:
    """Store a batch as if it had come some time ago."""
    now_s = store._age.now_s() - age_s
    store.write(lambda db: batch_tables.insert(db, [batch], now_s))


def delete(store: Store, settings: StoreSettings) -> bool:
    return store.write(lambda db: pruning.apply_deletions(db, settings, store._age.now_s()))


def test_old_raw_batches_go_and_their_sums_stay(store: Store, clock: Clock) -> None:
    insert(store, stored(make_batch(1), clock.now), 100.0)
    insert(store, stored(make_batch(2), clock.now))
    assert not delete(store, StoreSettings(max_raw_age_s=50)), "nothing is left for a further round"
    assert [row["seq"] for row in store.read("SELECT seq FROM batches")] == [2]
    assert store.read("SELECT rounds FROM boots")[0]["rounds"] == 16


def test_the_oldest_raw_batches_go_when_there_are_too_many_bytes(store: Store, clock: Clock) -> None:
    put(store, *[stored(make_batch(seq), clock.now) for seq in range(1, 11)])
    sizes = [row["frame_bytes"] for row in store.read("SELECT frame_bytes FROM batches ORDER BY id")]
    delete(store, StoreSettings(max_raw_bytes=sum(sizes[-3:])))
    assert [row["seq"] for row in store.read("SELECT seq FROM batches ORDER BY id")] == [8, 9, 10]
    assert store.write(pruning.raw_bytes) == sum(sizes[-3:])


def test_rollups_go_by_age_and_resolution(store: Store, clock: Clock) -> None:
    insert(store, stored(make_batch(1), clock.now), 1000.0)
    delete(store, StoreSettings(max_age_1s_s=500, max_age_1min_s=5000))
    assert {row["resolution_s"] for row in store.read("SELECT resolution_s FROM rollups")} == {60, 3600}


def test_of_old_trials_the_verdict_stays_and_the_evidence_over_time_goes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It grew for ever: half a thousand pairs of windows a trial, for each workload."""
    monkeypatch.setattr(pruning, "MOST_EVIDENCE", 2)
    trial = {
        "kind": "canary",
        "old": "v1",
        "new_key": "k",
        "ended_unix_s": None,
        "decision": "worse",
        "text": "",
        "state": "{}",
    }
    point = {"t": 1.0, "rounds": 9, "workload": "", "evidence_worse": 0.0, "evidence_better": 0.0, "change": 0.0}

    def fill(db: Database) -> None:
        for number in range(4):
            name = f"op{number}"
            canary_tables.save(db, trial | {"operation_id": name, "new": f"v{number + 2}", "began_unix_s": float(number)})
            canary_tables.save_points(db, [point | {"operation_id": name, "pairs": pairs} for pairs in (1, 2, 3)])

    store.write(fill)
    for _ in range(3):
        delete(store, StoreSettings())
    assert [len(canary_tables.points(store, f"op{number}")) for number in range(4)] == [0, 0, 3, 3]
    assert len(canary_tables.listing(store, 10)) == 4


def test_of_marks_operations_and_changes_the_newest_stay(store: Store) -> None:
    """They grew for ever. What goes on stays, however old it is."""
    ended, last = ("succeeded", "done", 2.0), pruning.MOST_OPERATIONS + 3
    operations = [(1, *ended), (2, "running", "canary", None), (3, "succeeded", "watching", 2.0), (4, *ended), (last, *ended)]

    def fill(db: Database) -> None:
        for number in (1, 2, MOST_AUDITED + 1):
            db.conn.execute("INSERT INTO audit VALUES (?, 1.0, 'me', 'promote', 'v', '', 'ok')", (number,))
        for number in (1, 2, pruning.MOST_MARKS + 1):
            db.conn.execute("INSERT INTO marks VALUES (?, 1.0, '', 'swap', 'x')", (number,))
        for number, state, stage, finished_unix_s in operations:
            db.conn.execute(
                "INSERT INTO operations (rowid, operation_id, kind, state, stage, created_unix_s, finished_unix_s, reason, "
                "actor, detail, error) VALUES (?, ?, 'recalibrate', ?, ?, 1.0, ?, '', '', '{}', '')",
                (number, f"op{number}", state, stage, finished_unix_s),
            )

    store.write(fill)
    delete(store, StoreSettings())
    assert [row["id"] for row in store.read("SELECT id FROM audit")] == [2, MOST_AUDITED + 1]
    assert [row["id"] for row in store.read("SELECT id FROM marks")] == [2, pruning.MOST_MARKS + 1]
    left = store.read("SELECT rowid FROM operations ORDER BY rowid")
    assert [row["rowid"] for row in left] == [2, 3, 4, last]


def kept(store: Store) -> list[tuple[int, int]]:
    """Resolution and age of the roll-ups, in hours, oldest first."""
    rows = store.read("SELECT resolution_s, stored_s FROM rollups ORDER BY resolution_s, stored_s")
    return [(row["resolution_s"], round((store._age.now_s() - row["stored_s"]) / 3600)) for row in rows]


@pytest.mark.fault("sums of rounds that fill the disk")
def test_the_finest_and_oldest_rollups_go_when_there_are_too_many_bytes(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """62 workloads of 8 engines took 11 GB in 30 days; what the limit of bytes freed was raw batches."""
    monkeypatch.setattr(pruning, "ROLLUPS_AT_ONCE", 1)
    hours = (1000.0, 100.0, 1.2, 0.1)  # no two within an hour
    for seq, age_h in enumerate(hours, start=1):
        insert(store, stored(make_batch(seq, unix_ns=int((clock.now - age_h * 3600) * 1e9)), clock.now), age_h * 3600.0)
    assert store.rollup_bytes > 12 * 100
    order = []
    while left := set(kept(store)):
        delete(store, StoreSettings(max_rollup_bytes=store.rollup_bytes - 1, max_age_1s_s=0, max_age_1min_s=0, max_age_1h_s=0))
        order.append(*left - set(kept(store)))
    # What views read goes last: 10 minutes of seconds, a day of minutes, a month of hours.
    first = [(1, 1000), (1, 100), (1, 1), (60, 1000), (60, 100), (3600, 1000)]
    assert order == [*first, (1, 0), (60, 1), (60, 0), (3600, 100), (3600, 1), (3600, 0)]
    assert store.rollup_bytes == 0


@pytest.mark.fault("sums of rounds that fill the disk")
def test_sums_that_went_by_size_are_read_at_the_next_resolution(store: Store, clock: Clock) -> None:
    insert(store, stored(make_batch(1), clock.now), 3600.0)
    assert store.finest_kept(5000.0, 1) == 1
    delete(store, StoreSettings(max_rollup_bytes=store.rollup_bytes - 1))
    assert store.cuts_s() == {1: pytest.approx(3599.0, abs=20.0)}
    assert [store.finest_kept(span_s, 1) for span_s in (3500.0, 5000.0)] == [1, 60]


@pytest.mark.fault("sums of rounds that fill the disk")
@pytest.mark.parametrize("num_drafts", [3, 15])
def test_bytes_of_rollups_are_about_what_the_disk_has(store: Store, clock: Clock, num_drafts: int) -> None:
    for second in range(60):
        workloads = [f"workload-{number}" for number in range(40)]
        batch = make_batch(second + 1, rounds=40, drafted=[num_drafts] * 40, unix_ns=int((clock.now + second) * 1e9))
        rounds = msgspec.structs.replace(batch.rounds, workload=list(range(40)))
        put(store, stored(msgspec.structs.replace(batch, workloads=workloads, rounds=rounds), clock.now + second))
    (sizes,) = store.read("SELECT page_count * page_size AS n FROM pragma_page_count, pragma_page_size")
    assert store.rollup_bytes == pytest.approx(sizes["n"] - store.write(pruning.raw_bytes) - 100_000, rel=0.25)


@pytest.mark.fault("sums of rounds that fill the disk")
def test_too_many_rollups_go_round_after_round(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "ROLLUPS_PER_ROUND", 2)
    minute_s = clock.now // 60 * 60 - 60  # all rounds are of one
    for seq in range(1, 6):
        insert(store, stored(make_batch(seq, unix_ns=int((minute_s + seq) * 1e9)), clock.now), 1000.0)
    passes = Pruning(StoreSettings(max_rollup_bytes=1), store._age, clock)
    assert left_after(passes, store, clock, "rollups", 4) == [
        (n, pruning.SOON_S if n else pruning.EVERY_S) for n in (5, 3, 1, 0)
    ]


def test_the_writer_applies_retention_and_gives_pages_back(folder: Path) -> None:
    clock = Clock()
    settings = StoreSettings(commit_interval_s=0.0, max_raw_bytes=1)
    store = Store(folder / "honed.db", settings, clock=clock, monotonic=clock)
    store.start()
    for seq in range(1, 60):
        clock.now += 11
        put(store, stored(make_batch(seq, rounds=2000), clock.now))
    assert store.read("SELECT count(*) AS n FROM batches")[0]["n"] <= 1
    assert store.read("PRAGMA freelist_count")[0]["freelist_count"] < 100
    store.close()


def test_too_much_is_given_back_round_after_round(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "BATCHES_PER_ROUND", 2)
    put(store, *[stored(make_batch(seq), clock.now) for seq in range(1, 6)])
    passes = Pruning(StoreSettings(max_raw_bytes=1), store._age, clock)
    assert left_after(passes, store, clock, "batches", 3) == [(3, pruning.SOON_S), (1, pruning.SOON_S), (0, pruning.EVERY_S)]


def test_old_sums_go_round_after_round(store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a long stop a transaction of millions held up a write for 17 s."""
    monkeypatch.setattr(pruning, "ROLLUPS_PER_ROUND", 2)
    for seq in range(1, 6):
        insert(store, stored(make_batch(seq, unix_ns=int((clock.now - seq) * 1e9)), clock.now), 1000.0)
    passes = Pruning(StoreSettings(max_age_1s_s=500), store._age, clock)
    assert left_after(passes, store, clock, "rollups WHERE resolution_s = 1", 3) == [
        (3, pruning.SOON_S),
        (1, pruning.SOON_S),
        (0, pruning.EVERY_S),
    ]


@pytest.mark.fault("engine names and reasons without end")
def test_hellos_without_end_leave_a_bounded_number_of_boots(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pruning, "MOST_SILENT_BOOTS", 3)
    put(store, stored(make_batch(1, engine_id="old")))
    for number in range(10):
        store.write(
            lambda db, number=number: batch_tables.save_hello(db, f"engine-{number}", "boot", "{}", 2 * 10**18 + number)
        )
    delete(store, StoreSettings())
    assert {row["engine_id"] for row in store.read("SELECT engine_id FROM boots")} == {
        "old",
        *(f"engine-{n}" for n in range(6, 10)),
    }


class Machine:
    """A wall clock that can be wrong, and an uptime that can't."""

    def __init__(self) -> None:
        self.wall_s, self.up_s, self.boot = 1.8e9, 1000.0, 1

    def passes(self, seconds: float) -> None:
        self.wall_s, self.up_s = self.wall_s + seconds, self.up_s + seconds

    def is_off(self, seconds: float) -> None:
        self.wall_s, self.up_s, self.boot = self.wall_s + seconds, 0.0, self.boot + 1


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def aged(folder: Path, machine: Machine) -> Iterator[Callable[[float], tuple[int, int]]]:
    """Let time pass in one process and count the rows of batches and of sums by second that an hour's limit leaves."""
    db = connect(folder / "aged.db")
    migrations.apply(db)
    settings = StoreSettings(max_raw_age_s=3600.0, max_age_1s_s=3600.0)
    numbers = itertools.count(1)
    ages: dict[int, AgeClock] = {}

    def after(seconds: float, *, is_stored: bool = False) -> tuple[int, int]:
        if machine.boot not in ages:
            clocks = {"wall": lambda: machine.wall_s, "uptime": lambda: machine.up_s}
            ages[machine.boot] = AgeClock(db, **clocks)  # type: ignore[arg-type]
        age = ages[machine.boot]
        passes = Pruning(settings, age, lambda: machine.up_s)
        if is_stored:
            batch_tables.insert(
                db, [stored(make_batch(next(numbers), unix_ns=int(machine.wall_s * 1e9)), machine.wall_s)], age.now_s()
            )
            db.conn.commit()
        passes.run(db)
        machine.passes(seconds)
        machine.passes(pruning.EVERY_S)
        passes.run(db)
        counted = "SELECT (SELECT count(*) FROM batches), (SELECT count(*) FROM rollups WHERE resolution_s = 1)"
        batches, seconds_kept = db.conn.execute(counted).fetchone()
        return int(batches), int(seconds_kept)

    yield after
    db.close()


@pytest.mark.fault("a wall clock that is wrong")
def test_a_clock_that_is_wrong_for_hours_makes_nothing_old(aged: Callable[..., tuple[int, int]], machine: Machine) -> None:
    assert aged(0.0, is_stored=True) == (1, 1)
    for _ in range(2):
        machine.wall_s += 10 * 365 * 86400.0
        assert aged(1500.0) == (1, 1)
    machine.wall_s -= 20 * 365 * 86400.0
    assert aged(600.0) == (0, 0), "an hour has passed"


@pytest.mark.fault("a wall clock that is wrong")
def test_what_a_clock_dated_later_than_now_grows_old(aged: Callable[..., tuple[int, int]], machine: Machine) -> None:
    """It neither stays for years, nor keeps what came after it."""
    machine.wall_s += 10 * 365 * 86400.0
    assert aged(0.0, is_stored=True) == (1, 1)
    machine.wall_s -= 10 * 365 * 86400.0
    assert aged(0.0, is_stored=True) == (2, 2)
    assert aged(3600.0) == (0, 0)


@pytest.mark.fault("a wall clock that is wrong")
def test_a_start_in_the_wrong_year_makes_nothing_old(aged: Callable[..., tuple[int, int]], machine: Machine) -> None:
    aged(2 * 86400.0)
    assert aged(0.0, is_stored=True) == (1, 1)
    machine.is_off(1800.0)
    machine.wall_s += 10 * 365 * 86400.0
    assert aged(1800.0) == (1, 1)
    assert aged(1800.0) == (0, 0), "the machine has been on for an hour"


@pytest.mark.fault("a wall clock that is wrong")
def test_the_time_without_power_counts_once_the_clock_is_believed(
    folder: Path, aged: Callable[..., tuple[int, int]], machine: Machine
) -> None:
    aged(2 * 86400.0)
    machine.is_off(30 * 86400.0)
    aged(0.0)
    seconds = "SELECT value FROM meta WHERE key = 'age_s'"
    reader = connect(folder / "aged.db", read_only=True)
    before = reader.conn.execute(seconds).fetchone()[0]
    aged(86400.0)
    after = reader.conn.execute(seconds).fetchone()[0]
    assert after - before == pytest.approx(31 * 86400.0, abs=30.0)
    reader.close()


@pytest.mark.fault("a wall clock that is wrong")
def test_a_restart_of_the_daemon_alone_counts_its_absence(folder: Path) -> None:
    machine = Machine()
    clocks: Any = {"wall": lambda: machine.wall_s, "uptime": lambda: machine.up_s}
    db = connect(folder / "aged.db")
    migrations.apply(db)
    age = AgeClock(db, **clocks)
    began_s = age.now_s()
    age.save(db)
    machine.passes(500.0)
    assert AgeClock(db, **clocks).now_s() - began_s == 500.0
    machine.wall_s += 1e9
    assert AgeClock(db, **clocks).now_s() == began_s, "a clock that has jumped can't tell"
    db.close()


DAY_S, YEARS_S = 86400.0, 10 * 365 * 86400.0


@pytest.fixture
def start(folder: Path, machine: Machine) -> Iterator[Callable[[], Callable[[float], float]]]:
    """Start a daemon, whose result lets time pass and returns the clock of ages."""
    db = connect(folder / "aged.db")
    migrations.apply(db)

    def started() -> Callable[[float], float]:
        age = AgeClock(db, wall=lambda: machine.wall_s, uptime=lambda: machine.up_s)

        def after(seconds: float) -> float:
            age.save(db)
            machine.passes(seconds)
            age.save(db)
            return age.now_s()

        return after

    yield started
    db.close()


def test_a_clock_that_jumps_before_the_day_is_over_is_not_believed(start: Callable[..., Any], machine: Machine) -> None:
    start()(2 * DAY_S)
    machine.is_off(1800.0)
    after = start()
    before_s = after(0.98 * DAY_S)
    machine.wall_s += YEARS_S
    assert after(3600.0) - before_s == pytest.approx(3600.0)


def test_the_time_without_power_outlives_a_restart_of_the_daemon(start: Callable[..., Any], machine: Machine) -> None:
    before_s = start()(2 * DAY_S)
    machine.is_off(30 * DAY_S)
    start()(3600.0)
    assert start()(DAY_S) - before_s == pytest.approx(31 * DAY_S + 3600.0)


def test_ages_do_not_shrink_where_the_clock_comes_up_in_the_past(start: Callable[..., Any], machine: Machine) -> None:
    before_s = start()(2 * DAY_S)
    machine.is_off(1800.0)
    machine.wall_s -= YEARS_S
    assert start()(DAY_S) - before_s == pytest.approx(DAY_S)


# --- layout -----------------------------------------------------------------------------------------------------------


def test_a_version_1_database_opens_with_what_it_holds(folder: Path) -> None:
    path = folder / "honed.db"
    raw = pysqlite3.connect(str(path))
    for statement in split_statements(SCHEMA_1):
        raw.execute(statement)
    raw.execute("CREATE TABLE _sqlite_migrations (id INTEGER PRIMARY KEY, migration_set TEXT, name TEXT, applied_at TEXT)")
    raw.execute("INSERT INTO _sqlite_migrations VALUES (1, 'honed', 'm001_initial', '2026-11-20')")
    columns = "engine_id, boot_id, first_seen_unix_ns, last_seen_unix_ns, committed_seq"
    raw.execute(f"INSERT INTO boots ({columns}) VALUES ('e', 'b', 1, 1, 7)")
    raw.commit()
    raw.close()
    store = Store(path, StoreSettings())
    assert store.read("SELECT committed_seq FROM boots") == [{"committed_seq": 7}]
    store.close()


def test_a_database_of_a_newer_release_is_refused(folder: Path) -> None:
    path = folder / "honed.db"
    Store(path, StoreSettings()).close()
    raw = pysqlite3.connect(str(path))
    raw.execute("INSERT INTO _sqlite_migrations (migration_set, name, applied_at) VALUES ('honed', 'm999_later', '2027-01-01')")
    raw.commit()
    raw.close()
    with pytest.raises(StartError, match=r"honed\.db was written by a newer honed \(m999_later\): install that one"):
        Store(path, StoreSettings())


def test_a_full_disk_is_named_where_sqlite_calls_it_an_io_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def usage(path: Path) -> Any:
        return shutil._ntuple_diskusage(100, 100, 0)  # type: ignore[attr-defined]

    assert why_not(pysqlite3.OperationalError("disk I/O error"), folder / "honed.db") == ""
    monkeypatch.setattr(shutil, "disk_usage", usage)
    assert (
        why_not(pysqlite3.OperationalError("disk I/O error"), folder / "honed.db")
        == f"; the disk of {folder} is full: free some space"
    )


def test_an_empty_database_gets_every_migration(folder: Path) -> None:
    database = connect(folder / "honed.db")
    assert len(migrations.pending(database)) > 0
    migrations.apply(database)
    assert migrations.pending(database) == []
    database.close()


def test_a_file_that_is_no_database_is_a_clear_error(folder: Path) -> None:
    (folder / "honed.db").write_bytes(b"this is not a database, it is a text" * 100)
    with pytest.raises(StartError, match=r"honed\.db: file is not a database; move the file away"):
        Store(folder / "honed.db", StoreSettings())


@pytest.mark.parametrize(("version", "is_fine"), [((3, 51, 2), False), ((3, 40, 1), False), ((3, 51, 3), True)])
def test_releases_of_sqlite_that_corrupt_are_refused(version: tuple[int, int, int], is_fine: bool) -> None:
    if is_fine:
        check_sqlite_version(version)
    else:
        with pytest.raises(StartError, match=r"3\.51\.3"):
            check_sqlite_version(version)


def test_commits_are_synced(store: Store) -> None:
    def synchronous(db: Any) -> int:
        return int(db.conn.execute("PRAGMA synchronous").fetchone()[0])

    assert store.write(synchronous) == 2  # FULL
    assert store.read("PRAGMA journal_mode") == [{"journal_mode": "wal"}]


def test_a_long_scan_stops_no_other_read(store: Store) -> None:
    rows = store.scan("WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000) SELECT i FROM n")
    assert next(rows) == {"i": 1}
    assert store.read("SELECT 2 AS i") == [{"i": 2}]
    assert [row["i"] for row in rows][-1] == 1000
    with pytest.raises(StoreError, match="no such table"):
        next(store.scan("SELECT * FROM missing"))
