"""The trainer stops in the midst of a unit: it hears what comes meanwhile, goes on, and nothing can hold it up."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq

from honed.adapt.protocol import wire
from honed.attach.capture.ring_writer import RingWriter
from honed.attach.engine.busy_flag import BusyFlag
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.gate.gate import GateSettings
from honed.recalib.process.trainer import Trainer
from honed.recalib.registry.registry import Registry
from honed.recalib.samples.hold_out import HoldOut
from honed.recalib.samples.traffic import Traffic
from honed.recalib.training.micro_step import MicroTrainer
from tests.recalib.toy_traffic import WIDTH, make_pair, write_sessions

DEADLINE_S = 60.0


@dataclass
class Site:
    """A trainer in this process, and a daemon's end of its socket."""

    trainer: Trainer
    socket: zmq.Socket[bytes]
    busy: BusyFlag
    request: wire.TrainRequest
    ticks: list[str]
    peer: bytes = b""

    def send(self, message: object) -> None:
        self.socket.send_multipart([self.peer, wire.encode(message)])

    def heard(self) -> list[object]:
        found = []
        while self.socket.poll(0):
            self.peer, frame = self.socket.recv_multipart()
            found.append(wire.decode_to_daemon(frame))
        return found

    def turn_until(self, kind: type, is_it: Callable[..., bool] = lambda message: True) -> list[object]:
        """Let the trainer work until such a message came; all messages until then."""
        until_s, found = time.monotonic() + DEADLINE_S, []
        while time.monotonic() < until_s:
            self.trainer.turn()
            found += self.heard()
            if any(isinstance(message, kind) and is_it(message) for message in found):
                return found
        pytest.fail(f"no {kind.__name__}: {found[-3:]}")

    def error(self) -> str:
        """Why the operation failed."""
        found = self.turn_until(wire.TrainResult)
        return next(message.error for message in found if isinstance(message, wire.TrainResult) and not message.ok)

    def raise_amid_a_unit(self, monkeypatch: pytest.MonkeyPatch, then: Callable[[], object]) -> None:
        """After the tenth unit has begun, work arrives, and 0.3 s later something else happens."""
        learn, units = MicroTrainer._learn, 0

        def counting(trainer: MicroTrainer, part: object) -> object:
            nonlocal units
            units += 1
            if units == 10:
                self.busy.set(True)
                threading.Timer(0.3, then).start()
            return learn(trainer, part)  # type: ignore[arg-type]

        monkeypatch.setattr(MicroTrainer, "_learn", counting)


@pytest.fixture
def site(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Site]:
    """A parameter is changes of the trainer's settings."""
    runtime = tmp_path / "run"
    engine = runtime / "engines" / "engine-0"
    engine.mkdir(parents=True)
    target, drafter = make_pair(tmp_path)
    registry = Registry(tmp_path / "registry")
    parent = registry.import_checkpoint(drafter, target_path=str(target)).version
    settings = TrainerSettings(
        torch_threads=1,
        learning_rate=5e-3,
        min_training_tokens=2000,
        max_steps=100_000,
        rows_per_micro_step=160,
        status_interval_s=0.05,
        micro_steps_per_update=1,
        **getattr(request, "param", {}),
    )
    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    endpoint = f"ipc://{runtime}/engine.sock"
    socket.bind(endpoint)
    ring, busy = RingWriter(engine / "ring", 1 << 22, WIDTH, "bfloat16", "fused"), BusyFlag(engine / "busy")
    ticks: list[str] = []
    trainer = Trainer(
        settings,
        GateSettings(min_sessions=3, confidence=0.8),
        registry,
        Traffic(runtime, settings, HoldOut(b"salt", settings.held_out_share)),
        endpoint,
        on_tick=ticks.append,
    )
    train = wire.TrainRequest(
        operation_id="op-1",
        capture_paths=[str(ring.path)],
        target_path=str(target),
        parent_version=parent,
        workloads=["b"],
        max_seconds=600.0,
    )
    site = Site(trainer, socket, busy, train, ticks)
    site.turn_until(wire.TrainerHello)
    write_sessions(ring, "b", 60)
    site.turn_until(wire.TrainerStatus, lambda status: status.samples >= 60)
    yield site
    trainer.close()
    context.destroy(linger=0)


