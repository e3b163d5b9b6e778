"""The shape of a DFlash drafter, read from its checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DrafterConfig:
    """Everything the drafter's function depends on beside its weights."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    target_hidden_size: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1_000_000.0
    num_target_layers: int | None = None

    @property
    def feature_size(self) -> int:
        """Width of the auxiliary hidden states side by side: the input of `fc`."""
        return self.target_hidden_size * len(self.target_layer_ids)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens of a full block that are drafted: all but the anchor."""
        return self.block_size - 1

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Read a DFlash config.json.

        Raises:
            ValueError: when a field is missing, or asks for something this drafter doesn't do; the message names it.
        """
        dflash = raw.get("dflash_config") or {}
        if reason := _unsupported(raw, dflash):
            raise ValueError(f"{reason} is not supported for training; serve this drafter without recalibration")
        rope = raw.get("rope_parameters") or {}
        try:
            return cls(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw["intermediate_size"]),
                num_hidden_layers=int(raw["num_hidden_layers"]),
                num_attention_heads=int(raw["num_attention_heads"]),
                num_key_value_heads=int(raw["num_key_value_heads"]),
                head_dim=int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]),
                block_size=int(raw["block_size"]),
                mask_token_id=int(dflash["mask_token_id"]),
                target_layer_ids=tuple(int(i) for i in dflash["target_layer_ids"]),
                target_hidden_size=int(raw.get("target_hidden_size") or raw["hidden_size"]),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or 1_000_000.0),
                num_target_layers=int(raw["num_target_layers"]) if raw.get("num_target_layers") else None,
            )
        except KeyError as error:
            raise ValueError(f"config.json has no {error.args[0]!r}; is this a DFlash drafter?") from error


def _unsupported(raw: Mapping[str, Any], dflash: Mapping[str, Any]) -> str | None:
    """The first variant of DFlash in this config that the training twin has no counterpart for."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    checks = {
        "attention_bias": raw.get("attention_bias"),
        "interleaved RoPE": not raw.get("is_neox_style", True),
        "scaled RoPE": rope.get("rope_type", "default") != "default",
        "sliding-window attention": dflash.get("use_swa") or "sliding_attention" in (raw.get("layer_types") or ()),
        "causal drafting": dflash.get("causal") or raw.get("is_causal"),
        "a reduced draft vocabulary": raw.get("draft_vocab_size") not in (None, raw.get("vocab_size")),
        "drafting without auxiliary hidden states": not dflash.get("use_aux_hidden_state", True),
        "attention_value_scale": dflash.get("attention_value_scale"),
        "an attention sink": dflash.get("attention_sink_bias") or raw.get("add_swa_attention_sink_bias"),
        "logit_scale": raw.get("logit_scale", 1.0) != 1.0,
    }
    return next((name for name, is_asked in checks.items() if is_asked), None)
