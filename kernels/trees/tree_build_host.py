"""The trees of `tree_build` from a heap, one request after the other: on a CPU some thirty calls of PyTorch a node cost more.

Ties included, they are `reference.tree_build`'s: the same float64 sums in the same order; equal scores are ordered by depth,
then by the path of ranks.
"""

from __future__ import annotations

import heapq
import math

import torch

from honed.kernels.trees.reference import ROOT, DraftTrees

_LOW_32, _SIGN, _WORD = 0xFFFF_FFFF, 1 << 31, 32


def build_on_host(
    log_probs: torch.Tensor,  # [B, D, m] or [B, D, P, m]
    ids: torch.Tensor,  # the same
    budgets: torch.Tensor,  # [B]
    candidates: torch.Tensor | None,  # [B, D, P, m]
    trees: DraftTrees,
) -> None:
    """Fill `trees`; arguments as `tree_build`."""
    has_rows = log_probs.ndim == 4
    most, num_words = trees.tokens.shape[1], trees.row_masks.shape[2]
    scores_of, ids_of = (part if has_rows else part[:, :, None] for part in (log_probs, ids))
    rows_of = None if candidates is None else candidates.tolist()
    made = [
        _build(of_request, tokens, None if rows_of is None else rows_of[b], min(budget, most))
        for b, (of_request, tokens, budget) in enumerate(
            zip(scores_of.double().tolist(), ids_of.tolist(), budgets.tolist(), strict=True)
        )
    ]
    if not made:
        return
    none = (0, 0, ROOT, 0)
    columns = zip(*(zip(*nodes, *[none] * (most - len(nodes)), strict=True) for nodes, _ in made), strict=True)
    for part, column in zip(trees[:4], columns, strict=True):
        part.copy_(torch.tensor(column, dtype=part.dtype))
    for b, (nodes, masks) in enumerate(made):
        trees.num_nodes[b] = len(nodes)
        words = [[_signed(mask >> _WORD * word & _LOW_32) for word in range(num_words)] for mask in masks]
        trees.row_masks[b] = 0
        trees.row_masks[b, : len(masks)] = torch.tensor(words, dtype=torch.int32)


def _signed(word: int) -> int:
    return (word ^ _SIGN) - _SIGN


def _build(
    log_probs: list[list[list[float]]],  # D x P x m
    ids: list[list[list[int]]],
    candidates: list[list[list[int]]] | None,
    budget: int,
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Nodes as (token, rank, parent, depth), and what each row attends to as bits, the anchor's first."""
    heap: list[tuple[float, int, tuple[int, ...], int, int, float]] = []  # −score, depth, path, parent, row, score above
    nodes: list[tuple[int, int, int, int]] = []
    masks = [1]

    def push(depth: int, path: tuple[int, ...], parent: int, row: int, above: float) -> None:
        if depth < len(log_probs) and path[-1] < len(log_probs[depth][row]):
            score = above + log_probs[depth][row][path[-1]]
            if math.isfinite(score):
                heapq.heappush(heap, (-score, depth, path, parent, row, above))

    push(0, (0,), ROOT, 0, 0.0)
    while heap and len(nodes) < budget:
        cost, depth, path, parent, row, above = heapq.heappop(heap)
        node, rank = len(nodes), path[-1]
        nodes.append((ids[depth][row][rank], rank, parent, depth + 1))
        masks.append(masks[parent + 1] | 2 << node)
        push(depth, (*path[:-1], rank + 1), parent, row, above)
        push(depth + 1, (*path, 0), node, 0 if candidates is None else candidates[depth][row][rank], -cost)
    return nodes, masks
