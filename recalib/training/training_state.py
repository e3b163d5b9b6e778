"""The saved state from which a training resumes after its process was killed: one safetensors file an operation.

It holds weights, optimizer and random generators, but no samples: those are read from the engine's ring again. The file exists
completely or not at all. Only the same request with the same settings resumes from it; anything else starts afresh.

An 8B target's drafter has a state of ten gigabytes, and a network disk takes a minute or more for it. So it is written in
parts, each forced to the disk, and the trainer does other things between them. It is not written at all where the disk would be
left with little: the daemon's database may be on it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import structlog
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from honed.recalib.config.memory import in_words
from honed.recalib.registry.durable import fsync_path, make_folder

log = structlog.get_logger("honed.trainer")

PART_BYTES = 64 << 20
"""Written at a time."""
LEFT_FREE_BYTES = 1 << 30
"""Free space of the disk that a state doesn't touch."""
_NAME = re.compile(r"[\w.-]+")
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}


class TrainingState:
    """The file of one operation.

    Args:
        folder: place of such files; made when needed. It keeps no other operation's file.
        operation_id: the operation that owns it.
        about: what must be equal for the file to be usable: request, settings, parent.
    """

    def __init__(self, folder: Path, operation_id: str, about: dict[str, Any]) -> None:
        self._folder = folder
        name = operation_id if _NAME.fullmatch(operation_id) else operation_id.encode().hex()
        self._path = folder / f"{name}.safetensors"
        self._about = json.dumps(about, sort_keys=True, default=str)

    def save(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> Iterator[None]:
        """Replace the previous state, and remove other operations' files. Each advance writes a part.

        Args:
            tensors: they must not change before the end.
            facts: values that are plain JSON.

        Raises:
            OSError: the disk is full or would be, or the folder isn't ours.
        """
        make_folder(self._folder)
        part = self._folder / f".{self._path.name}.part"
        header, num_bytes = _header(tensors, {"about": self._about, "facts": json.dumps(facts)})
        free = shutil.disk_usage(self._folder).free
        if free < num_bytes + LEFT_FREE_BYTES:
            text = f"{in_words(num_bytes)} of {in_words(free)} that are free would leave less than {in_words(LEFT_FREE_BYTES)}"
            raise OSError(errno.ENOSPC, text, str(part))
        try:
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb", buffering=0) as file:
                written = file.write(header)
                for tensor in tensors.values():
                    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
                    while len(data):
                        taken = file.write(data[: max(PART_BYTES - written, 1)])
                        data, written = data[taken:], written + taken
                        if written >= PART_BYTES:
                            os.fdatasync(fd)
                            yield
                            written = 0
                os.fsync(fd)
            os.replace(part, self._path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        fsync_path(self._folder)
        self._remove_others()

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Load the last saved state; None if there is none, it belongs to another training, or it is damaged."""
        try:
            with safe_open(self._path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("about") != self._about:
                    return None
                facts: dict[str, Any] = json.loads(metadata["facts"])
                return {name: file.get_tensor(name) for name in file.keys()}, facts  # noqa: SIM118 (no mapping)
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            log.warning("saved training can't be read: starting from the beginning", path=str(self._path), error=str(error))
            return None

    def discard(self) -> None:
        """Delete the file: the operation has ended."""
        self._path.unlink(missing_ok=True)
        self._remove_others()

    def _remove_others(self) -> None:
        """Remove other operations' files, and what was left of a file by a process that was killed while it wrote it."""
        for other in [*self._folder.glob("*.safetensors"), *self._folder.glob(".*.part")]:
            if other != self._path:
                other.unlink(missing_ok=True)


def _header(tensors: dict[str, Tensor], metadata: dict[str, str]) -> tuple[bytes, int]:
    """Make the header of a safetensors file, and count the bytes of the whole file."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    for name, tensor in tensors.items():
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + tensor.nbytes]}
        at += tensor.nbytes
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # as the format's own library aligns the data
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + at
