"""The sample ring, writer and reader together: what comes out is what went in, or is counted as missing."""

import multiprocessing
import os
import stat
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.adapt.protocol.sample_ring import (
    FLAG_GAP,
    FLAG_PREFILL,
    FLAG_REJECTED,
    HEADER_BYTES,
    KIND_END,
    MAX_CAPACITY_BYTES,
    MAX_FEATURE_SIZE,
    RECORD_BYTES,
    unpack_header,
)
from honed.attach.capture.ring_writer import RingWriter
from honed.recalib.samples.ring_reader import RingReader
from tests.full_tmpfs import run_on_tmpfs

F = 6


def make(path, capacity=1 << 18, dtype="float32"):
    return RingWriter(path, capacity, F, dtype, "fused")


def rows(first, count, dtype=np.float32):
    """Rows whose every value tells which position it belongs to."""
    ids = np.arange(first, first + count, dtype=np.int32)
    return ids, (ids[:, None] * 10 + np.arange(F)).astype(dtype)


def write(ring, first, count, request="r", **more):
    ids, features = rows(first, count)
    ring.write_rows(request, "w", "v0001-00000000", first, ids, features, **more)


def drain(reader):
    records = []
    while news := reader.poll().records:
        records += news
    return records


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ring"


@pytest.mark.parametrize(("dtype", "row_dtype"), [("float32", np.float32), ("float16", np.float16), ("bfloat16", np.uint16)])
def test_rows_come_out_as_they_went_in(path, dtype, row_dtype):
    ring = make(path, dtype=dtype)
    ids, features = rows(7, 5, row_dtype)
    ring.write_rows("req", "code", "v0002-aaaaaaaa", 7, ids, features, FLAG_PREFILL, session="s")
    likely = np.array([3, -1, 7, 0, 9], np.int32)
    ring.write_rows("req", "code", "v0002-aaaaaaaa", 12, ids, features, likely=likely)
    ring.write_end("req", "code")
    first, second, end = drain(RingReader(path))
    assert first.likely.tolist() == [-1] * 5
    np.testing.assert_array_equal(second.likely, likely)
    np.testing.assert_array_equal(second.features, features)
    assert (first.request, first.session, first.workload) == ("req", "s", "code")
    assert first.drafter_version == "v0002-aaaaaaaa"
    assert (first.flags, first.first_position) == (FLAG_PREFILL, 7)
    np.testing.assert_array_equal(first.token_ids, ids)
    np.testing.assert_array_equal(first.features, features)
    assert (end.kind, end.request, len(end.token_ids)) == (KIND_END, "req", 0)


def test_session_is_the_request_when_there_is_none(path):
    write(make(path), 0, 3, request="only")
    assert drain(RingReader(path))[0].session == "only"


def test_file_is_private_and_wholly_allocated(path):
    make(path, 1 << 16)
    status = os.stat(path)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_size == HEADER_BYTES + (1 << 16)
    assert status.st_blocks * 512 >= status.st_size
    assert unpack_header(path.read_bytes()).capacity_bytes == 1 << 16


@pytest.mark.parametrize(("dtype", "kind", "capacity"), [("int8", "fused", 1 << 16), ("float32", "x", 1 << 16)])
def test_unknown_kinds_are_refused(path, dtype, kind, capacity):
    with pytest.raises(ValueError, match="is none of"):
        RingWriter(path, capacity, F, dtype, kind)


def test_too_small_a_ring_is_refused_and_leaves_no_file(path):
    with pytest.raises(ValueError, match="too small"):
        make(path, 4096)
    assert list(path.parent.iterdir()) == []


def test_misaligned_rows_are_refused(path):
    ring = make(path)
    ids, features = rows(0, 4)
    for bad in (features[:3], features[:, :2], features.astype(np.float16)):
        with pytest.raises(ValueError, match="the ring holds"):
            ring.write_rows("r", "w", "", 0, ids, bad)
    assert drain(RingReader(path)) == []


