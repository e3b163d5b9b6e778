"""The shape of a DFlash drafter, read from its checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from honed.adapt.protocol.trainable import (
    LayerAttention,
    drafter_reasons,
    has_reduced_vocabulary,
    is_dflash2,
    layer_attention,
    resolved,
)
from honed.recalib.config.presets import completed
from honed.recalib.config.rope_scaling import RopeScaling
from honed.recalib.config.speculators import flat


@dataclass(frozen=True)
class Convolution:
    """DFlash2's convolutions over a block's tokens, around attention and MLP."""

    taps: int
    """Tokens that each sees: its own and those before it."""
    group_size: int
    """Channels that share the part of a kernel that depends on the token."""


@dataclass(frozen=True)
class Selector:
    """DFlash2's choice among a position's candidates, by the token before it."""

    rank: int
    top_k: int
    """Candidates of a position."""


@dataclass(frozen=True)
class DrafterConfig:
    """Configuration values that the drafter's function depends on, apart from its weights."""

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
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    num_target_layers: int | None = None
    attention: tuple[LayerAttention, ...] = ()
    """Attention masks by layer. Empty: each layer attends to everything before the block and to the whole block."""
    rotary_share: float = 1.0
    """Share of a head's dimensions that is rotated, from the first on."""
    value_scale: float = 1.0
    """Factor on all values."""
    convolution: Convolution | None = None
    selector: Selector | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    """DFlash2 has these two factors."""
    draft_vocab_size: int | None = None
    """Words that the drafter can draft, of the target's; None: all."""

    def attention_of(self, layer: int) -> LayerAttention:
        """Return a layer's attention mask."""
        return self.attention[layer] if self.attention else LayerAttention(None, is_causal=False)

    @property
    def feature_size(self) -> int:
        """Width of the concatenated auxiliary hidden states: the input of `fc`."""
        return self.target_hidden_size * len(self.target_layer_ids)

    @property
    def num_words(self) -> int:
        """Rows of the drafter's head."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens of a full block: all but the anchor."""
        return self.block_size - 1

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> DrafterConfig:
        """Read a DFlash config.json in z-lab's or speculators' form; `presets` fills in missing fields.

        Raises:
            ValueError: a field is missing, or asks for something vLLM or this drafter doesn't support. The message names it.
        """
        raw = resolved(flat(raw))
        if reasons := drafter_reasons(raw):
            raise ValueError(f"{'; '.join(reasons)}; serve this drafter without recalibration, or use another")
        if "vocab_size" not in raw:
            raise ValueError("config.json has no 'vocab_size'; is this a DFlash drafter?")
        raw = completed(raw)
        dflash = raw["dflash_config"]
        rope = raw["rope_parameters"]
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
                rope_theta=float(rope["rope_theta"]),
                rope_scaling=RopeScaling.from_json(rope),
                attention_bias=bool(raw.get("attention_bias")),
                num_target_layers=int(raw["num_target_layers"]) if raw.get("num_target_layers") else None,
                attention=layer_attention(raw),
                rotary_share=float(rope.get("partial_rotary_factor") or 1.0),
                value_scale=float(dflash.get("attention_value_scale") or 1.0),
                draft_vocab_size=int(raw["draft_vocab_size"]) if has_reduced_vocabulary(raw) else None,
                **_dflash2_of(dflash) if is_dflash2(raw) else {},
            )
        except KeyError as error:
            raise ValueError(f"config.json has no {error.args[0]!r}; is this a DFlash drafter?") from error


def _dflash2_of(dflash: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of DFlash2. Raises KeyError for a missing one."""
    return {
        "convolution": Convolution(int(dflash["conv_kernel_size"]), int(dflash["conv_group_size"])),
        "selector": Selector(int(dflash["selector_rank"]), int(dflash["selector_top_k"])),
        "embedding_scale": float(dflash.get("input_embedding_scale") or 1.0),
        "logit_scale": float(dflash.get("output_multiplier") or 1.0),
    }
