"""Whether a target and its drafter can be trained, and if not, why: one answer for engine, daemon, trainer and doctor.

Facts in, reasons out. The engine asks with the configuration that vLLM has resolved, the others with the files as published.
Both give the same answer: `resolved` fills in what vLLM and Transformers' classes would.

Source: vLLM 0.32 `models/qwen3_dflash.py` (`_resolve_layer_attention`, `_dflash_layer_causal`), `models/registry.py`,
`models/qwen2.py`, `v1/worker/gpu/spec_decode/dflash/speculator.py`, `transformers_utils/configs/eagle.py` (`EAGLEConfig`);
Transformers 5 `configuration_qwen3.py`, `configuration_gpt_oss.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from honed.adapt.models.drafter_tensor_names import METHODS, MTP_PREFIXES
from honed.adapt.models.target_tensor_names import head_names, text_config

VLLM_ARCHITECTURES = ("DFlashDraftModel", "DFlash2DraftModel", "DFlashLagunaForCausalLM", "DFlashMuseGlimmerAssistantModel")
MTP_FAMILIES = ("qwen3_5", "qwen3_next")
"""Beginnings of the model types whose MTP head can be trained, beside MiMo's."""
EAGLE3_ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3MiniMaxM2ForCausalLM",
    "Eagle3Qwen2_5vlForCausalLM",
    "Eagle3Qwen3vlForCausalLM",
    "Eagle3Qwen3ForCausalLM",
)
"""Those that vLLM loads with its Llama's or Qwen3's EAGLE-3 class."""
EAGLE3_WITH_HEAD_NORMS = "Eagle3Qwen3ForCausalLM"
"""The only one that it loads with Qwen3's, whose heads have norms of queries and keys."""
_NAME_PARTS = {"dflash": "DFlash", "eagle3": "Eagle3"}
"""What vLLM adds to the names of these methods' architectures where they lack it."""
_COMPLETE = ("LiLiCorrDraftModel",)
"""Architectures that it leaves as they are."""
ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""Kinds of rotary embedding that the trainable drafter computes."""
_OPTIONAL_WINDOW = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""Classes that have a window only if their config says `use_sliding_window`, whatever the types of their layers."""
_NOT_IN_MIMO = ("qk_norm", "use_sliding_window", "dual_chunk_attention_config")
"""Options of vLLM's Qwen2 layers that the trainable head lacks."""
SLIDING, FULL = "sliding_attention", "full_attention"
TO_SAFETENSORS = (
    'python -c "import glob, torch, safetensors.torch as s; s.save_file({k: v.contiguous().clone() for f in '
    "glob.glob('pytorch_model*.bin') for k, v in torch.load(f, weights_only=True).items()}, 'model.safetensors')\""
)
"""Converts a folder's pickled weights."""


class LayerAttention(NamedTuple):
    """A layer's attention mask in the drafter."""

    window: int | None
    """Tokens up to and with a query's own; None: all."""
    is_causal: bool
    """Whether a query doesn't see its block's later tokens."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Facts of an engine, or of a command that starts one. What isn't known isn't judged."""

    method: str
    drafter: Mapping[str, Any] | None = None
    """Its flat config, see `resolved`."""
    target: Mapping[str, Any] | None = None
    """Its config.json."""
    target_tensors: Collection[str] | None = None
    """Names in its files."""
    drafter_files: Collection[str] = ()
    """Names of the files in the drafter's own folder."""
    target_files: Collection[str] = ()
    """And in its target's."""
    pipeline_parallel_size: int = 1
    is_adaptive: bool = False
    """vLLM's own adaptive verification is on."""


