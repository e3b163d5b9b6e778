"""Writing end of the sample ring: rows of captured requests go into a file on a tmpfs, and the writer never waits for a reader.

`adapt.protocol.sample_ring` defines the layout and the order of writes; this file follows it. A record costs two system calls:
one writes it, one publishes it. The file is allocated once at the start, so a machine without that much memory reports it then.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
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
    KIND_ROWS,
    MAX_CAPACITY_BYTES,
    MAX_FEATURE_SIZE,
    MAX_HEAD_BYTES,
    RECORD_BYTES,
    ROW_FORMATS,
    RecordHeader,
    RingHeader,
    max_record_bytes,
    pack_fixed,
    pack_record,
    pack_rows_head,
    pack_state,
)
from honed.attach.engine.busy_flag import make_folder


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
        target: int = 0,
    ) -> None:
        """Complete the file under another name, then rename it: a reader never sees half a header.

        Args:
            target: what tells the target's weights from others.

        Raises:
            ValueError: for an unknown dtype or kind, too wide a row, or a capacity that is too small or too large.
            OSError: when there isn't room for the file.
        """
        self.path = Path(path)
        dtype_code = _code(FEATURE_DTYPES, feature_dtype)
        self._dtype: np.dtype[Any] = np.dtype(ROW_FORMATS[dtype_code])
        self._feature_size = feature_size
        self._capacity = capacity_bytes & ~7
        row_bytes = feature_size * self._dtype.itemsize + 8
        self._max_rows = (max_record_bytes(self._capacity) - RECORD_BYTES - MAX_HEAD_BYTES - 8) // row_bytes
        if self._max_rows < 1:
            raise ValueError(f"a sample ring of {capacity_bytes} bytes is too small for rows of {row_bytes} bytes")
        if self._capacity > MAX_CAPACITY_BYTES or feature_size > MAX_FEATURE_SIZE:
            raise ValueError(
                f"a sample ring holds at most {MAX_CAPACITY_BYTES} bytes in rows of {MAX_FEATURE_SIZE} values, not "
                f"{capacity_bytes} in rows of {feature_size}: lower HONED_RING_BYTES, or use HONED_FEATURES=fused"
            )
        kind_code = _code(FEATURE_KINDS, feature_kind)
        header = RingHeader(self._capacity, feature_size, dtype_code, kind_code, time.time_ns(), target=target)
        self._fixed = pack_fixed(header)
        self._fd = _make_file(self.path, HEADER_BYTES + self._capacity, pack_state(self._fixed, 0), mode)
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
        session: str = "",
        likely: NDArray[np.int32] | None = None,  # [n]; None: −1
    ) -> None:
        """Append committed rows of one request; a long stretch becomes several records.

        Raises:
            ValueError: when rows and tokens don't match, or the features aren't of the ring's kind.
            OSError: the filesystem is full, for one. The ring can still be written to.
        """
        num_rows = len(token_ids)
        if features.shape != (num_rows, self._feature_size) or features.dtype != self._dtype:
            raise ValueError(
                f"features are {features.dtype} {features.shape}, the ring holds {self._dtype} "
                f"({num_rows}, {self._feature_size})"
            )
        head = pack_rows_head(request, workload, drafter_version, session)
        likely = np.full(num_rows, -1, np.int32) if likely is None else likely
        for start in range(0, num_rows, self._max_rows):
            chunk = slice(start, min(start + self._max_rows, num_rows))
            ids = np.concatenate((token_ids[chunk], likely[chunk]), dtype="<i4")
            chunk_flags = flags if start == 0 else flags & ~FLAG_GAP
            parts = [head, ids, np.ascontiguousarray(features[chunk])]
            self._append(KIND_ROWS, parts, len(head), chunk_flags, len(ids) // 2, first_position + start)

    def write_end(self, request: str, workload: str) -> None:
        """Record that a request is over: its rows are complete. Raises OSError, as `write_rows`."""
        head = pack_rows_head(request, workload, "")
        self._append(KIND_END, [head], len(head), 0, 0, 0)

    def _append(self, kind: int, parts: list[Any], head: int, flags: int, rows: int, position: int) -> None:
        payload_bytes = sum(memoryview(part).nbytes for part in parts)
        record = RecordHeader(kind, flags, self._num_records, self._written, payload_bytes, rows, head, position)
        self._put([pack_record(record, parts), *parts], RECORD_BYTES + payload_bytes)
        # Whole, so that a file that was cut off has a header again.
        _write(self._fd, [pack_state(self._fixed, self._written + record.total_bytes)], 0)
        self._written += record.total_bytes
        self._num_records += 1

    def _put(self, parts: list[Any], num_bytes: int) -> None:
        """Write a record's bytes where the next record begins; beyond the end of the data area they continue at its start."""
        place = self._written % self._capacity
        left = self._capacity - place
        if num_bytes <= left:
            _write(self._fd, parts, HEADER_BYTES + place)
        else:
            whole = memoryview(b"".join(parts))
            _write(self._fd, [whole[:left]], HEADER_BYTES + place)
            _write(self._fd, [whole[left:]], HEADER_BYTES)


def _code(names: dict[int, str], wanted: str) -> int:
    for code, name in names.items():
        if name == wanted:
            return code
    raise ValueError(f"{wanted!r} is none of {', '.join(names.values())}")


def _write(fd: int, parts: list[Any], at: int) -> None:
    """Write buffers at a place of the file. Raises OSError unless all of them are written."""
    missing = sum(memoryview(part).nbytes for part in parts) - os.pwritev(fd, parts, at)
    if missing:
        raise OSError(errno.ENOSPC, f"{missing} bytes of a sample couldn't be written: make room in the ring's filesystem")


def _make_file(path: Path, num_bytes: int, header: bytes, mode: int) -> int:
    """Make a file of that size and return its descriptor; it gets its name only with its header in place."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        os.fchmod(fd, mode)  # whatever the umask
        os.posix_fallocate(fd, 0, num_bytes)
        _write(fd, [header], 0)
        os.rename(temporary, path)
        return fd
    except BaseException:
        os.unlink(temporary)
        os.close(fd)
        raise
