"""The evidence is fair: to exchange the two versions changes its sign, whatever the traffic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.monitor.evidence import BETTER_BETS, MARGINS, WORSE_BETS, Evidence

K = 4
counts = st.lists(st.integers(0, 60), min_size=K, max_size=K)


def trials_of(tried, passed):
    """Counts that rounds could have left: successes within trials."""
    trials = np.array(tried, dtype=float)
    return trials, np.minimum(np.array(passed, dtype=float), trials)


@given(counts, counts, counts, counts)
def test_exchanging_the_versions_turns_the_score_around(tried_a, passed_a, tried_b, passed_b):
    a, b = trials_of(tried_a, passed_a), trials_of(tried_b, passed_b)
    one, other = Evidence(K), Evidence(K)
    forward, backward = one.weigh(*a, *b), other.weigh(*b, *a)
    assert forward[0] == pytest.approx(-backward[0], abs=1e-9)
    assert forward[1] == pytest.approx(backward[1])


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_over_both_signs_of_every_score_the_e_value_averages_to_one_at_most(scores):
    """The whole argument, in figures: E[exp(λD)/cosh(λD)] = 1 for D = ±|D| with a fair coin, for each bet and for the mean."""
    both = Evidence(K, (2,))
    both.add(np.array([scores[0], -scores[0]]), np.ones(2))
    assert np.exp(both.log_e).mean(axis=0) == pytest.approx(np.ones(2))
    for score in scores:
        one = Evidence(K)
        before = one.log_e.copy()
        one.add(np.array(score), np.array(1.0))
        assert (one.log_e - before <= np.log(2.0) + 1e-9).all()  # a pair at most doubles it


def test_dispersion_is_one_for_independent_rounds_and_what_it_is_for_others():
    rng = np.random.default_rng(1)
    information = np.full(2000, 4.0)
    for times in (1.0, 5.0):
        evidence = Evidence(K, (2000,))
        for _ in range(200):
            evidence.add(rng.normal(0.0, np.sqrt(times * information)), information)
        assert np.mean(evidence.dispersion) == pytest.approx(times, rel=0.12)
        assert (evidence.dispersion >= 1.0).all()


def test_a_difference_is_no_dispersion():
    rng, evidence = np.random.default_rng(3), Evidence(K)
    for _ in range(100):
        evidence.add(np.array(40.0 + rng.normal(0.0, 2.0)), np.array(4.0))
    assert float(evidence.dispersion) == pytest.approx(1.0, abs=0.2)  # D² / I is 400


@given(st.lists(st.floats(-50.0, 50.0), min_size=1, max_size=30), st.floats(0.1, 50.0))
def test_the_sign_of_a_pair_does_not_choose_its_bet(scores, information):
    """So that, whatever came before, both signs together leave the e-values as they were."""
    both = Evidence(K, (2,))
    for score in scores[:-1]:
        both.add(np.full(2, score), np.full(2, information))
    before = both.log_e[0]
    both.add(np.array([scores[-1], -scores[-1]]), np.full(2, information))
    assert np.logaddexp.reduce(both.log_e, axis=0) - np.log(2.0) == pytest.approx(before, abs=1e-9)


@pytest.mark.parametrize(("share", "margin"), [(0.1, 0.04), (0.05, 0.08), (0.025, 0.16)])
def test_a_loss_beyond_the_margin_is_rarely_taken_for_none_and_equality_is_recognised(share, margin):
    assert margin in MARGINS
    rng, information = np.random.default_rng(5), np.full(300, 8.0)
    for change, least, most in ((-margin, 0.0, 0.07), (-1.5 * margin, 0.0, 0.01), (0.0, 0.85, 1.0)):
        evidence, is_held = Evidence(K, (300,)), np.zeros(300, bool)
        for _ in range(1000):
            evidence.add(rng.normal(change * information, np.sqrt(information)), information)
            is_held |= evidence.log_e_held(np.full(300, share)) >= np.log(20.0)
        assert least <= is_held.mean() <= most


def test_nothing_seen_in_one_of_the_windows_says_nothing():
    evidence = Evidence(K)
    score, information = evidence.weigh(np.zeros(K), np.zeros(K), np.full(K, 50.0), np.full(K, 10.0))
    assert (float(score), float(information)) == (0.0, 0.0)
    assert float(evidence.change) == 0.0


def test_the_change_is_estimated():
    rng, evidence = np.random.default_rng(0), Evidence(K)
    for _ in range(400):
        tried = np.full(K, 100)
        old, new = rng.binomial(tried, 0.6), rng.binomial(tried, 0.66)
        evidence.add(*evidence.weigh(tried.astype(float), old.astype(float), tried.astype(float), new.astype(float)))
    assert float(evidence.change) == pytest.approx(0.10, abs=0.02)


def test_bets_are_on_the_same_changes_and_weigh_one_together():
    assert sum(WORSE_BETS.values()) == sum(BETTER_BETS.values()) == pytest.approx(1.0)
    assert WORSE_BETS.keys() == BETTER_BETS.keys()


def test_a_state_comes_back_and_one_of_other_bets_is_refused():
    evidence = Evidence(K)
    evidence.add(np.array(1.5), np.array(30.0))
    again = Evidence.restored(evidence.state())
    assert (again.log_e == evidence.log_e).all()
    assert again.change == evidence.change
    with pytest.raises(ValueError, match="other bets"):
        Evidence.restored(evidence.state() | {"log_bets": [[0.0], [0.0]]})
