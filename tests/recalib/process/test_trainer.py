"""The trainer's loop in this process, against a real ROUTER socket; as a process of its own it is in tests/integration."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import zmq

from honed.adapt.protocol import wire
from honed.attach.capture.ring_writer import RingWriter
from honed.attach.engine.busy_flag import BusyFlag, tell_start
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.gate.gate import GateSettings
from honed.recalib.process import trainer as process
from honed.recalib.process.recalibration import Recalibration
from honed.recalib.process.trainer import Trainer
from honed.recalib.registry.registry import Registry
from honed.recalib.samples.hold_out import HoldOut
from honed.recalib.samples.traffic import Traffic
from honed.recalib.training.progress import OperationError
from honed.recalib.training.training_run import TrainingRun
from tests.recalib.toy_traffic import WIDTH, make_pair, write_sessions
from tests.tools import ROOT

STEPS = 120


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.bind(f"ipc://{tmp_path}/engine.sock")
    yield socket
    socket.close(linger=0)
    context.term()
    torch.set_num_threads(threads)


def make_trainer(
    folder: Path,
    monotonic: Callable[[], float] = time.monotonic,
    on_tick: Callable[[str], None] | None = None,
    **changes: Any,
) -> tuple[Trainer, wire.TrainRequest]:
    """A trainer that has samples, and what to ask of it."""
    settings = TrainerSettings(
        min_training_tokens=1000,
        max_steps=STEPS,
        rows_per_micro_step=120,
        micro_steps_per_update=1,
        save_state_s=0.0,
        tick_s=0.01,
        status_interval_s=0.01,
        **changes,
    )
    target, drafter = make_pair(folder)
    registry = Registry(folder / "state" / "registry")
    parent = registry.import_checkpoint(drafter, target_path=str(target)).version
    ring = RingWriter(folder / "engines" / "e" / "ring", 1 << 22, WIDTH)
    write_sessions(ring, "b", 40)
    traffic = Traffic(folder, settings, HoldOut(b"k" * 16))
    endpoint = f"ipc://{folder}/engine.sock"
    trainer = Trainer(
        settings,
        GateSettings(min_sessions=3, confidence=0.8),
        registry,
        traffic,
        endpoint,
        monotonic=monotonic,
        on_tick=on_tick,
    )
    request = wire.TrainRequest(
        operation_id="op",
        capture_paths=[str(ring.path)],
        target_path=str(target),
        parent_version=parent,
        workloads=["b"],
        max_seconds=1e9,
    )
    return trainer, request


def ask(daemon: zmq.Socket[bytes], trainer: Trainer, request: wire.TrainRequest) -> None:
    """Wait for its introduction, and ask it to train."""
    trainer.turn()
    assert daemon.poll(10_000)
    peer, _ = daemon.recv_multipart()
    daemon.send_multipart([peer, wire.encode(request)])


def train(daemon: zmq.Socket[bytes], folder: Path, max_duty: float) -> tuple[wire.TrainResult, float]:
    """One operation from request to result; the result, and the seconds from the first unit of training to the last."""
    trainer, request = make_trainer(folder, max_duty=max_duty)
    result, seen = None, []
    while result is None:
        trainer.turn()
        while daemon.poll(0):
            peer, frame = daemon.recv_multipart()
            message = wire.decode_to_daemon(frame)
            if isinstance(message, wire.TrainerHello):
                daemon.send_multipart([peer, wire.encode(request)])
            elif isinstance(message, wire.TrainerStatus) and message.state == "training":
                seen.append(time.monotonic())
            elif isinstance(message, wire.TrainResult):
                result = message
    trainer.close()
    return result, seen[-1] - seen[0]


def test_training_rests_for_the_time_that_its_duty_leaves_free(daemon: zmq.Socket[bytes], tmp_path: Path) -> None:
    result, seconds = train(daemon, tmp_path, max_duty=0.2)
    assert result.ok, result.error
    assert result.steps == STEPS
    # The first and the last unit may lie outside the time that was seen.
    assert result.train_seconds * (STEPS - 2) / STEPS <= 0.2 * seconds * 1.1


def test_while_training_is_paused_the_deadline_does_not_come_nearer(daemon: zmq.Socket[bytes], tmp_path: Path) -> None:
    skipped_s = [0.0]
    trainer, request = make_trainer(tmp_path, lambda: time.monotonic() + skipped_s[0], deadline_s=300.0)
    peer, state = b"", ""

    def turn_until(*wanted: str) -> wire.TrainResult | None:
        nonlocal peer, state
        until_s = time.monotonic() + 60.0
        while time.monotonic() < until_s:
            trainer.turn()
            while daemon.poll(0):
                peer, frame = daemon.recv_multipart()
                message = wire.decode_to_daemon(frame)
                state = getattr(message, "state", state)
                if isinstance(message, wire.TrainResult):
                    return message
            if state in wanted:
                return None
        raise AssertionError(f"it stayed {state!r}")

    turn_until("idle")
    daemon.send_multipart([peer, wire.encode(request)])
    turn_until("training")
    daemon.send_multipart([peer, wire.encode(wire.TrainPause(paused=True))])
    turn_until("paused")
    for _ in range(3):  # told again, as when the daemon was restarted, it is the same pause
        skipped_s[0] += 1000.0
        daemon.send_multipart([peer, wire.encode(wire.TrainPause(paused=True))])
        time.sleep(0.05)
        assert turn_until("paused") is None
    daemon.send_multipart([peer, wire.encode(wire.TrainPause(paused=False))])
    assert turn_until("training") is None
    result = turn_until("")
    trainer.close()
    assert result is not None
    assert result.ok, result.error
    assert result.steps == STEPS
    assert result.elapsed_s < 300.0


def test_what_is_asked_along_with_a_cancellation_is_begun(daemon: zmq.Socket[bytes], tmp_path: Path) -> None:
    """As by a daemon that was restarted, which ends what the last one asked for."""
    trainer, request = make_trainer(tmp_path)
    ask(daemon, trainer, request)
    while trainer._operation is None:
        trainer.turn()
    trainer._take(wire.TrainCancel(operation_id="op", reason="nobody waits for it"))
    trainer._take(msgspec.structs.replace(request, operation_id="next"))
    results: dict[str, wire.TrainResult] = {}
    while "next" not in results:
        trainer.turn()
        while daemon.poll(0):
            message = wire.decode_to_daemon(daemon.recv_multipart()[1])
            if isinstance(message, wire.TrainResult):
                results[message.operation_id] = message
    trainer.close()
    assert "nobody waits for it" in results["op"].error
    assert results["next"].ok, results["next"].error


@pytest.mark.fault("a ring that no writer made")
def test_rings_that_no_engine_made_are_told_and_the_others_are_read(daemon: zmq.Socket[bytes], tmp_path: Path) -> None:
    trainer, _ = make_trainer(tmp_path)
    for name in ("odd", "cut", "linked"):
        RingWriter(tmp_path / "engines" / name / "ring", 1 << 20, WIDTH)
    with (tmp_path / "engines" / "odd" / "ring").open("r+b") as file:
        file.write(os.urandom(4096))
    os.truncate(tmp_path / "engines" / "cut" / "ring", 10_000)
    (tmp_path / "engines" / "linked" / "ring").unlink()
    (tmp_path / "engines" / "linked" / "ring").symlink_to(tmp_path / "engines" / "e" / "ring")
    told = None
    until_s = time.monotonic() + 60.0
    while not (told and told.samples == 40) and time.monotonic() < until_s:
        trainer.turn()
        while daemon.poll(0):
            message = wire.decode_to_daemon(daemon.recv_multipart()[1])
            told = message if isinstance(message, wire.TrainerStatus) else told
    trainer.close()
    assert told
    assert (told.defective_rings, told.samples) == (3, 40)


def test_waiting_for_an_engine_at_work_costs_next_to_nothing(daemon: zmq.Socket[bytes], tmp_path: Path) -> None:
    turns: list[float] = []
    flag = BusyFlag(tmp_path / "engines" / "another" / "busy")
    trainer, request = make_trainer(tmp_path, on_tick=lambda _: turns.append(time.monotonic()))
    ask(daemon, trainer, request)
    while trainer._state != "training":
        trainer.turn()
    flag.set(True)
    raised_s = time.monotonic()
    while time.monotonic() < raised_s + 1.0:
        trainer.turn()
    assert trainer._state == "waiting"
    # At first every 2 ms, and then ever more rarely: some 30 times in the first 0.3 s, and 50 times a second from then on.
    assert len([at_s for at_s in turns if raised_s + 0.3 < at_s <= raised_s + 1.0]) <= 40
    flag.set(False)
    trainer.turn()  # it may be waiting a last time
    trainer.turn()
    assert trainer._state == "training"
    trainer.close()
    flag.close()


def test_with_a_device_of_its_own_it_trains_whatever_engines_do(daemon: zmq.Socket[bytes], tmp_path: Path) -> None:
    flag = BusyFlag(tmp_path / "engines" / "e" / "busy")
    flag.set(True)
    trainer, request = make_trainer(tmp_path, yields_to=())
    ask(daemon, trainer, request)
    while trainer._state != "training":
        trainer.turn()
        assert trainer._state != "waiting"
    trainer.close()
    flag.close()


def test_it_yields_to_another_daemon_s_engines(daemon: zmq.Socket[bytes], tmp_path: Path) -> None:
    other = tmp_path / "other"
    flag = BusyFlag(other / "engines" / "e" / "busy")
    flag.set(True)
    trainer, request = make_trainer(tmp_path, other_runtime_dirs=(str(other),))
    ask(daemon, trainer, request)
    until_s = time.monotonic() + 30.0
    while trainer._state != "waiting" and time.monotonic() < until_s:
        trainer.turn()
    assert trainer._state == "waiting"
    assert [engine.engine_id for engine in trainer._engines()] == [f"e of {other}"]
    trainer.close()
    flag.close()


def begin_training(daemon: zmq.Socket[bytes], trainer: Trainer, request: wire.TrainRequest) -> None:
    """Ask for a training, and let it go on for some turns: it stays, whichever engines are there or down."""
    ask(daemon, trainer, request)
    while trainer._state != "training":
        trainer.turn()
    for _ in range(5):
        trainer.turn()
    assert trainer._state == "training"


@pytest.mark.fault("a restart of vLLM while a training holds the GPU's memory")
@pytest.mark.parametrize("is_saving", [False, True], ids=["computing", "saving its state"])
def test_a_training_on_a_gpu_ends_with_an_engine_beside_it(
    daemon: zmq.Socket[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saving: bool
) -> None:
    monkeypatch.setattr(TrainingRun, "device", torch.device("cuda"))
    stays, ends = (BusyFlag(tmp_path / "engines" / name / "busy") for name in ("stays", "ends"))
    trainer, request = make_trainer(tmp_path)
    begin_training(daemon, trainer, request)
    assert trainer._operation is not None
    trainer._operation.progress.is_saving = is_saving
    ends.close()
    trainer.turn()
    is_over, result = trainer._operation is None, trainer._last_result
    trainer.close()
    stays.close()
    assert is_over
    assert result is not None
    assert "ends ended, and the training's memory on cuda may be in the way of its start" in result.error


@pytest.mark.parametrize("has_run", [False, True], ids=["for the first time", "again"])
def test_a_training_on_a_gpu_ends_with_an_engine_that_starts(
    daemon: zmq.Socket[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    """vLLM looks for free memory long before the engine has its page."""
    monkeypatch.setattr(TrainingRun, "device", torch.device("cuda"))
    page = tmp_path / "engines" / "chat-1" / "busy"
    if has_run:
        BusyFlag(page).close()
    trainer, request = make_trainer(tmp_path)
    begin_training(daemon, trainer, request)
    tell_start(page)
    trainer._next_samples_s = 0.0
    trainer.turn()
    is_over, result = trainer._operation is None, trainer._last_result
    trainer.close()
    assert is_over
    assert result is not None
    assert result.error.startswith("chat-1 is starting or has ended, and the training's memory on cuda")


@pytest.mark.fault("a training on the GPU of an engine that is down")
def test_it_tells_why_a_training_is_not_on_the_gpu(
    daemon: zmq.Socket[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    BusyFlag(tmp_path / "engines" / "chat-0" / "busy").close()
    trainer, request = make_trainer(tmp_path)
    sent: list[Any] = []
    monkeypatch.setattr(trainer._link, "send", sent.append)
    trainer._take(request)
    while trainer._state != "training":
        trainer.turn()
    trainer.close()
    told = next(one for one in reversed(sent) if isinstance(one, wire.TrainerStatus))
    assert told.device_reason.startswith("chat-0 isn't running, and will want the memory of cuda at its start")
    assert told.device in ("", "cpu")


@pytest.mark.parametrize("end", ["done", "cancelled", "too late"])
def test_nothing_of_a_training_is_left_when_memory_is_given_back(
    daemon: zmq.Socket[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    runs: list[weakref.ref[TrainingRun]] = []
    left: list[TrainingRun | None] = []
    load = TrainingRun.load_head

    def noted(run: TrainingRun) -> None:
        runs.append(weakref.ref(run))
        load(run)

    monkeypatch.setattr(TrainingRun, "load_head", noted)

    def check_deadline(operation: Recalibration) -> None:
        if runs and end == "too late":
            raise OperationError("not done")

    monkeypatch.setattr(Recalibration, "check_deadline", check_deadline)
    monkeypatch.setattr(process, "give_back", lambda: left.extend(run() for run in runs))
    trainer, request = make_trainer(tmp_path)
    ask(daemon, trainer, request)
    while trainer._last_result is None:
        trainer.turn()
        if end == "cancelled" and runs:
            trainer._take(wire.TrainCancel(operation_id=request.operation_id))
    trainer.close()
    assert left == [None]


def test_what_torch_imports_late_is_there_before_training(tmp_path: Path) -> None:
    """An import of a second or two amid a unit holds serving up for as long."""
    program = f"""
