"""Reader of the sample ring, which counts the records that it missed.

`adapt.protocol.sample_ring` has the layout. A record that can't be fully trusted (overwritten during the copy, wrong CRC,
inconsistent sizes) is counted and never returned. The reader then searches for the next record with the right CRC, so it loses
the damaged part and not the whole ring.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.adapt.protocol.sample_ring import (
    HEADER_BYTES,
    KIND_END,
    KIND_PAD,
    KIND_ROWS,
    RECORD_BYTES,
    RECORD_MAGIC,
    RESERVED_OFFSET,
    ROW_FORMATS,
    RecordHeader,
    RingHeader,
    unpack_header,
    unpack_record,
    unpack_rows_head,
    unpack_session,
)

_RESERVED, _WRITTEN, _GENERATION = (RESERVED_OFFSET + at for at in (0, 8, 40))


@dataclass(frozen=True, eq=False, slots=True)
class RingRecord:
    """Rows of one request, or (kind KIND_END, no rows) the notice that it has ended."""

    kind: int
    flags: int
    request: str
    session: str
    workload: str
    drafter_version: str
    first_position: int
    token_ids: NDArray[np.int32]  # [n]
    features: NDArray[Any]  # [n, F]; bfloat16 as uint16
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class RingNews:
    """Result of one poll. `is_new_ring` and `is_purged` happened before the records."""

    records: list[RingRecord]
    is_new_ring: bool = False
    """The engine restarted: no earlier request continues."""
    is_purged: bool = False
    """Everything read so far must be forgotten."""


class RingReader:
    """Follows the ring at a path, even before the file exists and when a restarted engine replaces it."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self.lost_records = 0
        """Records that were overwritten before they were read."""
        self.bad_records = 0
        """Records that were present but couldn't be trusted."""
        self.error = ""
        """Reason why the file at the path isn't read; "" if it is read or absent."""
        self._ring: _MappedRing | None = None

    @property
    def header(self) -> RingHeader | None:
        """The fixed values of the ring being read, None if there is none."""
        return self._ring.header if self._ring else None

    def poll(self, max_records: int = 256) -> RingNews:
        """Return the next records, at most `max_records`; never waits."""
        if self._ring is not None and not self._ring.is_at(self.path):
            if records := self._read(max_records):
                return RingNews(records)  # first the records that the last engine left
            self._ring = None
        is_new = self._ring is None and self._open()
        if self._ring is None:
            return RingNews([])
        is_purged = self._ring.notice_purge()
        return RingNews(self._read(max_records), is_new, is_purged)

    def erase(self) -> str:
        """Forget what the ring holds, and zero it. Returns why samples may remain in it, "" if none do."""
        self.poll(0)
        if self._ring is None or self._ring.erase():
            return self.error
        return f"sample ring {self.path} is read-only for this user: stop its engine and remove the file"

    def _open(self) -> bool:
        try:
            self._ring = _MappedRing(self.path)
        except FileNotFoundError:
            self.error = ""
        except (OSError, ValueError) as error:
            self.error = f"sample ring {self.path} can't be read: {error}"
        else:
            self.error = ""
            return True
        return False

    def _read(self, max_records: int) -> list[RingRecord]:
        assert self._ring is not None
        records: list[RingRecord] = []
        while len(records) < max_records and (found := self._ring.next_payload()) is not None:
            try:
                record = _decode(*found, self._ring.header)
            except ValueError:
                self.bad_records += 1
                continue
            records.append(record)
        self.lost_records += self._ring.take_lost()
        self.bad_records += self._ring.take_bad()
        return records


