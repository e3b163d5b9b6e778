"""An engine as far as the daemon can tell: a DEALER socket that says hello, sends batches and answers commands."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import zmq

from honed.adapt.protocol import wire
from honed.recalib.registry.weights_digest import weights_digests

M = TypeVar("M")


def make_batch(
    seq: int, *, engine_id: str = "engine-0", boot_id: str = "boot", rounds: int = 8, **changes: Any
) -> wire.EventBatch:
    """A batch of one step whose rounds draft 3 tokens and accept 0, 1, 2, 3, 0, …"""
    now, mono = changes.pop("unix_ns", time.time_ns()), time.monotonic_ns()
    drafted = changes.pop("drafted", [3] * rounds)
    accepted = changes.pop("accepted", [i % 4 for i in range(rounds)])
    fields: dict[str, Any] = {
        "engine_id": engine_id,
        "boot_id": boot_id,
        "seq": seq,
        "sent_unix_ns": now,
        "sent_mono_ns": mono,
        "drafter_version": "",
        "workloads": ["default"],
        "steps": wire.StepColumns(
            step=[seq],
            end_ns=[mono],
            duration_us=[900],
            num_requests=[rounds],
            num_tokens=[sum(drafted) + rounds],
            num_prefill_tokens=[0],
            num_draft_tokens=[sum(drafted)],
            context_tokens=[100],
            num_drafting=[3],
            decision=["static"],
        ),
        "rounds": wire.RoundColumns(
            step=[seq] * rounds,
            request=list(range(rounds)),
            workload=[0] * rounds,
            position=[10] * rounds,
            num_draft_tokens=drafted,
            num_accepted_tokens=accepted,
            num_invalid_tokens=[0] * rounds,
            temperature=[0.0] * rounds,
            num_emitted=[a + 1 for a in accepted],
        ),
    }
    return wire.EventBatch(**(fields | changes))


def make_hello(**changes: Any) -> wire.EngineHello:
    """An engine's hello, by default without a drafter."""
    fields: dict[str, Any] = {
        "wire_version": wire.WIRE_VERSION,
        "engine_id": "engine-0",
        "boot_id": "boot",
        "model_name": "tiny",
        "target_path": "/models/tiny",
        "drafter_path": "",
        "drafter_version": "",
        "vllm_version": "0.32.0",
        "honed_version": "0.1.0",
        "runner": "v1",
        "method": "dflash",
        "num_spec_tokens": 3,
        "max_num_seqs": 8,
        "capabilities": ["events", "draft_length", "capture", "swap"],
    }
    return wire.EngineHello(**(fields | changes))


def make_status(**changes: Any) -> wire.EngineStatus:
    """An engine's heartbeat."""
    fields: dict[str, Any] = {
        "engine_id": "engine-0",
        "boot_id": "boot",
        "num_running": 1,
        "num_waiting": 0,
        "policy_generation": 1,
        "policy_age_s": 0.5,
        "fallback": "",
        "drafter_version": "",
        "drafter_generation": 0,
        "queue_bytes": 0,
        "errors": 0,
    }
    return wire.EngineStatus(**(fields | changes))


