"""What was learned before a restart is known after it; of another engine's settings nothing is taken over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event
from typing import Any

import pytest
from structlog.testing import capture_logs

from honed.daemon.control import warm_start
from honed.daemon.service import Service
from honed.daemon.settings.settings import Settings
from honed.daemon.store.database import connect
from tests.daemon.conftest import wait_for
from tests.daemon.fake_engine import FakeEngine

MakeEngine = Callable[..., FakeEngine]
BATCHES = 40


@dataclass
class Life:
    """A service that is started and stopped by the test."""

    settings: Settings
    running: Service | None = None

    def start(self) -> Service:
        self.running = Service(self.settings, daemon_id="test")
        self.running.start()
        return self.running

    def stop(self) -> None:
        if self.running is not None:
            self.running.stop()
            self.running = None


@pytest.fixture
def life(settings: Settings) -> Any:
    settings.paths.state_dir.mkdir()
    settings.paths.runtime_dir.mkdir()
    made = Life(settings)
    yield made
    made.stop()


def beliefs(service: Service) -> dict[str, Any]:
    """What the engine's controller believes, once there is one."""

    def found() -> dict[str, Any]:
        with service.lock:
            engine = service.engines.by_id.get("engine-0")
            controller = engine.controller if engine is not None else None
        return controller.beliefs() if controller is not None else {}

    return dict(wait_for(found, "a controller"))


def num_steps(found: dict[str, Any]) -> int:
    return int(found["step_time"]["num_steps"])


def learned(service: Service) -> dict[str, Any]:
    """Beliefs, once they rest on all that was sent."""
    wait_for(lambda: num_steps(beliefs(service)) >= BATCHES, "what was sent to be learned")
    with service.lock:
        controller = service.engines.by_id["engine-0"].controller
        assert controller is not None
        controller.propose(0.0)  # brings up to date what is foretold, as once a second
    return beliefs(service)


def learn(engine: FakeEngine) -> None:
    engine.hello()
    for seq in range(1, BATCHES + 1):
        engine.send(engine.batch(seq, rounds=16))
    engine.wait_acked(BATCHES)


def test_a_daemon_that_is_started_again_knows_what_it_knew(life: Life, make_engine: MakeEngine) -> None:
    service, engine = life.start(), make_engine()
    learn(engine)
    before = learned(service)
    life.stop()
    after_service = life.start()
    engine.reconnect()
    engine.hello()
    after = learned(after_service)
    assert num_steps(after) == num_steps(before)
    # How right it was: that depends on when what was foretold was brought up to date, once a second.
    held = [found["workloads"]["default"].pop("reliability")["bins"] for found in (before, after)]
    weights = [sum(weight for _, _, weight in bins) for bins in held]
    assert weights[0] > 100.0
    assert weights[1] == pytest.approx(weights[0], rel=0.01)
    assert after["workloads"] == before["workloads"]
    assert after["step_time"]["is_ready"] == before["step_time"]["is_ready"]


def test_an_engine_that_is_started_again_is_known_when_it_is_as_it_was(life: Life, make_engine: MakeEngine) -> None:
    service = life.start()
    learn(make_engine(boot_id="first"))
    learned(service)
    make_engine(boot_id="second").hello()
    assert num_steps(beliefs(service)) == BATCHES
    make_engine(boot_id="third").hello(num_spec_tokens=7)
    assert num_steps(beliefs(service)) == 0


