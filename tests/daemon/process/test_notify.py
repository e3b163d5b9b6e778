from __future__ import annotations

import os
import resource
import socket
import uuid
from pathlib import Path

import pytest

from honed.daemon.process.notify import Notifier


@pytest.mark.parametrize("is_abstract", [False, True])
def test_what_systemd_hears(tmp_path_factory: pytest.TempPathFactory, is_abstract: bool) -> None:
    name = f"honed-{uuid.uuid4().hex}"
    path: Path = tmp_path_factory.mktemp("n") / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}" if is_abstract else str(path))
        notifier = Notifier({"NOTIFY_SOCKET": f"@{name}" if is_abstract else str(path)})
        assert notifier.ready()
        assert notifier.status("two\nlines")
        assert notifier.watchdog()
        assert notifier.stopping()
        said = [manager.recv(100) for _ in range(4)]
    assert said == [b"READY=1", b"STATUS=two lines", b"WATCHDOG=1", b"STOPPING=1"]


def test_systemd_hears_of_a_process_that_has_no_files_left(tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("n") / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(path))
        notifier = Notifier({"NOTIFY_SOCKET": str(path)})
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        try:
            assert notifier.watchdog()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert manager.recv(100) == b"WATCHDOG=1"


def test_without_systemd_nothing_is_said_and_nothing_fails(tmp_path: Path) -> None:
    assert not Notifier({}).ready()
    assert not Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).ready()


def test_the_watchdog_is_fed_twice_as_often_as_asked_and_only_by_whom_it_means() -> None:
    assert Notifier({"WATCHDOG_USEC": "30000000"}).watchdog_interval_s == 15.0
    assert Notifier({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": str(os.getpid())}).watchdog_interval_s == 15.0
    assert Notifier({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}).watchdog_interval_s == 0.0
    assert Notifier({"WATCHDOG_USEC": "soon"}).watchdog_interval_s == 0.0
