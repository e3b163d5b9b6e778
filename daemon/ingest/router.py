"""The socket for engines and trainers, and the thread that owns it. They speak ZeroMQ (see zmtp.py).

Others call `send`, which never blocks: messages wait in a list, and a byte in a socket pair wakes the thread. If a peer is gone
or doesn't read, its message is dropped; nothing waits.

Everything that a peer can use up is bounded: connections, the time for a handshake, the bytes of a message, those of all
incomplete messages together, and those that wait for a peer. Without a free descriptor the thread waits for one.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import structlog

from honed.adapt.protocol import wire
from honed.daemon.errors import SettingsError, StartError
from honed.daemon.ingest.zmtp import GREETING, READY, Zmtp, ZmtpError, frame
from honed.recalib.registry.access import User

log = structlog.get_logger("honed.router")

MAX_SOCKET_PATH = 107
MAX_MESSAGE_BYTES = 16 << 20
"""Longest message of an engine or a trainer."""
MAX_INCOMPLETE_BYTES = 64 << 20
"""Most bytes of all incomplete messages together; the longest is dropped, with its connection."""
MAX_WAITING_BYTES = 1 << 20
"""A peer that has so much to read gets no more."""
BYTES_PER_TURN = 1 << 16
"""Most bytes read of a connection before the others' turn."""
READ_BYTES, TURN_S = 1 << 13, 0.005
"""Bytes read at a time, and time after which no more are, until the others' turn: small messages cost time, not bytes."""
HANDSHAKE_S = 10.0
SILENT_S = 10.0
"""Engines and trainers send every second; one that has been silent for so long makes room for a new connection."""
PAUSE_S = 0.5
"""Pause without a free descriptor."""
LINGER_S = 0.2
MOST_CONNECTIONS = 256
"""Limit of a listener, so that a program leaking connections can't use up the daemon's files."""
RESERVED_DESCRIPTORS = 64
"""For the database, the registry and the journal."""
NUM_LISTENERS = 4
MAY_WRITE = "; this user must be able to write to its folder: `chown` it, or choose another --runtime-dir"


