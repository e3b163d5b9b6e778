"""Rings are found, followed, and forgotten when they must be."""

import shutil
import time

import numpy as np
import pytest

from honed.attach.capture.ring_writer import RingWriter
from honed.recalib.config.trainer import SampleSettings
from honed.recalib.samples import ring_reader
from honed.recalib.samples.hold_out import HoldOut
from honed.recalib.samples.selection import Selection
from honed.recalib.samples.traffic import GONE_S, POLL_S, Traffic
from tests.recalib.toy_traffic import WIDTH, write_sessions


def follow(tmp_path, **settings):
    return Traffic(tmp_path, SampleSettings(**settings), HoldOut(b"k" * 16))


def drain(traffic):
    traffic.discover()
    while traffic.poll():
        pass


def ring_of(tmp_path, engine="e0", width=WIDTH, target=0):
    return RingWriter(tmp_path / "engines" / engine / "ring", 1 << 21, width, target=target)


def test_rings_that_appear_later_are_found_and_share_the_memory(tmp_path):
    traffic = follow(tmp_path, sample_bytes=1000)
    drain(traffic)
    assert traffic.feeds == []
    for engine in ("e0", "e1"):
        ring_of(tmp_path, engine)
        drain(traffic)
    assert [feed.store.cap_bytes for feed in traffic.feeds] == [500, 500]


def test_engines_may_be_learned_from_together_if_their_rows_are_alike(tmp_path):
    widths = {"e0": WIDTH, "e1": WIDTH, "wider": 2 * WIDTH, "silent": WIDTH}
    rings = [ring_of(tmp_path, name, width) for name, width in widths.items()]
    traffic = follow(tmp_path)
    joint = traffic.joint([ring.path for ring in (rings[3], *rings[:3])])
    assert (joint.store.workloads(), joint.is_fused) == ([], True)
    write_sessions(rings[0], "a", 30)
    write_sessions(rings[1], "b", 20)
    rings[2].write_rows("r", "c", "v", 0, np.arange(50, dtype=np.int32), np.zeros((50, 2 * WIDTH), np.uint16), 0, "s")
    rings[2].write_end("r", "c")
    drain(traffic)
    assert traffic.feed(rings[2].path).store.workloads() == ["c"]
    assert joint.store.workloads() == ["a", "b"]
    held = [one for workload in "ab" for side in (False, True) for one in joint.store.stretches(workload, side)]
    assert len({one.session for one in held}) == 50
    assert joint.store.digest(held) == joint.store.digest(held[::-1])


def test_all_engines_together_hold_no_more_than_the_limit(tmp_path):
    traffic = follow(tmp_path, sample_bytes=60_000)
    for engine in range(5):
        write_sessions(ring_of(tmp_path, f"e{engine}"), "a", 60)
        drain(traffic)
        assert sum(feed.store.num_bytes for feed in traffic.feeds) <= 60_000
    assert all(feed.store.num_stretches for feed in traffic.feeds)


def test_unfinished_requests_of_all_engines_together_hold_an_eighth_of_the_limit(tmp_path):
    traffic = follow(tmp_path, sample_bytes=32 << 20)
    rings = [ring_of(tmp_path, f"e{i}", 1 << 12) for i in range(4)]
    drain(traffic)
    for at in range(0, 60, 10):
        for ring in rings:
            for name in "abcdef":
                ring.write_rows(name, "a", "", at, np.arange(10, dtype=np.int32), np.zeros((10, 1 << 12), np.uint16))
                drain(traffic)
    assert 2 << 20 < sum(feed.num_bytes - feed.store.num_bytes for feed in traffic.feeds) <= 4 << 20


def test_an_engine_that_is_gone_for_good_takes_no_memory(tmp_path):
    clock = [0.0]
    traffic = Traffic(tmp_path, SampleSettings(sample_bytes=20_000), HoldOut(b"k" * 16), monotonic=lambda: clock[0])
    for engine in ("e0", "e1"):
        ring = ring_of(tmp_path, engine)
        write_sessions(ring, "a", 10)
        spoilt = np.full((3, WIDTH), 0x7FC0, np.uint16)  # NaN
        ring.write_rows("spoilt", "a", "", 0, np.arange(3, dtype=np.int32), spoilt)
    drain(traffic)
    shutil.rmtree(tmp_path / "engines" / "e0")
    drain(traffic)
    clock[0] += 0.9 * GONE_S
    ring_of(tmp_path, "e0")  # it was only restarted
    drain(traffic)
    shutil.rmtree(tmp_path / "engines" / "e0")
    clock[0] += 0.9 * GONE_S
    drain(traffic)
    assert len(traffic.feeds) == 2
    clock[0] += 1.1 * GONE_S
    drain(traffic)
    (left,) = traffic.feeds
    assert left.reader.path == tmp_path / "engines" / "e1" / "ring"
    assert left.store.cap_bytes == 20_000
    assert left.reader.nonfinite_rows == 3
    assert traffic.num_missing()["nonfinite_rows"] == 6, "a counter fell when a feed went"


