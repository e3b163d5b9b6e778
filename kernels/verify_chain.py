"""Rejection sampling of a chain of draft tokens: how many are accepted, and the one token of the target's own after them.

Computes: reference_verify.verify_chain. Row i < k of a request: draft token d is accepted with min(1, p(d) / q(d)); at the
first rejection a token is drawn from norm(max(0, p − q)), after k acceptances one from p. p is the softmax of the target's
logits over the temperature; at temperature 0 d is accepted where it is the most likely token. q is one-hot at d (greedy
drafts), or, given draft logits, their softmax over the draft temperature; 0 there means one-hot for that request.
A draft outside 0 … V − 1 (a struck-out placeholder) is never accepted and takes nothing off p.

How: (1) a program a (row, chunk of the vocabulary) leaves the chunk's maximum and Σ exp, without d's own share where q is
one-hot: what is left is the residual's mass, without cancellation. The last program of a row to arrive merges them and
judges the draft; a rejection is posted, and programs of later rows that see it leave without reading. Rows are the
slowest grid dimension, so row 0 of all requests comes first. (2) Only for full q: the residual's mass in each chunk of the
row that broke. (3) One program a request draws a chunk by the masses and a token in that chunk (races, see sampling.py).
No [B, K, V] probabilities exist anywhere.

Moves: one-hot q: (Σ rows, k + 1 each)·V·sizeof(logits) at most, + B·8,192·sizeof for step 3; full q: twice that + 2·B·V·sizeof
for step 2. The floor is the rows up to each request's break, once, at copy bandwidth. How near to it the early exit comes
depends on how the GPU orders programs: not measured, and neither is the time.
Layout: unit stride in V; target logits [B, K + 1, V], or [R, V] with request b's rows at first_rows[b] … + k_b (vLLM's ragged
batch); logits after penalties and top-k/top-p masks (−inf), before the temperature.
Seeds: row i draws from (seed, positions[b] + i): see sampling.py. A request's result doesn't depend on its batch.
CUDA graphs: grids depend on shapes only, nothing is read back; give `out` for fixed addresses.
Source: arXiv 2211.17192, algorithm 1; arXiv 2302.01318, algorithm 2; vLLM's v1/sample/rejection_sampler.py, read for its rules.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from honed.kernels import reference_verify as reference
from honed.kernels.sampling import MAX_VOCAB, VOCAB_CHUNK

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


class ChainVerdict(NamedTuple):
    """What became of the drafts."""

    num_accepted: torch.Tensor  # [B] int32, bonus excluded
    tokens: torch.Tensor  # [B, K + 1] int32: accepted drafts, then the bonus token, then −1
    bonus_token_ids: torch.Tensor  # [B] int32


if triton is not None:
    from honed.kernels.sampling import (
        C_ACCEPT,
        C_CHUNK,
        C_GREEDY_BELOW,
        C_TOKEN,
        clean_logits,
        peak_and_mass,
        race,
        race_within,
        total_of,
        uniform,
    )

    @triton.jit  # type: ignore[untyped-decorator]
    def _is_one_hot(
        warmth_ptr: tl.tensor, i_b: tl.tensor, draft: tl.tensor, vocab: tl.tensor, inverse: tl.tensor, IS_FULL_Q: tl.constexpr,
    ) -> tl.tensor:  # fmt: skip
        """Whether q is one-hot for this draft, and 1 / draft temperature where it isn't."""
        is_one_hot = True
        if IS_FULL_Q:
            warmth = tl.load(warmth_ptr + i_b).to(tl.float32)
            is_one_hot = (warmth < C_GREEDY_BELOW) | (warmth != warmth) | (draft < 0) | (draft >= vocab)
            inverse = tl.where(is_one_hot, 1.0, 1.0 / warmth)
        return is_one_hot, inverse

    @triton.jit  # type: ignore[untyped-decorator]
    def _rows_kernel(
        logits_ptr: tl.tensor, draft_logits_ptr: tl.tensor, draft_ptr: tl.tensor, num_draft_ptr: tl.tensor,
        temperature_ptr: tl.tensor, warmth_ptr: tl.tensor, seed_ptr: tl.tensor, position_ptr: tl.tensor,
        first_row_ptr: tl.tensor, stat_ptr: tl.tensor, arrived_ptr: tl.tensor, break_ptr: tl.tensor, stride_b: tl.tensor,
        stride_r: tl.tensor, draft_stride_b: tl.tensor, draft_stride_r: tl.tensor, num_requests: tl.tensor, depth: tl.tensor,
        vocab: tl.tensor, num_chunks: tl.tensor, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, IS_RAGGED: tl.constexpr,
        IS_FULL_Q: tl.constexpr,
    ) -> None:  # fmt: skip
        i_c, i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
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
        is_one_hot, warm = _is_one_hot(warmth_ptr, i_b, draft, vocab, 1.0, IS_FULL_Q)

        o_v = i_c * CHUNK + tl.arange(0, CHUNK)
        m_v = o_v < vocab
        b_x = clean_logits(logits_ptr + row, o_v, m_v, inverse)
        stat = (i_b * (depth + 1) + i_r) * num_chunks
        plane = num_requests * (depth + 1) * num_chunks  # of stat: peaks, masses, q's peaks, q's masses
        if is_sampled:
            if is_one_hot:
                b_x = tl.where(o_v == draft, float("-inf"), b_x)
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

        # All of this program's stores, then the ticket: who draws the last one sees everyone's.
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
            # One-hot: own is not in rest, and either may be nothing.
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
                    # u < p / q; what q says can't be is accepted wherever p > 0.
                    is_accepted = (u * own_q * rest < own * q_total) & (own > 0.0)
        else:
            is_accepted = tl.max(tl.where(o_c == tl.argmax(b_peak, axis=0), b_mass, -1.0), axis=0).to(tl.int64) == draft
        if is_accepted == 0:
            tl.atomic_max(break_ptr + i_b, depth + 1 - i_r, sem="relaxed")

    @triton.jit  # type: ignore[untyped-decorator]
    def _residual_kernel(
        logits_ptr: tl.tensor, draft_logits_ptr: tl.tensor, draft_ptr: tl.tensor, num_draft_ptr: tl.tensor,
        temperature_ptr: tl.tensor, warmth_ptr: tl.tensor, first_row_ptr: tl.tensor, stat_ptr: tl.tensor, break_ptr: tl.tensor,
        residual_ptr: tl.tensor, stride_b: tl.tensor, stride_r: tl.tensor, draft_stride_b: tl.tensor,
        draft_stride_r: tl.tensor, num_requests: tl.tensor, depth: tl.tensor, vocab: tl.tensor, num_chunks: tl.tensor,
        CHUNK: tl.constexpr, CHUNKS: tl.constexpr, IS_RAGGED: tl.constexpr,
    ) -> None:  # fmt: skip
        """Σ max(0, p − q) of a chunk of the row that broke; needs both rows' totals, hence a pass of its own."""
        i_c, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64)
        limit = tl.minimum(tl.maximum(tl.load(num_draft_ptr + i_b).to(tl.int32), 0), depth)
        i_r = tl.minimum(depth + 1 - tl.load(break_ptr + i_b), limit)
        draft = tl.load(draft_ptr + i_b * depth + i_r, mask=i_r < limit, other=-1).to(tl.int64)
        is_one_hot, warm = _is_one_hot(warmth_ptr, i_b, draft, vocab, 1.0, True)
        temperature = tl.load(temperature_ptr + i_b).to(tl.float32)
        if (i_r == limit) | is_one_hot | (temperature < C_GREEDY_BELOW) | (temperature != temperature):
            return
        row = i_b * stride_b + i_r * stride_r
        if IS_RAGGED:
            row += tl.load(first_row_ptr + i_b).to(tl.int64) * stride_r
        o_v = i_c * CHUNK + tl.arange(0, CHUNK)
        b_w = _residual(
            logits_ptr + row, draft_logits_ptr + i_b * draft_stride_b + i_r * draft_stride_r, o_v, vocab, 1.0 / temperature,
            warm, stat_ptr, (i_b * (depth + 1) + i_r) * num_chunks, num_requests * (depth + 1) * num_chunks, num_chunks, CHUNKS,
        )  # fmt: skip
        tl.store(residual_ptr + i_b * num_chunks + i_c, tl.sum(b_w, axis=0))

    @triton.jit  # type: ignore[untyped-decorator]
    def _residual(
        p_row: tl.tensor, q_row: tl.tensor, o_v: tl.tensor, vocab: tl.tensor, inverse: tl.tensor, warm: tl.tensor,
        stat_ptr: tl.tensor, stat: tl.tensor, plane: tl.tensor, num_chunks: tl.tensor, CHUNKS: tl.constexpr,
    ) -> tl.tensor:  # fmt: skip
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
        b_p = tl.exp(clean_logits(p_row, o_v, m_v, inverse) - base) / tl.maximum(total, 1e-38)
        b_q = tl.exp(clean_logits(q_row, o_v, m_v, warm) - q_base) / tl.maximum(q_total, 1e-38)
        return tl.maximum(b_p - b_q, 0.0)

    @triton.jit  # type: ignore[untyped-decorator]
    def _emit_kernel(
        logits_ptr: tl.tensor, draft_logits_ptr: tl.tensor, draft_ptr: tl.tensor, num_draft_ptr: tl.tensor,
        temperature_ptr: tl.tensor, warmth_ptr: tl.tensor, seed_ptr: tl.tensor, position_ptr: tl.tensor,
        first_row_ptr: tl.tensor, stat_ptr: tl.tensor, break_ptr: tl.tensor, residual_ptr: tl.tensor,
        num_accepted_ptr: tl.tensor, token_ptr: tl.tensor, bonus_ptr: tl.tensor, stride_b: tl.tensor, stride_r: tl.tensor,
        draft_stride_b: tl.tensor, draft_stride_r: tl.tensor, num_requests: tl.tensor, depth: tl.tensor, vocab: tl.tensor,
        num_chunks: tl.tensor, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, TOKENS: tl.constexpr, IS_RAGGED: tl.constexpr,
        IS_FULL_Q: tl.constexpr,
    ) -> None:  # fmt: skip
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
            is_one_hot, warm = _is_one_hot(warmth_ptr, i_b, draft, vocab, 1.0, IS_FULL_Q)
            base, _ = total_of(b_peak, b_mass)
            b_w = b_mass * tl.exp(b_peak - base)
            has_residual = False
            if IS_FULL_Q:  # noqa: SIM102 - constexpr first
                if (is_one_hot == 0) & (i_r < limit):
                    b_left = tl.load(residual_ptr + i_b * num_chunks + o_c, mask=o_c < num_chunks, other=0.0)
                    has_residual = tl.sum(b_left, axis=0) > 0.0  # else p = q but for rounding: p will do
                    b_w = tl.where(has_residual, b_left, b_w)
            first = race(b_w, seed, position, o_c, C_CHUNK) * CHUNK
            o_v = first + tl.arange(0, CHUNK)
            b_x = clean_logits(logits_ptr + row, o_v, o_v < vocab, 1.0 / temperature)
            if is_one_hot:
                b_x = tl.where(o_v == draft, float("-inf"), b_x)
            winner = race_within(b_x, o_v, seed, position)
            if IS_FULL_Q:  # noqa: SIM102 - constexpr first
                if has_residual:
                    p_q = draft_logits_ptr + i_b * draft_stride_b + i_r * draft_stride_r
                    b_left = _residual(
                        logits_ptr + row, p_q, o_v, vocab, 1.0 / temperature, warm, stat_ptr, stat, plane, num_chunks, CHUNKS
                    )
                    winner = race(b_left, seed, position, o_v, C_TOKEN)
            token = first + winner
        else:
            token = tl.max(tl.where(o_c == tl.argmax(b_peak, axis=0), b_mass, 0.0), axis=0).to(tl.int32)
        o_t = tl.arange(0, TOKENS)
        b_kept = tl.load(draft_ptr + i_b * depth + o_t, mask=o_t < i_r, other=-1).to(tl.int32)
        tl.store(token_ptr + i_b * (depth + 1) + o_t, tl.where(o_t == i_r, token, b_kept), mask=o_t <= depth)
        tl.store(num_accepted_ptr + i_b, i_r)
        tl.store(bonus_ptr + i_b, token)