import sys
from pathlib import Path
from honed.recalib.process.trainer import import_late_parts
from tests.recalib.process.test_recalibration import Site, write_sessions

import_late_parts()
before = set(sys.modules)
site = Site(Path({str(tmp_path)!r}))
write_sessions(site.ring, "b", 40)
operation = site.begin(max_steps=2)
assert site.finish(operation).steps == 2, operation.result
print("came late:", *sorted(set(sys.modules) - before))
"""
    root = ROOT
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    late = done.stdout.partition("came late:")[2].split()
    assert not [name for name in late if name.startswith(("sympy", "torch._dynamo", "torch._inductor", "torch.fx"))]
    assert len(late) < 50


def test_the_log_says_which_daemon_is_waited_for_and_that_it_was_found(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/engine.sock"
    program = f"""
from pathlib import Path
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.process.trainer import run

run(TrainerSettings(), {endpoint!r}, state_dir=Path({str(tmp_path / "state")!r}))
"""
    command = [sys.executable, "-c", program]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        try:
            assert process.stdout is not None
            waiting = next(line for line in process.stdout if "waiting for the daemon" in line)
            assert endpoint in waiting
            socket.bind(endpoint)
            assert socket.poll(20_000), "no hello came"
            peer, _ = socket.recv_multipart()
            welcome = wire.Welcome(daemon_id="d-1", boot_id="", committed_seq=0)
            socket.send_multipart([peer, wire.encode(welcome)])
            assert "d-1" in next(line for line in process.stdout if "connected to the daemon" in line)
        finally:
            process.kill()
            process.wait()
            socket.close(linger=0)
