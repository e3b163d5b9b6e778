"""Samples on disk: what memory had no room for is still drawn, for as long as it may, and is gone when it has to be."""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch

from honed.adapt.protocol import workloads
from honed.recalib.config.trainer import SampleSettings
from honed.recalib.samples.hold_out import HoldOut
from honed.recalib.samples.ring_reader import RingReader
from honed.recalib.samples.spill import Spill, SpilledStretch
from honed.recalib.samples.store import SampleStore
from honed.recalib.samples.stretch import Stretch
from honed.recalib.samples.traffic import Traffic
from tests.recalib.samples.test_store import HOLD_OUT
from tests.recalib.samples.test_traffic import drain, ring_of
from tests.recalib.toy_traffic import WIDTH, write_sessions

ROWS, F = 40, 8
NUM_BYTES = ROWS * (4 + 4 + 2 * F)


def stretch(number: int, session: str = "", workload: str = "w") -> Stretch:
    rng = np.random.default_rng(number)
    ids = rng.permutation(5000)[:ROWS].astype(np.int32)
    features = rng.integers(0, 2**16, (ROWS, F)).astype(np.uint16)
    times = 1e9 + number, 1e9
    return Stretch(session or f"s{number}", workload, "v1", 100, ids, features, 3, (110, 112, 120), *times, "of v1", ids + 1)


class Clock:
    now_s = 1e9
    wrong_by_s = 0.0
    """The wall clock less the right time; the uptime is always right."""

    def __call__(self) -> float:
        self.now_s += 1e-3
        return self.now_s + self.wrong_by_s

    def uptime_s(self) -> float:
        self.now_s += 1e-3
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(tmp_path: Path, clock: Clock) -> Callable[..., SampleStore]:
    def one(kept: int = 10, max_bytes: int = 1 << 20, kind: str = "8-1-fused") -> SampleStore:
        spill = Spill(tmp_path / "samples", max_bytes, 3600.0, clock, clock.uptime_s)
        settings = SampleSettings(sample_bytes=kept * NUM_BYTES, max_session_share=1.0)
        store = SampleStore(settings, HOLD_OUT, spill=spill)
        spill.begin(kind, store.key_of)
        return store

    return one


def everything(store: SampleStore) -> list[Stretch]:
    return [s for w in store.workloads() for side in (False, True) for s in store.stretches(w, side)]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def same(one: Stretch, other: Stretch) -> bool:
    a, b = (s.read(slice(0, s.num_rows)) if isinstance(s, SpilledStretch) else s for s in (one, other))
    names = [field.name for field in fields(Stretch) if field.name not in ("token_ids", "likely", "features")]
    return (
        all(getattr(a, name) == getattr(b, name) for name in names)
        and a.token_ids.tolist() == b.token_ids.tolist()
        and (a.likely is b.likely is None or np.array_equal(a.likely, b.likely))
        and np.array_equal(a.features, b.features)
        and a.features.dtype == b.features.dtype
    )


