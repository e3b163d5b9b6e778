"""The manifest of one drafter version."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from honed.adapt.models.drafter_tensor_names import METHODS, makes_context, makes_features, method_of
from honed.adapt.protocol.wire import GateTable
from honed.recalib.registry.durable import read_document, sha256_file
from honed.recalib.registry.tensor_file import TensorEntry, read_drafter_entries, sha256_tensors

WEIGHTS, CONFIG, MANIFEST = "model.safetensors", "config.json", "manifest.json"
INDEX = "model.safetensors.index.json"
"""Lists the files of a checkpoint in shards."""
CHECKPOINT = f"a drafter checkpoint is one folder with {CONFIG} and safetensors"


class RegistryError(ValueError):
    """A fault in the registry; the text names the file, the cause and the cure."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Results that a training reports."""

    gate: GateTable = []
    blend: float | None = None
    """Share of the training's change that was kept."""
    steps: int = 0
    tokens: int = 0
    loss: float | None = None
    train_seconds: float = 0.0


NO_FIGURES = Figures()


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One immutable version. New fields may be added, with a default; none is ever removed."""

    version: str
    created_unix_s: float
    sha256: str
    """SHA-256 of model.safetensors."""
    bytes: int
    """Length of model.safetensors."""
    config_sha256: str
    method: str = ""
    """vLLM's speculative method that drafts with it; engines of other methods can't take it."""
    parent: str = ""
    scope: str = ""
    target_path: str = ""
    target_sha256: str = ""
    """Digest of the target (`digest_of_target`); "" if it isn't a local folder."""
    context_sha256: str = ""
    """Digest of what makes fused features: drafters can use each other's only if it is equal."""
    kv_sha256: str = ""
    """Digest of all that cached context keys and values depend on: a swap between equal ones keeps the cache."""
    note: str = ""
    figures: Figures = NO_FIGURES
    data_window: dict[str, Any] = {}
    """Training data: rows by workload, number of sessions, and a keyed digest. No content."""
    vllm_version: str = ""
    """Version of vLLM in the engine whose traffic that was."""
    origin: str = ""
    """Host and name there of a version that came from a shared registry."""
    num_tensors: int = 0
    state: str = "ready"
    """"ready", or in listings "corrupt"."""
    error: str = ""

    @property
    def trial_key(self) -> str:
        """Digest of its weights and its target: what a trial's verdict is of."""
        return hashlib.sha256(f"{self.sha256} {self.target_sha256 or self.target_path}".encode()).hexdigest()


def describe_checkpoint(folder: Path, version: str, created_unix_s: float = 0.0, **about: Any) -> Manifest:
    """Check a checkpoint folder's files and make its manifest.

    Args:
        created_unix_s: when it was trained; 0: now.

    Raises:
        RegistryError: a file is missing or isn't what its name says.
    """
    weights, config = folder / WEIGHTS, folder / CONFIG
    entries, method = read_drafter(weights)
    try:
        msgspec.json.decode(read_document(config), type=dict[str, Any])
        return Manifest(
            version=version,
            created_unix_s=created_unix_s or time.time(),
            sha256=sha256_file(weights),
            bytes=weights.stat().st_size,
            config_sha256=sha256_file(config),
            method=method,
            context_sha256=sha256_tensors(weights, entries, lambda name: makes_features(name, method)),
            kv_sha256=sha256_tensors(weights, entries, lambda name: makes_context(name, method)),
            num_tensors=len(entries),
            **about,
        )
    except msgspec.DecodeError as error:
        raise RegistryError(f"{config} is not JSON ({error}); {CHECKPOINT}") from error
    except OSError as error:
        raise RegistryError(f"{error.filename or folder} can't be read ({error.strerror}); {CHECKPOINT}") from error


def read_drafter(weights: Path) -> tuple[list[TensorEntry], str]:
    """Read the header of a drafter's weights.

    Returns:
        its tensors, under our names, and vLLM's method that drafts with them.

    Raises:
        RegistryError: it can't be read, isn't sound or isn't a drafter's that honed trains.
    """
    try:
        entries = read_drafter_entries(weights)
    except OSError as error:
        raise RegistryError(f"{error.filename or weights} can't be read ({error.strerror}); {CHECKPOINT}") from error
    except ValueError as error:
        raise RegistryError(f"{weights} is not a sound safetensors file: {error}; {CHECKPOINT}") from error
    return entries, method_in(weights, (entry.name for entry in entries))


def method_in(where: Path, names: Iterable[str]) -> str:
    """Return vLLM's method that drafts with tensors of these names of ours. Raises RegistryError if none of ours does."""
    if method := method_of(names):
        return method
    raise RegistryError(f"{where} holds no drafter of method {' or '.join(METHODS)}, judging by its tensors' names")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a version's folder and check it as far as possible without reading the weights.

    Raises:
        RegistryError: names the file, the cause and the cure.
    """
    cure = f"promote another version, then remove the folder {folder} or restore it from a backup"
    try:
        manifest = msgspec.json.decode(read_document(folder / MANIFEST), type=Manifest)
        num_bytes = (folder / WEIGHTS).stat().st_size
        (folder / CONFIG).stat()
    except msgspec.DecodeError as error:
        raise RegistryError(f"{folder / MANIFEST} is damaged ({error}); {cure}") from error
    except OSError as error:
        raise RegistryError(f"{error.filename or folder} can't be read ({error.strerror}); {cure}") from error
    if manifest.version != folder.name:
        raise RegistryError(f"{folder / MANIFEST} is of version {manifest.version!r}, not of its folder; {cure}")
    if num_bytes != manifest.bytes:
        raise RegistryError(f"{folder / WEIGHTS} has {num_bytes} bytes, its manifest says {manifest.bytes}; {cure}")
    return manifest


def verify_files(folder: Path) -> Manifest:
    """Read the manifest as `read_manifest`, and compare every byte through both SHA-256 in it."""
    manifest = read_manifest(folder)
    for name, told in ((WEIGHTS, manifest.sha256), (CONFIG, manifest.config_sha256)):
        try:
            found = sha256_file(folder / name)
        except OSError as error:
            raise RegistryError(f"{folder / name} can't be read ({error.strerror})") from error
        if told != found:
            raise RegistryError(
                f"{folder / name} has sha256 {found[:16]}…, its manifest says {told[:16]}…: the file was changed; "
                f"promote another version, then remove the folder {folder} or restore it from a backup"
            )
    return manifest


def is_for_target(manifest: Manifest, target_path: str, target_digest: str) -> bool:
    """Whether a version was made for the target at this path, or for a copy of it.

    Another target may have taken the place of the version's: the path decides only where a digest is unknown.

    Args:
        target_digest: as `digest_of_target` gives it; "": unknown.
    """
    if target_digest and manifest.target_sha256:
        return manifest.target_sha256 == target_digest
    return "" in (manifest.target_path, target_path) or manifest.target_path == target_path
