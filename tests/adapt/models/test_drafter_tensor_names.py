"""The names of a drafter's tensors are those that vLLM reads."""

from __future__ import annotations

import pytest

from honed.adapt.models.drafter_tensor_names import IGNORED, OTHER_NAMES, is_shared, names_of

vllm_models = pytest.importorskip("vllm.model_executor.models.qwen3_dflash", reason="vLLM is not installed")


@pytest.mark.fault("a drafter under other tensor names")
def test_every_other_name_is_one_that_vllm_maps_alike() -> None:
    assert vllm_models.DFlashQwen3Model.hf_to_vllm_mapper.orig_to_new_substr == OTHER_NAMES


@pytest.mark.fault("a drafter under other tensor names")
@pytest.mark.parametrize(
    "name", ["encoder.fc.weight", "encoder.output_norm_enc.weight", "midlayer.mlp.down_proj.weight", "norm.weight"]
)
def test_a_tensor_gets_the_name_that_vllm_gives_it(name: str) -> None:
    assert list(names_of([name])) == [vllm_models.DFlashQwen3Model.hf_to_vllm_mapper.map_name(name)]


@pytest.mark.fault("a drafter under other tensor names")
def test_what_vllm_skips_is_ignored() -> None:
    from vllm.model_executor.models.utils import AutoWeightsLoader

    skipped = AutoWeightsLoader.REMOVE_UNUSED_ROTARY_EMBEDS_MAPPER.orig_to_new_substr
    assert skipped.keys() | {"t2d", "d2t", "mask_embedding", "confidence_head", ".mlp.experts"} == set(IGNORED)
    assert names_of(["t2d", "d2t", *(f"layers.0.self_attn.{name}" for name in skipped)]) == {}


def test_the_targets_tensors_are_known_under_any_name() -> None:
    assert [is_shared(name) for name in ("model.embed_tokens.weight", "lm_head.weight", "norm.weight")] == [True, True, False]
