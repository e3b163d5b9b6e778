"""Which tokens are anchors: those after which a server drafts."""

from dataclasses import replace

import torch

from honed.recalib.samples.sample import TrainingSample, pack
from honed.recalib.training.blocks import (
    block_goals,
    block_labels,
    break_anchors,
    choose_anchors,
    eligible_anchors,
    is_reached,
)


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


def test_anchors_are_emitted_tokens_with_context_and_a_token_to_draft():
    samples = [sample(10, 4), sample(6, 0), sample(8, 6), sample(5, 5), sample(3, 2)]
    assert eligible_anchors(pack(samples)).tolist() == [4, 5, 6, 7, 8, 11, 12, 13, 14, 22]


def test_a_block_has_labels_up_to_its_sample_s_end():
    packed = pack([sample(6, 2), sample(3, 1)])
    labels, has_label = block_labels(packed, torch.tensor([2, 4, 7]), 3)
    assert labels.tolist() == [[3, 4, 5], [5, 5, 5], [2, 2, 2]]
    assert has_label.tolist() == [[True, True, True], [True, False, False], [True, False, False]]


def test_the_most_likely_tokens_are_learned_where_the_target_sampled():
    drawn = replace(sample(6, 2), likely=torch.tensor([-1, -1, 3, 9, -1, 9]))
    packed, anchors = pack([sample(3, 1), drawn]), torch.tensor([1, 5, 6])
    labels, has_label = block_labels(packed, anchors, 3)
    goals = block_goals(packed, anchors, 3)
    assert labels[has_label].tolist() == [2, 3, 4, 5, 4, 5]
    assert goals[has_label].tolist() == [2, 3, 9, 5, 9, 5]
    assert is_reached(labels, goals)[1].tolist() == [True, True, False], "after a token that no draft would be"


def test_preferred_anchors_are_emitted_ones_too():
    """The first round of an answer may have been wrong at once: the block before it begins in the prompt."""
    samples = [sample(20, 8, breaks=(109,))]
    rows = break_anchors(samples, 4)
    assert rows == [5, 6, 7, 8]
    chosen = choose_anchors(eligible_anchors(pack(samples)), 2, rows, 1.0, torch.Generator().manual_seed(0))
    assert 8 in chosen.tolist()
    assert min(chosen.tolist()) == 8
