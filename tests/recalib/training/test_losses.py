"""Weights of a block's tokens against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from honed.recalib.training.objective import position_weights, shares


def test_position_weights_decay_from_one() -> None:
    weights = position_weights(7, decay_tokens=4.0)
    assert weights[0] == 1.0
    assert weights[4] == pytest.approx(math.exp(-1.0))


def test_a_mean_by_shares_ignores_what_has_no_weight() -> None:
    values = torch.tensor([[1.0, 100.0], [3.0, 100.0]])
    weights = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    assert (values * shares(weights)).sum() == 2.5
    assert (values * shares(torch.zeros(2, 2))).sum() == 0.0
