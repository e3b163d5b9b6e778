"""Layout of the shared-memory ring through which an engine's worker passes training samples to the trainer.

There are one writer (the worker that captures), any number of readers, and no locks. The writer never waits and overwrites the
oldest bytes. A reader that fell behind notices and skips, counting what it missed. The file is a header of `HEADER_BYTES` and a
data area of `capacity_bytes`, addressed by ever-growing offsets taken modulo the capacity.

A record is written in this order: `reserved` (header) is raised past the record's end, the bytes are written, `written` is
raised to the same value. A reader copies a record that lies before `written`. It discards the copy when `reserved` has
meanwhile passed `offset + capacity_bytes`: only then can the writer have touched it. Records are 8-byte aligned and never wrap:
a PAD record and zeros fill the rest, and with fewer than `RECORD_BYTES` left both ends skip them. They carry a CRC-32 of their
payload as a second defence. So every multiple of the capacity is the start of a record.

Payload of a ROWS record: labels (see `pack_rows_head`), then `num_rows` committed rows of one request, at positions
`first_position`, `first_position + 1`, … in this order: token ids int32 [n], padding to 8 bytes, features
[n, feature_size] of `feature_dtype`. Row i holds the token *at* its position and the features that the target computed
*for* that position (with all tokens up to and including it).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

MAGIC = 0x484F4E45_52494E47  # "HONERING"
LAYOUT_VERSION = 1
HEADER_BYTES = 4096
RECORD_MAGIC = 0x484E5243
KIND_PAD = 0
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

_HEADER = struct.Struct("<QIIQQQQIIIIQQ")
_RECORD = struct.Struct("<IIQIIIIqIIII")
RECORD_BYTES = _RECORD.size


@dataclass(frozen=True, slots=True)
class RingHeader:
    """The ring's fixed parameters and its two moving offsets, read at one moment."""

    capacity_bytes: int
    reserved: int
    written: int
    num_records: int
    feature_size: int
    feature_dtype: int
    feature_kind: int
    generation: int
    """Raised at every purge: readers then forget what they hold."""
    created_unix_ns: int


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """The fixed part of one record."""

    kind: int
    flags: int
    seq: int
    payload_bytes: int
    crc32: int
    num_rows: int
    head_bytes: int
    first_position: int
    feature_size: int
    feature_dtype: int
    temperature_milli: int


RESERVED_OFFSET = 24
"""Byte offset of `reserved` in the header (uint64, little endian); `written` follows at +8, `num_records` at +16."""


def pack_header(header: RingHeader) -> bytes:
    """Encode a ring header (shorter than HEADER_BYTES; the rest stays zero)."""
    return _HEADER.pack(
        MAGIC,
        LAYOUT_VERSION,
        HEADER_BYTES,
        header.capacity_bytes,
        header.reserved,
        header.written,
        header.num_records,
        header.feature_size,
        header.feature_dtype,
        header.feature_kind,
        0,
        header.generation,
        header.created_unix_ns,
    )


def unpack_header(data: bytes) -> RingHeader:
    """Decode a ring header. Raises ValueError naming the file's defect."""
    if len(data) < _HEADER.size:
        raise ValueError(f"sample ring is {len(data)} bytes long, shorter than its header: the file is cut off")
    magic, version, header_bytes, capacity, reserved, written, records, size, dtype, kind, _, gen, created = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        raise ValueError("not a honed sample ring: wrong magic number")
    if version != LAYOUT_VERSION or header_bytes != HEADER_BYTES:
        raise ValueError(f"sample ring has layout {version}, this honed reads {LAYOUT_VERSION}: use one honed version")
    if dtype not in FEATURE_DTYPES or kind not in FEATURE_KINDS:
        raise ValueError(f"sample ring has unknown feature dtype {dtype} or kind {kind}")
    return RingHeader(capacity, reserved, written, records, size, dtype, kind, gen, created)


def pack_record(record: RecordHeader) -> bytes:
    """Encode a record's fixed part."""
    return _RECORD.pack(
        RECORD_MAGIC,
        record.kind | record.flags << 8,
        record.seq,
        record.payload_bytes,
        record.crc32,
        record.num_rows,
        record.head_bytes,
        record.first_position,
        record.feature_size,
        record.feature_dtype,
        record.temperature_milli,
        0,
    )


def unpack_record(data: bytes) -> RecordHeader:
    """Decode a record's fixed part. Raises ValueError when it isn't one."""
    if len(data) < RECORD_BYTES:
        raise ValueError("record header is cut off")
    magic, kind, seq, payload, crc, rows, head, position, size, dtype, temperature, _ = _RECORD.unpack_from(data)
    if magic != RECORD_MAGIC:
        raise ValueError("not a record: wrong magic number")
    return RecordHeader(kind & 0xFF, kind >> 8, seq, payload, crc, rows, head, position, size, dtype, temperature)


def pack_rows_head(request: str, workload: str, drafter_version: str, session: str = "") -> bytes:
    """Encode a record's labels, padded to 8 bytes: NUL-terminated UTF-8 texts."""
    texts = (request, workload, drafter_version, session)
    head = b"\0".join(text.replace("\0", "").encode(errors="replace") for text in texts) + b"\0"
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
