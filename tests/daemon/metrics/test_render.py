"""Scrapes without end are answered, and leave the daemon its time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from honed.daemon.metrics import render as render_module
from honed.daemon.metrics.render import REST_PER_SCRAPE, Scrapes
from tests.daemon.conftest import Clock

TOOK_S = 0.25


@pytest.fixture
def scrapes(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Scrapes:
    """Scrapes that take a quarter of a second each."""
    made = iter(range(100))

    def render(service: Any) -> bytes:
        clock.now += TOOK_S
        return b"%d" % next(made)

    monkeypatch.setattr(render_module, "render", render)
    service: Any = SimpleNamespace(monotonic=lambda: clock.now)
    return Scrapes(service)


@pytest.mark.fault("scrapes without end")
def test_whoever_asks_without_end_gets_what_is_there(scrapes: Scrapes, clock: Clock) -> None:
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: scrapes.get(), range(40))) == {b"0"}
    clock.now += REST_PER_SCRAPE * TOOK_S - 0.01
    assert scrapes.get() == b"0"
    clock.now += 0.02
    assert scrapes.get() == b"1"


def test_a_scrape_that_failed_is_made_again(scrapes: Scrapes, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(service: Any) -> bytes:
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(render_module, "render", fail)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                scrapes.get()
    assert scrapes.get() == b"0"