def verify_chain(
    target_logits: torch.Tensor,  # [B, K + 1, V], or [R, V] with first_rows
    draft_tokens: torch.Tensor,  # [B, K] integers
    num_draft_tokens: torch.Tensor,  # [B] integers, 0 ≤ k ≤ K
    temperature: torch.Tensor,  # [B] float
    seeds: torch.Tensor,  # [B] int64
    positions: torch.Tensor,  # [B] int64: sequence position of the first token that is emitted
    *,
    first_rows: torch.Tensor | None = None,  # [B] integers: the kernel doesn't look whether rows exist
    draft_logits: torch.Tensor | None = None,  # [B, K, V]; probabilities: their logarithm, and a draft temperature of 1
    draft_temperature: torch.Tensor | None = None,  # [B] float; None: `temperature`
    out: ChainVerdict | None = None,
) -> ChainVerdict:
    """Judge each request's draft tokens; Triton on a GPU, its plain twin elsewhere.

    The tokens emitted are distributed as the target's own samples, whatever q is, if the drafts were drawn from it. A row
    without a finite logit rejects its draft and emits token 0; NaN counts as −inf.

    Raises:
        ValueError: shapes don't fit each other.
    """
    _check(target_logits, draft_tokens, first_rows, draft_logits)
    num_requests, depth = draft_tokens.shape
    per_request = [num_draft_tokens, temperature, seeds, positions]
    per_request += [x for x in (first_rows, draft_temperature) if x is not None]
    if any(x.shape != (num_requests,) for x in per_request):
        raise ValueError(
            f"verify_chain: lengths, temperatures, seeds, positions, first rows must be [{num_requests}] as draft_tokens says, "
            f"not {[list(x.shape) for x in per_request]}"
        )
    if out is None:
        empty = draft_tokens.new_empty
        out = ChainVerdict(
            empty((num_requests,), dtype=torch.int32), empty((num_requests, depth + 1), dtype=torch.int32),
            empty((num_requests,), dtype=torch.int32),
        )  # fmt: skip
    _verify_chain(
        target_logits, draft_tokens, num_draft_tokens, temperature, seeds, positions, first_rows, draft_logits,
        draft_temperature, *out, VOCAB_CHUNK,
    )  # fmt: skip
    return out


