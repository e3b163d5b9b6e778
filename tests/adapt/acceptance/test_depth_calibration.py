"""What predictions are worth at each depth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.acceptance.depth_calibration import MOST_INTERCEPT, SLOPES, DepthCalibration, DepthLines
from honed.adapt.acceptance.estimate import EDGE

K = 4


def worth(acceptance, intercepts, slopes):
    return 1.0 / (1.0 + np.exp(-(np.array(intercepts) + np.array(slopes) * np.log(acceptance / (1.0 - acceptance)))))


def teach(calibration, intercepts, slopes, num_rounds, seed=0, drafted=K, **options):
    """Rounds of easy and hard requests; what is predicted of them is worth so much."""
    rng = np.random.default_rng(seed)
    for _ in range(0, num_rounds, 20):
        acceptance = 1.0 / (1.0 + np.exp(-rng.normal(0.3, 1.0, (20, 1)) - np.linspace(0.3, 0.0, K)))
        passed = rng.random((20, K)) < worth(acceptance, intercepts, slopes)
        accepted = np.minimum(np.where(passed.all(axis=1), K, passed.argmin(axis=1)), drafted)
        calibration.observe(acceptance, np.minimum(accepted + 1, drafted), accepted, **options)


@pytest.mark.parametrize(
    ("intercepts", "slopes"), [([0.0] * K, [1.0] * K), ([0.0, 0.8, 0.0, -0.5], [1.1, 1.0, 0.5, 0.6]), ([-1.0] * K, [1.5] * K)]
)
def test_lines_are_found(intercepts, slopes):
    calibration = DepthCalibration(K)
    teach(calibration, intercepts, slopes, 20_000)
    lines = calibration.lines()
    acceptance = np.linspace(0.3, 0.8, 6)[:, None] * np.ones(K)
    assert lines.apply(acceptance) == pytest.approx(worth(acceptance, intercepts, slopes), abs=0.09)


def test_few_rounds_say_little_and_none_nothing():
    calibration = DepthCalibration(K)
    assert calibration.lines().are_none
    teach(calibration, [1.0] * K, [1.0] * K, 20)
    few = calibration.lines().intercepts
    teach(calibration, [1.0] * K, [1.0] * K, 2000)
    assert 0.0 < few[0] < 0.6 < calibration.lines().intercepts[0]


def test_rounds_that_repeat_each_other_count_less():
    alone, together = DepthCalibration(K), DepthCalibration(K)
    teach(alone, [1.0] * K, [1.0] * K, 60)
    teach(together, [1.0] * K, [1.0] * K, 60, design_effect=8.0)
    assert 0.0 < together.lines().intercepts[0] < 0.6 * alone.lines().intercepts[0]


def test_a_workload_of_which_little_was_seen_has_the_engines_lines():
    engine, workload = DepthCalibration(K), DepthCalibration(K)
    teach(engine, [0.0, 0.9, 0.0, 0.0], [1.0] * K, 4000)
    around = engine.lines()
    assert workload.lines(around).intercepts == pytest.approx(around.intercepts, abs=1e-6)
    teach(workload, [0.0, -0.9, 0.0, 0.0], [1.0] * K, 4000)
    assert workload.lines(around).intercepts[1] < -0.4


def test_what_was_learned_long_ago_fades():
    calibration = DepthCalibration(K)
    teach(calibration, [0.9] * K, [1.0] * K, 4000)
    teach(calibration, [-0.9] * K, [1.0] * K, 8000)
    assert calibration.lines().intercepts[0] == pytest.approx(-0.9, abs=0.25)


def test_depths_that_no_round_reached_stay_as_they_are():
    calibration = DepthCalibration(K)
    teach(calibration, [1.0] * K, [1.0] * K, 2000, drafted=2)
    lines = calibration.lines()
    assert (lines.intercepts[2:] == 0.0).all()
    assert (lines.slopes[2:] == 1.0).all()


figures = st.lists(st.floats(), max_size=6)


@given(figures, figures, st.lists(st.floats(EDGE, 1.0 - EDGE), min_size=K, max_size=K))
def test_whatever_lines_come_acceptance_stays_one_and_rises_with_the_curve(intercepts, slopes, acceptance):
    lines = DepthLines.usable(intercepts, slopes, K)
    assert (np.abs(lines.intercepts) <= MOST_INTERCEPT).all()
    assert ((lines.slopes >= SLOPES[0]) & (lines.slopes <= SLOPES[1])).all()
    low = np.array(acceptance)
    found, higher = lines.apply(low), lines.apply(np.minimum(low + 0.01, 1.0 - EDGE))
    assert ((found >= EDGE) & (found <= 1.0 - EDGE)).all()
    assert (higher >= found - 1e-12).all()


def test_lines_of_another_length_or_without_numbers_are_none():
    assert DepthLines.usable([], [], K).are_none
    assert DepthLines.usable([0.1] * (K + 1), [1.0] * (K + 1), K).are_none
    assert DepthLines.usable([0.1] * K, [1.0] * (K - 1) + [float("nan")], K).are_none
    assert not DepthLines.usable([0.1] * K, [1.0] * K, K).are_none
