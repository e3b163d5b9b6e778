"""Targets of Qwen3.5's kind with an MTP head of random weights.

One is the tiny target under other names. Another has random weights and gates on its attention, as published ones do.
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


def make_mtp_target(folder: Path, *, is_tiny: bool) -> Path:
    """Write a target with its MTP head, in one file."""
    if is_tiny:
        return make_tiny_mtp_target(TARGET, folder)
    theirs = json.loads((TARGET / "config.json").read_text())
    raw = mtp_config(theirs | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}, attn_output_gate=True)
    write_mtp_target(TARGET, folder, raw, _random(raw))
    return folder


def add_mtp_head(folder: Path) -> None:
    """Give a Qwen3.5 target that Transformers wrote a head of random weights, of the target's type."""
    raw = json.loads((folder / "config.json").read_text())
    raw["text_config"] |= {"mtp_num_hidden_layers": 1, "attn_output_gate": True}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    dtype = next(t.dtype for name, t in tensors.items() if "embed_tokens" in name)
    head = {name: t.to(dtype) for name, t in mtp_head(raw["text_config"]).items()}
    save_file(tensors | head, folder / "model.safetensors")


def _random(raw: dict[str, Any]) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(Qwen3_5TextConfig(**raw), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name:  # else a random model of this size repeats its last token
                parameter.mul_(4.0)
    return {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}
