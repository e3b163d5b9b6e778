"""What a micro-step minimises, over its blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from honed.recalib import losses
from honed.recalib.drafter import DFlashDrafter
from honed.recalib.sample import PackedSamples
from honed.recalib.training_settings import TrainingSettings

# Letters: T packed rows, N blocks, K draft positions, V vocabulary, H width.


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of one micro-step, on the drafter's device."""

    packed: PackedSamples
    anchors: Tensor  # [N] rows
    labels: Tensor  # [N, K]
    is_kept: Tensor  # [N] whether the drafter is to stay what its parent was there
    tokens: Tensor | None  # [N, K] what the drafter sees in place of masks; None: masks only
    is_masked: Tensor  # [N, K]

    def where(self, chosen: Tensor | slice) -> Blocks:  # [N] bool, or a stretch of them
        """Some of the blocks."""
        tokens = self.tokens[chosen] if self.tokens is not None else None
        return Blocks(
            self.packed, self.anchors[chosen], self.labels[chosen], self.is_kept[chosen], tokens, self.is_masked[chosen]
        )


class Objective:
    """The chosen loss on fresh blocks, the distance to the parent on kept ones."""

    def __init__(self, drafter: DFlashDrafter, parent: DFlashDrafter | None, settings: TrainingSettings) -> None:
        self._drafter, self._parent, self._settings = drafter, parent, settings

    def __call__(self, logits: Tensor, blocks: Blocks, context: Tensor) -> Tensor:  # [N, K, V], [T, H] -> []
        """Mean over blocks.

        Raises:
            ValueError: there are kept blocks and no parent.
        """
        is_kept = blocks.is_kept
        num_kept, num_blocks = int(is_kept.sum()), len(is_kept)
        total = logits.new_zeros(())
        if num_kept:
            distance = self._distance_to_parent(logits[is_kept], blocks.where(is_kept), context)
            total = total + self._settings.keep_weight * num_kept * distance
        if num_kept < num_blocks:
            total = total + (num_blocks - num_kept) * self._loss(logits[~is_kept], blocks.where(~is_kept))
        return total / num_blocks

    def _distance_to_parent(self, logits: Tensor, kept: Blocks, context: Tensor) -> Tensor:
        """KL(parent || drafter), weighted as the labels' losses are."""
        if self._parent is None:
            raise ValueError("kept samples need the parent drafter: give it to MicroTrainer")
        packed = kept.packed
        with torch.no_grad():
            features = context if packed.is_fused else self._parent.fuse(packed.features.float())
            goal = self._parent(features, packed.positions, packed.token_ids, kept.anchors, packed.segments)
        return losses.weighted_mean(losses.forward_kl(logits, goal), self._position_weights(kept))

    def _loss(self, logits: Tensor, blocks: Blocks) -> Tensor:
        """The weighted mean of the chosen loss; `losses` has the formulas.

        KL and its hybrid take the target's own distribution where its last hidden state was captured; the others, and the
        hybrid without it, what the target emitted.
        """
        name, labels = self._settings.loss, blocks.labels
        if name in ("kl", "hybrid") and blocks.packed.target_hidden is not None:
            per_token = losses.forward_kl if name == "kl" else losses.kl_tv_hybrid
            return losses.weighted_mean(per_token(logits, self._target_logits(blocks)), self._position_weights(blocks))
        surprise = losses.cross_entropy(logits, labels)  # [N, K]
        if name == "ce":
            return losses.weighted_mean(surprise, self._position_weights(blocks))
        if name == "hybrid":
            return losses.weighted_mean(losses.hybrid_on_labels(surprise), self._position_weights(blocks))
        right = torch.where(blocks.is_masked, torch.exp(-surprise), 1.0)
        if name == "dpace":
            return losses.weighted_mean(surprise, losses.dpace_weights(right) * blocks.is_masked)
        return losses.negative_acceptance_length(right).mean()

    def _position_weights(self, blocks: Blocks) -> Tensor:  # [N, K]
        """Falling with the position, and nothing for what was revealed."""
        weights = losses.position_weights(blocks.labels.shape[1], self._settings.decay_tokens)
        return weights.to(blocks.labels.device) * blocks.is_masked

    def _target_logits(self, blocks: Blocks) -> Tensor:  # [N, K, V]
        """What the target said of each position of the blocks."""
        assert blocks.packed.target_hidden is not None
        offsets = torch.arange(blocks.labels.shape[1], device=blocks.labels.device)
        rows = blocks.anchors[:, None] + offsets  # the target at row i tells token i + 1
        return F.linear(blocks.packed.target_hidden[rows].float(), self._drafter.lm_head)
