"""`honed top`: what a screen shows, in a real terminal as well, and what it does when the daemon goes away."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from honed.daemon.client.client import AdminClient, Unreachable
from honed.daemon.commands import top
from honed.daemon.commands.main import app
from honed.daemon.commands.top import Frame
from tests.daemon.commands.show.test_status import HEALTHY, text_of
from tests.daemon.conftest import DaemonProcess


def point(t: int, workload: str = "a", **changes: int) -> dict[str, Any]:
    fields = {"delivered_tokens": 30, "rounds": 10, "accepted_tokens": 20, "draft_tokens": 40}
    return {"t": t, "workload": workload} | fields | changes


def frame(**changes: Any) -> Frame:
    now = int(time.time())
    mark = {"t": now, "kind": "drift", "text": "b fell", "engine_id": ""}
    timeline = {"points": [point(now - 5), point(now - 4)], "marks": [mark]}
    rows = [{"engine_id": "engine-0", "workload": "[b]", "rounds": 7, "acceptance_length": 2.5, "by_position": [0.75, 0.5]}]
    operations = [{"operation_id": "op-1", "kind": "recalibrate", "state": "running", "stage": "training"}]
    fields: dict[str, Any] = {"status": HEALTHY, "workloads": rows, "timeline": timeline, "operations": operations}
    return Frame(**(fields | changes))


def test_seconds_are_summed_over_workloads_and_idle_ones_are_nothing() -> None:
    points = [point(97), point(97, "b", delivered_tokens=10, rounds=10, accepted_tokens=0, draft_tokens=0), point(95)]
    figures = top.per_second(points, 100, seconds=5)
    assert figures["tokens/s"] == [30.0, 0.0, 40.0, 0.0]
    assert figures["acceptance length"] == [3.0, 0.0, 2.0, 0.0]
    assert figures["draft tokens a round"] == [4.0, 0.0, 2.0, 0.0]


def test_bars() -> None:
    assert top.sparkline([0, 1, 2, 4], 10) == "▁▃▅█"
    assert top.sparkline([1, 2, 3], 2) == "▆█"
    assert top.sparkline([0.0, 0.0], 5) == "▁▁"
    assert top.sparkline([], 5) == ""


EVERYTHING = ("all is well", "engine-0", "[b]", "75 50", "tokens/s", "v0002-beef", "b fell", "recalibrate: train")


def lines_of(frame: Frame, width: int, height: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=False)
    console.print(top.screen(frame, height))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_a_screen_shows_everything() -> None:
    for text in (text_of(top.view(frame()), width=120), "\n".join(lines_of(frame(), 120, 40))):
        assert [part for part in EVERYTHING if part not in text] == []


def engine(number: int, **changes: Any) -> dict[str, Any]:
    return HEALTHY["engines"][0] | {"engine_id": f"engine-{number}"} | changes


def test_a_small_terminal_shows_the_newest_figures_and_something_of_every_part() -> None:
    now = int(time.time())
    rising = [point(now - t, delivered_tokens=1000 - t) for t in range(119, 1, -1)]
    engines = [engine(0), engine(1), engine(2), engine(3, connected=False)]
    full = frame(timeline={"points": rising, "marks": []}, status=HEALTHY | {"engines": engines})
    lines = lines_of(full, 80, 24)
    assert len(lines) == 24
    assert max(map(len, lines)) == 80
    (curve,) = (line for line in lines if "tokens/s  " in line)
    assert float(curve.split()[2].replace(",", "")) >= 996.0, "the last complete second"
    assert curve.rstrip("│ ").endswith("█")
    text = "\n".join(lines)
    for part in ("engine-3 is not connected", "engine-3  gone", "and 1 more: `honed engines`", "[b]", "drafter", "trainer"):
        assert part in text, part
    assert not any("…" in line for line in lines if "engine-0  " in line)


def test_an_idle_server_shows_0_now() -> None:
    now = int(time.time())
    text = text_of(top.Curves(frame(timeline={"points": [point(now - 60)], "marks": []})), width=80)
    assert [line.split("▁")[0].split()[-1] for line in text.splitlines() if "▁" in line] == ["0.00"] * 3


def test_what_is_wrong_comes_first_and_is_never_cut_off() -> None:
    worse = frame(status=HEALTHY | {"problems": [f"problem {i}" for i in range(9)]}, trouble="no daemon is running")
    for height, more in ((40, 6), (24, 8)):
        text = "\n".join(lines_of(worse, 100, height))
        assert "no daemon is running; the data shown is old" in text
        assert f"problem {8 - more}" in text
        assert f"and {more} more: `honed status`" in text


def test_nothing_at_all_is_shown_too() -> None:
    assert "no engine has attached" in text_of(top.view(Frame()))


class Scripted(AdminClient):
    """A daemon that is gone from the second look on."""

    def __init__(self) -> None:
        self.looks = 0

    def get(self, path: str, **query: Any) -> Any:
        if path == "/v1/status":
            self.looks += 1
            if self.looks == 2:
                raise Unreachable("no daemon is running")
        answers: dict[str, Any] = {"/v1/status": HEALTHY, "/v1/timeline": {"points": [], "marks": []}}
        return answers.get(path, [])


def test_a_daemon_that_goes_away_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top.time, "sleep", lambda _: None)
    client = Scripted()
    frames = list(top._frames(client, top.read(client), 1.0, 3))
    assert [found.trouble for found in frames] == ["", "no daemon is running", ""]
    assert all(found.status == HEALTHY for found in frames)


@pytest.fixture
def running(daemon: DaemonProcess) -> DaemonProcess:
    daemon.start()
    engine = daemon.engine()
    engine.hello()
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    return daemon


def test_json_is_one_line_a_look(running: DaemonProcess) -> None:
    result = CliRunner().invoke(app, ["top", "--json", "--count", "2", "--interval", "0.2"], env=running.env)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["status"]["engines"][0]["engine_id"] for line in lines] == ["engine-0", "engine-0"]
    assert lines[0]["trouble"] == ""


def test_a_pipe_gets_one_look_as_text(running: DaemonProcess) -> None:
    wide = CliRunner().invoke(app, ["top"], env=running.env)
    assert 80 < max(map(len, wide.stdout.splitlines())) < 500
    result = CliRunner().invoke(app, ["top"], env=running.env | {"COLUMNS": "120"})
    assert result.exit_code == 0
    assert "engine-0" in result.stdout
    assert "\x1b" not in result.stdout


def test_without_a_daemon_it_ends_with_3(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["top"], env={"HONED_RUNTIME_DIR": str(tmp_path), "HONED_STATE_DIR": str(tmp_path)})
    assert result.exit_code == 3


def test_a_terminal_is_filled_until_q_and_given_back_as_it_was(running: DaemonProcess) -> None:
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    before = termios.tcgetattr(terminal)
    command = [sys.executable, "-m", "honed.daemon.commands.main", "top", "--interval", "0.2"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=running.env | {"TERM": "xterm"})
    said = b""
    try:
        said = read_until(controller, b"acceptance length")
        assert b"\x1b[?1049h" in said  # the other screen
        assert b"engine-0" in said
        os.write(controller, b"q")
        said += read_until(controller, b"\x1b[?1049l")
        assert process.wait(20) == 0
        assert termios.tcgetattr(terminal) == before
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        os.close(controller)
        os.close(terminal)


def read_until(descriptor: int, wanted: bytes, timeout_s: float = 30.0) -> bytes:
    """What a terminal was sent, up to something."""
    said, deadline_s = b"", time.monotonic() + timeout_s
    while wanted not in said:
        left = deadline_s - time.monotonic()
        assert left > 0, said
        if select.select([descriptor], [], [], left)[0]:
            said += os.read(descriptor, 65536)
    return said
