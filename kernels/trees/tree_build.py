"""Best-first draft trees of a whole batch, one program a request, without synchronising with the host.

Computes: reference.tree_build, ties included: the same float64 sums in the same order. Nodes are admitted one after the other.
The heap has one slot a node, in registers: the node's next child. So popping the best is one reduction over (score, key, slot)
and pushing is two writes. Ancestor masks come after the last node, by pointer jumping (log₂ D gathers a word).
Moves: B·(D·m·8 + N·(16 + 4·W)) bytes, some 0.1 MB at batch 64, budget 32, top-8 of 15 depths: negligible. The floor is latency,
N dependent reductions of a warp. The warp is alone in its program, so none of them waits at a barrier.
A next token's probability may depend on the token before (`candidates`), as a DFlash2 drafter's does: the table then has a row
for each candidate of the depth above.
Layout: `log_probs` and `ids` [B, D, m] or [B, D, P, m] (made contiguous), at most 16 depths, candidates and predecessors, since
a path is 4 bits a depth.
Its time on an H200 is in docs/gpu.md.
Source: arXiv 2604.12989 (DDTree), Algorithm 1.
"""

from __future__ import annotations

from typing import Any

import torch

from honed.kernels.trees.reference import MAX_CANDIDATES, MAX_DEPTHS, DraftTrees, words_of
from honed.kernels.trees.tree_build_host import build_on_host

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_NODES = 1024

