"""An untrained DFlash drafter for a target that has none: `honed calibrate --new-drafter` starts this file as a program.

vLLM can't serve `method=dflash` without a drafter, and layers are only captured for a drafter. So such a target is first served
with this one. It has learnt nothing, its drafts are wrong (acceptance length about 1), and until it is trained it costs the
time of its drafts. Embedding and head are the target's, as with every DFlash drafter; they aren't stored.

    shape            the target's layer, `num_layers` times; block size, mask token and target layers of the published family if
                     the target has one (presets.py), else 16, the vocabulary's unused token, and the paper's rule
    weights          the target's own last layers, if it has the drafter's architecture; `fc` passes on the deepest layer read,
                     plus noise, and `hidden_norm` is the norm that the target has there. Else random: N(0, 0.02), with
                     additions to the residual stream (o_proj, down_proj) smaller by sqrt(2 x layers), norms 1

On the tiny pair, after 207 updates of 64 blocks, acceptance length on held-out sessions was 1.51 from the target's layers and
1.24 from random ones (one run each).

Source of the random initialisation: GPT-2 (Radford et al. 2019, section 2.3); of the shape: arXiv 2602.06036, section 3.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.config.presets import even_layer_ids, preset_of
from honed.recalib.drafter.checkpoint import (
    CheckpointError,
    check_pair,
    load_target_head,
    read_config,
    read_stored,
    save_drafter,
    target_head_names,
    tensor_files,
)
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.registry.durable import open_regular

NUM_LAYERS, BLOCK_SIZE, STD = 5, 16, 0.02
SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)
"""Fields that the drafter's config.json takes from the target's."""
ALIKE = ("qwen3", "qwen3_moe")
"""Targets with the drafter's architecture."""


def drafter_config(
    target: Mapping[str, Any],
    unused_token_id: int | None,
    *,
    num_layers: int = NUM_LAYERS,
    block_size: int = 0,
    mask_token_id: int | None = None,
) -> dict[str, Any]:
    """Make the config.json of a drafter for a target, in z-lab's form.

    Args:
        target: the target's config.json.
        unused_token_id: a token of the target's vocabulary that no text has; None if none is known.
        num_layers: layers of the drafter, and target layers that it reads.
        block_size: anchor included; 0: the family's, or 16.
        mask_token_id: None: the family's, or the unused one.

    Raises:
        ValueError: the target lacks a field or has too few layers for the shape, or no mask token is known.
    """
    text = {**target, **(target.get("text_config") or {})}
    num_target_layers = int(text.get("num_hidden_layers") or 0)
    if missing := [name for name in ("num_hidden_layers", *SHAPE[:5]) if not text.get(name)]:
        raise ValueError(f"the target's config.json has no {missing[0]!r}, so the drafter's shape isn't known")
    preset = preset_of({**text, "num_target_layers": num_target_layers})
    known_mask = preset.mask_token_id if preset else unused_token_id
    mask = known_mask if mask_token_id is None else mask_token_id
    if mask is None:
        raise ValueError("every token of the target's vocabulary is in use: name one that no text has with --mask-token-id")
    layers = preset.target_layer_ids if preset and num_layers == len(preset.target_layer_ids) else None
    if num_layers > (most := num_target_layers - 3):
        why = f"{num_layers} of {num_target_layers} target layers can't be read from the 2nd to the 3rd-last"
        raise ValueError(f"{why}: use --layers {most}" if most > 0 else f"{why}: the target has too few for a DFlash drafter")
    rope = text.get("rope_parameters") or {}
    shape = {name: text[name] for name in SHAPE if text.get(name) is not None}
    return shape | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": num_layers,
        "hidden_act": "silu",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(rope.get("rope_theta") or text.get("rope_theta") or 1_000_000.0),
        },
        "attention_bias": False,
        "tie_word_embeddings": bool(text.get("tie_word_embeddings")),
        "torch_dtype": "bfloat16",
        "block_size": block_size or (preset.block_size if preset else BLOCK_SIZE),
        "num_target_layers": num_target_layers,
        "dflash_config": {
            "mask_token_id": int(mask),
            "target_layer_ids": list(layers or even_layer_ids(num_target_layers, num_layers)),
        },
    }


