"""Predictions are compared with outcomes, and the error is the prediction's."""

from __future__ import annotations

import numpy as np
import pytest

from honed.adapt.acceptance.estimate import survival
from honed.adapt.acceptance.reliability import Reliability
from tests.adapt.simulate import simulate_rounds

CURVE = np.array([0.8, 0.75, 0.7, 0.6, 0.5, 0.5, 0.4])


def observe(reliability: Reliability, predicted: np.ndarray, num_rounds: int = 20_000) -> None:
    rng = np.random.default_rng(0)
    drafted = rng.integers(0, 8, num_rounds)  # lengths that don't depend on the outcome
    reliability.observe(np.tile(predicted, (num_rounds, 1)), drafted, simulate_rounds(rng, CURVE, drafted))


def test_a_true_prediction_has_next_to_no_error() -> None:
    reliability = Reliability()
    observe(reliability, survival(CURVE))
    assert reliability.error < 0.01
    assert all(abs(predicted - observed) < 0.03 for predicted, observed, weight in reliability.bins() if weight > 500)


@pytest.mark.parametrize("shift", [0.1, -0.1])
def test_a_prediction_that_is_off_has_an_error_of_about_as_much(shift: float) -> None:
    reliability = Reliability()
    observe(reliability, np.clip(survival(CURVE) + shift, 0.0, 1.0))
    assert 0.06 < reliability.error < 0.11


def test_an_old_error_fades() -> None:
    reliability = Reliability(forgetting_rounds=2000.0)
    observe(reliability, np.full(7, 0.999))
    assert reliability.error > 0.3
    for _ in range(3):
        observe(reliability, survival(CURVE))
    assert reliability.error < 0.02


def test_before_any_round_there_is_no_error() -> None:
    assert np.isnan(Reliability().error)
    assert Reliability().bins() == []
