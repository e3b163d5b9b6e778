"""Cases of the op on the paged K/V cache: `compact_kv`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from benchmarks.kernels.case import Case, Goal, Run, Work
from honed.kernels.cache.compact_kv import KvPlanes, compact_kv

KV_BLOCK_SIZE = 16

# Letters: B requests, N tree nodes with the root, H K/V heads, D head size.


def compact_work(b: int, n: int, moved: int, layers: int, h: int, d: int, device: torch.device) -> Work:
    """Move paths of `moved` nodes, every second one of the tree, so that each row moves."""
    torch.manual_seed(0)
    num_blocks = b * (n // KV_BLOCK_SIZE + 2)
    tensors = [torch.randn(num_blocks, KV_BLOCK_SIZE, h, d, device=device).bfloat16() for _ in range(2 * layers)]
    planes = KvPlanes.of(tensors)
    span = num_blocks * KV_BLOCK_SIZE // b
    slots = torch.arange(b, device=device)[:, None] * span + torch.arange(n, device=device)
    path = (2 + 2 * torch.arange(moved, device=device, dtype=torch.int32)).repeat(b, 1)
    accepted = torch.full((b,), moved, device=device, dtype=torch.int32)
    source, target = slots.gather(1, path.long()).flatten(), slots[:, 1 : moved + 1].flatten()

    def plain() -> object:
        for plane in tensors:
            rows = plane.view(-1, h, d)
            rows[target] = rows[source]
        return tensors

    alternatives: dict[str, Run] = {"index and index_put, a layer at a time": plain}
    if device.type == "cuda":
        alternatives["the same, compiled"] = torch.compile(plain)
    row_bytes = h * d * tensors[0].element_size()
    return Work(
        lambda: compact_kv(planes, slots, path, accepted),
        bytes_moved=2 * b * moved * row_bytes * len(tensors),
        alternatives=alternatives,
        is_graphed=True,
    )


def compact_case(b: int, n: int, moved: int, layers: int, on: Any, *goals: Goal) -> Case:
    """A case of `compact_kv`."""
    shape = f"batch {b}, {moved} of {n - 1} nodes, {layers} layers of 8 × 128"
    return Case("compact_kv", shape, on, partial(compact_work, b, n, moved, layers, 8, 128), goals)


CASES = [
    compact_case(64, 33, 8, 36, "cuda", Goal("ceiling_share", at_least=0.6)),
    compact_case(1, 33, 8, 36, "cuda"),
    compact_case(4, 33, 8, 4, "cpu"),
]
