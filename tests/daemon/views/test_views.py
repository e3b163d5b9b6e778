"""Rounds that a wrong clock has dated later than now aren't recent."""

from __future__ import annotations

import pytest

from honed.daemon.store.store import Store
from honed.daemon.views.views import MAX_POINTS, recent_by_engine, timeline
from tests.daemon.conftest import Clock
from tests.daemon.fake_engine import make_batch
from tests.daemon.store.test_store import put, stored


@pytest.mark.fault("rounds dated later than now")
def test_rounds_of_a_time_to_come_are_not_recent(store: Store, clock: Clock) -> None:
    for seq, moment_s in ((1, clock.now + 86400.0), (2, clock.now - 5.0)):
        put(store, stored(make_batch(seq, unix_ns=int(moment_s * 1e9)), moment_s))
    counts, _ = recent_by_engine(store, clock.now)["engine-0"]
    assert counts.rounds == 8
    points = timeline(store, "1s", clock.now - 60.0, clock.now, "")["points"]
    assert sum(point["rounds"] for point in points) == 8


@pytest.mark.fault("a reader that holds up engines")
@pytest.mark.parametrize(("resolution", "step_s"), [("1s", 1), ("1min", 60), ("1h", 3600)])
def test_a_timeline_goes_back_as_far_as_it_has_points(store: Store, clock: Clock, resolution: str, step_s: int) -> None:
    for seq, steps_ago in ((1, MAX_POINTS + 2), (2, MAX_POINTS - 2)):
        moment_s = clock.now - steps_ago * step_s
        put(store, stored(make_batch(seq, unix_ns=int(moment_s * 1e9)), moment_s))
    (point,) = timeline(store, resolution, 0.0, clock.now, "")["points"]
    assert point["t"] > clock.now - MAX_POINTS * step_s