def why_untrained(pair: Pair) -> list[str]:
    """Reasons why a pair can't be trained, each a sentence's end; empty if it can.

    Memory is the trainer's to judge: only it knows its device.
    """
    if pair.method not in METHODS:
        named = f"method {pair.method!r}" if pair.method else "no method"
        return [f"training is for method {' or '.join(map(repr, METHODS))}, this engine runs {named}"]
    found = []
    if pair.pipeline_parallel_size > 1:
        found.append("pipeline parallelism splits the hidden states over processes; use tensor parallelism if the model fits")
    if pair.is_adaptive:
        found.append("under vLLM's own adaptive verification only the device knows each request's rows")
    if pair.method == "mtp" and pair.drafter is not None and not is_mtp(pair.drafter):
        found.append(
            "of MTP heads only those of Qwen3.5's, Qwen3-Next's and MiMo-7B's kind can be trained, "
            f"not {pair.drafter.get('model_type')!r}"
        )
    elif pair.drafter is not None:
        found += drafter_reasons(pair.drafter, pair.method)
    found += filter(None, (unread_weights("drafter", pair.drafter_files), unread_weights("target", pair.target_files)))
    if pair.target is not None and pair.target_tensors is not None:
        found += head_reasons(pair.target, pair.target_tensors)
        if pair.method == "mtp" and (scales := [name for name in pair.target_tensors if _is_scale_of_mtp(name)]):
            found.append(f"the MTP head is quantised ({min(scales)})")
    return found


def drafter_reasons(drafter: Mapping[str, Any], method: str = "") -> list[str]:
    """Reasons why a drafter with this flat config can't be trained: vLLM can't load it, or our drafter lacks something.

    Args:
        method: as for `resolved`.
    """
    raw = resolved(drafter, method)
    if is_eagle3(raw):
        return [f"{name} is not supported for training" for name in _eagle3_trainer_lacks(raw)]
    if is_mtp(raw):
        return [f"{name} is not supported for training" for name in _mtp_trainer_lacks(resolved(text_config(drafter)))]
    found = [f"vLLM 0.32 does not load a DFlash drafter with {name}" for name in _vllm_lacks(raw)]
    return found or [f"{name} is not supported for training" for name in _trainer_lacks(raw)]


def unread_weights(whose: str, files: Collection[str]) -> str:
    """Why a drafter's or target's weights can't be read, by the names of its folder's files, and the cure; "" if they can.

    Without any weights there nothing is known.
    """
    pickled = sorted(name for name in files if name.startswith("pytorch_model") and name.endswith(".bin"))
    if not pickled or any(name.endswith(".safetensors") for name in files):
        return ""
    return (
        f"the {whose}'s weights are in {pickled[0]}, and honed reads safetensors only: run `{TO_SAFETENSORS}` in a copy of "
        "its folder, and start vLLM with that copy"
    )


def head_reasons(target: Mapping[str, Any], tensors: Collection[str]) -> list[str]:
    """Reasons why a target's embedding, head and final norm can't be read from files with tensors of these names."""
    try:
        head_names(target, tensors)
    except ValueError as error:
        return [str(error)]
    return []


def rope_of(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config's rotary embedding, under either of its names."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def resolved(raw: Mapping[str, Any], method: str = "") -> dict[str, Any]:
    """Fill in a flat config: windows, `layer_types` and the rotary embedding's base as Transformers' classes do, names as vLLM.

    A resolved config is returned with the same values.

    Args:
        method: vLLM's, which it adds to the architecture's name; "": the config itself has to show it.
    """
    full, rope = dict(raw), dict(rope_of(raw))
    part = _NAME_PARTS.get(method or ("eagle3" if is_eagle3(raw) else ""))
    if part and raw.get("architectures") and not is_dspark(raw):
        full["architectures"] = [_completed(str(name), part) for name in raw["architectures"]]
    kind, layers = raw.get("model_type"), range(int(raw.get("num_hidden_layers") or 0))
    if kind in _OPTIONAL_WINDOW and not raw.get("use_sliding_window"):
        full["sliding_window"] = None
    if raw.get("layer_types") is None and kind == "gpt_oss":
        full["layer_types"] = [SLIDING if i % 2 == 0 else FULL for i in layers]
        full["sliding_window"] = raw.get("sliding_window", 128)
    elif raw.get("layer_types") is None and raw.get("use_sliding_window") and raw.get("sliding_window") is not None:
        first = 28 if raw.get("max_window_layers") is None else int(raw["max_window_layers"])
        full["layer_types"] = [SLIDING if i >= first else FULL for i in layers]
    if not rope and kind == "gpt_oss":
        rope = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
    base = {"gpt_oss": 150_000.0, "mimo": 1_000_000.0, "mimo_mtp": 1_000_000.0}.get(str(kind), 10_000.0)
    rope["rope_theta"] = float(rope.get("rope_theta") or raw.get("rope_theta") or base)
    if rope.get("partial_rotary_factor") is None and raw.get("partial_rotary_factor") is not None:
        rope["partial_rotary_factor"] = raw["partial_rotary_factor"]
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] == "mrope":  # for text, whose positions are equal, it is the plain one
        rope["rope_type"] = "default"
    full["rope_parameters"] = rope
    return full


