"""The header of a safetensors file, read without torch and without trusting any byte of it.

Layout: 8 bytes little endian n, n bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}}, then the data. In this
format the tensors must cover the data without holes or overlaps, so a truncated or extended file is recognised.

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from honed.adapt.models.drafter_tensor_names import names_of
from honed.recalib.registry.durable import open_regular

MAX_HEADER_BYTES = 8 << 20
"""About 60,000 tensors."""
DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Place of one tensor; `begin` and `end` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_tensor_entries(path: Path) -> list[TensorEntry]:
    """Read the tensor entries of a safetensors file, in the order of their bytes.

    Raises:
        ValueError: names the first fault.
        OSError: the file can't be read.
    """
    with open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        prefix = file.read(8)
        if len(prefix) < 8:
            raise ValueError(f"{file_bytes} bytes long, shorter than a safetensors header")
        header_bytes = int.from_bytes(prefix, "little")
        if header_bytes > MAX_HEADER_BYTES or 8 + header_bytes > file_bytes:
            raise ValueError(f"its header claims {header_bytes} bytes, the file has {file_bytes}")
        try:
            raw = msgspec.json.decode(file.read(header_bytes), type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"its header is not JSON: {error}") from error
    data_start = 8 + header_bytes
    entries = [_entry(name, value, data_start) for name, value in raw.items() if name != "__metadata__"]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    expected = data_start
    for entry in entries:
        if entry.begin != expected:
            raise ValueError(f"tensor {entry.name!r} begins at byte {entry.begin}, not {expected}")
        expected = entry.end
    if expected != file_bytes:
        raise ValueError(f"its tensors end at byte {expected}, the file has {file_bytes}: cut off or appended to")
    if not entries:
        raise ValueError("it holds no tensors")
    return entries


def read_drafter_entries(path: Path) -> list[TensorEntry]:
    """Read the entries of a drafter's tensors under our names, without those that vLLM ignores.

    Raises:
        ValueError, OSError: as `read_tensor_entries`, and if two tensors have the same name.
    """
    entries = {entry.name: entry for entry in read_tensor_entries(path)}
    return [replace(entries[theirs], name=ours) for ours, theirs in names_of(entries).items()]


def sha256_tensors(path: Path, entries: list[TensorEntry], is_chosen: Callable[[str], bool]) -> str:
    """SHA-256 over name, dtype, shape and bytes of the chosen tensors by name order; "" when none is chosen."""
    chosen = sorted((entry for entry in entries if is_chosen(entry.name)), key=lambda entry: entry.name)
    digest = hashlib.sha256()
    with open_regular(path) as file:
        for entry in chosen:
            digest.update(f"{entry.name}\0{entry.dtype}\0{entry.shape}\0".encode())
            file.seek(entry.begin)
            left = entry.end - entry.begin
            while left > 0 and (chunk := file.read(min(left, 1 << 20))):
                digest.update(chunk)
                left -= len(chunk)
    return digest.hexdigest() if chosen else ""


def _entry(name: str, value: object, data_start: int) -> TensorEntry:
    """Make one header entry and check its arithmetic."""
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]  # type: ignore[index]
        bits = math.prod(shape) * DTYPE_BITS[dtype]
        is_sane = all(type(n) is int and n >= 0 for n in (*shape, begin, end))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ValueError(f"tensor {name!r} is described wrongly") from error
    if not is_sane or bits % 8 or end - begin != bits // 8:
        raise ValueError(f"tensor {name!r} of {dtype} {list(shape)} can't lie in bytes {begin} to {end}")
    return TensorEntry(name, dtype, shape, data_start + begin, data_start + end)
