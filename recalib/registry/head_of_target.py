"""Takes an MTP head out of its target's checkpoint: a version holds the head's tensors alone, and the target's config.json.

vLLM loads such a folder as a draft model of method "mtp". Nothing is converted: names, types and bytes stay. Experts stay in
the target's files: they are never trained, and are most of the head. vLLM loads no folder without them.

Imports neither torch nor numpy: the daemon uses it.
"""

from __future__ import annotations

import os
from pathlib import Path

from honed.adapt.models.drafter_tensor_names import IGNORED, MTP_PREFIXES
from honed.adapt.models.trainable import unread_weights
from honed.recalib.registry.access import User
from honed.recalib.registry.manifest import CONFIG
from honed.recalib.registry.one_file import write_tensors
from honed.recalib.registry.target_digest import files_of
from honed.recalib.registry.tensor_file import TensorEntry, read_tensor_entries


def extract_head(target: Path, folder: Path, user: User | None = None) -> None:
    """Write the head's model.safetensors and config.json into a folder.

    Args:
        user: who named the target, if somebody else; the user must be able to read its files too.

    Raises:
        ValueError: the target has no such tensors, its weights aren't safetensors, or a file isn't sound.
        OSError: a file can't be read or written.
    """
    if why := unread_weights("target", os.listdir(target)):
        raise ValueError(why)
    found: list[tuple[Path, TensorEntry]] = []
    for path in files_of(target, lambda name: name.startswith(MTP_PREFIXES)):
        found += [(path, entry) for entry in read_tensor_entries(path) if _is_swapped(entry.name)]
    if not found:
        raise ValueError(
            f"{target} has no tensors of an MTP head (named {' or '.join(f'{prefix}…' for prefix in MTP_PREFIXES)})"
        )
    write_tensors(found, target / CONFIG, folder, user)


def is_head_alone(weights: Path) -> bool:
    """Whether a file has nothing but an MTP head. Raises OSError or ValueError if it can't be read."""
    return all(entry.name.startswith(MTP_PREFIXES) for entry in read_tensor_entries(weights))


def _is_swapped(name: str) -> bool:
    return name.startswith(MTP_PREFIXES) and not any(part in name for part in IGNORED)
