"""The zoo's pairs: every family of targets with a plain drafter, and every kind of drafter for the tiny target."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from honed.recalib.drafter.checkpoint import load_target_head, save_drafter
from honed.recalib.drafter.model import DFlashDrafter, DrafterConfig
from tests.e2e.engine import DRAFTER, TARGET
from tests.e2e.swapping import renamed_drafter
from tests.zoo.targets import NUM_LAYERS, VOCAB_SIZE, make_target

NUM_WORDS = 3072
"""Size of the reduced vocabulary."""
_SLIDING = {"use_sliding_window": True, "sliding_window": 24}


@dataclass(frozen=True)
class Pair:
    """How one pair is made and run."""

    target: str = ""
    """A family of `targets.TARGETS`; empty: the tiny target, which is trained."""
    drafter: dict[str, Any] = field(default_factory=dict)
    """Changes of the drafter's config.json."""
    change: Callable[[Path], None] | None = None
    """Changes its files."""
    is_sharded: bool = False
    runner: str = "v1"
    dtype: str = "float32"
    """Hybrids run in bfloat16 only on a CPU. Speculation itself changes tokens there, so it is on without honed too."""
    options: dict[str, Any] = field(default_factory=dict)
    """Engine arguments."""


def _reduce(folder: Path) -> None:
    """Give a drafter its own head and a part of the target's words, as speculators does."""
    tensors = load_file(folder / "model.safetensors")
    head = load_target_head(TARGET).lm_head
    words = torch.arange(VOCAB_SIZE)[-NUM_WORDS:]
    is_word = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, words, True)
    own = {"lm_head.weight": head[words].to(torch.bfloat16), "d2t": words - torch.arange(NUM_WORDS), "t2d": is_word}
    save_file(tensors | own, folder / "model.safetensors")


def _rename(folder: Path) -> None:
    renamed = renamed_drafter(folder, folder.with_name("renamed"))
    shutil.rmtree(folder)
    renamed.rename(folder)


def _dflash(**changes: Any) -> dict[str, Any]:
    own: dict[str, Any] = json.loads((DRAFTER / "config.json").read_text())["dflash_config"]
    return {"dflash_config": own | changes}


def _convolve(folder: Path) -> None:
    """Give a drafter DFlash2's convolutions, which at first change little, and a selector with random scores."""
    raw = json.loads((folder / "config.json").read_text())
    own, width, generator = raw["dflash_config"], raw["hidden_size"], torch.Generator().manual_seed(2)
    taps, groups = own["conv_kernel_size"], width // own["conv_group_size"]
    more = {}
    for layer in range(raw["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            kernel = 0.1 * torch.randn(2, taps, width, generator=generator)
            kernel[:, 0] += 1.0
            more[f"layers.{layer}.{name}.base_kernel"] = kernel
            more[f"layers.{layer}.{name}.kernel_projection.weight"] = 0.01 * torch.randn(
                2 * taps * groups, width, generator=generator
            )
    for name, rows in (("predecessor_codebook", VOCAB_SIZE), ("successor_codebook", VOCAB_SIZE)):
        more[f"candidate_selector.{name}"] = torch.randn(rows, own["selector_rank"], generator=generator)
    more["candidate_selector.hidden_projection.weight"] = 0.2 * torch.randn(own["selector_rank"], width, generator=generator)
    tensors = load_file(folder / "model.safetensors") | {name: tensor.to(torch.bfloat16) for name, tensor in more.items()}
    save_file(tensors, folder / "model.safetensors")


_DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 8}
_TEXT = {"language_model_only": True}
PAIRS: dict[str, Pair] = {
    "llama": Pair("llama"),
    "qwen3-moe": Pair("qwen3-moe"),
    "gemma4": Pair("gemma4", runner="v2"),
    "gpt-oss": Pair("gpt-oss", runner="v2"),
    "qwen3-next": Pair("qwen3-next", dtype="bfloat16"),
    "qwen3.5": Pair("qwen3.5", dtype="bfloat16", options=_TEXT),
    "qwen3-vl": Pair("qwen3-vl", options=_TEXT),
    "sharded": Pair("llama", is_sharded=True),
    "full": Pair(),
    "sliding": Pair(drafter=_SLIDING | {"layer_types": ["sliding_attention"] * 3} | _dflash(causal=False)),
    "sliding, causal": Pair(drafter=_SLIDING | {"layer_types": ["sliding_attention"] * 3}),
    "mixed": Pair(
        drafter=_SLIDING | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, runner="v2"
    ),
    "causal": Pair(drafter=_dflash(causal=True)),
    "reduced vocabulary": Pair(drafter={"draft_vocab_size": NUM_WORDS}, change=_reduce),
    "aliased names": Pair(change=_rename),
    "dflash2": Pair(drafter={"architectures": ["DFlash2DraftModel"], **_dflash(**_DFLASH2)}, change=_convolve, runner="v2"),
    "partial rotation": Pair(drafter={"partial_rotary_factor": 0.5}),
    "scaled values": Pair(drafter=_dflash(attention_value_scale=0.75)),
}


def make(name: str, folder: Path) -> tuple[Path, Path]:
    """Write a pair's files; returns the folders of target and drafter."""
    pair = PAIRS[name]
    target, drafter = folder / "target", folder / "drafter"
    if pair.target:
        make_target(pair.target, target, getattr(torch, pair.dtype), is_sharded=pair.is_sharded)
        _make_drafter(target, drafter)
    else:
        target = TARGET
        shutil.copytree(DRAFTER, drafter)
    raw = json.loads((drafter / "config.json").read_text()) | pair.drafter
    (drafter / "config.json").write_text(json.dumps(raw))
    if pair.change is not None:
        pair.change(drafter)
    return target, drafter


def _make_drafter(target: Path, folder: Path) -> None:
    """Write a plain drafter with random weights."""
    head = load_target_head(target)
    raw = json.loads((DRAFTER / "config.json").read_text()) | {
        "hidden_size": head.embed_tokens.shape[1],
        "intermediate_size": 128,
        "head_dim": 32,
        "num_target_layers": NUM_LAYERS,
        "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 2, 4]},
    }
    torch.manual_seed(1)
    drafter = DFlashDrafter(DrafterConfig.from_json(raw), head.embed_tokens, head.lm_head)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw))
    save_drafter(drafter, folder, folder, torch.float32)
