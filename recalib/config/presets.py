"""The published DFlash families: defaults for what a checkpoint's config omits.

A checkpoint's config.json always comes first. Missing values come from the preset of its target. If there is none, they follow
the rule that all of these families were made by (later ones read other layers, and say so):

    target layers     evenly from the 2nd to the 3rd-last: round(1 + i * (L - 4) / (n - 1)), L target layers, n of them read
    loss decay        7 tokens for blocks of 16, 5 for 10, 4 for 8 and less

Preset values are those of the families' published config.json files, as quoted in public code that loads them. Nothing is
fetched here. `adapt/models/trainable.py` says which drafters can't be trained, and why.

Source: arXiv 2602.06036, section 3 and appendix; z-lab/dflash (README, `model/`); vLLM 0.32 `models/qwen3_dflash.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

QWEN3_MASK, QWEN35_MASK, GPT_OSS_MASK = 151669, 248070, 200000


@dataclass(frozen=True)
class Preset:
    """One published drafter."""

    drafter: str
    target: str
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    hidden_size: int
    """Width of the target. With its number of layers it identifies the target a checkpoint was made for."""


PRESETS = (
    Preset("z-lab/Qwen3-4B-DFlash-b16", "Qwen/Qwen3-4B", 36, (1, 9, 17, 25, 33), QWEN3_MASK, 16, 2560),
    Preset("z-lab/Qwen3-8B-DFlash-b16", "Qwen/Qwen3-8B", 36, (1, 9, 17, 25, 33), QWEN3_MASK, 16, 4096),
    Preset(
        "z-lab/Qwen3-Coder-30B-A3B-DFlash", "Qwen/Qwen3-Coder-30B-A3B-Instruct", 48, (1, 12, 23, 34, 45), QWEN3_MASK, 16, 2048
    ),
    Preset("z-lab/Qwen3.5-9B-DFlash", "Qwen/Qwen3.5-9B", 32, (1, 8, 15, 22, 29), QWEN35_MASK, 16, 4096),
    Preset("z-lab/Qwen3.5-27B-DFlash", "Qwen/Qwen3.5-27B", 64, (1, 16, 31, 46, 61), QWEN35_MASK, 16, 5120),
    Preset("z-lab/Qwen3.6-27B-DFlash", "Qwen/Qwen3.6-27B", 64, (1, 16, 31, 46, 61), QWEN35_MASK, 16, 5120),
    Preset("z-lab/Qwen3.6-35B-A3B-DFlash", "Qwen/Qwen3.6-35B-A3B", 40, (1, 10, 19, 28, 37), QWEN35_MASK, 16, 2048),
    Preset("z-lab/gpt-oss-20b-DFlash", "openai/gpt-oss-20b", 24, (1, 6, 11, 16, 21), GPT_OSS_MASK, 8, 2880),
    Preset("z-lab/gpt-oss-120b-DFlash", "openai/gpt-oss-120b", 36, (1, 9, 17, 25, 33), GPT_OSS_MASK, 10, 2880),
)


def decay_tokens(block_size: int) -> float:
    """Decay in w_k = exp(-(k - 1) / decay) for a block size (anchor included). Source: arXiv 2602.06036, section 3."""
    if block_size >= 16:
        return 7.0
    return 5.0 if block_size >= 10 else 4.0


def learning_rate(width: int) -> float:
    """AdamW's rate for a drafter of this width: 5e-4 up to the 256 of the pairs that it was measured on, then as 1 / width.

    An update moves each weight by about the rate, whatever the gradient. A wider matrix has smaller weights, and more of them
    add up in each output. Source: arXiv 2203.03466, section 4 and table 3.
    """
    return 5e-4 * min(1.0, 256 / width)


def even_layer_ids(num_target_layers: int, num_read: int) -> tuple[int, ...]:
    """Choose target layers evenly from the 2nd to the 3rd-last: the paper's rule.

    Raises:
        ValueError: the target has too few layers for it.
    """
    last = num_target_layers - 3
    if num_read < 1 or last < num_read:
        raise ValueError(f"{num_read} of {num_target_layers} target layers can't be read from the 2nd to the 3rd-last")
    if num_read == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (last - 1) / (num_read - 1)) for i in range(num_read))


def preset_of(raw: Mapping[str, Any]) -> Preset | None:
    """Find the preset of a flat config's target, if exactly one mask token and block size are possible.

    It is identified by the target's number of layers and hidden size and the vocabulary's mask token. Returns None rather than
    a guess.
    """
    width = raw.get("target_hidden_size") or raw.get("hidden_size")
    found = [p for p in PRESETS if (p.num_target_layers, p.hidden_size) == (raw.get("num_target_layers"), width)]
    found = [p for p in found if p.mask_token_id < int(raw.get("vocab_size") or 0)]
    agreed = {(p.mask_token_id, p.block_size, p.target_layer_ids) for p in found}
    return found[0] if len(agreed) == 1 else None


def completed(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in a flat config's missing `block_size`, `mask_token_id` and `target_layer_ids`.

    Raises:
        ValueError: something is missing that no preset or rule supplies. The message names it.
    """
    full: dict[str, Any] = dict(raw)
    own: dict[str, Any] = dict(raw.get("dflash_config") or {})
    preset = preset_of(raw)
    # vLLM takes these from dflash_config, but some checkpoints have them beside it.
    for name in ("mask_token_id", "target_layer_ids", "block_size"):
        if own.get(name) is None and raw.get(name) is not None:
            own[name] = raw[name]
        if own.get(name) is None and preset is not None:
            own[name] = getattr(preset, name)
    if own.get("target_layer_ids") is None and raw.get("num_target_layers"):
        own["target_layer_ids"] = even_layer_ids(int(raw["num_target_layers"]), int(raw.get("num_hidden_layers") or 0))
    missing = [name for name in ("block_size", "mask_token_id", "target_layer_ids") if own.get(name) is None]
    if missing:
        raise ValueError(
            f"config.json has no {' and no '.join(repr(name) for name in missing)}, and no preset is known for this target; "
            "is this a DFlash drafter? If so, add them under dflash_config"
        )
    full["block_size"] = own.pop("block_size")
    full["dflash_config"] = own
    return full
