"""Sums over a time: none of rounds that a wrong clock has dated later than now, all of those that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from honed.daemon.page import document
from honed.daemon.service import Service
from honed.daemon.settings.sections import StoreSettings
from honed.daemon.settings.settings import Settings, load
from honed.daemon.store import pruning
from honed.daemon.store.store import Store
from honed.daemon.views import views
from honed.daemon.views.findings import findings
from honed.daemon.views.views import MAX_POINTS, recent_by_engine, timeline
from tests.daemon.conftest import Clock, flags_in
from tests.daemon.fake_engine import make_batch
from tests.daemon.store.test_store import delete, insert, put, stored


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
    found = timeline(store, resolution, 0.0, clock.now, "")
    (point,) = found["points"]
    assert point["t"] > clock.now - MAX_POINTS * step_s
    assert found["since"] == int(clock.now) - MAX_POINTS * step_s


@pytest.mark.parametrize(("most", "since_s", "ages_s"), [(9, -9, (3, 2, 1)), (8, -2, (2, 1)), (6, -2, (2, 1)), (5, -1, (1,))])
def test_a_timeline_begins_with_a_whole_step_and_says_when(
    store: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch, most: int, since_s: int, ages_s: tuple[int, ...]
) -> None:
    """Its oldest step lacked some of its workloads, which looked like little traffic."""
    now, names = int(clock.now), ("chat", "code", "math")
    for seq, age_s in enumerate((3, 2, 1), 1):
        for name in names:
            batch = make_batch(seq, engine_id=f"for-{name}", workloads=[name], unix_ns=(now - age_s) * 10**9 + 5 * 10**8)
            put(store, stored(batch, now - age_s + 0.5))
    monkeypatch.setattr(views, "MAX_POINTS", most)
    found = timeline(store, "1s", 0.0, clock.now, "")
    assert found["since"] == now + since_s
    shown = [(point["t"] - now, point["workload"]) for point in found["points"]]
    assert [t for t, _ in shown] == sorted(t for t, _ in shown)
    assert set(shown) == {(-age_s, name) for age_s in ages_s for name in names}


@pytest.fixture
def settings(folder: Path) -> Settings:
    """Sums by second that are kept for less than the views' windows."""
    flags = flags_in(folder)
    kept = {"max_age_1s_s": 30.0, "max_age_1min_s": 1800.0}
    return load(None, flags | {"store": flags["store"] | kept}, env={})


def test_sums_are_of_the_whole_window_however_short_some_are_kept(service: Service) -> None:
    now = service.clock()
    for seq, moment_s in ((1, now - 50.0), (2, now - 10.0), (3, now - 3000.0)):
        put(service.store, stored(make_batch(seq, unix_ns=int(moment_s * 1e9)), moment_s))
    for resolution, age_s in ((1, 30), (60, 1800)):  # as pruned
        delete = f"DELETE FROM rollups WHERE resolution_s = {resolution} AND bucket_s < {int(now) - age_s}"
        service.store.write(lambda db, delete=delete: db.conn.execute(delete) and None)  # type: ignore[misc]
    recent, tokens_per_s = recent_by_engine(service.store, now)["engine-0"]
    assert recent.rounds == 16
    assert 0.0 < tokens_per_s < 1.0
    assert [views.workloads(service, window_s)[0]["rounds"] for window_s in (60.0, 600.0, 3600.0, 0.0)] == [16, 16, 24, 24]
    for window, rounds in (("5min", 16), ("1h", 24), ("7d", 24)):
        found = document.document(service, window)
        assert sum(row["rounds"] for row in found["workloads"]) == rounds
        assert sum(sum(line["rounds"]) for line in found["acceptance"]) == rounds


@pytest.mark.parametrize(
    ("ages", "span_s", "finest_s", "resolution"),
    [
        ((0, 0, 0), 1e12, 1, 1),
        ((60, 3600, 0), 60, 1, 1),
        ((60, 3600, 0), 61, 1, 60),
        ((60, 3600, 0), 60, 3600, 3600),
        ((60, 3600, 7200), 1e6, 1, 3600),
        ((60, 0, 7200), 1e6, 3600, 60),
    ],
)
def test_the_finest_sums_that_are_kept_for_so_long(
    folder: Path, ages: tuple[float, float, float], span_s: float, finest_s: int, resolution: int
) -> None:
    store = Store(folder / "honed.db", StoreSettings(max_age_1s_s=ages[0], max_age_1min_s=ages[1], max_age_1h_s=ages[2]))
    assert store.finest_kept(span_s, finest_s) == resolution
    store.close()


@pytest.mark.fault("sums of rounds that fill the disk")
def test_a_status_says_how_far_sums_go_back_that_went_by_size(service: Service) -> None:
    now, store = service.clock(), service.store
    for seq, age_s in ((1, 20.0), (2, 5.0)):
        insert(store, stored(make_batch(seq, unix_ns=int((now - age_s) * 1e9)), now - age_s), age_s)
    before = findings(views.status(service))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pruning, "ROLLUPS_AT_ONCE", 1)
        delete(store, StoreSettings(max_rollup_bytes=store.rollup_bytes - 1))
    status = views.status(service)
    assert list(status["cut_sums"]) == ["1s"]
    assert 5.0 < status["cut_sums"]["1s"] < 30.0
    assert status["store"]["rollup_bytes"] == store.rollup_bytes
    (found,) = [one for one in findings(status) if one not in before]
    assert "1s for 0 minutes" in found.text
