"""Published families, what is assumed where a config is silent, and what is refused and by whom."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from honed.adapt.models.trainable import LayerAttention
from honed.recalib.config.drafter import Convolution, DrafterConfig, Markov, Selector
from honed.recalib.config.presets import PRESETS, Preset, decay_tokens, even_layer_ids, learning_rate, preset_of
from honed.recalib.config.speculators import flat
from honed.recalib.config.trainer import TrainerSettings

QWEN3_8B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "block_size": 16,
    "num_target_layers": 36,
    "layer_types": ["full_attention"] * 5,
    "sliding_window": None,
    "rope_scaling": None,
    "attention_bias": False,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 7680,
    "num_hidden_layers": 8,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "attention_bias": True,
    "block_size": 8,
    "num_target_layers": 24,
    "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096},
    "dflash_config": {"mask_token_id": 200000, "target_layer_ids": [1, 6, 11, 16, 21]},
}
SPECULATORS: dict[str, Any] = {
    "architectures": ["DFlashSpeculator"],
    "speculators_model_type": "dflash",
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "block_size": 8,
    "mask_token_id": 151669,
    "draft_vocab_size": 151936,
    "sliding_window_non_causal": True,
    "speculators_config": {
        "algorithm": "dflash",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B", "architectures": ["Qwen3ForCausalLM"]},
    },
    "transformer_layer_config": {
        k: v for k, v in QWEN3_8B.items() if k not in ("architectures", "block_size", "num_target_layers")
    },
}


@pytest.mark.parametrize("preset", PRESETS, ids=lambda p: p.drafter)
def test_every_preset_follows_the_rule_of_the_paper(preset: Preset) -> None:
    assert preset.target_layer_ids == even_layer_ids(preset.num_target_layers, len(preset.target_layer_ids))


def test_the_checkpoint_s_own_config_comes_first() -> None:
    own = QWEN3_8B | {"block_size": 10, "dflash_config": {"mask_token_id": 7, "target_layer_ids": [2, 5]}}
    config = DrafterConfig.from_json(own)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (10, 7, (2, 5))


def test_what_it_leaves_out_comes_from_the_preset_of_its_target() -> None:
    config = DrafterConfig.from_json({k: v for k, v in QWEN3_8B.items() if k != "block_size"})
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (16, 151669, (1, 9, 17, 25, 33))


def test_values_beside_dflash_config_are_found() -> None:
    config = DrafterConfig.from_json(QWEN3_8B | {"mask_token_id": 5, "target_layer_ids": [3, 4, 5]})
    assert (config.mask_token_id, config.target_layer_ids) == (5, (3, 4, 5))


def test_an_unknown_target_s_layers_follow_the_rule_and_its_mask_is_asked_for() -> None:
    unknown = QWEN3_8B | {"num_target_layers": 30, "dflash_config": {"mask_token_id": 3}}
    assert preset_of(unknown) is None
    assert DrafterConfig.from_json(unknown).target_layer_ids == even_layer_ids(30, 5) == (1, 8, 14, 20, 27)
    with pytest.raises(ValueError, match=r"no 'mask_token_id', and no preset .* add them under dflash_config"):
        DrafterConfig.from_json(unknown | {"dflash_config": {}})


@pytest.mark.parametrize(("block_size", "decay"), [(16, 7.0), (10, 5.0), (8, 4.0), (7, 4.0)])
def test_decay_by_block_size(block_size: int, decay: float) -> None:
    assert decay_tokens(block_size) == decay


def test_gpt_oss_can_be_trained() -> None:
    config = DrafterConfig.from_json(GPT_OSS_20B)
    assert config.attention_bias
    assert config.rope_scaling is not None
    assert (config.rope_scaling.kind, config.rope_scaling.factor, config.rope_theta) == ("yarn", 32.0, 150000.0)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other architecture": ({"architectures": ["LiLiCorrDraftModel"]}, "vLLM 0.32 does not load .* architecture LiLiCorr"),
    "from the anchor": ({"dflash_config": {"sample_from_anchor": True}}, "vLLM 0.32 does not load .* sample_from_anchor"),
    "activation": ({"hidden_act": "gelu"}, "vLLM 0.32 does not load .* activation gelu"),
    "no window": ({"layer_types": ["sliding_attention"] * 5}, "vLLM 0.32 does not load .* without a window size"),
    "window": (
        {"layer_types": ["sliding_attention"] * 5, "sliding_window": 8, "use_sliding_window": True},
        "a sliding window of 8 tokens, shorter than a block is not supported",
    ),
    "DFlash2": (
        {"architectures": ["DFlash2DraftModel"], "draft_vocab_size": 32000},
        "DFlash2 with a reduced draft vocabulary is not supported for training; serve this drafter",
    ),
    "scaled logits": ({"logit_scale": 0.5}, "logit_scale is not supported"),
    "rotation": ({"rope_scaling": {"rope_type": "longrope"}}, "scaled RoPE is not supported"),
    "a sink": ({"dflash_config": {"attention_sink_bias": True}}, "an attention sink is not supported"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization is not supported"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_who_can_t_and_why(name: str) -> None:
    change, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_json(QWEN3_8B | change)


def test_speculators_config_is_read_as_vllm_reads_it() -> None:
    config = DrafterConfig.from_json(SPECULATORS)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (8, 151669, (1, 9, 17, 25, 33))
    assert (config.hidden_size, config.num_hidden_layers) == (4096, 5)
    speculators = pytest.importorskip("vllm.transformers_utils.configs.speculators", reason="vLLM is not installed")
    theirs = speculators.SpeculatorsConfig.extract_transformers_pre_trained_config(json.loads(json.dumps(SPECULATORS)))
    ours = flat(SPECULATORS)
    assert theirs["dflash_config"] == ours["dflash_config"]
    assert {name: ours[name] for name in QWEN3_8B if name in theirs} == {n: theirs[n] for n in QWEN3_8B if n in theirs}


def test_both_forms_are_one_drafter() -> None:
    """Only z-lab's says how many layers the target has."""
    ours, theirs = DrafterConfig.from_json(QWEN3_8B), DrafterConfig.from_json(SPECULATORS | {"block_size": 16})
    assert replace(theirs, num_target_layers=36) == ours