class _MappedRing:
    """One ring file in memory, and the position up to which it has been read."""

    def __init__(self, path: Path) -> None:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            access = mmap.ACCESS_WRITE
        except PermissionError:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            access = mmap.ACCESS_READ
        try:
            status = os.fstat(fd)
            self.header = unpack_header(os.pread(fd, HEADER_BYTES, 0))
            capacity = self.header.capacity_bytes
            if capacity < RECORD_BYTES or capacity % 8 or status.st_size < HEADER_BYTES + capacity:
                raise ValueError(f"it has {status.st_size} bytes and claims to hold {capacity}: the file is cut off")
            self._map = mmap.mmap(fd, HEADER_BYTES + capacity, access=access)
        finally:
            os.close(fd)
        self._identity = (status.st_dev, status.st_ino)
        self._is_writable = access == mmap.ACCESS_WRITE
        self._words = np.frombuffer(self._map, "<u8", HEADER_BYTES // 8)
        self._bytes = np.frombuffer(self._map, np.uint8, capacity, HEADER_BYTES)
        self._generation = self._word(_GENERATION)
        self._expected_seq: int | None = None
        self._lost = self._bad = 0
        self._offset = self._find_record(0)

    def is_at(self, path: Path) -> bool:
        """Return whether the path still names this file, or nothing: a stopped engine may come back."""
        try:
            status = os.stat(path)
        except OSError:
            return True
        return (status.st_dev, status.st_ino) == self._identity

    def notice_purge(self) -> bool:
        """Return whether the ring was purged since the last call; if so, only later records are left."""
        generation = self._word(_GENERATION)
        if generation == self._generation:
            return False
        self._generation, self._offset, self._expected_seq = generation, self._find_record(self._offset), None
        return True

    def erase(self) -> bool:
        """Zero the data area and raise the generation.

        The writer takes no lock, so a record written at the same time may be partly zeroed. Its CRC shows that.
        """
        self._offset, self._expected_seq = self._word(_WRITTEN), None
        if not self._is_writable:
            return False
        self._bytes[:] = 0
        self._words[_GENERATION // 8] += np.uint64(1)
        self._generation = self._word(_GENERATION)
        return True

    def next_payload(self) -> tuple[RecordHeader, bytes] | None:
        """Return a copy of the next record that isn't a PAD, None if there is none yet."""
        while self._offset < self._word(_WRITTEN):
            capacity = self.header.capacity_bytes
            place = self._offset % capacity
            if capacity - place < RECORD_BYTES:
                self._offset += capacity - place
                continue
            found = self._copy(place)
            if self._is_overwritten(self._offset):
                self._offset = self._find_record(self._offset)
                continue
            if found is None or self._is_of_the_past(found[0]):
                self._bad += 1
                self._offset = self._find_record(self._offset + 8)
                continue
            record, payload = found
            self._offset += _total_bytes(record)
            if record.kind == KIND_PAD:
                continue
            if self._expected_seq is not None:
                self._lost += record.seq - self._expected_seq
            self._expected_seq = record.seq + 1
            return record, payload
        return None

    def take_lost(self) -> int:
        """Return the number of records overwritten unread since the last call."""
        lost, self._lost = self._lost, 0
        return lost

    def take_bad(self) -> int:
        """Return the number of damaged places found since the last call."""
        bad, self._bad = self._bad, 0
        return bad

    def _word(self, at: int) -> int:
        return int(self._words[at // 8])

    def _is_overwritten(self, offset: int) -> bool:
        return self._word(_RESERVED) > offset + self.header.capacity_bytes

    def _is_of_the_past(self, record: RecordHeader) -> bool:
        return record.kind != KIND_PAD and self._expected_seq is not None and record.seq < self._expected_seq

    def _copy(self, place: int) -> tuple[RecordHeader, bytes] | None:
        """Copy the record at a place; None if there is no sound one."""
        try:
            record = unpack_record(self._bytes[place : place + RECORD_BYTES].tobytes())
        except (ValueError, struct.error):
            return None
        if place + _total_bytes(record) > self.header.capacity_bytes:
            return None
        if record.kind == KIND_PAD:
            return record, b""
        start = place + RECORD_BYTES
        payload = self._bytes[start : start + record.payload_bytes].tobytes()
        return (record, payload) if zlib.crc32(payload) == record.crc32 else None

    def _find_record(self, offset: int) -> int:
        """Find the first sound record at or after an offset that the writer won't reach soon.

        A lap of the data area always begins with a record. Elsewhere the magic number and CRC identify records.
        """
        capacity, written, reserved = self.header.capacity_bytes, self._word(_WRITTEN), self._word(_RESERVED)
        offset = max(offset, reserved - capacity + capacity // 64 if reserved > capacity else 0)
        offset += -offset % 8
        lap = written // capacity * capacity
        end = lap if offset <= lap else written
        place = offset % capacity
        if offset in (0, lap):
            return offset
        words = self._bytes[place : place + max(end - offset, 0)].view("<u4")[::2]
        for hit in np.flatnonzero(words == RECORD_MAGIC).tolist():
            if self._copy(place + 8 * hit) is not None:
                return int(offset + 8 * hit)
        return max(end, offset) if offset <= written else written


def _total_bytes(record: RecordHeader) -> int:
    return RECORD_BYTES + record.payload_bytes + -record.payload_bytes % 8


def _decode(record: RecordHeader, payload: bytes, ring: RingHeader) -> RingRecord:
    """Decode a payload. Raises ValueError if its sizes are inconsistent or its kind isn't the ring's."""
    head = payload[: record.head_bytes]
    request, workload, drafter_version = unpack_rows_head(head)
    session = unpack_session(head) or request
    row_dtype: np.dtype[Any] = np.dtype(ROW_FORMATS[ring.feature_dtype])
    if record.kind not in (KIND_ROWS, KIND_END):
        raise ValueError(f"unknown kind of record {record.kind}")
    if (record.feature_size, record.feature_dtype) != (ring.feature_size, ring.feature_dtype):
        raise ValueError("record has other features than its ring")
    num_rows = record.num_rows if record.kind == KIND_ROWS else 0
    ids_bytes = 4 * num_rows
    start = record.head_bytes + ids_bytes + -ids_bytes % 8
    if start + num_rows * ring.feature_size * row_dtype.itemsize != len(payload) or record.first_position < 0:
        raise ValueError(f"record of {num_rows} rows has {len(payload)} bytes")
    return RingRecord(
        kind=record.kind,
        flags=record.flags,
        request=request,
        session=session,
        workload=workload,
        drafter_version=drafter_version,
        first_position=record.first_position,
        token_ids=np.frombuffer(payload, "<i4", num_rows, record.head_bytes),
        features=np.frombuffer(payload, row_dtype, offset=start).reshape(num_rows, ring.feature_size)
        if num_rows
        else np.zeros((0, ring.feature_size), row_dtype),
        temperature=record.temperature_milli / 1000,
    )
