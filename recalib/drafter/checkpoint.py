"""Read and write drafter checkpoints and the target's shared tensors. Safetensors only: nothing is unpickled.

No file is mapped, as `safe_open` does: one that somebody cuts off afterwards would end this process with SIGBUS.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from honed.adapt.models.drafter_tensor_names import method_of, names_of
from honed.adapt.models.target_tensor_names import HeadNames, head_names, text_config
from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.drafter.drafter import Drafter, Vocabulary
from honed.recalib.drafter.eagle3 import Eagle3Drafter
from honed.recalib.drafter.mimo import MimoDrafter
from honed.recalib.drafter.mtp import MtpDrafter
from honed.recalib.registry.durable import is_missing, open_regular, read_document
from honed.recalib.registry.tensor_file import TensorEntry, read_tensor_entries

INDEX_NAME = "model.safetensors.index.json"
MAX_INDEX_BYTES = 64 << 20
WEIGHTS_NAME = "model.safetensors"
OWN_SHARED_NAMES = ("embed_tokens.weight", "lm_head.weight")
"""Tensors that a drafter may bring instead of sharing the target's. They are used but never trained."""
WORDS_NAME = "d2t"
"""Offsets of the drafter's words: word i is the target's token i + d2t[i]."""
EXPERTS = "mtp.layers.0.mlp.experts"
"""Beginning of the names of an MTP head's experts, in the target's files."""
MASK_EMBEDDING_NAME = "mask_embedding.pt"
_KINDS: dict[str, type[Drafter]] = {
    "dflash": DFlashDrafter,
    "dspark": DFlashDrafter,
    "eagle3": Eagle3Drafter,
    "mtp": MtpDrafter,
}
"""Class of each method's drafters, see `kind_of`."""
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


class CheckpointError(ValueError):
    """A checkpoint that can't be used. The message is one line with cause and cure."""


@dataclass(frozen=True, eq=False)
class TargetHead:
    """Tensors that a drafter shares with its target, and values that tell whether they belong together."""

    embed_tokens: Tensor  # [V, H_target]
    lm_head: Tensor  # [V, H_target]
    """The embedding itself, of a tied pair."""
    num_hidden_layers: int
    experts: tuple[Tensor, Tensor] | None = None  # [E, 2 * I, H], [E, H, I]
    """Of its MTP head, if they were asked for: gate and up in one, and down."""


def read_config(folder: Path) -> dict[str, Any]:
    """Read the checkpoint's config.json."""
    path = folder / "config.json"
    try:
        raw = json.loads(read_document(path))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; point to a folder with a Hugging Face checkpoint") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); restore it from the original checkpoint") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} holds no JSON object; restore it from the original checkpoint")
    return raw


def tensor_files(folder: Path) -> dict[str, Path]:
    """Map each tensor to its file, by the index if there is one."""
    if not is_missing(folder / INDEX_NAME):
        try:
            weight_map: dict[str, str] = json.loads(read_document(folder / INDEX_NAME, MAX_INDEX_BYTES))["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{folder / INDEX_NAME} is broken ({error}); fetch the checkpoint again") from error
        return {name: folder / Path(file).name for name, file in weight_map.items()}
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} has no *.safetensors; convert the weights to safetensors, the only format read")
    return {name: path for path in paths for name in _entries(path)}


def _entries(path: Path) -> dict[str, TensorEntry]:
    try:
        return {entry.name: entry for entry in read_tensor_entries(path)}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); fetch the checkpoint again") from error


def _read(path: Path, entry: TensorEntry) -> Tensor:
    """Read one tensor as it is stored."""
    data = torch.empty(entry.end - entry.begin, dtype=torch.uint8)
    view, at = data.numpy().data, 0
    try:
        with open_regular(path) as file:
            file.seek(entry.begin)
            while at < len(view) and (count := file.readinto(view[at:])):
                at += count
        if at < len(view):
            raise ValueError("the file is cut off")
        return data.view(_DTYPES[entry.dtype]).view(entry.shape)
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: {entry.name} cannot be read ({error}); fetch the checkpoint again") from error


def read_tensors(folder: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """Read some tensors of a checkpoint, in float32."""
    return {name: tensor.float() for name, tensor in read_stored(folder, names)}


def read_stored(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
    """Read some tensors of a checkpoint, one after another, as they are stored."""
    return ((name, _read(path, entry)) for name, path, entry in _find(folder, names))


def _find(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Path, TensorEntry]]:
    """Find some tensors of a checkpoint: name, file and place in it."""
    files = tensor_files(folder)
    entries: dict[Path, dict[str, TensorEntry]] = {}
    for name in names:
        path = files.get(name)
        if path is not None and path not in entries:
            entries[path] = _entries(path)
        if path is None or name not in entries[path]:
            raise CheckpointError(f"{folder} has no tensor {name}; it is incomplete or of another model family")
        yield name, path, entries[path][name]


def target_head_names(target_dir: Path | str) -> HeadNames:
    """Find the target's embedding and head. Raises CheckpointError if one can't be found or used."""
    folder = Path(target_dir)
    try:
        return head_names(read_config(folder), tensor_files(folder))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}: it is incomplete or of another model family") from error


