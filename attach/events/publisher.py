"""The thread that talks to the daemon, so that the engine's thread never does.

It turns finished steps into batches, keeps them until the daemon has committed them, sends a heartbeat, and passes policies and
commands to the engine's thread. The daemon may be absent, slow, stopped, killed or of another version: at worst the outbox's
cap drops the oldest batches and counts them. Nothing on this thread can affect vLLM. Work that holds the GIL for more than a
few microseconds is done while the engine's thread waits for the model. The thread ends with the process.

The thread survives every exception. It loses and counts its current work, counts the exception as an error of the attachment,
and connects anew.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import recv_monitor_message

from honed.adapt.protocol import wire
from honed.attach.events.batch_builder import BatchBuilder
from honed.attach.events.model_wait import ModelWait, Pieces
from honed.attach.events.outbox import Losses, Outbox
from honed.attach.events.step_log import Step, StepLog

logger = logging.getLogger("honed.attach")

BATCH_S = 0.25
"""Time for which steps are gathered into a batch, and for which the thread sleeps when nothing comes in. Each wake-up takes the
interpreter's lock from the engine's thread, and the daemon's cost is by the batch."""
PATIENCE_S = 0.1
"""Longest time in all, per round of the loop, that it waits for moments when the engine's thread is idle."""
HEARTBEAT_S = 1.0
RESEND_AFTER_S = 5.0
"""Batches unacknowledged for so long are sent again."""
WINDOW_BATCHES = 64
RESTART_S = 1.0
"""Wait after an unexpected exception before connecting anew, so that a lasting one doesn't use a core."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Calls into the attachment; all are made on the publisher's thread and must not block."""

    hello: Callable[[], wire.EngineHello]
    """The engine's introduction."""
    status: Callable[[int], wire.EngineStatus]
    """queue_bytes -> a heartbeat."""
    on_welcome: Callable[[wire.Welcome], None]
    on_policy: Callable[[wire.Policy], None]
    on_command: Callable[[wire.Command], None]
    on_tick: Callable[[], None]
    on_error: Callable[[str], None]
    """Called with the place of an exception while it is handled."""