def _check(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    first_rows: torch.Tensor | None,
    draft_logits: torch.Tensor | None,
) -> None:
    if draft_tokens.dim() != 2:
        raise ValueError(f"verify_chain: draft_tokens must be [B, K], not {list(draft_tokens.shape)}")
    num_requests, depth = draft_tokens.shape
    vocab = target_logits.shape[-1]
    wanted = (num_requests, depth + 1, vocab) if first_rows is None else (target_logits.shape[0], vocab)
    if tuple(target_logits.shape) != wanted or not 0 < vocab < MAX_VOCAB:
        raise ValueError(
            f"verify_chain: target_logits {list(target_logits.shape)} must be {list(wanted)} with a vocabulary of 1 … "
            f"{MAX_VOCAB - 1:,} (ragged [R, V] rows need first_rows)"
        )
    if draft_logits is not None and tuple(draft_logits.shape) != (num_requests, depth, vocab):
        raise ValueError(f"verify_chain: draft_logits {list(draft_logits.shape)} must be {[num_requests, depth, vocab]}")


@torch.library.custom_op("honed::verify_chain", mutates_args=("num_accepted", "tokens", "bonus"))
def _verify_chain(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_rows: torch.Tensor | None,
    draft_logits: torch.Tensor | None,
    draft_temperature: torch.Tensor | None,
    num_accepted: torch.Tensor,
    tokens: torch.Tensor,
    bonus: torch.Tensor,
    chunk: int,
) -> None:
    run = launch if target_logits.is_cuda else _run_twin
    run(
        target_logits, draft_tokens, num_draft_tokens, temperature, seeds, positions, first_rows, draft_logits,
        draft_temperature, ChainVerdict(num_accepted, tokens, bonus), chunk,
    )  # fmt: skip


