"""Which published pairs can be trained, and why others can't: as published, and as vLLM resolves them."""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import pytest

from docs.make.published import HEADS, PUBLISHED, Head, Published
from honed.adapt.models.trainable import Pair, drafter_reasons, is_eagle3, layer_attention, resolved, rope_of, why_untrained

PLAIN = ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight")
UNKNOWN = tuple(f"elsewhere.{name}" for name in PLAIN)
YARN = {"rope_type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}


def dflash(layers: int = 5, window: int = 0, full: int = 0, **changes: Any) -> dict[str, Any]:
    """A drafter's config: with a window, the last `full` layers have full attention."""
    kinds = {"layer_types": ["sliding_attention"] * (layers - full) + ["full_attention"] * full} if window else {}
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": 151936,
        "num_hidden_layers": layers,
        "rope_theta": 1e6,
        "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
        **({"sliding_window": window, "use_sliding_window": True} if window else {}),
        **kinds,
        **changes,
    }


REFUSED = {
    "XiaomiMiMo/MiMo-V2.5-Pro-FP4-DFlash": ["an attention sink"],
    "Laguna's DFlash": ["Laguna's drafter"],
    "deepseek-ai's DSpark for Gemma-4-12B": ["architecture Gemma4DSparkModel"],
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": ["the drafter's weights are in pytorch_model.bin"],
    "AQ-MedAI/Kimi-K25-eagle3": ["architecture Eagle3DeepseekV2ForCausalLM"],
}


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda one: one.drafter)
def test_each_published_drafter_is_trained_or_every_reason_is_named(published: Published) -> None:
    found, expected = published.reasons(), REFUSED.get(published.drafter, [])
    assert len(found) == len(expected), found
    assert all(part in reason for part, reason in zip(expected, found, strict=True)), found


@pytest.mark.parametrize("head", HEADS, ids=lambda one: one.target)
def test_each_published_mtp_head_is_trained_or_is_of_a_named_other_kind(head: Head) -> None:
    expected = [] if head.target.startswith(("Qwen/", "XiaomiMiMo/MiMo-7B")) else [f"not '{head.model_type}'"]
    found = head.reasons()
    assert len(found) == len(expected), found
    assert all(part in reason for part, reason in zip(expected, found, strict=True)), found


@pytest.mark.parametrize(
    ("drafter", "target", "tensors", "reason"),
    [
        (dflash(), {}, UNKNOWN, "the target's files have no tensor model.embed_tokens.weight"),
        (dflash(5, 8, block_size=16), {}, PLAIN, "a sliding window of 8 tokens, shorter than a block"),
        (dflash(quantization_config={"quant_method": "fp8"}), {}, PLAIN, "quantization"),
        (dflash(is_neox_style=False), {}, PLAIN, "interleaved RoPE"),
        (dflash(), {}, (*PLAIN, "lm_head.weight_scale"), "embedding or head is quantised"),
    ],
)
def test_what_is_not_published_yet(drafter: dict[str, Any], target: dict[str, Any], tensors: Any, reason: str) -> None:
    (found,) = why_untrained(Pair(method="dflash", drafter=drafter, target=target, target_tensors=tensors))
    assert reason in found


