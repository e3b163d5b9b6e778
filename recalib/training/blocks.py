"""Choice of the blocks to train or to judge on, and the target's tokens after each anchor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from honed.recalib.samples.sample import PackedSamples, TrainingSample

# Letters: T packed rows, N anchors, K draft positions.


def eligible_anchors(packed: PackedSamples) -> Tensor:  # [N] rows
    """Emitted tokens with at least one row of context before them and one token after them, in the same sample.

    A server drafts after no other tokens. Blocks within prompts would teach text that the target didn't write, and a long
    prompt has many times the rows of its answer.
    """
    rows = torch.arange(len(packed.segments))
    has_context = rows > packed.starts[packed.segments]
    return rows[packed.is_emitted & has_context & (rows < _last_rows(packed, rows))]


def block_labels(packed: PackedSamples, anchors: Tensor, num_draft_tokens: int) -> tuple[Tensor, Tensor]:  # [N] -> 2 x [N, K]
    """Return the tokens emitted after each anchor, and whether there are such: a block reaches over its sample's end.

    Beyond it the sample's last token stands for them.
    """
    rows, last = anchors[:, None] + 1 + torch.arange(num_draft_tokens), _last_rows(packed, anchors)[:, None]
    return packed.token_ids[torch.minimum(rows, last)], rows <= last


def block_goals(packed: PackedSamples, anchors: Tensor, num_draft_tokens: int) -> Tensor:  # [N] -> [N, K]
    """Return the tokens to learn after each anchor: the emitted ones, or the target's most likely ones where it sampled.

    A server drafts its drafter's most likely tokens. They are accepted most often if they are the target's.
    """
    rows, last = anchors[:, None] + torch.arange(num_draft_tokens), _last_rows(packed, anchors)[:, None]
    return packed.goals[torch.minimum(rows, last - 1)]


def is_reached(labels: Tensor, goals: Tensor) -> Tensor:  # 2 x [N, K] -> [N, K]
    """Mark each position: whether drafts that are all right so far would have led to the emitted text.

    Where the target drew another token than its most likely one, no draft after it counts: a server's round ends there.
    """
    on_path = (labels == goals).cumprod(-1).bool()
    return torch.cat((torch.ones_like(on_path[:, :1]), on_path[:, :-1]), dim=1)


def _last_rows(packed: PackedSamples, rows: Tensor) -> Tensor:  # [N] -> [N]
    """The last rows of the samples that these rows are in."""
    ends = torch.cat((packed.starts[1:], torch.tensor([len(packed.segments)])))
    return ends[packed.segments[rows]] - 1


def choose_anchors(
    eligible: Tensor,  # [E]
    num_anchors: int,
    preferred: Sequence[int],
    preferred_share: float,
    generator: torch.Generator,
) -> Tensor:  # [N], sorted, without repeats
    """Choose anchors at random: up to `preferred_share` of them from the preferred rows, the rest from all.

    Preferred rows are those before a rejected draft token: the drafter learns most where it was wrong.
    """
    wanted = eligible[torch.isin(eligible, torch.tensor(list(preferred), dtype=torch.int64))]
    first = _draw(wanted, round(num_anchors * preferred_share), generator)
    others = eligible[~torch.isin(eligible, first)]
    return torch.cat((first, _draw(others, num_anchors - len(first), generator))).sort().values


def _draw(rows: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return rows[torch.randperm(len(rows), generator=generator)[:count]]


def break_anchors(samples: Sequence[TrainingSample], num_draft_tokens: int) -> list[int]:
    """Packed rows of the anchors whose block reaches a rejected draft token: up to K rows before it."""
    rows: list[int] = []
    start = 0
    for sample in samples:
        first_position = int(sample.positions[0])
        for position in sample.break_positions:
            row = position - first_position
            rows.extend(start + r for r in range(max(0, row - num_draft_tokens), min(row, sample.num_tokens)))
        start += sample.num_tokens
    return rows
