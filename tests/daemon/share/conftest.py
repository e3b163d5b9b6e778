"""A real S3 server (moto's), and a connection to it that can be disturbed."""

from __future__ import annotations

import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.conftest import free_port

BUCKET = "honed"
FULL = b"HTTP/1.1 507 Insufficient Storage\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    is_wanted = os.environ.get("HONED_TEST_SHARE")
    for item in items:
        if Path(__file__).parent in item.path.parents and not is_wanted:
            item.add_marker(pytest.mark.skip(reason="needs an S3 server: make test-share"))


class Line:
    """A proxy before the server. `state` is how it treats new connections and what goes on over old ones.

    - "up": everything goes through.
    - "gone": connections are refused.
    - "mute": connections are taken, and nothing is answered.
    - "full": what would write is answered with 507.
    - "cut": an answer ends after 600 bytes.
    """

    def __init__(self, to: int) -> None:
        self.port = free_port()
        self.num_unanswered = 0
        self._to = to
        self._server: socketserver.ThreadingTCPServer | None = None
        self.set("up")

    def set(self, state: str) -> None:
        """Treat connections so from now on; open ones are cut."""
        self.state = state
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
        if state != "gone":
            line = self

            class Handler(socketserver.BaseRequestHandler):
                def handle(self) -> None:
                    line._carry(self.request, state)

            class Server(socketserver.ThreadingTCPServer):
                allow_reuse_address = daemon_threads = True
                block_on_close = False

            self._server = Server(("127.0.0.1", self.port), Handler)
            threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def _carry(self, client: socket.socket, state: str) -> None:
        first = client.recv(65536)
        if state == "full" and first.startswith((b"PUT", b"POST")):
            client.sendall(FULL)
            return
        if state == "mute":
            self.num_unanswered += 1
            while self.state == state:
                time.sleep(0.05)
            return
        with socket.create_connection(("127.0.0.1", self._to)) as server:
            server.sendall(first)
            back = threading.Thread(
                target=self._pipe, args=(server, client, state, 600 if state == "cut" else None), daemon=True
            )
            back.start()
            self._pipe(client, server, state, None)
            back.join()

    def _pipe(self, source: socket.socket, sink: socket.socket, state: str, most: int | None) -> None:
        source.settimeout(0.1)
        num_sent = 0
        while self.state == state:
            try:
                data = source.recv(65536)
            except TimeoutError:
                continue
            except OSError:
                break
            if not data:
                break
            try:
                sink.sendall(data if most is None else data[: max(most - num_sent, 0)])
            except OSError:
                break
            num_sent += len(data)
            if most is not None and num_sent >= most:
                break
        for one in (source, sink):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of an S3 server with a bucket."""
    port = free_port()
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("w") as said:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(command, stdout=said, stderr=said)
    try:
        deadline = time.monotonic() + 60.0
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1.0).close()
                break
            except OSError:
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.1)
        yield port
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture
def line(server: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    """The way to the server that honed is told of."""
    import s3fs

    made = Line(server)
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{made.port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    s3fs.S3FileSystem.clear_instance_cache()
    yield made
    made.set("gone")
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def url(line: Line, request: pytest.FixtureRequest) -> str:
    """A place of its own in the bucket."""
    import s3fs

    files = s3fs.S3FileSystem()
    if not files.exists(BUCKET):
        files.mkdir(BUCKET)
    return f"s3://{BUCKET}/{request.node.name}"
