"""Copy paged K/V to contiguous rows and undo the cache's quantisation, for a drafter that attends to the target's cache.

Computes: reference.gather_kv. Row t of request b is position starts[b] + t of its sequence. Requests lie one after the other,
as variable-length attention expects. `starts` and `row_starts` can select a window (such as the last 4,096 positions).

Formats (PagedPlane), with vLLM's names for --kv-cache-dtype:
- float16, bfloat16, float32: unchanged.
- fp8 (e4m3, e5m2): value = stored · scale; scale a number, [H], or one for each row and head (fp8_per_token_head).
- 4 bits (int4_per_token_head): two numbers a byte, the even position in the low half; value = (number − zero point) · scale,
  with one float32 scale a row and head whose lowest four mantissa bits are the zero point. Asymmetric formats with separate
  zero points (TurboQuant's values: number · scale + minimum, so zero point = −minimum / scale) have a tensor for them.
- rotated: keys and values were first multiplied by an orthogonal matrix; vLLM's is a Hadamard matrix with random signs. The
  inverse is one small matrix product of each [rows, D] tile. It uses the 4-bit numbers, which are exact in float16 (as are the
  Hadamard's entries, ± a power of two). Zero point and scale come after it: (n − z·1) s U = s (n U − z (1ᵀ U)).

Moves: T·H·(stored row + scale bytes) + T·H·D·sizeof(out) + 4 bytes of block table a row and head; the floor is the first two at
copy bandwidth. The rotation adds 2·T·H·D² operations on tensor cores. For D = 128 into bfloat16 that is under 1/2 of the memory
time, by the ratio in an H200's data sheet.
Layout: planes [num_blocks, kv_block_size, H, D] with unit stride in D and any others (NHD or HND), D even if packed;
block_table [B, blocks]; out [T, H, D] contiguous; rows past row_starts[B] aren't written. Block ids aren't checked.
CUDA graphs: the grid depends on shapes and max_rows only, nothing is read back.
Source of the formats: vLLM's v1/attention/ops/int4_per_token_head.py and triton_reshape_and_cache_flash.py.
"""

from __future__ import annotations

from typing import Any

import torch

