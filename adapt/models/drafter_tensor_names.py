"""Names of a drafter's tensors: vLLM reads several for the same tensor, and skips some tensors.

Every reader and writer of a checkpoint goes by these names, so that what is trained can be swapped and verified. Ours are those
inside vLLM's model. A written checkpoint has the names of its parent.

Source: vLLM 0.32 `qwen3_dflash.py` (`hf_to_vllm_mapper`, `load_weights`) and `models/utils.py` (`AutoWeightsLoader`).
"""

from __future__ import annotations

from collections.abc import Iterable

OTHER_NAMES = {
    "midlayer.": "layers.0.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "encoder.fc.": "fc.",
}
_MIMO_NAMES = {"model.mtp_layers.": "mtp_layers.", ".mtp_block.": "."}
"""Parts of the names in a target's files and in vLLM's model, and what they are in ours."""
IGNORED = (
    "t2d",
    "d2t",
    "mask_embedding",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
    "confidence_head",
    ".mlp.experts",
)
"""Tensors that vLLM skips, tables of a reduced vocabulary, DSpark's estimate for vLLM's adaptive verification, under which
nothing is captured, and the experts of an MTP head, which are the target's. They are never trained or swapped. A written
checkpoint has its parent's. Biases are skipped as well where the config asks for none."""
MTP_PREFIXES = ("mtp.", "model.mtp_layers.")
"""Beginnings of the names of an MTP head's tensors in its target's files: Qwen's, and MiMo's."""
METHODS = ("dflash", "dspark", "eagle3", "mtp")
"""vLLM's speculative methods whose drafters honed trains and swaps."""
SHARED = ("embed_tokens", "lm_head")
"""Tensors of the target, or the drafter's own in their place. They are never trained or swapped."""


def method_named(name: str) -> str:
    """Return the method that vLLM runs for a name of one: "mtp" for qwen3_next_mtp and all the other kinds of heads.

    Source: vLLM 0.32 `config/speculative.py` (`MTPModelTypes`, `__post_init__`).
    """
    return "mtp" if name.endswith("_mtp") else name


def names_of(stored: Iterable[str]) -> dict[str, str]:
    """Map our name of each tensor to its name in the checkpoint, without the ignored ones.

    Raises:
        ValueError: two tensors have the same name.
    """
    found: dict[str, str] = {}
    for theirs in stored:
        if any(part in theirs for part in IGNORED):
            continue
        ours = name_of(theirs)
        if ours in found:
            raise ValueError(f"{found[ours]} and {theirs} are the same tensor: keep one of them")
        found[ours] = theirs
    return found


def name_of(theirs: str) -> str:
    """Our name of a tensor, by its name in a checkpoint or in vLLM's model."""
    ours = theirs.removeprefix("mtp.")
    for other, plain in (OTHER_NAMES | _MIMO_NAMES).items():
        ours = ours.replace(other, plain, 1)
    return ours


def method_of(names: Iterable[str]) -> str:
    """Return the one of `METHODS` that drafts with tensors of these names of ours; "" if none does.

    Only DFlash and DSpark norm the context outside of their layers, and only DSpark has a Markov head. EAGLE-3 norms it in its
    layer.
    """
    found = set(names)
    parts = {name.partition(".")[0] for name in found}
    if "hidden_norm" in parts:
        return "dflash" if "markov_head" not in parts else "dspark"
    if parts & {"pre_fc_norm_hidden", "mtp_layers"}:
        return "mtp"
    return "eagle3" if {"fc.weight", "layers.0.hidden_norm.weight"} <= found else ""


_DFLASH_FEATURES = ("fc", "hidden_norm")
_DFLASH_CONTEXT = (*_DFLASH_FEATURES, "k_proj", "v_proj", "k_norm")
_FEATURES = {"dflash": _DFLASH_FEATURES, "dspark": _DFLASH_FEATURES, "eagle3": ("fc", "fc_norm", "input_norm"), "mtp": ()}
_CONTEXT = {
    "dflash": _DFLASH_CONTEXT,
    "dspark": _DFLASH_CONTEXT,
    "eagle3": ("fc", "fc_norm", "input_norm", "hidden_norm", "input_layernorm", "k_proj", "v_proj", "k_norm", "embed_tokens"),
    "mtp": (
        *("fc", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "input_layernorm", "k_proj", "v_proj", "k_norm"),
        *("input_proj", "token_layernorm", "hidden_layernorm"),  # MiMo's
    ),
}


def makes_features(name: str, method: str) -> bool:
    """Return whether fused features depend on a tensor of this name of ours, in a drafter of this method."""
    return any(part in _FEATURES[method] for part in name.split("."))


def makes_context(name: str, method: str) -> bool:
    """Return whether cached keys and values depend on a tensor of this name of ours, in a drafter of this method."""
    return any(part in _CONTEXT[method] for part in name.split("."))


def is_shared(name: str) -> bool:
    """Return whether a tensor is one of `SHARED`."""
    return any(part in name for part in SHARED)
