"""Matrix products with the operands' dtype and sums of float32, in the caller's memory.

On a GPU the tensor cores do just that (`out_dtype`); a CPU would round every score to bfloat16 on the way out, so there a
narrow head is widened tile by tile.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

TILE = 8192
"""Rows of the head (tokens of the vocabulary) at a time; the Triton kernels want a power of two."""


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """What sums over x are kept in: float32, float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def tiles(length: int, size: int = TILE) -> Iterator[slice]:
    """Slices that cover range(length)."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def scores_into(out: torch.Tensor, hidden: torch.Tensor, head: torch.Tensor) -> None:  # [M, V], [M, H], [V, H]
    """out = hidden @ headᵀ; `out` is wide."""
    if hidden.dtype == head.dtype == out.dtype:
        torch.mm(hidden, head.T, out=out)
    elif hidden.is_cuda and hidden.dtype == head.dtype:
        torch.mm(hidden, head.T, out_dtype=out.dtype, out=out)
    else:
        wide = hidden.to(out.dtype)
        for tile in tiles(len(head)):
            out[:, tile] = wide @ head[tile].to(out.dtype).T


def add_weighted(out: torch.Tensor, weights: torch.Tensor, head: torch.Tensor) -> None:  # [M, H], [M, V], [V, H]
    """out += weights @ head; `out` is wide."""
    if weights.dtype == head.dtype == out.dtype:
        out.addmm_(weights, head)
    elif weights.is_cuda and weights.dtype == head.dtype:
        torch.addmm(out, weights, head, out_dtype=out.dtype, out=out)
    else:
        for tile in tiles(len(head)):
            out.addmm_(weights[:, tile].to(out.dtype), head[tile].to(out.dtype))