def layer_attention(raw: Mapping[str, Any]) -> tuple[LayerAttention, ...]:
    """Return each layer's attention mask, as vLLM resolves it for a drafter with this resolved config."""
    dflash, types, window = raw.get("dflash_config") or {}, raw.get("layer_types") or (), _window(raw)
    forced = raw.get("is_causal") if raw.get("is_causal") is not None else dflash.get("causal")
    found = []
    for layer in range(int(raw.get("num_hidden_layers") or 0)):
        has_type = types[layer] == SLIDING if layer < len(types) else False
        is_sliding = has_type if SLIDING in types else bool(dflash.get("use_swa"))
        found.append(LayerAttention(window if is_sliding else None, has_type if forced is None else bool(forced)))
    return tuple(found)


def is_dflash2(raw: Mapping[str, Any]) -> bool:
    """Whether a drafter with this config has DFlash2's convolutions and selector."""
    return _architecture(raw) == "DFlash2DraftModel"


def is_dspark(raw: Mapping[str, Any]) -> bool:
    """Whether a drafter with this config is a DSpark one: DFlash's layers, and a Markov head."""
    return "DSpark" in _architecture(raw)


def drafts_from_anchor(raw: Mapping[str, Any]) -> bool:
    """Whether the anchor's own row predicts the first token, so that a block has as many rows as drafted tokens."""
    return is_dspark(raw) and bool(raw.get("sample_from_anchor", True))


def is_eagle3(raw: Mapping[str, Any]) -> bool:
    """Whether a drafter with this config is an EAGLE-3 one, as its architecture says, or else a vocabulary of its own."""
    return "Eagle3" in _architecture(raw) or (is_plain(raw) and raw.get("draft_vocab_size") is not None)


def is_plain(raw: Mapping[str, Any]) -> bool:
    """Whether a drafter's architecture is that of its layers, as EAGLE-3's own trainer writes it, and names no method."""
    name = _architecture(raw)
    names_method = any(part in name.lower() for part in ("dflash", "dspark", "eagle"))
    return name.endswith("ForCausalLM") and not names_method and "dflash_config" not in raw and not is_mtp(raw)


def is_mtp(raw: Mapping[str, Any]) -> bool:
    """Whether this is the config of a target with an MTP head, or of the head as vLLM makes it of that."""
    kinds = (str(part.get("model_type") or "") for part in (raw, text_config(raw)))
    return "dflash_config" not in raw and (is_mimo(raw) or any(kind.startswith(MTP_FAMILIES) for kind in kinds))


def is_mimo(raw: Mapping[str, Any]) -> bool:
    """Whether this is the config of a MiMo-7B, or of its MTP head as vLLM makes it of that."""
    return raw.get("model_type") in ("mimo", "mimo_mtp")