def test_speculators_blocks_that_are_seen_one_way_are_causal_in_every_layer() -> None:
    """As vLLM 0.32 drafts, whatever a layer's window."""
    config = DrafterConfig.from_json(SPECULATORS | {"sliding_window_non_causal": False})
    assert config.attention == (LayerAttention(None, is_causal=True),) * 5


@pytest.mark.parametrize("where", ["partial_rotary_factor", "rope_parameters", "rope_scaling"])
def test_a_share_of_the_rotation_is_found_wherever_it_is(where: str) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    raw = QWEN3_8B | ({where: 0.5} if where == "partial_rotary_factor" else {where: rope})
    assert DrafterConfig.from_json(raw).rotary_share == 0.5
    assert DrafterConfig.from_json(QWEN3_8B).rotary_share == 1.0


@pytest.mark.parametrize(("width", "rate"), [(64, 5e-4), (256, 5e-4), (2048, 6.25e-5), (4096, 3.125e-5)])
def test_wide_drafters_learn_in_smaller_steps(width: int, rate: float) -> None:
    assert learning_rate(width) == pytest.approx(rate)
    assert TrainerSettings().training("full", 16, width).learning_rate == pytest.approx(rate)
    assert TrainerSettings(learning_rate=1e-4).training("full", 16, width).learning_rate == 1e-4


