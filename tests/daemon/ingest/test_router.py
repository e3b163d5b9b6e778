"""The socket's file is gone after the end, whichever of the two threads is first."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from honed.daemon.ingest.router import Router


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
