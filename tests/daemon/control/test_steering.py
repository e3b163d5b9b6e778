"""Batches that wait for the controllers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from honed.adapt.control.controller import EngineController
from honed.adapt.protocol import wire
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
    monkeypatch.setattr(steering, "MAX_WAITING_BYTES", 3 * (steering.BATCH_BYTES + 600))
    engine: Any = SimpleNamespace(engine_id="engine-0")
    for seq in range(1, 6):
        idle.steering.put(engine, make_batch(seq), 600)
    assert idle.steering.num_waiting == 3
    assert idle.steering.skipped_batches == 2
    idle.steering.put(engine, make_batch(6), 1 << 20)
    assert idle.steering.num_waiting == 1
    assert idle.steering._waiting.take()[1].seq == 6, "one that is too large alone is still learned"
    idle.store.close()


def test_an_engine_that_sends_too_much_delays_only_itself(idle: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steering, "MAX_WAITING_BYTES", 10 * (steering.BATCH_BYTES + 600))
    busy, quiet = (cast("Any", SimpleNamespace(engine_id=name)) for name in ("busy", "quiet"))
    idle.steering.put(quiet, make_batch(1), 600)
    for seq in range(1, 101):
        idle.steering.put(busy, make_batch(seq), 600)
    idle.steering.put(quiet, make_batch(2), 600)
    assert idle.steering.skipped_batches == 92, "none of the quiet one"
    taken = [(engine.engine_id, batch.seq) for engine, batch, _ in (idle.steering._waiting.take() for _ in range(4))]
    assert taken == [("quiet", 1), ("busy", 93), ("quiet", 2), ("busy", 94)]
    idle.store.close()


def test_what_was_held_for_a_controller_comes_before_what_came_since(idle: Service) -> None:
    earlier, engine = (cast("Any", SimpleNamespace(engine_id="engine-0", boot=boot)) for boot in ("a", "b"))
    held, waiting = idle.steering._held, idle.steering._waiting
    for seq, boot in ((1, earlier), (2, engine), (3, engine)):
        held.put(boot, make_batch(seq), 600)
    waiting.put(engine, make_batch(4), 600)
    idle.steering.give(engine, None, 0)
    assert [waiting.take()[1].seq for _ in range(len(waiting))] == [2, 3, 4]
    assert [held.take()[1].seq for _ in range(len(held))] == [1], "of another boot"
    idle.store.close()


@pytest.mark.parametrize("ends", ["the trial", "the engine"])
def test_an_alarm_of_what_has_ended_meanwhile_asks_for_nothing(idle: Service, ends: str) -> None:
    engine: Any = SimpleNamespace(engine_id="engine-0", awaits_controller=False, is_replaced=False, learned_seq=0)
    engine.controller = EngineController("engine-0", 3, 8)
    engine.controller.take_turns(["v1", "v2"])

    def observe(batch: wire.EventBatch) -> list[Any]:
        if ends == "the trial":
            engine.controller.end_turns()
        else:
            engine.controller = None
        return [SimpleNamespace(workload="chat")]

    engine.controller.observe = observe
    idle.steering.put(engine, make_batch(1), 600)
    idle.steering.observe()
    assert not idle.steering.alarms
    idle.store.close()


def test_an_alarm_stays_counted_under_the_name_that_it_was_counted_under(idle: Service) -> None:
    """Its count moved to "other" when newer labels had taken the name's place, and back: an increase that nobody had."""
    said: list[Any] = []
    engine: Any = SimpleNamespace(
        engine_id="engine-0",
        awaits_controller=False,
        is_replaced=False,
        learned_seq=0,
        controller=SimpleNamespace(turns_ended=0),
    )
    engine.controller.observe = lambda batch: said
    idle.steering._on_alarm = lambda engine, alarm: None
    for seq, name in enumerate(["release-1", *(f"batch-{number}" for number in range(MAX_WORKLOADS)), "release-1"], start=1):
        said[:] = [SimpleNamespace(workload=name)]
        idle.steering.put(engine, make_batch(seq), 600)
        idle.steering.observe()
    assert idle.steering.alarms["engine-0", "release-1"] == 2
    assert idle.steering.alarms["engine-0", OTHER_WORKLOAD] == 3, "their number is bounded"
    assert len(idle.steering.alarms) == MAX_WORKLOADS - 1
    idle.store.close()
