"""A real store, a real service in this process, and the real daemon as a process; all in a temporary folder."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from honed.daemon.service import Service
from honed.daemon.settings.sections import StoreSettings
from honed.daemon.settings.settings import Settings, load
from honed.daemon.store.store import Store
from honed.daemon.views import views
from tests.daemon.fake_engine import FakeEngine


class Clock:
    """A clock that stands at the present until it is moved."""

    def __init__(self) -> None:
        self.now = time.time()

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
    """Poll until the condition holds and return what it gave."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if found := condition():
            return found
        time.sleep(0.005)
    raise AssertionError(f"waited {timeout_s:g} s in vain for {what}")


def wait_learned(service: Service) -> None:
    """Wait until a controller has learned from all workloads' batches: they are acknowledged before, and it may be new."""
    wait_for(
        lambda: (rows := views.workloads(service, 300.0)) and all("alarm" in row["drift"] for row in rows),
        "the batches to be learned",
    )


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short, since a unix socket's path may have 107 bytes."""
    return tmp_path_factory.mktemp("h")


def flags_in(folder: Path) -> dict[str, Any]:
    """Settings of a service for fake engines, below this folder."""
    return {
        "paths": {"state_dir": folder / "state", "runtime_dir": folder / "run"},
        "http": {"metrics_listen": ""},
        "store": {"commit_interval_s": 0.0},
        # The fake ones send no heartbeats; only a test that means it lets them be lost.
        "events": {"engine_lost_s": 300.0},
        "recalibration": {"trainer_lost_s": 300.0},
        # Windows as short as a fake engine's batches.
        "canary": {"window_s": 0.0, "window_rounds": 40},
    }


@pytest.fixture
def settings(folder: Path) -> Settings:
    return load(None, flags_in(folder), env={})


@pytest.fixture
def store(folder: Path, clock: Clock) -> Iterator[Store]:
    opened = Store(folder / "honed.db", StoreSettings(commit_interval_s=0.0), clock=clock)
    opened.start()
    yield opened
    opened.close()


@pytest.fixture
def service(settings: Settings) -> Iterator[Service]:
    """A running service without its HTTP server."""
    settings.paths.state_dir.mkdir()
    settings.paths.runtime_dir.mkdir()
    running = Service(settings, daemon_id="test")
    running.start()
    yield running
    running.stop()


@pytest.fixture
def make_engine(settings: Settings) -> Iterator[Callable[..., FakeEngine]]:
    engines: list[FakeEngine] = []

    def make(**arguments: Any) -> FakeEngine:
        engines.append(FakeEngine(settings.paths.engine_socket, **arguments))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


class DaemonProcess:
    """`python -m honed.daemon.process.serve` over one state folder, started and ended as often as wanted."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.said = ""
        """What it wrote to stderr, once it has ended."""
        self.state_dir, self.runtime_dir = folder / "state", folder / "run"
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HONED_")},
            "HONED_STATE_DIR": str(self.state_dir),
            "HONED_RUNTIME_DIR": str(self.runtime_dir),
            "HONED_HTTP__METRICS_LISTEN": "",
            "HONED_CANARY__WINDOW_S": "0",
            "HONED_CANARY__WINDOW_ROUNDS": "40",
            **env,
        }
        self.process: subprocess.Popen[str] | None = None
        self._engines: list[FakeEngine] = []

    def start(self, stderr: int = subprocess.PIPE) -> None:
        self.process = self.spawn(stderr=stderr)
        wait_for(self.answers, "the daemon's answer")

    def spawn(self, *arguments: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "honed.daemon.process.serve", *arguments]
        return subprocess.Popen(command, env=self.env, stderr=stderr, text=True)

    def answers(self) -> bool:
        try:
            with self.http() as client:
                return client.get("/readyz").status_code == 200
        except httpx2.TransportError:
            assert self.process is not None
            assert self.process.poll() is None, self.process.stderr and self.process.stderr.read()
            return False

    def engine(self, **arguments: Any) -> FakeEngine:
        """An engine that is closed with the daemon."""
        self._engines.append(FakeEngine(self.runtime_dir / "engine.sock", **arguments))
        return self._engines[-1]

    def close(self) -> None:
        for engine in self._engines:
            engine.close()
        if self.process is not None:
            self.end(signal.SIGKILL)

    def http(self) -> httpx2.Client:
        transport = httpx2.HTTPTransport(uds=str(self.runtime_dir / "admin.sock"))
        return httpx2.Client(base_url="http://localhost", transport=transport, timeout=20.0)

    def end(self, number: signal.Signals | None) -> int:
        """Send a signal, None: it was sent, and return the exit code."""
        assert self.process is not None
        if number is not None:
            self.process.send_signal(number)
        code = self.process.wait(60)
        if self.process.stderr is not None:
            self.said = self.process.stderr.read()
            self.process.stderr.close()
        self.process = None
        return code


@pytest.fixture
def daemon(folder: Path) -> Iterator[DaemonProcess]:
    made = DaemonProcess(folder)
    yield made
    made.close()


def free_port() -> int:
    """A loopback port that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
