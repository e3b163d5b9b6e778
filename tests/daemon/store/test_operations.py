"""What goes on stays known, and a key stands for its first operation, however many came later."""

from __future__ import annotations

from honed.daemon.store.operations import KEPT_IN_MEMORY, Operation, Operations
from honed.daemon.store.store import Store
from tests.daemon.conftest import Clock


def many(operations: Operations) -> list[Operation]:
    found = []
    for _ in range(KEPT_IN_MEMORY + 5):
        found.append(operations.create("verify", "asking", "", "cron", None))
        operations.finish(found[-1], "succeeded")
    return found


def test_one_that_runs_stays_known(store: Store, clock: Clock) -> None:
    operations = Operations(store, clock)
    running = operations.create("recalibrate", "collecting", "", "alice", None)
    watched = operations.create("promote", "swapping", "", "alice", None)
    operations.finish(watched, "succeeded", stage="watching")
    later = many(operations)
    assert operations.get(running.operation_id) is running
    assert operations.get(watched.operation_id) is watched
    assert operations.find(later[0].operation_id) is None
    assert len(operations.listing()) == KEPT_IN_MEMORY
    operations.finish(running, "failed")
    operations.create("verify", "asking", "", "cron", None)
    assert operations.find(running.operation_id) is None


def test_one_that_ran_when_the_daemon_ended_is_told_to_have_failed(store: Store, clock: Clock) -> None:
    operations = Operations(store, clock)
    running = operations.create("recalibrate", "collecting", "", "alice", None)
    many(operations)
    assert store.drain(30)
    again = Operations(store, clock)
    again.load()
    assert again.get(running.operation_id).state == "failed"
    assert [one.operation_id for one in again.listing()][-1] == running.operation_id


def test_the_newest_stays_the_newest_after_a_clock_was_set_back(store: Store, clock: Clock) -> None:
    operations = Operations(store, clock)
    first = operations.create("verify", "asking", "", "alice", None)
    clock.now -= 3600.0
    second = operations.create("verify", "asking", "", "alice", None)
    operations.finish(first, "succeeded")
    assert store.drain(30)
    again = Operations(store, clock)
    again.load()
    assert [one.operation_id for one in again.listing()] == [second.operation_id, first.operation_id]


def test_a_key_stands_for_its_first_operation_for_good(store: Store, clock: Clock) -> None:
    """A later operation with the key replaced the first one's row."""
    operations = Operations(store, clock)
    first = operations.create("verify", "asking", "", "alice", "key")
    operations.finish(first, "succeeded")
    many(operations)
    assert store.drain(30)
    found = operations.by_key("key")
    assert found is not None
    assert (found.operation_id, found.state) == (first.operation_id, "succeeded")
    assert operations.by_key("another") is None
    operations.create("rollback", "swapping", "", "bob", "key")
    assert store.drain(30)
    assert [row["operation_id"] for row in store.read("SELECT * FROM operations WHERE idempotency_key = 'key'")] == [
        first.operation_id
    ]
