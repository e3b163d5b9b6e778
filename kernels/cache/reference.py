"""Plain PyTorch twin of `compact_kv`.

Letters: B = requests, R = rows of a step (anchor and tree), P = longest path, H = K/V heads, W = numbers of a head's row.
"""

from __future__ import annotations

from collections.abc import Sequence

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
