"""A machine's slow and quick spells are told from what kinds of steps cost."""

import numpy as np
import pytest

from honed.adapt.steps.spells import SPELL_STEPS, Spells


def draw(rng, num_spells, likeness, own=0.1):
    """Numbers, and residuals of steps whose spells vary by `likeness` times the variance of their own."""
    numbers = np.arange(num_spells * SPELL_STEPS, dtype=np.float64)
    spell = np.repeat(rng.standard_normal(num_spells), SPELL_STEPS) * own * np.sqrt(likeness)
    return numbers, spell + own * rng.standard_normal(len(numbers))


@pytest.mark.parametrize("likeness", [0.0, 0.5, 4.0])
def test_the_likeness_of_steps_within_a_spell_is_found(likeness):
    numbers, residuals = draw(np.random.default_rng(1), 400, likeness)
    spread = 1.4826 * float(np.median(np.abs(residuals)))
    assert Spells(numbers).likeness(residuals, spread) == pytest.approx(likeness, rel=0.25, abs=0.02)


def test_outliers_are_no_spell():
    numbers, residuals = draw(np.random.default_rng(2), 400, 0.0)
    residuals[::50] += 20.0
    assert Spells(numbers).likeness(residuals, 0.1) < 0.05


def test_the_moments_are_those_of_generalised_least_squares():
    """Against the inverse of the whole covariance, with steps in any order and some in no spell."""
    rng, likeness = np.random.default_rng(3), 1.7
    numbers = rng.permutation(np.append(rng.choice(6 * SPELL_STEPS, 40, replace=False).astype(np.float64), [-np.inf] * 5))
    matrix, weights = rng.standard_normal((45, 4)), rng.uniform(0.1, 2.0, 45)
    spell = np.array([number // SPELL_STEPS if np.isfinite(number) else -1.0 for number in numbers])
    is_same = (spell[:, None] == spell) & (spell >= 0.0)
    wanted = matrix.T @ np.linalg.inv(np.diag(1.0 / weights) + likeness * is_same) @ matrix
    weighted = matrix * weights[:, None]
    found = weighted.T @ matrix - Spells(numbers).between(weighted, weights, likeness)
    assert found == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("numbers", [[], [-np.inf, -np.inf], [3.0]])
def test_where_no_two_steps_share_a_spell_there_are_none(numbers):
    spells, count = Spells(np.array(numbers)), len(numbers)
    assert spells.likeness(np.ones(count), 1.0) == 0.0
    assert spells.between(np.ones((count, 2)), np.ones(count), 0.0) == pytest.approx(np.zeros((2, 2)))
