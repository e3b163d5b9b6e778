"""Cases of the ops on the paged K/V cache: `compact_kv` and `gather_kv`."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch

from benchmarks.kernels.case import Case, Goal, Run, Work
from honed.kernels.cache import reference
from honed.kernels.cache.compact_kv import KvPlanes, compact_kv
from honed.kernels.cache.gather_kv import gather_kv, hadamard_unrotation
from honed.kernels.cache.reference import PagedPlane

KV_BLOCK_SIZE = 16
Format = Literal["bf16", "fp8", "int4"]

# Letters: B requests, N tree nodes with the root, H K/V heads, D head size, T rows of a request.


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


def plane_of(kind: Format, num_blocks: int, h: int, d: int, device: torch.device) -> PagedPlane:
    """Make a plane of random contents."""
    shape = (num_blocks, KV_BLOCK_SIZE, h, d)
    if kind == "bf16":
        return PagedPlane(torch.randn(shape, device=device).bfloat16())
    if kind == "fp8":
        return PagedPlane(torch.randn(shape, device=device).to(torch.float8_e4m3fn), scale=torch.tensor(0.5, device=device))
    packed = torch.randint(256, (*shape[:3], d // 2), device=device, dtype=torch.uint8)
    signs = torch.randint(2, (d,), device=device).float() * 2 - 1
    scale = torch.rand(shape[:3], device=device)
    return PagedPlane(packed, scale=scale, has_hidden_zero=True, unrotate=hadamard_unrotation(d, signs))


def gather_work(b: int, t: int, h: int, d: int, kind: Format, device: torch.device) -> Work:
    """Gather T rows of each of B requests, from blocks at random places."""
    torch.manual_seed(0)
    blocks = -(-t // KV_BLOCK_SIZE)
    plane = plane_of(kind, b * blocks, h, d, device)
    table = torch.randperm(b * blocks, device=device).view(b, blocks).int()
    starts = torch.zeros(b, device=device, dtype=torch.int32)
    row_starts = torch.arange(0, b * t + 1, t, device=device, dtype=torch.int32)
    out = torch.empty(b * t, h, d, device=device, dtype=torch.bfloat16)

    def plain() -> object:
        chosen = plane._replace(
            data=plane.data[table.flatten()],
            scale=plane.scale[table.flatten()] if plane.scale is not None and plane.scale.dim() else plane.scale,
        )
        return reference.stored_values(chosen).bfloat16().view(b, -1, h, d)[:, :t]

    alternatives: dict[str, Run] = {"plain PyTorch": plain}
    if device.type == "cuda":
        alternatives["plain PyTorch, compiled"] = torch.compile(plain)
    stored = plane.data[0, 0].nbytes + (4 * h if kind == "int4" else 0)
    return Work(
        lambda: gather_kv(plane, table, starts, row_starts, out, t),
        bytes_moved=b * t * stored + out.nbytes,
        flops=2 * b * t * h * d * d if kind == "int4" else 0,
        alternatives=alternatives,
        is_graphed=True,
    )


def compact_case(b: int, n: int, moved: int, layers: int, on: Any, *goals: Goal) -> Case:
    """A case of `compact_kv`."""
    shape = f"batch {b}, {moved} of {n - 1} nodes, {layers} layers of 8 × 128"
    return Case("compact_kv", shape, on, partial(compact_work, b, n, moved, layers, 8, 128), goals)


def gather_case(b: int, t: int, kind: Format, on: Any) -> Case:
    """A case of `gather_kv`."""
    return Case("gather_kv", f"{kind}: batch {b}, {t} rows of 8 × 128", on, partial(gather_work, b, t, 8, 128, kind))


CASES = [
    compact_case(64, 33, 8, 36, "cuda", Goal("ceiling_share", at_least=0.6)),
    compact_case(1, 33, 8, 36, "cuda"),
    *(gather_case(16, 4096, kind, "cuda") for kind in ("bf16", "fp8", "int4")),
    compact_case(4, 33, 8, 4, "cpu"),
    *(gather_case(2, 1024, kind, "cpu") for kind in ("bf16", "int4")),
]
