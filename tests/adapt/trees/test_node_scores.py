import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.trees.draft_tree import build_tree
from honed.adapt.trees.node_scores import (
    UNKNOWN,
    NodeCalibration,
    NodeScores,
    NodeScoreSettings,
    fit_platt,
    log_odds,
    temperature_bucket,
)

seeds = st.integers(0, 2**32 - 1)


def make_log_probs(seed, rounds, depths, width):
    rng = np.random.default_rng(seed)
    probabilities = np.sort(rng.dirichlet(np.full(width + 1, 0.5), size=(rounds, depths)) + 1e-9, axis=2)
    return np.minimum(np.log(probabilities[:, :, ::-1][:, :, :width]), 0.0)


def take(rng, log_probs, slope, shift):
    """Rounds whose targets take candidate r with σ(slope·logit q + shift), as far as the walk goes."""
    rounds, depths, width = log_probs.shape
    chance = 1.0 / (1.0 + np.exp(-(slope * log_odds(log_probs) + shift)))
    chance /= np.maximum(chance.sum(axis=2, keepdims=True), 1.0)
    drawn = (rng.random((rounds, depths, 1)) > np.cumsum(chance, axis=2)).sum(axis=2)
    over = np.cumsum(drawn == width, axis=1) - (drawn == width) > 0
    return np.where(over, UNKNOWN, drawn)


@given(seeds, st.integers(1, 8), st.integers(1, 8), st.floats(0.0, 2.0))
def test_without_data_nothing_changes(seed, depths, width, temperature):
    log_probs = make_log_probs(seed, 1, depths, width)[0]
    scores = NodeScores(8).scores(log_probs, temperature)
    likely = log_probs > -11.0
    assert np.allclose(scores[:, likely], log_probs[likely], atol=1e-4)


@given(seeds, st.integers(1, 200), st.floats(0.05, 3.0), st.floats(-3.0, 3.0))
def test_scores_are_sorted_probabilities_that_a_tree_can_be_built_of(seed, rounds, slope, shift):
    rng = np.random.default_rng(seed)
    log_probs = make_log_probs(seed, rounds, 5, 6)
    learned = NodeScores(5)
    learned.observe(log_probs, take(rng, log_probs, slope, shift), rng.choice([0.0, 0.8], rounds))
    scores = learned.scores(log_probs[0], 0.8)
    assert scores.shape == (2, 5, 6)
    assert (np.exp(scores).sum(axis=2) <= 1.0 + 1e-9).all()
    assert (np.diff(scores, axis=2) <= 0.0).all()
    assert (np.diff(build_tree(scores[0], 30, off_chain=scores[1]).score) <= 1e-12).all()


def test_the_map_that_made_the_data_is_found():
    rng, log_probs = np.random.default_rng(0), make_log_probs(0, 6000, 3, 4)
    learned = NodeScores(3)
    learned.observe(log_probs, take(rng, log_probs, 0.6, -1.0), np.full(6000, 0.8))
    slope, shift = learned.maps(0.8)[0, 0]
    assert slope == pytest.approx(0.6, abs=0.05)
    assert shift == pytest.approx(-1.0, abs=0.1)


def test_temperatures_are_told_apart_and_an_unseen_one_starts_from_the_rest():
    rng, log_probs = np.random.default_rng(1), make_log_probs(1, 4000, 2, 4)
    learned = NodeScores(2)
    learned.observe(log_probs, take(rng, log_probs, 1.0, 0.0), np.zeros(4000))
    learned.observe(log_probs, take(rng, log_probs, 0.5, -2.0), np.full(4000, 1.3))
    cold, unseen, hot = (learned.maps(t)[0, 0, 1] for t in (0.0, 0.3, 1.3))
    assert hot < unseen < cold
    assert temperature_bucket(np.array([0.0, 0.2, 0.5, 0.7, 1.0, 1.1, float("nan")])).tolist() == [0, 1, 1, 2, 2, 3, 2]


def test_what_the_walk_did_not_reach_teaches_nothing():
    log_probs = make_log_probs(2, 1, 3, 2)
    ends, goes_on = NodeScores(3), NodeScores(3)
    ends.observe(log_probs, np.array([[2, UNKNOWN, UNKNOWN]]), np.zeros(1))
    goes_on.observe(log_probs, np.array([[2, 0, 1]]), np.zeros(1))  # nothing was taken at depth 1: the rest isn't looked at
    assert (ends.maps(0.0) == goes_on.maps(0.0)).all()
    nothing = NodeScores(3)
    nothing.observe(log_probs, np.full((1, 3), UNKNOWN), np.zeros(1))
    assert (nothing.maps(0.0) == [1.0, 0.0]).all()


