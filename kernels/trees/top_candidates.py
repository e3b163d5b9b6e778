"""Each depth's most likely tokens and their log-probabilities, from draft logits that are read once.

Computes: reference.top_candidates. `num_splits` programs share a row of logits, and a program's lanes share its part. Each lane
keeps its best logit and a running Σ exp: no reduction while reading. The m best of a part are in the m lanes with the best
maxima (any other candidate has m better ones above it). So only those lanes, and lanes that tie with the last of them, are read
again. A second launch merges the parts of a row and subtracts log Σ exp.
Moves: B·D·V·sizeof(logits) bytes, once, and some hundredths of that again; a part's candidates are 8·m + 8 bytes. The floor is
the logits at copy bandwidth. The compiled loop has nine instructions a bf16 element, 1.25 of them exp2: on an H200 some four
fifths of the time that the bytes take, by count.
Layout: `logits` [B, D, V] with unit stride in V, V below 2³¹.
Source: the running Σ exp is arXiv 1805.02867 (online softmax), kept a lane.
"""

from __future__ import annotations

import torch

from honed.kernels.trees import reference
from honed.kernels.trees.reference import FORBIDDEN, GREEDY_TEMPERATURE, MAX_CANDIDATES

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

LANES = 1024
ROUNDS = 4
"""Rounds of its lanes that a program reads at once."""
MAX_SPLITS = 64
PROGRAMS = 4096
"""Wanted programs of the first launch: some four waves of an H200 at eight programs a multiprocessor."""

