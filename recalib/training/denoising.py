"""Drafting of a block in several passes: each reveals the most confident tokens, and the next pass sees them.

vLLM 0.32 drafts in one pass, for which DFlash was made. Each further pass costs a draft pass; more are for offline comparison
and for other engines. The number of tokens revealed by a pass follows from a mask ratio r(t) over t in [0, 1):

    cosine       cos(pi t / 2)
    linear       1 - t
    square-root  1 - sqrt(t)

Pass i of S reveals a number in proportion to r at its middle, (i + 1/2) / S: most at first, where the drafter has its one-pass
training, and few at the end. Counts are rounded by largest remainder, so they sum to the block.

Source: MaskGIT (arXiv 2202.04200, section 3.3) for unmasking by confidence and the names of the schedules.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from honed.recalib.config.training import MAX_DENOISING_STEPS, MaskSchedule

# Letters: N blocks, K draft positions, V vocabulary, S passes.

_RATIOS: dict[MaskSchedule, Callable[[float], float]] = {
    "cosine": lambda t: math.cos(math.pi * t / 2),
    "linear": lambda t: 1.0 - t,
    "square-root": lambda t: 1.0 - math.sqrt(t),
}


@dataclass(frozen=True)
class Denoising:
    """Number of passes that draft a block, and their schedule."""

    steps: int = 1
    schedule: MaskSchedule = "cosine"

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= MAX_DENOISING_STEPS:
            raise ValueError(f"denoising steps must be from 1 to {MAX_DENOISING_STEPS}, not {self.steps}")
        if self.schedule not in _RATIOS:
            raise ValueError(f"unknown mask schedule {self.schedule!r}: {', '.join(_RATIOS)} are known")

    def counts(self, num_draft_tokens: int) -> tuple[int, ...]:  # [S'], S' <= S
        """Tokens revealed by each pass: at least one each, `num_draft_tokens` in all; so there may be fewer passes."""
        steps = min(self.steps, num_draft_tokens)
        ratios = [_RATIOS[self.schedule]((i + 0.5) / steps) for i in range(steps)]
        free = num_draft_tokens - steps  # each has one to begin with
        wanted = [max(0.0, num_draft_tokens * ratio / sum(ratios) - 1.0) for ratio in ratios]
        shares = [free * w / (sum(wanted) or 1.0) for w in wanted]
        counts = [1 + math.floor(share) for share in shares]
        by_remainder = sorted(range(steps), key=lambda i: (math.floor(shares[i]) - shares[i], i))
        for i in by_remainder[: num_draft_tokens - sum(counts)]:
            counts[i] += 1
        return tuple(counts)


ONE_PASS = Denoising()
"""The setting of servers."""


def reveal_randomly(
    labels: Tensor,  # [N, K]
    mask_token_id: int,
    denoising: Denoising,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:  # [N, K] token ids with masks, [N, K] whether masked
    """Make blocks as a random pass of each sees them: tokens at random places, revealed by earlier passes, are the labels.

    So with S passes one block in S is all masks, as a one-pass drafter sees it.
    """
    num_blocks, k = labels.shape
    counts = denoising.counts(k)
    revealed_before = torch.tensor([sum(counts[:i]) for i in range(len(counts))])
    num_revealed = revealed_before[torch.randint(len(counts), (num_blocks,), generator=generator)]  # [N]
    order = torch.rand(num_blocks, k, generator=generator).argsort(-1).argsort(-1)  # [N, K] a random rank for each place
    is_masked = (order >= num_revealed[:, None]).to(labels.device)
    return torch.where(is_masked, mask_token_id, labels), is_masked


def draft_in_steps(
    best_of: Callable[[Tensor], tuple[Tensor, Tensor]],  # [N, K] block tokens -> likeliest tokens, log-probabilities
    num_blocks: int,
    num_draft_tokens: int,
    mask_token_id: int,
    denoising: Denoising,
    device: torch.device,
) -> Tensor:  # [N, K]
    """Draft greedily: each pass reveals the masked places whose likeliest token has the most confidence."""
    tokens = torch.full((num_blocks, num_draft_tokens), mask_token_id, device=device)
    counts = denoising.counts(num_draft_tokens)
    if len(counts) == 1:
        return best_of(tokens)[0]
    is_masked = torch.ones_like(tokens, dtype=torch.bool)
    for count in counts:
        best, confidence = best_of(tokens)  # 2 x [N, K]
        chosen = confidence.masked_fill(~is_masked, float("-inf")).topk(count, dim=-1).indices  # [N, count]
        tokens = tokens.scatter(1, chosen, best.gather(1, chosen))
        is_masked = is_masked.scatter(1, chosen, False)
    return tokens
