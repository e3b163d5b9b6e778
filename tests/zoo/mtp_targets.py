"""Targets with an MTP head of random weights.

Of Qwen3.5's kind one is the tiny target under other names. The others have random weights and gates on their attention, as
published ones do; one has experts. MiMo's kind has no class in Transformers: like the published ones, it brings its
configuration's class along, and its layers are Qwen2's.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.make_pairs.mtp import make_tiny_mtp_target, mtp_config, mtp_head, write_mtp_target
from tests.e2e.engine import TARGET

EXPERTS = {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}


MIMO_CLASS = """from transformers import Qwen2Config


class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""
"""A published MiMo has this class in configuration_mimo.py."""


def make_mtp_target(folder: Path, *, is_tiny: bool, has_experts: bool = False) -> Path:
    """Write a target with its MTP head, in one file."""
    if is_tiny:
        return make_tiny_mtp_target(TARGET, folder)
    theirs = json.loads((TARGET / "config.json").read_text())
    raw = mtp_config(theirs | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}, attn_output_gate=True)
    raw |= EXPERTS if has_experts else {}
    write_mtp_target(TARGET, folder, raw, _random(raw))
    return folder


def add_mtp_head(folder: Path) -> None:
    """Give a Qwen3.5 or Qwen3-Next target that Transformers wrote a head of random weights, of the target's type."""
    raw = json.loads((folder / "config.json").read_text())
    text = raw.get("text_config", raw)
    text |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    dtype = next(t.dtype for name, t in tensors.items() if "embed_tokens" in name)
    head = {name: t.to(dtype) for name, t in mtp_head(text).items()}
    save_file(tensors | head, folder / "model.safetensors")


def make_mimo_target(folder: Path) -> Path:
    """Write a target of MiMo-7B's kind: its own class of configuration, and an MTP head."""
    theirs = json.loads((TARGET / "config.json").read_text())
    kept = {name: theirs[name] for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    raw = {
        **kept,
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 640_000.0},
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    tensors = _random(raw)
    generator = torch.Generator().manual_seed(3)
    head = {"token_layernorm.weight": (64,), "hidden_layernorm.weight": (64,), "final_layernorm.weight": (64,)}
    head |= {"input_proj.weight": (64, 128)}
    head |= {name: tuple(t.shape) for name, t in _of_layer(tensors).items()}
    own = {
        f"model.mtp_layers.0.{name}": torch.randn(shape, generator=generator) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)
        + float("norm" in name)
        for name, shape in head.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
    (folder / "configuration_mimo.py").write_text(MIMO_CLASS)
    save_file({name: t.contiguous() for name, t in (tensors | own).items()}, folder / "model.safetensors")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TARGET / file, folder / file)
    return folder


def as_qwen2(target: Path, folder: Path) -> Path:
    """A MiMo's target as Transformers reads it."""
    folder.mkdir(parents=True, exist_ok=True)
    raw = json.loads((target / "config.json").read_text()) | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    del raw["auto_map"]
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(target / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "mtp_layers" not in name}, folder / "model.safetensors")
    return folder


def _of_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    prefix = "model.layers.0."
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _random(raw: dict[str, Any]) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM, Qwen2Config, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    torch.manual_seed(0)
    kind = Qwen2Config if raw["model_type"] == "mimo" else Qwen3_5MoeTextConfig if "num_experts" in raw else Qwen3_5TextConfig
    config = kind(**{name: value for name, value in raw.items() if name not in ("model_type", "auto_map")})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:  # else a random model of this size repeats its last token
                parameter.mul_(4.0)
    return {name: t for name, t in model.state_dict().items() if name != "lm_head.weight" or not raw["tie_word_embeddings"]}
