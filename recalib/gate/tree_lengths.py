"""What draft trees would accept on captured text, without an engine.

A tree's walk emits the target's own draws, and those are the text. So it follows the text as far as the text is in the tree, at
any temperature. The trees are an engine's for a greedy request: grown best first from each depth's likeliest tokens. The first
nodes of a tree are themselves a tree, so one walk through the largest tells what smaller ones would have accepted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from honed.kernels.trees.reference import MAX_DEPTHS, DraftTrees
from honed.kernels.trees.tree_build import tree_build
from honed.kernels.verify.walk_tree import walk_tree
from honed.recalib.drafter.drafter import Candidates
from honed.recalib.gate.gate import TREE_SIZES

# Letters: N anchors, K draft positions, B nodes of the largest tree, S sizes.


def grow_trees(found: Candidates) -> DraftTrees:
    """Grow each anchor's tree of the largest size."""
    most, ids = TREE_SIZES[-1], found.ids[:, :MAX_DEPTHS]
    budgets = torch.full((len(ids),), most, device=ids.device)
    places = None if found.places is None else found.places[:, :MAX_DEPTHS]
    return tree_build(found.log_probs[:, :MAX_DEPTHS], ids, budgets, most, candidates=places)


def accepted_by_size(trees: DraftTrees, labels: Tensor, has_label: Tensor) -> Tensor:  # 2 x [N, K] -> [N, S]
    """Count the nodes that the text passes in each anchor's tree, for trees of each size."""
    text = torch.nn.functional.pad(torch.where(has_label, labels, -1), (0, 1), value=-1)  # [N, K + 1]
    depths = torch.nn.functional.pad(trees.depths.long(), (1, 0))  # [N, 1 + B], the anchor's is 0
    drawn = text.gather(1, depths)
    path, _, _ = walk_tree(trees.tokens, trees.parents, trees.num_nodes, drawn, labels.shape[1])  # rows, the anchor's is 0
    sizes = torch.tensor(TREE_SIZES, device=path.device)
    return ((path > 0)[:, :, None] & (path[:, :, None] <= sizes)).sum(1)