def test_what_the_ring_held_before_it_was_followed_came_since_the_ring_was_made(tmp_path):
    """A trainer that was restarted reads again what it had read, and must not take it for news."""
    made_s = time.time()
    ring = ring_of(tmp_path)
    write_sessions(ring, "a", 10)
    traffic = follow(tmp_path)
    drain(traffic)
    before = time.time()
    write_sessions(ring, "a", 10, seed=1)
    drain(traffic)
    store = traffic.feeds[0].store
    came_s = [(one.earliest_s, one.taken_s) for side in (False, True) for one in store.stretches("a", side)]
    old = [one for one in came_s if one[0] < one[1]]
    assert (len(old), len(came_s)) == (10, 20)
    assert all(made_s <= earliest_s < latest_s <= before for earliest_s, latest_s in old)
    assert all(before <= one[0] <= time.time() for one in came_s if one not in old)

    def chosen(since_s):
        """Numbers of samples that must gain, and of earlier ones."""
        parts = Selection(store, lambda one: True, ["a"], since_s)
        return tuple(sum(len(parts.stretches(name, side)) for side in (False, True)) for name in ("a", "a (earlier)"))

    assert chosen(made_s) == (20, 0), "the ring is younger than the change"
    assert chosen((old[0][0] + old[0][1]) / 2) == (10, 0), "those that may be of either time are neither"
    assert chosen(before) == (10, 10)


def test_all_that_the_ring_held_is_old_however_many_polls_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(ring_reader, "MOST_POLL_BYTES", 1 << 14)
    ring = ring_of(tmp_path)
    write_sessions(ring, "a", 20)
    traffic = follow(tmp_path)
    traffic.discover()
    feed = traffic.feeds[0]
    assert 0 < feed.poll(256) < 256, "it ends for the bytes"
    write_sessions(ring, "a", 10, seed=1)
    drain(traffic)
    are_old = [one.earliest_s < one.taken_s for side in (False, True) for one in feed.store.stretches("a", side)]
    assert (len(are_old), sum(are_old)) == (30, 20)


def test_a_poll_reads_all_there_is_unless_that_takes_too_long(tmp_path):
    rings = [ring_of(tmp_path, name) for name in ("e0", "e1")]
    for ring in rings:
        write_sessions(ring, "a", 40)
    clock = iter([0.0, 0.0, 0.0, POLL_S, 9.0])
    traffic = Traffic(tmp_path, SampleSettings(), HoldOut(b"k" * 16), monotonic=lambda: next(clock))
    traffic.discover()
    assert traffic.poll(16) == 2 * 2 * 16
    traffic._monotonic = lambda: 9.0
    assert traffic.poll(16) == sum(ring._num_records for ring in rings) - 64


def test_samples_survive_an_engine_that_restarts_with_the_same_model(tmp_path):
    traffic = follow(tmp_path)
    write_sessions(ring_of(tmp_path), "a", 10)
    drain(traffic)
    write_sessions(ring_of(tmp_path), "a", 10, seed=1)
    drain(traffic)
    assert traffic.feeds[0].store.num_stretches == 20


def test_another_feature_width_makes_the_old_samples_useless(tmp_path):
    traffic = follow(tmp_path)
    write_sessions(ring_of(tmp_path), "a", 10)
    drain(traffic)
    ring_of(tmp_path, width=WIDTH * 2)
    drain(traffic)
    assert traffic.feeds[0].num_bytes == 0


@pytest.mark.parametrize("is_trainer_new", [False, True])
def test_another_target_makes_the_old_samples_useless(tmp_path, is_trainer_new):
    """Its features are of the same shape and mean something else; so do those on disk."""

    def made():
        settings = SampleSettings(sample_bytes=40_000, spill_bytes=1 << 20, max_session_share=1.0)
        return Traffic(tmp_path, settings, HoldOut(b"k" * 16), tmp_path / "samples")

    traffic = made()
    write_sessions(ring_of(tmp_path, target=7), "a", 40)
    drain(traffic)
    joint = traffic.joint([traffic.feeds[0].reader.path])
    assert joint.store.workloads() == ["a"]
    assert traffic.spilled_bytes > 0
    write_sessions(ring_of(tmp_path, target=8), "b", 10)
    drain(made() if is_trainer_new else traffic)
    assert list((tmp_path / "samples").rglob("*-00000007/*")) == []
    if not is_trainer_new:
        assert traffic.feeds[0].store.workloads() == ["b"]
        assert joint.store.workloads() == [], "an operation doesn't go over to the other one"


def test_request_that_was_cut_off_by_a_restart_is_kept(tmp_path):
    traffic = follow(tmp_path)
    ring = ring_of(tmp_path)
    write_sessions(ring, "a", 1)
    ring.write_rows("open", "a", "", 0, np.arange(40, dtype=np.int32), np.zeros((40, WIDTH), np.uint16))
    drain(traffic)
    assert traffic.feeds[0].store.num_stretches == 1
    ring_of(tmp_path)
    drain(traffic)
    assert traffic.feeds[0].store.num_stretches == 2


def test_purge_empties_memory_and_ring(tmp_path):
    traffic = follow(tmp_path)
    ring = ring_of(tmp_path)
    write_sessions(ring, "a", 10)
    traffic.discover()
    traffic.feeds[0].poll(5)
    traffic.purge()
    drain(traffic)
    assert traffic.feeds[0].num_bytes == 0
    assert b"a0-9" not in ring.path.read_bytes()
    write_sessions(ring, "a", 3, seed=1)
    drain(traffic)
    assert traffic.feeds[0].store.num_stretches == 3
