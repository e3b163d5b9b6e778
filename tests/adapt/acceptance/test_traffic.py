import numpy as np
import pytest

from honed.adapt.acceptance.estimate import reached_and_accepted, survival
from honed.adapt.acceptance.traffic import Traffic
from tests.adapt.simulate import simulate_rounds

EASY, HARD = np.full(7, 0.9), np.full(7, 0.5)
LONGEST = np.array([0.0, 0.0, 1.0])


def test_the_mean_is_that_of_rounds_though_easy_requests_get_longer_drafts():
    """By successes / trials, half of the hard rounds that pass two drafts went on as easily as the easy ones."""
    rng, traffic = np.random.default_rng(0), Traffic(7, 4000.0)
    for _ in range(50):
        for curve, drafted in ((EASY, 7), (HARD, 2)):
            rounds = np.full(60, drafted), simulate_rounds(rng, curve, np.full(60, drafted))
            traffic.observe(np.tile(curve, (60, 1)), *reached_and_accepted(*rounds, 7), 60.0)
    truth = (survival(EASY) + survival(HARD)) / 2.0
    assert survival(traffic.curve(LONGEST, HARD)) == pytest.approx(truth, abs=0.02)


def test_before_any_round_it_is_the_guess_and_a_short_memory_follows_a_change():
    rng, traffic = np.random.default_rng(1), Traffic(7, 4000.0)
    assert traffic.curve(np.full(3, 1 / 3), EASY) == pytest.approx(EASY)
    for curve, count in ((EASY, 4000), (HARD, 200)):
        rounds = reached_and_accepted(np.full(count, 7), simulate_rounds(rng, curve, np.full(count, 7)), 7)
        for at in range(0, count, 50):
            one = slice(at, at + 50)
            traffic.observe(np.tile(curve, (50, 1)), rounds[0][one], rounds[1][one], 50.0)
    short, longest = (traffic.curve(weights, EASY)[0] for weights in (LONGEST[::-1], LONGEST))
    assert short == pytest.approx(0.5, abs=0.15)
    assert longest > 0.8
    traffic.forget(0.0)
    assert traffic.curve(LONGEST, HARD) == pytest.approx(HARD)
