"""Reader of the sample ring, which counts the records that it missed.

`adapt.protocol.sample_ring` has the layout, and says why a copy can be trusted. A record that can't be (overwritten during the
copy, wrong CRC, inconsistent sizes) is counted and never returned. The reader then searches for the next intact record, so it
loses the damaged part and not the whole ring. Rows with NaN or infinity are counted and left out: one of them would spoil a
training.

Anyone who may write to the engines' folder may have made the file. Only a regular file is opened, never through a symbolic
link, and what it says is bounded before anything is read or allocated. A file that can't be read is skipped: `error` has the
cause and the cure, which are logged once.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from honed.adapt.protocol.sample_ring import (
    FLAG_REJECTED,
    GENERATION_OFFSET,
    HEADER_BYTES,
    KIND_END,
    KIND_ROWS,
    MAX_HEAD_BYTES,
    RECORD_BYTES,
    RECORD_MAGIC,
    ROW_FORMATS,
    RecordHeader,
    RingHeader,
    finite_rows,
    is_intact,
    max_record_bytes,
    runs_of,
    unpack_header,
    unpack_record,
    unpack_rows_head,
    unpack_session,
)

log = structlog.get_logger("honed.samples")

MOST_PROBLEMS = 20
"""Most problems that a purge names; the next one names others."""

MOST_POLL_BYTES = 64 << 20
"""Most bytes read in one poll: a ring full of damage holds nobody up."""
_MAX_POSITION = 1 << 31
_SEARCHED_BYTES = 1 << 20
_ERASED_BYTES = 1 << 16
"""Bytes erased by one write: the writer waits for as long, since writes of a file exclude each other."""
_HEADER_READS = 10
_CURE = "stop its engine and remove the file"


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
    likely: NDArray[np.int32]  # [n] the target's most likely token after each; −1: not known, or the one that it emitted
    features: NDArray[Any]  # [n, F]; bfloat16 as uint16
    is_old: bool = False
    """It was in the ring before the reader opened it."""


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
        """Damaged places: records that were present but couldn't be trusted."""
        self.nonfinite_rows = 0
        """Rows with NaN or infinity."""
        self.error = ""
        """The file's defect, with the cure; "" for a sound or absent file."""
        self._ring: _RingFile | None = None

    @property
    def header(self) -> RingHeader | None:
        """The ring being read, as it was when it was opened; None if there is none."""
        return self._ring.header if self._ring else None

    def poll(self, max_records: int = 256) -> RingNews:
        """Return the next records, at most `max_records`; never waits."""
        if self._ring is not None and not self._ring.is_at(self.path):
            news = self._news(max_records)
            if news.records or news.is_purged:
                return news  # first the records that the last engine left
            self.close()
        is_new = self._ring is None and self._open()
        return self._news(max_records, is_new) if self._ring is not None else RingNews([])

    def erase(self) -> str:
        """Forget what the ring holds, and zero it. Returns why samples may remain in it, "" if none do."""
        self.poll(0)
        if self._ring is None:
            return self.error
        try:
            self._ring.erase()
        except OSError as error:
            return f"sample ring {self.path} can't be erased: {error}; {_CURE}"
        return ""

    def close(self) -> None:
        """Close the file; the next poll opens it again."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def __del__(self) -> None:
        self.close()

    def _open(self) -> bool:
        try:
            self._ring = _RingFile(self.path)
        except FileNotFoundError:
            self._tell("")
        except PermissionError as error:
            self._tell(f"{error}; put this process's user into the group of the engine's folder")
        except (OSError, ValueError) as error:
            is_link = isinstance(error, OSError) and error.errno in (errno.ELOOP, errno.ENOTDIR)
            self._tell(f"{'it or its folder is a symbolic link' if is_link else error}; {_CURE}")
        return self._ring is not None

    def _tell(self, defect: str) -> None:
        error = f"sample ring {self.path}: {defect}" if defect else ""
        if error and error != self.error:
            log.warning(error)
        self.error = error

    def _news(self, max_records: int, is_new: bool = False) -> RingNews:
        assert self._ring is not None
        is_purged = self._ring.begin_poll()
        self._tell(self._ring.defect)
        records: list[RingRecord] = []
        while len(records) < max_records and (found := self._ring.next_payload()) is not None:
            try:
                records += self._finite_parts(_decode(*found, self._ring.header))
            except ValueError:
                self.bad_records += 1
        self.lost_records += self._ring.take_lost()
        self.bad_records += self._ring.take_bad()
        return RingNews(records, is_new, is_purged)

    def _finite_parts(self, record: RingRecord) -> list[RingRecord]:
        """The record, or its runs of finite rows."""
        is_finite = finite_rows(record.features)
        if is_finite.all():
            return [record]
        self.nonfinite_rows += int((~is_finite).sum())
        return [_part(record, run) for run in runs_of(is_finite)]


class _RingFile:
    """One open ring file, and the position up to which it has been read."""

    def __init__(self, path: Path) -> None:
        """Open it. Raises OSError, or ValueError for a file that isn't a ring."""
        self._fd, self._is_writable = _open_file(path)
        try:
            status = os.fstat(self._fd)
            if not stat.S_ISREG(status.st_mode):
                raise ValueError("it isn't a regular file")
            self.header = self._read_header()
            self._num_bytes = HEADER_BYTES + self.header.capacity_bytes
            if status.st_size > self._num_bytes:
                raise ValueError(f"it has {status.st_size} bytes instead of {self._num_bytes}")
        except BaseException:
            os.close(self._fd)
            raise
        self._identity = (status.st_dev, status.st_ino)
        self._written, self._generation = self.header.written, self.header.generation
        self.defect = ""
        self._offset = self._end = self.header.oldest_offset(self._written)
        self._is_searching = self._offset > 0
        self._expected_seq = None if self._is_searching else 0
        self._lost = self._bad = self._budget = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def is_at(self, path: Path) -> bool:
        """Return whether the path still names this file, as far as it can be told."""
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            return False  # an engine that starts without capture removes it
        except OSError:
            return True
        return (status.st_dev, status.st_ino) == self._identity

    def begin_poll(self) -> bool:
        """Begin a poll, which may read `MOST_POLL_BYTES`; `defect` says what is wrong with the file.

        Returns:
            whether the ring was purged since the last poll: then only later records are left.
        """
        self._budget = MOST_POLL_BYTES
        generation = self._refresh()
        num_bytes = os.fstat(self._fd).st_size
        if num_bytes < self._num_bytes and not self.defect:
            self.defect = f"it is cut off ({num_bytes} bytes instead of {self._num_bytes}), samples are lost; {_CURE}"
        if generation in (None, self._generation):
            return False
        self._generation, self._is_searching, self._expected_seq = generation, True, None
        return True

    def erase(self) -> None:
        """Zero the data area, then change the generation. Raises OSError.

        Holes stay holes, so a huge sparse file doesn't fill the filesystem. The writer takes no lock, so a
        record written at the same time may be partly zeroed. Its CRC shows that.
        """
        self._offset, self._is_searching, self._expected_seq = self._written, False, None
        if not self._is_writable:
            raise PermissionError("it is read-only for this user")
        at = HEADER_BYTES
        while at < self._num_bytes:
            hole = min(self._seek(at, os.SEEK_HOLE, at), self._num_bytes)
            while at < hole:
                at += os.pwrite(self._fd, bytes(min(_ERASED_BYTES, hole - at)), at)
            at = self._seek(at, os.SEEK_DATA, self._num_bytes)
        generation = secrets.token_bytes(8)
        os.pwrite(self._fd, generation, GENERATION_OFFSET)
        self._generation = int.from_bytes(generation, "little")

    def next_payload(self) -> tuple[RecordHeader, bytes] | None:
        """Return a copy of the next record, None if there is none yet or the poll has read enough."""
        while self._budget > 0 and self._offset < self._written:
            offset = self._offset
            if offset < (oldest := self.header.oldest_offset(self._written)):
                # By half of the ring, or a fast writer would soon pass again: few requests would be read as a whole.
                self._offset, self._is_searching = oldest + self.header.capacity_bytes // 16 * 8, True
            elif self._is_searching:
                self._search()
            else:
                found = self._copy(offset)
                if self._refresh() is None:
                    return None
                if offset < self.header.oldest_offset(self._written) or offset != self._offset:
                    continue  # it may have been overwritten meanwhile
                if found is not None and self._accept(found[0]):
                    return found
                self._bad += 1
                self._offset, self._is_searching = offset + 8, True
        return None

    def take_lost(self) -> int:
        """Return the number of records overwritten unread since the last call."""
        lost, self._lost = self._lost, 0
        return lost

    def take_bad(self) -> int:
        """Return the number of damaged places found since the last call."""
        bad, self._bad = self._bad, 0
        return bad

    def _accept(self, record: RecordHeader) -> bool:
        """Move past a record; return False for one whose number can't be right."""
        if self._expected_seq is not None:
            lost = record.seq - self._expected_seq
            if not 0 <= lost <= (self._offset - self._end) // RECORD_BYTES:
                return False
            self._lost += lost
        self._expected_seq = record.seq + 1
        self._offset = self._end = self._offset + record.total_bytes
        return True

    def _refresh(self) -> int | None:
        """Read the header again; returns the generation, None if it can't be read now."""
        try:
            header = self._read_header()
        except (OSError, ValueError) as error:
            self.defect = f"{error}; {_CURE}"
            return None
        self.defect = ""
        self._written = header.written
        if self._written < self._offset:  # somebody else wrote what was read before
            self._bad += 1
            self._is_searching = True
            if self._end <= self._written:
                self._offset = self._end
            else:
                self._offset, self._expected_seq = header.oldest_offset(self._written), None
        return header.generation

    def _read_header(self) -> RingHeader:
        """Read the header, more than once where the writer is writing it. Raises ValueError, OSError."""
        for _ in range(_HEADER_READS - 1):
            try:
                return unpack_header(os.pread(self._fd, HEADER_BYTES, 0))
            except ValueError:
                continue
        return unpack_header(os.pread(self._fd, HEADER_BYTES, 0))

    def _copy(self, offset: int) -> tuple[RecordHeader, bytes] | None:
        """Copy the record at an offset; None if there is no intact one."""
        fixed = self._read(offset, RECORD_BYTES)
        try:
            record = unpack_record(fixed)
        except ValueError:
            return None
        if record.offset != offset or record.total_bytes > max_record_bytes(self.header.capacity_bytes):
            return None
        payload = self._read(offset + RECORD_BYTES, record.payload_bytes)
        return (record, payload) if is_intact(fixed, payload) else None

    def _search(self) -> None:
        """Move to the first intact record in the next bytes, or past them. The magic number, offset and CRC identify it."""
        begin, capacity = self._offset, self.header.capacity_bytes
        end = min(begin + _SEARCHED_BYTES, self._written, begin + capacity - begin % capacity)
        data = self._read(begin, end - begin)
        words = np.frombuffer(data, "<u4", len(data) // 8 * 2)[::2]
        for hit in np.flatnonzero(words == RECORD_MAGIC).tolist():
            self._offset = begin + 8 * hit
            if self._budget <= 0:
                return
            if self._copy(self._offset) is not None:
                self._is_searching = False
                return
        self._offset = end

    def _read(self, offset: int, num_bytes: int) -> bytes:
        """Read bytes of the data area: fewer where the file is cut off, none where the filesystem fails."""
        self._budget -= max(num_bytes, RECORD_BYTES)
        place = offset % self.header.capacity_bytes
        before_end = min(num_bytes, self.header.capacity_bytes - place)
        try:
            data = os.pread(self._fd, before_end, HEADER_BYTES + place)
            if before_end < num_bytes:
                data += os.pread(self._fd, num_bytes - before_end, HEADER_BYTES)
        except OSError:
            return b""
        return data

    def _seek(self, at: int, whence: int, otherwise: int) -> int:
        """Return where the next data or the next hole begins; `otherwise` where the file has ended."""
        try:
            return os.lseek(self._fd, at, whence)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return otherwise
            raise


def _open_file(path: Path) -> tuple[int, bool]:
    """Open a file, through no symbolic link to it or its folder, and without waiting for anybody.

    Returns:
        the descriptor, and whether it can be written to.
    """
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | flags)
    try:
        return os.open(path.name, os.O_RDWR | os.O_NONBLOCK | flags, dir_fd=folder), True
    except PermissionError:
        return os.open(path.name, os.O_RDONLY | os.O_NONBLOCK | flags, dir_fd=folder), False
    finally:
        os.close(folder)