from honed.kernels.cache import reference
from honed.kernels.cache.reference import PagedPlane

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_TILE = 8192
MAX_ROTATED = 256

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _gather_kernel(
        data_ptr: tl.tensor,
        scale_ptr: tl.tensor,
        zero_ptr: tl.tensor,
        unrotate_ptr: tl.tensor,
        table_ptr: tl.tensor,
        start_ptr: tl.tensor,
        row_start_ptr: tl.tensor,
        out_ptr: tl.tensor,
        table_stride: tl.tensor,
        kv_block_size: tl.tensor,
        max_rows: tl.tensor,
        heads: tl.tensor,
        data_b: tl.tensor,
        data_s: tl.tensor,
        data_h: tl.tensor,
        scale_b: tl.tensor,
        scale_s: tl.tensor,
        scale_h: tl.tensor,
        zero_b: tl.tensor,
        zero_s: tl.tensor,
        zero_h: tl.tensor,
        HEAD_SIZE: tl.constexpr,
        WIDTH: tl.constexpr,
        ROWS: tl.constexpr,
        IS_PACKED: tl.constexpr,
        HAS_SCALE: tl.constexpr,
        HAS_ZERO: tl.constexpr,
        HAS_HIDDEN_ZERO: tl.constexpr,
        IS_ROTATED: tl.constexpr,
    ) -> None:
        i_t, i_b, i_h = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        first = tl.load(row_start_ptr + i_b).to(tl.int64)
        count = tl.minimum((tl.load(row_start_ptr + i_b + 1) - first).to(tl.int32), max_rows)
        if i_t * ROWS >= count:
            return
        o_t = i_t * ROWS + tl.arange(0, ROWS)
        m_t = o_t < count
        b_position = tl.load(start_ptr + i_b).to(tl.int64) + o_t
        p_table = table_ptr + i_b.to(tl.int64) * table_stride + b_position // kv_block_size
        b_block = tl.load(p_table, mask=m_t, other=0).to(tl.int64)
        b_slot = b_position % kv_block_size
        b_row = b_block * data_b + b_slot * data_s + i_h * data_h
        o_d = tl.arange(0, WIDTH)
        m_d = o_d < HEAD_SIZE
        if IS_PACKED:
            o_p = tl.arange(0, WIDTH // 2)
            m_p = m_t[:, None] & (o_p < HEAD_SIZE // 2)[None, :]
            b_byte = tl.load(data_ptr + b_row[:, None] + o_p[None, :], mask=m_p, other=0)
            b_x = tl.interleave((b_byte & 0xF).to(tl.float32), (b_byte >> 4).to(tl.float32))
        else:
            m_x = m_t[:, None] & m_d[None, :]
            b_x = tl.load(data_ptr + b_row[:, None] + o_d[None, :], mask=m_x, other=0.0).to(tl.float32)
        if HAS_SCALE:
            p_scale = scale_ptr + b_block * scale_b + b_slot * scale_s + i_h * scale_h
            b_scale = tl.load(p_scale, mask=m_t, other=0.0)
        if HAS_HIDDEN_ZERO:
            b_bits = b_scale.to(tl.int32, bitcast=True)
            b_zero = (b_bits & 0xF).to(tl.float32)
            b_scale = (b_bits & -16).to(tl.float32, bitcast=True)
        elif HAS_ZERO:
            b_zero = tl.load(zero_ptr + b_block * zero_b + b_slot * zero_s + i_h * zero_h, mask=m_t, other=0.0)
        if IS_ROTATED:
            m_u = m_d[:, None] & m_d[None, :]
            b_u = tl.load(unrotate_ptr + o_d[:, None] * HEAD_SIZE + o_d[None, :], mask=m_u, other=0.0)
            if IS_PACKED:  # noqa: SIM108 - a constexpr branch
                b_x = tl.dot(b_x.to(tl.float16), b_u)
            else:
                b_x = tl.dot(b_x, b_u.to(tl.float32), input_precision="tf32x3")
            if HAS_ZERO or HAS_HIDDEN_ZERO:
                b_x -= b_zero[:, None] * tl.sum(b_u.to(tl.float32), axis=0)[None, :]
        elif HAS_ZERO or HAS_HIDDEN_ZERO:
            b_x -= b_zero[:, None]
        if HAS_SCALE:
            b_x *= b_scale[:, None]
        p_out = out_ptr + ((first + o_t) * heads + i_h)[:, None] * HEAD_SIZE + o_d[None, :]
        tl.store(p_out, b_x.to(out_ptr.dtype.element_ty), mask=m_t[:, None] & m_d[None, :])


def hadamard_unrotation(head_size: int, signs: torch.Tensor) -> torch.Tensor:  # [D, D] float16
    """Make the matrix that undoes vLLM's randomised Hadamard transform y = H (signs · x), H unnormalised.

    H is block-diagonal, with blocks as wide as the largest power of two b that divides `head_size`; x = signs · (H y) / b.

    Raises:
        ValueError: `signs` doesn't have the blocks' width.
    """
    width = head_size & -head_size
    if signs.shape != (width,):
        raise ValueError(f"gather_kv: head size {head_size} takes {width} signs, not {list(signs.shape)}")
    block = torch.ones(1, 1, device=signs.device)
    while block.shape[0] < width:
        block = torch.cat((torch.cat((block, block), 1), torch.cat((block, -block), 1)))
    block = block * signs.float() / width
    whole: torch.Tensor = torch.block_diag(*[block] * (head_size // width))  # type: ignore[no-untyped-call]
    return whole.to(torch.float16)


def gather_kv(
    plane: PagedPlane,
    block_table: torch.Tensor,  # [B, blocks] integers
    starts: torch.Tensor,  # [B] integers: first position of each request
    row_starts: torch.Tensor,  # [B + 1] integers: rows of request b are row_starts[b] … row_starts[b + 1] − 1
    out: torch.Tensor,  # [T, H, D]
    max_rows: int,
) -> torch.Tensor:
    """Fill `out` with the paged plane's rows (keys or values), as they were before storage, and return it.

    Triton on a GPU, its plain twin elsewhere. A request of more than `max_rows` rows is cut to them.

    Raises:
        ValueError: shapes don't fit each other or the format.
    """
    _check(plane, block_table, starts, row_starts, out)
    _gather_kv(
        plane.data,
        plane.scale,
        plane.zero_point,
        plane.unrotate,
        plane.has_hidden_zero,
        block_table,
        starts,
        row_starts,
        out,
        max_rows,
    )
    return out


def _check(
    plane: PagedPlane, block_table: torch.Tensor, starts: torch.Tensor, row_starts: torch.Tensor, out: torch.Tensor
) -> None:
    data = plane.data
    is_packed = data.dtype == torch.uint8
    if data.dim() != 4 or data.stride(3) != 1:
        raise ValueError(
            f"gather_kv: the plane must be [num_blocks, kv_block_size, heads, width] with unit stride in the last, not "
            f"{list(data.shape)} with strides {data.stride()}; fp8 kept as uint8 needs a view of its float8 type"
        )
    head_size = data.shape[3] * (2 if is_packed else 1)
    if out.dim() != 3 or tuple(out.shape[1:]) != (data.shape[2], head_size) or not out.is_contiguous():
        raise ValueError(f"gather_kv: out {list(out.shape)} must be [rows, {data.shape[2]}, {head_size}], contiguous")
    if block_table.dim() != 2 or starts.shape != block_table.shape[:1] or row_starts.shape != (len(starts) + 1,):
        raise ValueError(
            f"gather_kv: block_table {list(block_table.shape)}, starts {list(starts.shape)} and row_starts "
            f"{list(row_starts.shape)} don't fit: they are [B, blocks], [B] and [B + 1]"
        )
    if plane.has_hidden_zero and (plane.scale is None or plane.zero_point is not None):
        raise ValueError("gather_kv: a hidden zero point is in the scale: pass a scale and no zero_point")
    if not is_packed and (plane.has_hidden_zero or plane.zero_point is not None):
        raise ValueError(f"gather_kv: zero points are for 4-bit planes (uint8), not {data.dtype}")
    if plane.unrotate is not None and (plane.unrotate.shape != (head_size, head_size) or head_size > MAX_ROTATED):
        raise ValueError(
            f"gather_kv: unrotate {list(plane.unrotate.shape)} must be {[head_size, head_size]}, of at most {MAX_ROTATED}"
        )


@torch.library.custom_op("honed::gather_kv", mutates_args=("out",))
def _gather_kv(
    data: torch.Tensor,
    scale: torch.Tensor | None,
    zero_point: torch.Tensor | None,
    unrotate: torch.Tensor | None,
    has_hidden_zero: bool,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    row_starts: torch.Tensor,
    out: torch.Tensor,
    max_rows: int,
) -> None:
    plane = PagedPlane(data, scale, zero_point, has_hidden_zero, unrotate)
    run = launch if out.is_cuda else reference.gather_kv
    run(plane, block_table, starts, row_starts, out, max_rows)


@_gather_kv.register_fake
def _(*_: Any) -> None:
    return None


def launch(
    plane: PagedPlane,
    block_table: torch.Tensor,
    starts: torch.Tensor,
    row_starts: torch.Tensor,
    out: torch.Tensor,
    max_rows: int,
) -> None:
    """Run the Triton kernel itself (on a GPU, or under Triton's interpreter); arguments as `gather_kv`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    data, unrotate = plane.data, plane.unrotate
    num_requests, (_, heads, head_size) = len(starts), out.shape
    if not (num_requests and max_rows > 0 and out.numel()):
        return
    block_table, starts, row_starts = block_table.contiguous(), starts.contiguous(), row_starts.contiguous()
    scale = None if plane.scale is None else plane.scale.expand(data.shape[:3])
    zero = None if plane.zero_point is None else plane.zero_point.expand(data.shape[:3])
    if unrotate is not None:
        unrotate = unrotate.to(torch.float16).contiguous()
    width = max(16, triton.next_power_of_2(head_size))
    rows = 64 if unrotate is not None else max(1, min(64, MAX_TILE // width))
    _gather_kernel[(triton.cdiv(max_rows, rows), num_requests, heads)](
        data,
        scale,
        zero,
        unrotate,
        block_table,
        starts,
        row_starts,
        out,
        block_table.stride(0),
        data.shape[1],
        max_rows,
        heads,
        *data.stride()[:3],
        *((0, 0, 0) if scale is None else scale.stride()),
        *((0, 0, 0) if zero is None else zero.stride()),
        HEAD_SIZE=head_size,
        WIDTH=width,
        ROWS=rows,
        IS_PACKED=data.dtype == torch.uint8,
        HAS_SCALE=scale is not None,
        HAS_ZERO=zero is not None,
        HAS_HIDDEN_ZERO=plane.has_hidden_zero,
        IS_ROTATED=unrotate is not None,
        num_warps=4,
    )