def test_it_stands_by_amid_a_unit_and_goes_on(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.raise_amid_a_unit(monkeypatch, lambda: site.busy.set(False))
    site.send(site.request)
    found = site.turn_until(wire.TrainerStatus, lambda status: status.preemptions == 1 and status.state == "training")
    waiting = [message for message in found if isinstance(message, wire.TrainerStatus) and message.state == "waiting"]
    assert {status.steps for status in waiting} == {waiting[0].steps}, "nothing is trained meanwhile"
    assert waiting[-1].train_seconds == waiting[0].train_seconds, "nor counted as training"
    assert "waiting" in site.ticks, "the watchdog is fed"
    statuses = [message for message in found if isinstance(message, wire.TrainerStatus)]
    [delay_s] = [one for status in statuses for one in status.preemption_delays_s]  # told once
    [computing_s] = [one for status in statuses for one in status.preemption_computing_s]
    assert 0.0 <= computing_s <= delay_s < 60.0
    found = site.turn_until(wire.TrainerStatus, lambda status: status.steps > waiting[0].steps + 3)
    last = found[-1]
    assert isinstance(last, wire.TrainerStatus)
    assert last.elapsed_s - last.train_seconds > 0.25, "standing by is no training"


def test_a_cancellation_is_heard_amid_a_unit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.raise_amid_a_unit(monkeypatch, lambda: site.send(wire.TrainCancel(operation_id="op-1", reason="enough")))
    site.send(site.request)
    assert site.error() == "cancelled: enough"
    site.busy.set(False)


def test_a_purge_is_done_and_ends_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.raise_amid_a_unit(monkeypatch, lambda: site.send(wire.Purge()))
    site.send(site.request)
    assert "purged" in site.error()
    site.turn_until(wire.TrainerStatus, lambda status: status.samples == 0)


def test_a_stop_is_heard_amid_a_unit(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        site.trainer.is_stopping = True

    site.raise_amid_a_unit(monkeypatch, stop)
    site.send(site.request)
    assert "stopped" in site.error()


@contextlib.contextmanager
def never_idle(engine: BusyFlag, waiting: int = 0) -> Iterator[None]:
    """An engine that always has a request, with steps of 10 ms."""
    is_over = threading.Event()

    def work() -> None:
        while not is_over.wait(0.01):
            engine.note_step(time.monotonic_ns(), 10_000, 8, 1, waiting, 0)

    engine.set(True)
    thread = threading.Thread(target=work)
    thread.start()
    yield
    is_over.set()
    thread.join()


BESIDE = [{"when": "spare", "latency_budget": 0.2, "p99_budget": 10.0}]


@pytest.mark.parametrize("site", BESIDE, indirect=True)
def test_it_trains_beside_requests_that_never_end(site: Site) -> None:
    with never_idle(site.busy):
        site.send(site.request)
        found = site.turn_until(wire.TrainerStatus, lambda status: status.steps >= 8)
    last = found[-1]
    assert isinstance(last, wire.TrainerStatus)
    assert last.state == "training"
    assert 0.0 < last.train_seconds <= last.beside_seconds + 0.5
    assert last.beside_seconds < 0.35 * last.elapsed_s, "no more than its duty"
    assert last.beside_duty >= 0.2
    assert last.preemptions == 0, "nobody had to wait for it to stop"
    pauses = {message.beside_pause for message in found if isinstance(message, wire.TrainerStatus)}
    assert "steps without training are measured" in pauses


@pytest.mark.parametrize("site", BESIDE, indirect=True)
def test_it_does_not_while_requests_wait_for_a_place(site: Site) -> None:
    with never_idle(site.busy, waiting=2):
        site.send(site.request)
        found = site.turn_until(wire.TrainerStatus, lambda status: status.beside_pause.startswith("requests wait"))
        last = found[-1]
        assert isinstance(last, wire.TrainerStatus)
        assert (last.steps, last.beside_seconds, last.state) == (0, 0.0, "waiting")


@pytest.mark.parametrize("site", BESIDE, indirect=True)
def test_a_pause_amid_a_unit_beside_requests_holds_at_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit beside requests may take long: it gets a small share of the time."""
    learn, units = MicroTrainer._learn, 0

    def counting(trainer: MicroTrainer, part: object) -> object:
        nonlocal units
        units += 1
        if units == 3:
            site.send(wire.TrainPause(paused=True))
            threading.Timer(1.0, lambda: site.send(wire.TrainPause(paused=False))).start()
        return learn(trainer, part)  # type: ignore[arg-type]

    monkeypatch.setattr(MicroTrainer, "_learn", counting)
    with never_idle(site.busy):
        site.send(site.request)
        found = site.turn_until(wire.TrainerStatus, lambda status: status.steps >= 5)
    paused = [one for one in found if isinstance(one, wire.TrainerStatus) and one.state == "paused"]
    assert len(paused) > 3
    assert {one.steps for one in paused} == {2}, "amid the third"
    assert paused[-1].beside_seconds == paused[1].beside_seconds


@pytest.mark.parametrize("site", [{"when": "always"}], indirect=True)
def test_on_a_device_of_its_own_it_yields_to_none(site: Site) -> None:
    with never_idle(site.busy, waiting=2):
        site.send(site.request)
        found = site.turn_until(wire.TrainerStatus, lambda status: status.steps >= 8)
    assert {message.preemptions for message in found if isinstance(message, wire.TrainerStatus)} == {0}
