"""What systemd hears, and when: claims only after a look that found nothing wrong."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from honed.daemon.process.notify import Heartbeat, Notifier
from honed.daemon.process.supervise import supervise, what_it_does
from honed.daemon.service import Service
from tests.daemon.conftest import Clock, wait_for
from tests.daemon.fake_engine import FakeEngine


class Manager:
    """systemd's end of the socket."""

    def __init__(self, path: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.setblocking(False)
        self.said: list[str] = []

    def hear(self) -> list[str]:
        """Everything said so far."""
        try:
            while True:
                self.said.append(self._socket.recv(1000).decode())
        except BlockingIOError:
            return self.said

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def path(folder: Path) -> Path:
    return folder / "notify"


@pytest.fixture
def manager(path: Path) -> Iterator[Manager]:
    made = Manager(path)
    yield made
    made.close()


def notifier(path: Path, usec: str) -> Notifier:
    return Notifier({"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": usec})


def test_ready_comes_once_and_first_and_the_status_when_it_changes(manager: Manager, path: Path) -> None:
    clock = Clock()
    heart = Heartbeat(notifier(path, "30000000"), clock)
    heart.beat("idle")
    heart.beat("idle")
    clock.now += 14.9
    heart.beat("training")
    clock.now += 0.2
    heart.beat("training")
    heart.say("in trouble")
    heart.stop()
    assert manager.hear() == [
        "READY=1",
        "STATUS=idle",
        "WATCHDOG=1",
        "STATUS=training",
        "WATCHDOG=1",
        "STATUS=in trouble",
        "STOPPING=1",
    ]


def test_without_a_watchdog_nothing_is_claimed(manager: Manager, path: Path) -> None:
    heart = Heartbeat(Notifier({"NOTIFY_SOCKET": str(path)}))
    heart.beat("idle")
    assert manager.hear() == ["READY=1", "STATUS=idle"]


@pytest.fixture
def supervised(service: Service, path: Path, manager: Manager) -> Iterator[Callable[..., threading.Thread]]:
    """Supervision on a thread; `dead` are the listeners that have ended."""
    asked, codes = threading.Event(), list[int]()

    def start(dead: list[str]) -> threading.Thread:
        run = lambda: codes.append(supervise(service, asked, notifier(path, "100000"), lambda: dead))  # noqa: E731
        thread = threading.Thread(target=run)
        thread.codes = codes  # type: ignore[attr-defined]
        thread.start()
        threads.append(thread)
        return thread

    threads: list[threading.Thread] = []
    yield start
    asked.set()
    for thread in threads:
        thread.join(10)


def test_a_stuck_part_starves_the_watchdog_and_is_named(
    service: Service, manager: Manager, supervised: Callable[..., threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    supervised([])
    wait_for(lambda: manager.hear().count("WATCHDOG=1") >= 2, "a fed watchdog")
    monkeypatch.setattr(service, "last_tick_s", float("-inf"))
    monkeypatch.setattr(service, "_run", lambda: None)
    service._stop.set()  # the ticking thread ends, so nobody says that it is alive
    wait_for(lambda: any("not healthy: the ticking thread is stuck" in said for said in manager.hear()), "the trouble")
    service.last_tick_s = float("-inf")
    fed = manager.hear().count("WATCHDOG=1")
    wait_for(lambda: threading.Event().wait(0.5) or True, "half a second")
    assert manager.hear().count("WATCHDOG=1") == fed


def test_a_daemon_whose_socket_was_removed_ends(
    service: Service, manager: Manager, supervised: Callable[..., threading.Thread]
) -> None:
    """A user's folder goes with the last login: nobody could connect any more, and nothing else would say so."""
    socket = service.settings.paths.engine_socket
    socket.parent.mkdir(parents=True, exist_ok=True)
    if not socket.exists():
        socket.write_text("")
    thread = supervised([])
    wait_for(lambda: "WATCHDOG=1" in manager.hear(), "a fed watchdog")
    socket.unlink()
    thread.join(10)
    assert thread.codes == [1]  # type: ignore[attr-defined]
    assert f"STATUS=not healthy: {socket} was removed or replaced, so nobody can connect" in manager.hear()


def test_a_dead_listener_ends_the_process_so_that_it_is_started_again(
    manager: Manager, supervised: Callable[..., threading.Thread]
) -> None:
    dead: list[str] = []
    thread = supervised(dead)
    wait_for(lambda: "WATCHDOG=1" in manager.hear(), "a fed watchdog")
    dead.append("the HTTP listener honed-admin-socket has ended")
    thread.join(10)
    assert thread.codes == [1]  # type: ignore[attr-defined]
    assert manager.hear()[-2:] == ["STATUS=not healthy: the HTTP listener honed-admin-socket has ended", "STOPPING=1"]


def test_the_status_line_says_what_there_is(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    assert what_it_does(service) == "serving; 0 engines, no trainer"
    engine = make_engine()
    engine.hello()
    assert what_it_does(service) == "serving; 1 engine, no trainer"
    service.store.is_failing, service.store.last_error = True, "disk full"
    assert what_it_does(service).endswith("the database refuses: disk full")
    service.store.is_failing = False


def test_the_status_line_needs_no_lock(service: Service) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with service.lock:
            held.set()
            done.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        assert what_it_does(service)
        assert service.problems == []
    finally:
        done.set()
        thread.join(10)
