"""Samples, and a server's rounds by a whole sequence at once, for drafters that draft token after token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from honed.recalib.drafter.unrolled import UnrolledDrafter
from honed.recalib.samples.sample import TrainingSample, pack

ROWS, ANCHORS = 30, [1, 2, 9, 25]
Whole = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(next tokens [T], hidden states [T, H], positions [T]) -> normed outputs [T, H]."""
Block = Callable[[TrainingSample, int, bool], tuple[Tensor, Tensor]]
"""(sample, anchor, whether its own drafts are fed) -> hidden states and drafts of a server's round."""


def make_mtp_sample(num_rows: int = ROWS, seed: int = 0, first: int = 0) -> TrainingSample:
    """Random rows as wide as the drafter."""
    generator = torch.Generator().manual_seed(seed)
    return TrainingSample(
        features=torch.randn(num_rows, 16, generator=generator),
        token_ids=torch.randint(50, (num_rows,), generator=generator),
        positions=first + torch.arange(num_rows),
        session=f"s{seed}",
        workload="w",
        is_fused=False,
    )


def mtp_block(whole: Whole, lm_head: Tensor, k: int) -> Block:
    """A server's rounds of `k` drafts with an MTP head."""

    def block(sample: TrainingSample, anchor: int, is_own: bool) -> tuple[Tensor, Tensor]:
        ids, hidden = sample.token_ids[1 : anchor + 1], sample.features[:anchor]
        hiddens, drafts = [], []
        for step in range(k):
            normed = whole(ids, hidden, sample.positions[0] + torch.arange(len(ids)))
            hiddens.append(normed[-1])
            drafts.append(F.linear(normed[-1], lm_head).argmax())
            fed = drafts[-1] if is_own else sample.token_ids[min(anchor + step + 1, sample.num_tokens - 1)]
            ids, hidden = torch.cat((ids, fed[None])), torch.cat((hidden, normed[-1:]))
        return torch.stack(hiddens), torch.stack(drafts)

    return block


def check_blocks(drafter: UnrolledDrafter, samples: Sequence[TrainingSample], block: Block) -> None:
    """Compare the drafter's blocks on packed samples with a server's rounds."""
    packed = pack(list(samples))
    anchors = torch.tensor([i * ROWS + anchor for i in range(len(samples)) for anchor in ANCHORS])
    given = (drafter.fuse(packed.features), packed.positions, packed.token_ids, anchors, packed.segments)
    hidden, drafts = drafter.draft_hidden(*given), drafter.draft(*given)
    for i, (sample, anchor) in enumerate((sample, anchor) for sample in samples for anchor in ANCHORS):
        torch.testing.assert_close(hidden[i], block(sample, anchor, False)[0], rtol=1e-4, atol=1e-5)
        assert drafts[i].tolist() == block(sample, anchor, True)[1].tolist()
