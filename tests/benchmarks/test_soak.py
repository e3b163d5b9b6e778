"""`make bench-soak`, short: each part passes on the real daemon, and a lost or repeated row would be seen."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.server.processes import Processes
from benchmarks.soak import fuzz, kills, traffic
from benchmarks.soak.daemon import Daemon
from benchmarks.soak.fleet import Fleet
from honed.daemon.store.database import connect


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short, since a unix socket's path may have 107 bytes."""
    return tmp_path_factory.mktemp("h")


@pytest.fixture
def processes(folder: Path) -> Iterator[Processes]:
    with Processes(folder / "logs") as started:
        yield started


def test_traffic_is_stored_without_loss(processes: Processes, folder: Path) -> None:
    figures = traffic.run(processes, folder, 6.0)
    assert figures["passed"], figures
    assert figures["stored"]["rounds"] == figures["rounds"] > 6 * 20_000


def test_kills_lose_nothing(processes: Processes, folder: Path) -> None:
    figures = kills.run(processes, folder, 3)
    assert figures["passed"], figures
    assert figures["rounds_stored"] == figures["rounds"] > 0


def test_a_lost_row_is_counted(processes: Processes, folder: Path) -> None:
    daemon, rows = Daemon(processes, folder), kills.Rows()
    daemon.start()
    with Fleet(daemon.engine_socket, 1, kills.EVERY_S) as fleet:
        kills.wait_acknowledged(daemon, fleet)
        daemon.kill()
        database = connect(daemon.database)
        with database.atomic():
            database.conn.execute("DELETE FROM batches WHERE seq = 1")
        database.close()
        rows.read(daemon.database)
        assert rows.count_lost(fleet) == 1


def test_mutants_find_nothing_unhandled(processes: Processes, folder: Path) -> None:
    figures = fuzz.run(processes, folder, 3000, 300)
    assert not figures["unhandled"], figures
    assert figures["frames"] == 3000
    assert figures["requests"] == 300
    assert figures["honest_batches"] > 0


def test_what_is_unhandled_is_found_in_the_log(processes: Processes, folder: Path) -> None:
    daemon = Daemon(processes, folder)
    daemon.start()
    daemon.wait_ready()
    daemon.stop()
    assert daemon.unhandled() == []
    with (folder / "logs" / "daemon-0.log").open("a") as log:
        log.write(
            '{"event": "a message could not be handled"}\nTraceback (most recent call last):\n  a line\nKeyError: 1\nmore\n'
        )
    assert daemon.unhandled()[1:] == ["Traceback (most recent call last):\n  a line\nKeyError: 1\n"]