def test_long_stretch_is_split_and_only_its_beginning_is_a_gap(path):
    write(make(path), 100, 2000, flags=FLAG_GAP | FLAG_PREFILL)
    records = drain(RingReader(path))
    assert len(records) > 1
    assert [r.flags for r in records] == [FLAG_GAP | FLAG_PREFILL] + [FLAG_PREFILL] * (len(records) - 1)
    np.testing.assert_array_equal(np.concatenate([r.token_ids for r in records]), np.arange(100, 2100))
    assert [r.first_position for r in records] == [int(r.token_ids[0]) for r in records]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=150),
    polls=st.lists(st.booleans(), min_size=150, max_size=150),
    capacity=st.integers(1 << 15, 1 << 16),
)
def test_everything_is_read_or_counted_as_lost(tmp_path_factory, sizes, polls, capacity):
    """For any sizes, any wrap, any slowness: read + lost = written, in order, and every row is whole."""
    path = tmp_path_factory.mktemp("ring") / "ring"
    ring, position, got = make(path, capacity), 0, []
    reader = RingReader(path)
    reader.poll(0)
    for size, is_polling in zip(sizes, polls, strict=False):
        write(ring, position, size)
        position += size
        if is_polling:
            got += reader.poll(1).records
    got += drain(reader)
    assert reader.bad_records == 0
    assert len(got) + reader.lost_records == ring._num_records
    positions = [r.first_position for r in got]
    assert positions == sorted(set(positions))
    for record in got:
        ids, features = rows(record.first_position, len(record.token_ids))
        np.testing.assert_array_equal(record.token_ids, ids)
        np.testing.assert_array_equal(record.features, features)
    assert got[-1].first_position + len(got[-1].token_ids) == position


def test_reader_that_comes_late_gets_what_is_still_there(path):
    ring = make(path, 1 << 16)
    for i in range(500):
        write(ring, 20 * i, 20)
    records = drain(RingReader(path))
    record_bytes = 20 * (8 + 4 * F) + RECORD_BYTES + 24
    assert len(records) > 0.8 * (1 << 16) / record_bytes  # not only the lap that was begun last
    assert records[-1].first_position == 20 * 499


@pytest.mark.parametrize("capacity", [1 << 15, 40_000, 50_016])
def test_reader_that_comes_at_any_moment_never_meets_rows_of_an_earlier_lap(path, capacity):
    """What lay under a PAD record was a sound record once: a reader that looked for its place there found it again."""
    ring, rng, position = make(path, capacity), np.random.default_rng(0), 0
    for _ in range(600):
        size = int(rng.integers(1, 60))
        write(ring, position, size)
        position += size
        ends = [(r.first_position, r.first_position + len(r.token_ids)) for r in drain(RingReader(path))]
        assert [first for first, _ in ends[1:]] == [end for _, end in ends[:-1]]
        assert ends[-1][1] == position


def test_slow_reader_is_overtaken_and_counts_it(path):
    ring = make(path, 1 << 16)
    write(ring, 0, 20)
    reader = RingReader(path)
    assert len(drain(reader)) == 1
    for i in range(1, 400):
        write(ring, 20 * i, 20)
    got = drain(reader)
    assert reader.lost_records == 399 - len(got) > 0
    assert reader.bad_records == 0
    record_bytes = 20 * (8 + 4 * F) + RECORD_BYTES + 24
    assert 0.3 < len(got) * record_bytes / (1 << 16) < 0.5, "it jumps too little: soon it is overtaken again"


def test_reader_waits_for_a_ring_and_follows_one_that_is_replaced(path):
    reader = RingReader(path)
    assert reader.poll().records == []
    old = make(path)
    write(old, 0, 2)
    news = reader.poll()
    assert news.is_new_ring
    assert len(news.records) == 1
    write(old, 2, 2)
    new = make(path)
    write(new, 500, 3)
    assert [r.first_position for r in reader.poll().records] == [2]  # what the old engine left
    news = reader.poll()
    assert news.is_new_ring
    assert [r.first_position for r in news.records] == [500]
    os.unlink(path)
    write(new, 503, 1)
    assert [r.first_position for r in reader.poll().records] == [503]


def test_erasing_by_the_reader_leaves_no_bytes_and_the_writer_goes_on(path):
    ring = make(path)
    write(ring, 0, 50, request="secret")
    reader, other = RingReader(path), RingReader(path)
    other.poll(0)
    assert reader.erase() == ""
    assert b"secret" not in path.read_bytes()
    write(ring, 50, 2, request="later")
    assert [r.request for r in drain(reader)] == ["later"]
    assert other.poll().is_purged
    assert (reader.lost_records, reader.bad_records) == (0, 0)


