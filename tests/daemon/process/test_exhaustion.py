"""A real daemon that another process tries to use up: its descriptors, its memory."""

from __future__ import annotations

import contextlib
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.daemon.ingest import router
from honed.daemon.ingest.zmtp import GREETING, MORE, READY, frame
from tests.daemon.conftest import DaemonProcess, free_port, wait_for

DESCRIPTORS = 128


class LimitedDaemon(DaemonProcess):
    """A daemon that may open few files: so many, and at most so many."""

    limits = (DESCRIPTORS, DESCRIPTORS)

    def spawn(self, *arguments: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        limits = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, {self.limits})"
        code = f"{limits}; from honed.daemon.process.serve import main; main()"
        return subprocess.Popen([sys.executable, "-c", code], env=self.env, stderr=stderr, text=True)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def limited(folder: Path, port: int) -> Iterator[LimitedDaemon]:
    made = LimitedDaemon(folder, HONED_HTTP__METRICS_LISTEN=f"127.0.0.1:{port}", HONED_LOG_LEVEL="critical")
    made.start()
    yield made
    made.close()


@pytest.fixture
def unlimited(folder: Path, port: int) -> Iterator[DaemonProcess]:
    made = DaemonProcess(folder, HONED_HTTP__METRICS_LISTEN=f"127.0.0.1:{port}", HONED_LOG_LEVEL="critical")
    made.start()
    yield made
    made.close()


def connected(path: Path) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel.connect(str(path))
    channel.settimeout(30.0)
    return channel


def memory_mb(daemon: DaemonProcess) -> float:
    assert daemon.process is not None
    text = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith("VmRSS")) / 1024


@pytest.mark.fault("connections until descriptors run out")
def test_connections_without_end_leave_an_engine_and_its_log_untouched(limited: LimitedDaemon, port: int) -> None:
    engine = limited.engine()
    engine.hello()
    sockets = []
    for number in range(2000):
        sockets.append(connected(limited.runtime_dir / "engine.sock"))
        if number % 20 == 0:
            sockets += [connected(limited.runtime_dir / "admin.sock"), socket.create_connection(("127.0.0.1", port))]
        if len(sockets) > 200:  # far more than it may open; this process has a limit too
            sockets.pop(0).close()
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    assert limited.process is not None
    assert len(list(Path(f"/proc/{limited.process.pid}/fd").iterdir())) < DESCRIPTORS
    for one in sockets:
        one.close()
    other = limited.engine(engine_id="engine-1")
    other.hello()
    wait_for(limited.answers, "the API")


@pytest.mark.fault("connections until descriptors run out")
def test_a_daemon_raises_its_own_limit_of_descriptors(folder: Path) -> None:
    daemon = LimitedDaemon(folder)
    daemon.limits = (DESCRIPTORS, 1000)
    try:
        daemon.start()
        assert daemon.process is not None
        assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (1000, 1000)
    finally:
        daemon.close()


@pytest.mark.fault("messages that never end")
def test_a_message_of_parts_without_end_takes_no_memory(unlimited: DaemonProcess) -> None:
    engine = unlimited.engine()
    engine.hello()
    before = memory_mb(unlimited)
    parts = frame(b"x" * (1 << 20), MORE) * 100
    with connected(unlimited.runtime_dir / "engine.sock") as attacker:
        attacker.sendall(GREETING + READY)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            attacker.sendall(parts)
    assert memory_mb(unlimited) < before + 50
    engine.send(engine.batch(1))
    engine.wait_acked(1)


@pytest.mark.fault("messages that never end")
def test_messages_that_never_end_are_bounded_together(unlimited: DaemonProcess) -> None:
    engine = unlimited.engine()
    engine.hello()
    before = memory_mb(unlimited)
    attackers = []
    most = router.MAX_MESSAGE_BYTES
    for _ in range(16):
        attackers.append(connected(unlimited.runtime_dir / "engine.sock"))
        try:
            attackers[-1].sendall(GREETING + READY + frame(b"x" * most)[:-1])
        except OSError:
            continue
    time.sleep(0.5)
    assert memory_mb(unlimited) < before + 2 * router.MAX_INCOMPLETE_BYTES / 2**20
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    for attacker in attackers:
        attacker.close()


@pytest.mark.fault("answers that nobody reads")
def test_requests_without_end_whose_answers_nobody_reads_take_no_memory(unlimited: DaemonProcess, port: int) -> None:
    before = memory_mb(unlimited)
    requests = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20_000
    deadline_s = time.monotonic() + 20.0
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.settimeout(1.0)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
            for _ in range(200):
                client.sendall(requests)
                assert time.monotonic() < deadline_s, "it reads on and on"
    assert memory_mb(unlimited) < before + 50
    assert unlimited.answers()
