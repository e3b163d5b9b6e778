"""Plain PyTorch twins of `compact_kv` and `gather_kv`.

Letters: B = requests, R = rows of a step (anchor and tree), P = longest path, H = K/V heads, D = head size, T = rows of the
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


def compact_kv(
    planes: Sequence[torch.Tensor],  # each [num_blocks, kv_block_size, H, W]
    slots: torch.Tensor,  # [B, R]
    path: torch.Tensor,  # [B, P]
    num_accepted: torch.Tensor,  # [B]
) -> None:
    """Move the row of path[b, i − 1] to slots[b, i] for i = 1 … num_accepted[b], in place: read all, then write all."""
    step = torch.arange(path.shape[1], device=path.device)
    row = path.long()
    is_moved = (step < num_accepted[:, None]) & (row > step + 1) & (row < slots.shape[1])
    request, i = is_moved.nonzero(as_tuple=True)
    source, target = slots[request, row[request, i]].long(), slots[request, i + 1].long()
    is_there = (source >= 0) & (target >= 0)
    source, target = source[is_there], target[is_there]
    if not len(source):  # accepted rows are where a chain's would be
        return
    for plane in planes:
        kv_block_size = plane.shape[1]
        rows = plane[source // kv_block_size, source % kv_block_size].clone()
        plane[target // kv_block_size, target % kv_block_size] = rows


class PagedPlane(NamedTuple):
    """Keys or values of one layer in a paged cache, as stored. See gather_kv.py for the formats."""

    data: torch.Tensor
    """[num_blocks, kv_block_size, H, D] of a float type, or [..., D / 2] uint8: two 4-bit numbers a byte, the even one low."""
    scale: torch.Tensor | None = None
    """float32, of any shape that expands to [num_blocks, kv_block_size, H]; None: 1."""
    zero_point: torch.Tensor | None = None
    """Zero points of the same kind for 4 bits: value = (number − zero point) · scale; None: 0."""
    has_hidden_zero: bool = False
    """For 4 bits: the zero point is the lowest four mantissa bits of the scale, which don't count as scale."""
    unrotate: torch.Tensor | None = None
    """[D, D] that undoes the rotation: value = stored row @ unrotate; exact in float16, or rounded to it."""


def stored_values(plane: PagedPlane) -> torch.Tensor:  # [num_blocks, kv_block_size, H, D] float32
    """Return all values of the plane, as they were before storage."""
    data, scale, zero_point = plane.data, plane.scale, plane.zero_point
    is_packed = data.dtype == torch.uint8
    values = (torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2) if is_packed else data).float()
    if plane.has_hidden_zero:
        assert scale is not None, "the zero point is hidden in the scale"
        bits = scale.contiguous().view(torch.int32)
        scale, zero_point = (bits & -16).view(torch.float32), (bits & 0xF).float()
    rows = data.shape[:3]
    if zero_point is not None:
        values = values - zero_point.expand(rows)[..., None]
    if plane.unrotate is not None:
        values = values @ plane.unrotate.to(torch.float16).float()
    return values if scale is None else values * scale.expand(rows)[..., None]


def gather_kv(
    plane: PagedPlane,
    block_table: torch.Tensor,  # [B, blocks]
    starts: torch.Tensor,  # [B]
    row_starts: torch.Tensor,  # [B + 1]
    out: torch.Tensor,  # [T, H, D]
    max_rows: int,
) -> None:
    """Copy rows starts[b] … of each request's sequence to out[row_starts[b]] … out[row_starts[b + 1] − 1]."""
    values = stored_values(plane)
    kv_block_size = plane.data.shape[1]
    for b, (first, last) in enumerate(zip(row_starts.tolist()[:-1], row_starts.tolist()[1:], strict=True)):
        count = max(0, min(last - first, max_rows))
        position = starts[b].long() + torch.arange(count, device=out.device)
        block = block_table[b].long()[position // kv_block_size]
        out[first : first + count] = values[block, position % kv_block_size].to(out.dtype)
