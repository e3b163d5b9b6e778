"""The saved state from which a training resumes after its process was killed: one safetensors file an operation.

It holds weights, optimizer and random generators, but no samples: those are read from the engine's ring again. The file exists
completely or not at all. Only the same request with the same settings resumes from it; anything else starts afresh.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import structlog
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from honed.recalib.registry.durable import fsync_path, make_folder

log = structlog.get_logger("honed.trainer")

_NAME = re.compile(r"[\w.-]+")


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

    def save(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Replace the previous state, and remove other operations' files.

        Args:
            facts: values that are plain JSON.

        Raises:
            OSError: the disk is full, or the folder isn't ours.
        """
        make_folder(self._folder)
        part = self._folder / f".{self._path.name}.part"
        metadata = {"about": self._about, "facts": json.dumps(facts)}
        try:
            save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, part, metadata)  # mode 0600
            fsync_path(part)
            os.replace(part, self._path)
        except SafetensorError as error:  # raised for a full disk
            part.unlink(missing_ok=True)
            raise OSError(f"{part}: {error}") from error
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