class Publisher:
    """Owns the DEALER socket, on a daemon thread named "honed-publisher"."""

    def __init__(
        self,
        endpoint: str,
        engine_id: str,
        boot_id: str,
        log: StepLog,
        queue_bytes: int,
        callbacks: Callbacks,
        model_wait: ModelWait,
    ) -> None:
        self._endpoint = endpoint
        self._engine_id = engine_id
        self._boot_id = boot_id
        self._log = log
        self._callbacks = callbacks
        self._pieces = Pieces(model_wait)
        self._outbox = Outbox(queue_bytes, WINDOW_BATCHES, self._encode_gap)
        self._builder = BatchBuilder()
        self._results: list[wire.CommandResult] = []
        self._is_welcome = False
        self._is_news = False
        self._progress_s = 0.0
        self._has_complained = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="honed-publisher", daemon=True)

    def start(self) -> None:
        """Start; return at once, whether or not there is a daemon."""
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """Send what is left if the daemon is there, for at most `timeout_s`, and end the thread."""
        self._stop.set()
        self._thread.join(timeout_s)

    def reintroduce(self) -> None:
        """Any thread: say hello again soon, since more is known about the engine now."""
        self._is_news = True

    def report(self, result: wire.CommandResult) -> None:
        """Any thread: queue the answer to a command."""
        self._results.append(result)

    def _run(self) -> None:
        while True:
            try:
                self._talk()
                return
            except Exception:
                self._callbacks.on_error("the publisher's thread")
            if self._stop.wait(RESTART_S):
                return

    def _talk(self) -> None:
        """Connect and serve until the engine stops."""
        self._is_welcome = False
        context = zmq.Context()
        try:
            socket = context.socket(zmq.DEALER)
            socket.set(zmq.LINGER, 200)
            socket.set(zmq.IMMEDIATE, 1)
            socket.set(zmq.SNDHWM, 2 * WINDOW_BATCHES)
            socket.set(zmq.RECONNECT_IVL, 100)
            socket.set(zmq.RECONNECT_IVL_MAX, 2000)
            monitor = socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
            socket.connect(self._endpoint)
            self._loop(socket, monitor)
        finally:
            context.destroy(linger=200)

    def _loop(self, socket: zmq.Socket[bytes], monitor: zmq.Socket[bytes]) -> None:
        poller = zmq.Poller()
        poller.register(socket, zmq.POLLIN)
        poller.register(monitor, zmq.POLLIN)
        next_heartbeat_s = next_batch_s = 0.0
        deadline_s = float("inf")
        while True:
            if self._stop.is_set():
                now_s = time.monotonic()
                deadline_s = min(deadline_s, now_s + 1.0)
                is_left = len(self._log) or self._builder.num_steps or len(self._outbox)
                if now_s >= deadline_s or not (self._is_welcome and is_left):
                    return
            for ready, _ in poller.poll(int(1000 * BATCH_S)):
                if ready is monitor:
                    self._on_connection(socket, recv_monitor_message(monitor)["event"])
                else:
                    self._receive(socket)
            now_s = time.monotonic()
            self._pieces.begin(0.0 if self._stop.is_set() else PATIENCE_S)
            self._collect()
            if now_s >= next_batch_s or self._stop.is_set() or self._builder.is_full:
                next_batch_s = now_s + BATCH_S
                self._seal()
            self._callbacks.on_tick()
            if self._is_welcome:
                if self._is_news:
                    self._is_news = not self._try_send(socket, wire.encode(self._callbacks.hello()))
                self._send_results(socket)
                self._send_batches(socket, now_s)
            if now_s >= next_heartbeat_s:
                next_heartbeat_s = now_s + HEARTBEAT_S
                with self._pieces.one("heartbeat"):
                    self._beat(socket)

    def _on_connection(self, socket: zmq.Socket[bytes], event: int) -> None:
        # A new connection may be a new daemon: say hello, and send nothing else before its welcome.
        self._is_welcome = False
        if event == zmq.EVENT_CONNECTED:
            self._try_send(socket, wire.encode(self._callbacks.hello()))

    def _beat(self, socket: zmq.Socket[bytes]) -> None:
        if self._is_welcome:
            status = self._callbacks.status(self._outbox.num_bytes)
            self._try_send(socket, wire.encode(status))
        else:
            self._try_send(socket, wire.encode(self._callbacks.hello()))

    def _receive(self, socket: zmq.Socket[bytes]) -> None:
        while True:
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._dispatch(wire.decode_to_engine(frame))
            except wire.WireError as error:
                if error.command_id:
                    self._refuse(error)
                if not self._has_complained:
                    self._has_complained = True
                    logger.warning("honed: this version can't read the daemon's message (%s); run the same version", error)

    def _refuse(self, error: wire.WireError) -> None:
        """Answer a command that can't be read."""
        text = f"daemon and attachment differ in version: {error}"
        self.report(
            wire.CommandResult(
                engine_id=self._engine_id, boot_id=self._boot_id, command_id=error.command_id, ok=False, error=text
            )
        )

    def _dispatch(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Welcome):
            if message.boot_id != self._boot_id:
                return
            self._outbox.acknowledge(message.committed_seq)
            self._outbox.rewind()
            self._is_welcome = True
            self._progress_s = time.monotonic()
            self._callbacks.on_welcome(message)
        elif isinstance(message, wire.Ack):
            if message.boot_id == self._boot_id and message.seq > self._outbox.acked_seq:
                self._outbox.acknowledge(message.seq)
                self._progress_s = time.monotonic()
        elif isinstance(message, wire.Policy):
            self._pieces.begin(0.0 if self._stop.is_set() else PATIENCE_S)
            with self._pieces.one("policy"):
                self._callbacks.on_policy(message)
        else:
            self._callbacks.on_command(message)

    def _collect(self) -> None:
        while (entry := self._log.take()) is not None:
            if not isinstance(entry, Step):
                self._builder.note(entry)
                continue
            if not self._builder.fits(entry):
                self._seal()
            with self._pieces.one("step"):
                self._builder.add(entry)

    def _seal(self) -> None:
        if not self._builder.num_steps:
            return
        with self._pieces.one("batch"):
            made = self._builder.take()
            seq = self._outbox.last_seq + 1
            try:
                frame = self._encode(seq, 0, self._outbox.lost, made.drafter_version, made.workloads, made.steps, made.rounds)
            except Exception:
                self._outbox.lose(made.holds)
                raise
            self._outbox.add(frame, made.holds)

    def _send_batches(self, socket: zmq.Socket[bytes], now_s: float) -> None:
        if not self._outbox.is_waiting:
            self._progress_s = now_s
        elif now_s - self._progress_s > RESEND_AFTER_S:
            self._progress_s = now_s
            self._outbox.rewind()
        while (frame := self._outbox.next_frame()) is not None and self._try_send(socket, frame):
            self._outbox.sent(frame)

    def _send_results(self, socket: zmq.Socket[bytes]) -> None:
        while self._results and self._try_send(socket, wire.encode(self._results[0])):
            self._results.pop(0)

    @staticmethod
    def _try_send(socket: zmq.Socket[bytes], frame: bytes) -> bool:
        try:
            socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _encode_gap(self, first_seq: int, seq: int, lost: Losses) -> bytes:
        return self._encode(seq, first_seq, lost, "", [], wire.StepColumns(), wire.RoundColumns())

    def _encode(
        self,
        seq: int,
        first_seq: int,
        lost: Losses,
        drafter_version: str,
        workloads: list[str],
        steps: wire.StepColumns,
        rounds: wire.RoundColumns,
    ) -> bytes:
        lost += self._log.lost + self._builder.lost
        return wire.encode(
            wire.EventBatch(
                engine_id=self._engine_id,
                boot_id=self._boot_id,
                seq=seq,
                first_seq=first_seq,
                sent_unix_ns=time.time_ns(),
                sent_mono_ns=time.monotonic_ns(),
                drafter_version=drafter_version,
                workloads=workloads,
                steps=steps,
                rounds=rounds,
                lost_rounds=lost.rounds,
                lost_draft_tokens=lost.draft_tokens,
                lost_accepted_tokens=lost.accepted_tokens,
                lost_batches=lost.batches,
            )
        )
