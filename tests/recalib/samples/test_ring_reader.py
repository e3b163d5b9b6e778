"""Files that no writer of ours made, at a ring's place: the reader refuses them by name, goes on, and does no harm."""

from __future__ import annotations

import dataclasses
import os
import random
import socket
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from honed.adapt.protocol.sample_ring import (
    HEADER_BYTES,
    KIND_END,
    KIND_ROWS,
    MAX_CAPACITY_BYTES,
    RECORD_BYTES,
    RecordHeader,
    pack_fixed,
    pack_record,
    pack_rows_head,
    pack_state,
    unpack_header,
)
from honed.attach.capture.ring_writer import RingWriter
from honed.recalib.config.trainer import SampleSettings
from honed.recalib.samples import ring_reader
from honed.recalib.samples.hold_out import HoldOut
from honed.recalib.samples.ring_reader import RingReader
from honed.recalib.samples.traffic import Traffic

F = 6
CAPACITY = 1 << 18
SECRET = b"a-session-to-keep"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "engines" / "e0" / "ring"


def make(path: Path, records: int = 5) -> RingWriter:
    ring = RingWriter(path, CAPACITY, F, "float32")
    for first in range(0, 20 * records, 20):
        write(ring, first)
    return ring


def write(ring: RingWriter, first: int, count: int = 20) -> None:
    ids = np.arange(first, first + count, dtype=np.int32)
    ring.write_rows("r", "w", "v", first, ids, np.ones((count, F), np.float32), session=SECRET.decode())


def firsts(reader: RingReader, polls: int = 1) -> list[int]:
    return [record.first_position for _ in range(polls) for record in reader.poll().records]


def forge(path: Path, **fields: int) -> None:
    """Give a ring another header, with the right CRC."""
    with path.open("r+b", buffering=0) as file:
        header = dataclasses.replace(unpack_header(file.read(HEADER_BYTES)), **fields)
        os.pwrite(file.fileno(), pack_state(pack_fixed(header), header.written), 0)
        os.truncate(path, HEADER_BYTES + min(header.capacity_bytes, 1 << 40))


def forge_record(path: Path, place: int, payload: bytes = b"", **fields: Any) -> None:
    """Put a record with the right CRC at a place."""
    known = {"kind": KIND_END, "flags": 0, "seq": 0, "num_rows": 0, "head_bytes": 0}
    given = known | {"first_position": 0, "offset": place, "payload_bytes": len(payload)} | fields
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES + place)
        file.write(pack_record(RecordHeader(**given), [payload]) + payload)


def blocks(path: Path) -> int:
    """Bytes that a file has on its filesystem."""
    return os.stat(path).st_blocks * 512


@pytest.mark.fault("a ring that no writer made")
@pytest.mark.parametrize(
    "fields",
    [
        {"capacity_bytes": 0},
        {"capacity_bytes": 1 << 50},
        {"capacity_bytes": 2**64 - 8},
        {"capacity_bytes": CAPACITY + 4},
        {"feature_size": 0},
        {"feature_size": 2**32 - 1},
        {"feature_dtype": 0},
        {"feature_kind": 77},
        {"written": 12345},
        {"written": 2**64 - 1},
    ],
    ids=str,
)
def test_a_header_that_no_writer_makes_is_named_once_with_a_cure_and_other_rings_go_on(
    path: Path, fields: dict[str, int]
) -> None:
    make(path)
    other = path.parents[1] / "e1" / "ring"
    make(other)
    forge(path, **fields)
    traffic = Traffic(path.parents[2], SampleSettings(), HoldOut(b"k" * 16))
    traffic.discover()
    with capture_logs() as logs:
        assert [traffic.poll() for _ in range(3)] == [5, 0, 0]
    (line,) = logs
    assert line["event"] == traffic.feed(path).reader.error
    assert line["event"].startswith(f"sample ring {path}: it")
    assert "stop its engine and remove the file" in line["event"]
    make(path)
    assert traffic.poll() == 5
    assert traffic.feed(path).reader.error == ""


