"""Targets of Qwen3.5's kind with an MTP head of random weights.

One is the tiny target under other names. The others have random weights and gates on their attention, as published ones do;
one has experts.
"""

from __future__ import annotations

import json
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


def _random(raw: dict[str, Any]) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = (Qwen3_5MoeTextConfig if "num_experts" in raw else Qwen3_5TextConfig)(**raw)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:  # else a random model of this size repeats its last token
                parameter.mul_(4.0)
    return {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
