"""What kinds of steps cost beside the smooth price is told from noise, and from what steps in a row have in common."""

import numpy as np
import pytest

from honed.adapt.steps.kind_effects import kind_effects
from honed.adapt.steps.time_groups import GROUP_STEPS


def draw(rng, effects, num_runs, groups=0.1, own=0.06, run_steps=40):
    """Steps in runs of one kind each, as when a setting stays for some seconds; the machine is slow and quick meanwhile."""
    kind = np.repeat(rng.integers(0, len(effects), num_runs), run_steps)
    kind[: len(effects)] = np.arange(len(effects))
    numbers = np.arange(len(kind), dtype=np.float64)
    group = (numbers // GROUP_STEPS).astype(np.int64)
    of_groups = groups * rng.standard_normal(int(group.max()) + 1)
    return effects[kind] + of_groups[group] + own * rng.standard_normal(len(kind)), kind, numbers


def spread_of(residuals):
    return 1.4826 * float(np.median(np.abs(residuals)))


@pytest.mark.parametrize("groups", [0.0, 0.1])
def test_effects_are_found_beside_time_groups(groups):
    rng = np.random.default_rng(1)
    effects = 0.08 * rng.standard_normal(24)
    residuals, kind, numbers = draw(rng, effects, 400, groups)
    found = kind_effects(residuals, kind, numbers, spread_of(residuals))
    assert np.abs(found - (effects - effects[kind].mean())).mean() < (0.012 if groups else 0.004)


@pytest.mark.parametrize("seed", range(6))
def test_where_there_are_none_next_to_nothing_is_found(seed):
    rng = np.random.default_rng(seed)
    residuals, kind, numbers = draw(rng, np.zeros(24), 60, groups=0.15)
    assert np.abs(kind_effects(residuals, kind, numbers, spread_of(residuals))).max() < 0.03


def test_a_kind_that_was_only_seen_in_a_slow_spell_is_hardly_blamed():
    rng = np.random.default_rng(3)
    effects = 0.02 * rng.standard_normal(12)
    residuals, kind, numbers = draw(rng, effects, 200)
    slow = np.full(GROUP_STEPS, 0.25) + 0.06 * rng.standard_normal(GROUP_STEPS)
    residuals, kind = np.append(residuals, slow), np.append(kind, np.full(GROUP_STEPS, 12))
    first = GROUP_STEPS * (numbers[-1] // GROUP_STEPS + 1)
    found = kind_effects(residuals, kind, np.append(numbers, first + np.arange(GROUP_STEPS)), spread_of(residuals))
    assert abs(found[12]) < 0.05


def test_outliers_are_no_effect():
    rng = np.random.default_rng(4)
    residuals, kind, numbers = draw(rng, 0.05 * rng.standard_normal(12), 200)
    wild = residuals.copy()
    wild[::97] += 30.0
    spread = spread_of(residuals)
    before, after = (kind_effects(one, kind, numbers, spread) for one in (residuals, wild))
    assert np.abs(after - before).max() < 0.015


@pytest.mark.fault("a rare kind of steps whose effect was lost")
@pytest.mark.parametrize("seed", range(4))
def test_a_rare_kind_with_a_large_effect_keeps_it(seed):
    """8 of 500 steps took a third less time: cut off around 0, and outnumbered among pairs of steps, they had no effect."""
    rng = np.random.default_rng(seed)
    kind = np.zeros(500, dtype=np.int64)
    kind[250:], kind[60::60] = 1, 2
    residuals = np.array([0.01, -0.01, -0.33])[kind] + 0.03 * rng.standard_normal(500)
    found = kind_effects(residuals, kind, np.arange(500.0), spread_of(residuals))
    assert found[2] - found[0] < -0.25


@pytest.mark.parametrize("kinds", [[], [0], [0, 0, 0], [0, 1]])
def test_too_little_says_nothing(kinds):
    count = len(kinds)
    found = kind_effects(np.full(count, 0.3), np.array(kinds, dtype=np.int64), np.arange(count, dtype=np.float64), 0.1)
    assert found.tolist() == [0.0] * (max(kinds) + 1 if kinds else 0)
