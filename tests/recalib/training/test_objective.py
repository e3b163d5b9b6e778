"""Losses over the words that a drafter can draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.drafter.drafter import Vocabulary
from honed.recalib.samples.sample import TrainingSample
from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings
from honed.recalib.training.objective import Objective
from tests.recalib.conftest import SMALL

MakeDrafter = Callable[..., DFlashDrafter]
MakeSample = Callable[..., TrainingSample]


def learned(drafter: DFlashDrafter, sample: TrainingSample) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of one micro-step on every block of a sample."""
    settings = TrainingSettings(anchors_per_micro_step=64, micro_steps_per_update=2)
    figures = MicroTrainer(drafter, settings).step([sample])
    return figures.loss, {name: p.grad for name, p in drafter.named_parameters() if p.grad is not None}


def test_a_vocabulary_with_all_words_is_the_targets(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    sample = make_sample()
    plain = make_drafter()
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    words = DFlashDrafter(plain.config, Vocabulary(plain.embed_tokens, plain.lm_head[order], order))
    words.load_state_dict(plain.state_dict())
    (expected, gradients), (found, others) = learned(plain, sample), learned(words, sample)
    assert found == pytest.approx(expected, rel=1e-5)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6)


def test_tokens_that_cannot_be_drafted_teach_nothing(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """Where no label is a word, there is no gradient."""
    drafter, sample = make_drafter(draft_vocab_size=20), make_sample()
    assert drafter.words is not None
    others = torch.tensor([i for i in range(2, 50) if i not in drafter.words.tolist()])
    sample.token_ids[:] = others[torch.arange(len(sample.token_ids)) % len(others)]
    found, gradients = learned(drafter, sample)
    assert found == 0.0
    assert all((gradient == 0).all() for gradient in gradients.values())


def test_the_loss_is_that_of_the_words_alone(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """Cross-entropy, by hand: a mean over the tokens that are words, weighted by position."""
    drafter, sample = make_drafter(draft_vocab_size=20), make_sample(num_tokens=6)  # one block: the anchor is row 1
    assert drafter.words is not None
    sample.token_ids[2:5] = torch.stack([drafter.words[3], torch.tensor(-1), drafter.words[7]])
    sample.token_ids[3] = next(i for i in range(2, 50) if i not in drafter.words.tolist())
    with torch.no_grad():
        hidden = drafter.draft_hidden(sample.features, sample.positions, sample.token_ids, torch.tensor([1]))
        surprise = -F.linear(hidden[0], drafter.lm_head).log_softmax(-1)
    decay = torch.exp(-torch.arange(3) / TrainingSettings().decay_tokens)
    wanted = (decay[0] * surprise[0, 3] + decay[2] * surprise[2, 7]) / (decay[0] + decay[2])
    settings = TrainingSettings(anchors_per_micro_step=1, micro_steps_per_update=2)
    figures = MicroTrainer(drafter, settings).step([sample], [1])
    assert figures.loss == pytest.approx(float(wanted), rel=1e-5)


def test_kept_and_fresh_blocks_share_by_their_numbers(make_drafter: MakeDrafter) -> None:
    """Only fresh blocks miss the tokens that can't be drafted: kept ones learn the parent's distribution, not the label."""
    objective = Objective(make_drafter(), None, TrainingSettings(keep_weight=2.0))
    words = torch.tensor([[3, -1, 7], [3, 4, 7], [3, 4, 7], [3, -1, 7]])
    is_kept = torch.tensor([True, True, True, False])
    weights = objective.weights(is_kept, torch.ones(4, 3, dtype=torch.bool), words)
    assert float(weights[:3].sum()) == pytest.approx(2.0 * 0.75)
    assert float(weights[3].sum()) == pytest.approx(0.25)
    assert torch.equal(weights[0], weights[1]), "kept blocks count at every position"
    assert weights[3].tolist()[1] == 0.0


DFLASH2: dict[str, Any] = {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": SMALL["dflash_config"]
    | {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 3, "selector_top_k": 5},
}


DSPARK: dict[str, Any] = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 3, "block_size": 3}


def moved_by_a_step(drafter: DFlashDrafter, sample: TrainingSample, surprise: torch.Tensor) -> set[str]:  # [K]
    """Do one update on the block of anchor 1, whose loss has to be the mean of these; return the parameters that it changed."""
    decay = torch.exp(-torch.arange(3) / TrainingSettings().decay_tokens)
    settings = TrainingSettings(anchors_per_micro_step=1, micro_steps_per_update=1)
    before = {name: parameter.detach().clone() for name, parameter in drafter.named_parameters()}
    figures = MicroTrainer(drafter, settings).step([sample], [1])
    assert figures.loss == pytest.approx(float((decay * surprise).sum() / decay.sum()), rel=1e-5)
    return {name for name, parameter in drafter.named_parameters() if not torch.equal(parameter, before[name])}


def test_a_selector_learns_pairs_and_keeps_its_codebooks(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """Cross-entropy of every token after the label before it, by hand; and what it moves."""
    drafter, sample = make_drafter(**DFLASH2), make_sample(num_tokens=6)
    with torch.no_grad():
        hidden = drafter.draft_hidden(sample.features, sample.positions, sample.token_ids, torch.tensor([1]))
        rows, head = drafter.scored(hidden, sample.token_ids[None, 1:4])
        surprise = F.cross_entropy((rows @ head.T)[0], sample.token_ids[2:5], reduction="none")
    moved = moved_by_a_step(drafter, sample, surprise)
    assert "candidate_selector.hidden_projection.weight" in moved
    assert "layers.0.attention_conv.base_kernel" in moved
    assert "layers.1.mlp_conv.kernel_projection.weight" in moved
    assert not any("codebook" in name for name in moved)


def test_a_markov_head_learns_what_follows_and_keeps_its_words(make_drafter: MakeDrafter, make_sample: MakeSample) -> None:
    """Cross-entropy by hand of every token after the label before it, from the anchor's row on; and what it moves."""
    drafter, sample = make_drafter(**DSPARK), make_sample(num_tokens=6)
    head = drafter.markov_head
    with torch.no_grad():
        hidden = drafter.draft_hidden(sample.features, sample.positions, sample.token_ids, torch.tensor([1]))
        scores = hidden[0] @ drafter.lm_head.T + head.markov_w1.weight[sample.token_ids[1:4]] @ head.markov_w2.weight.T
        surprise = F.cross_entropy(scores, sample.token_ids[2:5], reduction="none")
    moved = moved_by_a_step(drafter, sample, surprise)
    assert "markov_head.markov_w1.weight" in moved
    assert "markov_head.markov_w2.weight" not in moved
    assert "layers.0.self_attn.k_proj.weight" not in moved, "cached keys depend on it"


@pytest.mark.parametrize("kind", ["selector", "markov head"])
def test_a_drafter_of_pairs_stays_like_its_parent(make_drafter: MakeDrafter, make_sample: MakeSample, kind: str) -> None:
    changes, sample = DFLASH2 if kind == "selector" else DSPARK, make_sample()
    drafter, parent = make_drafter(**changes), make_drafter(**changes)
    settings = TrainingSettings(anchors_per_micro_step=8, micro_steps_per_update=2)
    assert MicroTrainer(drafter, settings, parent).step([sample], kept=[True]).loss == pytest.approx(0.0, abs=1e-5)
    other = make_drafter(seed=1, **changes)
    assert MicroTrainer(drafter, settings, other).step([sample], kept=[True]).loss > 0.01
