"""Names of the target's tensors that drafters read: its embedding, its head and its last norm.

Published checkpoints name the text model's tensors by the class that it is part of. Every reader of a target goes by these
names.

Source: vLLM 0.32, `hf_to_vllm_mapper` of `models/llama.py`, `qwen3_vl.py`, `qwen3_5.py`, `gemma4_mm.py`, `kimi_k25.py`,
`qwen3_omni_moe_thinker.py` and `nemotron_h.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

_PREFIXES = {
    "model.": "",
    "model.language_model.": "",
    "language_model.model.": "language_model.",
    "thinker.model.": "thinker.",
}
"""Each class prefixes its text model's tensors with the key, and its head's with the value."""
_HEAD = "lm_head.weight"


class HeadNames(NamedTuple):
    """Names in a target's files."""

    embed_tokens: str
    lm_head: str
    """The embedding's, if the head is tied to it."""
    norm: str
    layers: str
    """Prefix of its layers: `layers`0.input_layernorm.weight."""


def head_names(target: Mapping[str, Any], tensors: Collection[str]) -> HeadNames:
    """Find the names of a target's embedding, head and last norm.

    Args:
        target: its config.json.
        tensors: names in its files.

    Raises:
        ValueError: one is missing or quantised. The message is a sentence's end that names it.
    """
    places = {f"{prefix}embed_tokens.weight": (prefix, head) for prefix, head in _PREFIXES.items()}
    known = [HeadNames(embed, f"{head}{_HEAD}", f"{at}norm.weight", f"{at}layers.") for embed, (at, head) in places.items()]
    known.append(HeadNames("backbone.embeddings.weight", _HEAD, "backbone.norm_f.weight", "backbone.layers."))
    # Without a match the plain names are missed, so that they are named.
    found = next((names for names in known if names.embed_tokens in tensors), known[0])
    if _is_tied(target, tensors, found.lm_head):
        found = found._replace(lm_head=found.embed_tokens)
    shared = {found.embed_tokens: None, found.lm_head: None}
    if packed := [name for name in tensors if any(_is_stored_of(name, weight) for weight in shared)]:
        raise ValueError(f"the target's embedding or head is quantised ({min(packed)})")
    if missing := [name for name in (*shared, found.norm) if name not in tensors]:
        raise ValueError(f"the target's files have no tensor {' and no '.join(missing)}")
    return found


def text_config(target: Mapping[str, Any]) -> Mapping[str, Any]:
    """The text model's part of a target's config.json."""
    thinker = target.get("thinker_config") or target
    part: Mapping[str, Any] = thinker.get("text_config") or thinker
    return part


def _is_tied(target: Mapping[str, Any], tensors: Collection[str], head: str) -> bool:
    """Whether the head is the embedding. A config that says nothing means its class's default; then the files tell."""
    said = [part.get("tie_word_embeddings") for part in (target, text_config(target))]
    return any(said) if any(one is not None for one in said) else head not in tensors


def _is_stored_of(name: str, weight: str) -> bool:
    """Whether a tensor is of a quantised linear layer or embedding: its scales, its packed values."""
    module = weight.removesuffix("weight")
    return name.startswith(module) and name != weight and not name.endswith("bias")