class FakeEngine:
    """One connection under one engine id and boot id. Every wait has a deadline and fails with what was received instead."""

    def __init__(
        self,
        socket_path: Path,
        *,
        engine_id: str = "engine-0",
        boot_id: str = "boot",
        timeout_s: float = 60.0,
        is_immediate: bool = True,
    ) -> None:
        self.engine_id, self.boot_id, self._timeout_s, self._is_immediate = engine_id, boot_id, timeout_s, is_immediate
        self._endpoint = f"ipc://{socket_path}"
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._connect()
        self.received: list[Any] = []
        self._unasked: list[Any] = []

    def _connect(self) -> Any:
        socket = self._context.socket(zmq.DEALER)
        socket.set(zmq.LINGER, 0)
        # As honed's own: nothing is queued for a daemon that is gone. But then ZeroMQ also drops what has come in and
        # wasn't read yet when the connection ends.
        socket.set(zmq.IMMEDIATE, int(self._is_immediate))
        socket.set(zmq.RECONNECT_IVL, 20)
        socket.connect(self._endpoint)
        return socket

    def decode(self, frame: bytes) -> Any:
        return wire.decode_to_engine(frame)

    def reconnect(self) -> None:
        """Drop the connection and make another one: the daemon sees a new peer."""
        self._socket.close()
        self._unasked.clear()
        self._socket = self._connect()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def send(self, message: Any) -> None:
        self.send_frame(wire.encode(message))

    def send_frame(self, *frames: bytes) -> None:
        self._socket.send_multipart(list(frames))

    def try_send(self, message: Any) -> bool:
        """Send unless there is no connection right now."""
        try:
            self._socket.send(wire.encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self, timeout_s: float = 0.0) -> Any | None:
        """The next message, None when there is none in time."""
        if not self._socket.poll(int(timeout_s * 1000)):
            return None
        message = self.decode(self._socket.recv())
        self.received.append(message)
        return message

    def expect(self, kind: type[M], condition: Callable[[M], bool] = lambda message: True) -> M:
        """Wait for a message of this kind for which the condition holds; others stay to be expected later."""
        deadline = time.monotonic() + self._timeout_s
        for message in self._unasked:
            if isinstance(message, kind) and condition(message):
                self._unasked.remove(message)
                return message
        while (left := deadline - time.monotonic()) > 0:
            message = self.receive(left)
            if isinstance(message, kind) and condition(message):
                return message
            if message is not None:
                self._unasked.append(message)
        raise AssertionError(f"no such {kind.__name__}; last: {[type(m).__name__ for m in self.received[-5:]]}")

    def hello(self, **changes: Any) -> wire.Welcome:
        """Introduce ourselves, again every second as engines do, and wait for the welcome."""
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            self.send(self.hello_message(**changes))
            again = time.monotonic() + 1.0
            while (left := again - time.monotonic()) > 0:
                message = self.receive(left)
                if isinstance(message, wire.Welcome):
                    return message
                if message is not None:
                    self._unasked.append(message)
        raise AssertionError("no welcome")

    def hello_message(self, **changes: Any) -> wire.EngineHello:
        return make_hello(**({"engine_id": self.engine_id, "boot_id": self.boot_id} | changes))

    def batch(self, seq: int, **changes: Any) -> wire.EventBatch:
        return make_batch(seq, engine_id=self.engine_id, boot_id=self.boot_id, **changes)

    def send_status(self, **changes: Any) -> None:
        self.send(make_status(**({"engine_id": self.engine_id, "boot_id": self.boot_id} | changes)))

    def wait_acked(self, seq: int) -> None:
        self.expect(wire.Ack, lambda ack: ack.boot_id == self.boot_id and ack.seq >= seq)

    def answer_swap(self, *, ok: bool = True, error: str = "") -> wire.SwapCommand:
        """Wait for a swap command and answer it."""
        command = self.expect(wire.SwapCommand)
        self.send(
            wire.CommandResult(
                engine_id=self.engine_id,
                boot_id=self.boot_id,
                command_id=command.command_id,
                ok=ok,
                error=error,
                figures={"pause_ms": 1.5, "stage_ms": 20.0} if ok else {},
            )
        )
        return command


class FakeTrainer(FakeEngine):
    """A trainer as far as the daemon can tell."""

    def decode(self, frame: bytes) -> Any:
        return wire.decode_to_trainer(frame)

    def introduce(self, operation_id: str = "") -> None:
        self.send(
            wire.TrainerHello(
                trainer_id="trainer-0",
                device="cpu",
                operation_id=operation_id,
            )
        )
        self.expect(wire.Welcome)