@pytest.mark.parametrize(
    ("facts", "reasons"),
    [
        (
            {"method": "ngram"},
            ["training is for method 'dflash' or 'dspark' or 'eagle3' or 'mtp', this engine runs method 'ngram'"],
        ),
        ({"method": "mtp", "drafter": {"model_type": "qwen3_5_mtp", "num_hidden_layers": 4}}, []),
        (
            {"method": "mtp", "drafter": {"model_type": "qwen3_next_mtp", "num_nextn_predict_layers": 2}},
            ["an MTP head of 2 layers is not supported for training"],
        ),
        (
            {"method": "mtp", "target": {}, "target_tensors": (*PLAIN, "mtp.fc.weight", "mtp.fc.weight_scale_inv")},
            ["the MTP head is quantised (mtp.fc.weight_scale_inv)"],
        ),
        (
            {"method": "mtp", "drafter": {"model_type": "glm4_moe_mtp"}},
            ["of MTP heads only those of Qwen3.5's, Qwen3-Next's and MiMo-7B's kind can be trained, not 'glm4_moe_mtp'"],
        ),
        ({"method": "mtp", "drafter": {"model_type": "mimo_mtp", "num_nextn_predict_layers": 1}}, []),
        (
            {"method": "mtp", "drafter": {"model_type": "mimo_v2_mtp"}},
            ["of MTP heads only those of Qwen3.5's, Qwen3-Next's and MiMo-7B's kind can be trained, not 'mimo_v2_mtp'"],
        ),
        (
            {"method": "mtp", "target_tensors": (*PLAIN, "model.mtp_layers.0.input_proj.weight_scale"), "target": {}},
            ["the MTP head is quantised (model.mtp_layers.0.input_proj.weight_scale)"],
        ),
        ({"method": ""}, ["training is for method 'dflash' or 'dspark' or 'eagle3' or 'mtp', this engine runs no method"]),
        (
            {"pipeline_parallel_size": 2},
            ["pipeline parallelism splits the hidden states over processes; use tensor parallelism if the model fits"],
        ),
        ({"is_adaptive": True}, ["under vLLM's own adaptive verification only the device knows each request's rows"]),
        ({}, []),
        (
            {"target": {}, "target_tensors": PLAIN[:1]},
            ["the target's files have no tensor model.norm.weight"],  # without a head it may be tied
        ),
        (
            {"target": {"tie_word_embeddings": False}, "target_tensors": PLAIN[:1]},
            ["the target's files have no tensor lm_head.weight and no model.norm.weight"],
        ),
    ],
)
def test_an_engine_s_own_reasons(facts: dict[str, Any], reasons: list[str]) -> None:
    assert why_untrained(Pair(**{"method": "dflash"} | facts)) == reasons


EAGLE3S = {
    "LlamaForCausalLM": [],
    "Qwen3ForCausalLM": [],
    "LlamaForCausalLMEagle3": [],
    "Eagle3LlamaForCausalLM": [],
    "DeepseekV3ForCausalLM": ["architecture Eagle3DeepseekV3ForCausalLM is not supported for training"],
}
DFLASHES = {
    "DFlashDraftModel": [],
    "DFlash2DraftModel": [],
    "MuseGlimmerAssistantModel": [],
    "LagunaForCausalLM": ["Laguna's drafter is not supported for training"],
    "LiLiCorrDraftModel": ["vLLM 0.32 does not load a DFlash drafter with architecture LiLiCorrDraftModel"],
}


@pytest.mark.parametrize(
    ("method", "name", "reasons"),
    [
        *(("eagle3", name, reasons) for name, reasons in EAGLE3S.items()),
        *(("dflash", name, reasons) for name, reasons in DFLASHES.items()),
    ],
)
def test_an_architecture_is_the_one_that_vllm_makes_of_it(method: str, name: str, reasons: list[str]) -> None:
    """EAGLE-3's own trainer writes the plain name of the layers. Compared with vLLM's class."""
    raw = {"architectures": [name], "model_type": "llama", "num_hidden_layers": 1}
    assert why_untrained(Pair(method=method, drafter=raw)) == drafter_reasons(raw, method) == reasons
    made = resolved(raw, method)
    assert resolved(made, method)["architectures"] == resolved(made)["architectures"] == made["architectures"]
    classes = pytest.importorskip("transformers").models.auto.configuration_auto.CONFIG_MAPPING
    theirs = pytest.importorskip("vllm.transformers_utils.configs.eagle")
    assert theirs.EAGLEConfig(classes["llama"](architectures=[name]), method=method).architectures == made["architectures"]


@pytest.mark.parametrize(
    ("files", "where"),
    [
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin"),
        (["pytorch_model-00002-of-2.bin", "pytorch_model-00001-of-2.bin"], "pytorch_model-00001-of-2.bin"),
        (["pytorch_model.bin", "model-00001-of-2.safetensors"], ""),
        (["config.json", "training_args.bin"], ""),
        ([], ""),
    ],
)
def test_pickled_weights_are_no_training_s(files: list[str], where: str) -> None:
    for whose in ("drafter", "target"):
        found = why_untrained(Pair(method="dflash", **{f"{whose}_files": files}))  # type: ignore[arg-type]
        assert len(found) == bool(where)
        assert all(f"the {whose}'s weights are in {where}, and honed reads safetensors only: run" in one for one in found)


