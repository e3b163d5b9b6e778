"""The walk down a tree: at each node it goes on to the child that the target itself has drawn there.

It draws nothing, so every emitted token is the target's own draw after its own ancestors: what is emitted is distributed as
without drafts, whatever the tree.
"""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

import torch

from honed.attach.events.step_log import TreeRound
from honed.attach.trees.tree_step import TreeStep
from honed.kernels.trees.reference import ROOT, DraftTrees
from honed.kernels.verify.walk_tree import walk_tree

# Letters: B requests, N nodes that a tree has room for, P most nodes on a path.


class Walk(NamedTuple):
    """Where walks went. Row 0 of a request is its anchor, row n + 1 its node n."""

    path: torch.Tensor  # [B, P] int64, rows of the accepted nodes, rising; −1 past them
    num_accepted: torch.Tensor  # [B] int64
    emitted: torch.Tensor  # [B, P + 1] int64: accepted tokens, then the one that no child has; −1 past them


def walk(trees: DraftTrees, num_nodes: torch.Tensor, drawn: torch.Tensor, max_depth: int) -> Walk:  # [B], [B, 1 + N]
    """Walk every tree by the target's draws.

    Args:
        num_nodes: verified nodes of each tree, its first ones.
        drawn: the token that the target drew at each row.
        max_depth: P.
    """
    return Walk(*walk_tree(trees.tokens, trees.parents, num_nodes, drawn, max_depth))


def order_of_rows(step: TreeStep, walked: Walk, num_rows: int) -> torch.Tensor:  # [T] int64
    """Order of a step's rows in which those of accepted paths come right after their anchors, as in a chain."""
    path, first = walked.path, step.first_row[:, None]
    order = torch.arange(num_rows, device=path.device)
    place = torch.arange(1, path.shape[1] + 1, device=path.device)
    order[torch.where(path > 0, first + place, first)] = torch.where(path > 0, first + path, first)
    return order


def describe(
    parents_of: torch.Tensor, ranks_of: torch.Tensor, num_nodes: torch.Tensor, paths: torch.Tensor
) -> list[TreeRound]:  # [B, N], [B, N], [B], [B, P]
    """Describe rounds by their trees and paths, on the host."""
    parents, ranks, found = parents_of.tolist(), ranks_of.tolist(), []
    for b, (count, path) in enumerate(zip(num_nodes.tolist(), paths.tolist(), strict=True)):
        nodes = [row - 1 for row in path if row > 0]
        chain, last = list[int](), ROOT
        for node in range(count):
            if parents[b][node] == last and ranks[b][node] == 0:
                chain.append(node)
                last = node
        common = (node == other for node, other in zip(nodes, chain, strict=False))
        found.append(TreeRound(nodes, len(chain), sum(takewhile(bool, common))))
    return found
