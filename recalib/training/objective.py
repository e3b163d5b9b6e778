"""The loss of a micro-step: a sum over its blocks, so that it can be computed some blocks at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from honed.kernels.training.block_loss import block_loss
from honed.recalib.config.training import TrainingSettings
from honed.recalib.drafter.drafter import Drafter
from honed.recalib.samples.sample import PackedSamples

# Letters: T packed rows, N blocks, K draft positions, W words that are drafted, H width.


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of one micro-step, or some of them, on the drafter's device."""

    packed: PackedSamples
    anchors: Tensor  # [N] rows
    labels: Tensor  # [N, K]
    words: Tensor  # [N, K] of the labels; −1: the drafter can't draft it
    is_kept: Tensor  # [N] whether the drafter should stay like its parent there
    weights: Tensor  # [N, K] each token's part of the whole micro-step's loss

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
            weights=self.weights[chosen],
        )


def position_weights(num_draft_tokens: int, decay_tokens: float) -> Tensor:  # [K]
    """w_k = exp(-(k - 1) / decay_tokens), k = 1 … K. A position matters only if all before it were accepted.

    Source: arXiv 2602.06036, section 3 (decay 7 for blocks of 16, 5 for 10, 4 for 7 or 8).
    """
    return torch.exp(-torch.arange(num_draft_tokens, dtype=torch.float32) / decay_tokens)


def shares(weights: Tensor) -> Tensor:  # of any shape
    """w / sum of w, so that a sum of share * loss is a weighted mean; 0 where the sum is 0."""
    return weights / weights.sum().clamp_min(1e-12)


class Objective:
    """Cross-entropy on fresh blocks, the distance to the parent on kept ones."""

    def __init__(self, drafter: Drafter, parent: Drafter | None, settings: TrainingSettings) -> None:
        self._drafter, self._parent, self._settings = drafter, parent, settings

    def weights(self, is_kept: Tensor, has_label: Tensor, words: Tensor) -> Tensor:  # [N], 2 x [N, K] -> [N, K]
        """Each token's share of a micro-step's loss: it falls with the position.

        It is zero where nothing is learned, and in fresh blocks for tokens that the drafter can't draft.
        Kept and fresh blocks share by their numbers, a kept block counting `keep_weight` times a fresh one.
        """
        settings = self._settings
        falling = position_weights(has_label.shape[1], settings.decay_tokens).to(has_label.device) * has_label
        falling *= is_kept[:, None] | (words >= 0)
        weights = torch.empty_like(falling)
        for group, weight in ((is_kept, settings.keep_weight), (~is_kept, 1.0)):
            weights[group] = weight * group.float().mean() * shares(falling[group])
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
            fresh = blocks.where(~is_kept)
            surprise = self._per_token(hidden[~is_kept], fresh.previous, labels=fresh.words.clamp(min=0))
            total = total + (surprise * fresh.weights).sum()
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
        return self._per_token(hidden, kept.previous, goal=goal, goal_head=goal_head)

    def _per_token(
        self,
        hidden: Tensor,  # [N, K, H]
        previous: Tensor,  # [N, K]
        *,
        labels: Tensor | None = None,  # [N, K]
        goal: Tensor | None = None,  # [N, K, H]
        goal_head: Tensor | None = None,  # [W, H]
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
        )
        return made.losses.view(hidden.shape[:2])
