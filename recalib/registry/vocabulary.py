"""Counts the embeddings and heads that a training holds, by the files of a drafter and its target.

A drafter may bring an embedding or a head of its own. One that is a copy of the target's is held once, see `load_drafter`.

Imports no torch: `honed doctor` uses it.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

from honed.adapt.models.drafter_tensor_names import SHARED, names_of
from honed.adapt.models.target_tensor_names import head_names
from honed.recalib.registry.durable import open_regular, read_document
from honed.recalib.registry.manifest import CONFIG
from honed.recalib.registry.target_digest import files_of
from honed.recalib.registry.tensor_file import TensorEntry, read_tensor_entries

SAMPLE_BYTES = 256
MOST_SAMPLES = 4096
"""Of two tensors that are compared: reading all of them would take as long as loading them."""


class VocabularyTensors(NamedTuple):
    """Facts that `estimate` takes; the defaults are for files that can't be read."""

    is_head_tied: bool = False
    """Whether the target's head is its embedding."""
    own_values: int | None = None
    """Values of the drafter's own embedding and head, copies of the target's left out; None: unknown."""


def vocabulary_tensors(drafter: Path, target: Path) -> VocabularyTensors:
    """Compare the files of a drafter and its target. Files that can't be read are no error: who loads them says why."""
    try:
        ours, theirs = _stored(drafter), _stored(target)
        config = json.loads(read_document(target / CONFIG))
        if not isinstance(config, dict):
            return VocabularyTensors()
        names, own = head_names(config, theirs), names_of(ours)
        values = 0
        for name, of_target in zip(SHARED, (names.embed_tokens, names.lm_head), strict=True):
            stored = own.get(f"{name}.weight")
            if stored is not None and not _is_copy(ours[stored], theirs[of_target]):
                values += math.prod(ours[stored][1].shape)
        return VocabularyTensors(names.lm_head == names.embed_tokens, values)
    except (OSError, ValueError):
        return VocabularyTensors()


def _stored(folder: Path) -> dict[str, tuple[Path, TensorEntry]]:
    return {entry.name: (path, entry) for path in files_of(folder) for entry in read_tensor_entries(path)}


def _is_copy(one: tuple[Path, TensorEntry], other: tuple[Path, TensorEntry]) -> bool:
    """Whether two tensors have the same type, shape and samples."""
    (path, entry), (other_path, other_entry) = one, other
    if (entry.dtype, entry.shape) != (other_entry.dtype, other_entry.shape):
        return False
    size = entry.end - entry.begin
    with open_regular(path) as file, open_regular(other_path) as other_file:
        for at in range(0, size, max(SAMPLE_BYTES, size // MOST_SAMPLES)):
            file.seek(entry.begin + at)
            other_file.seek(other_entry.begin + at)
            count = min(SAMPLE_BYTES, size - at)
            if file.read(count) != other_file.read(count):
                return False
    return True
