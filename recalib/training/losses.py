"""Losses for a block drafter, and how many of its drafts are right.

Losses of every token, `[N, K]`, come from `kernels.training.block_loss` (its formulas are in `kernels/training/reference.py`).
This module weights them. Position j of a block matters only if all before it were accepted, so weights fall with j.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Letters: N blocks, K draft positions (anchor excluded). p target's distribution, q draft's.


def position_weights(num_draft_tokens: int, decay_tokens: float) -> Tensor:  # [K]
    """w_k = exp(-(k - 1) / decay_tokens), k = 1 … K; the anchor has no weight.

    Source: arXiv 2602.06036, section 3 (decay 7 for blocks of 16, 5 for 10, 4 for 7 or 8).
    """
    return torch.exp(-torch.arange(num_draft_tokens, dtype=torch.float32) / decay_tokens)


def shares(weights: Tensor, dim: tuple[int, ...]) -> Tensor:  # [N, K] -> [N, K]
    """w / sum of w over `dim`, so that a sum of share * loss is a weighted mean; 0 where the sum is 0."""
    return weights / weights.sum(dim, keepdim=True).clamp_min(1e-12)


def hybrid_on_labels(surprise: Tensor) -> Tensor:  # [N, K] -> [N, K]
    """`block_loss`'s "hybrid" against the emitted token alone: KL is the surprise, -log q(label), and TV is 1 - q(label).

    It is exact for a greedy target, and a substitute where the target's distribution was not captured.
    """
    right = torch.exp(-surprise)
    share = torch.exp(-3.0 * right.detach())
    return share * surprise + (1.0 - share) * (1.0 - right)


def dpace_weights(accept_probabilities: Tensor, has_label: Tensor, smoothing: float = 0.5) -> Tensor:  # 2 x [N, K] -> [N, K]
    """D-PACE: w_j = sum over m >= j of prod over i <= m of ((1 - a) * q_i + a), a = `smoothing`.

    A position's weight is the expected length that depends on it. `a` keeps late positions' weights up while early ones are
    still wrong. Positions without a label lengthen nothing. No gradient flows through the weights.
    """
    reach = ((1.0 - smoothing) * accept_probabilities.detach() + smoothing).cumprod(-1) * has_label
    return reach.flip(-1).cumsum(-1).flip(-1)


def negative_acceptance_length(accept_probabilities: Tensor) -> Tensor:  # [N, K] -> [N]
    """-E[tau] = -(1 + sum over k of prod over j <= k of alpha_j): the objective itself, bonus token included.

    alpha_j is q(label_j) for a greedy target, Σ min(p, q) for a sampling one.
    """
    return -(1.0 + accept_probabilities.cumprod(-1).sum(-1))


def accepted_prefix(drafts: Tensor, labels: Tensor, is_valid: Tensor) -> Tensor:  # 3 x [N, K] -> [N]
    """Count the right draft tokens of each block before the first wrong or unknown one."""
    return ((drafts == labels) & is_valid).long().cumprod(-1).sum(-1)
