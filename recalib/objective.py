"""What a micro-step minimises, over its blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from honed.kernels.block_loss import block_loss
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

    def where(self, chosen: Tensor) -> Blocks:  # [N] bool
        """Some of the blocks."""
        tokens = self.tokens[chosen] if self.tokens is not None else None
        return Blocks(
            self.packed, self.anchors[chosen], self.labels[chosen], self.is_kept[chosen], tokens, self.is_masked[chosen]
        )


class Objective:
    """The chosen loss on fresh blocks, the distance to the parent on kept ones."""

    def __init__(self, drafter: DFlashDrafter, parent: DFlashDrafter | None, settings: TrainingSettings) -> None:
        self._drafter, self._parent, self._settings = drafter, parent, settings

    def __call__(
        self, hidden: Tensor, blocks: Blocks, context: Tensor
    ) -> tuple[Tensor, Tensor]:  # [N, K, H], [T, H] -> [], [N, K]
        """Mean over blocks, and the tokens that the drafter would draft.

        Raises:
            ValueError: there are kept blocks and no parent.
        """
        is_kept = blocks.is_kept
        num_kept, num_blocks = int(is_kept.sum()), len(is_kept)
        total, drafts = hidden.new_zeros(()), torch.empty_like(blocks.labels)
        if num_kept:
            distance, drafts[is_kept] = self._distance_to_parent(hidden[is_kept], blocks.where(is_kept), context)
            total = total + self._settings.keep_weight * num_kept * distance
        if num_kept < num_blocks:
            loss, drafts[~is_kept] = self._loss(hidden[~is_kept], blocks.where(~is_kept))
            total = total + (num_blocks - num_kept) * loss
        return total / num_blocks, drafts

    def _distance_to_parent(self, hidden: Tensor, kept: Blocks, context: Tensor) -> tuple[Tensor, Tensor]:  # [], [N, K]
        """KL(parent || drafter), weighted as the labels' losses are, and the drafts."""
        if self._parent is None:
            raise ValueError("kept samples need the parent drafter: give it to MicroTrainer")
        packed = kept.packed
        with torch.no_grad():
            features = context if packed.is_fused else self._parent.fuse(packed.features.float())
            goal = self._parent.draft_hidden(features, packed.positions, packed.token_ids, kept.anchors, packed.segments)
        distance, drafts = self._per_token(hidden, goal=goal, goal_head=self._parent.lm_head, kind="kl")
        return losses.weighted_mean(distance, self._position_weights(kept)), drafts

    def _loss(self, hidden: Tensor, blocks: Blocks) -> tuple[Tensor, Tensor]:  # [], [N, K]
        """The weighted mean of the chosen loss, and the drafts; `losses` has the formulas.

        KL and its hybrid take the target's own distribution where its last hidden state was captured; the others, and the
        hybrid without it, what the target emitted.
        """
        name, labels = self._settings.loss, blocks.labels
        if name in ("kl", "hybrid") and blocks.packed.target_hidden is not None:
            offsets = torch.arange(labels.shape[1], device=labels.device)
            goal = blocks.packed.target_hidden[blocks.anchors[:, None] + offsets].float()  # row i tells token i + 1
            distance, drafts = self._per_token(hidden, goal=goal, kind=name)
            return losses.weighted_mean(distance, self._position_weights(blocks)), drafts
        surprise, drafts = self._per_token(hidden, labels=labels)
        if name == "ce":
            return losses.weighted_mean(surprise, self._position_weights(blocks)), drafts
        if name == "hybrid":
            return losses.weighted_mean(losses.hybrid_on_labels(surprise), self._position_weights(blocks)), drafts
        right = torch.where(blocks.is_masked, torch.exp(-surprise), 1.0)
        if name == "dpace":
            return losses.weighted_mean(surprise, losses.dpace_weights(right) * blocks.is_masked), drafts
        return losses.negative_acceptance_length(right).mean(), drafts

    def _per_token(
        self,
        hidden: Tensor,  # [N, K, H]
        *,
        labels: Tensor | None = None,  # [N, K]
        goal: Tensor | None = None,  # [N, K, H]
        goal_head: Tensor | None = None,  # [V, H]
        kind: str = "ce",
    ) -> tuple[Tensor, Tensor]:  # 2 x [N, K]
        """`block_loss` of every token, and the drafts."""
        made = block_loss(
            hidden.flatten(0, 1),
            self._drafter.lm_head,
            labels=None if labels is None else labels.flatten(),
            goal=None if goal is None else goal.flatten(0, 1),
            goal_head=goal_head,
            kind=kind,
        )
        return made.losses.view(hidden.shape[:2]), made.top.view(hidden.shape[:2])

    def _position_weights(self, blocks: Blocks) -> Tensor:  # [N, K]
        """Falling with the position, and nothing for what was revealed."""
        weights = losses.position_weights(blocks.labels.shape[1], self._settings.decay_tokens)
        return weights.to(blocks.labels.device) * blocks.is_masked
