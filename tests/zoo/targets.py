"""Targets of the published families at toy size: random weights, in the files that Transformers writes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.e2e.engine import TARGET

VOCAB_SIZE = int(json.loads((TARGET / "config.json").read_text())["vocab_size"])
NUM_LAYERS = 6
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [6, 5, 5], "mrope_interleaved": True}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}


def _llama() -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**_SHAPE, tie_word_embeddings=False)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(**_SHAPE, **_EXPERTS, tie_word_embeddings=False)


def _gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(**_SHAPE, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)


def _gemma4() -> Any:
    from transformers import Gemma4TextConfig

    more = {
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "sliding_window": 16,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 0,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
    }
    return Gemma4TextConfig(**_SHAPE, **more)


def _qwen3_next() -> Any:
    from transformers import Qwen3NextConfig

    more = {"shared_expert_intermediate_size": 32, "full_attention_interval": 3}
    return Qwen3NextConfig(**_SHAPE, **_EXPERTS, **_LINEAR, **more, tie_word_embeddings=False)


def _qwen3_5() -> Any:
    from transformers import Qwen3_5Config

    text = {**_SHAPE, **_LINEAR, "rope_parameters": {**_MROPE, "partial_rotary_factor": 1.0}, "full_attention_interval": 3}
    return Qwen3_5Config(text_config=text, vision_config=_VISION, tie_word_embeddings=False)


def _qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig

    vision = {**_VISION, "deepstack_visual_indexes": [0]}
    return Qwen3VLConfig(text_config={**_SHAPE, "rope_parameters": _MROPE}, vision_config=vision, tie_word_embeddings=False)


TARGETS: dict[str, Callable[[], Any]] = {
    "llama": _llama,
    "qwen3-moe": _qwen3_moe,
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "qwen3-next": _qwen3_next,
    "qwen3.5": _qwen3_5,
    "qwen3-vl": _qwen3_vl,
}


def make_target(name: str, folder: Path, dtype: torch.dtype, *, is_sharded: bool = False) -> Path:
    """Write a family's target, with the tiny pair's tokenizer.

    Args:
        is_sharded: in several files with an index.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    config = TARGETS[name]()
    torch.manual_seed(0)
    kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    model = kind.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter.ndim > 1:  # else a random model of this size repeats its last token
                parameter.mul_(4.0 if "embed" not in parameter_name else 1.0)
    model.save_pretrained(folder, **({"max_shard_size": "500KB"} if is_sharded else {}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TARGET / file, folder / file)
    return folder