@pytest.mark.parametrize(
    ("raw", "is_one"),
    [
        ({"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 32000}, True),
        ({"architectures": ["LlamaForCausalLM"]}, False),
        ({"architectures": ["DFlashDraftModel"], "draft_vocab_size": 32000}, False),
        ({"architectures": ["Qwen3DSparkModel"], "draft_vocab_size": 32000}, False),
        ({"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5", "draft_vocab_size": 32000}, False),
        ({"draft_vocab_size": 32000}, False),
    ],
)
def test_a_vocabulary_of_its_own_shows_a_plain_eagle3_drafter(raw: dict[str, Any], is_one: bool) -> None:
    assert is_eagle3(raw) == is_one
    assert any("Eagle3" in name for name in resolved(raw).get("architectures", ())) == is_one


@pytest.mark.parametrize(
    ("changes", "windows", "are_causal"),
    [
        ({}, [None] * 5, [False] * 5),
        ({"dflash_config": {"causal": True}}, [None] * 5, [True] * 5),
        ({"is_causal": False, "dflash_config": {"causal": True}}, [None] * 5, [False] * 5),
        ({"dflash_config": {"use_swa": True, "swa_window_size": 1024}}, [1024] * 5, [False] * 5),
        ({"sliding": 4}, [2048] * 4 + [None], [True] * 4 + [False]),
        ({"sliding": 4, "dflash_config": {"causal": False}}, [2048] * 4 + [None], [False] * 5),
        ({"sliding": 4, "dflash_config": {"use_swa": True, "swa_window_size": 64}}, [64] * 4 + [None], [True] * 4 + [False]),
    ],
)
def test_layers_see_what_they_see_in_vllm(changes: dict[str, Any], windows: list[Any], are_causal: list[bool]) -> None:
    """Compared with vLLM's own function."""
    sliding = changes.pop("sliding", 0)
    raw = resolved(dflash(5, 2048 if sliding else 0, 5 - sliding, **changes))
    found = layer_attention(raw)
    assert ([layer.window for layer in found], [layer.is_causal for layer in found]) == (windows, are_causal)
    theirs = pytest.importorskip("vllm.model_executor.models.qwen3_dflash")
    config = types.SimpleNamespace(**raw)
    runner = types.SimpleNamespace(use_v2_model_runner=True)
    with mock.patch.object(theirs, "get_current_vllm_config", return_value=runner):
        assert [theirs._resolve_layer_attention(config, layer) for layer in range(5)] == [tuple(layer) for layer in found]


RAW: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3, windows from a layer on": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 3},
    "qwen3, a window that is off": {"sliding_window": 4096, "max_window_layers": 0},
    "qwen3, windows without a flag": {"sliding_window": 2048, "layer_types": ["sliding_attention"] * 5},
    "qwen3, base": {"rope_theta": 5e5, "rope_scaling": YARN},
    "llama": {"sliding_window": 128},
    "gpt_oss": {},
    "gpt_oss, own layers": {"layer_types": ["full_attention"] * 5, "rope_theta": 1e6},
}


@pytest.mark.parametrize("name", RAW)
def test_a_config_as_published_is_read_as_transformers_resolves_it(name: str) -> None:
    """Where a class fills in windows or a base, the engine runs with them whether the file says so or not."""
    classes = pytest.importorskip("transformers").models.auto.configuration_auto.CONFIG_MAPPING
    raw = {"model_type": name.split(",")[0], "num_hidden_layers": 5, **RAW[name]}
    theirs = classes[raw["model_type"]](**raw).to_dict()
    ours, again = resolved(raw), resolved(theirs)
    for found in (ours, again):
        assert found["rope_parameters"]["rope_theta"] == rope_of(theirs)["rope_theta"]
        assert found["rope_parameters"]["rope_type"] == rope_of(theirs)["rope_type"]
        assert [kind == "sliding_attention" for kind in found.get("layer_types") or ["full_attention"] * 5] == [
            kind == "sliding_attention" for kind in theirs.get("layer_types") or ["full_attention"] * 5
        ]
    plain = {"architectures": ["DFlashDraftModel"]}
    asked = [why_untrained(Pair(method="dflash", drafter=one | plain)) for one in (raw, theirs)]
    assert bool(asked[0]) == bool(asked[1])
