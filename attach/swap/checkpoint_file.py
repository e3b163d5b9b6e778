"""A safetensors file in memory, read without holding up the interpreter.

`safetensors.torch.load` copies every tensor in one call that keeps the interpreter's lock: 1.7 s for 384 MiB on an old core.
The thread that launches the engine's kernels stands still meanwhile. Here the longest such stretch is a few milliseconds.
"""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path

import msgspec
import numpy as np
import torch

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class _Entry(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


def load_file(file: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Read a file and hash it.

    Returns:
        SHA-256 of the bytes that the tensors are made of, and the tensors by name, which share memory.

    Raises:
        ValueError: it isn't a safetensors file.
        OSError: it can't be read.
    """
    size = file.stat().st_size
    data = np.empty(size, dtype=np.uint8)
    view, at = data.data, 0
    # A pipe in its place mustn't block for ever.
    with open(file, "rb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as stream:
        while at < size and (count := stream.readinto(view[at : at + (64 << 20)])):
            at += count
    found = hashlib.sha256(view[:at]).hexdigest()
    return found, _tensors(file, data[:at])


def _tensors(file: Path, data: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> dict[str, torch.Tensor]:
    try:
        begin = 8 + int.from_bytes(data[:8].tobytes(), "little")
        header = msgspec.json.decode(data[8:begin].tobytes(), type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        body, tensors = torch.from_numpy(data[begin:]), {}
        for name, raw in header.items():
            entry = msgspec.json.decode(raw, type=_Entry)
            low, high = entry.data_offsets
            dtype = DTYPES[entry.dtype]
            if not 0 <= low <= high <= len(body) or high - low != math.prod(entry.shape) * dtype.itemsize:
                raise ValueError(f"{name} lies outside the file")
            piece = body[low:high]
            aligned = piece if (begin + low) % dtype.itemsize == 0 else piece.clone()
            tensors[name] = aligned.view(dtype).view(entry.shape)
    except KeyError as error:
        raise ValueError(f"{file}: {name} is of type {error}, which no drafter has") from error
    except (ValueError, OverflowError, msgspec.DecodeError, RuntimeError) as error:
        raise ValueError(f"{file} isn't a sound safetensors file: {error}") from error
    return tensors