def _part(record: RingRecord, rows: slice) -> RingRecord:
    is_last = rows.stop == len(record.token_ids)
    return replace(
        record,
        flags=record.flags if is_last else record.flags & ~FLAG_REJECTED,
        first_position=record.first_position + rows.start,
        token_ids=record.token_ids[rows],
        likely=record.likely[rows],
        features=record.features[rows],
    )


def _decode(record: RecordHeader, payload: bytes, ring: RingHeader) -> RingRecord:
    """Decode a payload; `ring` is the header at its opening. Raises ValueError if its sizes are inconsistent."""
    if record.kind not in (KIND_ROWS, KIND_END):
        raise ValueError(f"unknown kind of record {record.kind}")
    num_rows = record.num_rows if record.kind == KIND_ROWS else 0
    row_dtype: np.dtype[Any] = np.dtype(ROW_FORMATS[ring.feature_dtype])
    start = record.head_bytes + 8 * num_rows
    if start + num_rows * ring.feature_size * row_dtype.itemsize != len(payload) or record.head_bytes > MAX_HEAD_BYTES:
        raise ValueError(f"record of {num_rows} rows has {len(payload)} bytes")
    if not 0 <= record.first_position <= _MAX_POSITION:
        raise ValueError(f"record begins at position {record.first_position}")
    head = payload[: record.head_bytes]
    request, workload, drafter_version = unpack_rows_head(head)
    token_ids, likely = np.frombuffer(payload, "<i4", 2 * num_rows, record.head_bytes).reshape(2, num_rows)
    if token_ids.min(initial=0) < 0:
        raise ValueError("record has token ids below zero")
    return RingRecord(
        kind=record.kind,
        flags=record.flags,
        request=request,
        session=unpack_session(head) or request,
        workload=workload,
        drafter_version=drafter_version,
        first_position=record.first_position,
        token_ids=token_ids,
        likely=likely,
        features=np.frombuffer(payload, row_dtype, offset=start).reshape(num_rows, ring.feature_size)
        if num_rows
        else np.zeros((0, ring.feature_size), row_dtype),
        is_old=record.offset < ring.written,
    )
