"""Rotary embeddings are those that vLLM computes, to the last bit: an ulp of a frequency is 4e-4 at position 20,000."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from honed.recalib.config.rope_scaling import RopeScaling
from honed.recalib.drafter.layers import rotary_tables

HEAD = 64
GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
KINDS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama 3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "gpt-oss": GPT_OSS | {"truncate": False},
    "yarn": GPT_OSS,
    "yarn with a given magnitude": GPT_OSS | {"attention_factor": 1.25},
    "yarn with two weights": GPT_OSS | {"mscale": 0.7, "mscale_all_dim": 1.1},
}


@pytest.mark.fault("rotary tables an ulp from vLLM's")
@pytest.mark.parametrize("theta", [10_000.0, 150_000.0, 1_000_000.0, 10_000_000.0])
@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_vllm(kind: str, theta: float) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(HEAD, max_position=20_000, is_neox_style=True, rope_parameters=KINDS[kind] | {"rope_theta": theta})
    positions = torch.arange(20_000)
    cos, sin = rotary_tables(positions, HEAD, theta, RopeScaling.from_json(KINDS[kind]))
    assert torch.equal(torch.cat((cos, sin), dim=-1), theirs.cos_sin_cache[positions])


def test_the_ordinary_embedding_is_not_scaled() -> None:
    assert RopeScaling.from_json({}) is None
    assert RopeScaling.from_json({"rope_type": "default", "rope_theta": 1e6}) is None


def test_what_is_missing_is_named() -> None:
    with pytest.raises(KeyError, match="factor"):
        RopeScaling.from_json({"rope_type": "yarn"})