@_verify_chain.register_fake
def _(*_: Any) -> None:
    return None


def _run_twin(*inputs: Any) -> None:
    *arguments, out, chunk = inputs
    for made, place in zip(reference.verify_chain(*arguments, chunk), out, strict=True):
        place.copy_(made)


def launch(
    target_logits: torch.Tensor,
    draft_tokens: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first_rows: torch.Tensor | None,
    draft_logits: torch.Tensor | None,
    draft_temperature: torch.Tensor | None,
    out: ChainVerdict,
    chunk: int = VOCAB_CHUNK,
) -> None:
    """Run the Triton kernels themselves (on a GPU, or under Triton's interpreter); arguments as `verify_chain`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    num_requests, depth = draft_tokens.shape
    if not num_requests:
        return
    vocab, device = target_logits.shape[-1], target_logits.device
    target_logits = _unit_stride(target_logits)
    stride_b, stride_r = (0, target_logits.stride(0)) if first_rows is not None else target_logits.stride()[:2]
    if draft_logits is not None:
        draft_logits = _unit_stride(draft_logits)
    draft_strides = (0, 0) if draft_logits is None else draft_logits.stride()[:2]
    warmth = None if draft_logits is None else (temperature if draft_temperature is None else draft_temperature).contiguous()
    draft_tokens, num_draft_tokens = draft_tokens.contiguous(), num_draft_tokens.contiguous()
    temperature, seeds, positions = temperature.contiguous(), seeds.contiguous(), positions.contiguous()
    first_rows = None if first_rows is None else first_rows.contiguous()
    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in out), "results are contiguous int32"

    num_chunks = triton.cdiv(vocab, chunk)
    planes = 2 if draft_logits is None else 4
    stats = torch.empty((planes, num_requests, depth + 1, num_chunks), dtype=torch.float32, device=device)
    residual = None if draft_logits is None else torch.empty((num_requests, num_chunks), dtype=torch.float32, device=device)
    counters = torch.zeros(num_requests * (depth + 1), dtype=torch.int32, device=device)
    arrived, breaks = counters[num_requests:], counters[:num_requests]
    strides = (stride_b, stride_r, *draft_strides, num_requests, depth, vocab, num_chunks)
    options = {
        "CHUNK": chunk, "CHUNKS": triton.next_power_of_2(num_chunks), "IS_RAGGED": first_rows is not None,
        "num_warps": max(1, min(8, chunk // 1024)),
    }  # fmt: skip
    is_full = draft_logits is not None
    _rows_kernel[(num_chunks, num_requests, depth + 1)](
        target_logits, draft_logits, draft_tokens, num_draft_tokens, temperature, warmth, seeds, positions, first_rows, stats,
        arrived, breaks, *strides, IS_FULL_Q=is_full, **options,
    )  # fmt: skip
    if is_full:
        _residual_kernel[(num_chunks, num_requests)](
            target_logits, draft_logits, draft_tokens, num_draft_tokens, temperature, warmth, first_rows, stats, breaks,
            residual, *strides, **options,
        )  # fmt: skip
    _emit_kernel[(num_requests,)](
        target_logits, draft_logits, draft_tokens, num_draft_tokens, temperature, warmth, seeds, positions, first_rows, stats,
        breaks, residual, *out, *strides, TOKENS=triton.next_power_of_2(depth + 1), IS_FULL_Q=is_full, **options,
    )  # fmt: skip


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
