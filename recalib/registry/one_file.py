"""Writes tensors of several safetensors files into one: a version's weights are one file, whatever they came in.

Nothing is converted: names, types and bytes stay. Imports neither torch nor numpy: the daemon uses it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from honed.adapt.models.drafter_tensor_names import names_of
from honed.adapt.models.trainable import unread_weights
from honed.recalib.registry.access import User, check_readable
from honed.recalib.registry.durable import open_regular
from honed.recalib.registry.manifest import CONFIG, WEIGHTS, method_in
from honed.recalib.registry.target_digest import files_of
from honed.recalib.registry.tensor_file import TensorEntry, read_tensor_entries


def gather_drafter(source: Path, folder: Path, max_bytes: int, user: User | None = None) -> None:
    """Write the model.safetensors and config.json of a drafter in shards, or in a file of another name, into a folder.

    Args:
        max_bytes: most that its tensors may have.
        user: who named the drafter, if somebody else; the user must be able to read its files too.

    Raises:
        ValueError: its weights aren't safetensors, aren't sound or aren't a drafter's that honed trains.
        OSError: a file can't be read or written.
    """
    if why := unread_weights("drafter", os.listdir(source)):
        raise ValueError(why)
    tensors = [(path, entry) for path in files_of(source) for entry in read_tensor_entries(path)]
    method_in(source, names_of(entry.name for _, entry in tensors))
    if (num_bytes := sum(entry.end - entry.begin for _, entry in tensors)) > max_bytes:
        raise ValueError(f"its tensors have {num_bytes} bytes, a drafter's at most {max_bytes}")
    write_tensors(tensors, source / CONFIG, folder, user)


def write_tensors(tensors: Sequence[tuple[Path, TensorEntry]], config: Path, folder: Path, user: User | None) -> None:
    """Write tensors, by their names' order, and a copy of a config.json into a folder.

    Args:
        tensors: with the files that they are in.
        user: who named these files, if somebody else.

    Raises:
        ValueError: a file was cut off meanwhile.
        OSError: a file can't be read, or not by this user, or can't be written.
    """
    found = sorted(tensors, key=lambda one: one[1].name)
    header, at = {}, 0
    for _, entry in found:
        size = entry.end - entry.begin
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [at, at + size]}
        at += size
    told = json.dumps(header, separators=(",", ":")).encode()
    told += b" " * (-len(told) % 8)
    with ExitStack() as stack, (folder / WEIGHTS).open("wb") as out:
        files = {path: stack.enter_context(open_regular(path)) for path in {path for path, _ in found} | {config}}
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
        with (folder / CONFIG).open("wb") as copy:
            shutil.copyfileobj(files[config], copy, 1 << 20)