class ServingEngine(FakeEngine):
    """A fake engine at work: it swaps when told, and drafts as well as the version that it runs.

    Args:
        checkpoint: what it loads at each start; "": nothing that the daemon could register.
    """

    def __init__(self, socket_path: Path, *, checkpoint: str = "", **arguments: Any) -> None:
        super().__init__(socket_path, **arguments)
        self.checkpoint = checkpoint
        self.acceptance: dict[str, float] = {}
        """Version -> chance that a draft is accepted; 0.5 where nothing is said."""
        self.workload = "default"
        """Of the requests that it serves."""
        self.live_version = self.live_sha256 = ""
        self.swaps: list[wire.SwapCommand] = []
        """Swaps that were carried out."""
        self.refuses = ""
        """Why swaps are refused; "" when they aren't."""
        self.num_refused_asleep: int | None = None
        """Swaps refused because it sleeps; None: it is awake."""
        self.is_given_weights = False
        """By somebody else, just before the next command comes."""
        self.other_ranks: dict[str, str] = {}
        """Checksums of ranks beside the first one."""
        self._seq = 0
        self._rng = random.Random(1)

    def attach(self, **changes: Any) -> wire.Welcome:
        """Say hello with what is loaded, and take the name that the daemon gives to it."""
        welcome = self.hello(drafter_path=self.checkpoint, drafter_version=self.live_version, **changes)
        if not self.live_version:
            self.live_version = welcome.drafter_version
            self.live_sha256 = _sha256(Path(self.checkpoint)) if self.checkpoint else ""
        self._seq = welcome.committed_seq
        return welcome

    def die(self, boot_id: str) -> None:
        """Be killed and started again: another boot, with the checkpoint of the start."""
        self.boot_id, self._seq, self.live_version, self.live_sha256 = boot_id, 0, "", ""
        self.reconnect()

    def turn(self, rounds: int = 40) -> None:
        """Do what was asked, then run a step of so many requests (none: no step)."""
        while (message := self.receive()) is not None:
            if isinstance(message, wire.Command):
                self._obey(message)
        if not rounds:
            return
        chance = self.acceptance.get(self.live_version, 0.5)
        accepted = [next((n for n in range(3) if self._rng.random() >= chance), 3) for _ in range(rounds)]
        about: dict[str, Any] = {"drafter_version": self.live_version, "workloads": [self.workload]}
        batch = self.batch(self._seq + 1, rounds=rounds, accepted=accepted, **about)
        self._seq += self.try_send(batch)

    def serve(self, condition: Callable[[], Any], what: str = "", rounds: int = 40) -> Any:
        """Work until the condition holds, and return what it gave."""
        deadline = time.monotonic() + self._timeout_s
        while time.monotonic() < deadline:
            self.turn(rounds)
            if found := condition():
                return found
            time.sleep(0.004)
        raise AssertionError(f"worked {self._timeout_s:g} s in vain for {what or condition}")

    def answer_swap(self, *, ok: bool = True, error: str = "") -> wire.SwapCommand:
        """Wait for a swap command, and carry it out."""
        if not ok:
            return super().answer_swap(ok=ok, error=error)
        command = self.expect(wire.SwapCommand)
        self._obey(command)
        return command

    def _obey(self, command: wire.Command) -> None:
        detail: dict[str, str] = {}
        refusal = self.refuses
        if self.is_given_weights:
            self.live_version = wire.FOREIGN_DRAFTER
        if self.num_refused_asleep is not None:
            self.num_refused_asleep += 1
            refusal, detail = "the engine sleeps", {"asleep": "1"}
        elif isinstance(command, wire.ChecksumCommand):
            digest = self.digest()
            detail = {"sha256": digest, "rank0": digest, **self.other_ranks}
        elif self.live_version == wire.FOREIGN_DRAFTER and not command.takes_over:
            refusal, detail = "its weights are somebody else's", {"foreign": "1"}
        elif not self.refuses:
            found = _sha256(Path(command.weights.path))
            assert found == command.weights.sha256
            self.live_version, self.live_sha256 = command.weights.version, found
            self.swaps.append(command)
        self.try_send(
            wire.CommandResult(
                engine_id=self.engine_id,
                boot_id=self.boot_id,
                command_id=command.command_id,
                ok=not refusal,
                error=refusal,
                figures={"pause_ms": 1.5, "stage_ms": 20.0},
                detail=detail,
            )
        )

    def digest(self) -> str:
        """Checksum of the weights that it runs."""
        return min(weights_digests(Path(self.swaps[-1].weights.path if self.swaps else self.checkpoint) / "model.safetensors"))


def _sha256(checkpoint: Path) -> str:
    return hashlib.sha256((checkpoint / "model.safetensors").read_bytes()).hexdigest()
