"""The shape of a drafter, read from its checkpoint's config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from honed.adapt.models.target_tensor_names import text_config
from honed.adapt.models.trainable import (
    EAGLE3_WITH_HEAD_NORMS,
    LayerAttention,
    drafter_reasons,
    drafts_from_anchor,
    eagle3_option,
    has_attention_bias,
    has_experts,
    has_reduced_vocabulary,
    is_dflash2,
    is_dspark,
    is_eagle3,
    is_mimo,
    is_mtp,
    layer_attention,
    resolved,
)
from honed.recalib.config.presets import completed
from honed.recalib.config.rope_scaling import RopeScaling
from honed.recalib.config.speculators import flat

EAGLE3_TOKENS = 5
"""Draft tokens of an EAGLE-3 drafter whose config doesn't say how many it is for."""


MTP_TOKENS = 3
"""Draft tokens of an MTP head where the server's number isn't known."""


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
class Markov:
    """DSpark's addition to a token's scores, by the token before it."""

    rank: int
    drafts_from_anchor: bool
    """Whether the anchor's own row predicts the first token: there is a mask less."""


@dataclass(frozen=True)
class Eagle3:
    """What only an EAGLE-3 drafter has: a layer that drafts token after token, each from its own output for the one before."""

    norm_before_residual: bool
    """Whether the residual is added to the normed hidden state."""
    norm_before_fc: bool
    """Whether the concatenated features are normed together before `fc`."""
    norms_features: bool
    """Whether each target layer's features are normed by themselves before `fc`."""
    feeds_normed: bool
    """Whether the next token gets the output after the last norm, not before it."""
    has_head_norms: bool
    """Whether queries and keys are normed, as in Qwen3."""
    num_features: int
    """Layers of the target that are read."""


@dataclass(frozen=True)
class Experts:
    """What an MTP head has in the place of an MLP: routed experts, which are never trained, beside a shared one, which is."""

    count: int
    top_k: int
    """Experts of a token."""
    intermediate_size: int
    """Width of a routed expert; `DrafterConfig.intermediate_size` is the shared one's."""
    renormalizes: bool
    """Whether the chosen experts' shares add up to 1."""


@dataclass(frozen=True)
class Mtp:
    """What only an MTP head has: a layer of the target's kind, which is part of the target's checkpoint."""

    has_gate: bool
    """Whether each query brings a gate on the attention's output."""
    experts: Experts | None = None
    is_mimo: bool = False
    """Whether it is MiMo's: it reads the target's last state before the final norm, and norms no queries and keys."""


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
    """Layers of the target whose outputs are read; () for an EAGLE-3 drafter that leaves them to vLLM."""
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
    markov: Markov | None = None
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    """DFlash2 has these two factors."""
    eagle3: Eagle3 | None = None
    mtp: Mtp | None = None
    draft_vocab_size: int | None = None
    """Words that the drafter can draft, of the target's; None: all."""

    def attention_of(self, layer: int) -> LayerAttention:
        """Return a layer's attention mask."""
        return self.attention[layer] if self.attention else LayerAttention(None, is_causal=False)

    @property
    def method(self) -> str:
        """vLLM's speculative method that drafts with it."""
        return "eagle3" if self.eagle3 else "mtp" if self.mtp else "dspark" if self.markov else "dflash"

    @property
    def drafts_one_by_one(self) -> bool:
        """Whether each draft token is made from the one before, as many as are served."""
        return self.eagle3 is not None or self.mtp is not None

    @property
    def feature_size(self) -> int:
        """Width of the concatenated auxiliary hidden states: the input of `fc`."""
        if self.mtp is not None:
            return self.hidden_size
        return self.target_hidden_size * (self.eagle3.num_features if self.eagle3 else len(self.target_layer_ids))

    @property
    def pair_rank(self) -> int:
        """Columns that a head gets for scores of a token after the one before it; 0: tokens are scored by themselves."""
        return self.selector.rank if self.selector else self.markov.rank if self.markov else 0

    @property
    def num_words(self) -> int:
        """Rows of the drafter's head."""
        return self.draft_vocab_size or self.vocab_size

    @property
    def num_draft_tokens(self) -> int:
        """Drafted tokens of a full block: all but the anchor. An EAGLE-3 drafter's are as many as it is served with."""
        return self.block_size - 1

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], method: str = "") -> DrafterConfig:
        """Read a config.json, in speculators' form or vLLM's own; `presets` fills in a DFlash drafter's missing fields.

        Args:
            method: vLLM's; "": the config itself has to show it.

        Raises:
            ValueError: a field is missing, or asks for something vLLM or this drafter doesn't support. The message names it.
        """
        raw = resolved(text_config(raw) if is_mtp(raw) else flat(raw), method)
        kind = "an EAGLE-3" if is_eagle3(raw) else "an MTP" if is_mtp(raw) else "a DSpark" if is_dspark(raw) else "a DFlash"
        if reasons := drafter_reasons(raw):
            raise ValueError(f"{'; '.join(reasons)}; serve this drafter without recalibration, or use another")
        if "vocab_size" not in raw:
            raise ValueError(f"config.json has no 'vocab_size'; is this {kind} drafter?")
        rope = raw["rope_parameters"]
        try:
            own = _eagle3_of(raw) if is_eagle3(raw) else _mtp_of(raw) if is_mtp(raw) else _dflash_of(completed(raw))
            return cls(
                vocab_size=int(raw["vocab_size"]),
                hidden_size=int(raw["hidden_size"]),
                intermediate_size=int(raw[_width_of_mlp(raw)]),
                num_hidden_layers=1 if is_mtp(raw) else int(raw["num_hidden_layers"]),
                num_attention_heads=int(raw["num_attention_heads"]),
                num_key_value_heads=int(raw["num_key_value_heads"]),
                head_dim=int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]),
                target_hidden_size=int(raw.get("target_hidden_size") or raw["hidden_size"]),
                rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
                rope_theta=float(rope["rope_theta"]),
                rope_scaling=RopeScaling.from_json(rope),
                attention_bias=has_attention_bias(raw),
                num_target_layers=int(raw["num_target_layers"]) if raw.get("num_target_layers") else None,
                rotary_share=float(rope.get("partial_rotary_factor") or 1.0),
                draft_vocab_size=int(raw["draft_vocab_size"]) if has_reduced_vocabulary(raw) else None,
                **own,
            )
        except KeyError as error:
            raise ValueError(f"config.json has no {error.args[0]!r}; is this {kind} drafter?") from error


