"""The Triton kernels of verify_chain.py, whose header explains how they work together.

`stat` is [2 or 4, B, K + 1, C] of the C chunks of the vocabulary: maxima, then Σ exp(x − maximum) (in greedy rows: the most
likely token's id), then both of q. `break` is [B]: K + 1 − the earliest row that rejected its draft so far; 0 if none did.
"""

from __future__ import annotations

import triton
import triton.language as tl

from honed.kernels.verify.sampling import (
    C_ACCEPT,
    C_GREEDY_BELOW,
    C_TOKEN,
    clean_logits,
    peak_and_mass,
    race_keys,
    race_of_chunks,
    race_within,
    total_of,
    uniform,
)


@triton.jit  # type: ignore[untyped-decorator]
def _is_one_hot(
    q_temperature_ptr: tl.tensor,
    i_b: tl.tensor,
    draft: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    IS_FULL_Q: tl.constexpr,
) -> tl.tensor:
    """Tell whether q is one-hot for this draft, and 1 / draft temperature if it isn't."""
    is_one_hot = True
    if IS_FULL_Q:
        q_temperature = tl.load(q_temperature_ptr + i_b).to(tl.float32)
        is_one_hot = (q_temperature < C_GREEDY_BELOW) | (q_temperature != q_temperature) | (draft < 0) | (draft >= vocab)
        inverse = tl.where(is_one_hot, 1.0, 1.0 / q_temperature)
    return is_one_hot, inverse


