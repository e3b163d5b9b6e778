"""The trainer's connection to the daemon: says hello after every (re)connect, never blocks, never queues while it is away."""

from __future__ import annotations

from collections.abc import Callable

import structlog
import zmq
from zmq.utils.monitor import recv_monitor_message

from honed.adapt.protocol import wire

log = structlog.get_logger("honed.trainer")


class TrainerLink:
    """A DEALER socket that reconnects by itself."""

    MAX_FRAME_BYTES = 1 << 20

    def __init__(self, endpoint: str, hello: Callable[[], wire.TrainerHello]) -> None:
        self._hello = hello
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

    def receive(self, timeout_s: float) -> list[wire.ToTrainer]:
        """Return all messages that are there, after waiting at most `timeout_s` for the first."""
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
        try:
            self._socket.send(wire.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def close(self) -> None:
        """Deliver what was sent, for at most half a second, and disconnect."""
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()