def test_what_memory_gives_up_is_on_disk_on_its_own_side_and_the_same(make: Callable[..., SampleStore], tmp_path: Path) -> None:
    store = make()
    given = {f"s{i}": stretch(i, workload="ab"[i % 2]) for i in range(60)}
    for one in given.values():
        store.add(one)
    held = everything(store)
    assert len(held) == 60
    assert sum(isinstance(one, SpilledStretch) for one in held) == 50
    assert store.num_bytes <= 10 * NUM_BYTES
    assert all(same(one, given[one.session]) for one in held)
    for workload in "ab":
        for side in (False, True):
            assert all(HOLD_OUT.is_held_out(one.session) == side for one in store.stretches(workload, side))
            assert {one.workload for one in store.stretches(workload, side)} <= {workload}
    for path in files(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_drawn_from_disk_it_is_what_it_would_be_in_memory(make: Callable[..., SampleStore]) -> None:
    store, one = make(kept=1), stretch(1)
    store.add(one)
    store.add(stretch(2))
    spilled = next(s for s in everything(store) if isinstance(s, SpilledStretch))
    given = one if spilled.session == one.session else stretch(2)
    for window in (slice(0, ROWS), slice(7, 23)):
        assert same(spilled.cut(window), given.cut(window))
    a, b = (s.to_training_sample(True) for s in (spilled, given))
    assert torch.equal(a.features.view(torch.int16), b.features.view(torch.int16))
    assert torch.equal(a.positions, b.positions)
    assert a.break_positions == b.break_positions
    assert spilled.num_bytes < given.num_bytes / 2


def test_a_trainer_that_is_started_again_takes_up_what_is_there(make: Callable[..., SampleStore], tmp_path: Path) -> None:
    store = make()
    for i in range(40):
        store.add(stretch(i))
    spilled = {s.session: s for s in everything(store) if isinstance(s, SpilledStretch)}
    damaged = next(iter(spilled))
    spilled[damaged].path.write_bytes(spilled[damaged].path.read_bytes()[:50])
    (tmp_path / "samples" / "8-1-fused" / "00000000000000000001-ab.part").write_bytes(b"cut off")
    again = make()
    assert {s.session for s in everything(again)} == spilled.keys() - {damaged}
    assert all(same(one, spilled[one.session]) for one in everything(again))
    assert len(files(tmp_path)) == len(spilled) - 1
    assert again.spill is not None
    assert again.spill.num_bytes == sum(path.stat().st_size for path in files(tmp_path))


def test_labels_beyond_the_limit_are_other_to_a_trainer_that_is_started_again(
    make: Callable[..., SampleStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make(kept=1)
    for i in range(20):
        store.add(stretch(i, workload=f"label{i % 5}"))
    monkeypatch.setattr(workloads, "MAX_WORKLOADS", 4)
    again = make()
    assert len(again.workloads()) == 3
    for workload in again.workloads():
        assert {one.workload for side in (False, True) for one in again.stretches(workload, side)} == {workload}


def test_rows_of_another_kind_go(make: Callable[..., SampleStore], tmp_path: Path) -> None:
    store = make()
    for i in range(40):
        store.add(stretch(i))
    assert everything(make(kind="16-1-layers")) == []
    assert files(tmp_path) == []


def test_old_ones_and_too_many_go_oldest_first(make: Callable[..., SampleStore], tmp_path: Path, clock: Clock) -> None:
    store = make(max_bytes=12 * 1024)
    for i in range(60):
        store.add(stretch(i))
    assert store.spill is not None
    left = sum(path.stat().st_size for path in files(tmp_path))
    assert 6 * 1024 < left == store.spill.num_bytes <= 12 * 1024
    clock.now_s += 3590.0
    store.add(stretch(100))  # pushes one more out
    clock.now_s += 20.0
    store.spill.expire()
    (last,) = [s for s in everything(store) if isinstance(s, SpilledStretch)]
    assert files(tmp_path) == [last.path]


@pytest.mark.fault("a wall clock that is wrong")
def test_a_wrong_clock_neither_removes_nor_keeps(make: Callable[..., SampleStore], tmp_path: Path, clock: Clock) -> None:
    store = make()
    for i in range(15):
        store.add(stretch(i))
    before = files(tmp_path)
    clock.wrong_by_s = 1e9
    assert store.spill is not None
    store.spill.expire()
    assert sorted(files(tmp_path)) == sorted(before) != [], "a clock that jumps makes nothing old"
    for i in range(15, 25):
        store.add(stretch(i))
    clock.wrong_by_s = 0.0
    clock.now_s += 3500.0
    assert len(files(tmp_path)) > len(before)
    assert {s.path for s in everything(make()) if isinstance(s, SpilledStretch)} == set(before)
    assert sorted(files(tmp_path)) == sorted(before), "files of a time to come would stay for ever"


def test_while_an_operation_is_under_way_nothing_comes_or_goes(
    make: Callable[..., SampleStore], tmp_path: Path, clock: Clock
) -> None:
    store = make()
    for i in range(30):
        store.add(stretch(i))
    before = files(tmp_path)
    assert store.spill is not None
    store.spill.is_frozen = True
    for i in range(30, 60):
        store.add(stretch(i))
    clock.now_s += 7200.0
    store.spill.expire()
    assert sorted(files(tmp_path)) == sorted(before)
    store.spill.is_frozen = False
    store.spill.expire()
    assert files(tmp_path) == []


def test_a_workload_that_loses_its_name_leaves_the_disk_once_no_operation_may_have_chosen_it(
    make: Callable[..., SampleStore], tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workloads, "MAX_WORKLOADS", 4)
    store = make()
    for i in range(30):
        store.add(stretch(i, workload="ab"[i % 2]))
    assert store.spill is not None
    store.spill.is_frozen = True
    before = set(files(tmp_path))
    chosen = next(s for s in everything(store) if s.workload == "a" and isinstance(s, SpilledStretch))
    monkeypatch.setattr(store, "_monotonic", lambda: time.monotonic() + workloads.RECENT_S)
    store.add(stretch(30, workload="b"))
    store.add(stretch(31, workload="c"))
    assert store.workloads() == ["b", "c"]
    assert set(files(tmp_path)) == before
    assert same(chosen, stretch(int(chosen.session[1:]), workload="a"))
    store.spill.is_frozen = False
    store.spill.expire()
    left = {s.path for s in everything(store) if isinstance(s, SpilledStretch)}
    assert set(files(tmp_path)) == left < before
    assert store.spill.num_bytes == sum(path.stat().st_size for path in left)


def test_a_full_disk_loses_samples_and_nothing_else(
    make: Callable[..., SampleStore], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    store = make()
    monkeypatch.setattr("honed.recalib.samples.spill.save_file", full)
    for i in range(30):
        store.add(stretch(i))
    assert len(everything(store)) == store.num_stretches == 10
    monkeypatch.undo()
    for i in range(30, 40):
        store.add(stretch(i))
    assert len(everything(store)) > 10


def traffic_of(folder: Path, spill_bytes: int) -> Traffic:
    settings = SampleSettings(sample_bytes=40_000, spill_bytes=spill_bytes, max_session_share=1.0)
    return Traffic(folder, settings, HoldOut(b"k" * 16), folder / "state" / "samples")


def test_nothing_is_written_unless_it_is_allowed_and_what_was_goes(tmp_path: Path) -> None:
    write_sessions(ring_of(tmp_path), "a", 40)
    drain(traffic := traffic_of(tmp_path, 1 << 20))
    assert traffic.spilled_bytes == sum(path.stat().st_size for path in files(tmp_path / "state")) > 0
    drain(traffic_of(tmp_path, 0))
    assert files(tmp_path / "state") == []


@pytest.mark.parametrize("engines", [1, 2])
def test_a_purge_leaves_nothing_on_disk_in_memory_or_in_the_ring(tmp_path: Path, engines: int) -> None:
    for number in range(engines):
        write_sessions(ring_of(tmp_path, f"e{number}"), "a", 40)
    drain(gone := traffic_of(tmp_path, 1 << 20))
    assert gone.spilled_bytes > 0
    # A trainer that has not seen the second engine yet removes what an earlier one left of it, too.
    traffic = traffic_of(tmp_path, 1 << 20)
    traffic.feed(tmp_path / "engines" / "e0" / "ring").poll(1000)
    assert traffic.purge() == []
    assert files(tmp_path / "state") == []
    assert traffic.spilled_bytes == 0
    assert everything(traffic.feeds[0].store) == []
    for number in range(engines):
        assert RingReader(tmp_path / "engines" / f"e{number}" / "ring").poll(1000).records == []
    write_sessions(ring_of(tmp_path, "e0"), "a", 40, seed=3)
    drain(traffic)
    assert traffic.spilled_bytes > 0, "it goes on with what comes after"


def test_what_an_earlier_trainer_left_has_the_same_limit_of_bytes(tmp_path: Path) -> None:
    write_sessions(ring_of(tmp_path), "a", 40)
    drain(traffic_of(tmp_path, 1 << 20))
    before = {path: path.stat().st_size for path in files(tmp_path / "state")}
    shutil.rmtree(tmp_path / "engines")
    torn = tmp_path / "state" / "samples" / "x" / "y" / "odd.part"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"half")
    traffic = traffic_of(tmp_path, most := sum(before.values()) - 1)
    left = set(files(tmp_path / "state"))
    assert traffic.spilled_bytes == sum(before[path] for path in left) <= most
    assert before.keys() - left == {min(before, key=lambda path: path.name)}, "the oldest"
    assert not (tmp_path / "state" / "samples" / "x").exists()


def test_what_a_gone_engine_left_goes_after_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("gone", "back"):
        write_sessions(ring_of(tmp_path, name), "a", 40)
    drain(first := traffic_of(tmp_path, 1 << 20))
    (gone,) = (feed.store.spill for feed in first.feeds if feed.reader.path.parent.name == "gone")
    assert gone is not None
    assert files(gone.folder)
    shutil.rmtree(tmp_path / "engines" / "gone")
    drain(traffic := traffic_of(tmp_path, 1 << 20))
    traffic.expire()
    assert traffic.spilled_bytes == sum(path.stat().st_size for path in files(tmp_path / "state")), "each counts once"
    later_s = time.clock_gettime(time.CLOCK_BOOTTIME) + 86400.0
    monkeypatch.setattr(traffic._left, "_uptime", lambda: later_s)
    traffic.expire()
    assert not gone.folder.exists()
    assert traffic.spilled_bytes == sum(path.stat().st_size for path in files(tmp_path / "state")) > 0


def test_other_features_take_what_is_on_disk_along(tmp_path: Path) -> None:
    write_sessions(ring_of(tmp_path), "a", 40)
    drain(traffic := traffic_of(tmp_path, 1 << 20))
    assert traffic.spilled_bytes > 0
    ring_of(tmp_path, width=WIDTH * 2)
    drain(traffic)
    assert (traffic.spilled_bytes, files(tmp_path / "state")) == (0, [])
