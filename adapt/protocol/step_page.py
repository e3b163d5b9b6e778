"""The page that an engine shares with the trainer: whether it has work, its latest steps, and what it wants of its GPUs.

    offset 0     1 byte      whether the engine has work
    offset 8     8 bytes     when that was last raised, CLOCK_MONOTONIC in ns (the same in all processes)
    offset 64    256 rows    the latest steps, 36 bytes each; step n, counted from 1, is in row n % 256
    offset 9280  64 rows     its GPUs, behind their number: UUID, and the bytes that must stay free there; then a checksum

A row that is read while it is written fails its checksum, as do the GPUs until they are told. The GPUs stay when the engine
ends: at its next start it will want their memory.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping
from typing import NamedTuple

FLAG = struct.Struct("<?7xQ")
"""Whether there is work, and when it came."""
ROWS_OFFSET, NUM_ROWS = 64, 256
_ROW, _CHECKSUM = struct.Struct("<QQIIHHI"), struct.Struct("<I")
ROW_BYTES = _ROW.size + _CHECKSUM.size
GPUS_OFFSET, MOST_GPUS = ROWS_OFFSET + NUM_ROWS * ROW_BYTES, 64
_UUID_PARTS = (0, 8), (8, 12), (12, 16), (16, 20), (20, 32)
_GPU, _NUM_GPUS = struct.Struct("<16sQ"), struct.Struct("<Q")
NUM_BYTES = GPUS_OFFSET + _NUM_GPUS.size + MOST_GPUS * _GPU.size + _CHECKSUM.size
_MOST_32, _MOST_16 = (1 << 32) - 1, (1 << 16) - 1


class StepRow(NamedTuple):
    """One engine step."""

    number: int
    end_ns: int
    duration_us: int
    """Its own time: where steps overlap, from the end of the one before."""
    tokens: int
    requests: int
    waiting: int
    """Requests that waited for a place in the batch when the step was over."""
    prefill_tokens: int
    """Tokens of prompts, but for one of each request."""


def offset_of(number: int) -> int:
    """Return a step's place in the page."""
    return ROWS_OFFSET + number % NUM_ROWS * ROW_BYTES


def pack_row(row: StepRow) -> bytes:
    """Encode a step; what doesn't fit is clipped."""
    number, end_ns, duration_us, tokens, requests, waiting, prefill_tokens = row
    sizes = min(duration_us, _MOST_32), min(tokens, _MOST_32), min(requests, _MOST_16), min(waiting, _MOST_16)
    packed = _ROW.pack(number, end_ns, *sizes, min(prefill_tokens, _MOST_32))
    return packed + _CHECKSUM.pack(zlib.crc32(packed))


def unpack_row(page: bytes, offset: int) -> StepRow | None:
    """Decode a step; None if none is there, or it is being written."""
    packed = page[offset : offset + _ROW.size]
    if len(page) < offset + ROW_BYTES or _CHECKSUM.unpack_from(page, offset + _ROW.size)[0] != zlib.crc32(packed):
        return None
    row = StepRow(*_ROW.unpack(packed))
    return row if row.number and offset_of(row.number) == offset else None


def rows_after(page: bytes, number: int) -> list[StepRow]:
    """Return the steps after this one that are still in the page, in order."""
    rows = []
    while (row := unpack_row(page, offset_of(number + 1))) is not None and row.number == number + 1:
        rows.append(row)
        number += 1
    if rows or row is None or row.number < number:
        return rows
    # The reader was more than a page behind.
    found = (unpack_row(page, offset_of(place)) for place in range(NUM_ROWS))
    return sorted(row for row in found if row is not None and row.number > number)


def pack_gpus(reserves: Mapping[str, int]) -> bytes:
    """Encode an engine's GPUs: UUID -> bytes that must stay free there. Of more than MOST_GPUS nothing is told."""
    if len(reserves) > MOST_GPUS:
        return b""
    rows = b"".join(_GPU.pack(bytes.fromhex(gpu.replace("-", "")), reserve) for gpu, reserve in reserves.items())
    packed = _NUM_GPUS.pack(len(reserves)) + rows.ljust(MOST_GPUS * _GPU.size, b"\0")
    return packed + _CHECKSUM.pack(zlib.crc32(packed))


def unpack_gpus(page: bytes) -> dict[str, int] | None:
    """Decode them; None if they aren't told, or are being written."""
    packed, checksum = page[GPUS_OFFSET : NUM_BYTES - _CHECKSUM.size], page[NUM_BYTES - _CHECKSUM.size : NUM_BYTES]
    if len(checksum) < _CHECKSUM.size or _CHECKSUM.unpack(checksum)[0] != zlib.crc32(packed):
        return None
    count = min(*_NUM_GPUS.unpack_from(packed), MOST_GPUS)
    rows = (_GPU.unpack_from(packed, _NUM_GPUS.size + i * _GPU.size) for i in range(count))
    return {"-".join(gpu.hex()[a:b] for a, b in _UUID_PARTS): reserve for gpu, reserve in rows}