def test_a_reduced_vocabulary() -> None:
    config = DrafterConfig.from_json(SPECULATORS | {"draft_vocab_size": 32000})
    assert (config.num_words, config.vocab_size) == (32000, 151936)
    assert DrafterConfig.from_json(QWEN3_8B | {"draft_vocab_size": 151936}).draft_vocab_size is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "peagle"}, "is 'peagle': only DFlash, DSpark and EAGLE-3"),
        ({"transformer_layer_config": None}, "no 'transformer_layer_config'"),
        ({"aux_hidden_state_layer_ids": None}, "no 'aux_hidden_state_layer_ids'"),
    ],
)
def test_a_speculators_config_that_vllm_refuses_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DrafterConfig.from_json(SPECULATORS | change)


def test_dflash2_is_read_in_both_forms() -> None:
    fields = {"conv_kernel_size": 2, "conv_group_size": 64, "selector_rank": 256, "selector_top_k": 16}
    ours = QWEN3_8B | {"architectures": ["DFlash2DraftModel"], "dflash_config": fields | {"mask_token_id": 5, "block_size": 8}}
    config = DrafterConfig.from_json(ours)
    assert config.block_size == 8
    assert (config.convolution, config.selector) == (Convolution(2, 64), Selector(256, 16))
    theirs = DrafterConfig.from_json(SPECULATORS | {"speculators_model_type": "dflash2"} | fields)
    assert (theirs.convolution, theirs.selector) == (config.convolution, config.selector)
    del fields["selector_rank"]
    with pytest.raises(ValueError, match="no 'selector_rank'"):
        DrafterConfig.from_json(ours | {"dflash_config": fields | {"mask_token_id": 5}})


def test_dspark_is_read_in_both_forms() -> None:
    """In its own form every row of a block predicts; in speculators' one the anchor's doesn't."""
    fields = {"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True}
    outside = {name: value for name, value in QWEN3_8B.items() if name != "dflash_config"}
    ours = outside | fields | {"architectures": ["Qwen3DSparkModel"], "block_size": 7, "mask_token_id": 5}
    ours |= {"target_layer_ids": [1, 9, 17, 25, 33]}
    config = DrafterConfig.from_json(ours)
    assert (config.method, config.num_draft_tokens, config.mask_token_id) == ("dspark", 7, 5)
    assert config.markov == Markov(256, drafts_from_anchor=True)
    theirs = DrafterConfig.from_json(SPECULATORS | {"speculators_model_type": "dspark"} | fields)
    assert (theirs.method, theirs.num_draft_tokens) == ("dspark", SPECULATORS["block_size"] - 1)
    assert theirs.markov == Markov(256, drafts_from_anchor=False)
    assert theirs.target_layer_ids == config.target_layer_ids
    refused = {
        "'markov_rank'; is this a DSpark drafter": {"markov_rank": None},
        "a Markov head of type gated is not supported": {"markov_head_type": "gated"},
        "architecture Gemma4DSparkModel is not supported": {"architectures": ["Gemma4DSparkModel"]},
        "architecture DSparkDraftModel is not supported": {
            "architectures": ["DSparkDraftModel"],
            "model_type": "deepseek_v4",
        },
    }
    for message, change in refused.items():
        raw = {name: value for name, value in (ours | change).items() if value is not None}
        with pytest.raises(ValueError, match=message):
            DrafterConfig.from_json(raw)


def test_a_dspark_config_of_speculators_is_read_as_vllm_reads_it() -> None:
    speculators = pytest.importorskip("vllm.transformers_utils.configs.speculators", reason="vLLM is not installed")
    raw = SPECULATORS | {"speculators_model_type": "dspark", "markov_rank": 256, "sample_from_anchor": True}
    theirs = speculators.SpeculatorsConfig.extract_transformers_pre_trained_config(json.loads(json.dumps(raw)))
    ours = flat(raw)
    assert {name: theirs[name] for name in ours if name in theirs} == ours
    assert {"target_layer_ids", "mask_token_id", "sample_from_anchor", "markov_rank", "architectures"} <= ours.keys()