def has_attention_bias(raw: Mapping[str, Any]) -> bool:
    """Whether vLLM's queries, keys and values have biases in a drafter with this config.json, or a flat one."""
    own = raw.get("transformer_layer_config") or (text_config(raw) if is_mtp(raw) else raw)
    return is_mimo(own) or bool(own.get("qkv_bias" if is_mtp(own) else "attention_bias"))


def has_experts(raw: Mapping[str, Any]) -> bool:
    """Whether the MTP head of a target with this text config has experts, as the target's own layers."""
    return bool(raw.get("num_experts")) or "moe" in str(raw.get("model_type"))


def eagle3_option(raw: Mapping[str, Any], name: str) -> Any:
    """An option that vLLM reads from `eagle_config` first, then from the config itself."""
    own = raw.get("eagle_config") or {}
    return own[name] if name in own else raw.get(name)


def has_reduced_vocabulary(raw: Mapping[str, Any]) -> bool:
    """Whether a drafter with this config can draft only some of the target's words."""
    return raw.get("draft_vocab_size") not in (None, raw.get("vocab_size"))


def _completed(name: str, part: str) -> str:
    """An architecture's name as vLLM completes it."""
    return name if name.startswith(part) or name.endswith(part) or name in _COMPLETE else f"{part}{name}"


def _vllm_lacks(raw: Mapping[str, Any]) -> Iterator[str]:
    dflash = raw.get("dflash_config") or {}
    checks = {
        f"architecture {_architecture(raw)}": not is_dspark(raw) and _architecture(raw) not in VLLM_ARCHITECTURES,
        "sample_from_anchor": dflash.get("sample_from_anchor"),
        "sliding-window attention without a window size": _is_sliding(raw) and _window(raw) is None,
        f"activation {raw.get('hidden_act')}": (raw.get("hidden_act") or "silu") != "silu",
        "a causal-correction (Domino) head": raw.get("projector_type", "dflash") != "dflash",
    }
    yield from (name for name, is_so in checks.items() if is_so)


def _trainer_lacks(raw: Mapping[str, Any]) -> Iterator[str]:
    """Features of a resolved config that the trainable drafter (`recalib/drafter/dflash.py`) lacks."""
    dflash, rope = raw.get("dflash_config") or {}, raw["rope_parameters"]
    window = min((layer.window for layer in layer_attention(raw) if layer.window is not None), default=None)
    block_size = int(dflash.get("block_size") or raw.get("block_size") or 1)
    checks = {
        f"architecture {_architecture(raw)}": is_dspark(raw) and not _is_qwen3_dspark(raw),
        f"a Markov head of type {raw.get('markov_head_type')}": raw.get("markov_head_type", "vanilla") != "vanilla",
        "dspark_draft_topk": raw.get("dspark_draft_topk"),
        "DFlash2 with a reduced draft vocabulary": is_dflash2(raw) and has_reduced_vocabulary(raw),
        "DFlash2 with capped logits": is_dflash2(raw) and dflash.get("final_logit_softcapping"),
        "Laguna's drafter": _architecture(raw) == "DFlashLagunaForCausalLM",
        "interleaved RoPE": not raw.get("is_neox_style", True),
        "scaled RoPE": rope["rope_type"] not in ROPE_TYPES,
        "RoPE by kind of layer": any(isinstance(value, Mapping) for value in rope.values()),
        f"a sliding window of {window} tokens, shorter than a block": window is not None and window < block_size,
        "drafting without auxiliary hidden states": False
        in (raw.get("use_aux_hidden_state"), dflash.get("use_aux_hidden_state")),
        "an attention sink": dflash.get("attention_sink_bias") or raw.get("add_swa_attention_sink_bias"),
        "logit_scale": raw.get("logit_scale", 1.0) != 1.0,
        "quantization": raw.get("quantization_config"),
    }
    yield from (name for name, is_asked in checks.items() if is_asked)


