"""The walk through a verified draft tree: from the anchor, draw the target's own token and descend while a child has it.

Computes: reference.verify_tree. Every emitted token is a draw from the target's distribution at its node (the most likely token
at temperature 0), whatever the tree is: exact at any temperature. A node descends with the total probability of its children's
tokens. No exact scheme can achieve more with children that weren't themselves drawn at random.

How: (1) a program a (row, chunk of the vocabulary) writes the chunk's maximum and Σ exp (its most likely token if greedy). The
last program of a row to arrive draws the row's token by two races (sampling.py), the second over one chunk that it reads again,
and posts it. If a program's parent has posted a token other than the node's own, or is itself off the walk, it posts "off" and
returns without reading. Rows are the slowest grid dimension and parents precede children, so most rows off the walk are
skipped; the others only cost time. (2) One program a request walks.

Moves: at most B·(N + 1)·(V + 8,192)·sizeof(logits), less what is skipped; the floor is the rows of the path and the anchor's,
once, at copy bandwidth. How near the skipping comes to it depends on how the GPU orders programs: not measured.
Its time on an H200 is in docs/gpu.md.
Layout: unit stride in V (16 bytes a load if V and the other strides are multiples of 16, else one number). Logits are [B, N +
1, V] or [R, V] with request b's rows from first_rows[b] on; row 0 is the anchor's, row n + 1 node n's. Logits are after
penalties and masks, before the temperature. Trees are as from tree_build: parents of nodes, −1 for children of the anchor;
depths from 1, 0 for no node. A child whose parent isn't an earlier node counts as none. Of siblings with equal tokens the first
counts.
Seeds: a row's draw takes (seed, positions[b] + depth). So the text equals, token for token, that of plain sampling with the
same draws, whatever was drafted. Depths must be those of the tree.
CUDA graphs: grids depend on shapes only, nothing is read back; pass `out` for fixed addresses.
Source: SpecInfer, arXiv 2305.09781, section 4.3; DDTree, arXiv 2604.12989.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from honed.kernels.verify import reference
from honed.kernels.verify.sampling import MAX_VOCAB, VOCAB_CHUNK

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


class TreeVerdict(NamedTuple):
    """Result for the tree."""

    num_accepted: torch.Tensor  # [B] int32, bonus excluded
    path: torch.Tensor  # [B, max_depth] int32: rows of the accepted nodes (node n's is n + 1), rising, then −1
    tokens: torch.Tensor  # [B, max_depth + 1] int32: accepted tokens, then the bonus token, then −1
    bonus_token_ids: torch.Tensor  # [B] int32


ROWS_WARPS = 4
"""Warps of a program of a row's chunk: the fastest of 4, 8 and 16 in one sweep on an H200 (193 and 221 µs)."""