def load_target_head(
    target_dir: Path | str,
    config: DrafterConfig | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> TargetHead:
    """Load the target's embedding and head, and an MTP head's experts; a tied head is the embedding.

    Args:
        config: the drafter's, which says whether it has experts.
        device: where they go. Host memory only takes the tensor that is on its way there, and one expert at a time.
        dtype: type that they have there.
    """
    folder = Path(target_dir)
    names = target_head_names(folder)
    tensors = {name: tensor.to(device, dtype) for name, tensor in read_stored(folder, {names.embed_tokens, names.lm_head})}
    return TargetHead(
        embed_tokens=tensors[names.embed_tokens],
        lm_head=tensors[names.lm_head],
        num_hidden_layers=int(text_config(read_config(folder))["num_hidden_layers"]),
        experts=_load_experts(folder, config, device, dtype) if config and config.mtp and config.mtp.experts else None,
    )


def _load_experts(
    folder: Path, config: DrafterConfig, device: torch.device | str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:  # [E, 2 * I, H], [E, H, I]
    """Read an MTP head's experts, stored in two tensors or one by one: then there are thousands, looked up together."""
    experts = config.mtp and config.mtp.experts
    assert experts, "the head has none"
    count, inner, width = experts.count, experts.intermediate_size, config.hidden_size
    gate_up = torch.empty(count, 2 * inner, width, device=device, dtype=dtype)
    down = torch.empty(count, width, inner, device=device, dtype=dtype)
    places = {f"{EXPERTS}.gate_up_proj": gate_up, f"{EXPERTS}.down_proj": down}
    if f"{EXPERTS}.gate_up_proj" not in tensor_files(folder):
        parts = (("gate", gate_up[:, :inner]), ("up", gate_up[:, inner:]), ("down", down))
        places = {f"{EXPERTS}.{n}.{part}_proj.weight": place[n] for n in range(count) for part, place in parts}
    for name, path, entry in _find(folder, places):
        place = places[name]
        _check_shape(folder, name, entry.shape, place.shape)
        for part, stored in zip(place, _apart(entry), strict=True) if place.dim() == 3 else [(place, entry)]:
            part.copy_(_read(path, stored))
    return gate_up, down


def _apart(entry: TensorEntry) -> Iterator[TensorEntry]:
    """Split a tensor along its first dimension."""
    size = (entry.end - entry.begin) // entry.shape[0]
    return (replace(entry, shape=entry.shape[1:], begin=at, end=at + size) for at in range(entry.begin, entry.end, size))


def _check_shape(folder: Path, name: str, found: Sequence[int], wanted: Sequence[int]) -> None:
    if tuple(found) != tuple(wanted):
        what = f"{name} is {list(found)}, config.json asks for {list(wanted)}"
        raise CheckpointError(f"{folder}: {what}; take both from one version")


def read_drafter_config(drafter_dir: Path | str, num_draft_tokens: int = 0) -> DrafterConfig:
    """Read a drafter's shape.

    Args:
        num_draft_tokens: the engine's; 0: as the drafter's config says. A DFlash drafter's block has no more rows than that:
            vLLM gives it as many, and each sees all others.

    Raises:
        CheckpointError: it can't be read or can't be trained.
    """
    folder = Path(drafter_dir)
    try:
        config = DrafterConfig.from_json(read_config(folder), method_of(stored_names(folder)))
        if num_draft_tokens:
            most = num_draft_tokens if config.drafts_one_by_one else min(num_draft_tokens, config.num_draft_tokens)
            config = replace(config, block_size=most + 1)
        return config
    except CheckpointError:
        raise
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from error


def load_drafter(
    drafter_dir: Path | str, target_dir: Path | str, head: TargetHead | None = None, num_draft_tokens: int = 0
) -> Drafter:
    """Load a drafter with float32 weights for the target it was made for.

    Args:
        head: the target's, if it has already been read: compared drafters share one.
        num_draft_tokens: as for `read_drafter_config`.

    Raises:
        CheckpointError: a missing file or tensor, a wrong shape, or a drafter made for another target.
    """
    folder = Path(drafter_dir)
    config = read_drafter_config(folder, num_draft_tokens)
    words = _read_words(folder, config)
    if (folder / MASK_EMBEDDING_NAME).exists():
        raise CheckpointError(
            f"{folder / MASK_EMBEDDING_NAME}: a mask embedding of its own is pickled, and nothing is unpickled here; "
            "serve this drafter without recalibration"
        )
    head = head or load_target_head(target_dir, config)
    check_pair(config, head, folder, Path(target_dir))
    stored = stored_names(folder)
    embed_tokens, lm_head = (
        _own_or(of_target, folder, name) if name in stored.values() else of_target
        for name, of_target in zip(OWN_SHARED_NAMES, (head.embed_tokens, head.lm_head), strict=True)
    )
    if lm_head.shape != (config.num_words, config.hidden_size):
        raise CheckpointError(
            f"{folder}: its head is {list(lm_head.shape)}, config.json asks for {[config.num_words, config.hidden_size]}; "
            "take both from one version"
        )
    drafter = kind_of(config)(config, Vocabulary(embed_tokens, lm_head, words))
    own = drafter.state_dict()
    found = read_tensors(folder, [stored.get(name, name) for name in own])
    tensors = {name: found[stored.get(name, name)] for name in own}
    for name, tensor in tensors.items():
        _check_shape(folder, name, tensor.shape, own[name].shape)
    drafter.load_state_dict(tensors)
    if head.experts is not None:
        assert isinstance(drafter, MtpDrafter)
        drafter.take_experts(*head.experts)
    return drafter


def _own_or(of_target: Tensor, folder: Path, name: str) -> Tensor:
    """A drafter's own embedding or head; the target's where it is a copy of that, as many are: it takes gigabytes."""
    own = read_tensors(folder, [name])[name]
    if own.shape == of_target.shape and torch.equal(own.to(of_target.device, of_target.dtype), of_target):
        return of_target
    return own


def kind_of(config: DrafterConfig) -> type[Drafter]:
    """Class of a drafter of this shape."""
    return MimoDrafter if config.mtp is not None and config.mtp.is_mimo else _KINDS[config.method]


def _read_words(folder: Path, config: DrafterConfig) -> Tensor | None:  # [W]
    """The target's id of each word of a reduced vocabulary; None: the drafter has all. Raises CheckpointError."""
    if config.draft_vocab_size is None:
        return None
    offsets = dict(read_stored(folder, [WORDS_NAME]))[WORDS_NAME].long()
    if offsets.shape != (config.draft_vocab_size,):
        what = f"{list(offsets.shape)}, config.json asks for {[config.draft_vocab_size]}"
        raise CheckpointError(f"{folder}: {WORDS_NAME} is {what}; take both from one version")
    words = offsets + torch.arange(len(offsets))
    if words.min() < 0 or words.max() >= config.vocab_size or len(set(words.tolist())) < len(words):
        raise CheckpointError(f"{folder}: {WORDS_NAME} maps words outside of the vocabulary, or two to one; fetch it again")
    return words


def _tensor_names(folder: Path) -> set[str]:
    """Names in a checkpoint; empty if there are no weights."""
    try:
        return set(tensor_files(folder))
    except CheckpointError:
        return set()


def stored_names(folder: Path) -> dict[str, str]:
    """Map our name of each tensor to its name in the checkpoint, see `names_of`; empty if there are no weights."""
    try:
        return names_of(_tensor_names(folder))
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def check_pair(config: DrafterConfig, head: TargetHead, drafter_dir: Path, target_dir: Path) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        CheckpointError: names the first field that doesn't fit.
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
    layers = config.target_layer_ids
    if layers and (max(layers) >= head.num_hidden_layers or min(layers) < 0):
        what = f"target_layer_ids {list(config.target_layer_ids)} against {head.num_hidden_layers} layers"
        raise CheckpointError(_not_a_pair(drafter_dir, target_dir, what))
    if not 0 <= config.mask_token_id < vocab_size:
        what = f"mask_token_id {config.mask_token_id} against a vocabulary of {vocab_size}"
        raise CheckpointError(_not_a_pair(drafter_dir, target_dir, what))


def _not_a_pair(drafter_dir: Path, target_dir: Path, what: str) -> str:
    return f"{drafter_dir} was not made for {target_dir} ({what}); use a drafter trained for this target"


def save_drafter(
    drafter: Drafter,
    folder: Path | str,
    config_from: Path | str,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Write a one-file checkpoint that vLLM loads, with the parent's tensor names.

    Args:
        config_from: the parent's folder. Its config.json, its tensors' names and its untrained tensors (an embedding or a head
            of its own, a reduced vocabulary) are kept.

    Returns:
        The weights file. Both files are written completely or not at all: under another name first, then renamed.
    """
    folder, parent = Path(folder), Path(config_from)
    folder.mkdir(parents=True, exist_ok=True)
    stored = stored_names(parent)
    own = drafter.state_dict()
    tensors = {stored.get(name, name): value.detach().to("cpu", dtype).contiguous() for name, value in own.items()}
    if untrained := sorted(_tensor_names(parent) - tensors.keys()):
        tensors |= read_stored(parent, untrained)
    part = folder / f".{WEIGHTS_NAME}.part"
    part.write_bytes(save(tensors, metadata={"format": "pt"}))  # not save_file: that one makes the file 0600
    _copy_config(parent / "config.json", folder / "config.json")
    return part.replace(folder / WEIGHTS_NAME)


def _copy_config(source: Path, copy: Path) -> None:
    if source.resolve() == copy.resolve():
        return
    part = copy.with_name(".config.json.part")
    shutil.copyfile(source, part)
    part.replace(copy)
