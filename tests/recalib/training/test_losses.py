"""Weights and reductions against their formulas, and the counts against plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from honed.kernels.training import reference
from honed.recalib.training import losses


def some_logits(seed: int, shape: tuple[int, int, int] = (3, 4, 6)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_position_weights_decay_from_one() -> None:
    weights = losses.position_weights(7, decay_tokens=4.0)
    assert weights[0] == 1.0
    assert weights[4] == pytest.approx(math.exp(-1.0))


def test_a_mean_by_shares_ignores_what_has_no_weight() -> None:
    values = torch.tensor([[1.0, 100.0], [3.0, 100.0]])
    weights = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    assert (values * losses.shares(weights, (0, 1))).sum() == 2.5
    assert (values * losses.shares(weights, (1,))).sum(1).tolist() == [1.0, 3.0]
    assert (values * losses.shares(torch.zeros(2, 2), (0, 1))).sum() == 0.0


def test_dpace_weights_are_the_sums_of_the_formula() -> None:
    q = torch.tensor([[0.9, 0.2, 0.6]])
    s = [(1 - 0.5) * float(x) + 0.5 for x in q[0]]
    reach = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
    everywhere = torch.ones_like(q, dtype=torch.bool)
    assert losses.dpace_weights(q, everywhere)[0].tolist() == pytest.approx([sum(reach), sum(reach[1:]), reach[2]])
    cut = torch.tensor([[True, True, False]])
    assert losses.dpace_weights(q, cut)[0].tolist() == pytest.approx([sum(reach[:2]), reach[1], 0.0])


def test_negative_acceptance_length_is_that_of_i_i_d_acceptance() -> None:
    alpha, k = 0.7, 7
    wanted = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert float(-losses.negative_acceptance_length(torch.full((1, k), alpha))) == pytest.approx(wanted)


def test_gradients_of_the_acceptance_length_match_finite_differences() -> None:
    alpha = torch.rand(3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    assert torch.autograd.gradcheck(losses.negative_acceptance_length, alpha)


def test_counts_are_censored_where_a_round_would_have_stopped() -> None:
    labels = torch.tensor([[1, 2, 3], [1, 2, 3], [1, 2, 3]])
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3]])
    counts = losses.count_acceptance(drafts, labels, torch.ones_like(labels, dtype=torch.bool))
    assert counts.trials == (3, 2, 1)
    assert counts.successes == (2, 1, 1)
    assert counts.num_accepted_tokens == 3 + 1 + 0
    assert counts.acceptance_length == pytest.approx(1 + 4 / 3)


def test_unknown_labels_are_neither_tried_nor_accepted() -> None:
    labels = torch.tensor([[1, 2, 3]])
    is_valid = torch.tensor([[True, False, True]])
    counts = losses.count_acceptance(labels, labels, is_valid)
    assert (counts.trials, counts.successes) == ((1, 0, 0), (1, 0, 0))
    assert losses.accepted_prefix(labels, labels, is_valid).tolist() == [1]


def test_the_hybrid_on_labels_is_the_hybrid_against_a_certain_target() -> None:
    logits, labels = some_logits(0), torch.arange(12).view(3, 4) % 6
    certain = torch.nn.functional.one_hot(labels, 6).double() * 1000.0
    surprise = -logits.log_softmax(-1).gather(2, labels[:, :, None])[:, :, 0]
    assert torch.allclose(losses.hybrid_on_labels(surprise), reference.kl_tv_hybrid(logits, certain), atol=1e-5)
