"""Layers that every kind of drafter is made of."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.config.rope_scaling import RopeScaling, frequencies

# Letters: N rows, H width, I width of the attention's input, R query heads, G key/value heads, D head width.


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        return F.rms_norm(x.float(), (x.shape[-1],), self.weight, self.eps).to(x.dtype)


class OnePlusNorm(RMSNorm):
    """x / sqrt(mean(x^2) + eps) * (1 + weight), computed in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:  # [..., width]
        return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + self.weight, self.eps).to(x.dtype)


def rotary_tables(
    positions: Tensor, width: int, theta: float, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:  # 2 x [..., width/2]
    """Cosine and sine of each position's angles, in float32; bit for bit vLLM's tables."""
    powers = theta ** (torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width)
    inverse, divisor, magnitude = frequencies(powers, theta, scaling)
    angles = (positions.float() / divisor).unsqueeze(-1) * inverse
    return angles.cos() * magnitude, angles.sin() * magnitude


def rotate(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:  # [..., heads, D]
    """Apply the rotary embedding in the two-halves ("neox") layout; dimensions beyond the tables' stay as they are."""
    cos, sin = (table.unsqueeze(-2).to(x.dtype) for table in tables)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), dim=-1)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DrafterConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [..., H]
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    """A pre-norm layer: attention, then an MLP."""

    def __init__(self, config: DrafterConfig, width: int, *, has_head_norms: bool, has_output_bias: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config, width, has_head_norms=has_head_norms, has_output_bias=has_output_bias)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def output(self, attended: Tensor, residual: Tensor) -> Tensor:  # [N, R * D], [N, H] -> [N, H]
        """Add what was attended to and the MLP's output to the residual."""
        residual = residual + self.self_attn.o_proj(attended)
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Attention(nn.Module):
    """Attention's projections, with norms of queries and keys or none."""

    def __init__(self, config: DrafterConfig, width: int, *, has_head_norms: bool, has_output_bias: bool) -> None:
        super().__init__()
        self.num_kv_heads, self.head_dim = config.num_key_value_heads, config.head_dim
        query_width, kv_width = (n * config.head_dim for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q_proj = nn.Linear(width, query_width, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=has_output_bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if has_head_norms else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if has_head_norms else None

    def queries(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:  # [..., I] -> [..., heads, D]
        """Compute rotated queries."""
        q = self.q_proj(x).view(*x.shape[:-1], -1, self.head_dim)
        return rotate(q if self.q_norm is None else self.q_norm(q), tables)

    def keys_values(self, x: Tensor, tables: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:  # [..., I] -> 2 x [..., G, D]
        """Compute rotated keys, and values."""
        shape = (*x.shape[:-1], self.num_kv_heads, self.head_dim)
        keys = self.k_proj(x).view(shape)
        return rotate(keys if self.k_norm is None else self.k_norm(keys), tables), self.v_proj(x).view(shape)
