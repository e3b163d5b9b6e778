"""Where the files of an engine's models are, and what they hold."""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any

from honed.adapt.models.drafter_tensor_names import METHODS
from honed.adapt.models.trainable import Pair

MAX_HEADER_BYTES = 64 << 20
"""Longest index or header that is read."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".gguf")


def pair_of(vllm_config: Any) -> Pair:
    """Facts of an engine's target and drafter, from the configuration that vLLM has resolved and the target's files."""
    speculative, model = vllm_config.speculative_config, getattr(vllm_config, "model_config", None)
    method, draft_model = str(getattr(speculative, "method", "") or ""), getattr(speculative, "draft_model_config", None)
    target_folder = folder_of(model, vllm_config.load_config) if hasattr(model, "model") else ""
    drafter_folder = draft_folder(vllm_config) if target_folder and hasattr(draft_model, "model") else ""
    return Pair(
        method=method,
        drafter=_config_of(draft_model) if method in METHODS else None,
        target=_config_of(model),
        target_tensors=tensor_names(target_folder) if target_folder else None,
        drafter_files=_names_in(drafter_folder) if drafter_folder != target_folder else (),
        target_files=_names_in(target_folder),
        pipeline_parallel_size=vllm_config.parallel_config.pipeline_parallel_size,
        is_adaptive=bool(getattr(speculative, "enable_adaptive_verification", False)),
    )


def _names_in(folder: str) -> list[str]:
    """Names of a folder's files; empty if there is no such folder."""
    try:
        return os.listdir(folder) if folder else []
    except OSError:
        return []


def _config_of(model_config: Any) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = model_config.hf_config.to_dict()
    except Exception:  # a model's own class may do anything; what isn't known isn't judged
        return None
    return found


def draft_folder(vllm_config: Any) -> str:
    """Folder of the draft model's files; "" if it has none of its own.

    For ngram and other methods without weights vLLM sets the draft model's configuration to the target's. An MTP head's layers
    are in the target's files.
    """
    speculative = vllm_config.speculative_config
    draft_model = getattr(speculative, "draft_model_config", None)
    if draft_model is None:
        return ""
    if str(draft_model.model) == str(vllm_config.model_config.model) and speculative.method != "mtp":
        return ""
    return folder_of(draft_model, vllm_config.load_config)


def folder_of(model_config: Any, load_config: Any) -> str:
    """Folder of a model's files, as an absolute path, since daemon and trainer have their own working directories.

    For a name on the Hugging Face hub: the snapshot in the cache that vLLM has loaded, or the name itself if there is none.
    """
    model = str(model_config.model)
    if os.path.isdir(model):
        return os.path.abspath(model)
    try:
        from huggingface_hub import try_to_load_from_cache

        revision, folder = getattr(model_config, "revision", None), getattr(load_config, "download_dir", None)
        found = try_to_load_from_cache(model, "config.json", cache_dir=folder, revision=revision)
    except (ImportError, ValueError, OSError):  # ValueError: the hub can't have such a name
        return model
    return os.path.dirname(found) if isinstance(found, str) else model


def content_crc(folder: str) -> int:
    """CRC-32 that tells a model from others of the same shapes, such as fine-tuned ones, wherever its files are.

    It is of some 512 samples, spread over all files of weights. Without such files it is the name's.
    """
    try:
        files = {p: p.stat().st_size for p in sorted(Path(folder).glob("*")) if p.suffix in _WEIGHTS and p.is_file()}
        step = max(sum(files.values()) // 512, 4096)
        crc = zlib.crc32(repr([(path.name, size) for path, size in files.items()] or folder).encode())
        for path, size in files.items():
            with path.open("rb", buffering=0) as stream:
                for at in range(0, size, step):
                    stream.seek(at)
                    crc = zlib.crc32(stream.read(256), crc)
    except (OSError, ValueError):
        return zlib.crc32(folder.encode(errors="replace"))
    return crc


def tensor_names(folder: str) -> frozenset[str] | None:
    """Names of the tensors in a checkpoint's safetensors files; None if that can't be read."""
    index, files = Path(folder) / "model.safetensors.index.json", sorted(Path(folder).glob("*.safetensors"))
    try:
        if index.exists():
            return frozenset(json.loads(_head(index, 0))["weight_map"])
        found = [json.loads(_head(file, 8)) for file in files]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return frozenset(name for names in found for name in names) if files else None


def _head(file: Path, at: int) -> bytes:
    """A whole file, or the header of a safetensors file, whose length its first 8 bytes say."""
    with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK)) as stream:
        size = int.from_bytes(stream.read(at), "little") if at else os.fstat(stream.fileno()).st_size
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"{file} has a header of {size} bytes")
        return stream.read(size)