@triton.jit  # type: ignore[untyped-decorator]
def rows_kernel(
    logits_ptr: tl.tensor,
    draft_logits_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    num_draft_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    q_temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    first_row_ptr: tl.tensor,
    stat_ptr: tl.tensor,
    arrived_ptr: tl.tensor,
    break_ptr: tl.tensor,
    stride_b: tl.tensor,
    stride_r: tl.tensor,
    draft_stride_b: tl.tensor,
    draft_stride_r: tl.tensor,
    num_requests: tl.tensor,
    depth: tl.tensor,
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    IS_FULL_Q: tl.constexpr,
) -> None:
    i_c, i_b, i_r = tl.program_id(0) % num_chunks, (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(1)
    limit = tl.minimum(tl.maximum(tl.load(num_draft_ptr + i_b).to(tl.int32), 0), depth)
    if i_r > limit:
        return
    # Posted as depth + 1 − row, so that 0 is "none" and the earliest row is the maximum.
    if tl.load(break_ptr + i_b, volatile=True) > depth + 1 - i_r:
        return
    temperature = tl.load(temperature_ptr + i_b).to(tl.float32)
    is_sampled = temperature >= C_GREEDY_BELOW
    inverse = tl.where(is_sampled, 1.0 / temperature, 1.0)
    row = i_b * stride_b + i_r * stride_r
    if IS_RAGGED:
        row += tl.load(first_row_ptr + i_b).to(tl.int64) * stride_r
    is_bonus = i_r == limit
    draft = tl.load(draft_ptr + i_b * depth + i_r, mask=i_r < limit, other=-1).to(tl.int64)
    is_one_hot, warm = _is_one_hot(q_temperature_ptr, i_b, draft, vocab, 1.0, IS_FULL_Q)

    o_v = i_c * CHUNK + tl.arange(0, CHUNK)
    m_v = o_v < vocab
    b_x = clean_logits(logits_ptr + row, o_v, m_v, inverse)
    stat = (i_b * (depth + 1) + i_r) * num_chunks
    plane = num_requests * (depth + 1) * num_chunks  # of stat: peaks, masses, q's peaks, q's masses
    if is_sampled:
        if is_one_hot:
            own = tl.where((draft >= 0) & (draft < vocab), draft - i_c * CHUNK, -1).to(tl.int32)
            b_x = tl.where(tl.arange(0, CHUNK) == own, float("-inf"), b_x)
        peak, mass = peak_and_mass(b_x)
        if IS_FULL_Q:  # noqa: SIM102 - constexpr first
            if (is_one_hot == 0) & (is_bonus == 0):
                p_q = draft_logits_ptr + i_b * draft_stride_b + i_r * draft_stride_r
                q_peak, q_mass = peak_and_mass(clean_logits(p_q, o_v, m_v, warm))
                tl.store(stat_ptr + 2 * plane + stat + i_c, q_peak)
                tl.store(stat_ptr + 3 * plane + stat + i_c, q_mass)
    else:
        peak = tl.max(b_x, axis=0)
        mass = (i_c * CHUNK + tl.argmax(b_x, axis=0)).to(tl.float32)  # the token's id
    tl.store(stat_ptr + stat + i_c, peak)
    tl.store(stat_ptr + plane + stat + i_c, mass)
    if is_bonus:
        return

    # All of this program's stores, then the ticket: the program with the last ticket sees all stores.
    tl.debug_barrier()
    if tl.atomic_add(arrived_ptr + i_b * depth + i_r, 1, sem="acq_rel") != num_chunks - 1:
        return
    o_c = tl.arange(0, CHUNKS)
    m_c = o_c < num_chunks
    b_peak = tl.load(stat_ptr + stat + o_c, mask=m_c, other=float("-inf"), cache_modifier=".cg")
    b_mass = tl.load(stat_ptr + plane + stat + o_c, mask=m_c, other=0.0, cache_modifier=".cg")
    if is_sampled:
        is_token = (draft >= 0) & (draft < vocab)
        own_x = clean_logits(logits_ptr + row, draft, is_token, inverse)
        base, rest = total_of(b_peak, b_mass)
        u = uniform(tl.load(seed_ptr + i_b), tl.load(position_ptr + i_b).to(tl.int64) + i_r, draft * 0, C_ACCEPT)
        # One-hot: own is not in rest, and either may be zero.
        top = tl.maximum(tl.where(rest > 0.0, base, float("-inf")), own_x)
        top = tl.where(top > float("-inf"), top, 0.0)
        own = tl.exp(own_x - top)
        rest = tl.where(rest > 0.0, rest * tl.exp(tl.minimum(base - top, 0.0)), 0.0)
        is_accepted = (u * (own + rest) < own) & is_token
        if IS_FULL_Q:  # noqa: SIM102 - constexpr first
            if is_one_hot == 0:
                b_q_peak = tl.load(stat_ptr + 2 * plane + stat + o_c, mask=m_c, other=float("-inf"), cache_modifier=".cg")
                b_q_mass = tl.load(stat_ptr + 3 * plane + stat + o_c, mask=m_c, other=0.0, cache_modifier=".cg")
                q_base, q_total = total_of(b_q_peak, b_q_mass)
                p_q = draft_logits_ptr + i_b * draft_stride_b + i_r * draft_stride_r
                own_q = tl.exp(clean_logits(p_q, draft, is_token, warm) - q_base)
                # u < p / q; a draft that q calls impossible is accepted if p > 0.
                is_accepted = ((u * own_q * rest < own * q_total) | (own_q == 0.0)) & (own > 0.0)
    else:
        is_accepted = tl.max(tl.where(o_c == tl.argmax(b_peak, axis=0), b_mass, -1.0), axis=0).to(tl.int64) == draft
    if is_accepted == 0:
        tl.atomic_max(break_ptr + i_b, depth + 1 - i_r, sem="relaxed")


@triton.jit  # type: ignore[untyped-decorator]
def residual_kernel(
    logits_ptr: tl.tensor,
    draft_logits_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    num_draft_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    q_temperature_ptr: tl.tensor,
    first_row_ptr: tl.tensor,
    stat_ptr: tl.tensor,
    break_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    stride_b: tl.tensor,
    stride_r: tl.tensor,
    draft_stride_b: tl.tensor,
    draft_stride_r: tl.tensor,
    num_requests: tl.tensor,
    depth: tl.tensor,
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    IS_RAGGED: tl.constexpr,
) -> None:
    """Σ max(0, p − q) of a chunk of the rejected row; needs both rows' totals, hence a separate pass."""
    i_c, i_b = tl.program_id(0) % num_chunks, (tl.program_id(0) // num_chunks).to(tl.int64)
    limit = tl.minimum(tl.maximum(tl.load(num_draft_ptr + i_b).to(tl.int32), 0), depth)
    i_r = tl.minimum(depth + 1 - tl.load(break_ptr + i_b), limit)
    draft = tl.load(draft_ptr + i_b * depth + i_r, mask=i_r < limit, other=-1).to(tl.int64)
    is_one_hot, warm = _is_one_hot(q_temperature_ptr, i_b, draft, vocab, 1.0, True)
    temperature = tl.load(temperature_ptr + i_b).to(tl.float32)
    if (i_r == limit) | is_one_hot | (temperature < C_GREEDY_BELOW) | (temperature != temperature):
        return
    row = i_b * stride_b + i_r * stride_r
    if IS_RAGGED:
        row += tl.load(first_row_ptr + i_b).to(tl.int64) * stride_r
    o_v = i_c * CHUNK + tl.arange(0, CHUNK)
    b_w = _residual(
        logits_ptr + row,
        draft_logits_ptr + i_b * draft_stride_b + i_r * draft_stride_r,
        o_v,
        vocab,
        1.0 / temperature,
        warm,
        stat_ptr,
        (i_b * (depth + 1) + i_r) * num_chunks,
        num_requests * (depth + 1) * num_chunks,
        num_chunks,
        CHUNKS,
    )
    tl.store(residual_ptr + i_b * num_chunks + i_c, tl.sum(b_w, axis=0))


@triton.jit  # type: ignore[untyped-decorator]
def _residual(
    p_row: tl.tensor,
    q_row: tl.tensor,
    o_v: tl.tensor,
    vocab: tl.tensor,
    inverse: tl.tensor,
    warm: tl.tensor,
    stat_ptr: tl.tensor,
    stat: tl.tensor,
    plane: tl.tensor,
    num_chunks: tl.tensor,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    """max(0, p − q) of some tokens."""
    o_c = tl.arange(0, CHUNKS)
    m_c = o_c < num_chunks
    base, total = total_of(
        tl.load(stat_ptr + stat + o_c, mask=m_c, other=float("-inf")),
        tl.load(stat_ptr + plane + stat + o_c, mask=m_c, other=0.0),
    )
    q_base, q_total = total_of(
        tl.load(stat_ptr + 2 * plane + stat + o_c, mask=m_c, other=float("-inf")),
        tl.load(stat_ptr + 3 * plane + stat + o_c, mask=m_c, other=0.0),
    )
    m_v = o_v < vocab
    b_p = tl.exp(clean_logits(p_row, o_v, m_v, inverse) - base) * (1.0 / tl.maximum(total, 1e-38))
    b_q = tl.exp(clean_logits(q_row, o_v, m_v, warm) - q_base) * (1.0 / tl.maximum(q_total, 1e-38))
    return tl.maximum(b_p - b_q, 0.0)


@triton.jit  # type: ignore[untyped-decorator]
def emit_kernel(
    logits_ptr: tl.tensor,
    draft_logits_ptr: tl.tensor,
    draft_ptr: tl.tensor,
    num_draft_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    q_temperature_ptr: tl.tensor,
    seed_ptr: tl.tensor,
    position_ptr: tl.tensor,
    first_row_ptr: tl.tensor,
    stat_ptr: tl.tensor,
    break_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    num_accepted_ptr: tl.tensor,
    token_ptr: tl.tensor,
    bonus_ptr: tl.tensor,
    stride_b: tl.tensor,
    stride_r: tl.tensor,
    draft_stride_b: tl.tensor,
    draft_stride_r: tl.tensor,
    num_requests: tl.tensor,
    depth: tl.tensor,
    vocab: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    TOKENS: tl.constexpr,
    IS_RAGGED: tl.constexpr,
    IS_FULL_Q: tl.constexpr,
) -> None:
    i_b = tl.program_id(0).to(tl.int64)
    limit = tl.minimum(tl.maximum(tl.load(num_draft_ptr + i_b).to(tl.int32), 0), depth)
    i_r = tl.minimum(depth + 1 - tl.load(break_ptr + i_b), limit)
    draft = tl.load(draft_ptr + i_b * depth + i_r, mask=i_r < limit, other=-1).to(tl.int64)
    temperature = tl.load(temperature_ptr + i_b).to(tl.float32)
    row = i_b * stride_b + i_r * stride_r
    if IS_RAGGED:
        row += tl.load(first_row_ptr + i_b).to(tl.int64) * stride_r
    stat = (i_b * (depth + 1) + i_r) * num_chunks
    plane = num_requests * (depth + 1) * num_chunks
    o_c = tl.arange(0, CHUNKS)
    b_peak = tl.load(stat_ptr + stat + o_c, mask=o_c < num_chunks, other=float("-inf"))
    b_mass = tl.load(stat_ptr + plane + stat + o_c, mask=o_c < num_chunks, other=0.0)
    if temperature >= C_GREEDY_BELOW:
        seed, position = tl.load(seed_ptr + i_b), tl.load(position_ptr + i_b).to(tl.int64) + i_r
        is_one_hot, warm = _is_one_hot(q_temperature_ptr, i_b, draft, vocab, 1.0, IS_FULL_Q)
        base, _ = total_of(b_peak, b_mass)
        b_w = b_mass * tl.exp(b_peak - base)
        has_residual = False
        if IS_FULL_Q:  # noqa: SIM102 - constexpr first
            if (is_one_hot == 0) & (i_r < limit):
                b_left = tl.load(residual_ptr + i_b * num_chunks + o_c, mask=o_c < num_chunks, other=0.0)
                has_residual = tl.sum(b_left, axis=0) > 0.0  # else p = q except for rounding: use p
                b_w = tl.where(has_residual, b_left, b_w)
        chunk, top = race_of_chunks(b_peak, b_w, seed, position, o_c)
        first = chunk * CHUNK
        if has_residual:
            token = first
            if IS_FULL_Q:
                o_v = first + tl.arange(0, CHUNK)
                p_q = draft_logits_ptr + i_b * draft_stride_b + i_r * draft_stride_r
                b_left = _residual(
                    logits_ptr + row, p_q, o_v, vocab, 1.0 / temperature, warm, stat_ptr, stat, plane, num_chunks, CHUNKS
                )
                token = first + tl.argmax(race_keys(b_left, seed, position, o_v, C_TOKEN), axis=0)
        else:
            hidden = tl.where(is_one_hot, draft, -1)
            token = race_within(logits_ptr + row, first, vocab, hidden, 1.0 / temperature, top, seed, position, CHUNK, CHUNK)
    else:
        token = tl.max(tl.where(o_c == tl.argmax(b_peak, axis=0), b_mass, 0.0), axis=0).to(tl.int32)
    o_t = tl.arange(0, TOKENS)
    b_kept = tl.load(draft_ptr + i_b * depth + o_t, mask=o_t < i_r, other=-1).to(tl.int32)
    tl.store(token_ptr + i_b * (depth + 1) + o_t, tl.where(o_t == i_r, token, b_kept), mask=o_t <= depth)
    tl.store(num_accepted_ptr + i_b, i_r)
    tl.store(bonus_ptr + i_b, token)
