"""Layout of the file through which an engine's worker passes training samples to the trainer: a ring of records.

There are one writer (the worker that captures), any number of readers, and no locks. The writer never waits for a reader and
overwrites the oldest bytes. A reader that fell behind notices and skips, counting what it missed. All use pwrite and pread, and
never a map: on a full filesystem, or when somebody cuts the file off, a call returns an error where a map would raise SIGBUS.

The file is a header of `HEADER_BYTES` and a data area of `capacity_bytes`, addressed by ever-growing offsets taken modulo the
capacity. Records are 8-byte aligned. One that reaches the end of the data area continues at its start. A record is written in
this order: its bytes at offset `written`, then the header with `written` raised past them. So the writer touches only bytes
from `written` to `written + max_record_bytes(capacity)`. A reader copies a record that lies before `written`, then reads the
header again. It trusts the copy only if the record's offset is still at least `oldest_offset(written)`: then the writer hadn't
begun to overwrite it.

This order holds between processes. Two pwrites of a process become visible in their order, since the file's lock is released
between them. Two preads of a process see the pages in their order, since each takes a reference to its page, a full barrier. So
a reader that copied a byte of a record that is being written finds the header that preceded the record.

Neither call is atomic, so a reader can meet half of a header or of a record. The header has a CRC-32 of itself: a reader that
finds it wrong reads again. A record has a CRC-32 of all its bytes, and its own offset: neither half a record nor one of an
earlier lap passes. Each header is written whole, so a file that was cut off becomes readable again.

Whoever erases the ring writes a new random `generation`. The CRC leaves it out, because other processes than the writer write
it. Half of a new generation differs from the last one too.

Payload of a ROWS record: labels (see `pack_rows_head`), then `num_rows` committed rows of one request, at positions
`first_position`, `first_position + 1`, … in this order: token ids int32 [n], the target's most likely tokens int32 [n],
features [n, feature_size] of the ring's dtype. Row i holds the token *at* its position and the features that the target
computed *for* that position (with all tokens up to and including it). The target's most likely token is that of the *next*
position, where the next one was drawn at random from the target's own distribution; −1 elsewhere.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAGIC = 0x484F4E45_52494E47  # "HONERING"
LAYOUT_VERSION = 3
HEADER_BYTES = 4096
MAX_CAPACITY_BYTES = 1 << 36
MAX_FEATURE_SIZE = 1 << 18
"""Most values in a row."""
RECORD_MAGIC = 0x484E5243
KIND_ROWS = 1
KIND_END = 2
"""The request is over (payload: head only, no rows)."""

FLAG_PREFILL = 1
"""Rows of the prompt; without this flag the rows are one verify round: anchor and accepted drafts."""
FLAG_GAP = 2
"""Rows before these are missing (prefix cache hit, sampled late): a reader starts a new sequence here."""
FLAG_REJECTED = 4
"""Drafts of this verify round were rejected: the token after these rows is the target's instead of a draft."""

FEATURE_DTYPES = {1: "float32", 2: "float16", 3: "bfloat16"}
ROW_FORMATS = {1: "<f4", 2: "<f2", 3: "<u2"}
"""numpy's types for the values of a row; for bfloat16, which numpy lacks, its 16 bits."""
FEATURE_KINDS = {1: "fused", 2: "layers"}
"""fused: hidden_norm(fc(aux hidden states)), H values a row. layers: the concatenated aux hidden states themselves."""

_FIXED = struct.Struct("<QIIQIIIIQ")
_WRITTEN = struct.Struct("<Q")
_GENERATION = struct.Struct("<Q")
_RECORD = struct.Struct("<IIQQIII4xq")
_CRC = struct.Struct("<I4x")
GENERATION_OFFSET = _FIXED.size + _WRITTEN.size + _CRC.size
"""Byte offset of `generation` in the header (uint64, little endian)."""
RECORD_BYTES = _RECORD.size + _CRC.size
_MAX_TEXT_BYTES = 255
MAX_HEAD_BYTES = 4 * (_MAX_TEXT_BYTES + 1)
"""Most bytes of a record's labels."""


