"""Weights, reductions and accepted prefixes against their formulas."""

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


def test_a_prefix_ends_at_the_first_wrong_or_unknown_token() -> None:
    labels = torch.tensor([[1, 2, 3]] * 4)
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, 2, 3]])
    is_valid = torch.ones_like(labels, dtype=torch.bool)
    is_valid[3, 1] = False
    assert losses.accepted_prefix(drafts, labels, is_valid).tolist() == [3, 1, 0, 1]


def test_the_hybrid_on_labels_is_the_hybrid_against_a_certain_target() -> None:
    logits, labels = some_logits(0), torch.arange(12).view(3, 4) % 6
    certain = torch.nn.functional.one_hot(labels, 6).double() * 1000.0
    surprise = -logits.log_softmax(-1).gather(2, labels[:, :, None])[:, :, 0]
    assert torch.allclose(losses.hybrid_on_labels(surprise), reference.kl_tv_hybrid(logits, certain), atol=1e-5)
