"""Digest of a checkpoint's weights as an engine holds them: equals `attach.swap.swap.Swapper.checksum`.

It is the SHA-256 over name, shape and float32 bytes of every tensor by name order, without those shared with the target and
those that vLLM ignores. An engine that serves in a narrower type than the file's has rounded them, so each type has its digest.

Imports no torch: the daemon uses it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from honed.adapt.models.drafter_tensor_names import is_shared
from honed.adapt.models.trainable import has_attention_bias
from honed.recalib.registry.durable import open_regular, read_document
from honed.recalib.registry.tensor_file import TensorEntry, read_drafter_entries

Floats = npt.NDArray[np.float32]
Read = Callable[[bytes], Floats]


def weights_digests(path: Path) -> set[str]:
    """Digests of a checkpoint's weights as they are, and as bfloat16 and float16 engines hold them.

    Args:
        path: the safetensors file; its config.json, beside it, says whether vLLM has biases.

    Raises:
        ValueError: a file isn't sound, or holds values of a type that drafters aren't stored in.
        OSError: it can't be read.
    """
    has_bias = has_attention_bias(msgspec.json.decode(read_document(path.with_name("config.json")), type=dict[str, Any]))
    entries = sorted((e for e in read_drafter_entries(path) if _is_served(e, has_bias)), key=lambda e: e.name)
    digests = [hashlib.sha256() for _ in _SERVED_AS]
    with open_regular(path) as file:
        for entry in entries:
            if entry.dtype not in _READ:
                raise ValueError(f"{path}: {entry.name} is stored as {entry.dtype}, drafters as {', '.join(_READ)}")
            file.seek(entry.begin)
            values = _READ[entry.dtype](file.read(entry.end - entry.begin))
            head = f"{entry.name}{list(entry.shape)}".encode()
            for digest, rounded in zip(digests, _SERVED_AS, strict=True):
                digest.update(head)
                digest.update(rounded(values).tobytes())
    return {digest.hexdigest() for digest in digests}


def _is_served(entry: TensorEntry, has_bias: bool) -> bool:
    return not is_shared(entry.name) and (has_bias or not entry.name.endswith(".bias"))


def _widen(data: bytes) -> Floats:
    """bfloat16 is the upper half of a float32."""
    return (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)


def _as_bfloat16(values: Floats) -> Floats:
    """Round to the nearest, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


def _as_float16(values: Floats) -> Floats:
    with np.errstate(over="ignore"):
        return values.astype(np.float16).astype(np.float32)


_READ: dict[str, Read] = {
    "F32": lambda data: np.frombuffer(data, "<f4").astype(np.float32),
    "F16": lambda data: np.frombuffer(data, "<f2").astype(np.float32),
    "BF16": _widen,
}
_SERVED_AS: tuple[Callable[[Floats], Any], ...] = (lambda values: values, _as_bfloat16, _as_float16)