@pytest.mark.parametrize("in_trial", [True, False])
def test_what_versions_in_turn_taught_is_known_after_their_trial(life: Life, make_engine: MakeEngine, in_trial: bool) -> None:
    """Each turn counted as a swap, of whose weights nothing is known."""
    service, engine = life.start(), make_engine(boot_id="first")
    engine.hello()
    for seq in range(1, BATCHES + 1):
        engine.send(engine.batch(seq, rounds=16, drafter_version="ab"[seq // 2 % 2]))
    engine.wait_acked(BATCHES)
    learned(service)
    life.stop()
    row = dict(operation_id="op", kind="canary", old="a", new="b", new_key="", began_unix_s=0.0, text="", state="{}")
    row |= dict(ended_unix_s=2e9 if in_trial else 0.0, decision="worse")
    with connect(life.settings.paths.database).conn as stored:
        names, places = ", ".join(row), ", ".join(f":{name}" for name in row)
        stored.execute(f"INSERT INTO canaries ({names}) VALUES ({places})", row)
    after = life.start()
    make_engine(boot_id="second").hello()
    trials = learned(after)["workloads"]["default"]["trials"][0]
    assert (trials > 50.0) == in_trial


@pytest.mark.fault("stored records that can't be read")
def test_records_that_cannot_be_read_are_passed_over(life: Life, make_engine: MakeEngine) -> None:
    service, engine = life.start(), make_engine(boot_id="first")
    learn(engine)
    learned(service)
    life.stop()
    with connect(life.settings.paths.database).conn as broken:
        broken.execute(
            "INSERT INTO boots (engine_id, boot_id, hello, first_seen_unix_ns, last_seen_unix_ns) "
            "VALUES ('engine-0', 'b', '{', 0, 0)"
        )
        ids = [row[0] for row in broken.execute("SELECT id FROM batches ORDER BY id").fetchall()]
        for number, frame in ((ids[3], b"no frame"), (ids[7], "text"), (ids[9], b"")):
            broken.execute("UPDATE batches SET frame = ? WHERE id = ?", (frame, number))
        broken.execute("UPDATE batches SET malformed = 'a round accepted more' WHERE id = ?", (ids[12],))
    with capture_logs() as logged:
        after = life.start()
        make_engine(boot_id="second").hello()
        assert num_steps(beliefs(after)) == BATCHES - 4
    assert [entry["event"] for entry in logged if entry["event"].startswith("can't")] == [
        "can't learn from a stored boot",
        *["can't learn from a stored batch"] * 3,
    ]


@pytest.mark.fault("stored records that can't be read")
def test_a_daemon_starts_though_a_record_cannot_be_read(life: Life) -> None:
    life.start()
    life.stop()
    rows = {
        "operations": dict(operation_id="op", kind="adopt", state="running", stage="swapping", detail="{"),
        "overrides": dict(name="policy", value="off", until_unix_s=2e9),
        "canaries": dict(operation_id="op", kind="canary", old="a", new="b", decision="", state="[1"),
        "meta": dict(key="drift_alarms", value="{"),
    }
    with connect(life.settings.paths.database).conn as broken:
        for table, row in rows.items():
            columns = broken.execute(f"SELECT name FROM pragma_table_info('{table}') WHERE \"notnull\"").fetchall()
            row = dict.fromkeys((column[0] for column in columns), 0) | row
            names, places = ", ".join(row), ", ".join(f":{name}" for name in row)
            broken.execute(f"INSERT INTO {table} ({names}) VALUES ({places})", row)
    with capture_logs() as logged:
        service = life.start()
    assert [entry["event"] for entry in logged if entry["log_level"] in ("warning", "error")] == [
        "a stored operation can't be read",
        "the stored drift alarms can't be read",
        "an override is dropped",
    ]
    assert (service.overrides.listing(), service.operations.listing(), service.rollout.trial) == ([], [], None)


def test_of_a_long_log_the_index_is_read_and_the_newest_frames(life: Life) -> None:
    service = life.start()
    plan = service.store.read(f"EXPLAIN QUERY PLAN {warm_start._NEWEST}", ("engine-0", warm_start.MOST_BATCHES))
    (of_all,) = [row["detail"] for row in plan if "engine_id=?" in row["detail"]]
    assert "USING COVERING INDEX" in of_all
    frames = [row["detail"] for row in plan if "rowid=?" in row["detail"]]
    assert len(frames) == 1


@pytest.mark.parametrize("reads_before", [True, False])
def test_each_batch_is_learned_once_though_it_comes_during_a_warm_start(
    life: Life, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, reads_before: bool
) -> None:
    """A batch is on disk before it is learned: the log that a new controller reads may have it or not."""
    goes_on, learn = Event(), warm_start.learn_from_log

    def learn_slowly(*arguments: Any) -> tuple[int, int]:
        if reads_before:
            found = learn(*arguments)
            goes_on.wait(60.0)
            return found
        goes_on.wait(60.0)
        return learn(*arguments)

    monkeypatch.setattr(warm_start, "learn_from_log", learn_slowly)
    service, engine = life.start(), make_engine()
    engine.hello()
    for seq in range(1, 4):
        engine.send(engine.batch(seq, rounds=16))
    engine.wait_acked(3)
    wait_for(lambda: not service.steering.num_waiting, "the batches to be looked at")
    goes_on.set()
    wait_for(lambda: num_steps(beliefs(service)) >= 3, "the batches to be learned")
    engine.send(engine.batch(4, rounds=16))
    wait_for(lambda: num_steps(beliefs(service)) >= 4, "the next batch to be learned")
    assert num_steps(beliefs(service)) == 4
    assert service.steering.skipped_batches == 0
