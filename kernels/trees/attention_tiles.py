"""Inner steps of attention in Triton, shared by kernels: folding a tile of K/V into a running softmax, and loading paged tiles.

A running softmax is (highest score, Σ 2^score, Σ 2^score·v), the sums relative to the highest score. That is in base 2, since
exp2 is the hardware's. Before anything has been attended to it is (−inf, 0, 0).

`KIND` is the type that operands are rounded to, `DOT` the one that they are multiplied in. They are equal on a GPU. Under
Triton's interpreter, which multiplies bfloat16 by its bits, `DOT` is float32.

Source: arXiv 2205.14135 (FlashAttention); pages as in arXiv 2309.06180 (vLLM).
"""

from __future__ import annotations

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def fold(  # type: ignore[no-untyped-def]
        b_q, b_k, b_v, b_may, b_high, b_sum, b_acc, scale, IS_MASKED: tl.constexpr, KIND: tl.constexpr, DOT: tl.constexpr
    ):
        """Fold a tile of K/V into a running softmax; `scale` converts q·k to base 2."""
        b_s = tl.dot(b_q, tl.trans(b_k.to(KIND).to(DOT)), input_precision="tf32x3") * scale
        if IS_MASKED:
            b_s = tl.where(b_may, b_s, float("-inf"))
        b_new = tl.maximum(b_high, tl.max(b_s, axis=1))
        b_base = tl.where(b_new > float("-inf"), b_new, 0.0)  # −inf − (−inf) is NaN
        b_p = tl.exp2(b_s - b_base[:, None])
        b_fade = tl.exp2(b_high - b_base)
        b_sum = b_sum * b_fade + tl.sum(b_p, axis=1)
        b_acc = tl.dot(b_p.to(KIND).to(DOT), b_v.to(KIND).to(DOT), b_acc * b_fade[:, None], input_precision="tf32x3")
        return b_new, b_sum, b_acc

    @triton.jit
    def fold_part(b_part, b_part_high, b_high, b_sum, b_acc):  # type: ignore[no-untyped-def]
        """Fold another pass's result, already divided, into a running softmax; its log-sum-exp is in base 2 too."""
        b_new = tl.maximum(b_high, b_part_high)
        b_base = tl.where(b_new > float("-inf"), b_new, 0.0)
        b_fade, b_weight = tl.exp2(b_high - b_base), tl.exp2(b_part_high - b_base)
        b_part = tl.where((b_part_high > float("-inf"))[:, None], b_part * b_weight[:, None], 0.0)
        return b_new, b_sum * b_fade + b_weight, b_acc * b_fade[:, None] + b_part

    @triton.jit  # type: ignore[untyped-decorator]
    def load_pages(  # type: ignore[no-untyped-def]
        p_k,
        p_v,
        p_table,
        at,
        first,
        end,
        stride_kp,
        stride_ks,
        stride_vp,
        stride_vs,
        E: tl.constexpr,
        PAGE: tl.constexpr,
        BLOCK_N: tl.constexpr,
        IS_MASKED: tl.constexpr,
    ):
        """Load tokens [at, at + BLOCK_N) of one K/V head; `at` begins a tile. IS_MASKED: only those in [first, end)."""
        o_e, o_t = tl.arange(0, E), at + tl.arange(0, BLOCK_N)
        m_t = (o_t >= first) & (o_t < end)
        if PAGE % BLOCK_N == 0:
            i_p = tl.load(p_table + at // PAGE).to(tl.int64)
        elif IS_MASKED:
            i_p = tl.load(p_table + o_t // PAGE, mask=m_t, other=0).to(tl.int64)
        else:
            i_p = tl.load(p_table + o_t // PAGE).to(tl.int64)
        p_k += (i_p * stride_kp + (o_t % PAGE) * stride_ks)[:, None] + o_e[None, :]
        p_v += (i_p * stride_vp + (o_t % PAGE) * stride_vs)[:, None] + o_e[None, :]
        if IS_MASKED:  # the rest of a page may hold anything, and 0·NaN isn't 0
            b_k, b_v = tl.load(p_k, mask=m_t[:, None], other=0.0), tl.load(p_v, mask=m_t[:, None], other=0.0)
        else:
            b_k, b_v = tl.load(p_k), tl.load(p_v)
        return b_k, b_v, o_t

    @triton.jit  # type: ignore[untyped-decorator]
    def attend_pages(  # type: ignore[no-untyped-def]
        b_q,
        b_first,
        b_high,
        b_sum,
        b_acc,
        p_k,
        p_v,
        p_table,
        start,
        end,
        stride_kp,
        stride_ks,
        stride_vp,
        stride_vs,
        k_scale_ptr,
        v_scale_ptr,
        scale,
        E: tl.constexpr,
        PAGE: tl.constexpr,
        BLOCK_N: tl.constexpr,
        HAS_SCALES: tl.constexpr,
        HAS_FIRSTS: tl.constexpr,
        KIND: tl.constexpr,
        DOT: tl.constexpr,
    ):
        """Fold tokens [start, end) of one K/V head into a running softmax that is still empty; `start` begins a tile.

        HAS_FIRSTS: row i attends to none before token b_first[i]; without it `b_first` isn't read.
        """
        if HAS_SCALES:
            scale *= tl.load(k_scale_ptr)
        whole = start + (end - start) // BLOCK_N * BLOCK_N
        first, clear = start, start  # from `clear` on every row attends to every token
        if HAS_FIRSTS:
            first = tl.min(b_first, axis=0)
            clear += tl.cdiv(tl.maximum(tl.max(b_first, axis=0) - start, 0), BLOCK_N) * BLOCK_N
            clear = tl.minimum(clear, whole)
            for at in range(start, clear, BLOCK_N):
                b_k, b_v, o_t = load_pages(
                    p_k, p_v, p_table, at, first, end, stride_kp, stride_ks, stride_vp, stride_vs, E, PAGE, BLOCK_N, True
                )
                b_may = o_t[None, :] >= b_first[:, None]
                b_high, b_sum, b_acc = fold(b_q, b_k, b_v, b_may, b_high, b_sum, b_acc, scale, True, KIND, DOT)
        for at in range(clear, whole, BLOCK_N):
            b_k, b_v, o_t = load_pages(
                p_k, p_v, p_table, at, first, end, stride_kp, stride_ks, stride_vp, stride_vs, E, PAGE, BLOCK_N, False
            )
            b_high, b_sum, b_acc = fold(b_q, b_k, b_v, None, b_high, b_sum, b_acc, scale, False, KIND, DOT)
        if whole < end:
            b_k, b_v, o_t = load_pages(
                p_k, p_v, p_table, whole, first, end, stride_kp, stride_ks, stride_vp, stride_vs, E, PAGE, BLOCK_N, True
            )
            b_may = (o_t < end)[None, :]
            if HAS_FIRSTS:
                b_may &= o_t[None, :] >= b_first[:, None]
            b_high, b_sum, b_acc = fold(b_q, b_k, b_v, b_may, b_high, b_sum, b_acc, scale, True, KIND, DOT)
        if HAS_SCALES:
            b_acc *= tl.load(v_scale_ptr)
        return b_high, b_sum, b_acc
