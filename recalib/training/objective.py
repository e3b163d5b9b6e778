"""The loss of a micro-step: a sum over its blocks, so that it can be computed some blocks at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from honed.kernels.training.block_loss import block_loss
from honed.recalib.config.training import TrainingSettings
from honed.recalib.drafter.drafter import Drafter
from honed.recalib.samples.sample import PackedSamples
from honed.recalib.training import losses

# Letters: T packed rows, N blocks, K draft positions, W words that are drafted, H width.


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of one micro-step, or some of them, on the drafter's device."""

    packed: PackedSamples
    anchors: Tensor  # [N] rows
    labels: Tensor  # [N, K]
    words: Tensor  # [N, K] of the labels; −1: the drafter can't draft it
    is_kept: Tensor  # [N] whether the drafter should stay like its parent there
    has_label: Tensor  # [N, K] whether it is learned
    weights: Tensor  # [N, K] each token's part of the whole micro-step's loss
    share: float  # each block's part of the micro-step

    @property
    def previous(self) -> Tensor:  # [N, K]
        """The token before each label."""
        return torch.cat((self.packed.token_ids[self.anchors, None], self.labels[:, :-1]), dim=1)

    def where(self, chosen: Tensor | slice) -> Blocks:  # [N] bool, or places
        """Select some blocks; each keeps its share of the whole."""
        return replace(
            self,
            anchors=self.anchors[chosen],
            labels=self.labels[chosen],
            words=self.words[chosen],
            is_kept=self.is_kept[chosen],
            has_label=self.has_label[chosen],
            weights=self.weights[chosen],
        )


class Objective:
    """The chosen loss on fresh blocks, the distance to the parent on kept ones."""

    def __init__(self, drafter: Drafter, parent: Drafter | None, settings: TrainingSettings) -> None:
        self._drafter, self._parent, self._settings = drafter, parent, settings

    def weights(self, is_kept: Tensor, has_label: Tensor, words: Tensor) -> Tensor:  # [N], 2 x [N, K] -> [N, K]
        """Each token's share of a micro-step's loss: it falls with the position.

        It is zero where nothing is learned, and in fresh blocks for tokens that the drafter can't draft.
        Kept and fresh blocks share by their numbers, a kept block counting `keep_weight` times a fresh one.
        """
        settings = self._settings
        falling = losses.position_weights(has_label.shape[1], settings.decay_tokens).to(has_label.device) * has_label
        falling *= is_kept[:, None] | (words >= 0)
        weights = torch.empty_like(falling)
        for group, weight in ((is_kept, settings.keep_weight), (~is_kept, 1.0)):
            weights[group] = weight * group.float().mean() * losses.shares(falling[group], (0, 1))
        return weights

    def __call__(self, hidden: Tensor, blocks: Blocks, context: Tensor) -> Tensor:  # [N, K, H], [T, H] -> []
        """Compute these blocks' part of the mean loss over the micro-step.

        Raises:
            ValueError: there are kept blocks and no parent.
        """
        is_kept = blocks.is_kept
        total = hidden.new_zeros(())
        if is_kept.any():
            kept = blocks.where(is_kept)
            total = total + (self._distance_to_parent(hidden[is_kept], kept, context) * kept.weights).sum()
        if not is_kept.all():
            total = total + self._loss(hidden[~is_kept], blocks.where(~is_kept))
        return total

    def _distance_to_parent(self, hidden: Tensor, kept: Blocks, context: Tensor) -> Tensor:  # [N, K]
        """KL(parent || drafter)."""
        if self._parent is None:
            raise ValueError("kept samples need the parent drafter: give it to MicroTrainer")
        packed = kept.packed
        with torch.no_grad():
            features = context if packed.is_fused else self._parent.fuse(packed.features.float())
            goal = self._parent.draft_hidden(features, packed.positions, packed.token_ids, kept.anchors, packed.segments)
            goal, goal_head = self._parent.scored(goal, kept.previous)
        return self._per_token(hidden, kept.previous, goal=goal, goal_head=goal_head, kind="kl")

    def _loss(self, hidden: Tensor, blocks: Blocks) -> Tensor:  # []
        """Compute the chosen loss; `losses` has the formulas.

        KL and its hybrid use the target's own distribution, over the drafter's words, if its last hidden state was captured.
        The other losses, and the hybrid without it, use the emitted tokens. D-PACE's weights are shares within one block:
        shares of all blocks are unknown until the last is computed.
        """
        name, words = self._settings.loss, blocks.words
        if name in ("kl", "hybrid") and blocks.packed.target_hidden is not None:
            offsets = torch.arange(words.shape[1], device=words.device)
            rows = (blocks.anchors[:, None] + offsets).clamp(max=len(blocks.packed.target_hidden) - 1)
            goal = blocks.packed.target_hidden[rows].float()  # row i predicts token i + 1
            goal_head = self._drafter.lm_head if self._drafter.goal_head is None else self._drafter.goal_head
            distance = self._per_token(hidden, blocks.previous, goal=goal, goal_head=goal_head, kind=name)
            return (distance * blocks.weights).sum()
        surprise = self._per_token(hidden, blocks.previous, labels=words.clamp(min=0))
        if name == "ce":
            return (surprise * blocks.weights).sum()
        if name == "hybrid":
            return (losses.hybrid_on_labels(surprise) * blocks.weights).sum()
        is_learned = blocks.has_label & (words >= 0)
        right = torch.exp(-surprise) * is_learned
        if name == "dpace":
            weights = losses.shares(losses.dpace_weights(right, blocks.has_label) * is_learned, (1,))
            return blocks.share * (surprise * weights).sum()
        return blocks.share * losses.negative_acceptance_length(right).sum()

    def _per_token(
        self,
        hidden: Tensor,  # [N, K, H]
        previous: Tensor,  # [N, K]
        *,
        labels: Tensor | None = None,  # [N, K]
        goal: Tensor | None = None,  # [N, K, H]
        goal_head: Tensor | None = None,  # [W, H]
        kind: str = "ce",
    ) -> Tensor:  # [N, K]
        """Apply `block_loss` to every token, with labels as words.

        With a selector a token is scored after the label before it, as it is drafted where all before it are right.
        """
        rows, head = self._drafter.scored(hidden, previous)
        made = block_loss(
            rows.flatten(0, 1),
            head,
            labels=None if labels is None else labels.flatten(),
            goal=None if goal is None else goal.flatten(0, 1),
            goal_head=goal_head,
            kind=kind,
        )
        return made.losses.view(hidden.shape[:2])
