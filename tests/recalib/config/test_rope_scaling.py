"""Stretched rotary embeddings are those that vLLM computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from honed.recalib.config.rope_scaling import RopeScaling
from honed.recalib.drafter.model import rotary_tables

HEAD = 64
GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}
KINDS: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize("kind", KINDS)
def test_tables_are_those_of_vllm(kind: str) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    theta = 150_000.0
    with set_current_vllm_config(VllmConfig()):
        theirs = get_rope(HEAD, max_position=20_000, is_neox_style=True, rope_parameters=KINDS[kind] | {"rope_theta": theta})
    positions = torch.tensor([0, 1, 7, 500, 4095, 4096, 19_000])
    cos, sin = rotary_tables(positions, HEAD, theta, RopeScaling.from_json(KINDS[kind]))
    expected = theirs.cos_sin_cache.float()[positions]
    torch.testing.assert_close(torch.cat((cos, sin), dim=-1), expected, atol=2e-3, rtol=1e-3)


def test_the_ordinary_embedding_is_not_scaled() -> None:
    assert RopeScaling.from_json({}) is None
    assert RopeScaling.from_json({"rope_type": "default", "rope_theta": 1e6}) is None


def test_what_is_missing_is_named() -> None:
    with pytest.raises(KeyError, match="factor"):
        RopeScaling.from_json({"rope_type": "yarn"})