def _dflash_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a completed DFlash or DSpark config. Raises KeyError for a missing one."""
    dflash = raw["dflash_config"]
    return {
        "block_size": int(raw["block_size"]) + drafts_from_anchor(raw),
        "mask_token_id": int(dflash["mask_token_id"]),
        "target_layer_ids": tuple(int(i) for i in dflash["target_layer_ids"]),
        "attention": layer_attention(raw),
        "value_scale": float(dflash.get("attention_value_scale") or 1.0),
        **(_dflash2_of(dflash) if is_dflash2(raw) else {}),
        **({"markov": Markov(int(raw["markov_rank"]), drafts_from_anchor(raw))} if is_dspark(raw) else {}),
    }


def _mtp_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a target's config that its MTP head depends on."""
    if is_mimo(raw):
        kind = Mtp(has_gate=False, is_mimo=True)
    else:
        kind = Mtp(bool(raw.get("attn_output_gate", True)), _experts_of(raw) if has_experts(raw) else None)
    return {"block_size": 1 + MTP_TOKENS, "mask_token_id": 0, "target_layer_ids": (), "mtp": kind}


def _experts_of(raw: Mapping[str, Any]) -> Experts:
    """Fields of an MTP head's experts. Raises KeyError for a missing one."""
    return Experts(
        count=int(raw["num_experts"]),
        top_k=int(raw["num_experts_per_tok"]),
        intermediate_size=int(raw["moe_intermediate_size"]),
        renormalizes=bool(raw.get("norm_topk_prob", True)),
    )


def _width_of_mlp(raw: Mapping[str, Any]) -> str:
    """Name of the field that has it."""
    return "shared_expert_intermediate_size" if is_mtp(raw) and has_experts(raw) else "intermediate_size"


def _eagle3_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an EAGLE-3 config."""
    layers = eagle3_option(raw, "eagle_aux_hidden_state_layer_ids") or ()
    return {
        "block_size": 1 + int(raw.get("num_speculative_tokens") or EAGLE3_TOKENS),
        "mask_token_id": 0,
        "target_layer_ids": tuple(sorted({int(i) - 1 for i in layers})),  # vLLM counts the embedding's output as 0
        "eagle3": Eagle3(
            norm_before_residual=bool(raw.get("norm_before_residual")),
            norm_before_fc=bool(eagle3_option(raw, "norm_before_fc")),
            norms_features=bool(raw.get("fc_norm")),
            feeds_normed=bool(raw.get("norm_output")),
            has_head_norms=raw["architectures"][0] == EAGLE3_WITH_HEAD_NORMS,
            num_features=int(raw.get("num_aux_layers") or raw.get("num_aux_hidden_states") or len(layers) or 3),
        ),
    }


def _dflash2_of(dflash: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of DFlash2. Raises KeyError for a missing one."""
    return {
        "convolution": Convolution(int(dflash["conv_kernel_size"]), int(dflash["conv_group_size"])),
        "selector": Selector(int(dflash["selector_rank"]), int(dflash["selector_top_k"])),
        "embedding_scale": float(dflash.get("input_embedding_scale") or 1.0),
        "logit_scale": float(dflash.get("output_multiplier") or 1.0),
    }
