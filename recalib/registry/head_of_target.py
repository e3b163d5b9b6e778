"""Takes an MTP head out of its target's checkpoint: a version holds the head's tensors alone, and the target's config.json.

vLLM loads such a folder as a draft model of method "mtp". Nothing is converted: names, types and bytes stay. Experts stay in
the target's files: they are never trained, and are most of the head. vLLM loads no folder without them.

Imports neither torch nor numpy: the daemon uses it.
"""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from pathlib import Path

from honed.adapt.models.drafter_tensor_names import IGNORED, MTP_PREFIXES
from honed.recalib.registry.access import User, check_readable
from honed.recalib.registry.durable import open_regular
from honed.recalib.registry.manifest import CONFIG, WEIGHTS
from honed.recalib.registry.target_digest import files_of
from honed.recalib.registry.tensor_file import TensorEntry, read_tensor_entries


def extract_head(target: Path, folder: Path, user: User | None = None) -> None:
    """Write the head's model.safetensors and config.json into a folder.

    Args:
        user: who named the target, if somebody else; the user must be able to read its files too.

    Raises:
        ValueError: the target has no such tensors, or a file isn't sound.
        OSError: a file can't be read or written.
    """
    found: list[tuple[Path, TensorEntry]] = []
    for path in files_of(target, lambda name: name.startswith(MTP_PREFIXES)):
        found += [(path, entry) for entry in read_tensor_entries(path) if _is_swapped(entry.name)]
    if not found:
        raise ValueError(
            f"{target} has no tensors of an MTP head (named {' or '.join(f'{prefix}…' for prefix in MTP_PREFIXES)})"
        )
    found.sort(key=lambda one: one[1].name)
    header, at = {}, 0
    for _, entry in found:
        size = entry.end - entry.begin
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + size]}
        at += size
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)
    with ExitStack() as stack, (folder / WEIGHTS).open("wb") as out:
        files = {path: stack.enter_context(open_regular(path)) for path in {path for path, _ in found} | {target / CONFIG}}
        for file in files.values():
            if user is not None:
                check_readable(file, user)
        out.write(len(told).to_bytes(8, "little") + told)
        for path, entry in found:
            file = files[path]
            file.seek(entry.begin)
            left = entry.end - entry.begin
            while left:
                part = file.read(min(left, 1 << 20))
                if not part:
                    raise ValueError(f"{path}: {entry.name} is cut off")
                out.write(part)
                left -= len(part)
        with (folder / CONFIG).open("wb") as config:
            shutil.copyfileobj(files[target / CONFIG], config, 1 << 20)


def is_head_alone(weights: Path) -> bool:
    """Whether a file has nothing but an MTP head. Raises OSError or ValueError if it can't be read."""
    return all(entry.name.startswith(MTP_PREFIXES) for entry in read_tensor_entries(weights))


def _is_swapped(name: str) -> bool:
    return name.startswith(MTP_PREFIXES) and not any(part in name for part in IGNORED)