@pytest.mark.fault("a ring that no writer made")
@pytest.mark.parametrize(
    ("fields", "again"), [({"written": 2**64 - 8}, []), ({"written": 8 * CAPACITY}, []), ({"written": 0}, [0, 20, 40, 60, 80])]
)
def test_a_forged_end_of_the_records_is_passed_and_the_writers_next_one_is_read(
    path: Path, fields: dict[str, int], again: list[int]
) -> None:
    ring, reader = make(path), RingReader(path)
    assert firsts(reader) == [0, 20, 40, 60, 80]
    forge(path, **fields)
    assert firsts(reader, 3) == []
    write(ring, 100)
    assert firsts(reader, 3) == [*again, 100]
    assert 0 < reader.lost_records + reader.bad_records < 2**53
    write(ring, 120)
    assert firsts(reader) == [120]


@pytest.mark.fault("a ring that no writer made")
def test_bytes_written_anywhere_at_random_end_nothing(path: Path) -> None:
    """Header and records with random bytes in them, their CRC wrong or right: no poll raises, and what it counts is bounded."""
    chance = random.Random(0)
    for _ in range(300):
        ring = make(path, 30)
        reader = RingReader(path)
        reader.poll(chance.choice((0, 3)))
        written = ring._written
        for _ in range(chance.randrange(1, 6)):
            with path.open("r+b", buffering=0) as file:
                place = chance.choice((chance.randrange(80), HEADER_BYTES + chance.randrange(written)))
                os.pwrite(file.fileno(), chance.randbytes(chance.choice((1, 4, 8, 100))), place)
        if chance.random() < 0.5:
            forge_record(
                path,
                chance.randrange(0, CAPACITY // 2, 8),
                chance.randbytes(chance.randrange(2000)),
                **{
                    name: chance.choice((0, 1, chance.randrange(2**bits)))
                    for name, bits in {"seq": 64, "num_rows": 32, "head_bytes": 32, "first_position": 63, "kind": 8}.items()
                },
            )
        for first in (600, 620):
            write(ring, first)
            assert len(reader.poll().records) <= 32
        assert 0 <= reader.lost_records + reader.bad_records < CAPACITY
        reader.close()
        assert firsts(reader)[-1:] == [620]
        os.close(ring._fd)


@pytest.mark.fault("a ring that no writer made")
def test_a_record_whose_number_cannot_be_right_is_not_counted_as_a_loss(path: Path) -> None:
    """A loss beyond 64 bits couldn't even be reported: it ended the trainer."""
    ring, reader = make(path), RingReader(path)
    reader.poll()
    at = ring._written
    forge_record(path, at, seq=2**64 - 1)
    forge(path, written=at + RECORD_BYTES)
    assert firsts(reader) == []
    assert (reader.lost_records, reader.bad_records) == (0, 1)


@pytest.mark.fault("a ring that no writer made")
@pytest.mark.parametrize(
    "fields",
    [
        {"num_rows": 2**32 - 1, "kind": KIND_ROWS},
        {"head_bytes": 2**32 - 1},
        {"head_bytes": 4008},
        {"offset": 8},
        {"first_position": -1},
        {"first_position": 2**62},
        {"kind": 3},
        {"payload_bytes": 2**32 - 1},
    ],
    ids=str,
)
def test_a_record_with_sizes_that_do_not_fit_is_counted_and_never_returned(path: Path, fields: dict[str, int]) -> None:
    ring, reader = make(path), RingReader(path)
    reader.poll()
    at = ring._written
    head = pack_rows_head("r", "w", "v").ljust(fields.get("head_bytes", 0) % (2**32 - 1), b"\0")
    forge_record(path, at, head, **({"seq": 5, "head_bytes": len(head)} | fields))
    forge(path, written=at + RECORD_BYTES + len(head))
    assert firsts(reader) == []
    assert reader.bad_records == 1


@pytest.mark.fault("a link in place of a ring")
@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("link", "it or its folder is a symbolic link"),
        ("folder link", "it or its folder is a symbolic link"),
        ("fifo", "it isn't a regular file"),
        ("folder", "Is a directory"),
        ("socket", "No such device"),
    ],
)
def test_only_a_regular_file_is_opened(path: Path, what: str, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A purge that followed a link zeroed what it led to."""
    elsewhere = path.parents[2] / "elsewhere" / "ring"
    make(elsewhere)
    path.parent.parent.mkdir(exist_ok=True)
    if what == "folder link":
        path.parent.symlink_to(elsewhere.parent)
    else:
        path.parent.mkdir()
    if what == "link":
        path.symlink_to(elsewhere)
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "socket":
        monkeypatch.chdir(path.parent)
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("ring")
    reader = RingReader(path)
    with capture_logs() as logs:
        assert firsts(reader, 3) == []
        assert reader.erase() == reader.error
    assert [line["event"] for line in logs] == [reader.error]
    assert reader.error.startswith(f"sample ring {path}: ")
    assert cause in reader.error
    assert "remove the file" in reader.error
    assert SECRET in elsewhere.read_bytes()


@pytest.mark.fault("a link in place of a ring")
def test_a_ring_that_becomes_a_link_is_left(path: Path) -> None:
    make(path)
    reader = RingReader(path)
    assert len(firsts(reader)) == 5
    elsewhere = path.parents[2] / "elsewhere" / "ring"
    make(elsewhere)
    path.unlink()
    path.symlink_to(elsewhere)
    assert firsts(reader, 3) == []
    assert reader.error
    assert reader.erase() == reader.error
    assert SECRET in elsewhere.read_bytes()


@pytest.mark.fault("a sparse ring that claims gigabytes")
def test_a_purge_of_a_sparse_ring_leaves_its_holes_and_erases_the_rest(path: Path) -> None:
    """A file of a few pages claimed gigabytes, and a purge took them from the machine."""
    make(path)
    forge(path, capacity_bytes=1 << 30, written=1 << 29)
    forge_record(path, 1 << 28, SECRET * 100)
    before = blocks(path)
    assert before < 1 << 20
    reader = RingReader(path)
    assert reader.erase() == ""
    assert blocks(path) <= before
    assert os.stat(path).st_size == HEADER_BYTES + (1 << 30)
    with path.open("rb") as file:
        for place in (0, 1 << 28):
            file.seek(HEADER_BYTES + place)
            assert not any(file.read(1 << 16))
    os.truncate(path, HEADER_BYTES)
    assert reader.erase() == ""
    assert blocks(path) <= before, "what was cut off isn't made again"


@pytest.mark.fault("a sparse ring that claims gigabytes")
def test_a_huge_empty_ring_holds_up_no_poll(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll reads a bounded number of bytes, and the next one goes on where it ended."""
    make(path)
    forge(path, capacity_bytes=MAX_CAPACITY_BYTES, written=1 << 35)
    reader, read, pread = RingReader(path), [0], os.pread

    def counted(fd: int, num_bytes: int, at: int) -> bytes:
        read[0] += num_bytes
        return pread(fd, num_bytes, at)

    monkeypatch.setattr(os, "pread", counted)
    assert len(firsts(reader)) == 5
    assert read[0] <= ring_reader.MOST_POLL_BYTES + (17 << 20)
    read[0] = 0
    assert firsts(reader) == []
    assert 0 < read[0] <= ring_reader.MOST_POLL_BYTES + (17 << 20)


@pytest.mark.fault("a sparse ring that claims gigabytes")
def test_records_of_zeros_do_not_fill_the_memory(path: Path) -> None:
    """A sparse file of some pages can hold gigabytes of records with the right CRC."""
    make(path, 0)
    forge(path, capacity_bytes=1 << 33, feature_size=1 << 10)
    rows = (15 << 20) // (8 + 4 * (1 << 10))
    head = pack_rows_head("r", "w", "v")
    payload = head + bytes(rows * (8 + 4 * (1 << 10)))
    at = 0
    for seq in range(8):
        forge_record(path, at, payload, seq=seq, kind=KIND_ROWS, num_rows=rows, head_bytes=len(head))
        at += RECORD_BYTES + len(payload)
    forge(path, written=at)
    reader = RingReader(path)
    polled = [len(reader.poll().records) for _ in range(3)]
    assert polled == [5, 3, 0], "64 MiB a poll, and the record that exceeds them"


@pytest.mark.fault("a ring that no writer made")
def test_a_file_that_is_longer_than_its_ring_is_refused(path: Path) -> None:
    """What lies behind the ring's end wouldn't be erased."""
    make(path)
    with path.open("ab") as file:
        file.write(SECRET)
    reader = RingReader(path)
    assert firsts(reader) == []
    assert "bytes instead of" in reader.error
    assert reader.erase() == reader.error


def test_half_a_header_is_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader comes while the writer writes the header: neither an error nor a loss."""
    ring, reader = make(path), RingReader(path)
    assert len(firsts(reader)) == 5
    write(ring, 100)
    pread, halves = os.pread, iter(range(1, 100))

    def half(fd: int, num_bytes: int, at: int) -> bytes:
        data = bytearray(pread(fd, num_bytes, at))
        if at == 0 and next(halves) % 3:
            data[48:52] = struct.pack("<I", 12344)  # half of `written`
        return bytes(data)

    monkeypatch.setattr(os, "pread", half)
    assert firsts(reader) == [100]
    assert (reader.error, reader.lost_records, reader.bad_records) == ("", 0, 0)


def test_a_record_that_is_overwritten_while_it_is_copied_is_lost_and_not_bad(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ring, reader, pread = make(path), RingReader(path), os.pread

    def overtaken(fd: int, num_bytes: int, at: int) -> bytes:
        if num_bytes > 500 and at > HEADER_BYTES and ring._num_records == 5:
            for first in range(100, 20 * 450, 20):
                write(ring, first)
        return pread(fd, num_bytes, at)

    monkeypatch.setattr(os, "pread", overtaken)
    seen = firsts(reader, 10)
    assert len(seen) > 120
    assert seen[-1] == 20 * 449
    assert (len(seen) + reader.lost_records, reader.bad_records) == (450, 0)


def test_each_of_two_that_erase_is_noticed_by_all_others(path: Path) -> None:
    make(path)
    reader, first, second = (RingReader(path) for _ in range(3))
    for each in (reader, first, second):
        each.poll()
    assert first.erase() == ""
    assert [each.poll().is_purged for each in (reader, first, second)] == [True, False, True]
    assert second.erase() == ""
    assert [each.poll().is_purged for each in (reader, first, second)] == [True, True, False]


def num_open(path: Path) -> int:
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return sum(os.readlink(link).startswith(str(path)) for link in links if os.path.islink(link))


def test_the_file_is_closed_with_its_reader(path: Path) -> None:
    os.close(make(path)._fd)
    reader = RingReader(path)
    reader.poll()
    assert num_open(path) == 1
    os.close(make(path)._fd)
    reader.poll()
    reader.poll()
    assert num_open(path) == 1
    del reader
    assert num_open(path) == 0


def test_a_ring_that_its_engine_has_removed_is_read_to_its_end_and_closed(path: Path) -> None:
    """An engine that starts without capture removes it. While it is open, it takes as much memory as ever."""
    os.close(make(path)._fd)
    reader = RingReader(path)
    assert len(reader.poll(2).records) == 2
    path.unlink()
    assert firsts(reader, polls=2) == [40, 60, 80]
    assert num_open(path) == 0
    os.close(make(path)._fd)
    assert reader.poll().is_new_ring
