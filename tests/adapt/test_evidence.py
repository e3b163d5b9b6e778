"""The evidence is fair: to exchange the two versions changes its sign, whatever the traffic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.evidence import BETS, Evidence

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


def test_the_bets_weigh_one_together():
    assert sum(BETS.values()) == pytest.approx(1.0)


def test_a_state_comes_back_and_one_of_other_bets_is_refused():
    evidence = Evidence(K)
    evidence.add(np.array(1.5), np.array(30.0))
    again = Evidence.restored(evidence.state())
    assert (again.log_e == evidence.log_e).all()
    assert again.change == evidence.change
    with pytest.raises(ValueError, match="other bets"):
        Evidence.restored(evidence.state() | {"log_bets": [[0.0], [0.0]]})
