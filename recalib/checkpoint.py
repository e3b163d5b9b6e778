"""Read and write drafter checkpoints, and the target's tensors a drafter shares. Safetensors only: nothing is unpickled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from honed.recalib.drafter import DFlashDrafter, DrafterConfig

INDEX_NAME = "model.safetensors.index.json"
WEIGHTS_NAME = "model.safetensors"
EMBED_NAME, HEAD_NAME, NORM_NAME = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class CheckpointError(ValueError):
    """A checkpoint that can't be used; the message is one line with cause and cure."""


@dataclass(frozen=True, eq=False)
class TargetHead:
    """What a drafter shares with its target, in float32, and what tells whether they belong together."""

    embed_tokens: Tensor  # [V, H_target]
    lm_head: Tensor  # [V, H_target]
    final_norm: Tensor  # [H_target]
    rms_norm_eps: float
    num_hidden_layers: int


def read_config(folder: Path) -> dict[str, Any]:
    """The checkpoint's config.json."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; point to a folder with a Hugging Face checkpoint") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); restore it from the original checkpoint") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds no JSON object; restore it from the original checkpoint")
    return raw


def tensor_files(folder: Path) -> dict[str, Path]:
    """Which file holds each tensor, by the index if there is one."""
    if (folder / INDEX_NAME).exists():
        try:
            weight_map: dict[str, str] = json.loads((folder / INDEX_NAME).read_text())["weight_map"]
        except (ValueError, KeyError) as error:
            raise CheckpointError(f"{folder / INDEX_NAME} is broken ({error}); fetch the checkpoint again") from error
        return {name: folder / Path(file).name for name, file in weight_map.items()}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} has no *.safetensors; convert the weights to safetensors, others are not read")
    return {name: path for path in paths for name in _tensor_names(path)}


def _tensor_names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch the checkpoint again") from error


def read_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Some tensors of a checkpoint, in float32."""
    files = tensor_files(folder)
    tensors = {}
    for name in names:
        if name not in files:
            raise CheckpointError(f"{folder} has no tensor {name}; it is incomplete or of another model family")
        try:
            with safe_open(files[name], framework="pt") as file:
                tensors[name] = file.get_tensor(name).float()
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{files[name]}: {name} cannot be read ({error}); fetch the checkpoint again") from error
    return tensors


def load_target_head(target_dir: Path | str) -> TargetHead:
    """The target's embedding, head and final norm; a tied head is the embedding."""
    folder = Path(target_dir)
    raw = read_config(folder)
    text = raw.get("text_config") or raw
    has_own_head = not (raw.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    names = [EMBED_NAME, NORM_NAME] + ([HEAD_NAME] if has_own_head else [])
    tensors = read_tensors(folder, names)
    return TargetHead(
        embed_tokens=tensors[EMBED_NAME],
        lm_head=tensors.get(HEAD_NAME, tensors[EMBED_NAME]),
        final_norm=tensors[NORM_NAME],
        rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
        num_hidden_layers=int(text["num_hidden_layers"]),
    )


def load_drafter(drafter_dir: Path | str, target_dir: Path | str) -> DFlashDrafter:
    """A drafter with float32 weights, beside the target it was made for.

    Raises:
        CheckpointError: missing file or tensor, wrong shape, or a drafter made for another target.
    """
    folder = Path(drafter_dir)
    try:
        config = DrafterConfig.from_json(read_config(folder))
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error
    head = load_target_head(target_dir)
    check_pair(config, head, folder, Path(target_dir))
    drafter = DFlashDrafter(config, head.embed_tokens, head.lm_head)
    own = drafter.state_dict()
    tensors = read_tensors(folder, own)
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            found, wanted = list(tensor.shape), list(own[name].shape)
            raise CheckpointError(f"{folder}: {name} is {found}, config.json asks for {wanted}; take both from one version")
    drafter.load_state_dict(tensors)
    return drafter


def check_pair(config: DrafterConfig, head: TargetHead, drafter_dir: Path, target_dir: Path) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        CheckpointError: naming the first field that doesn't fit.
    """
    vocab_size, width = head.embed_tokens.shape
    facts = {
        "vocab_size": (config.vocab_size, vocab_size),
        "hidden_size": (config.hidden_size, width),
        "target_hidden_size": (config.target_hidden_size, width),
    }
    for name, (wanted, found) in facts.items():
        if wanted != found:
            raise CheckpointError(_not_a_pair(drafter_dir, target_dir, f"{name} {wanted} against {found}"))
    if max(config.target_layer_ids) >= head.num_hidden_layers or min(config.target_layer_ids) < 0:
        what = f"target_layer_ids {list(config.target_layer_ids)} against {head.num_hidden_layers} layers"
        raise CheckpointError(_not_a_pair(drafter_dir, target_dir, what))
    if not 0 <= config.mask_token_id < vocab_size:
        what = f"mask_token_id {config.mask_token_id} against a vocabulary of {vocab_size}"
        raise CheckpointError(_not_a_pair(drafter_dir, target_dir, what))


def _not_a_pair(drafter_dir: Path, target_dir: Path, what: str) -> str:
    return f"{drafter_dir} was not made for {target_dir} ({what}); use a drafter trained for this target"


def save_drafter(
    drafter: DFlashDrafter, folder: Path | str, config_from: Path | str, dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write a checkpoint vLLM loads: `config.json` of the parent unchanged, the same tensor names in one file.

    Returns:
        The weights file. Both files are written whole or not at all: under another name first, then renamed.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().to("cpu", dtype).contiguous() for name, value in drafter.state_dict().items()}
    part = folder / f".{WEIGHTS_NAME}.part"
    part.write_bytes(save(tensors, metadata={"format": "pt"}))  # not save_file: that one makes the file 0600
    source = Path(config_from) / "config.json"
    if source.resolve() != (folder / "config.json").resolve():
        config_part = folder / ".config.json.part"
        shutil.copyfile(source, config_part)
        config_part.replace(folder / "config.json")
    return part.replace(folder / WEIGHTS_NAME)
