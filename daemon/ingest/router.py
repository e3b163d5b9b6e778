"""The ZeroMQ socket for engines and trainers, and the thread that owns it.

One thread reads and writes the socket (ZeroMQ sockets aren't shared between threads). Others call `send`, which never
blocks: messages wait in a list, and a byte in a socket pair wakes the thread. If a peer is gone or doesn't read, its
message is dropped; nothing waits.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog
import zmq

from honed.adapt.protocol import wire
from honed.daemon.errors import StartError

log = structlog.get_logger("honed.router")

MAX_SOCKET_PATH = 107
FRAMES_PER_TURN = 256
MAX_FRAME_BYTES = 64 << 20
"""Longest message of an engine or a trainer."""
MAY_WRITE = "; this user must be able to write to its folder: `chown` it, or choose another --runtime-dir"


class Router:
    """ROUTER socket on a file; calls `on_frame(peer, frame)` for each received frame."""

    def __init__(
        self,
        path: Path,
        on_frame: Callable[[bytes, bytes], None],
        *,
        on_odd_frame: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._path, self._on_frame, self._on_odd_frame = path, on_frame, on_odd_frame
        self._outgoing: deque[tuple[bytes, bytes]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="honed-router", daemon=True)
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket: zmq.Socket[Any] = self._context.socket(zmq.ROUTER)

    def start(self) -> None:
        """Bind and begin to read. Raises StartError."""
        if len(os.fsencode(self._path)) > MAX_SOCKET_PATH:
            raise StartError(f"socket path {self._path} is longer than {MAX_SOCKET_PATH} bytes; use a shorter runtime_dir")
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._socket.set(zmq.ROUTER_MANDATORY, 1)
        # For a peer that reconnects under the same identity, the new connection is served, not the dead one.
        self._socket.set(zmq.ROUTER_HANDOVER, 1)
        try:
            self._socket.bind(f"ipc://{self._path}")
            self._path.chmod(0o660)
        except (zmq.ZMQError, OSError) as error:
            raise StartError(f"socket {self._path}: {error.strerror or error}{MAY_WRITE}") from error
        self._thread.start()

    def send(self, peer: bytes, message: Any) -> None:
        """Queue a message for a peer. Thread-safe."""
        self._outgoing.append((peer, wire.encode(message)))
        # A full pair means that a wake-up is pending; a closed one, that the thread has stopped.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"!")

    def stop(self) -> None:
        """Send queued messages, close the socket, remove its file."""
        self._is_stopping = True
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"!")
        if self._thread.is_alive():
            self._thread.join()
        self._socket.close(linger=200)
        self._context.term()
        self._wake_read.close()
        self._wake_write.close()
        with contextlib.suppress(OSError):
            self._path.unlink()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake_read, zmq.POLLIN)
        while not self._is_stopping:
            poller.poll()
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
            self._read()
            self._write()
        self._write()

    def _read(self) -> None:
        for _ in range(FRAMES_PER_TURN):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                self._on_odd_frame(f"{len(frames)} parts in a message")
                continue
            try:
                self._on_frame(peer, frames[0])
            except Exception as error:
                # One message may fail; the thread must not.
                log.exception("a message could not be handled", error=str(error))
                self._on_odd_frame("internal error")

    def _write(self) -> None:
        while self._outgoing:
            peer, frame = self._outgoing.popleft()
            try:
                self._socket.send_multipart([peer, frame], zmq.NOBLOCK)
            except zmq.ZMQError as error:
                log.debug("message not sent", error=str(error))
