"""uvicorn on a thread: the admin API on a unix socket, and a read-only listener."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
import weakref
from typing import Any, Literal

import h11
import structlog
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from honed.daemon.api.access import USER_ID
from honed.daemon.api.app import make_app, make_read_only_app
from honed.daemon.errors import HonedError, SettingsError, refused
from honed.daemon.ingest.router import bind_unix, most_connections
from honed.daemon.service import Service
from honed.daemon.settings import listen
from honed.daemon.settings.listen import LOOPBACK_ONLY, check_address
from honed.daemon.settings.settings import Settings
from honed.daemon.settings.tokens import credential_folders, load_tokens
from honed.daemon.settings.web_config import web_config_of

log = structlog.get_logger("honed.http")

MAX_AHEAD_BYTES = 64 << 10
"""Requests that a client may send before it has the answer to an earlier one."""
PATIENCE_S = 10.0
"""Time for a complete request, and for reading some of an answer; the connection is closed after one to two times this."""
MOST_REMOTE = 64
"""Connections from other hosts at a time, those that haven't come through TLS included."""
_PEER = struct.Struct("3i")
"""SO_PEERCRED: process, user, group."""


class Protocol(H11Protocol):
    """uvicorn's protocol with strict framing and bounded headers, which also notes the user of a unix socket's peer.

    It adds three limits: uvicorn waits forever for a request and for the reader of an answer, and counts connections only after
    their first one. It answers a malformed request once, also where uvicorn would answer it twice.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
            return
        self._num_resumed = 0
        self._check_later()
        peer = transport.get_extra_info("socket")
        if peer is not None and peer.family == socket.AF_UNIX:
            _, user_id, _ = _PEER.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
            self.app_state = self.app_state | {USER_ID: user_id}

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # h11 holds what follows the request under way, and uvicorn reads on while that waits for its client.
        if len(self.conn.trailing_data[0]) > MAX_AHEAD_BYTES:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """End the connection, with this answer unless the request's own has begun.

        The malformed bytes may belong to a request whose handling has begun, as a bad chunk of its body does. Its answer is
        dropped: h11 would raise an exception at the second of two answers.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:
            self.transport.close()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._num_resumed += 1

    def _check_later(self) -> None:
        unsent_bytes = self.transport.get_write_buffer_size()
        self.loop.call_later(PATIENCE_S, self._close_if_stuck, self.cycle, unsent_bytes, self._num_resumed)

    def _close_if_stuck(self, request_before: object, unsent_before: int, num_resumed_before: int) -> None:
        """Close it if the client neither completed a request nor read of an answer since the last check; else check later.

        A connection that is closing waits for its reader, too.
        """
        if self not in self.connections:
            return
        if unsent_bytes := self.transport.get_write_buffer_size():
            is_stuck = 0 < unsent_before <= unsent_bytes and self._num_resumed == num_resumed_before
        else:
            is_stuck = self.cycle is request_before and self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
        if is_stuck:
            self.transport.abort()
        else:
            self._check_later()


class RemoteListener(socket.socket):
    """Accepts so many connections at a time. asyncio's own loop must accept them: uvloop's doesn't ask."""

    def __init__(self, family: socket.AddressFamily, kind: socket.SocketKind) -> None:
        super().__init__(family, kind)
        self._open = weakref.WeakSet[socket.socket]()

    def accept(self) -> tuple[socket.socket, Any]:
        connection, address = super().accept()
        if sum(one.fileno() >= 0 for one in self._open) >= MOST_REMOTE:  # closed ones may wait for garbage collection
            connection.close()
            raise ConnectionAbortedError("too many connections")
        self._open.add(connection)
        return connection, address


class HttpServer:
    """The listeners of one daemon."""

    def __init__(self, service: Service, settings: Settings) -> None:
        self._service, self._settings = service, settings
        self._sockets: list[tuple[str, socket.socket, uvicorn.Config]] = []
        self._running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def bind(self) -> None:
        """Bind the addresses before anything starts. Raises SettingsError or StartError."""
        http, path = self._settings.http, self._settings.paths.admin_socket
        try:
            self._sockets.append(("admin-socket", bind_unix(path), configured(make_app(self._service))))
            if http.metrics_listen:
                self._bind_metrics()
            if http.admin_listen:
                tokens = load_tokens(http.read_token_file, http.admin_token_file, credential_folders())
                listener = bind_tcp(http.admin_listen, "http.admin_listen")
                self._sockets.append(("admin-tcp", listener, configured(make_app(self._service, tokens))))
        except HonedError:
            self.stop()
            raise

    def _bind_metrics(self) -> None:
        http, setting = self._settings.http, "http.metrics_listen"
        file = web_config_of(http)
        listener = bind_tcp(http.metrics_listen, setting, is_remote=http.is_metrics_remote)
        is_remote = isinstance(listener, RemoteListener)
        app = make_read_only_app(self._service, file, is_remote=is_remote)
        config = configured(app, loop="asyncio" if is_remote else "auto")
        if file is not None:
            self._service.web_config = file
            config.load()
            config.ssl = file.first_context()
        self._sockets.append(("metrics", listener, config))

    def start(self) -> None:
        """Answer requests."""
        for name, listener, config in self._sockets:
            server = uvicorn.Server(config)
            thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name=f"honed-{name}", daemon=True)
            thread.start()
            self._running.append((server, thread))

    def problems(self) -> list[str]:
        """Messages for listeners whose thread has ended."""
        return [f"the HTTP listener {thread.name} has ended" for _, thread in self._running if not thread.is_alive()]

    def stop(self) -> None:
        """Finish running requests, close the listeners, remove the socket's file."""
        self._service.is_ending.set()
        for server, _ in self._running:
            server.should_exit = True
        for _, thread in self._running:
            thread.join(10.0)
        for _, listener, _ in self._sockets:
            listener.close()
        with contextlib.suppress(OSError):
            self._settings.paths.admin_socket.unlink()


def configured(app: FastAPI, loop: Literal["auto", "asyncio"] = "auto") -> uvicorn.Config:
    """uvicorn's configuration of a listener."""
    return uvicorn.Config(
        app,
        http=Protocol,
        loop=loop,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        timeout_graceful_shutdown=3,
        timeout_keep_alive=5,
        limit_concurrency=256,
        h11_max_incomplete_event_size=64 << 10,
        ws="none",
    )


def bind_tcp(address: str, setting: str = "http.metrics_listen", *, is_remote: bool = False) -> socket.socket:
    """Listen on host:port; a `RemoteListener` for an address that isn't loopback.

    Args:
        setting: names the address in errors.
        is_remote: whether it may be another address than loopback.

    Raises:
        SettingsError: the address or its port isn't allowed.
        StartError: the port is in use, or no interface has the address.
    """
    try:
        host, number = check_address(address, why_only_loopback="" if is_remote else LOOPBACK_ONLY)
    except ValueError as error:
        raise SettingsError(f"{setting} {address!r} {error}") from error
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    kind = socket.socket if listen.is_loopback(host) else RemoteListener
    listener = kind(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, number))
        listener.listen(128)
    except OSError as error:
        listener.close()
        text = f'{setting} {address}: {error.strerror}; set another address, or "" for none'
        raise refused(text, error) from error  # ports below 1024 are root's
    return listener