def _eagle3_trainer_lacks(raw: Mapping[str, Any]) -> Iterator[str]:
    """Features of a resolved config that the trainable drafter (`recalib/drafter/eagle3.py`) lacks."""
    layers = int(raw.get("num_hidden_layers") or 1)
    checks = {
        f"architecture {_architecture(raw)}": _architecture(raw) not in EAGLE3_ARCHITECTURES,
        f"an EAGLE-3 drafter of {layers} layers": layers > 1,
        f"activation {raw.get('hidden_act')}": (raw.get("hidden_act") or "silu") != "silu",
        "drafting without auxiliary hidden states": eagle3_option(raw, "use_aux_hidden_state") is False,
        "drafting all tokens at once (P-EAGLE)": raw.get("pard_token") is not None or raw.get("ptd_token_id") is not None,
        "interleaved RoPE": not raw.get("is_neox_style", True),
        "scaled RoPE": raw["rope_parameters"]["rope_type"] not in ROPE_TYPES,
        "a sliding window": SLIDING in (raw.get("layer_types") or ()),
        "a bias in the MLP": raw.get("mlp_bias"),
        "logit_scale": raw.get("logit_scale", 1.0) != 1.0,
        "quantization": raw.get("quantization_config"),
    }
    yield from (name for name, is_asked in checks.items() if is_asked)


def _mtp_trainer_lacks(raw: Mapping[str, Any]) -> Iterator[str]:
    """Features of a resolved text config that the trainable MTP heads (`mtp.py`, `mimo.py` in recalib/drafter) lack."""
    layers = int(raw.get("mtp_num_hidden_layers") or raw.get("num_nextn_predict_layers") or 1)
    checks = {
        f"an MTP head of {layers} layers": layers > 1,
        "an MTP head with experts and no shared one": has_experts(raw) and not raw.get("shared_expert_intermediate_size"),
        f"activation {raw.get('hidden_act')}": (raw.get("hidden_act") or "silu") != "silu",
        "scaled RoPE": raw["rope_parameters"]["rope_type"] not in ROPE_TYPES,
        "layer_scale": raw.get("layer_scale"),
        **{f"{name} in MiMo's MTP head": is_mimo(raw) and raw.get(name) for name in _NOT_IN_MIMO},
        "a head_dim of its own in MiMo's MTP head": is_mimo(raw) and _has_own_head_dim(raw),
    }
    yield from (name for name, is_asked in checks.items() if is_asked)


def _has_own_head_dim(raw: Mapping[str, Any]) -> bool:
    """Whether a head is of another size than vLLM's Qwen2 takes it to be."""
    head_dim, width, heads = (int(raw.get(name) or 0) for name in ("head_dim", "hidden_size", "num_attention_heads"))
    return bool(head_dim and width and heads) and head_dim != width // heads


def _window(raw: Mapping[str, Any]) -> int | None:
    """Tokens that a sliding layer sees."""
    dflash = raw.get("dflash_config") or {}
    found: int | None = dflash.get("swa_window_size", raw.get("sliding_window"))
    return found


def _is_sliding(raw: Mapping[str, Any]) -> bool:
    return SLIDING in (raw.get("layer_types") or ()) or bool((raw.get("dflash_config") or {}).get("use_swa"))


def _is_scale_of_mtp(name: str) -> bool:
    """Whether a tensor belongs to a quantised linear layer of an MTP head."""
    return name.startswith(MTP_PREFIXES) and name.endswith(
        ("_scale", "_scale_inv", "_scale_2", ".scales", ".qweight", "_packed")
    )


def _is_qwen3_dspark(raw: Mapping[str, Any]) -> bool:
    """Whether vLLM loads a DSpark drafter with its Qwen3's class."""
    name = _architecture(raw)
    return name == "Qwen3DSparkModel" or (name == "DSparkDraftModel" and raw.get("model_type") == "qwen3")


def _architecture(raw: Mapping[str, Any]) -> str:
    return str((raw.get("architectures") or ["DFlashDraftModel"])[0])
