"""Which tokens are anchors: those after which a server drafts."""

import torch

from honed.recalib.samples.sample import TrainingSample, pack
from honed.recalib.training.blocks import break_anchors, choose_anchors, eligible_anchors


def sample(num_tokens, num_prompt_tokens, breaks=()):
    return TrainingSample(
        features=torch.zeros(num_tokens, 2),
        token_ids=torch.arange(num_tokens),
        positions=100 + torch.arange(num_tokens),
        session="s",
        workload="w",
        break_positions=breaks,
        num_prompt_tokens=num_prompt_tokens,
    )


def test_anchors_are_emitted_tokens_with_context_and_a_whole_block():
    samples = [sample(10, 4), sample(6, 0), sample(8, 6), sample(5, 5)]
    assert eligible_anchors(pack(samples), 3).tolist() == [4, 5, 6, 11, 12]


def test_preferred_anchors_are_emitted_ones_too():
    """The first round of an answer may have been wrong at once: the block before it begins in the prompt."""
    samples = [sample(20, 8, breaks=(109,))]
    rows = break_anchors(samples, 4)
    assert rows == [5, 6, 7, 8]
    chosen = choose_anchors(eligible_anchors(pack(samples), 4), 2, rows, 1.0, torch.Generator().manual_seed(0))
    assert 8 in chosen.tolist()
    assert min(chosen.tolist()) == 8