def unused_token_id(target_dir: Path, vocab_size: int) -> int | None:
    """Find a token that no text has: one named a mask, else the first beyond the tokenizer's (as in Qwen3's family)."""
    try:
        with open_regular(target_dir / "tokenizer.json") as file:
            tokenizer = json.load(file)
        added = {token["content"]: int(token["id"]) for token in tokenizer.get("added_tokens") or ()}
        vocabulary = tokenizer["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    for name, token_id in added.items():
        if "mask" in name.lower():
            return token_id
    beyond = 1 + max([*added.values(), *ids], default=-1)
    return beyond if beyond < vocab_size else None


def new_drafter(config: DrafterConfig, target_dir: Path, seed: int = 0) -> DFlashDrafter:
    """Make an untrained drafter for its target. Raises CheckpointError."""
    head = load_target_head(target_dir)
    check_pair(config, head, Path("the new drafter"), target_dir)
    generator = torch.Generator().manual_seed(seed)
    drafter = DFlashDrafter(config, Vocabulary(head.embed_tokens, head.lm_head))
    added = STD / math.sqrt(2 * config.num_hidden_layers)
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            std = added if "o_proj" in name or "down_proj" in name else STD
            torch.nn.init.normal_(parameter, std=std, generator=generator)
    if is_alike(read_config(target_dir)):
        take_layers(drafter, target_dir)
    return drafter


def is_alike(target: Mapping[str, Any]) -> bool:
    """Tell whether the target's layers are the drafter's kind: others differ in norms, biases or storage."""
    return target.get("model_type") in ALIKE and not target.get("quantization_config")


@torch.no_grad()
def take_layers(drafter: DFlashDrafter, target_dir: Path) -> None:
    """Start from the target's last layers. Tensors that it lacks, or has in another shape (experts), stay as they are."""
    config, files = drafter.config, tensor_files(target_dir)
    taken: dict[str, torch.Tensor] = {}
    assert config.num_target_layers is not None
    skipped = config.num_target_layers - config.num_hidden_layers
    width, after = config.target_hidden_size, min(max(config.target_layer_ids) + 1, config.num_target_layers - 1)
    names = target_head_names(target_dir)
    source = {"norm.weight": names.norm, "hidden_norm.weight": f"{names.layers}{after}.input_layernorm.weight"}
    for name, parameter in drafter.named_parameters():
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            source[name] = f"{names.layers}{skipped + int(index)}.{rest}"
        if source.get(name) in files:
            taken[source[name]] = parameter
    for name, tensor in read_stored(target_dir, taken):
        if tensor.shape == taken[name].shape:
            taken[name].copy_(tensor)
    drafter.fc.weight[:, -width:] += torch.eye(width)


def write(
    folder: Path,
    target_dir: Path,
    *,
    num_layers: int = NUM_LAYERS,
    block_size: int = 0,
    mask_token_id: int | None = None,
    seed: int = 0,
) -> DrafterConfig:
    """Write an untrained checkpoint that vLLM loads for the target.

    Raises:
        CheckpointError: the target can't be read, or the folder isn't empty.
        ValueError: no drafter of that shape can be made for it.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not an empty folder; name an empty one, or one that doesn't exist yet")
    target = read_config(target_dir)
    vocab_size = int((target.get("text_config") or target).get("vocab_size") or 0)
    raw = drafter_config(
        target,
        unused_token_id(target_dir, vocab_size),
        num_layers=num_layers,
        block_size=block_size,
        mask_token_id=mask_token_id,
    )
    config = DrafterConfig.from_json(raw)
    drafter = new_drafter(config, target_dir, seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    save_drafter(drafter, folder, folder)
    return config


def main() -> int:
    """Print one line of JSON about what was written, or one on stderr that says why not."""
    parser = argparse.ArgumentParser(prog="honed calibrate --new-drafter", description="Writes an untrained DFlash drafter.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--num-layers", type=int, default=NUM_LAYERS)
    parser.add_argument("--block-size", type=int, default=0)
    parser.add_argument("--mask-token-id", type=int)
    parser.add_argument("--seed", type=int, default=0)
    asked = vars(parser.parse_args())
    folder, target = asked.pop("folder"), asked.pop("target")
    try:
        config = write(folder, target, **asked)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(
        json.dumps(
            {
                "drafter": str(folder.resolve()),
                "num_layers": config.num_hidden_layers,
                "block_size": config.block_size,
                "mask_token_id": config.mask_token_id,
                "target_layer_ids": list(config.target_layer_ids),
            }
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
