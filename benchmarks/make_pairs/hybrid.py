"""A hybrid target of Qwen3.5's kind: Gated DeltaNet in most layers, M-RoPE, partial rotation, an unused vision tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, Qwen3_5Config, Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

from benchmarks.make_tiny.tokens import END_TOKEN_ID, VOCAB_SIZE

SHAPE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
"""The shape of the target's attention layers and MLPs; its drafter has the same."""


def hybrid_config() -> Qwen3_5Config:
    """Six layers, of which the third and the last have full attention; vLLM's CPU kernels want linear heads of 128."""
    text = SHAPE | {
        "vocab_size": VOCAB_SIZE,
        "num_hidden_layers": 6,
        "head_dim": 64,
        "full_attention_interval": 3,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 2048,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": True,
        "bos_token_id": END_TOKEN_ID,
        "eos_token_id": END_TOKEN_ID,
    }
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": SHAPE["hidden_size"]}
    return Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)


def fresh_hybrid() -> Qwen3_5ForCausalLM:
    """Make the language model with random weights."""
    model: Qwen3_5ForCausalLM = Qwen3_5ForCausalLM(hybrid_config().text_config)
    return model


def save_hybrid(model: Qwen3_5ForCausalLM, folder: Path) -> None:
    """Write the checkpoint as it is published, in bfloat16, with a vision tower that nobody trained."""
    torch.manual_seed(0)
    whole = Qwen3_5ForConditionalGeneration(hybrid_config()).to(torch.bfloat16)
    whole.model.language_model.load_state_dict(model.model.state_dict())
    whole.tie_weights()
    whole.generation_config = GenerationConfig(eos_token_id=END_TOKEN_ID, bos_token_id=END_TOKEN_ID)
    whole.save_pretrained(folder)


def load_hybrid(folder: Path) -> Qwen3_5ForCausalLM:
    """Read the language model, in float32."""
    whole = Qwen3_5ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    model = fresh_hybrid()
    model.model.load_state_dict(whole.model.language_model.state_dict())
    model.tie_weights()
    return model.eval()
