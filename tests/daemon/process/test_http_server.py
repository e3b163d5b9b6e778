"""A listener whose clients misbehave: they hold connections, and send nothing or not all of a request."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI, Response
from fastapi.responses import StreamingResponse

from honed.daemon.ingest.router import bind_unix
from honed.daemon.process import http_server
from honed.daemon.process.http_server import HttpServer, configured
from honed.daemon.service import Service
from honed.daemon.settings.settings import load
from tests.daemon.conftest import flags_in

PATIENCE_S = 0.2
MOST = 8


@pytest.fixture
def admin_socket(service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(http_server, "PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(http_server, "most_connections", lambda: MOST)
    server = HttpServer(service, load(None, flags_in(folder), env={}))
    server.bind()
    server.start()
    yield service.settings.paths.admin_socket
    server.stop()


def connected(path: Path) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.settimeout(20.0)
    channel.connect(str(path))
    return channel


def received(channel: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    try:
        while piece := channel.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET /v1/status HT", b"POST /v1/training:pause HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{"],
    ids=["nothing", "half a line", "half a body"],
)
def test_a_connection_without_a_whole_request_is_closed(admin_socket: Path, sent: bytes) -> None:
    with connected(admin_socket) as channel:
        channel.sendall(sent)
        assert received(channel) == b""


def test_one_that_asks_now_and_then_is_kept(admin_socket: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PATIENCE_S", 2.0)  # a busy machine may stand still for a while
    with contextlib.closing(HTTPConnection("x")) as connection:
        connection.sock = connected(admin_socket)
        connection.auto_open = 0
        until_s = time.monotonic() + 4.5
        while time.monotonic() < until_s:
            connection.request("GET", "/healthz")
            with connection.getresponse() as answer:
                assert answer.status == 200
                answer.read()
            time.sleep(0.1)


@contextlib.contextmanager
def listening(app: FastAPI, path: Path) -> Iterator[None]:
    """A listener of this application on a unix socket."""
    with contextlib.closing(bind_unix(path)) as listener:
        server = uvicorn.Server(configured(app))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield
        server.should_exit = True
        thread.join()


@pytest.fixture
def big_answers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Socket of a listener whose answers don't fit into a socket's buffer."""
    monkeypatch.setattr(http_server, "PATIENCE_S", PATIENCE_S)
    app = FastAPI()
    app.get("/")(lambda: Response(b"x" * (20 << 20)))
    with listening(app, folder / "big.sock"):
        yield folder / "big.sock"


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 2, b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"],
    ids=["asks again", "asks once"],
)
def test_a_client_that_reads_no_answer_is_closed(big_answers: Path, sent: bytes) -> None:
    """A few hundred of them kept everybody from the metrics, the page and the health check for ever."""
    with connected(big_answers) as channel:
        channel.sendall(sent)
        end = select.poll()
        end.register(channel, 0)
        assert end.poll(20_000)


def test_a_client_that_reads_slowly_is_kept(big_answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PATIENCE_S", 1.0)
    with connected(big_answers) as channel:
        channel.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        until_s = time.monotonic() + 3.5
        while time.monotonic() < until_s:
            assert channel.recv(32768)
            time.sleep(0.02)


def test_beyond_so_many_connections_new_ones_are_closed_at_once_and_room_comes_back(
    admin_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "PATIENCE_S", 60.0)
    with ExitStack() as stack:
        for _ in range(MOST):
            stack.enter_context(connected(admin_socket))
        with connected(admin_socket) as one_more:
            assert received(one_more) == b""
    for _ in range(100):  # that those have gone is noticed a moment later
        with connected(admin_socket) as channel:
            channel.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            if received(channel).startswith(b"HTTP/1.1 200"):
                return
    raise AssertionError("no room came back")


@pytest.fixture
def endless_answers(folder: Path) -> Iterator[Path]:
    """Socket of a listener whose answers go on until the listener ends."""
    is_ending = threading.Event()

    async def lines() -> AsyncIterator[bytes]:
        while not is_ending.is_set():
            yield b"a line\n"
            await asyncio.sleep(0.01)

    app = FastAPI()
    app.get("/")(lambda: StreamingResponse(lines()))
    with listening(app, folder / "endless.sock"):
        yield folder / "endless.sock"
        is_ending.set()


def exchanged(path: Path, pieces: list[bytes]) -> bytes:
    """Sends the pieces one after the other; returns all that comes until the other side closes."""
    with connected(path) as channel:
        for piece in pieces:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                channel.sendall(piece)
            time.sleep(0.05)
        return received(channel)


def unhandled(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Exceptions that reached uvicorn or the event loop."""
    return [f"{record.getMessage()}\n{record.exc_text}" for record in caplog.records if record.exc_info]


PAUSE = b"POST /v1/training:pause HTTP/1.1\r\nHost: x\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n"
TOO_LONG = b"Content-Length: 999999999\r\n"
BAD_CHUNK = b"ZZ\r\n"
BIG_CHUNK = b"%x\r\n%b\r\n" % (1 << 17, bytes(1 << 17))


def test_half_a_request_changes_nothing(admin_socket: Path, service: Service, caplog: pytest.LogCaptureFixture) -> None:
    with connected(admin_socket) as channel:
        channel.sendall(PAUSE + b"Content-Length: 50\r\n\r\n{")
    time.sleep(0.2)
    assert not service.trainer.is_paused
    assert unhandled(caplog) == []


@pytest.mark.fault("a malformed body answered twice")
@pytest.mark.parametrize(
    ("pieces", "statuses"),
    [
        ([PAUSE + CHUNKED + b"\r\n" + BAD_CHUNK], [400]),
        ([PAUSE + CHUNKED + b"\r\n", BAD_CHUNK], [400]),
        ([PAUSE + CHUNKED + TOO_LONG + b"\r\n" + BAD_CHUNK], [400]),
        ([PAUSE + CHUNKED + TOO_LONG + b"\r\n", BAD_CHUNK], [413]),
        ([PAUSE + CHUNKED + b"\r\n" + BIG_CHUNK + BAD_CHUNK], [400, 413]),
        ([PAUSE + CHUNKED + b"\r\n" + BIG_CHUNK, BAD_CHUNK], [413]),
    ],
    ids=["a bad body", "one later", "behind a refused head", "one later", "a bad body too large", "one later"],
)
def test_a_malformed_body_has_one_answer_and_changes_nothing(
    admin_socket: Path, service: Service, pieces: list[bytes], statuses: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    answers = exchanged(admin_socket, pieces)
    assert int(answers.split()[1]) in statuses
    assert answers.count(b"HTTP/1.1 ") == 1
    assert not service.trainer.is_paused
    assert unhandled(caplog) == []


@pytest.mark.fault("a malformed body answered twice")
def test_bytes_behind_the_last_request_end_its_answer(endless_answers: Path, caplog: pytest.LogCaptureFixture) -> None:
    answers = exchanged(endless_answers, [b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", b"x"])
    assert answers.startswith(b"HTTP/1.1 200 ")
    assert answers.count(b"HTTP/1.1 ") == 1
    assert not answers.endswith(b"0\r\n\r\n")  # it shows that it isn't whole
    assert unhandled(caplog) == []
