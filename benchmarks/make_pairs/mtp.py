"""The tiny target as one of Qwen3.5's kind with an MTP head: the same function under Qwen3.5's names, norms stored as w - 1.

All of its layers are full attention, without gates and without M-RoPE. Numbers are float32: w - 1 is exact in no shorter type.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from honed.recalib.drafter.mtp import MtpDrafter

WEIGHTS = "model.safetensors"
_KEPT = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)


def mtp_config(theirs: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A text-only Qwen3.5's config.json with the shape of another."""
    return {name: theirs[name] for name in _KEPT} | {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "layer_types": ["full_attention"] * theirs["num_hidden_layers"],
        "attn_output_gate": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 1.0},
        "mtp_num_hidden_layers": 1,
        "tie_word_embeddings": True,
        "dtype": "float32",
        **changes,
    }


def mtp_head(raw: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors of an MTP head for a config.json, norms as w - 1."""
    width, d, heads, kv = (raw[n] for n in ("hidden_size", "head_dim", "num_attention_heads", "num_key_value_heads"))
    asked = heads * d * (2 if raw["attn_output_gate"] else 1)
    shapes = {
        "self_attn.q_proj": (asked, width),
        "self_attn.k_proj": (kv * d, width),
        "self_attn.v_proj": (kv * d, width),
        "self_attn.o_proj": (width, heads * d),
        **_mlp_shapes(raw),
        "self_attn.q_norm": (d,),
        "self_attn.k_norm": (d,),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    named = {f"mtp.layers.0.{name}.weight": shape for name, shape in shapes.items()}
    named |= {f"mtp.{name}.weight": (width,) for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    named["mtp.fc.weight"] = (width, 2 * width)
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        for name, shape in named.items()
    }


def _mlp_shapes(raw: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Shapes of an MLP, or of experts one by one, their router and the shared expert."""
    width, count = raw["hidden_size"], raw.get("num_experts", 0)

    def mlp(name: str, inner: int) -> dict[str, tuple[int, ...]]:
        return {f"{name}.gate_proj": (inner, width), f"{name}.up_proj": (inner, width), f"{name}.down_proj": (width, inner)}

    if not count:
        return mlp("mlp", raw["intermediate_size"])
    found: dict[str, tuple[int, ...]] = {"mlp.gate": (count, width), "mlp.shared_expert_gate": (1, width)}
    found |= mlp("mlp.shared_expert", raw["shared_expert_intermediate_size"])
    for number in range(count):
        found |= mlp(f"mlp.experts.{number}", raw["moe_intermediate_size"])
    return found


def make_tiny_mtp_target(tiny: Path, folder: Path) -> Path:
    """Write the tiny target with an MTP head of random weights, in one file."""
    raw = mtp_config(json.loads((tiny / "config.json").read_text()))
    tensors = {name: t.float() for path in sorted(tiny.glob("*.safetensors")) for name, t in load_file(path).items()}
    write_mtp_target(tiny, folder, raw, {name: t - 1.0 if "norm" in name else t for name, t in tensors.items()})
    return folder


def write_mtp_target(tiny: Path, folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Write a target, with a head of random weights, beside the tiny target's tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    save_file({name: t.contiguous() for name, t in (tensors | mtp_head(raw)).items()}, folder / WEIGHTS)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tiny / file, folder / file)


def write_mtp_head(drafter: MtpDrafter, target: Path) -> None:
    """Replace the head in the target's file."""
    head = {f"mtp.{name}": p.detach().float().contiguous() for name, p in drafter.named_parameters()}
    save_file(load_file(target / WEIGHTS) | head, target / WEIGHTS)
