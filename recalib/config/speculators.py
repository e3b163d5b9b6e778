"""Conversion of the config.json of vllm-project/speculators to the flat one of z-lab's checkpoints.

Tensor names are the same in both formats. The transformer's shape is nested in `transformer_layer_config`.
`aux_hidden_state_layer_ids` counts the embedding as 0, so layer i of z-lab's `target_layer_ids` is i + 1 there.
`sliding_window_non_causal` (default true) says whether the block is seen both ways.

Source: vLLM 0.32 `transformers_utils/configs/speculators/algos.py` (`update_dflash`); speculators `models/dflash/config.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TYPE = "speculators_model_type"
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
"""Fields of DFlash2: here in the outermost level, in z-lab's form in `dflash_config`."""
DSPARK = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")
_ALGORITHMS = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "Qwen3DSparkModel"}
_EAGLE3 = {"llama": "Eagle3LlamaForCausalLM", "qwen3": "Eagle3Qwen3ForCausalLM"}
_EAGLE3_NAMES = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
    "quantization_config",
)


def is_speculators(raw: Mapping[str, Any]) -> bool:
    """Tell whether a config.json has that format."""
    return TYPE in raw


def flat(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Convert any drafter's config.json to the form that vLLM makes of it (DFlash: z-lab's); one in that form stays as it is.

    Raises:
        ValueError: it is of another algorithm, or lacks what vLLM needs. The message names it.
    """
    if not is_speculators(raw):
        return dict(raw)
    if raw[TYPE] == "eagle3":
        return _flat_eagle3(raw)
    if raw[TYPE] not in _ALGORITHMS:
        raise ValueError(f"{TYPE} is {raw[TYPE]!r}: only DFlash, DSpark and EAGLE-3 drafters can be trained")
    layer_config, aux = raw.get("transformer_layer_config"), raw.get("aux_hidden_state_layer_ids")
    for name, value in (("transformer_layer_config", layer_config), ("aux_hidden_state_layer_ids", aux)):
        if not value:
            raise ValueError(f"config.json has no {name!r}, which vLLM needs in a speculators checkpoint")
    assert isinstance(layer_config, Mapping)
    assert isinstance(aux, list)
    read = {
        "mask_token_id": raw.get("mask_token_id"),
        "target_layer_ids": [int(i) - 1 for i in aux],
        "sample_from_anchor": raw.get("sample_from_anchor", False),
    }
    names = ("block_size", "draft_vocab_size", "target_hidden_size", "projector_type", "quantization_config")
    own = {"architectures": [_ALGORITHMS[raw[TYPE]]], **{name: raw[name] for name in names if raw.get(name)}}
    if raw[TYPE] == "dspark":
        return {**layer_config, **own, **read, **{name: raw[name] for name in DSPARK if raw.get(name) is not None}}
    read["causal"] = not raw.get("sliding_window_non_causal", True)
    read |= {name: raw[name] for name in DFLASH2 if raw.get(name) is not None}
    return {**layer_config, **own, "dflash_config": read}


def _flat_eagle3(raw: Mapping[str, Any]) -> dict[str, Any]:
    """As `update_eagle3` does."""
    layer_config = raw.get("transformer_layer_config")
    if not isinstance(layer_config, Mapping):
        raise ValueError("config.json has no 'transformer_layer_config', which vLLM needs in a speculators checkpoint")
    kind = layer_config.get("model_type", "llama")
    methods = (raw.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return {
        **layer_config,
        **{name: raw[name] for name in _EAGLE3_NAMES if raw.get(name) is not None},
        "norm_before_residual": raw.get("norm_before_residual", True),
        "num_speculative_tokens": methods[0].get("speculative_tokens"),
        "architectures": [_EAGLE3.get(kind, f"Eagle3 on {kind}")],
    }
