"""Other kinds of drafter: made from a plain DFlash one (a reduced vocabulary, a window, DFlash2, DSpark), or new (EAGLE-3).

A function that changes a checkpoint writes into its folder, weights into `model.safetensors`. New parts begin neutral or
random: the drafter is as good as before, or has to be trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.drafter.checkpoint import load_target_head
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.drafter.eagle3 import Eagle3Drafter

WEIGHTS = "model.safetensors"
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 16, "selector_top_k": 8}
MARKOV_RANK = 16

# Letters: W words of the drafter.


def change_config(folder: Path, changes: dict[str, Any], dflash: dict[str, Any] | None = None) -> None:
    """Change values of config.json, and of its `dflash_config`."""
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    raw |= changes
    raw["dflash_config"] |= dflash or {}
    path.write_text(json.dumps(raw, indent=2) + "\n")


def change_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Add tensors to the checkpoint, or replace them; numbers are stored in bfloat16."""
    stored = {name: t.detach().to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    save_file(load_file(folder / WEIGHTS) | {name: t.contiguous() for name, t in stored.items()}, folder / WEIGHTS)


def eagle3_json(target: Path, **changes: Any) -> dict[str, Any]:
    """Make the config.json of an EAGLE-3 drafter for a target with Qwen3's fields, as published ones are."""
    theirs = json.loads((target / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    more = ("max_position_embeddings", "rms_norm_eps", "rope_parameters")
    return {name: theirs[name] for name in (*kept, *more)} | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **changes,
    }


def fresh_eagle3(target: Path, raw: dict[str, Any], words: Tensor | None = None) -> Eagle3Drafter:  # words [W], rising
    """Make an EAGLE-3 drafter with random weights for the target."""
    head = load_target_head(target)
    lm_head = head.lm_head if words is None else head.lm_head[words]
    return Eagle3Drafter(DrafterConfig.from_json(raw), Vocabulary(head.embed_tokens, lm_head, words))


def write_eagle3(drafter: Eagle3Drafter, folder: Path, raw: dict[str, Any], dtype: torch.dtype = torch.bfloat16) -> None:
    """Save an EAGLE-3 drafter under the names that are published."""
    tensors = {name.replace("layers.0.", "midlayer."): p.detach() for name, p in drafter.named_parameters()}
    if drafter.words is not None:
        tensors["lm_head.weight"] = drafter.lm_head
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if drafter.words is not None:
        tensors["d2t"] = drafter.words - torch.arange(len(drafter.words))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    save_file(tensors, folder / WEIGHTS)


def reduce_vocabulary(folder: Path, target: Path, words: Tensor) -> None:  # words [W], rising token ids
    """Give the drafter its own head over some of the target's words, as speculators stores it."""
    head = load_target_head(target).lm_head
    is_word = torch.zeros(len(head), dtype=torch.bool).index_fill(0, words, True)
    change_tensors(folder, {"lm_head.weight": head[words], "d2t": words - torch.arange(len(words)), "t2d": is_word})
    change_config(folder, {"draft_vocab_size": len(words)})


def slide(folder: Path, window: int) -> None:
    """Let every layer see the last `window` tokens only, and the whole block."""
    layers = json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    kinds = {"use_sliding_window": True, "sliding_window": window, "layer_types": ["sliding_attention"] * layers}
    change_config(folder, kinds, {"causal": False})


def make_dflash2(folder: Path, *, scale: float = 1.0) -> None:
    """Give the drafter DFlash2's convolutions and a selector of token pairs.

    Args:
        scale: of everything random; at 0.01 the drafter drafts nearly what it drafted before.
    """
    raw = json.loads((folder / "config.json").read_text())
    width, words, generator = raw["hidden_size"], raw["vocab_size"], torch.Generator().manual_seed(2)
    taps, groups, rank = DFLASH2["conv_kernel_size"], width // DFLASH2["conv_group_size"], DFLASH2["selector_rank"]

    def random(deviation: float, *shape: int) -> Tensor:
        return scale * deviation * torch.randn(shape, generator=generator)

    more = {}
    for layer in range(raw["num_hidden_layers"]):
        for name in ("attention_conv", "mlp_conv"):
            kernel = random(0.1, 2, taps, width)
            kernel[:, 0] += 1.0
            more[f"layers.{layer}.{name}.base_kernel"] = kernel
            more[f"layers.{layer}.{name}.kernel_projection.weight"] = random(0.01, 2 * taps * groups, width)
    for name in ("predecessor_codebook", "successor_codebook"):
        more[f"candidate_selector.{name}"] = torch.randn(words, rank, generator=generator)
    more["candidate_selector.hidden_projection.weight"] = random(0.2, rank, width)
    change_tensors(folder, more)
    change_config(folder, {"architectures": ["DFlash2DraftModel"]}, dict(DFLASH2))


def make_dspark(folder: Path, *, drafts_from_anchor: bool = True, scale: float = 1.0) -> None:
    """Give the drafter DSpark's Markov head and confidence head.

    Args:
        drafts_from_anchor: the anchor's row predicts the first token, as in DSpark's own form; else DFlash's rows stay.
        scale: of the Markov head; at 0.01 the drafter drafts nearly what it drafted before, if its rows stay.
    """
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    dflash, generator = raw.pop("dflash_config"), torch.Generator().manual_seed(3)
    words, width = raw["vocab_size"], raw["hidden_size"]
    raw |= {name: dflash[name] for name in ("mask_token_id", "target_layer_ids")}
    raw |= {"architectures": ["Qwen3DSparkModel"], "block_size": raw["block_size"] - drafts_from_anchor}
    raw |= {"sample_from_anchor": drafts_from_anchor, "markov_rank": MARKOV_RANK, "markov_head_type": "vanilla"}
    path.write_text(json.dumps(raw | {"enable_confidence_head": True, "confidence_head_with_markov": True}, indent=2) + "\n")
    change_tensors(
        folder,
        {
            "markov_head.markov_w1.weight": scale * torch.randn(words, MARKOV_RANK, generator=generator),
            "markov_head.markov_w2.weight": torch.randn(raw.get("draft_vocab_size") or words, MARKOV_RANK, generator=generator),
            "confidence_head.proj.weight": torch.randn(1, width + MARKOV_RANK, generator=generator),
            "confidence_head.proj.bias": torch.zeros(1),
        },
    )
