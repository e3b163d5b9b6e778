"""The publisher against a real ROUTER socket: introductions, batches, acknowledgements, and a daemon that goes and comes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from honed.adapt.protocol import wire
from honed.attach.events.model_wait import ModelWait
from honed.attach.events.publisher import Callbacks, Publisher
from honed.attach.events.step_log import StepLog
from tests.attach.step_cases import a_step, started

BOOT = "boot"


class Daemon:
    """The other end, driven by the test."""

    def __init__(self, endpoint: str) -> None:
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.bind(endpoint)
        self.peer = b""

    def receive(self, kind: type[Any], timeout_s: float = 10.0, welcomes: bool = False) -> Any:
        """The next message of a kind; others are passed over, but a hello is answered when `welcomes`."""
        deadline_s = time.monotonic() + timeout_s
        while self.socket.poll(max(1, int(1000 * (deadline_s - time.monotonic())))):
            self.peer, frame = self.socket.recv_multipart()
            message = wire.decode_to_daemon(frame)
            if isinstance(message, kind):
                return message
            if welcomes and isinstance(message, wire.EngineHello):
                self.send(wire.Welcome(daemon_id="d", boot_id=BOOT, committed_seq=0))
        raise AssertionError(f"no {kind.__name__} within {timeout_s} s")

    def send(self, message: Any) -> None:
        self.socket.send_multipart([self.peer, wire.encode(message)])

    def welcome(self, committed_seq: int = 0) -> None:
        self.receive(wire.EngineHello)
        self.send(wire.Welcome(daemon_id="d", boot_id=BOOT, committed_seq=committed_seq))

    def close(self) -> None:
        self.context.destroy(linger=0)


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/s"


@pytest.fixture
def seen() -> dict[str, list[Any]]:
    return {"welcome": [], "policy": [], "command": [], "error": []}


@pytest.fixture
def log() -> StepLog:
    made = StepLog()
    made.append(started())
    return made


@pytest.fixture
def publisher(endpoint: str, log: StepLog, seen: dict[str, list[Any]]) -> Iterator[Publisher]:
    def hello() -> wire.EngineHello:
        return wire.EngineHello(
            wire_version=1,
            engine_id="e",
            boot_id=BOOT,
            model_name="m",
            target_path="",
            drafter_path="",
            drafter_version="",
            vllm_version="",
            honed_version="",
            runner="v1",
            method="dflash",
            num_spec_tokens=7,
            max_num_seqs=8,
        )

    def status(queue_bytes: int) -> wire.EngineStatus:
        return wire.EngineStatus(
            engine_id="e",
            boot_id=BOOT,
            num_running=0,
            num_waiting=0,
            policy_generation=0,
            policy_age_s=-1.0,
            fallback="",
            drafter_version="",
            drafter_generation=0,
            queue_bytes=queue_bytes,
            errors=0,
        )

    callbacks = Callbacks(
        hello, status, seen["welcome"].append, seen["policy"].append, seen["command"].append, lambda: None, seen["error"].append
    )
    made = Publisher(endpoint, "e", BOOT, log, 1 << 20, callbacks, ModelWait())
    made.start()
    yield made
    made.stop()


@pytest.fixture
def daemon(endpoint: str) -> Iterator[Daemon]:
    made = Daemon(endpoint)
    yield made
    made.close()


def eventually(check: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 10
    while not check():
        assert time.monotonic() < deadline_s, "it never happened"
        time.sleep(0.005)


def test_nothing_but_a_hello_is_sent_before_the_welcome(publisher: Publisher, daemon: Daemon, log: StepLog) -> None:
    log.append(a_step(1))
    first = daemon.receive(object)
    assert isinstance(first, wire.EngineHello)
    daemon.welcome()
    batch = daemon.receive(wire.EventBatch)
    assert (batch.seq, batch.steps.step, batch.drafter_version) == (1, [1], "v1")


def test_an_acknowledged_batch_is_forgotten(publisher: Publisher, daemon: Daemon, log: StepLog) -> None:
    daemon.welcome()
    log.append(a_step(1))
    daemon.receive(wire.EventBatch)
    assert len(publisher._outbox) == 1
    daemon.send(wire.Ack(boot_id=BOOT, seq=1))
    eventually(lambda: len(publisher._outbox) == 0)


def test_a_new_daemon_gets_what_the_old_one_did_not_commit(publisher: Publisher, endpoint: str, log: StepLog) -> None:
    old = Daemon(endpoint)
    old.welcome()
    for number in (1, 2, 3):
        log.append(a_step(number))
        old.receive(wire.EventBatch)
    old.close()
    new = Daemon(endpoint)
    try:
        new.welcome(committed_seq=1)
        assert [new.receive(wire.EventBatch).seq for _ in range(2)] == [2, 3]
    finally:
        new.close()


def test_what_is_not_acknowledged_for_long_is_sent_again(
    publisher: Publisher, daemon: Daemon, log: StepLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("honed.attach.events.publisher.RESEND_AFTER_S", 0.2)
    daemon.welcome()
    log.append(a_step(1))
    assert [daemon.receive(wire.EventBatch).seq for _ in range(2)] == [1, 1]


def test_policies_and_commands_reach_the_engine_and_garbage_does_not(
    publisher: Publisher, daemon: Daemon, seen: dict[str, list[Any]]
) -> None:
    daemon.welcome()
    daemon.socket.send_multipart([daemon.peer, b"\xff\x00garbage"])
    daemon.send(wire.Policy(generation=4, ttl_s=1.0, kind="static", static_k=2, max_k=7))
    daemon.send(wire.ChecksumCommand(command_id="c"))
    eventually(lambda: bool(seen["policy"] and seen["command"]))
    assert seen["policy"][0].generation == 4
    assert seen["command"][0].command_id == "c"
    assert "policy" in publisher._pieces._needed_ns, "a policy takes milliseconds: the model's wait is for that"


@pytest.mark.parametrize(
    ("command", "named"),
    [
        ({"type": "DanceCommand"}, "DanceCommand"),
        ({"type": "SwapCommand", "drops_cache": False}, "weights"),
        (
            {"type": "SwapCommand", "drops_cache": "0", "weights": {"type": "DrafterWeights", "version": "v", "path": "p"}},
            "drops_cache",
        ),
    ],
)
def test_an_unknown_or_wrong_command_is_answered_with_the_reason(
    publisher: Publisher, daemon: Daemon, command: dict[str, Any], named: str
) -> None:
    daemon.welcome()
    daemon.socket.send_multipart([daemon.peer, msgspec.msgpack.encode(command | {"command_id": "3"})])
    result = daemon.receive(wire.CommandResult)
    assert (result.engine_id, result.boot_id, result.command_id, result.ok) == ("e", BOOT, "3", False)
    assert named in result.error
    assert "differ in version" in result.error


def test_answers_to_commands_are_sent(publisher: Publisher, daemon: Daemon) -> None:
    daemon.welcome()
    publisher.report(wire.CommandResult(engine_id="e", boot_id=BOOT, command_id="c", ok=True))
    assert daemon.receive(wire.CommandResult).command_id == "c"


def test_heartbeats_come_while_there_is_nothing_to_report(publisher: Publisher, daemon: Daemon) -> None:
    daemon.welcome()
    assert daemon.receive(wire.EngineStatus).queue_bytes == 0


def test_stopping_sends_what_is_left(publisher: Publisher, daemon: Daemon, log: StepLog) -> None:
    daemon.welcome()
    daemon.receive(wire.EngineStatus)
    log.append(a_step(1))
    publisher.stop()
    assert daemon.receive(wire.EventBatch).seq == 1


def test_stopping_without_a_daemon_is_quick(publisher: Publisher, log: StepLog) -> None:
    log.append(a_step(1))
    publisher.stop()
    assert not publisher._thread.is_alive()


def test_what_is_learned_of_the_engine_later_is_said_in_a_second_hello(
    publisher: Publisher, daemon: Daemon, log: StepLog
) -> None:
    publisher.reintroduce()
    daemon.welcome()
    log.append(a_step(1))
    daemon.receive(wire.EngineHello)
    daemon.send(wire.Welcome(daemon_id="d", boot_id=BOOT, committed_seq=0))
    assert daemon.receive(wire.EventBatch).seq == 1
    with pytest.raises(AssertionError, match="no EngineHello"):
        daemon.receive(wire.EngineHello, timeout_s=1.0)


@pytest.mark.fault("an exception in the publisher's thread")
def test_a_label_that_cannot_be_encoded_costs_its_batch_and_no_more(
    publisher: Publisher, daemon: Daemon, log: StepLog, seen: dict[str, list[Any]]
) -> None:
    """Half a surrogate pair, which a client in vLLM's own process can send, ended the thread for good."""
    daemon.welcome()
    log.append(started("bad", workload="half \ud800"))
    log.append(a_step(1, verified=(("bad", 3, 2),)))
    eventually(lambda: len(seen["error"]) == 1)
    log.append(a_step(2))
    batch = daemon.receive(wire.EventBatch, welcomes=True)  # it has connected anew
    assert (batch.seq, batch.steps.step) == (1, [2])
    assert (batch.lost_rounds, batch.lost_draft_tokens, batch.lost_accepted_tokens) == (1, 3, 2)


@pytest.mark.fault("an exception in the publisher's thread")
def test_a_step_that_cannot_be_read_costs_its_batch_and_no_more(
    publisher: Publisher, daemon: Daemon, log: StepLog, seen: dict[str, list[Any]]
) -> None:
    daemon.welcome()
    log.append(a_step(1))
    log.append(a_step(2, row_of=None, num_verified=[3]))
    eventually(lambda: len(seen["error"]) == 1)
    log.append(a_step(3))
    steps: dict[int, list[int]] = {}
    while not any(3 in kept for kept in steps.values()):
        batch = daemon.receive(wire.EventBatch, welcomes=True)
        steps[batch.seq] = batch.steps.step
    kept = [step for held in steps.values() for step in held]
    assert 2 not in kept
    assert len(kept) + batch.lost_rounds == 3
