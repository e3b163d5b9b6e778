"""A built tree as the target's pass and the walk see it: the anchor as node 0, the drafted nodes after it.

`tree_build` counts drafted nodes only, and children of the anchor have parent −1; `verify_tree`, `compact_kv` and `pack_events`
count the anchor as node 0 and take −1 for "no node". Plain PyTorch: three small tensors, nothing read back, so it goes into
CUDA graphs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from honed.kernels.reference_trees import DraftTrees


class RootedTrees(NamedTuple):
    """Trees of a batch with their anchors; past a tree's last node parents are −1, tokens and depths 0."""

    tokens: torch.Tensor  # [B, N + 1] int32
    parents: torch.Tensor  # [B, N + 1] int32
    depths: torch.Tensor  # [B, N + 1] int32


def with_root(
    trees: DraftTrees,  # of N nodes
    anchor_token_ids: torch.Tensor,  # [B] integers
) -> RootedTrees:
    """Put each request's anchor before its nodes."""
    is_node = torch.arange(trees.parents.shape[1], device=trees.parents.device) < trees.num_nodes[:, None]
    parents = torch.where(is_node, trees.parents + 1, -1)
    return RootedTrees(
        torch.cat((anchor_token_ids[:, None].to(trees.tokens.dtype), trees.tokens), dim=1),
        torch.cat((torch.full_like(parents[:, :1], -1), parents), dim=1),
        torch.cat((torch.zeros_like(parents[:, :1]), trees.depths), dim=1),
    )
