"""Losses over the words that a drafter can draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from honed.recalib.drafter.model import DFlashDrafter
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings

MakeDrafter = Callable[..., DFlashDrafter]
MakeSample = Callable[..., TrainingSample]
LOSSES = ("ce", "dpace", "acceptance", "hybrid")


def learned(drafter: DFlashDrafter, sample: TrainingSample, loss: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one micro-step on every block of a sample."""
    settings = TrainingSettings(loss=loss, anchors_per_micro_step=64, micro_steps_per_update=2)  # type: ignore[arg-type]
    figures = MicroTrainer(drafter, settings).step([sample])
    return figures.loss, {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_vocabulary_with_all_words_is_the_targets(loss: str, make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    sample = make_sample()
    sample = replace(sample, target_hidden=None)
    plain = make_drafter()
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    words = DFlashDrafter(plain.config, plain.embed_tokens, plain.lm_head[order], order)
    words.load_state_dict(plain.state_dict())
    (expected, gradients), (found, others) = learned(plain, sample, loss), learned(words, sample, loss)
    assert found == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_tokens_that_cannot_be_drafted_teach_nothing(loss: str, make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """Where no label is a word, there is no gradient; in the acceptance's loss only the bonus token is left."""
    drafter, sample = make_drafter(draft_vocab_size=20), make_sample()
    sample = replace(sample, target_hidden=None)
    assert drafter.words is not None
    others = torch.tensor([i for i in range(2, 50) if i not in drafter.words.tolist()])
    sample.token_ids[:] = others[torch.arange(len(sample.token_ids)) % len(others)]
    found, gradients = learned(drafter, sample, loss)
    assert found == (-1.0 if loss == "acceptance" else 0.0)
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_the_loss_is_that_of_the_words_alone(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """Cross-entropy, by hand: a mean over the tokens that are words, weighted by position."""
    drafter, sample = make_drafter(draft_vocab_size=20), make_sample(num_tokens=6)  # one block: the anchor is row 1
    sample = replace(sample, target_hidden=None)
    assert drafter.words is not None
    sample.token_ids[2:5] = torch.stack([drafter.words[3], torch.tensor(-1), drafter.words[7]])
    sample.token_ids[3] = next(i for i in range(2, 50) if i not in drafter.words.tolist())
    with torch.no_grad():
        hidden = drafter.draft_hidden(sample.features, sample.positions, sample.token_ids, torch.tensor([1]))
        surprise = -F.linear(hidden[0], drafter.lm_head).log_softmax(-1)
    decay = torch.exp(-torch.arange(3) / TrainingSettings().decay_tokens)
    wanted = (decay[0] * surprise[0, 3] + decay[2] * surprise[2, 7]) / (decay[0] + decay[2])
    settings = TrainingSettings(loss="ce", anchors_per_micro_step=1, micro_steps_per_update=2)
    figures = MicroTrainer(drafter, settings).step([sample], [1])
    assert figures.loss == pytest.approx(float(wanted), rel=1e-5)


def test_the_targets_distribution_is_taken_over_the_words(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """A drafter that has the target's distribution over its words is at a distance of zero."""
    drafter, sample = make_drafter(draft_vocab_size=20), make_sample(num_tokens=6)
    drafter.goal_head = 2.0 * drafter.lm_head  # another head than the drafter's own
    with torch.no_grad():
        hidden = drafter.draft_hidden(sample.features, sample.positions, sample.token_ids, torch.tensor([1]))
    assert sample.target_hidden is not None
    sample.target_hidden[1:4] = 0.5 * hidden[0]
    settings = TrainingSettings(loss="kl", anchors_per_micro_step=1, micro_steps_per_update=2)
    assert MicroTrainer(drafter, settings).step([sample], [1]).loss == pytest.approx(0.0, abs=1e-5)
    drafter.goal_head = None
    assert MicroTrainer(drafter, settings).step([sample], [1]).loss > 0.01