if triton is not None:
    _NOTHING = tl.constexpr(FORBIDDEN)
    _GREEDY = tl.constexpr(GREEDY_TEMPERATURE)
    _NO_KEY = tl.constexpr(-(2**63))
    _LOG2_E = tl.constexpr(1.4426950408889634)
    _LN_2 = tl.constexpr(0.6931471805599453)
    _LAST_ID = tl.constexpr(0x7FFF_FFFF)
    _MOST_EVEN = tl.constexpr(8)

    @triton.jit  # type: ignore[untyped-decorator]
    def _temperature(temperature_ptr, i_b, HAS_TEMPERATURE: tl.constexpr):  # type: ignore[no-untyped-def]
        if HAS_TEMPERATURE:
            t = tl.load(temperature_ptr + i_b).to(tl.float32)
            t = tl.where((t >= _GREEDY) & (t < float("inf")), t, 1.0)
        else:
            t = 1.0
        return t

    @triton.jit
    def _order(b_x):  # type: ignore[no-untyped-def]
        b_bits = (b_x + 0.0).to(tl.int32, bitcast=True)  # −0 must equal 0
        return b_bits ^ ((b_bits >> 31) & _LAST_ID)

    @triton.jit
    def _key(b_x, o_v):  # type: ignore[no-untyped-def]
        """Key that compares as (logit, −id) does; _NO_KEY stands for none."""
        b_key = (_order(b_x).to(tl.int64) << 32) + (o_v ^ _LAST_ID)
        return tl.where(b_x > _NOTHING, b_key, _NO_KEY)

    @triton.jit
    def _keys_at(p_x, o_v, m_v):  # type: ignore[no-untyped-def]
        return _key(tl.load(p_x + o_v, mask=m_v, other=float("-inf")).to(tl.float32), o_v)

    @triton.jit
    def _insert(b_top, b_key):  # type: ignore[no-untyped-def]
        """Keep the best of both; no key may be in both, nor twice in one."""
        best, least = tl.max(b_key), tl.min(b_top)
        while best > least:
            b_top = tl.where(b_top == least, best, b_top)
            b_key = tl.where(b_key == best, _NO_KEY, b_key)
            best, least = tl.max(b_key), tl.min(b_top)
        return b_top

    @triton.jit  # type: ignore[untyped-decorator]
    def _scan_rounds(  # type: ignore[no-untyped-def]
        p_x, at, end, b_best, b_sum, scale, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, IS_MASKED: tl.constexpr
    ):
        """Fold the logits of some rounds into every lane's (best, Σ exp)."""
        o_x = at + tl.arange(0, ROUNDS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        if IS_MASKED:
            b_x = tl.load(p_x + o_x, mask=o_x < end, other=float("-inf")).to(tl.float32)
        else:
            b_x = tl.load(p_x + o_x).to(tl.float32)
        b_new = tl.maximum(b_best, tl.max(b_x, axis=0))
        b_e = tl.exp2(tl.maximum((b_x - b_new[None, :]) * scale, -200.0))  # NaN becomes 0, too
        return b_new, b_sum * tl.exp2((b_best - b_new) * scale) + tl.sum(b_e, axis=0)

    @triton.jit  # type: ignore[untyped-decorator]
    def _scan_kernel(  # type: ignore[no-untyped-def]
        logits_ptr,
        temperature_ptr,
        keys_ptr,
        sums_ptr,
        stride_b,
        stride_d,
        V,
        span,
        D: tl.constexpr,
        M: tl.constexpr,
        BLOCK: tl.constexpr,
        ROUNDS: tl.constexpr,
        COLUMN: tl.constexpr,
        HAS_TEMPERATURE: tl.constexpr,
    ):
        i_s, i_d, i_b = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
        p_x = logits_ptr + i_b * stride_b + i_d * stride_d
        start = i_s * span
        end = tl.minimum(start + span, V)
        o_l, o_m, o_c = tl.arange(0, BLOCK), tl.arange(0, M), tl.arange(0, COLUMN)
        scale = (1.0 / _temperature(temperature_ptr, i_b, HAS_TEMPERATURE)) * _LOG2_E

        b_best = tl.full([BLOCK], _NOTHING, tl.float32)
        b_sum = tl.zeros([BLOCK], tl.float32)
        whole = start + tl.maximum(end - start, 0) // (ROUNDS * BLOCK) * (ROUNDS * BLOCK)
        for at in range(start, whole, ROUNDS * BLOCK):
            b_best, b_sum = _scan_rounds(p_x, at, end, b_best, b_sum, scale, BLOCK, ROUNDS, False)
        for at in range(whole, end, BLOCK):
            b_best, b_sum = _scan_rounds(p_x, at, end, b_best, b_sum, scale, BLOCK, 1, True)
        highest = tl.max(b_best)
        total = tl.sum(b_sum * tl.exp2((b_best - highest) * scale))

        # The best M are in the M lanes with the best maxima; among tied lanes, in any of them.
        b_lane = _key(b_best, o_l)
        b_kept = tl.full([M], BLOCK, tl.int32)
        least = tl.max(b_lane)
        for i_m in range(M):
            best = tl.max(b_lane)
            least = tl.where(best > _NO_KEY, best, least)
            b_kept = tl.where((o_m == i_m) & (best > _NO_KEY), (best & _LAST_ID).to(tl.int32) ^ _LAST_ID, b_kept)
            b_lane = tl.where(b_lane == best, _NO_KEY, b_lane)
        b_top = o_m.to(tl.int64) + _NO_KEY  # all different, and below every key
        o_kept = start + b_kept[:, None] + o_c[None, :] * BLOCK
        b_top = _insert(b_top, _keys_at(p_x, o_kept, (o_kept < end) & (b_kept < BLOCK)[:, None]))
        best, num_even = tl.max(b_lane), 0
        while (best > _NO_KEY) & (best >> 32 == least >> 32) & (num_even < _MOST_EVEN):
            o_even = start + ((best & _LAST_ID).to(tl.int32) ^ _LAST_ID) + o_c * BLOCK
            b_top = _insert(b_top, _keys_at(p_x, o_even, o_even < end))
            b_lane = tl.where(b_lane == best, _NO_KEY, b_lane)
            best = tl.max(b_lane)
            num_even += 1
        if (best > _NO_KEY) & (best >> 32 == least >> 32):  # too many ties: reading everything again is quicker
            b_top = o_m.to(tl.int64) + _NO_KEY
            for at in range(start, end, BLOCK):
                b_top = _insert(b_top, _keys_at(p_x, at + o_l, at + o_l < end))

        i_r = (i_b * D + i_d) * tl.num_programs(0) + i_s
        tl.store(keys_ptr + i_r * M + o_m, b_top)
        tl.store(sums_ptr + i_r * 2, highest)
        tl.store(sums_ptr + i_r * 2 + 1, total)

    @triton.jit(do_not_specialize=["S"])  # type: ignore[untyped-decorator]
    def _merge_kernel(  # type: ignore[no-untyped-def]
        keys_ptr,
        sums_ptr,
        temperature_ptr,
        log_probs_ptr,
        ids_ptr,
        S,
        D: tl.constexpr,
        M: tl.constexpr,
        TAKEN: tl.constexpr,
        BLOCK_S: tl.constexpr,
        BLOCK_K: tl.constexpr,
        HAS_TEMPERATURE: tl.constexpr,
    ):
        i_r = tl.program_id(0).to(tl.int64)
        t = _temperature(temperature_ptr, i_r // D, HAS_TEMPERATURE)
        o_s, o_k = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_K)
        b_high = tl.load(sums_ptr + (i_r * S + o_s) * 2, mask=o_s < S, other=_NOTHING)
        b_sum = tl.load(sums_ptr + (i_r * S + o_s) * 2 + 1, mask=o_s < S, other=0.0)
        highest = tl.max(b_high, axis=0)
        log_sum = tl.log2(tl.sum(b_sum * tl.exp2((b_high - highest) / t * _LOG2_E), axis=0)) * _LN_2
        b_key = tl.load(keys_ptr + i_r * S * M + o_k, mask=o_k < S * M, other=_NO_KEY)
        for i_m in range(TAKEN):
            best = tl.max(b_key, axis=0)
            b_key = tl.where(b_key == best, _NO_KEY, b_key)
            order = (best >> 32).to(tl.int32)
            x = (order ^ ((order >> 31) & _LAST_ID)).to(tl.float32, bitcast=True)
            log_prob = (x - highest) / t - log_sum
            is_known = (x > _NOTHING) & (log_prob > float("-inf")) & (log_prob < float("inf"))
            token = (best & 0xFFFF_FFFF).to(tl.int32) ^ _LAST_ID
            tl.store(log_probs_ptr + i_r * TAKEN + i_m, tl.where(is_known, log_prob, float("-inf")))
            tl.store(ids_ptr + i_r * TAKEN + i_m, tl.where(is_known, token, 0))


def top_candidates(
    logits: torch.Tensor,  # [B, D, V]
    num_candidates: int,  # m
    temperature: torch.Tensor | None = None,  # [B]
) -> tuple[torch.Tensor, torch.Tensor]:  # [B, D, m] float32, [B, D, m] int32
    """Take each depth's `num_candidates` most likely tokens; Triton on a GPU, its plain twin elsewhere.

    The twin, `reference.top_candidates`, defines −inf, ties and a temperature of 0.

    Raises:
        ValueError: shapes don't fit each other, or more than 16 candidates are requested, or more than there are tokens.
    """
    if logits.dim() != 3 or (temperature is not None and temperature.shape != logits.shape[:1]):
        raise ValueError(
            f"top_candidates: logits {list(logits.shape)} and temperature "
            f"{None if temperature is None else list(temperature.shape)} don't fit: they are [B, D, V] and [B]"
        )
    most = min(MAX_CANDIDATES, logits.shape[2])
    if not 1 <= num_candidates <= most:
        raise ValueError(f"top_candidates: {num_candidates} candidates of {logits.shape[2]} tokens: ask for 1 to {most}")
    shape = (*logits.shape[:2], num_candidates)
    log_probs = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    _top_candidates_op(logits, temperature, log_probs, ids)
    return log_probs, ids


@torch.library.custom_op("honed::top_candidates", mutates_args=("log_probs", "ids"))
def _top_candidates_op(
    logits: torch.Tensor, temperature: torch.Tensor | None, log_probs: torch.Tensor, ids: torch.Tensor
) -> None:
    if logits.is_cuda and logits.stride(2) == 1:
        launch(logits, temperature, log_probs, ids)
    else:
        for kept, fresh in zip((log_probs, ids), reference.top_candidates(logits, ids.shape[2], temperature), strict=True):
            kept.copy_(fresh)


@_top_candidates_op.register_fake
def _(logits: torch.Tensor, temperature: torch.Tensor | None, log_probs: torch.Tensor, ids: torch.Tensor) -> None:
    """Nothing is returned: the shapes are the buffers'."""


def choose_splits(num_rows: int, vocabulary: int) -> int:
    """Choose how many programs share a row: enough of them in all, each with at least four rounds of its lanes."""
    return max(1, min(MAX_SPLITS, PROGRAMS // max(num_rows, 1), vocabulary // (4 * LANES)))


def kernels_for(num_splits: int, vocabulary: int) -> tuple[int, int]:
    """Return the sizes of tiles, on which the choice of kernels depends where nothing else changes."""
    return triton.next_power_of_2(_span(num_splits, vocabulary, LANES) // LANES), triton.next_power_of_2(num_splits)


def _span(num_splits: int, vocabulary: int, lanes: int) -> int:
    """Tokens of a split."""
    return triton.cdiv(triton.cdiv(vocabulary, num_splits), lanes) * lanes  # type: ignore[no-any-return]


def launch(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    log_probs: torch.Tensor,
    ids: torch.Tensor,
    *,
    lanes: int = LANES,
    num_splits: int | None = None,
) -> None:
    """Run the Triton kernels themselves (on a GPU, or under Triton's interpreter); arguments as `top_candidates`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    num_requests, num_depths, vocabulary = logits.shape
    assert logits.stride(2) == 1, "the kernel reads rows of unit stride"
    num_rows, taken = num_requests * num_depths, ids.shape[2]
    if not num_rows:
        return
    num_splits = choose_splits(num_rows, vocabulary) if num_splits is None else num_splits
    kept = triton.next_power_of_2(taken)
    assert kept <= lanes, "a split's candidates are the best of its lanes"
    span = _span(num_splits, vocabulary, lanes)
    keys = torch.empty((num_rows, num_splits, kept), dtype=torch.int64, device=logits.device)
    sums = torch.empty((num_rows, num_splits, 2), dtype=torch.float32, device=logits.device)
    q_temperature = logits if temperature is None else temperature.contiguous()
    _scan_kernel[(num_splits, num_depths, num_requests)](
        logits,
        q_temperature,
        keys,
        sums,
        logits.stride(0),
        logits.stride(1),
        vocabulary,
        span,
        D=num_depths,
        M=kept,
        BLOCK=lanes,
        ROUNDS=ROUNDS,
        COLUMN=triton.next_power_of_2(span // lanes),
        HAS_TEMPERATURE=temperature is not None,
        num_warps=4,
    )
    _merge_kernel[(num_rows,)](
        keys,
        sums,
        q_temperature,
        log_probs,
        ids,
        num_splits,
        D=num_depths,
        M=kept,
        TAKEN=taken,
        BLOCK_S=triton.next_power_of_2(num_splits),
        BLOCK_K=triton.next_power_of_2(num_splits * kept),
        HAS_TEMPERATURE=temperature is not None,
        num_warps=1,
    )