@pytest.mark.parametrize("where", ["magic", "payload", "sizes"])
def test_damaged_record_is_counted_and_the_next_ones_are_read(path, where):
    ring = make(path)
    for i in range(4):
        write(ring, 10 * i, 10)
    size = (unpack_header(path.read_bytes()).written) // 4
    with path.open("r+b") as file:
        at = HEADER_BYTES + size + {"magic": 0, "payload": RECORD_BYTES + 40, "sizes": 16}[where]
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x55]))
    reader = RingReader(path)
    assert [r.first_position for r in drain(reader)] == [0, 20, 30]
    assert reader.bad_records == 1


@pytest.mark.parametrize("length", [0, 100, HEADER_BYTES + 100])
def test_file_that_is_cut_off_is_an_error_not_a_crash(path, length):
    make(path)
    os.truncate(path, length)
    reader = RingReader(path)
    assert reader.poll().records == []
    assert "cut off" in reader.error
    make(path)
    assert reader.poll().is_new_ring
    assert reader.error == ""


def _write_many(path, count, capacity):
    ring = make(path, capacity)
    rng = np.random.default_rng(0)
    position = 0
    for _ in range(count):
        size = int(rng.integers(1, 80))
        write(ring, position, size)
        position += size
    ring.write_end("r", "w")


def test_two_processes_never_see_a_torn_row(path):
    """A writer at full speed laps the reader again and again; whatever the reader hands out is whole and in order."""
    context = multiprocessing.get_context("spawn")
    count = 20_000
    child = context.Process(target=_write_many, args=(path, count, 1 << 17))
    child.start()
    reader, got, last, is_over = RingReader(path), 0, -1, False
    while not is_over:
        if not child.is_alive() and not path.exists():
            pytest.fail("the writer died")
        for record in reader.poll().records:
            got += 1
            if record.kind == KIND_END:
                is_over = True
                continue
            assert record.first_position > last
            last = record.first_position
            ids, features = rows(last, len(record.token_ids))
            assert np.array_equal(record.token_ids, ids)
            assert np.array_equal(record.features, features)
    child.join()
    assert reader.bad_records == 0
    # What was overwritten before the reader had met its first record can't be counted, only what follows it.
    assert count + 1 >= got + reader.lost_records > 0


HURT = """
import errno, os, sys
from pathlib import Path
import numpy as np
from honed.attach.capture.ring_writer import RingWriter
from honed.recalib.samples.ring_reader import RingReader
path = Path(sys.argv[1])
ring, reader = RingWriter(path, 1 << 18, 6, "float32"), RingReader(path)
def write(first):
    ring.write_rows("r", "w", "v", first, np.arange(first, first + 100, dtype=np.int32), np.ones((100, 6), np.float32))
def positions():
    return [record.first_position for record in reader.poll().records]
"""


def survives(path, script):
    """Run a script in a process of its own, which a signal may end; see HURT for its names."""
    done = subprocess.run([sys.executable, "-c", HURT + script, path], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)


@pytest.mark.fault("files that are cut off while they are in use")
@pytest.mark.parametrize("length", [0, HEADER_BYTES, HEADER_BYTES + 6800])
def test_ring_that_is_cut_off_ends_neither_writer_nor_reader(path, length):
    """Through a map, its next byte was a SIGBUS: vLLM ended without a word, and the trainer alike."""
    survives(
        path,
        f"""
write(0)
assert positions() == [0]
for first in range(100, 500, 100):
    write(first)
os.truncate(path, {length})
kept = positions()
assert kept == {[100] if length > HEADER_BYTES else []}, kept
assert "cut off" in reader.error
write(500)
assert positions() == [500]
assert "cut off" in reader.error
assert reader.lost_records + reader.bad_records > 0
assert [record.first_position for record in RingReader(path).poll().records][-1] == 500
for first in range(600, 20_000, 100):
    write(first)
    assert positions() == [first]
assert reader.error == "", "it fills again"
""",
    )