@dataclass(frozen=True, slots=True)
class RingHeader:
    """The ring's fixed parameters, the end of its records and its generation, read at one moment."""

    capacity_bytes: int
    feature_size: int
    feature_dtype: int
    feature_kind: int
    created_unix_ns: int
    written: int = 0
    """Offset where the next record begins."""
    generation: int = 0
    """Changed at every purge: readers then forget what they hold."""
    target: int = 0
    """CRC-32 of what tells the target's weights from others: features of two targets mean different things."""

    def oldest_offset(self, written: int) -> int:
        """Return the lowest offset that the writer leaves alone until `written` is raised."""
        return max(written + max_record_bytes(self.capacity_bytes) - self.capacity_bytes, 0)


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The fixed part of one record."""

    kind: int
    flags: int
    seq: int
    """Number of records before it."""
    offset: int
    payload_bytes: int
    num_rows: int
    head_bytes: int
    first_position: int

    @property
    def total_bytes(self) -> int:
        """Bytes from this record's beginning to the next one's."""
        return RECORD_BYTES + self.payload_bytes + -self.payload_bytes % 8


def max_record_bytes(capacity_bytes: int) -> int:
    """Return the most bytes of a record, in a multiple of 8: a reader that keeps up must be able to keep some records."""
    return min(capacity_bytes // 8, 16 << 20) & ~7


def finite_rows(features: NDArray[Any]) -> NDArray[np.bool_]:  # [n, F] -> [n]
    """Mark the rows without NaN or infinity; bfloat16 comes as its 16 bits, as in a ring."""
    if features.dtype == np.float32:
        return np.asarray(np.isfinite(features).all(axis=1))
    exponent = 0x7F80 if features.dtype == np.uint16 else 0x7C00  # numpy's isfinite takes 20 times as long for float16
    return np.asarray((features.view(np.uint16) & 0x7FFF).max(axis=1, initial=0) < exponent)


def runs_of(is_chosen: NDArray[np.bool_]) -> list[slice]:  # [n]
    """List the runs of chosen rows, in order."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], is_chosen, [False]))))
    return [slice(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]


def pack_fixed(header: RingHeader) -> bytes:
    """Encode the values that never change, for `pack_state`."""
    return _FIXED.pack(
        MAGIC,
        LAYOUT_VERSION,
        HEADER_BYTES,
        header.capacity_bytes,
        header.feature_size,
        header.feature_dtype,
        header.feature_kind,
        header.target,
        header.created_unix_ns,
    )


def pack_state(fixed: bytes, written: int) -> bytes:
    """Encode a header up to its CRC; the generation follows it, and zeros up to HEADER_BYTES."""
    checked = fixed + _WRITTEN.pack(written)
    return checked + _CRC.pack(zlib.crc32(checked))


def unpack_header(data: bytes) -> RingHeader:
    """Decode a ring header. Raises ValueError naming the file's defect."""
    if len(data) < GENERATION_OFFSET + _GENERATION.size:
        raise ValueError(f"it is {len(data)} bytes long, shorter than its header: the file is cut off")
    magic, version, header_bytes, capacity, size, dtype, kind, target, created = _FIXED.unpack_from(data)
    if magic != MAGIC:
        raise ValueError("it is no honed sample ring: wrong magic number")
    if version != LAYOUT_VERSION or header_bytes != HEADER_BYTES:
        raise ValueError(f"it has layout {version}, this honed reads {LAYOUT_VERSION}: use one honed version")
    checked_bytes = _FIXED.size + _WRITTEN.size
    if _CRC.unpack_from(data, checked_bytes) != (zlib.crc32(data[:checked_bytes]),):
        raise ValueError("its header is damaged: wrong CRC")
    if dtype not in FEATURE_DTYPES or kind not in FEATURE_KINDS:
        raise ValueError(f"it has unknown feature dtype {dtype} or kind {kind}")
    if max_record_bytes(capacity) < RECORD_BYTES or capacity % 8 or capacity > MAX_CAPACITY_BYTES:
        raise ValueError(f"it claims to hold {capacity} bytes, which no ring does")
    if not 1 <= size <= MAX_FEATURE_SIZE:
        raise ValueError(f"it claims to hold rows of {size} values, which no ring does")
    (written,) = _WRITTEN.unpack_from(data, _FIXED.size)
    if written % 8:
        raise ValueError(f"it claims that its next record begins at {written}, where none does")
    (generation,) = _GENERATION.unpack_from(data, GENERATION_OFFSET)
    return RingHeader(capacity, size, dtype, kind, created, written, generation, target)


def pack_record(record: RecordHeader, payload: Iterable[Any]) -> bytes:
    """Encode a record's fixed part, with the CRC of itself and its payload (buffers, in order)."""
    fixed = _RECORD.pack(
        RECORD_MAGIC,
        record.kind | record.flags << 8,
        record.seq,
        record.offset,
        record.payload_bytes,
        record.num_rows,
        record.head_bytes,
        record.first_position,
    )
    return fixed + _CRC.pack(_crc(fixed, payload))


def unpack_record(data: bytes) -> RecordHeader:
    """Decode a record's fixed part. Raises ValueError when it isn't one."""
    if len(data) < RECORD_BYTES:
        raise ValueError("record header is cut off")
    magic, kind, seq, offset, payload, rows, head, position = _RECORD.unpack_from(data)
    if magic != RECORD_MAGIC:
        raise ValueError("not a record: wrong magic number")
    return RecordHeader(kind & 0xFF, kind >> 8, seq, offset, payload, rows, head, position)


def is_intact(fixed: bytes, payload: bytes) -> bool:
    """Return whether a record's CRC fits its fixed part and its payload."""
    return _CRC.unpack_from(fixed, _RECORD.size) == (_crc(fixed[: _RECORD.size], [payload]),)


def _crc(fixed: bytes, payload: Iterable[Any]) -> int:
    crc = zlib.crc32(fixed)
    for part in payload:
        crc = zlib.crc32(part, crc)
    return crc


def pack_rows_head(request: str, workload: str, drafter_version: str, session: str = "") -> bytes:
    """Encode a record's labels, padded to 8 bytes: NUL-terminated UTF-8 texts, each of at most 255 bytes."""
    texts = (request, workload, drafter_version, session)
    head = b"".join(text.replace("\0", "").encode(errors="replace")[:_MAX_TEXT_BYTES] + b"\0" for text in texts)
    return head + b"\0" * (-len(head) % 8)


def unpack_rows_head(head: bytes) -> tuple[str, str, str]:
    """Decode a record's labels: request key, workload, drafter version. Raises ValueError when they aren't there."""
    parts = head.split(b"\0")
    if len(parts) < 4:
        raise ValueError("record has no labels")
    return parts[0].decode(errors="replace"), parts[1].decode(errors="replace"), parts[2].decode(errors="replace")


def unpack_session(head: bytes) -> str:
    """Decode a record's session label, "" when it has none: rows of one session are held out together."""
    parts = head.split(b"\0", 4)
    return parts[3].decode(errors="replace") if len(parts) > 4 else ""
