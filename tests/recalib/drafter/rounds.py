"""Samples, logits and drafts, and a server's rounds by a whole sequence at once, of drafters that draft token after token."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from honed.recalib.drafter.drafter import Drafter
from honed.recalib.drafter.unrolled import UnrolledDrafter
from honed.recalib.samples.sample import TrainingSample, pack

ROWS, ANCHORS = 30, [1, 2, 9, 25]
Whole = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(next tokens [T], hidden states [T, H], positions [T]) -> normed outputs [T, H]."""
Block = Callable[[TrainingSample, int, bool], tuple[Tensor, Tensor]]
"""(sample, anchor, whether its own drafts are fed) -> hidden states and drafts of a server's round."""


def logits_of(drafter: Drafter, hidden: Tensor) -> Tensor:  # [N, K, H] -> [N, K, V]
    """Compute scores of all of the target's tokens, without a selector's part."""
    logits = F.linear(hidden, drafter.lm_head)
    if drafter.words is None:
        return logits
    everything = logits.new_full((*logits.shape[:-1], drafter.config.vocab_size), float("-inf"))
    return everything.index_copy(-1, drafter.words, logits)


def feed(
    drafter: UnrolledDrafter,
    features: Tensor,  # [T, H], fused
    positions: Tensor,  # [T]
    token_ids: Tensor,  # [T]
    anchors: Tensor,  # [N]
    segments: Tensor,  # [T]
    block_tokens: Tensor,  # [N, K]
) -> Tensor:  # [N, K, H]
    """Compute the hidden states of blocks that are fed these tokens in the place of the right ones."""
    begins = torch.searchsorted(segments, segments[anchors]).tolist()
    k, ends = block_tokens.shape[1], anchors.tolist()
    # Each block has a sample of its own, which ends with it. No row from the anchor on is seen, apart from its token.
    rows = [torch.tensor([*range(begin, end), *[end] * (k + 1)]) for begin, end in zip(begins, ends, strict=True)]
    ids = [torch.cat((token_ids[one[:-k]], tokens)) for one, tokens in zip(rows, block_tokens, strict=True)]
    sizes, at = torch.tensor([len(one) for one in rows]), torch.cat(rows)
    own = torch.arange(len(rows)).repeat_interleave(sizes)
    return drafter.draft_hidden(features[at], positions[at], torch.cat(ids), sizes.cumsum(0) - k - 1, own, k)


@torch.no_grad()
def draft(
    drafter: UnrolledDrafter, features: Tensor, positions: Tensor, token_ids: Tensor, anchors: Tensor, segments: Tensor
) -> Tensor:  # [N, K]
    """Draft greedily as a server does: each row has the token drafted before."""
    drafts = token_ids.new_zeros(len(anchors), drafter.config.num_draft_tokens)
    for k in range(drafts.shape[1]):
        hidden = feed(drafter, features, positions, token_ids, anchors, segments, drafts)
        drafts[:, k] = drafter.best_drafts(hidden[:, k : k + 1], token_ids[anchors])[:, 0]
    return drafts


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
    hidden, drafts = drafter.draft_hidden(*given), draft(drafter, *given)
    fed = feed(drafter, *given, drafts)
    for i, (sample, anchor) in enumerate((sample, anchor) for sample in samples for anchor in ANCHORS):
        torch.testing.assert_close(hidden[i], block(sample, anchor, False)[0], rtol=1e-4, atol=1e-5)
        own, wanted = block(sample, anchor, True)
        torch.testing.assert_close(fed[i], own, rtol=1e-4, atol=1e-5)
        assert drafts[i].tolist() == wanted.tolist()