@pytest.mark.fault("files that are cut off while they are in use")
def test_ring_that_is_cut_off_while_it_is_erased_ends_nobody(path):
    survives(
        path,
        """
for first in range(0, 5000, 100):
    write(first)
reader.poll(0)
os.truncate(path, 5000)
assert reader.erase() == ""
assert not any(path.read_bytes()[4096:])
pwrite = os.pwrite
def cut_and_write(*args):  # in the midst of it
    os.truncate(path, 4096)
    return pwrite(*args)
write(5000)
os.pwrite = cut_and_write
assert reader.erase() == ""
os.pwrite = pwrite
assert not any(path.read_bytes()[4096:])
write(5100)
assert positions() == [5100]
""",
    )


@pytest.mark.fault("a full tmpfs under the sample ring")
def test_full_filesystem_is_an_error_and_the_ring_goes_on(tmp_path):
    """A ring whose memory was taken from it, on a tmpfs that has no more: through a map that was a SIGBUS."""
    script = (
        HURT
        + """
write(0)
os.truncate(path, 0)
filler = open(path.with_name("filler"), "wb", buffering=0)
try:
    while filler.write(bytes(4096)):
        pass
except OSError as error:
    assert error.errno == errno.ENOSPC
for first in (100, 200):
    try:
        write(first)
    except OSError as error:
        assert error.errno == errno.ENOSPC
    else:
        raise AssertionError("there was room")
try:
    RingWriter(path.with_name("other"), 1 << 18, 6, "float32")
except OSError as error:
    assert error.errno == errno.ENOSPC
else:
    raise AssertionError("there was room")
assert sorted(os.listdir(path.parent)) == ["filler", "ring"]
os.truncate(path.with_name("filler"), 0)
write(300)
assert positions() == [300]
assert ring._num_records == 2
"""
    )
    run_on_tmpfs(tmp_path, "512k", script, f"{tmp_path}/ring")


@pytest.mark.fault("files that are cut off while they are in use")
def test_no_side_keeps_a_map_of_the_ring(path):
    """Whatever happens to the file, no address of these processes is backed by it."""
    ring = make(path)
    write(ring, 0, 50)
    reader = RingReader(path)
    assert len(drain(reader)) == 1
    reader.erase()
    with open("/proc/self/maps") as maps:
        assert str(path) not in maps.read()


@pytest.mark.parametrize(("capacity", "size"), [(MAX_CAPACITY_BYTES + 8, F), (1 << 30, MAX_FEATURE_SIZE + 1)])
def test_a_ring_that_no_reader_would_accept_is_not_made(path, capacity, size):
    with pytest.raises(ValueError, match="HONED_RING_BYTES"):
        RingWriter(path, capacity, size)
    assert list(path.parent.iterdir()) == []


NAN_BITS = 0x7FC0


@pytest.mark.fault("captured rows that aren't finite")
@pytest.mark.parametrize(
    ("dtype", "row_dtype", "nan"),
    [("float32", np.float32, np.nan), ("float16", np.float16, -np.inf), ("bfloat16", np.uint16, NAN_BITS)],
)
def test_rows_that_are_not_finite_are_left_out_and_counted(path, dtype, row_dtype, nan):
    """A ring's writer may be damaged or of another version: the reader doesn't rely on it."""
    ring = make(path, dtype=dtype)
    ids, features = rows(7, 6, row_dtype)
    features[2, 1] = features[3, 0] = nan
    ring.write_rows("r", "w", "", 7, ids, features, FLAG_GAP | FLAG_REJECTED, likely=ids + 1)
    broken = np.full_like(features, nan)
    ring.write_rows("r", "w", "", 13, ids + 6, broken)
    reader = RingReader(path)
    first, second = drain(reader)
    assert (first.token_ids.tolist(), second.token_ids.tolist()) == ([7, 8], [11, 12])
    assert (first.likely.tolist(), second.likely.tolist()) == ([8, 9], [12, 13])
    assert (first.first_position, second.first_position) == (7, 11)
    assert (first.flags & FLAG_REJECTED, second.flags & FLAG_REJECTED) == (0, FLAG_REJECTED)
    np.testing.assert_array_equal(second.features, features[4:])
    assert (reader.nonfinite_rows, reader.bad_records, reader.lost_records) == (8, 0, 0)


@pytest.mark.fault("captured tokens outside the vocabulary")
def test_token_ids_below_zero_are_a_bad_record(path):
    ring = make(path)
    ids, features = rows(0, 3)
    ring.write_rows("r", "w", "", 0, ids - 2, features)
    reader = RingReader(path)
    assert drain(reader) == []
    assert reader.bad_records == 1
