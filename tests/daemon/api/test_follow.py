"""The stream of what happens, from a real daemon."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from honed.daemon.api.follow import MOST_STREAMS
from honed.daemon.client.client import AdminClient, Refused, Unreachable
from tests.daemon.conftest import DaemonProcess, wait_for

_values = itertools.count(1)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for all tests that leave it running: its marks add up."""
    made = DaemonProcess(tmp_path_factory.mktemp("f"))
    made.start()
    yield made
    made.close()


def override(daemon: DaemonProcess) -> str:
    """Make a mark; its text, which no other one has."""
    value = next(_values)
    with daemon.http() as client:
        assert client.put("/v1/overrides/draft_tokens", json={"value": value, "ttl_s": 600}).status_code == 200
    return f"draft_tokens = {value}"


class Follower:
    """A client on a thread of its own."""

    def __init__(self, daemon: DaemonProcess, after: int = -1) -> None:
        self.marks: list[dict[str, Any]] = []
        self.ended_with: Exception | None = None
        self._stream = AdminClient(daemon.runtime_dir / "admin.sock").marks(after)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for mark in self._stream:
                self.marks.append(mark)
        except Exception as error:
            self.ended_with = error

    def wait(self, text: str) -> dict[str, Any]:
        """Wait for the mark that says so."""
        found: dict[str, Any] = wait_for(lambda: next((mark for mark in self.marks if mark["text"] == text), None), text)
        return found


def test_marks_come_as_they_are_made_and_can_be_had_again(shared: DaemonProcess) -> None:
    first = override(shared)
    everything = Follower(shared, after=0)
    number = everything.wait(first)["id"]
    second = override(shared)
    assert everything.wait(second)["kind"] == "override"
    later = Follower(shared, after=number)
    later.wait(second)
    assert [mark["text"] for mark in later.marks] == [second]


def test_without_a_number_only_what_is_new_comes_and_a_browser_goes_on_where_it_was(shared: DaemonProcess) -> None:
    override(shared)
    with shared.http() as client, client.stream("GET", "/v1/marks:follow") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines) == ": honed"
        assert next(lines).startswith("id: "), "where it begins"
        text = override(shared)
        number = next(line for line in lines if line.startswith("id: "))
        assert next(lines) == "event: override"
        assert f'"{text}"' in next(lines)
    again = override(shared)
    headers = {"Last-Event-ID": number.removeprefix("id: ")}
    with shared.http() as client, client.stream("GET", "/v1/marks:follow", headers=headers) as answer:
        assert f'"{again}"' in next(line for line in answer.iter_lines() if line.startswith("data"))


def test_streams_are_bounded_and_given_back(shared: DaemonProcess) -> None:
    def is_refused() -> bool:
        with shared.http() as http, http.stream("GET", "/v1/marks:follow") as answer:
            return answer.status_code == 409

    opened = [shared.http() for _ in range(MOST_STREAMS)]
    streams = [http.stream("GET", "/v1/marks:follow") for http in opened]
    for stream in streams:
        stream.__enter__()
    with AdminClient(shared.runtime_dir / "admin.sock") as client, pytest.raises(Refused, match="16 clients follow already"):
        next(client.marks())
    for http, stream in zip(opened, streams, strict=True):
        stream.__exit__(None, None, None)
        http.close()
    wait_for(lambda: not is_refused(), "a free place")


def test_the_command_prints_a_line_for_each(shared: DaemonProcess) -> None:
    text = override(shared)
    command = [sys.executable, "-m", "honed.daemon.commands.main", "marks", "follow", "--after", "0"]
    process = subprocess.Popen(command, env=shared.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert next(line for line in process.stdout if line.endswith(f"  override  {text}\n"))
    process.kill()
    process.wait()
    process.stdout.close()


def test_the_command_goes_on_with_the_next_daemon_and_misses_no_mark(daemon: DaemonProcess) -> None:
    daemon.start()
    texts = [override(daemon)]
    command = [sys.executable, "-m", "honed.daemon.commands.main", "marks", "follow", "--after", "0"]
    process = subprocess.Popen(command, env=daemon.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        said = [process.stdout.readline()]
        assert daemon.end(signal.SIGTERM) == 0
        daemon.start()
        texts += [override(daemon), override(daemon)]
        said += [process.stdout.readline(), process.stdout.readline()]
        assert [line.rstrip("\n").split("  ")[-1] for line in said] == texts
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_daemon_that_stops_ends_its_streams(daemon: DaemonProcess) -> None:
    daemon.start()
    follower = Follower(daemon, after=0)
    follower.wait(override(daemon))
    assert daemon.end(signal.SIGTERM) == 0
    assert "Traceback" not in daemon.said
    follower.thread.join(10)
    assert not follower.thread.is_alive()
    assert follower.ended_with is None or isinstance(follower.ended_with, Unreachable)
