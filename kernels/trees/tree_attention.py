"""Attention of draft trees: every row attends to its request's paged prefix and to its own ancestors.

Computes: reference.tree_attention. One tile holds a request's rows × the query heads of a K/V head, so K/V are read once for
all of them (once per 128 of them). If there are enough programs, one launch does everything: prefix, tree, division. Else (few
requests, long prefixes) programs share a prefix, each writes (out, log-sum-exp) in float32, and a second launch attends to the
tree and merges. The same launch takes the (out, log-sum-exp) of another kernel's prefix pass.
In a sliding window a request's programs begin at the tile of its anchor's first token. Each row's own first token is a mask.
Moves: Σ prefix tokens · H_kv · E · 2 · sizeof(K/V) bytes, and for each further split R·H·E·8. The floor is the first term at
copy bandwidth up to some 200 rows × heads a K/V head on an H200 (bf16); beyond, 4·R·H·E·(prefix + rows) FLOPs. Tiles are of at
most 128: 32 rows of four heads fill one. 33 need two, of which the second is nearly empty and costs the same.
Layout: q, k, v, out [R, H or H_kv, E] with unit stride in E; E 16 … 256, a power of two. A cache [P, page, H_kv, E] with unit
stride in E and any other, so K and V may be halves of one tensor. Pages of any length (one table look-up a tile if a page holds
whole tiles); K/V of the cache in q's type or float8_e4m3fn. A request's rows may be in any order.
Its share of the floor on an H200 is in docs/gpu.md. Neither tile sizes nor `choose_plan`'s constants were tuned on one. It
compiles for sm_90 with wgmma and asynchronous copies, without spills at the plans for 16-bit types and E ≤ 128. Limits: in a
large batch, one prefix far longer than the others isn't split; float32 spills.
Source: arXiv 2205.14135 (FlashAttention), 2501.01005 (FlashInfer; merging), Flash-Decoding (splits).
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from honed.kernels.trees import reference
from honed.kernels.trees.tree_attention_inputs import AttendedPrefix, PagedPrefix, check
from honed.kernels.trees.tree_attention_plan import LEAST_TILES, Device, Plan, choose_plan

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:
    from honed.kernels.trees.attention_tiles import attend_pages, fold, fold_part

    _LOG2_E = tl.constexpr(1.4426950408889634)
    _LN_2 = tl.constexpr(0.6931471805599453)
    _WORD = tl.constexpr(32)
    _LEAST_TILES = tl.constexpr(LEAST_TILES)
    # These vary from step to step: one compiled kernel must handle all values.
    _VARYING = ["max_rows", "num_splits", "stride_tb", "stride_lx"]
    _TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

    @triton.jit  # type: ignore[untyped-decorator]
    def _tokens_of_split(length, num_splits, BLOCK_N: tl.constexpr):  # type: ignore[no-untyped-def]
        return tl.maximum(tl.cdiv(tl.cdiv(length, BLOCK_N), num_splits), _LEAST_TILES) * BLOCK_N

    @triton.jit  # type: ignore[untyped-decorator]
    def _start_of_prefix(firsts_ptr, first_row, length, BLOCK_N: tl.constexpr, HAS_FIRSTS: tl.constexpr):  # type: ignore[no-untyped-def]
        """Where the tile begins that holds a request's first token that any of its rows attends to."""
        start = 0
        if HAS_FIRSTS:
            start = tl.minimum(tl.load(firsts_ptr + first_row), length) // BLOCK_N * BLOCK_N
        return start

    @triton.jit(do_not_specialize=_VARYING)  # type: ignore[untyped-decorator]
    def _prefix_kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        starts_ptr,
        k_cache_ptr,
        v_cache_ptr,
        table_ptr,
        lengths_ptr,
        firsts_ptr,
        k_scale_ptr,
        v_scale_ptr,
        part_ptr,
        part_lse_ptr,
        stride_qr,
        stride_qh,
        stride_kp,
        stride_ks,
        stride_kh,
        stride_vp,
        stride_vs,
        stride_vh,
        stride_tb,
        stride_lx,
        num_heads,
        max_rows,
        num_splits,
        scale,
        G: tl.constexpr,
        E: tl.constexpr,
        PAGE: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        HAS_SCALES: tl.constexpr,
        HAS_FIRSTS: tl.constexpr,
        DOT: tl.constexpr,
    ):
        """Compute one split of a request's prefix for one tile of rows × heads: (out, log-sum-exp) into part [X, R, H, ·]."""
        num_tiles = tl.num_programs(0) // num_splits
        i_m, i_x = tl.program_id(0) % num_tiles, tl.program_id(0) // num_tiles
        i_h, i_b = tl.program_id(1), tl.program_id(2)
        first = tl.load(starts_ptr + i_b).to(tl.int64)
        num_rows = tl.minimum(tl.load(starts_ptr + i_b + 1) - first, max_rows).to(tl.int32)
        length = tl.load(lengths_ptr + i_b).to(tl.int32)
        if i_m * BLOCK_M >= num_rows * G:
            return
        start = _start_of_prefix(firsts_ptr, first, length, BLOCK_N, HAS_FIRSTS)
        span = _tokens_of_split(length - start, num_splits, BLOCK_N)
        start += i_x * span
        if start >= length:
            return
        o_m, o_e = i_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, E)
        o_r, o_h = first + o_m // G, i_h * G + o_m % G
        m_m = o_m < num_rows * G
        b_q = tl.load(q_ptr + (o_r * stride_qr + o_h * stride_qh)[:, None] + o_e[None, :], mask=m_m[:, None], other=0.0)
        b_high = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, E], tl.float32)
        b_first = o_m
        if HAS_FIRSTS:
            b_first = tl.where(m_m, tl.load(firsts_ptr + o_r, mask=m_m, other=0), tl.load(firsts_ptr + first))
        b_high, b_sum, b_acc = attend_pages(
            b_q.to(DOT),
            b_first,
            b_high,
            b_sum,
            b_acc,
            k_cache_ptr + i_h * stride_kh,
            v_cache_ptr + i_h * stride_vh,
            table_ptr + i_b.to(tl.int64) * stride_tb,
            start,
            tl.minimum(start + span, length),
            stride_kp,
            stride_ks,
            stride_vp,
            stride_vs,
            k_scale_ptr,
            v_scale_ptr,
            scale * _LOG2_E,
            E,
            PAGE,
            BLOCK_N,
            HAS_SCALES,
            HAS_FIRSTS,
            b_q.dtype,
            DOT,
        )
        o_part = i_x * stride_lx + o_r * num_heads + o_h
        tl.store(part_ptr + (o_part * E)[:, None] + o_e[None, :], b_acc / b_sum[:, None], mask=m_m[:, None])
        tl.store(part_lse_ptr + o_part, (b_high + tl.log2(b_sum)) * _LN_2, mask=m_m)

    @triton.jit(do_not_specialize=_VARYING)  # type: ignore[untyped-decorator]
    def _tree_kernel(  # type: ignore[no-untyped-def]
        q_ptr,
        k_ptr,
        v_ptr,
        starts_ptr,
        masks_ptr,
        k_cache_ptr,
        v_cache_ptr,
        table_ptr,
        lengths_ptr,
        firsts_ptr,
        k_scale_ptr,
        v_scale_ptr,
        part_ptr,
        part_lse_ptr,
        out_ptr,
        lse_ptr,
        stride_qr,
        stride_qh,
        stride_tkr,
        stride_tkh,
        stride_tvr,
        stride_tvh,
        stride_mb,
        stride_mr,
        stride_kp,
        stride_ks,
        stride_kh,
        stride_vp,
        stride_vs,
        stride_vh,
        stride_tb,
        stride_px,
        stride_pr,
        stride_ph,
        stride_lx,
        stride_lr,
        stride_lh,
        stride_or,
        stride_oh,
        num_heads,
        max_rows,
        num_splits,
        scale,
        G: tl.constexpr,
        E: tl.constexpr,
        PAGE: tl.constexpr,
        BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr,
        HAS_PAGES: tl.constexpr,
        HAS_SCALES: tl.constexpr,
        HAS_FIRSTS: tl.constexpr,
        HAS_PARTS: tl.constexpr,
        DOT: tl.constexpr,
    ):
        """One tile of rows × heads: the prefix (HAS_PAGES), the tree, an earlier pass's result (HAS_PARTS), the division."""
        i_m, i_h, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        first = tl.load(starts_ptr + i_b).to(tl.int64)
        num_rows = tl.minimum(tl.load(starts_ptr + i_b + 1) - first, max_rows).to(tl.int32)
        if i_m * BLOCK_M >= num_rows * G:
            return
        o_m, o_e = i_m * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, E)
        o_r, o_h = first + o_m // G, i_h * G + o_m % G
        m_m = o_m < num_rows * G
        b_q = tl.load(q_ptr + (o_r * stride_qr + o_h * stride_qh)[:, None] + o_e[None, :], mask=m_m[:, None], other=0.0)
        b_high = tl.full([BLOCK_M], float("-inf"), tl.float32)
        b_sum = tl.zeros([BLOCK_M], tl.float32)
        b_acc = tl.zeros([BLOCK_M, E], tl.float32)
        if HAS_PAGES:
            length = tl.load(lengths_ptr + i_b).to(tl.int32)
            b_first = o_m
            if HAS_FIRSTS:
                b_first = tl.where(m_m, tl.load(firsts_ptr + o_r, mask=m_m, other=0), tl.load(firsts_ptr + first))
            b_high, b_sum, b_acc = attend_pages(
                b_q.to(DOT),
                b_first,
                b_high,
                b_sum,
                b_acc,
                k_cache_ptr + i_h * stride_kh,
                v_cache_ptr + i_h * stride_vh,
                table_ptr + i_b.to(tl.int64) * stride_tb,
                _start_of_prefix(firsts_ptr, first, length, BLOCK_N, HAS_FIRSTS),
                length,
                stride_kp,
                stride_ks,
                stride_vp,
                stride_vs,
                k_scale_ptr,
                v_scale_ptr,
                scale * _LOG2_E,
                E,
                PAGE,
                BLOCK_N,
                HAS_SCALES,
                HAS_FIRSTS,
                b_q.dtype,
                DOT,
            )

        # A tile of the tree is the rows of one mask word.
        p_mask = masks_ptr + i_b.to(tl.int64) * stride_mb + (o_m // G) * stride_mr
        o_c = tl.arange(0, _WORD)
        for at in range(0, num_rows, _WORD):
            o_j = at + o_c
            m_j = o_j < num_rows
            p_k = k_ptr + ((first + o_j) * stride_tkr + i_h * stride_tkh)[:, None] + o_e[None, :]
            p_v = v_ptr + ((first + o_j) * stride_tvr + i_h * stride_tvh)[:, None] + o_e[None, :]
            b_k = tl.load(p_k, mask=m_j[:, None], other=0.0)
            b_v = tl.load(p_v, mask=m_j[:, None], other=0.0)
            b_word = tl.load(p_mask + at // _WORD, mask=m_m, other=0)
            b_may = (((b_word[:, None] >> o_c[None, :]) & 1) != 0) & m_j[None, :]
            b_high, b_sum, b_acc = fold(
                b_q.to(DOT), b_k, b_v, b_may, b_high, b_sum, b_acc, scale * _LOG2_E, True, b_q.dtype, DOT
            )

        if HAS_PARTS:
            num_parts = 1
            if num_splits > 1:
                length = tl.load(lengths_ptr + i_b).to(tl.int32)
                length -= _start_of_prefix(firsts_ptr, first, length, BLOCK_N, HAS_FIRSTS)
                num_parts = tl.cdiv(length, _tokens_of_split(length, num_splits, BLOCK_N))
            p_part = part_ptr + (o_r * stride_pr + o_h * stride_ph)[:, None] + o_e[None, :]
            p_lse = part_lse_ptr + o_r * stride_lr + o_h * stride_lh
            for _ in tl.range(0, num_parts, num_stages=3):
                b_lse = tl.load(p_lse, mask=m_m, other=float("-inf")).to(tl.float32) * _LOG2_E
                b_part = tl.load(p_part, mask=m_m[:, None], other=0.0).to(tl.float32)
                b_high, b_sum, b_acc = fold_part(b_part, b_lse, b_high, b_sum, b_acc)
                p_part += stride_px
                p_lse += stride_lx

        is_none = b_sum == 0.0
        b_out = b_acc / tl.where(is_none, 1.0, b_sum)[:, None]
        p_out = out_ptr + (o_r * stride_or + o_h * stride_oh)[:, None] + o_e[None, :]
        tl.store(p_out, b_out.to(out_ptr.dtype.element_ty), mask=m_m[:, None])
        b_lse = tl.where(is_none, float("-inf"), (b_high + tl.log2(b_sum)) * _LN_2)
        tl.store(lse_ptr + o_r * num_heads + o_h, b_lse, mask=m_m)


def tree_attention(
    q: torch.Tensor,  # [R, H, E]
    k: torch.Tensor,  # [R, H_kv, E]
    v: torch.Tensor,  # [R, H_kv, E]
    row_starts: torch.Tensor,  # [B + 1] int32: rows of request b are row_starts[b] … row_starts[b + 1] − 1
    row_masks: torch.Tensor,  # [B, ≥ max_rows, W] int32, as `tree_build` makes them
    max_rows: int,
    *,
    scale: float | None = None,
    prefix: PagedPrefix | AttendedPrefix | None = None,
    max_prefix: int | None = None,
    out: torch.Tensor | None = None,  # [R, H, E]
    lse: torch.Tensor | None = None,  # [R, H] float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every row to its request's prefix and its mask's rows; Triton on a GPU, its plain twin elsewhere.

    Args:
        max_rows: most rows of a request; further ones aren't computed. It fixes the grid, as `max_prefix` does.
        scale: factor of q·k; None: 1/√E.
        prefix: in pages, or the result of another kernel's pass over it; None: there is none.
        max_prefix: most tokens of a prefix that a row attends to, for choosing its splits; None: the block table's capacity.

    Returns:
        Output and natural log-sum-exp. A row that may attend to nothing gets 0 and −inf. Rows past the last request's keep the
            previous content of `out` and `lse`.

    Raises:
        ValueError: shapes or strides don't fit.
    """
    check(q, k, v, row_starts, row_masks, max_rows, prefix)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if lse is None else lse
    paged: tuple[Any, ...] = prefix if isinstance(prefix, PagedPrefix) else (None,) * 7
    attended: tuple[Any, ...] = prefix if isinstance(prefix, AttendedPrefix) else (None,) * 2
    if isinstance(prefix, PagedPrefix):
        room = prefix.block_table.shape[1] * prefix.k_cache.shape[1]
        max_prefix = room if max_prefix is None else min(max_prefix, room)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    _tree_attention_op(q, k, v, row_starts, row_masks, max_rows, scale, *paged, max_prefix or 0, *attended, out, lse)
    return out, lse


@torch.library.custom_op("honed::tree_attention", mutates_args=("out", "lse"))
def _tree_attention_op(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_starts: torch.Tensor,
    row_masks: torch.Tensor,
    max_rows: int,
    scale: float,
    k_cache: torch.Tensor | None,
    v_cache: torch.Tensor | None,
    block_table: torch.Tensor | None,
    lengths: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    firsts: torch.Tensor | None,
    max_prefix: int,
    prefix_out: torch.Tensor | None,
    prefix_lse: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> None:
    prefix: PagedPrefix | AttendedPrefix | None = None
    if k_cache is not None and v_cache is not None and block_table is not None and lengths is not None:
        prefix = PagedPrefix(k_cache, v_cache, block_table, lengths, k_scale, v_scale, firsts)
    elif prefix_out is not None and prefix_lse is not None:
        prefix = AttendedPrefix(prefix_out, prefix_lse)
    if not len(q) or not len(row_masks) or not max_rows:
        return
    if q.is_cuda:
        launch(q, k, v, row_starts, row_masks, max_rows, scale, prefix, max_prefix, out, lse)
        return
    made_out, made_lse = reference.tree_attention(q, k, v, row_starts, row_masks, max_rows, scale, prefix)
    is_held = torch.arange(len(q), device=q.device) < row_starts[-1]
    out.copy_(torch.where(is_held[:, None, None], made_out, out))
    lse.copy_(torch.where(is_held[:, None], made_lse, lse))


@_tree_attention_op.register_fake
def _(*_: Any) -> None:
    """Nothing is returned: the shapes are the buffers'."""


@functools.cache
def limits(device: torch.device) -> Device:
    """Properties of a device that bound a plan; an H200's for a CPU."""
    if device.type != "cuda":
        return Device()
    properties = torch.cuda.get_device_properties(device)
    return Device(properties.multi_processor_count, getattr(properties, "shared_memory_per_block_optin", 65_536))


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_starts: torch.Tensor,
    row_masks: torch.Tensor,
    max_rows: int,
    scale: float,
    prefix: PagedPrefix | AttendedPrefix | None,
    max_prefix: int,
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: Plan | None = None,
) -> None:
    """Run the Triton kernels themselves (on a GPU, or under Triton's interpreter); arguments as `tree_attention`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    num_rows, num_heads, head_size = q.shape
    num_kv_heads, num_requests = k.shape[1], len(row_masks)
    group = num_heads // num_kv_heads
    paged = prefix if isinstance(prefix, PagedPrefix) else PagedPrefix(q, q, row_starts, row_starts)  # not read
    is_paged, has_scales, has_firsts = paged is prefix, paged.k_scale is not None, paged.firsts is not None
    if plan is None:
        shape = (num_requests, num_kv_heads, group, max_rows, head_size, max_prefix)
        plan = choose_plan(*shape, q.element_size(), paged.k_cache.element_size(), limits(q.device))
    assert lse.is_contiguous(), "the kernel takes no strides for it"
    is_whole = q.stride(2) == k.stride(2) == v.stride(2) == out.stride(2) == row_masks.stride(2) == 1
    assert is_whole, "the kernel takes rows without gaps"
    row_starts, lengths = row_starts.contiguous(), paged.lengths.contiguous()
    firsts = lengths if paged.firsts is None else paged.firsts.contiguous()
    scales = (q, q) if not has_scales else (paged.k_scale, paged.v_scale)
    caches = (paged.k_cache, paged.v_cache, paged.block_table, lengths, firsts, *scales)
    cache_strides = (*paged.k_cache.stride()[:3], *paged.v_cache.stride()[:3], paged.block_table.stride(0))
    dot = _TYPES[q.dtype] if isinstance(_tree_kernel, triton.JITFunction) else tl.float32  # else it is interpreted
    sizes = {"G": group, "E": head_size, "PAGE": paged.k_cache.shape[1], "BLOCK_N": plan.block_n}
    sizes |= {"HAS_SCALES": has_scales, "HAS_FIRSTS": has_firsts}
    num_splits = plan.num_splits if is_paged else 1

    part, part_lse = (q, lse) if not isinstance(prefix, AttendedPrefix) else prefix
    part_strides = (0, *part.stride()[:2], 0, *part_lse.stride())
    is_split = num_splits > 1
    if is_split:
        part = torch.empty((plan.num_splits, num_rows, num_heads, head_size), dtype=torch.float32, device=q.device)
        part_lse = torch.empty(part.shape[:3], dtype=torch.float32, device=q.device)
        part_strides = (*part.stride()[:3], *part_lse.stride())
        tiles = triton.cdiv(max_rows * group, plan.block_m)
        _prefix_kernel[(tiles * plan.num_splits, num_kv_heads, num_requests)](
            q,
            row_starts,
            *caches,
            part,
            part_lse,
            *q.stride()[:2],
            *cache_strides,
            part_lse.stride(0),
            num_heads,
            max_rows,
            num_splits,
            scale,
            BLOCK_M=plan.block_m,
            DOT=dot,
            **sizes,
            num_warps=plan.num_warps,
            num_stages=plan.num_stages,
        )
    has_parts = is_split or isinstance(prefix, AttendedPrefix)
    block_m, num_warps = (plan.merge_block_m, 4) if has_parts else (plan.block_m, plan.num_warps)
    _tree_kernel[(triton.cdiv(max_rows * group, block_m), num_kv_heads, num_requests)](
        q,
        k,
        v,
        row_starts,
        row_masks,
        *caches,
        part,
        part_lse,
        out,
        lse,
        *q.stride()[:2],
        *k.stride()[:2],
        *v.stride()[:2],
        *row_masks.stride()[:2],
        *cache_strides,
        *part_strides,
        *out.stride()[:2],
        num_heads,
        max_rows,
        num_splits,
        scale,
        BLOCK_M=block_m,
        HAS_PAGES=is_paged and not is_split,
        HAS_PARTS=has_parts,
        DOT=dot,
        **sizes,
        num_warps=num_warps,
        num_stages=plan.num_stages,
    )
