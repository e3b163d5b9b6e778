"""The socket's file is gone after the end, whichever of the two threads is first; connections take turns."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from honed.adapt.protocol import wire
from honed.daemon.ingest.router import READ_BYTES, TURN_S, Router
from honed.daemon.ingest.zmtp import GREETING, READY, frame
from tests.daemon.conftest import wait_for


def test_the_file_is_removed_when_the_thread_ends_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread sees the wish to stop before the caller goes on, as on a machine under load."""
    router = Router(folder / "engine.sock", lambda peer, frame: None)
    router.start()
    assert (folder / "engine.sock").exists()
    wake = router._wake

    def wake_and_wait() -> None:
        wake()
        for thread in threading.enumerate():
            if thread.name == "honed-router":
                thread.join()

    monkeypatch.setattr(router, "_wake", wake_and_wait)
    router.stop()
    assert not (folder / "engine.sock").exists()


def test_a_router_that_never_started_stops(folder: Path) -> None:
    Router(folder / "engine.sock", lambda peer, frame: None).stop()


@pytest.mark.parametrize(("size", "number", "frame_s", "most_before"), [(1000, 160, 0.0, 140), (100, 600, 0.001, 170)])
def test_a_flood_of_frames_leaves_other_connections_their_turn(
    folder: Path, size: int, number: int, frame_s: float, most_before: int
) -> None:
    """The router once handled all that a flooded socket held; then 64 KiB of it, which are hundreds of small frames."""
    handled: list[bytes] = []
    both_sent = threading.Event()

    def on_frame(peer: bytes, message: bytes) -> None:
        assert both_sent.wait(30.0)
        time.sleep(frame_s)
        handled.append(message)

    router = Router(folder / "engine.sock", on_frame)
    router.start()
    flooder, honest = (socket.socket(socket.AF_UNIX) for _ in range(2))
    for one in (flooder, honest):
        one.connect(str(folder / "engine.sock"))
        one.sendall(GREETING + READY)
    flooder.sendall(frame(b"x" * size) * number)
    honest.sendall(frame(b"honest"))
    both_sent.set()
    wait_for(lambda: len(handled) == number + 1, "all frames")
    flooder.close()
    honest.close()
    router.stop()
    assert handled.index(b"honest") < most_before


def test_what_a_peer_sent_before_it_died_is_read(folder: Path) -> None:
    """An answer that nobody reads is no reason to drop what was sent before."""
    handled: list[bytes] = []
    is_gone = threading.Event()

    def on_frame(peer: bytes, message: bytes) -> None:
        assert is_gone.wait(30.0)
        handled.append(message)
        router.send(peer, wire.Ack(boot_id="boot", seq=len(handled)))
        time.sleep(TURN_S)

    router = Router(folder / "engine.sock", on_frame)
    router.start()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(folder / "engine.sock"))
        peer.sendall(GREETING + READY + frame(b"x" * READ_BYTES) * 5)
    is_gone.set()
    wait_for(lambda: len(handled) == 5, "all that it sent")
    wait_for(lambda: not router._connections, "the connection's end")
    router.stop()


def test_nothing_is_handled_behind_the_frame_for_which_a_connection_is_ended(folder: Path) -> None:
    """A hello behind it would introduce a connection whose end nobody tells of any more."""
    handled: list[bytes] = []

    def on_frame(peer: bytes, message: bytes) -> None:
        handled.append(message)
        router.hang_up(peer)

    router = Router(folder / "engine.sock", on_frame)
    router.start()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(folder / "engine.sock"))
        peer.sendall(GREETING + READY + frame(b"batch") + frame(b"hello"))
        peer.settimeout(30.0)
        while peer.recv(1000):
            pass
    router.stop()
    assert handled == [b"batch"]
