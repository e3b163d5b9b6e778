"""Rotary embeddings scaled for longer contexts: which frequencies are reduced, and by how much.

    linear    all of them by the factor
    llama3    those with fewer than `low_freq_factor` turns within the original context; a linear transition above that
    yarn      by dimension, between those of `beta_fast` and `beta_slow` turns; cosine and sine grow by 0.1 ln f + 1

Source: arXiv 2306.15595 (linear), the Llama 3.1 model card's configuration, arXiv 2309.00071 (YaRN, sections 3.2 to 3.4).
Compared with vLLM 0.32's `rotary_embedding` in `tests/recalib/config/test_rope_scaling.py`.
No torch here: `honed doctor` reads shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeScaling:
    """`rope_parameters` (or `rope_scaling`) of a config.json, without the base."""

    kind: str
    factor: float
    original_positions: float = 0.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    attention_factor: float | None = None
    truncate: bool = True

    @classmethod
    def from_json(cls, rope: Mapping[str, Any]) -> RopeScaling | None:
        """Read the scaling; None for the ordinary embedding.

        Raises:
            KeyError: something that this kind needs is missing.
        """
        kind = str(rope.get("rope_type", rope.get("type", "default")))
        if kind == "default":
            return None
        optional = {
            name: float(rope[name])
            for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
            if rope.get(name) is not None
        }
        factor = rope.get("attention_factor")
        return cls(
            kind,
            float(rope["factor"]),
            original_positions=float(rope["original_max_position_embeddings"]) if kind != "linear" else 0.0,
            attention_factor=None if factor is None else float(factor),
            truncate=bool(rope.get("truncate", True)),
            **optional,
        )


def frequencies(
    powers: Tensor,  # [D/2] theta^(2i / D)
    theta: float,
    scaling: RopeScaling | None,
) -> tuple[Tensor, float, float]:  # [D/2]
    """Return the frequencies, the divisor of positions, and the factor for cosine and sine.

    The operations are vLLM's, in its order: angles are large, so an ulp of a frequency shows at far positions.
    """
    inverse = 1.0 / powers
    if scaling is None:
        return inverse, 1.0, 1.0
    if scaling.kind == "linear":
        return inverse, scaling.factor, 1.0
    if scaling.kind == "llama3":
        return _llama3(inverse, scaling), 1.0, 1.0
    assert scaling.kind == "yarn"
    half = len(powers)
    low, high = (_dimension(scaling, turns, half, theta) for turns in (scaling.beta_fast, scaling.beta_slow))
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    ramp = (powers.new_tensor(range(half)) - low) / (high - low or 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (scaling.factor * powers) * (1 - kept) + inverse * kept, 1.0, _magnitude(scaling)


def _llama3(inverse: Tensor, scaling: RopeScaling) -> Tensor:  # [D/2] -> [D/2]
    lengths = 2 * math.pi / inverse  # positions of a whole turn
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = (scaling.original_positions / lengths - low) / (high - low) if low != high else 0.0 * inverse
    between = (1 - kept) * inverse / scaling.factor + kept * inverse
    is_short, is_long = lengths < scaling.original_positions / high, lengths > scaling.original_positions / low
    return inverse.where(is_short, (inverse / scaling.factor).where(is_long, between))


def _dimension(scaling: RopeScaling, turns: float, half: int, theta: float) -> float:
    """Find the head dimension whose frequency makes this many turns within the original context."""
    return half * math.log(scaling.original_positions / (turns * 2 * math.pi)) / math.log(theta)


def _magnitude(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return grown(scaling.mscale) / grown(scaling.mscale_all_dim)
    return grown(1.0)
