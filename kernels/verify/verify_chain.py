"""Rejection sampling of a chain of draft tokens: the number accepted, and one token from the target after them.

Computes: reference.verify_chain. In row i < k of a request, draft token d is accepted with min(1, p(d) / q(d)). At the first
rejection a token is drawn from norm(max(0, p − q)), after k acceptances one from p. p is the softmax of the target's logits
over the temperature; at temperature 0 d is accepted if it is the most likely token. q is one-hot at d (greedy drafts) or, given
draft logits, their softmax over the draft temperature; 0 there means one-hot for that request. A draft outside 0 … V − 1 (a
placeholder) is never accepted and takes nothing off p.

How: (1) a program a (row, chunk of the vocabulary) writes the chunk's maximum and Σ exp, without d's own share if q is one-hot.
The remainder is the residual's mass, without cancellation. The last program of a row to arrive merges them and judges the
draft. A rejection is posted, and programs of later rows that see it return without reading. Rows are the slowest grid
dimension, so row 0 of all requests comes first. (2) Only for full q: the residual's mass in each chunk of the rejected row. (3)
One program a request draws a chunk by the masses and a token in that chunk (races, see sampling.py). [B, K, V] probabilities
are never stored.

Moves: one-hot q: (Σ rows, k + 1 each)·V·sizeof(logits) at most, + B·8,192·sizeof for step 3; full q: twice that + 2·B·V·sizeof
for step 2. The floor is the rows up to each request's rejection, once, at copy bandwidth. How near the early exit comes to it
depends on how the GPU orders programs: not measured.
Its time on an H200 is in docs/gpu.md.
Layout: unit stride in V (16 bytes a load if V and the other strides are multiples of 16, else one number). Target logits are
[B, K + 1, V], or [R, V] with request b's rows at first_rows[b] … + k_b (vLLM's ragged batch). Logits are after penalties and
top-k/top-p masks (−inf), before the temperature.
Seeds: row i draws from (seed, positions[b] + i): see sampling.py. A request's result doesn't depend on its batch.
CUDA graphs: grids depend on shapes only, nothing is read back; pass `out` for fixed addresses.
Source: arXiv 2211.17192, algorithm 1; arXiv 2302.01318, algorithm 2; rules from vLLM's v1/sample/rejection_sampler.py.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from honed.kernels.verify import reference
from honed.kernels.verify.sampling import MAX_VOCAB, VOCAB_CHUNK

try:
    import triton
except ImportError:
    triton = None
else:
    from honed.kernels.verify.verify_chain_device import emit_kernel, residual_kernel, rows_kernel

ROWS_WARPS = {False: 2, True: 8}
"""Warps of a program of a row's chunk, by whether q is full: the fastest of 2, 4, 8 and 16 in one sweep on an H200 (193, 220
and 353 µs)."""
EMIT_WARPS = 16
"""Warps of a request's program."""


class ChainVerdict(NamedTuple):
    """Result for the drafts."""

    num_accepted: torch.Tensor  # [B] int32, bonus excluded
    tokens: torch.Tensor  # [B, K + 1] int32: accepted drafts, then the bonus token, then −1
    bonus_token_ids: torch.Tensor  # [B] int32


def verify_chain(
    target_logits: torch.Tensor,  # [B, K + 1, V], or [R, V] with first_rows
    draft_tokens: torch.Tensor,  # [B, K] integers
    num_draft_tokens: torch.Tensor,  # [B] integers, 0 ≤ k ≤ K
    temperature: torch.Tensor,  # [B] float
    seeds: torch.Tensor,  # [B] int64
    positions: torch.Tensor,  # [B] int64: sequence position of the first emitted token
    *,
    first_rows: torch.Tensor | None = None,  # [B] integers: the kernel doesn't check that rows exist
    draft_logits: torch.Tensor | None = None,  # [B, K, V]; for probabilities: their logarithm, and a draft temperature of 1
    draft_temperature: torch.Tensor | None = None,  # [B] float; None: `temperature`
    out: ChainVerdict | None = None,
) -> ChainVerdict:
    """Judge each request's draft tokens; Triton on a GPU, its plain twin elsewhere.

    The emitted tokens are distributed as the target's own samples, whatever q is, if the drafts were drawn from it. A row
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
            empty((num_requests,), dtype=torch.int32),
            empty((num_requests, depth + 1), dtype=torch.int32),
            empty((num_requests,), dtype=torch.int32),
        )
    _verify_chain(
        target_logits,
        draft_tokens,
        num_draft_tokens,
        temperature,
        seeds,
        positions,
        first_rows,
        draft_logits,
        draft_temperature,
        *out,
        VOCAB_CHUNK,
    )
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
    out = ChainVerdict(num_accepted, tokens, bonus)
    drafts = (draft_tokens, num_draft_tokens, temperature, seeds, positions, first_rows, draft_logits, draft_temperature)
    if target_logits.is_cuda:
        launch(target_logits, *drafts, out, chunk)
        return
    for made, place in zip(reference.verify_chain(target_logits, *drafts, chunk), out, strict=True):
        place.copy_(made)


@_verify_chain.register_fake
def _(*_: Any) -> None:
    return None


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
    q_temperature = (
        None if draft_logits is None else (temperature if draft_temperature is None else draft_temperature).contiguous()
    )
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
        "CHUNK": chunk,
        "CHUNKS": triton.next_power_of_2(num_chunks),
        "IS_RAGGED": first_rows is not None,
    }
    is_full = draft_logits is not None
    rows_warps, emit_warps = (max(1, min(most, chunk // 512)) for most in (ROWS_WARPS[is_full], EMIT_WARPS))
    rows_kernel[(num_chunks * num_requests, depth + 1)](
        target_logits,
        draft_logits,
        draft_tokens,
        num_draft_tokens,
        temperature,
        q_temperature,
        seeds,
        positions,
        first_rows,
        stats,
        arrived,
        breaks,
        *strides,
        IS_FULL_Q=is_full,
        **options,
        num_warps=rows_warps,
    )
    if is_full:
        residual_kernel[(num_chunks * num_requests,)](
            target_logits,
            draft_logits,
            draft_tokens,
            num_draft_tokens,
            temperature,
            q_temperature,
            first_rows,
            stats,
            breaks,
            residual,
            *strides,
            **options,
            num_warps=rows_warps,
        )
    emit_kernel[(num_requests,)](
        target_logits,
        draft_logits,
        draft_tokens,
        num_draft_tokens,
        temperature,
        q_temperature,
        seeds,
        positions,
        first_rows,
        stats,
        breaks,
        residual,
        *out,
        *strides,
        TOKENS=triton.next_power_of_2(depth + 1),
        IS_FULL_Q=is_full,
        **options,
        num_warps=emit_warps,
    )


def _unit_stride(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