if triton is not None:
    from honed.kernels.verify.sampling import (
        C_GREEDY_BELOW,
        clean_logits,
        peak_and_mass,
        race_of_chunks,
        race_within,
        total_of,
    )
    from honed.kernels.verify.walk_tree import walk_down

    OFF = tl.constexpr(-1)
    """Posted for a row that the walk can't reach; 0: nothing posted yet; t + 1: the target's token there is t."""

    @triton.jit  # type: ignore[untyped-decorator]
    def _rows_kernel(
        logits_ptr: tl.tensor,
        token_ptr: tl.tensor,
        parent_ptr: tl.tensor,
        depth_ptr: tl.tensor,
        temperature_ptr: tl.tensor,
        seed_ptr: tl.tensor,
        position_ptr: tl.tensor,
        first_row_ptr: tl.tensor,
        stat_ptr: tl.tensor,
        arrived_ptr: tl.tensor,
        posted_ptr: tl.tensor,
        stride_b: tl.tensor,
        stride_r: tl.tensor,
        num_requests: tl.tensor,
        num_nodes: tl.tensor,
        vocab: tl.tensor,
        num_chunks: tl.tensor,
        CHUNK: tl.constexpr,
        CHUNKS: tl.constexpr,
        IS_RAGGED: tl.constexpr,
    ) -> None:
        i_c, i_b, i_r = tl.program_id(0) % num_chunks, (tl.program_id(0) // num_chunks).to(tl.int64), tl.program_id(1)
        rows = i_b * (num_nodes + 1)
        node = i_b * num_nodes + i_r - 1
        depth = tl.load(depth_ptr + node, mask=i_r > 0, other=0).to(tl.int64)
        if i_r > 0:
            parent_row = tl.load(parent_ptr + node).to(tl.int32) + 1
            if (depth <= 0) | (parent_row < 0) | (parent_row >= i_r):
                tl.store(posted_ptr + rows + i_r, OFF)
                return
            above = tl.load(posted_ptr + rows + parent_row, volatile=True)
            if (above == OFF) | ((above > 0) & (above - 1 != tl.load(token_ptr + node))):
                tl.store(posted_ptr + rows + i_r, OFF)
                return
        temperature = tl.load(temperature_ptr + i_b).to(tl.float32)
        is_sampled = temperature >= C_GREEDY_BELOW
        inverse = tl.where(is_sampled, 1.0 / temperature, 1.0)
        row = i_b * stride_b + i_r * stride_r
        if IS_RAGGED:
            row += tl.load(first_row_ptr + i_b).to(tl.int64) * stride_r
        o_v = i_c * CHUNK + tl.arange(0, CHUNK)
        b_x = clean_logits(logits_ptr + row, o_v, o_v < vocab, inverse)
        if is_sampled:
            peak, mass = peak_and_mass(b_x)
        else:
            peak = tl.max(b_x, axis=0)
            mass = (i_c * CHUNK + tl.argmax(b_x, axis=0)).to(tl.float32)  # the token's id
        stat = (rows + i_r) * num_chunks
        plane = num_requests * (num_nodes + 1) * num_chunks
        tl.store(stat_ptr + stat + i_c, peak)
        tl.store(stat_ptr + plane + stat + i_c, mass)

        # All of this program's stores, then the ticket: the program with the last ticket sees all stores.
        tl.debug_barrier()
        if tl.atomic_add(arrived_ptr + rows + i_r, 1, sem="acq_rel") != num_chunks - 1:
            return
        o_c = tl.arange(0, CHUNKS)
        m_c = o_c < num_chunks
        b_peak = tl.load(stat_ptr + stat + o_c, mask=m_c, other=float("-inf"), cache_modifier=".cg")
        b_mass = tl.load(stat_ptr + plane + stat + o_c, mask=m_c, other=0.0, cache_modifier=".cg")
        if is_sampled:
            seed = tl.load(seed_ptr + i_b)
            position = tl.load(position_ptr + i_b).to(tl.int64) + depth
            base, _ = total_of(b_peak, b_mass)
            winner, top = race_of_chunks(b_peak, b_mass * tl.exp(b_peak - base), seed, position, o_c)
            token = race_within(
                logits_ptr + row, winner * CHUNK, vocab, -1, inverse, top, seed, position, CHUNK, min(CHUNK, 1024)
            )
        else:
            token = tl.max(tl.where(o_c == tl.argmax(b_peak, axis=0), b_mass, 0.0), axis=0).to(tl.int32)
        tl.store(posted_ptr + rows + i_r, token + 1)

    @triton.jit  # type: ignore[untyped-decorator]
    def _walk_kernel(
        token_ptr: tl.tensor,
        parent_ptr: tl.tensor,
        depth_ptr: tl.tensor,
        posted_ptr: tl.tensor,
        num_accepted_ptr: tl.tensor,
        path_ptr: tl.tensor,
        out_ptr: tl.tensor,
        bonus_ptr: tl.tensor,
        num_nodes: tl.tensor,
        max_depth: tl.tensor,
        ROWS: tl.constexpr,
        PATH: tl.constexpr,
    ) -> None:
        i_b = tl.program_id(0).to(tl.int64)
        o_r = tl.arange(0, ROWS)
        o_n = i_b * num_nodes + o_r - 1
        m_n = (o_r > 0) & (o_r <= num_nodes)
        m_n &= tl.load(depth_ptr + o_n, mask=m_n, other=0) > 0
        b_parent_row = tl.load(parent_ptr + o_n, mask=m_n, other=-2).to(tl.int32) + 1
        b_token = tl.load(token_ptr + o_n, mask=m_n, other=-1).to(tl.int32)
        o_p = tl.arange(0, PATH)
        accepted, choice, b_path, b_out = walk_down(
            b_parent_row, b_token, posted_ptr + i_b * (num_nodes + 1), max_depth, 1, ROWS, PATH
        )
        tl.store(path_ptr + i_b * max_depth + o_p, b_path, mask=o_p < max_depth)
        tl.store(out_ptr + i_b * (max_depth + 1) + o_p, b_out, mask=o_p <= max_depth)
        tl.store(num_accepted_ptr + i_b, accepted)
        tl.store(bonus_ptr + i_b, choice)


def verify_tree(
    target_logits: torch.Tensor,  # [B, N + 1, V], or [R, V] with first_rows
    tokens: torch.Tensor,  # [B, N] integers
    parents: torch.Tensor,  # [B, N] integers, −1: the anchor
    depths: torch.Tensor,  # [B, N] integers, from 1; 0: no node
    temperature: torch.Tensor,  # [B] float
    seeds: torch.Tensor,  # [B] int64
    positions: torch.Tensor,  # [B] int64: sequence position of the first emitted token
    max_depth: int,
    *,
    first_rows: torch.Tensor | None = None,  # [B] integers: the kernel doesn't check that rows exist
    out: TreeVerdict | None = None,
) -> TreeVerdict:
    """Walk each request's tree; Triton on a GPU, its plain twin elsewhere.

    The walk ends at `max_depth` at the latest, with the target's token there as the bonus. A row without a finite logit emits
    token 0; NaN counts as −inf.

    Raises:
        ValueError: shapes don't fit each other.
    """
    num_requests, num_nodes = tokens.shape if tokens.dim() == 2 else (0, 0)
    vocab = target_logits.shape[-1]
    if tokens.dim() != 2 or parents.shape != tokens.shape or depths.shape != tokens.shape:
        raise ValueError(
            f"verify_tree: tokens {list(tokens.shape)}, parents {list(parents.shape)} and depths {list(depths.shape)} "
            "must all be [B, N]"
        )
    wanted = (num_requests, num_nodes + 1, vocab) if first_rows is None else (target_logits.shape[0], vocab)
    if tuple(target_logits.shape) != wanted or not 0 < vocab < MAX_VOCAB:
        raise ValueError(
            f"verify_tree: target_logits {list(target_logits.shape)} must be {list(wanted)} with a vocabulary of 1 … "
            f"{MAX_VOCAB - 1:,} (ragged [R, V] rows need first_rows)"
        )
    per_request = [temperature, seeds, positions, *([] if first_rows is None else [first_rows])]
    if any(x.shape != (num_requests,) for x in per_request) or max_depth < 0:
        raise ValueError(
            f"verify_tree: temperatures, seeds, positions, first rows must be [{num_requests}] as tokens says, not "
            f"{[list(x.shape) for x in per_request]}; max_depth {max_depth} must be 0 or more"
        )
    if out is None:
        shapes = ((num_requests,), (num_requests, max_depth), (num_requests, max_depth + 1), (num_requests,))
        out = TreeVerdict(*(tokens.new_empty(shape, dtype=torch.int32) for shape in shapes))
    _verify_tree(
        target_logits, tokens, parents, depths, temperature, seeds, positions, max_depth, first_rows, *out, VOCAB_CHUNK
    )
    return out


@torch.library.custom_op("honed::verify_tree", mutates_args=("num_accepted", "path", "emitted", "bonus"))
def _verify_tree(
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    max_depth: int,
    first_rows: torch.Tensor | None,
    num_accepted: torch.Tensor,
    path: torch.Tensor,
    emitted: torch.Tensor,
    bonus: torch.Tensor,
    chunk: int,
) -> None:
    out = TreeVerdict(num_accepted, path, emitted, bonus)
    inputs = (target_logits, tokens, parents, depths, temperature, seeds, positions, max_depth, first_rows)
    if target_logits.is_cuda:
        launch(*inputs, out, chunk)
        return
    for made, place in zip(reference.verify_tree(*inputs, chunk), out, strict=True):
        place.copy_(made)


@_verify_tree.register_fake
def _(*_: Any) -> None:
    return None


def launch(
    target_logits: torch.Tensor,
    tokens: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    temperature: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    max_depth: int,
    first_rows: torch.Tensor | None,
    out: TreeVerdict,
    chunk: int = VOCAB_CHUNK,
) -> None:
    """Run the Triton kernels themselves (on a GPU, or under Triton's interpreter); arguments as `verify_tree`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    num_requests, num_nodes = tokens.shape
    if not num_requests:
        return
    vocab, device = target_logits.shape[-1], target_logits.device
    if target_logits.stride(-1) != 1:
        target_logits = target_logits.contiguous()
    stride_b, stride_r = (0, target_logits.stride(0)) if first_rows is not None else target_logits.stride()[:2]
    tokens, parents, depths = tokens.contiguous(), parents.contiguous(), depths.contiguous()
    temperature, seeds, positions = temperature.contiguous(), seeds.contiguous(), positions.contiguous()
    first_rows = None if first_rows is None else first_rows.contiguous()
    assert all(x.is_contiguous() and x.dtype == torch.int32 for x in out), "results are contiguous int32"

    num_chunks = triton.cdiv(vocab, chunk)
    stats = torch.empty((2, num_requests, num_nodes + 1, num_chunks), dtype=torch.float32, device=device)
    counters = torch.zeros((2, num_requests, num_nodes + 1), dtype=torch.int32, device=device)
    _rows_kernel[(num_chunks * num_requests, num_nodes + 1)](
        target_logits,
        tokens,
        parents,
        depths,
        temperature,
        seeds,
        positions,
        first_rows,
        stats,
        counters[0],
        counters[1],
        stride_b,
        stride_r,
        num_requests,
        num_nodes,
        vocab,
        num_chunks,
        CHUNK=chunk,
        CHUNKS=triton.next_power_of_2(num_chunks),
        IS_RAGGED=first_rows is not None,
        num_warps=max(1, min(ROWS_WARPS, chunk // 512)),
    )
    _walk_kernel[(num_requests,)](
        tokens,
        parents,
        depths,
        counters[1],
        *out,
        num_nodes,
        max_depth,
        ROWS=triton.next_power_of_2(num_nodes + 1),
        PATH=triton.next_power_of_2(max_depth + 1),
        num_warps=1,
    )
