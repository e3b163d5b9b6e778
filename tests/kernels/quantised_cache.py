"""Writes K/V rows as quantised caches store them: the other side of gather_kv, in plain PyTorch."""

from __future__ import annotations

import torch

from honed.kernels.cache.gather_kv import hadamard_unrotation
from honed.kernels.cache.reference import PagedPlane


def pack(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers 0 … 15 [..., D] to bytes [..., D / 2], the even position low."""
    numbers = numbers.to(torch.uint8)
    return numbers[..., ::2] | numbers[..., 1::2] << 4


def four_bits(rows: torch.Tensor, unrotate: torch.Tensor | None = None) -> PagedPlane:
    """As vLLM's int4_per_token_head: rotated, asymmetric, the zero point hidden in the scale's lowest bits."""
    if unrotate is not None:
        rows = rows @ unrotate.float().inverse()
    low, high = rows.amin(-1), rows.amax(-1)
    scale = ((high - low) / 15.0).clamp(min=1e-6)
    zero = (-low / scale).round().clamp(0, 15)
    numbers = (rows / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    hidden = ((scale.view(torch.int32) & -16) | zero.int()).view(torch.float32)
    return PagedPlane(pack(numbers), hidden, has_hidden_zero=True, unrotate=unrotate)


def four_bits_with_minimum(rows: torch.Tensor) -> PagedPlane:
    """As TurboQuant's values: number · scale + minimum."""
    low, high = rows.amin(-1), rows.amax(-1)
    scale = ((high - low) / 15.0).clamp(min=1e-8)
    return PagedPlane(pack(((rows - low[..., None]) / scale[..., None]).round()), scale, -low / scale)


def fp8(rows: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> PagedPlane:
    """With a scale that expands to the rows' [blocks, block size, heads]."""
    return PagedPlane((rows / scale.expand(rows.shape[:3])[..., None]).to(dtype), scale)


def signed_hadamard(head_size: int) -> torch.Tensor:
    width = head_size & -head_size
    signs = 2.0 * torch.randint(2, (width,), generator=torch.Generator().manual_seed(head_size)) - 1.0
    return hadamard_unrotation(head_size, signs)
