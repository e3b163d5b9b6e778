"""The stream of what happens, from a real daemon."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from honed.daemon.client import AdminClient, Refused, Unreachable
from honed.daemon.follow import MOST_STREAMS
from tests.daemon.conftest import DaemonProcess, wait_for


@pytest.fixture
def running(daemon: DaemonProcess) -> DaemonProcess:
    daemon.start()
    return daemon


def override(daemon: DaemonProcess, value: int) -> None:
    with daemon.http() as client:
        body = {"value": value, "ttl_s": 600}
        assert client.put("/v1/overrides/draft_tokens", json=body).status_code == 200


class Follower:
    """A client on a thread of its own."""

    def __init__(self, daemon: DaemonProcess, after: int = -1) -> None:
        self.marks: list[dict[str, Any]] = []
        self.ended_with: Exception | None = None
        self._client = AdminClient(daemon.runtime_dir / "admin.sock")
        self._stream = self._client.events(after)
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            for mark in self._stream:
                self.marks.append(mark)
        except Exception as error:
            self.ended_with = error


def test_marks_come_as_they_are_made_and_can_be_had_again(running: DaemonProcess) -> None:
    override(running, 1)
    everything = Follower(running, after=0)
    wait_for(lambda: len(everything.marks) == 1, "the first mark")
    override(running, 2)
    wait_for(lambda: len(everything.marks) == 2, "the second")
    assert [(mark["kind"], mark["text"]) for mark in everything.marks] == [
        ("override", "draft_tokens = 1"), ("override", "draft_tokens = 2"),
    ]  # fmt: skip
    later = Follower(running, after=everything.marks[0]["id"])
    wait_for(lambda: [mark["text"] for mark in later.marks] == ["draft_tokens = 2"], "what was missed")


def test_without_a_number_only_what_is_new_comes(running: DaemonProcess) -> None:
    override(running, 1)
    with running.http() as client, client.stream("GET", "/v1/events:follow") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert next(lines) == ": honed"
        override(running, 2)
        assert next(line for line in lines if line.startswith("event")) == "event: override"
        assert "draft_tokens = 2" in next(lines)


def test_a_browser_that_lost_its_connection_goes_on_where_it_was(running: DaemonProcess) -> None:
    override(running, 1)
    override(running, 2)
    with running.http() as client, client.stream("GET", "/v1/events:follow", headers={"Last-Event-ID": "1"}) as answer:
        assert next(line for line in answer.iter_lines() if line.startswith("id")) == "id: 2"


def test_streams_are_bounded_and_given_back(running: DaemonProcess) -> None:
    def streams() -> Iterator[Any]:
        for _ in range(MOST_STREAMS):
            client = running.http()
            stream = client.stream("GET", "/v1/events:follow")
            yield client, stream, stream.__enter__()

    opened = list(streams())
    assert all(answer.status_code == 200 for _, _, answer in opened)
    with AdminClient(running.runtime_dir / "admin.sock") as client, pytest.raises(Refused, match="16 clients follow already"):
        next(client.events())
    for http, stream, _ in opened:
        stream.__exit__(None, None, None)
        http.close()

    def is_free() -> bool:
        with running.http() as http, http.stream("GET", "/v1/events:follow") as answer:
            return answer.status_code == 200

    wait_for(is_free, "a free place")


def test_a_daemon_that_stops_ends_its_streams(running: DaemonProcess) -> None:
    follower = Follower(running)
    override(running, 1)
    wait_for(lambda: follower.marks, "a mark")
    assert running.end(signal.SIGTERM) == 0
    follower.thread.join(10)
    assert not follower.thread.is_alive()
    assert follower.ended_with is None or isinstance(follower.ended_with, Unreachable)


def test_the_command_prints_a_line_for_each(running: DaemonProcess) -> None:
    override(running, 1)
    command = [sys.executable, "-m", "honed.daemon.command_line", "events", "follow", "--after", "0"]
    process = subprocess.Popen(command, env=running.env, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().endswith("  override  draft_tokens = 1\n")
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_wrong_number_is_refused(running: DaemonProcess) -> None:
    with running.http() as client:
        assert client.get("/v1/events:follow?after=-2").status_code == 422

