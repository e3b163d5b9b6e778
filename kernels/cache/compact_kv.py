"""Move the accepted path's K/V rows to the slots that follow the anchor's, in place, all layers in one launch.

Computes: reference.compact_kv. Row r of a request's step (0 the anchor's, n + 1 its tree's node n) wrote its K/V at slots[b,
r]. After the walk the i-th accepted row path[b, i − 1] must be at slots[b, i]. Rows already there aren't touched (a chain moves
nothing).

Why in place is safe: parents precede children, so a path rises and path[i − 1] ≥ i. So a row never moves up, and the row that
step i overwrites is at or below every source of the later steps. Steps run in groups of GROUP from the front: all loads of a
group, a barrier, all its stores. So within a group everything is read before anything is written, and no later group reads what
an earlier one wrote. Programs share nothing: each has its own layer, request and columns of the row. This needs a rising path
(walk_tree returns one) and slots that no other request has.

Moves: 2 · Σ rows that move · row bytes · planes, which at copy bandwidth is the floor; plus 8 bytes of slot and 4 of path per
row and program.
Its share of copy bandwidth on an H200 is in docs/gpu.md.
Layout: planes [num_blocks, kv_block_size, H, W], unit stride in W and any others, all of one shape, strides and type. They are
K and V of each layer, or whole rows of caches that keep K, V and scales beside each other. slot = block · kv_block_size +
offset. The type doesn't matter: words are moved. Scales in separate tensors are planes of another shape and need a separate
call.
CUDA graphs: the grid depends on shapes only, nothing is read back; pointers are in a table that is made once (KvPlanes).
Source: DDTree, arXiv 2604.12989; slots as in vLLM's v1/attention backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from honed.kernels.cache import reference

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

GROUP = 8
MAX_COLUMNS = 512

if triton is not None:

    @triton.jit(do_not_specialize=["num_rows", "max_depth"])  # type: ignore[untyped-decorator]
    def _compact_kernel(
        like_ptr: tl.tensor,
        table_ptr: tl.tensor,
        slot_ptr: tl.tensor,
        path_ptr: tl.tensor,
        num_accepted_ptr: tl.tensor,
        num_rows: tl.tensor,
        max_depth: tl.tensor,
        kv_block_size: tl.tensor,
        stride_block: tl.tensor,
        stride_slot: tl.tensor,
        stride_head: tl.tensor,
        row_words: tl.tensor,
        HEAD_WORDS: tl.constexpr,
        COLUMNS: tl.constexpr,
        GROUP: tl.constexpr,
        IS_FLAT: tl.constexpr,
        IS_ALIGNED: tl.constexpr,
    ) -> None:
        i_t, i_b, i_l = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
        accepted = tl.minimum(tl.load(num_accepted_ptr + i_b).to(tl.int32), max_depth)
        p_plane = tl.load(table_ptr + i_l).to(tl.pointer_type(like_ptr.dtype.element_ty))
        if IS_ALIGNED:
            p_plane = tl.multiple_of(p_plane, 16)
        o_c = i_t * COLUMNS + tl.arange(0, COLUMNS)
        m_c = o_c < row_words
        o_row = o_c.to(tl.int64)
        if not IS_FLAT:
            o_row = (o_c // HEAD_WORDS).to(tl.int64) * stride_head + o_c % HEAD_WORDS
        for i_g in range(0, accepted, GROUP):
            o_i = i_g + tl.arange(0, GROUP)
            b_source = tl.load(path_ptr + i_b * max_depth + o_i, mask=o_i < accepted, other=0).to(tl.int32)
            m_i = (b_source > o_i + 1) & (b_source < num_rows)
            b_from = tl.load(slot_ptr + i_b * num_rows + b_source, mask=m_i, other=-1).to(tl.int64)
            b_to = tl.load(slot_ptr + i_b * num_rows + o_i + 1, mask=m_i, other=-1).to(tl.int64)
            m_row = ((b_from >= 0) & (b_to >= 0))[:, None] & m_c[None, :]
            b_from = (b_from // kv_block_size) * stride_block + (b_from % kv_block_size) * stride_slot
            b_to = (b_to // kv_block_size) * stride_block + (b_to % kv_block_size) * stride_slot
            b_rows = tl.load(p_plane + b_from[:, None] + o_row[None, :], mask=m_row)
            tl.debug_barrier()
            tl.store(p_plane + b_to[:, None] + o_row[None, :], b_rows, mask=m_row)


@dataclass(frozen=True)
class KvPlanes:
    """Tensors of a paged cache that move together, and their device addresses; made once, outside CUDA graphs."""

    tensors: tuple[torch.Tensor, ...]  # each [num_blocks, kv_block_size, H, W]
    pointers: tuple[int, ...]
    table: torch.Tensor  # [planes] int64, on the device

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> KvPlanes:
        """Take the planes' addresses.

        Raises:
            ValueError: there are none, or they differ in shape, strides, type or device, or a row isn't of unit stride.
        """
        if not tensors:
            raise ValueError("compact_kv: no planes: give K and V of each layer")
        first = tensors[0]
        if first.dim() != 4 or first.stride(3) != 1:
            raise ValueError(
                f"compact_kv: planes must be [num_blocks, kv_block_size, heads, width] with unit stride in the last, not "
                f"{list(first.shape)} with strides {first.stride()}: transpose or unflatten the cache's view"
            )
        for i, x in enumerate(tensors):
            if (x.shape, x.stride(), x.dtype, x.device) != (first.shape, first.stride(), first.dtype, first.device):
                raise ValueError(
                    f"compact_kv: plane {i} ({list(x.shape)}, strides {x.stride()}, {x.dtype}, {x.device}) isn't like plane 0 "
                    f"({list(first.shape)}, strides {first.stride()}, {first.dtype}, {first.device}): a KvPlanes for each kind"
                )
        pointers = tuple(x.data_ptr() for x in tensors)
        return cls(tuple(tensors), pointers, torch.tensor(pointers, dtype=torch.int64, device=first.device))


def compact_kv(
    planes: KvPlanes,
    slots: torch.Tensor,  # [B, R] integers: slot of each row, the anchor's first; −1: none
    path: torch.Tensor,  # [B, P] integers: accepted rows, rising
    num_accepted: torch.Tensor,  # [B] integers
) -> None:
    """Move accepted rows to slots[:, 1 …] of every plane, in place; Triton on a GPU, its plain twin elsewhere.

    Raises:
        ValueError: shapes don't fit each other, or a plane has moved in memory since its address was taken.
    """
    if slots.dim() != 2 or path.dim() != 2 or num_accepted.dim() != 1 or not len(slots) == len(path) == len(num_accepted):
        raise ValueError(
            f"compact_kv: slots {list(slots.shape)}, path {list(path.shape)} and num_accepted {list(num_accepted.shape)} "
            "don't fit: they are [B, R], [B, P] and [B]"
        )
    _compact_kv(list(planes.tensors), planes.table, list(planes.pointers), slots, path, num_accepted)


@torch.library.custom_op("honed::compact_kv", mutates_args=("planes",))
def _compact_kv(
    planes: list[torch.Tensor],
    table: torch.Tensor,
    pointers: list[int],
    slots: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
) -> None:
    if planes[0].is_cuda:
        launch(planes, table, pointers, slots, path, num_accepted)
    else:
        reference.compact_kv(planes, slots, path, num_accepted)


@_compact_kv.register_fake
def _(*_: Any) -> None:
    return None


def launch(
    planes: Sequence[torch.Tensor],
    table: torch.Tensor,
    pointers: Sequence[int],
    slots: torch.Tensor,
    path: torch.Tensor,
    num_accepted: torch.Tensor,
    group: int = GROUP,
) -> None:
    """Run the Triton kernel itself (on a GPU, or under Triton's interpreter); arguments as `compact_kv`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    if any(x.data_ptr() != pointer for x, pointer in zip(planes, pointers, strict=True)):
        raise ValueError("compact_kv: a plane has moved in memory since its address was taken: make new KvPlanes")
    num_requests, num_rows = slots.shape
    max_depth = path.shape[1]
    words = _as_words(planes[0], pointers)
    heads, head_words = words.shape[2:]
    if not (num_requests and max_depth and num_rows and words.numel()):
        return
    slots, path, num_accepted = slots.contiguous(), path.contiguous(), num_accepted.contiguous()
    row_words = heads * head_words
    columns = min(triton.next_power_of_2(row_words), MAX_COLUMNS)
    byte_strides = [stride * words.element_size() for stride in words.stride()[:3]]
    is_flat = heads == 1 or words.stride(2) == head_words
    grid = (triton.cdiv(row_words, columns), num_requests, len(planes))
    _compact_kernel[grid](
        words,
        table,
        slots,
        path,
        num_accepted,
        num_rows,
        max_depth,
        words.shape[1],
        *words.stride()[:3],
        row_words,
        HEAD_WORDS=head_words,
        COLUMNS=columns,
        GROUP=group,
        IS_FLAT=is_flat,
        IS_ALIGNED=all(number % 16 == 0 for number in [*pointers, *byte_strides]),
        num_warps=max(1, min(4, columns // 128)),
    )


def _as_words(plane: torch.Tensor, pointers: Sequence[int]) -> torch.Tensor:
    """View the plane as the widest integers that divide all rows."""
    size = plane.element_size()
    numbers = [plane.shape[3] * size, *(stride * size for stride in plane.stride()[:3]), *pointers]
    for dtype in (torch.int32, torch.int16):
        if dtype.itemsize >= size and all(number % dtype.itemsize == 0 for number in numbers):
            return plane.view(dtype)
    return plane.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
