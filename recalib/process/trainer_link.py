"""The trainer's connection to the daemon: says hello after every (re)connect, never blocks, never queues while it is away.

A unit of work may be long: a disk is slow, or a kernel is compiled. Meanwhile a thread repeats the last report, as the daemon
takes a silent trainer for lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from honed.adapt.protocol import wire

log = structlog.get_logger("honed.trainer")


REPEAT_S = 5.0
"""Silence after which the last report is repeated."""
MOST_S = 600.0
"""Longest unit. Who does no turn for longer may hang."""


class TrainerLink:
    """A DEALER socket that reconnects by itself.

    Args:
        repeat_s: silence after which the last report is repeated.
    """

    MAX_FRAME_BYTES = 1 << 20

    def __init__(self, endpoint: str, hello: Callable[[], wire.TrainerHello], repeat_s: float = REPEAT_S) -> None:
        self._hello, self._repeat_s = hello, repeat_s
        self._lock = threading.RLock()
        """Holds the socket: ZeroMQ's may move between threads, but not be used by two at once."""
        self._turn_s = self._sent_s = time.monotonic()
        self._status: wire.TrainerStatus | None = None
        self._is_closed = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 500)
        self._socket.setsockopt(zmq.IMMEDIATE, 1)  # no queue while the daemon is away: old reports are worthless
        self._socket.setsockopt(zmq.RECONNECT_IVL, 100)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        self._socket.setsockopt(zmq.MAXMSGSIZE, self.MAX_FRAME_BYTES)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(endpoint)
        self._repeating = threading.Thread(target=self._repeat, name="honed-alive", daemon=True)
        self._repeating.start()

    def receive(self, timeout_s: float) -> list[wire.ToTrainer]:
        """Return all messages that are there, after waiting at most `timeout_s` for the first."""
        with self._lock:
            self._turn_s = time.monotonic()
            return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> list[wire.ToTrainer]:
        ready = dict(self._poller.poll(max(0, round(timeout_s * 1000))))
        if self._monitor in ready:
            while self._monitor.poll(0):
                recv_monitor_message(self._monitor)
            self.send(self._hello())
        messages: list[wire.ToTrainer] = []
        while self._socket in ready and len(messages) < 100:
            try:
                frames = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                break
            try:
                messages.append(wire.decode_to_trainer(frames[-1]))
            except wire.WireError as error:
                log.warning("a message of the daemon's can't be read", error=str(error))
        return messages

    def send(self, message: wire.ToDaemon) -> bool:
        """Send if the daemon is there; return False if it isn't."""
        with self._lock:
            try:
                self._socket.send(wire.encode(message), zmq.DONTWAIT)
            except zmq.Again:
                return False
            self._sent_s = time.monotonic()
            if isinstance(message, wire.TrainerStatus):  # delays that were counted must not be counted again
                self._status = msgspec.structs.replace(message, preemption_delays_s=[], preemption_computing_s=[])
            return True

    def _repeat(self) -> None:
        while not self._is_closed.wait(self._repeat_s / 4):
            with self._lock:
                now_s = time.monotonic()
                is_due = now_s - self._sent_s >= self._repeat_s and now_s - self._turn_s < MOST_S
                if self._status is None or not is_due or self._is_closed.is_set() or self._monitor.poll(0):
                    continue  # to a new connection `receive` says hello first
                self.send(self._status)

    def close(self) -> None:
        """Deliver what was sent, for at most half a second, and disconnect."""
        self._is_closed.set()
        self._repeating.join()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
