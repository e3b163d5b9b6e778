"""Rounds that a wrong clock has dated later than now aren't recent."""

from __future__ import annotations

import pytest

from honed.daemon.store.store import Store
from honed.daemon.views.views import recent_by_engine, timeline
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
