"""The trees that the next step verifies, from the drafter's logits."""

from __future__ import annotations

import torch

from honed.kernels.trees.reference import NUM_CANDIDATES, DraftTrees
from honed.kernels.trees.top_candidates import top_candidates
from honed.kernels.trees.tree_build import tree_build

GROWS = "honed_trees"
"""Attribute of a scheduler's output: whether trees are to be grown from what the drafter drafts in this step."""
MOST_FAILURES = 8
"""After more, an engine has no trees any more."""


def grow(
    logits: torch.Tensor,  # [B, D, V]
    temperature: torch.Tensor | None,  # [B]
    num_nodes: int,
    num_slots: int,  # N
) -> DraftTrees:
    """Grow each request's best tree of so many nodes at its temperature; None: greedy.

    Args:
        num_slots: nodes that a tree has room for. They and D are the same in each step: another number compiles other kernels.
    """
    log_probs, tokens = top_candidates(logits, min(NUM_CANDIDATES, logits.shape[-1]), temperature)
    return tree_build(log_probs, tokens, torch.full((len(logits),), num_nodes, device=logits.device), num_slots)
