"""Every loss against its formula, its gradient against finite differences, and the counts against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from honed.recalib import losses


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


def test_forward_kl_is_zero_only_for_equal_distributions() -> None:
    p, q = some_logits(0), some_logits(1)
    assert torch.allclose(losses.forward_kl(p, p), torch.zeros(3, 4), atol=1e-6)
    assert (losses.forward_kl(q, p) > 0).all()
    by_hand = (p.softmax(-1) * (p.softmax(-1) / q.softmax(-1)).log()).sum(-1)
    assert torch.allclose(losses.forward_kl(q, p).double(), by_hand, atol=1e-5)


def test_total_variation_is_half_the_absolute_difference() -> None:
    p, q = some_logits(0), some_logits(1)
    half = 0.5 * (p.softmax(-1) - q.softmax(-1)).abs().sum(-1)
    assert torch.allclose(losses.total_variation(q, p).double(), half, atol=1e-6)


def test_hybrid_goes_from_kl_to_total_variation() -> None:
    apart = torch.tensor([[[40.0, 0.0]]]), torch.tensor([[[0.0, 40.0]]])
    assert torch.allclose(losses.kl_tv_hybrid(*apart), losses.forward_kl(*apart))
    p, q = some_logits(0), some_logits(1)
    share = torch.exp(-3 * losses.overlap(q, p))
    wanted = share * losses.forward_kl(q, p) + (1 - share) * losses.total_variation(q, p)
    assert torch.allclose(losses.kl_tv_hybrid(q, p), wanted)


def test_dpace_weights_are_the_sums_of_the_formula() -> None:
    q = torch.tensor([[0.9, 0.2, 0.6]])
    s = [(1 - 0.5) * float(x) + 0.5 for x in q[0]]
    reach = [s[0], s[0] * s[1], s[0] * s[1] * s[2]]
    assert losses.dpace_weights(q)[0].tolist() == pytest.approx([sum(reach), sum(reach[1:]), reach[2]])


def test_negative_acceptance_length_is_that_of_i_i_d_acceptance() -> None:
    alpha, k = 0.7, 7
    wanted = (1 - alpha ** (k + 1)) / (1 - alpha)
    assert float(-losses.negative_acceptance_length(torch.full((1, k), alpha))) == pytest.approx(wanted)


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda x: losses.cross_entropy(x, torch.arange(12).view(3, 4) % 6),
    "forward_kl": lambda x: losses.forward_kl(x, some_logits(9)),
    "total_variation": lambda x: losses.total_variation(x, some_logits(9)),
    "negative_acceptance_length": lambda x: losses.negative_acceptance_length(losses.overlap(x, some_logits(9))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_match_finite_differences(name: str) -> None:
    loss = LOSSES[name]
    x = some_logits(3).float().requires_grad_()
    direction = some_logits(4).float()
    loss(x).sum().backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    step = 1e-2
    with torch.no_grad():
        difference = (loss(x + step * direction).sum() - loss(x - step * direction).sum()) / (2 * step)
    assert float((x.grad * direction).sum()) == pytest.approx(float(difference), rel=2e-2, abs=2e-3)


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
    on_labels = losses.hybrid_on_labels(losses.cross_entropy(logits, labels))
    assert torch.allclose(on_labels, losses.kl_tv_hybrid(logits, certain), atol=1e-5)