def test_leaving_the_chain_is_learned_separately():
    rng, log_probs = np.random.default_rng(3), make_log_probs(3, 8000, 2, 3)
    taken = take(rng, log_probs, 1.0, 0.0)
    taken[(taken[:, 0] > 0) & (taken[:, 1] != UNKNOWN), 1] = 3  # off the chain nothing of depth 2 is ever right
    learned = NodeScores(2)
    learned.observe(log_probs, taken, np.zeros(8000))
    on, off = np.exp(learned.scores(np.log(np.full((2, 3), 0.3)), 0.0))[:, 1]
    assert on[0] == pytest.approx(0.3, abs=0.04)
    assert off[0] < 0.02


@given(seeds, st.integers(1, 50))
def test_the_order_of_rounds_within_a_batch_does_not_matter(seed, rounds):
    rng = np.random.default_rng(seed)
    log_probs = make_log_probs(seed, rounds, 3, 4)
    taken, temperature = take(rng, log_probs, 0.7, -0.5), rng.choice([0.0, 0.8], rounds)
    order = rng.permutation(rounds)
    first, second = NodeScores(3), NodeScores(3)
    first.observe(log_probs, taken, temperature)
    second.observe(log_probs[order], taken[order], temperature[order])
    assert np.allclose(first.maps(0.8), second.maps(0.8), atol=1e-6)


def test_what_was_seen_is_forgotten():
    rng, log_probs = np.random.default_rng(4), make_log_probs(4, 3000, 1, 4)
    learned = NodeScores(1, NodeScoreSettings(forgetting_rounds=500.0))
    for shift in (1.0, -2.0):
        for part in np.split(np.arange(3000), 30):
            learned.observe(log_probs[part], take(rng, log_probs[part], 1.0, shift), np.zeros(100))
    assert learned.maps(0.0)[0, 0, 1] == pytest.approx(-2.0, abs=0.4)


def test_forbidden_candidates_stay_forbidden_and_nan_is_refused():
    log_probs = np.array([[-0.1, -np.inf]])
    learned = NodeScores(1)
    learned.observe(log_probs[None], np.array([[0]]), np.zeros(1))
    assert learned.scores(log_probs, 0.0)[0, 0, 1] == -np.inf
    with pytest.raises(ValueError, match="numbers"):
        learned.scores(np.array([[float("nan"), -1.0]]), 0.0)
    with pytest.raises(ValueError, match="depths"):
        learned.scores(np.zeros((2, 1)), 0.0)


def test_no_rounds_one_round_and_a_thousand():
    for rounds in (0, 1, 1024):
        learned = NodeScores(4)
        log_probs = make_log_probs(5, rounds, 4, 8)
        learned.observe(log_probs, np.zeros((rounds, 4), dtype=np.int64), np.zeros(rounds))
        assert learned.num_rounds == rounds
        assert np.isfinite(learned.maps(0.0)).all()


@given(seeds, st.floats(-3, 3), st.floats(0.05, 3))
def test_a_fit_is_where_the_gradient_vanishes(seed, b0, w0):
    rng = np.random.default_rng(seed)
    x = np.sort(rng.uniform(-8, 8, 12))
    tried = rng.integers(0, 50, 12).astype(float)
    taken = rng.binomial(tried.astype(int), 0.5).astype(float)
    w, b = fit_platt(np.stack([tried, taken, tried * x]), np.array([w0, b0]), 8.0)
    error = taken - tried / (1.0 + np.exp(-(w * x + b)))
    assert error.sum() - 2.0 * (b - b0) == pytest.approx(0.0, abs=1e-4)
    slope = float((error * x).sum() - 8.0 * (w - w0))
    assert slope == pytest.approx(0.0, abs=1e-3) or (w == pytest.approx(0.05) and slope < 0.0)


def test_calibration_error_counts_what_was_predicted_and_came():
    calibration = NodeCalibration()
    assert np.isnan(calibration.error)
    calibration.observe(np.full(10, 0.8), np.array([1.0] * 4 + [0.0] * 6))
    assert calibration.error == pytest.approx(0.4)
    assert calibration.bias == pytest.approx(2.0)
