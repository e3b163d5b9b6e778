"""Whether a change of the world changed what steps cost beside each other, as far as the steps since then tell."""

from __future__ import annotations

import numpy as np
import pytest

from honed.adapt.steps.spells import SPELL_STEPS
from honed.adapt.steps.world_change import History, Scatter, WorldChange

NOISY = Scatter(own=0.1, likeness=1.0)


def make_change(
    factors: dict[int, float], steps: int, scatter: Scatter = NOISY, seed: int = 0, expected: float = 0.09
) -> WorldChange:
    """Steps of each draft length in turn, a spell long each, which take so many times as long as before."""
    rng, change = np.random.default_rng(seed), WorldChange(100, 1.0, scatter, expected)
    number = 101
    for start in range(0, steps, SPELL_STEPS):
        for length, factor in factors.items():
            spell = rng.normal(0.0, scatter.own * scatter.likeness**0.5)
            for _ in range(min(SPELL_STEPS, steps - start)):
                change.observe(length, number, float(np.log(factor) + spell + rng.normal(0.0, scatter.own)))
                number += 1
    return change


def test_nothing_seen_is_what_was_noticed_and_what_is_to_be_expected() -> None:
    found = WorldChange(0, 1.5, NOISY, 0.04).difference
    assert found == (pytest.approx(np.log(1.5)), 0.04, 0.0)


def test_one_length_says_how_much_longer_and_nothing_of_the_others() -> None:
    found = make_change({3: 2.0}, 64).difference
    assert found.shift == pytest.approx(np.log(2.0), abs=0.1)
    assert found.variance == pytest.approx(0.09)
    assert found.evidence == 0.0


def test_a_change_of_all_alike_is_told_from_one_of_some() -> None:
    alike = [make_change({0: 1.6, 1: 1.6, 3: 1.6}, 64, seed=seed).difference for seed in range(20)]
    unlike = [make_change({0: 1.1, 1: 1.6, 3: 2.2}, 64, seed=seed).difference for seed in range(20)]
    assert np.median([one.variance for one in alike]) < 0.01
    assert np.median([one.variance for one in unlike]) == pytest.approx(np.var(np.log([1.1, 1.6, 2.2]), ddof=1), rel=0.3)
    assert min(one.evidence for one in alike) > 1.5
    assert np.mean([one.shift for one in alike]) == pytest.approx(np.log(1.6), abs=0.03)


def test_scatter_and_spells_are_not_taken_for_a_difference() -> None:
    """A few steps of each of two lengths on a noisy machine say little, either way."""
    few = [make_change({0: 1.6, 3: 1.6}, 2, seed=seed).difference for seed in range(50)]
    assert np.mean([one.evidence for one in few]) < 0.9
    quiet = Scatter(own=0.02, likeness=0.0)
    as_few = [make_change({0: 1.6, 3: 1.6}, 2, quiet, seed=seed).difference for seed in range(50)]
    assert np.mean([one.evidence for one in as_few]) > 0.95


def test_odd_steps_do_not_matter() -> None:
    change = WorldChange(0, 1.0, Scatter(0.02, 0.0), 0.09)
    for number in range(1, 41):
        for length in (0, 3):
            change.observe(length, number, 1.1 if number % 10 == 0 else 0.3)
    assert change.difference.variance < 0.01
    assert change.difference.shift == pytest.approx(0.3, abs=0.01)


def test_a_machine_whose_changes_were_harmless_is_trusted_until_one_was_not() -> None:
    history = History()
    expected = [history.variance]
    for seed in range(4):
        history.note(make_change({0: 1.6, 3: 1.6}, 64, seed=seed, expected=history.variance).difference)
        expected.append(history.variance)
    assert expected[0] == pytest.approx(0.09)
    assert expected[2] < 0.02
    assert expected[-1] < 0.012
    history.note(make_change({0: 1.0, 3: 2.0}, 64, expected=history.variance).difference)
    assert history.variance > 0.04


def test_a_change_of_which_nothing_was_seen_teaches_nothing() -> None:
    history = History()
    history.note(WorldChange(0, 1.5, NOISY, history.variance).difference)
    assert history.variance == pytest.approx(0.09)
