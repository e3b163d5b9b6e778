"""Matrix products with the hidden states' dtype and float32 sums, in the caller's memory.

On a GPU the tensor cores do this directly (`out_dtype`). A CPU would round every score of the result to bfloat16, so there both
sides are widened. A head of another dtype is converted part by part, never as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

CONVERTED_ROWS = 8192


def wide_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the type of sums over x: float32, or float64 for float64."""
    return torch.promote_types(x.dtype, torch.float32)


def operand_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the type of the operands: the hidden states' own on a GPU, the sums' on a CPU."""
    return x.dtype if x.is_cuda else wide_dtype(x)


def slices(length: int, size: int) -> Iterator[slice]:
    """Slices of at most `size` that cover range(length)."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def even_size(length: int, most: int) -> int:
    """Return the size of the fewest equal parts of at most `most`; 1 for length 0."""
    return -(-length // max(1, -(-length // most))) or 1


def scores_into(out: torch.Tensor, hidden: torch.Tensor, head: torch.Tensor) -> None:  # [M, V], [M, H], [V, H]
    """out = hidden @ headᵀ; `out` is wide."""
    dtype = operand_dtype(hidden)
    hidden = hidden.to(dtype)
    for part in _parts(head, dtype):
        right = head[part].to(dtype).T
        target = out[:, part]
        if dtype == out.dtype:
            torch.mm(hidden, right, out=target)
        elif target.is_contiguous():
            torch.mm(hidden, right, out_dtype=out.dtype, out=target)
        else:
            target.copy_(torch.mm(hidden, right, out_dtype=out.dtype))


def add_weighted(out: torch.Tensor, weights: torch.Tensor, head: torch.Tensor) -> None:  # [M, H], [M, V], [V, H]
    """out += weights @ head; `out` is wide."""
    dtype = operand_dtype(weights)
    for part in _parts(head, dtype):
        left, right = weights[:, part].to(dtype), head[part].to(dtype)
        if dtype == out.dtype:
            out.addmm_(left, right)
        else:
            torch.addmm(out, left, right, out_dtype=out.dtype, out=out)


def _parts(head: torch.Tensor, dtype: torch.dtype) -> Iterator[slice]:
    return slices(len(head), len(head) if head.dtype == dtype else CONVERTED_ROWS)