def most_connections() -> int:
    """Limit of each listener: all of them together leave descriptors for the rest of the daemon."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    share = (limit - RESERVED_DESCRIPTORS) // NUM_LISTENERS
    return MOST_CONNECTIONS if limit == resource.RLIM_INFINITY else max(min(share, MOST_CONNECTIONS), 4)


def bind_unix(path: Path) -> socket.socket:
    """Listen on a socket file for owner and group. The caller holds the folder's lock, so an existing file is stale.

    Raises:
        SettingsError: the path is too long.
        StartError: the system refuses it.
    """
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise SettingsError(f"socket path {path} is longer than {MAX_SOCKET_PATH} bytes; use a shorter runtime_dir")
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o660)
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise StartError(f"socket {path}: {error.strerror}{MAY_WRITE}") from error
    return listener


@dataclass(slots=True, eq=False)
class _Connection:
    peer: bytes
    socket: socket.socket
    heard_s: float
    """Time of its latest message, or of its begin."""
    user: User
    zmtp: Zmtp = field(default_factory=lambda: Zmtp(MAX_MESSAGE_BYTES))
    waiting: bytearray = field(default_factory=lambda: bytearray(GREETING + READY))


class Router:
    """Listener on a file; calls `on_frame(peer, frame)` for each message.

    Args:
        path: the socket's file.
        on_odd_frame: called with a word for the reason when a message or a connection is dropped.
        on_close: called with each peer whose connection has ended.
    """

    def __init__(
        self,
        path: Path,
        on_frame: Callable[[bytes, bytes], None],
        *,
        on_odd_frame: Callable[[str], None] = lambda why: None,
        on_close: Callable[[bytes], None] = lambda peer: None,
    ) -> None:
        self._path, self._on_frame, self._on_odd_frame, self._on_close = path, on_frame, on_odd_frame, on_close
        self._outgoing: deque[tuple[bytes, bytes]] = deque()
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_read.setblocking(False)
        self._wake_write.setblocking(False)
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="honed-router", daemon=True)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[bytes, _Connection] = {}
        self._num_accepted = 0
        self._limit = most_connections()
        self._accepts_from_s = 0.0

    def start(self) -> None:
        """Bind and begin to read. Raises StartError."""
        self._listener = bind_unix(self._path)
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._thread.start()

    def send(self, peer: bytes, message: Any) -> None:
        """Queue a message for a peer. Thread-safe."""
        self._outgoing.append((peer, wire.encode(message)))
        self._wake()

    def hang_up(self, peer: bytes) -> None:
        """End a peer's connection, while one of its frames is handled: those behind it are dropped."""
        if (connection := self._connections.get(peer)) is not None:
            self._close(connection)

    def user_of(self, peer: bytes) -> User | None:
        """The user of the process at the other end; None once it has gone. Thread-safe."""
        connection = self._connections.get(peer)
        return connection.user if connection is not None else None

    def stop(self) -> None:
        """Send queued messages, close the connections, remove the socket's file."""
        self._is_stopping = True
        self._wake()
        if self._thread.ident is not None:  # it was started; it may have ended by now
            self._thread.join()
            self._listener.close()
            self._path.unlink(missing_ok=True)
        self._selector.close()
        self._wake_read.close()
        self._wake_write.close()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _wake(self) -> None:
        # A full pair means that a wake-up is pending; a closed one, that the thread has stopped.
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_write.send(b"!")

    # --- the thread ---

    def _run(self) -> None:
        while not self._is_stopping:
            ready = self._selector.select(1.0)
            with contextlib.suppress(BlockingIOError):
                self._wake_read.recv(4096)
            # A peer that connects anew has closed its old connection: that end is seen first.
            for connection in sorted((key.data for key, _ in ready if key.data is not None), key=lambda one: one.peer):
                self._read(connection)
                if self._outgoing:  # acknowledgements don't wait for the others' turns
                    self._write()
            self._accept()
            self._close_stuck()
            self._write()
        deadline_s = time.monotonic() + LINGER_S
        while self._write() and time.monotonic() < deadline_s:
            time.sleep(0.005)
        for connection in list(self._connections.values()):
            self._close(connection)

    def _accept(self) -> None:
        while (now_s := time.monotonic()) >= self._accepts_from_s:
            try:
                accepted, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # out of descriptors or memory; the next select would return at once
                self._accepts_from_s = now_s + PAUSE_S
                self._selector.unregister(self._listener)
                log.error("no connection can be accepted", error=str(error))
                return
            accepted.setblocking(False)
            if len(self._connections) >= self._limit and not self._make_room(now_s):
                accepted.close()
                self._on_odd_frame("too_many_connections")
                continue
            self._num_accepted += 1
            _, *ids = struct.unpack("iII", accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            connection = _Connection(self._num_accepted.to_bytes(8), accepted, now_s, User(*ids))
            self._connections[connection.peer] = connection
            self._selector.register(accepted, selectors.EVENT_READ, connection)

    def _make_room(self, now_s: float) -> bool:
        quietest = min(self._connections.values(), key=lambda one: one.heard_s)
        if now_s - quietest.heard_s < SILENT_S:
            return False
        self._close(quietest)
        return True

    def _close_stuck(self) -> None:
        now_s = time.monotonic()
        if self._listener not in self._selector.get_map() and now_s >= self._accepts_from_s:
            self._selector.register(self._listener, selectors.EVENT_READ)
        for connection in list(self._connections.values()):
            if not connection.zmtp.is_ready and now_s - connection.heard_s > HANDSHAKE_S:
                self._close(connection)

    def _read(self, connection: _Connection) -> None:
        num_bytes, until_s = 0, time.monotonic() + TURN_S
        try:
            while num_bytes < BYTES_PER_TURN and (data := connection.socket.recv(READ_BYTES)):
                num_bytes += len(data)
                for message in connection.zmtp.receive(data):
                    connection.heard_s = time.monotonic()
                    self._handle(connection.peer, message)
                    if connection.peer not in self._connections:
                        return
                if connection.zmtp.num_bytes:
                    self._bound_incomplete()
                if time.monotonic() > until_s:
                    return
            if not num_bytes or not data:
                self._close(connection)
        except BlockingIOError:
            return
        except ZmtpError as error:
            self._close(connection)
            log.debug("a connection is closed for what it sent", error=str(error))
            self._on_odd_frame("broken_protocol")
        except OSError:  # reset, or closed by us meanwhile
            self._close(connection)

    def _handle(self, peer: bytes, message: bytes) -> None:
        try:
            self._on_frame(peer, message)
        except Exception as error:
            # One message may fail; the thread must not.
            log.exception("a message could not be handled", error=str(error))
            self._on_odd_frame("internal_error")

    def _bound_incomplete(self) -> None:
        sizes = {peer: one.zmtp.num_bytes for peer, one in self._connections.items()}
        if sum(sizes.values()) > MAX_INCOMPLETE_BYTES:
            self._close(self._connections[max(sizes, key=sizes.__getitem__)])
            self._on_odd_frame("incomplete_messages")

    def _write(self) -> bool:
        """Send what can be sent. Returns True if something is left."""
        while self._outgoing:
            peer, body = self._outgoing.popleft()
            connection = self._connections.get(peer)
            if connection is not None and len(connection.waiting) < MAX_WAITING_BYTES:
                connection.waiting += frame(body)
        is_left = False
        for connection in [one for one in self._connections.values() if one.waiting]:
            try:
                del connection.waiting[: connection.socket.send(connection.waiting)]
            except BlockingIOError:
                pass
            except (BrokenPipeError, ConnectionResetError):
                connection.waiting.clear()  # its end is read, behind what it has sent
            except OSError:
                self._close(connection)
                continue
            is_left |= bool(connection.waiting)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.waiting else 0)
            self._selector.modify(connection.socket, events, connection)
        return is_left

    def _close(self, connection: _Connection) -> None:
        if self._connections.pop(connection.peer, None) is not None:
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._on_close(connection.peer)