if triton is not None:

    @triton.jit
    def _better(score, key, place, other_score, other_key, other_place):  # type: ignore[no-untyped-def]
        is_first = (score > other_score) | ((score == other_score) & (key < other_key))
        return (
            tl.where(is_first, score, other_score),
            tl.where(is_first, key, other_key),
            tl.where(is_first, place, other_place),
        )

    @triton.jit  # type: ignore[untyped-decorator]
    def _log_prob(p_table, depth, row, rank, D: tl.constexpr, P: tl.constexpr, M: tl.constexpr):  # type: ignore[no-untyped-def]
        """Log-probability of the candidate `rank` below a node of this depth and row; −inf if there is none."""
        at = (depth * P + row) * M + rank
        return tl.load(p_table + at, mask=(depth < D) & (rank < M), other=float("-inf")).to(tl.float64)

    @triton.jit
    def _finite(b_x):  # type: ignore[no-untyped-def]
        return tl.where((b_x > float("-inf")) & (b_x < float("inf")), b_x, float("-inf"))

    @triton.jit  # type: ignore[untyped-decorator]
    def _tree_build_kernel(  # type: ignore[no-untyped-def]
        log_probs_ptr,
        ids_ptr,
        candidates_ptr,
        budgets_ptr,
        tokens_ptr,
        ranks_ptr,
        parents_ptr,
        depths_ptr,
        masks_ptr,
        num_nodes_ptr,
        N: tl.constexpr,
        D: tl.constexpr,
        P: tl.constexpr,
        M: tl.constexpr,
        W: tl.constexpr,
        BLOCK: tl.constexpr,
        BLOCK_W: tl.constexpr,
        JUMPS: tl.constexpr,
    ):
        i_b = tl.program_id(0).to(tl.int64)
        o_n = tl.arange(0, BLOCK)
        p_table = log_probs_ptr + i_b * D * P * M
        p_ids, p_candidates = ids_ptr + i_b * D * P * M, candidates_ptr + i_b * D * P * M
        budget = tl.minimum(tl.load(budgets_ptr + i_b), N).to(tl.int32)

        # Slot 0 is the anchor's next child, slot n + 1 node n's; the last node needs none.
        ROOT_KEY: tl.constexpr = -(2**63)
        DEPTH: tl.constexpr = 2**60
        b_above = tl.zeros([BLOCK], tl.float64)
        b_key = tl.full([BLOCK], ROOT_KEY, tl.int64)
        b_rank = tl.zeros([BLOCK], tl.int32)
        b_row = tl.zeros([BLOCK], tl.int32)
        first = _finite(tl.load(p_table).to(tl.float64))
        b_next = tl.where(o_n == 0, first, float("-inf"))
        b_parent = tl.full([BLOCK], -1, tl.int32)
        b_ranks = tl.zeros([BLOCK], tl.int32)
        b_rows = tl.zeros([BLOCK], tl.int32)
        b_depth = tl.zeros([BLOCK], tl.int32)

        num = 0
        while num < budget:
            score, key, place = tl.reduce((b_next, b_key, (o_n * 16 + b_rank) * P + b_row), 0, _better)
            if score > float("-inf"):
                slot, rank, row = place // (16 * P), place // P % 16, place % P
                depth = (key >> 60).to(tl.int32) + 8
                path = key & (DEPTH - 1)
                is_new = o_n == num
                own_row = 0
                if P > 1:
                    own_row = tl.load(p_candidates + (depth * P + row) * M + rank).to(tl.int32)
                    b_rows = tl.where(is_new, row, b_rows)
                b_parent = tl.where(is_new, slot - 1, b_parent)
                b_ranks = tl.where(is_new, rank, b_ranks)
                b_depth = tl.where(is_new, depth + 1, b_depth)
                num += 1
                # The sibling takes the slot, the first child a new one.
                is_slot, is_child = o_n == slot, o_n == num
                b_sibling = _finite(b_above + _log_prob(p_table, depth, row, rank + 1, D, P, M))
                longer = path * 16 + rank  # wraps at the last depth, which has no children
                child = _finite(score + _log_prob(p_table, depth + 1, own_row, 0, D, P, M))
                b_next = tl.where(is_slot, b_sibling, tl.where(is_child, child, b_next))
                b_rank = tl.where(is_slot, rank + 1, b_rank)
                b_above = tl.where(is_child, score, b_above)
                if P > 1:
                    b_row = tl.where(is_child, own_row, b_row)
                b_key = tl.where(is_child, (depth - 7).to(tl.int64) * DEPTH + longer, b_key)
            else:
                budget = num

        m_n, is_node = o_n < N, o_n < num
        b_token = tl.load(p_ids + ((b_depth - 1) * P + b_rows) * M + b_ranks, mask=is_node, other=0)
        tl.store(num_nodes_ptr + i_b, num)
        tl.store(tokens_ptr + i_b * N + o_n, b_token.to(tl.int32), mask=m_n)
        tl.store(ranks_ptr + i_b * N + o_n, b_ranks, mask=m_n)
        tl.store(parents_ptr + i_b * N + o_n, b_parent, mask=m_n)
        tl.store(depths_ptr + i_b * N + o_n, b_depth, mask=m_n)

        p_masks = masks_ptr + i_b * (N + 1) * W
        o_w = tl.arange(0, BLOCK_W)
        tl.store(p_masks + o_w, tl.where(o_w == 0, 1, 0), mask=o_w < W)
        for i_w in range(W):
            b_word = tl.where(is_node & ((o_n + 1) // 32 == i_w), 1 << ((o_n + 1) % 32), 0)
            b_up = b_parent
            for _ in tl.static_range(JUMPS):  # after k jumps: the nearest 2^k on the way up
                o_up = tl.maximum(b_up, 0)
                b_word |= tl.where(b_up >= 0, tl.gather(b_word, o_up, 0), 0)
                b_up = tl.where(b_up >= 0, tl.gather(b_up, o_up, 0), -1)
            b_word |= tl.where(is_node & (i_w == 0), 1, 0)
            tl.store(p_masks + (o_n + 1) * W + i_w, b_word, mask=m_n)


def allocate(num_requests: int, max_nodes: int, device: torch.device | str) -> DraftTrees:
    """Allocate the trees of a batch, contents unset."""

    def ints(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    tokens, ranks, parents, depths = (ints(num_requests, max_nodes) for _ in range(4))
    masks = ints(num_requests, max_nodes + 1, words_of(max_nodes))
    return DraftTrees(tokens, ranks, parents, depths, masks, ints(num_requests))


def tree_build(
    log_probs: torch.Tensor,  # [B, D, m] or, with `candidates`, [B, D, P, m]; float32 or float64, most likely first
    ids: torch.Tensor,  # the same
    budgets: torch.Tensor,  # [B]
    max_nodes: int,  # N: capacity, and the highest possible budget
    *,
    candidates: torch.Tensor | None = None,  # [B, D, P, m]
) -> DraftTrees:
    """Build every request's best tree of at most min(its budget, N) nodes; Triton on a GPU, its plain twin elsewhere.

    `top_candidates` makes `log_probs` and `ids` from logits. The order of candidates isn't
    checked; one that isn't finite is never drafted.

    Args:
        candidates: each token's place among its depth's P candidates. The children of a node at place p are row p of the depth
            below; those of the anchor are row 0.

    Raises:
        ValueError: shapes don't fit each other, or there are more depths, candidates or nodes than a key has room for.
    """
    shape = tuple(log_probs.shape)
    if candidates is not None:
        if len(shape) != 4 or candidates.shape != shape:
            raise ValueError(
                f"tree_build: log-probabilities {list(shape)} and candidates {list(candidates.shape)} aren't both [B, D, P, m]"
            )
        if not 1 <= shape[2] <= MAX_CANDIDATES:
            raise ValueError(f"tree_build: {shape[2]} predecessors, but it takes 1 to {MAX_CANDIDATES}")
    if len(shape) != (3 if candidates is None else 4) or ids.shape != shape or budgets.shape != shape[:1]:
        raise ValueError(
            f"tree_build: log-probabilities {list(shape)}, ids {list(ids.shape)} and budgets {list(budgets.shape)} don't fit: "
            "they are [B, D, m], the same, and [B]"
        )
    limits = (("depths", shape[1], MAX_DEPTHS), ("candidates", shape[-1], MAX_CANDIDATES), ("nodes", max_nodes, MAX_NODES))
    for what, is_asked, most in limits:
        if not 1 <= is_asked <= most:
            raise ValueError(f"tree_build: {is_asked} {what}, but it takes 1 to {most}: cut the candidates, or the budget")
    trees = allocate(shape[0], max_nodes, log_probs.device)
    _tree_build_op(log_probs, ids, budgets, candidates, *trees)
    return trees


@torch.library.custom_op("honed::tree_build", mutates_args=("tokens", "ranks", "parents", "depths", "row_masks", "num_nodes"))
def _tree_build_op(
    log_probs: torch.Tensor,
    ids: torch.Tensor,
    budgets: torch.Tensor,
    candidates: torch.Tensor | None,
    tokens: torch.Tensor,
    ranks: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    row_masks: torch.Tensor,
    num_nodes: torch.Tensor,
) -> None:
    trees = DraftTrees(tokens, ranks, parents, depths, row_masks, num_nodes)
    if log_probs.is_cuda:
        launch(log_probs, ids, budgets, trees, candidates)
    else:
        build_on_host(log_probs, ids, budgets, candidates, trees)


@_tree_build_op.register_fake
def _(*_: Any) -> None:
    """Nothing is returned: the shapes are the buffers'."""


def launch(
    log_probs: torch.Tensor,
    ids: torch.Tensor,
    budgets: torch.Tensor,
    trees: DraftTrees,
    candidates: torch.Tensor | None = None,
) -> None:
    """Run the Triton kernel itself (on a GPU, or under Triton's interpreter) into `trees`; arguments as `tree_build`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    num_requests, num_depths, num_candidates = log_probs.shape[0], log_probs.shape[1], log_probs.shape[-1]
    max_nodes, num_words = trees.tokens.shape[1], trees.row_masks.shape[2]
    assert all(part.is_contiguous() for part in trees), "the kernel writes rows without gaps"
    if not num_requests:
        return
    block = triton.next_power_of_2(max_nodes)
    _tree_build_kernel[(num_requests,)](
        log_probs.contiguous(),
        ids.contiguous(),
        ids if candidates is None else candidates.contiguous(),
        budgets.contiguous(),
        *trees,
        N=max_nodes,
        D=num_depths,
        P=1 if candidates is None else candidates.shape[2],
        M=num_candidates,
        W=num_words,
        BLOCK=block,
        BLOCK_W=triton.next_power_of_2(num_words),
        JUMPS=(num_depths - 1).bit_length(),
        num_warps=max(1, block // 256),
    )
