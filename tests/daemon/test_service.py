"""The service as engines see it: real socket, real database, this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pysqlite3
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from honed.adapt.protocol import wire
from honed.attach.events.model_wait import ModelWait
from honed.attach.events.publisher import Callbacks, Publisher
from honed.attach.events.step_log import StepLog
from honed.daemon.errors import StoreError
from honed.daemon.ingest.engines import RETIRED_S
from honed.daemon.metrics.render import render
from honed.daemon.service import Service
from honed.daemon.settings.settings import Settings, load
from honed.daemon.views import views
from honed.recalib.registry.access import User
from tests.attach.step_cases import a_step, started
from tests.daemon.conftest import flags_in, wait_for
from tests.daemon.fake_engine import FakeEngine, make_hello, make_status
from tests.daemon.lifecycle.test_lifecycle import write_checkpoint

MakeEngine = Callable[..., FakeEngine]


def boot_row(service: Service, boot_id: str = "boot") -> dict[str, int]:
    rows = service.store.read("SELECT * FROM boots WHERE boot_id = ?", (boot_id,))
    return rows[0] if rows else {}


def test_a_hello_is_answered_with_what_is_committed(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.hello().committed_seq == 0
    for seq in range(1, 11):
        engine.send(engine.batch(seq))
    engine.wait_acked(10)
    engine.reconnect()
    assert engine.hello().committed_seq == 10


@pytest.mark.fault("a reader that holds up engines")
def test_a_hello_waits_for_no_reader_of_the_database(service: Service, make_engine: MakeEngine) -> None:
    with service.store._reader._lock:  # as in the middle of a long query
        assert make_engine().hello().committed_seq == 0


def test_a_hello_is_stored_once_the_disk_takes_it(
    service: Service, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise pysqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as broken:
        broken.setattr(service.store._files, "check", fail)
        make_engine().hello()
        wait_for(lambda: service.store.errors, "the refusal")
    wait_for(lambda: boot_row(service).get("hello"), "the hello")


def test_duplicates_resends_and_holes_are_stored_exactly_once(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello()
    for seq in (1, 2, 2, 1, 4, 3, 4, 6, 5, 6, 6):
        engine.send(engine.batch(seq))
    engine.wait_acked(6)
    assert service.store.drain(10)
    assert service.store.read("SELECT count(*) AS n FROM batches")[0]["n"] == 6
    assert boot_row(service)["rounds"] == 48
    assert service.ingest.figures.ahead == 2
    assert service.ingest.figures.duplicates == 3
    assert sum(counts.rounds for _, counts in service.live.snapshot()) == 48


def test_losses_that_the_engine_declares_add_up_with_what_is_stored(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello()
    engine.send(engine.batch(1))
    gap = engine.batch(4, rounds=0, first_seq=2, lost_rounds=24, lost_draft_tokens=72, lost_accepted_tokens=30, lost_batches=3)
    engine.send(gap)
    engine.send(engine.batch(5, lost_rounds=24, lost_draft_tokens=72, lost_accepted_tokens=30, lost_batches=3))
    engine.wait_acked(5)
    row = boot_row(service)
    assert row["rounds"] + row["lost_rounds"] == 16 + 24
    assert row["missing_batches"] == 0


def test_a_hole_that_the_engine_cannot_fill_is_counted(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello()
    engine.send(engine.batch(8))
    engine.wait_acked(8)
    assert boot_row(service)["missing_batches"] == 7


@pytest.mark.fault("a batch that takes long to learn")
def test_frames_wait_for_no_learning_and_for_no_request_that_waits_for_it(service: Service, make_engine: MakeEngine) -> None:
    # It held the lock: busy engines waited long for their acknowledgements, and so did everybody who asked.
    engine = make_engine()
    engine.hello()
    controller = wait_for(lambda: service.engines.get("engine-0").controller, "the controller")
    with ThreadPoolExecutor(2) as requests, controller._lock:  # as if it were learning
        waiting = [requests.submit(render, service), requests.submit(views.beliefs, service, ["engine-0"])]
        for seq in (1, 2):
            engine.send(engine.batch(seq))
            engine.wait_acked(seq)
        assert service.steering.num_waiting == 2
        assert not any(one.done() for one in waiting)
        with service.lock:  # as a trial's turn and its end do
            controller.take_turns(["v1", "v2"])
            controller.end_turns()
    wait_for(lambda: not service.steering.num_waiting, "both batches")


def test_boots_without_end_leave_one_controller(service: Service, make_engine: MakeEngine) -> None:
    # Each boot's controller, some MB, was made and kept for its batches that waited to be learned: memory grew with each hello.
    engine, seen = make_engine(), []
    for number in range(20):
        engine.boot_id = f"boot-{number}"
        with service.lock:
            service.on_frame(b"peer", wire.encode(engine.hello_message(drafter_version="v")))
            service.on_frame(b"peer", wire.encode(engine.batch(1)))
            seen.append(service.engines.get("engine-0"))
    *replaced, latest = seen
    wait_for(lambda: latest.controller, "the latest boot's controller")
    wait_for(lambda: not service.steering.num_waiting, "the batches")
    assert [one.controller for one in replaced] == [None] * 19
    wait_for(lambda: not any(one.awaits_controller for one in replaced), "the controllers that nobody needs")
    assert len(service.steering._held) == 0
    assert [service.steering.controller(one) for one in replaced] == [None] * 19


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(frame=st.binary(max_size=200) | st.binary(max_size=60).map(lambda b: wire.encode(wire.Ack(boot_id="b", seq=1))[:-3] + b))
def test_garbage_is_counted_and_dropped(service: Service, frame: bytes) -> None:
    before = sum(service.ingest.figures.rejected.values())
    service.on_frame(b"peer", frame)
    assert sum(service.ingest.figures.rejected.values()) == before + 1


def test_garbage_on_the_wire_harms_nobody(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello()
    for frame in (b"", b"\xc1", b"x" * 10_000, wire.encode(wire.Ack(boot_id="b", seq=3))):
        engine.send_frame(frame)
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    assert sum(service.ingest.figures.rejected.values()) == 4


def test_a_malformed_batch_does_not_block_those_behind_it(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello()
    engine.send(engine.batch(1, accepted=[99] * 8))
    engine.send(engine.batch(2))
    engine.wait_acked(2)
    row = boot_row(service)
    assert (row["malformed_batches"], row["rounds"]) == (1, 8)
    assert "accepted more" in service.store.read("SELECT malformed FROM batches WHERE seq = 1")[0]["malformed"]


def test_a_newer_peer_is_answered_and_marked_and_its_batches_are_left_alone(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    assert engine.hello(wire_version=wire.WIRE_VERSION + 1).boot_id == engine.boot_id
    engine.send(engine.batch(1))
    wait_for(lambda: service.ingest.figures.rejected["wire_version"], "the rejection")
    assert service.engines.by_id["engine-0"].note == "speaks wire version 2, this daemon 1"
    assert service.store.read("SELECT * FROM batches") == []


def test_policies_arrive_and_are_refreshed(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello()
    first = engine.expect(wire.Policy)
    again = engine.expect(wire.Policy)
    assert first.max_k == again.max_k == 3
    assert again.generation >= first.generation


def test_an_engine_that_tells_of_its_graphs_later_gets_lengths_that_fit_them(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello()
    first = engine.expect(wire.Policy)
    assert (first.equal_lengths, first.captured_lengths, first.captured_tokens) == (False, [], [])
    engine.hello(captured_tokens=[1, 4, 8], captured_lengths=[0, 3])
    policy = engine.expect(wire.Policy, lambda policy: policy.equal_lengths)
    assert (policy.captured_lengths, policy.captured_tokens) == ([0, 3], [1, 4, 8])
    with service.lock:
        controller = service.engines.by_id["engine-0"].controller
    engine.hello(captured_tokens=[1, 4, 8], captured_lengths=[0, 3])
    with service.lock:
        assert service.engines.by_id["engine-0"].controller is controller, "what was learned is gone, for no news"


def test_an_engine_that_has_graphs_for_no_length_that_it_drafts_is_warned_of(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    with capture_logs() as logged:
        engine.hello(captured_lengths=[30])
        engine.expect(wire.Policy, lambda policy: policy.captured_lengths == [30])
    (warning,) = [one for one in logged if one["event"] == "no draft length is left to choose"]
    assert (warning["log_level"], warning["engine_id"]) == ("warning", "engine-0")
    assert warning["why"].startswith("captured_lengths begins at 30, and num_speculative_tokens is 3: nothing would ever be")
    with capture_logs() as logged:
        engine.hello(captured_lengths=[0, 3])
        engine.expect(wire.Policy, lambda policy: policy.captured_lengths == [0, 3])
    assert "no draft length is left to choose" not in [one["event"] for one in logged]


def test_an_engine_that_leaves_all_drafts_or_none_to_choose_says_so(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello(captured_lengths=[3], captured_tokens=[4, 16, 32], limits=["no swap here"])
    policy = engine.expect(wire.Policy, lambda policy: policy.captured_lengths == [3])
    assert policy.equal_up_to == 8
    first, few = views.engines(service)[0]["limits"]
    assert first == "no swap here"
    assert few.startswith(
        "draft lengths: 0 or 3 alone in steps of up to 8 requests, since vLLM captured CUDA graphs for no other"
    )
    engine.hello(captured_lengths=[0, 2, 3], captured_tokens=[4, 16, 32])
    policy = engine.expect(wire.Policy, lambda policy: policy.captured_lengths == [0, 2, 3])
    assert policy.equal_up_to == 10
    assert views.engines(service)[0]["limits"] == []
    engine.hello(captured_lengths=[30])
    engine.expect(wire.Policy, lambda policy: policy.captured_lengths == [30])
    assert views.engines(service)[0]["limits"] == [], "its graphs are for no length that it drafts, which the log says"


def test_an_engine_whose_drafts_vllm_trims_gets_policies_too(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello(capabilities=["events", "swap", "estimates"])
    assert not engine.expect(wire.Policy).feeds_estimates  # unless asked for


def test_engines_tell_their_steps_only_where_a_trainer_works_beside_requests(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello()
    assert not engine.expect(wire.Policy).tells_steps


class TestATrainerBesideRequests:
    @pytest.fixture
    def settings(self, folder: Path) -> Settings:
        return load(None, flags_in(folder) | {"trainer": {"when": "spare"}}, env={})

    def test_engines_tell_it_their_steps(self, service: Service, make_engine: MakeEngine) -> None:
        engine = make_engine()
        engine.hello()
        assert engine.expect(wire.Policy).tells_steps


def test_an_engine_that_only_observes_gets_no_policy(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello(capabilities=["events"])
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    service.steer(service.monotonic())
    assert not [m for m in engine.received if isinstance(m, wire.Policy)]


def test_an_engine_that_cannot_be_steered_keeps_no_other_from_it(
    service: Service, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, fine = make_engine(engine_id="a-broken"), make_engine(engine_id="fine")
    for engine in (broken, fine):
        engine.hello()
        engine.expect(wire.Policy)

    def fail(*_: object) -> None:
        raise ZeroDivisionError("a figure is 0")

    with service.lock:
        controller = service.engines.by_id["a-broken"].controller
        assert controller is not None
        monkeypatch.setattr(controller, "propose", fail)
        monkeypatch.setattr(controller, "observe", fail)
        errors = service.steering.errors
    with capture_logs() as logs:
        for engine in (broken, fine):
            engine.send(engine.batch(1))
            engine.wait_acked(1)
        wait_for(lambda: service.steering.errors >= errors + 3, "failures, one of them to learn")
        with service.lock:
            service.overrides.set("draft_tokens", 1, 60, "", "operator")
        fine.expect(wire.Policy, lambda policy: policy.override == "draft_tokens")
    assert {one["engine_id"] for one in logs if one["log_level"] in ("error", "warning")} == {"a-broken"}
    assert [one["error"] for one in logs if one["event"] == "an engine isn't steered"] == ["ZeroDivisionError: a figure is 0"]
    assert [one["seq"] for one in logs if one["event"] == "can't learn from a batch"] == [1]


def test_engines_are_steered_though_another_part_of_the_tick_fails(
    service: Service, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.hello()
    engine.expect(wire.Policy)

    def fail(*_: object) -> None:
        raise StoreError("disk I/O error")

    monkeypatch.setattr(service.recalibrations, "tick", fail)
    with service.lock:
        service.overrides.set("draft_tokens", 1, 60, "", "operator")
        service.tick(service.monotonic())
    service.steer(service.monotonic())
    engine.expect(wire.Policy, lambda policy: policy.override == "draft_tokens")


def test_a_job_in_the_background_that_fails_is_logged(service: Service) -> None:
    done = threading.Event()

    def fail() -> None:
        raise KeyError("odd")

    with capture_logs() as logs:
        for run in (service.in_background, service.in_learning):
            run(fail)
            run(done.set)
            assert done.wait(60)
            done.clear()
    assert [one["error"] for one in logs if one["event"] == "a job in the background failed"] == ["'odd'"] * 2


@pytest.mark.fault("a stop that waits for a disk that hangs")
def test_a_stop_leaves_a_job_that_does_not_end(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    # An import of a large checkpoint outlasted the unit's time for a stop, and systemd killed the daemon.
    monkeypatch.setattr("honed.daemon.service.LEAVE_S", 0.01)
    begun, go_on = threading.Event(), threading.Event()

    def hang() -> None:
        begun.set()
        go_on.wait(90)

    service.in_background(hang)
    assert begun.wait(60)
    stopping = threading.Thread(target=service.stop, daemon=True)
    stopping.start()
    stopping.join(60)
    go_on.set()
    assert not stopping.is_alive()
    assert not service.store.is_alive


@pytest.mark.fault("a drafter that couldn't be read once is never looked at again")
def test_a_drafter_that_comes_late_is_registered_while_the_engine_serves(
    service: Service, make_engine: MakeEngine, folder: Path
) -> None:
    engine = make_engine()
    assert engine.hello(drafter_path=str(folder / "drafter")).drafter_version == ""
    assert "can't be retrained" in views.engines(service)[0]["note"]
    write_checkpoint(folder / "drafter", 0.0)
    version = engine.expect(wire.Welcome, lambda welcome: welcome.drafter_version != "").drafter_version
    assert views.engines(service)[0]["note"] == ""
    assert service.drafters.aliases()["floor"] == service.drafters.active == version


@pytest.mark.fault("a mount that hangs under one engine's drafter")
def test_other_engines_are_welcome_while_one_engine_s_files_hang(service: Service, make_engine: MakeEngine) -> None:
    # All was read on one thread: no engine was welcomed until the mount answered, and the status said nothing.
    identify, begun, go_on = service.greeting._identify, threading.Event(), threading.Event()

    def hang(hello: wire.EngineHello, user: User | None) -> str:
        if hello.drafter_path == "/nfs/drafter":
            begun.set()
            assert go_on.wait(120)
        return identify(hello, user)

    service.greeting._identify = hang
    hung = make_engine(engine_id="engine-hung")
    for _ in range(3):  # it says so every second
        hung.send(hung.hello_message(drafter_path="/nfs/drafter"))
    assert begun.wait(60)
    for number in range(3):
        make_engine(engine_id=f"engine-{number}").hello(drafter_path=f"/models/drafter-{number}")
    assert views.status(service)["background"]["oldest_job"] == "/nfs/drafter"
    hung.reconnect()
    hung.hello(drafter_path="/models/drafter-0")  # started again with other files
    go_on.set()
    wait_for(lambda: service.oldest_job() is None, "the end of the reading")
    assert views.status(service)["background"] == {"oldest_job_s": 0.0, "oldest_job": ""}


def test_a_full_queue_is_felt_as_silence_and_heals_by_resending(
    service: Service, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    engine.hello()
    with monkeypatch.context() as patch:
        patch.setattr(service.store, "put", lambda item: False)
        engine.send(engine.batch(1))
        wait_for(lambda: service.ingest.figures.no_room, "the refusal")
    engine.send(engine.batch(2))  # what follows must not be taken before it
    wait_for(lambda: service.ingest.figures.ahead, "the refusal of what follows")
    engine.send(engine.batch(1))
    engine.send(engine.batch(2))
    engine.wait_acked(2)
    assert boot_row(service)["rounds"] == 16


def test_two_processes_under_one_engine_id_are_pointed_out(service: Service, make_engine: MakeEngine) -> None:
    one, two = make_engine(boot_id="one"), make_engine(boot_id="two")
    one.hello()
    two.hello()
    assert "two processes" in service.engines.by_id["engine-0"].note


@pytest.mark.fault("engines that are gone for good and never forgotten")
def test_an_engine_that_is_gone_for_a_day_is_forgotten(service: Service, make_engine: MakeEngine) -> None:
    """It was an error in the status, and so of its check, until the daemon was started again."""
    gone, there = make_engine(engine_id="engine-gone"), make_engine(engine_id="engine-there")
    for engine in (gone, there):
        engine.hello()
        engine.send(engine.batch(1))
        engine.wait_acked(1)
    with service.lock:
        now_s, since_s = service.monotonic(), service.clock() - 60.0
        service.swaps.tick(now_s)
        for known in service.engines.by_id.values():
            known.last_seen_s = now_s - RETIRED_S - 60.0
        service.engines.tick(now_s)  # the daemon, or both of them, may have stood still
        assert set(service.swaps._attempts) == set(service.engines.by_id) == {"engine-gone", "engine-there"}
    gone.reconnect()
    wait_for(lambda: not service.engines.by_id["engine-gone"].boot.peer, "the connection's end")
    with service.lock:
        service.engines.by_id["engine-gone"].last_seen_s = now_s - RETIRED_S + 60.0
        service.engines.tick(now_s)
        assert "engine-gone" in service.engines.by_id
        service.engines.tick(now_s + 120.0)
        assert set(service.swaps._attempts) == set(service.engines.by_id) == {"engine-there"}
        assert {engine_id for engine_id, _ in service.decisions} == {"engine-there"}
        assert not service.load.slots("engine-gone", since_s)
        assert service.load.slots("engine-there", since_s)
    assert gone.hello().committed_seq == 1


def test_an_engine_that_was_forgotten_on_a_living_connection_comes_back(service: Service) -> None:
    """It made room for others while it stood still; later all that it sent was refused, as long as vLLM ran."""

    def status(queue_bytes: int) -> wire.EngineStatus:
        return make_status(queue_bytes=queue_bytes)

    def ignore(_: object) -> None:
        return

    steps = StepLog()
    steps.append(started())
    callbacks = Callbacks(make_hello, status, ignore, ignore, ignore, lambda: None, ignore)
    endpoint = f"ipc://{service.settings.paths.engine_socket}"
    publisher = Publisher(endpoint, "engine-0", "boot", steps, 1 << 20, callbacks, ModelWait())
    publisher.start()
    for seq in (1, 2):
        steps.append(a_step(seq))
        wait_for(lambda seq=seq: boot_row(service).get("committed_seq") == seq, "the batch")  # type: ignore[misc]
        with service.lock:
            service.engines._forget("engine-0")
    publisher.stop()


def test_a_status_shows_in_the_engine(service: Service, make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.hello()
    engine.send_status(num_running=7, fallback="stale_policy")
    wait_for(lambda: service.engines.by_id["engine-0"].status, "the status")
    assert service.engines.by_id["engine-0"].status.num_running == 7  # type: ignore[union-attr]
