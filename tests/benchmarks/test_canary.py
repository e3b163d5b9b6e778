"""How often a canary errs, 5,000 times over with honed's own test: what an operator is promised."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.canary import BUSY_ROUNDS, CURVES, SHARES, TWO, change_for_length, simulate, window
from honed.adapt.acceptance.estimate import acceptance_length
from honed.adapt.monitor.canary import CanarySettings

RUNS = 5_000


@pytest.mark.proof
def test_equal_versions_are_rarely_promoted_and_rarely_rolled_back() -> None:
    outcome = simulate(CURVES["medium"], 0.0, RUNS, seed=11)
    assert outcome.promoted <= 0.01
    assert outcome.rolled_back <= 0.01


def test_moods_of_whole_windows_are_not_taken_for_a_difference() -> None:
    """Counted as independent rounds, these windows would tell equal versions apart most of the time."""
    outcome = simulate(CURVES["medium"], 0.0, RUNS // 4, seed=14, mood=0.5)
    assert outcome.promoted <= 0.015
    assert outcome.rolled_back <= 0.015


@pytest.mark.proof
@pytest.mark.parametrize("curve", CURVES)
@pytest.mark.parametrize("of", ["conditional acceptance", "acceptance length"])
def test_a_loss_of_ten_percent_is_rolled_back_within_2000_rounds_and_never_promoted(curve, of) -> None:
    change = -0.10 if of == "conditional acceptance" else change_for_length(CURVES[curve], 0.9)
    outcome = simulate(CURVES[curve], change, RUNS, seed=12)
    assert outcome.promoted <= 0.01
    assert outcome.rolled_back >= 0.99
    assert outcome.median_rounds["rolled_back"] <= 2000


def test_a_loss_of_three_percent_is_found_at_last() -> None:
    outcome = simulate(CURVES["high"], -0.03, RUNS // 10, seed=15)
    assert outcome.promoted <= 0.01
    assert outcome.rolled_back >= 0.9


def test_a_loss_is_found_among_moods() -> None:
    """Bets that took no notice of dispersion would be far too high here, and lose."""
    outcome = simulate(CURVES["medium"], -0.10, RUNS // 10, seed=16, mood=0.5)
    assert outcome.promoted <= 0.01
    assert outcome.rolled_back >= 0.99
    assert outcome.median_rounds["rolled_back"] <= 2500


def test_a_gain_of_five_percent_is_promoted_and_hardly_ever_rolled_back() -> None:
    outcome = simulate(CURVES["medium"], 0.05, RUNS, seed=13)
    assert outcome.rolled_back <= 0.01
    assert outcome.promoted >= 0.95


@pytest.mark.fault("a trial that a busy server ended before it could prove anything")
@pytest.mark.parametrize(("change", "decision"), [(-0.10, "rolled_back"), (0.02, "promoted")])
def test_a_busy_server_proves_more_and_not_less(change: float, decision: str) -> None:
    """8,000 rounds a second are 4,000 a window, and 20,000 of them were three pairs. A pair doubles the evidence at most."""
    outcome = simulate(CURVES["medium"], change, 300, seed=17, window_rounds=BUSY_ROUNDS)
    assert getattr(outcome, decision) >= 0.99
    assert 7 <= outcome.median_rounds[decision] / (2 * BUSY_ROUNDS) < 30


def test_equal_versions_on_a_busy_server_are_hardly_ever_told_apart() -> None:
    outcome = simulate(CURVES["medium"], 0.0, 1000, seed=18, window_rounds=BUSY_ROUNDS)
    assert outcome.promoted <= 0.015
    assert outcome.rolled_back <= 0.015


@pytest.mark.fault("a candidate that gains on one workload and loses on another")
@pytest.mark.parametrize("shares", SHARES.values())
def test_a_gain_on_one_workload_does_not_pay_for_a_loss_on_the_other(shares: tuple[float, float]) -> None:
    outcome = simulate(CURVES["high"], TWO["+6/-9"], 200, seed=17, shares=shares)
    assert outcome.promoted <= 0.01
    assert simulate(CURVES["high"], TWO["+5/+5"], 50, seed=18, shares=shares).promoted >= 0.95


def test_windows_are_as_rounds_would_leave_them() -> None:
    settings = CanarySettings()
    rounds = np.full(2000, settings.window_rounds)
    trials, successes = window(np.random.default_rng(0), np.array(CURVES["high"]), rounds)
    assert (trials[:, 0] == settings.window_rounds).all()
    assert (successes <= trials).all()
    assert (trials[:, 1:] <= successes[:, :-1]).all()
    assert successes.sum(axis=0) / trials.sum(axis=0) == pytest.approx(CURVES["high"], abs=0.02)


def test_a_change_for_a_length_makes_that_length() -> None:
    curve = np.array(CURVES["low"])
    shorter = acceptance_length(curve * (1.0 + change_for_length(CURVES["low"], 0.9)))
    assert shorter == pytest.approx(0.9 * acceptance_length(curve))
