"""A machine's slow and quick times are told from what kinds of steps cost."""

import numpy as np
import pytest

from honed.adapt.steps.time_groups import GROUP_STEPS, TimeGroups


def draw(rng, num_groups, variance_ratio, own=0.1):
    """Numbers, and residuals of steps whose groups vary by `variance_ratio` times the variance of their own."""
    numbers = np.arange(num_groups * GROUP_STEPS, dtype=np.float64)
    group = np.repeat(rng.standard_normal(num_groups), GROUP_STEPS) * own * np.sqrt(variance_ratio)
    return numbers, group + own * rng.standard_normal(len(numbers))


@pytest.mark.parametrize("variance_ratio", [0.0, 0.5, 4.0])
def test_the_variance_ratio_is_found(variance_ratio):
    numbers, residuals = draw(np.random.default_rng(1), 400, variance_ratio)
    spread = 1.4826 * float(np.median(np.abs(residuals)))
    assert TimeGroups(numbers).variance_ratio(residuals, spread) == pytest.approx(variance_ratio, rel=0.25, abs=0.02)


def test_outliers_are_no_spell():
    numbers, residuals = draw(np.random.default_rng(2), 400, 0.0)
    residuals[::50] += 20.0
    assert TimeGroups(numbers).variance_ratio(residuals, 0.1) < 0.05


def test_the_moments_are_those_of_generalised_least_squares():
    """Against the inverse of the whole covariance, with steps in any order and some in no group."""
    rng, variance_ratio = np.random.default_rng(3), 1.7
    numbers = rng.permutation(np.append(rng.choice(6 * GROUP_STEPS, 40, replace=False).astype(np.float64), [-np.inf] * 5))
    matrix, weights = rng.standard_normal((45, 4)), rng.uniform(0.1, 2.0, 45)
    group = np.array([number // GROUP_STEPS if np.isfinite(number) else -1.0 for number in numbers])
    is_same = (group[:, None] == group) & (group >= 0.0)
    wanted = matrix.T @ np.linalg.inv(np.diag(1.0 / weights) + variance_ratio * is_same) @ matrix
    weighted = matrix * weights[:, None]
    found = weighted.T @ matrix - TimeGroups(numbers).between(weighted, weights, variance_ratio)
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("numbers", [[], [-np.inf, -np.inf], [3.0]])
def test_where_no_two_steps_share_a_spell_there_are_none(numbers):
    groups, count = TimeGroups(np.array(numbers)), len(numbers)
    assert groups.variance_ratio(np.ones(count), 1.0) == 0.0
    assert groups.between(np.ones((count, 2)), np.ones(count), 0.0) == pytest.approx(np.zeros((2, 2)))
