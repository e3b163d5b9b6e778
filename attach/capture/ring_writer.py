"""Writing end of the sample ring: rows of captured requests go into shared memory, and the writer never waits.

`adapt.protocol.sample_ring` defines the layout and the order of writes; this file follows it. The two moving offsets are stored
as aligned 64-bit words, so a reader never sees half of one. The memory is the mapped file, allocated and touched once at the
start: a machine without that much memory reports it then, not by a signal while serving.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.adapt.protocol.sample_ring import (
    FEATURE_DTYPES,
    FEATURE_KINDS,
    FLAG_GAP,
    HEADER_BYTES,
    KIND_END,
    KIND_PAD,
    KIND_ROWS,
    RECORD_BYTES,
    RESERVED_OFFSET,
    ROW_FORMATS,
    RecordHeader,
    RingHeader,
    pack_header,
    pack_record,
    pack_rows_head,
)

_MIN_RECORDS = 8
"""Least number of records in the ring: a reader that keeps up must be able to keep some."""
_RESERVED, _WRITTEN, _NUM_RECORDS, _GENERATION = (RESERVED_OFFSET + at for at in (0, 8, 16, 40))


class RingWriter:
    """One ring file, made anew; a file of an earlier process at the same path is replaced, never written to."""

    def __init__(
        self,
        path: Path,
        capacity_bytes: int,
        feature_size: int,
        feature_dtype: str = "bfloat16",
        feature_kind: str = "fused",
        mode: int = 0o600,
    ) -> None:
        """Complete the file under another name, then rename it: a reader never sees half a header.

        Raises:
            ValueError: for an unknown dtype or kind, or a capacity that can't hold a few rows.
            OSError: when there isn't room for the file.
        """
        self.path = Path(path)
        self._dtype_code = _code(FEATURE_DTYPES, feature_dtype)
        self._dtype: np.dtype[Any] = np.dtype(ROW_FORMATS[self._dtype_code])
        self._feature_size = feature_size
        self._capacity = capacity_bytes & ~7
        row_bytes = feature_size * self._dtype.itemsize + 4
        self._max_rows = (self._capacity // _MIN_RECORDS - 2048) // row_bytes
        if self._max_rows < 1:
            raise ValueError(f"a sample ring of {capacity_bytes} bytes is too small for rows of {row_bytes} bytes")
        header = RingHeader(
            self._capacity,
            0,
            0,
            0,
            feature_size,
            self._dtype_code,
            _code(FEATURE_KINDS, feature_kind),
            0,
            time.time_ns(),
        )
        self._map = _make_file(self.path, HEADER_BYTES + self._capacity, pack_header(header), mode)
        self._words = np.frombuffer(self._map, "<u8", HEADER_BYTES // 8)
        self._bytes = np.frombuffer(self._map, np.uint8, self._capacity, HEADER_BYTES)
        self._written = self._num_records = 0

    def write_rows(
        self,
        request: str,
        workload: str,
        drafter_version: str,
        first_position: int,
        token_ids: NDArray[np.int32],  # [n]
        features: NDArray[np.generic],  # [n, F]; bfloat16 as uint16
        flags: int = 0,
        temperature: float = 0.0,
        session: str = "",
    ) -> None:
        """Append committed rows of one request; a long stretch becomes several records.

        Raises:
            ValueError: when rows and tokens don't match, or the features aren't of the ring's kind.
        """
        num_rows = len(token_ids)
        if features.shape != (num_rows, self._feature_size) or features.dtype != self._dtype:
            raise ValueError(
                f"features are {features.dtype} {features.shape}, the ring holds {self._dtype} "
                f"({num_rows}, {self._feature_size})"
            )
        head = pack_rows_head(request[:256], workload[:256], drafter_version[:256], session[:256])
        milli = min(max(round(temperature * 1000), 0), 0xFFFFFFFF)
        for start in range(0, num_rows, self._max_rows):
            chunk = slice(start, min(start + self._max_rows, num_rows))
            ids = np.ascontiguousarray(token_ids[chunk], "<i4")
            parts = [np.frombuffer(head, np.uint8), ids.view(np.uint8), _PADDING[: -ids.nbytes % 8]]
            parts.append(np.ascontiguousarray(features[chunk]).reshape(-1).view(np.uint8))
            chunk_flags = flags if start == 0 else flags & ~FLAG_GAP
            self._append(KIND_ROWS, parts, len(head), chunk_flags, len(ids), first_position + start, milli)

    def write_end(self, request: str, workload: str) -> None:
        """Record that a request is over: its rows are complete."""
        head = pack_rows_head(request[:256], workload[:256], "")
        self._append(KIND_END, [np.frombuffer(head, np.uint8)], len(head), 0, 0, 0, 0)

    def purge(self) -> None:
        """Overwrite everything with zeros and make readers forget what they have read."""
        self._words[_RESERVED // 8] = self._written + self._capacity  # a reader that is copying discards its copy
        self._bytes[:] = 0
        # Whole laps keep offsets and places in step, and a reader looks for the next record at a new lap.
        self._written = -(-(self._written + self._capacity) // self._capacity) * self._capacity
        self._words[_RESERVED // 8] = self._written
        self._words[_WRITTEN // 8] = self._written
        self._words[_GENERATION // 8] += np.uint64(1)

    def close(self) -> None:
        """Unmap. The file stays, so that a reader can still read what is in it."""
        del self._words, self._bytes
        self._map.close()

    @property
    def num_records(self) -> int:
        """Records written so far, PADs not counted."""
        return self._num_records

    def _append(
        self, kind: int, parts: list[NDArray[np.uint8]], head: int, flags: int, rows: int, position: int, milli: int
    ) -> None:
        payload_bytes = sum(part.nbytes for part in parts)
        total = RECORD_BYTES + payload_bytes + -payload_bytes % 8
        left = self._capacity - self._written % self._capacity
        skipped = left if total > left else 0
        end = self._written + skipped + total
        self._words[_RESERVED // 8] = end
        if skipped:
            # A valid record was here a lap ago; a reader that looks for its place must not take it for one.
            self._bytes[self._written % self._capacity :] = 0
        if skipped >= RECORD_BYTES:
            pad = RecordHeader(KIND_PAD, 0, self._num_records, skipped - RECORD_BYTES, 0, 0, 0, 0, 0, 0, 0)
            self._put(self._written % self._capacity, np.frombuffer(pack_record(pad), np.uint8))
        place = (self._written + skipped) % self._capacity
        at, crc = place + RECORD_BYTES, 0
        for part in parts:
            self._put(at, part)
            crc = zlib.crc32(part.data, crc)
            at += part.nbytes
        record = RecordHeader(
            kind,
            flags,
            self._num_records,
            payload_bytes,
            crc,
            rows,
            head,
            position,
            self._feature_size,
            self._dtype_code,
            milli,
        )
        self._put(place, np.frombuffer(pack_record(record), np.uint8))
        self._written = end
        self._num_records += 1
        self._words[_NUM_RECORDS // 8] = self._num_records
        self._words[_WRITTEN // 8] = end

    def _put(self, place: int, data: NDArray[np.uint8]) -> None:
        self._bytes[place : place + data.nbytes] = data


_PADDING = np.zeros(8, np.uint8)


def _code(names: dict[int, str], wanted: str) -> int:
    for code, name in names.items():
        if name == wanted:
            return code
    raise ValueError(f"{wanted!r} is none of {', '.join(names.values())}")


def _make_file(path: Path, num_bytes: int, header: bytes, mode: int) -> mmap.mmap:
    """Make a mapped file of that size; it gets its name only with its header in place."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o750)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)  # whatever the umask
        os.posix_fallocate(fd, 0, num_bytes)  # a sparse file would fail by SIGBUS once the memory runs out
        mapped = mmap.mmap(fd, num_bytes)
        mapped[: len(header)] = header
        os.rename(temporary, path)
        return mapped
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(fd)
