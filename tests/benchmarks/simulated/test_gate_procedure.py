"""The gate's error over all attempts and blends that answer one alarm: what an operator is promised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.simulated.gate_procedure import simulate
from honed.recalib.gate.gate import GateSettings

QUICK = GateSettings(resamples=250)
RUNS = 250


@pytest.mark.fault("a gate that equal candidates pass by luck")
@pytest.mark.parametrize(("num_sessions", "seed"), [(6, 1), (8, 2), (12, 3)])
def test_candidates_like_their_parent_pass_at_the_nominal_rate(num_sessions: int, seed: int) -> None:
    """5 % of the alarms at most, whatever the number of sessions; three standard errors are allowed for."""
    outcome = simulate(num_sessions, 0.0, RUNS, QUICK, seed=seed)
    assert outcome.first_attempt <= 0.025 + 3 * (0.025 * 0.975 / RUNS) ** 0.5
    assert outcome.any_attempt <= 0.05 + 3 * (0.05 * 0.95 / RUNS) ** 0.5


def test_the_error_is_the_setting() -> None:
    """With a larger error about as many pass as it allows: the test isn't merely strict."""
    outcome = simulate(12, 0.0, RUNS, replace(QUICK, confidence=0.4), attempts=1, seed=5)  # 0.3 in the first attempt
    assert 0.2 < outcome.any_attempt < 0.4


def test_a_large_gain_passes_with_few_sessions() -> None:
    assert simulate(6, 0.8, 60, QUICK, seed=6).first_attempt > 0.6
    assert simulate(12, 0.4, 60, QUICK, seed=7).first_attempt > 0.8
