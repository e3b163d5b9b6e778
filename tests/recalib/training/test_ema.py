"""The moving average against its formula."""

from __future__ import annotations

import pytest
import torch

from honed.recalib.training.ema import WeightAverage


def test_the_average_follows_the_formula() -> None:
    weight = torch.nn.Parameter(torch.zeros(2))
    average = WeightAverage([weight], decay=0.5)
    expected = 0.0
    for n, value in enumerate((1.0, 3.0, -2.0), start=1):
        with torch.no_grad():
            weight.fill_(value)
        average.update(n)
        decay = min(0.5, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * value
    assert average.shadow[0].tolist() == pytest.approx([expected, expected])
    assert weight.tolist() == [-2.0, -2.0]
    average.copy_to_parameters()
    assert weight.tolist() == pytest.approx([expected, expected])


@pytest.mark.parametrize("decay", [0.0, 1.0, -0.1])
def test_a_decay_that_averages_nothing_is_refused(decay: float) -> None:
    with pytest.raises(ValueError, match="ema_decay must be above 0"):
        WeightAverage([torch.zeros(1)], decay)
