"""Batches that wait for the controllers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.adapt.protocol.workloads import MAX_WORKLOADS, OTHER_WORKLOAD
from honed.daemon.control import steering
from honed.daemon.service import Service
from honed.daemon.settings.settings import Settings
from tests.daemon.fake_engine import make_batch


@pytest.fixture
def idle(settings: Settings) -> Service:
    """A service whose thread isn't started, so that nobody learns."""
    settings.paths.state_dir.mkdir()
    return Service(settings, daemon_id="test")


def test_the_oldest_batches_are_skipped_when_too_much_waits(idle: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "MAX_WAITING_ROUNDS", 3 * (steering.ROUNDS_OF_A_BATCH + 8))
    engine: Any = SimpleNamespace(engine_id="engine-0")
    for seq in range(1, 6):
        idle.steering.put(engine, make_batch(seq, rounds=8))
    assert idle.steering.num_waiting == 3
    assert idle.steering.skipped_batches == 2
    idle.steering.put(engine, make_batch(6, rounds=1000))
    assert idle.steering.num_waiting == 1
    assert idle.steering._waiting.take()[1].seq == 6, "one that is too large alone is still learned"
    idle.store.close()


def test_an_engine_that_sends_too_much_delays_only_itself(idle: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "MAX_WAITING_ROUNDS", 10 * (steering.ROUNDS_OF_A_BATCH + 8))
    busy, quiet = (cast("Any", SimpleNamespace(engine_id=name)) for name in ("busy", "quiet"))
    idle.steering.put(quiet, make_batch(1))
    for seq in range(1, 101):
        idle.steering.put(busy, make_batch(seq))
    idle.steering.put(quiet, make_batch(2))
    assert idle.steering.skipped_batches == 92, "none of the quiet one"
    taken = [(engine.engine_id, batch.seq) for engine, batch in (idle.steering._waiting.take() for _ in range(4))]
    assert taken == [("quiet", 1), ("busy", 93), ("quiet", 2), ("busy", 94)]
    idle.store.close()


def test_an_alarm_stays_counted_under_the_name_that_it_was_counted_under(idle: Service) -> None:
    """Its count moved to "other" when newer labels had taken the name's place, and back: an increase that nobody had."""
    said: list[Any] = []
    engine: Any = SimpleNamespace(
        engine_id="engine-0", awaits_controller=False, is_replaced=False, learned_seq=0, controller=SimpleNamespace()
    )
    engine.controller.observe = lambda batch: said
    idle.steering._on_alarm = lambda engine, alarm: None
    for seq, name in enumerate(["release-1", *(f"batch-{number}" for number in range(MAX_WORKLOADS)), "release-1"], start=1):
        said[:] = [SimpleNamespace(workload=name)]
        idle.steering.put(engine, make_batch(seq))
        idle.steering.observe()
    assert idle.steering.alarms["engine-0", "release-1"] == 2
    assert idle.steering.alarms["engine-0", OTHER_WORKLOAD] == 3, "their number is bounded"
    assert len(idle.steering.alarms) == MAX_WORKLOADS - 1
    idle.store.close()
