"""What tells a target from others, wherever it is: a copy has the same digest, a fine-tuned one another.

SHA-256 over config.json, and over the name, type, shape and first bytes of each tensor. Fine-tuning changes some of the first
bytes of nearly every tensor that it touches. Reading all of a target would take minutes.

Imports no torch: the daemon uses it.
"""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

from honed.recalib.registry.durable import open_regular, read_document
from honed.recalib.registry.manifest import CONFIG, INDEX, WEIGHTS
from honed.recalib.registry.tensor_file import read_tensor_entries

_MAX_INDEX_BYTES = 64 << 20
SAMPLE_BYTES = 256
"""Of each tensor."""
MOST_SAMPLES = 4096
"""A target gives at most so many. Of more tensors every n-th gives one."""


def digest_of_target(target_path: str) -> str:
    """The digest of a target's folder; "" for what is no local folder with a config.json and safetensors that can be read."""
    folder = Path(target_path)
    if not target_path or "\0" in target_path:
        return ""
    try:
        digest = hashlib.sha256(read_document(folder / CONFIG))
        tensors = sorted((entry.name, path, entry) for path in files_of(folder) for entry in read_tensor_entries(path))
        step = len(tensors) // MOST_SAMPLES + 1
        sampled = {name for name, _, _ in tensors[::step]}
        samples: dict[str, bytes] = {}
        for path in sorted({path for _, path, _ in tensors}):
            with open_regular(path) as file:
                for name, where, entry in tensors:
                    if where == path and name in sampled:
                        file.seek(entry.begin)
                        samples[name] = file.read(min(SAMPLE_BYTES, entry.end - entry.begin))
    except (OSError, ValueError):
        return ""
    for name, _, entry in tensors:
        digest.update(f"{name} {entry.dtype} {list(entry.shape)} ".encode())
        digest.update(samples.get(name, b""))
    return digest.hexdigest() if tensors else ""


def stamp_of_target(target_path: str) -> object:
    """What changes when a target's folder is written anew: compare it before reading it again; None: it can't be read."""
    folder = Path(target_path)
    try:
        paths = [folder / CONFIG, *([folder / INDEX] if (folder / INDEX).exists() else []), *files_of(folder)]
        found = [path.stat() for path in paths]
    except (OSError, ValueError):
        return None
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns, one.st_ctime_ns) for one in found]


def files_of(folder: Path, is_wanted: Callable[[str], bool] = lambda name: True) -> list[Path]:
    """The safetensors files of a checkpoint's tensors of wanted names, by the index if there is one, else all.

    Raises:
        ValueError: the index is broken.
        OSError: it can't be read, or there is no file.
    """
    if not (folder / INDEX).exists():
        if not (found := sorted(folder.glob("*.safetensors"))):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder / WEIGHTS))
        return found
    try:
        names: dict[str, str] = json.loads(read_document(folder / INDEX, _MAX_INDEX_BYTES))["weight_map"]
        return sorted({folder / Path(file).name for name, file in names.items() if is_wanted(name)})
    except (KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"{folder / INDEX} is broken ({error!r})") from error
