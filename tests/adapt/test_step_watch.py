"""A lasting change of step times is noticed once and by its size; odd steps and noise are not."""

from __future__ import annotations

import numpy as np
import pytest

from honed.adapt.step_time import StepTimeLearner
from honed.adapt.step_watch import WINDOWS, StepWatch


@pytest.mark.parametrize(
    ("factor", "window"), [(1.3, WINDOWS[1][0]), (0.75, WINDOWS[1][0]), (2.0, WINDOWS[0][0]), (0.5, WINDOWS[0][0])]
)
def test_a_lasting_change_is_noticed_within_a_window_and_by_its_size(factor: float, window: int) -> None:
    rng, watch = np.random.default_rng(0), StepWatch()
    found = []
    for i, noise in enumerate(rng.normal(0.0, 0.05, 400)):
        found.append(watch.observe(float(np.exp(noise)) * (factor if i >= 200 else 1.0), 1.0))
        if found[-1]:
            break
    assert set(found[:-1]) == {0}
    assert 200 + window // 2 < len(found) <= 200 + window
    assert found[-1] == window
    assert watch.factor == pytest.approx(factor, rel=0.15)


def test_odd_steps_and_noise_are_no_change() -> None:
    rng, watch = np.random.default_rng(1), StepWatch()
    seconds = np.exp(rng.normal(0.0, 0.08, 4000))
    seconds[rng.random(4000) < 0.1] *= 10.0
    assert {watch.observe(float(s), 1.0) for s in seconds} == {0}
    assert 0.02 < watch.spread < 0.15


def test_what_cannot_be_compared_is_left_out() -> None:
    watch = StepWatch()
    assert {watch.observe(0.0, 1.0), watch.observe(1.0, 0.0)} == {0}
    assert watch.spread == 0.0


def learn(learner: StepTimeLearner, factor: float, rounds: int, lengths: tuple[int, ...] = (0, 3, 7)) -> None:
    for i in range(rounds):
        for k in lengths:
            requests = 1 + i % 16
            seconds = factor * (1e-3 + 1e-4 * requests * (1 + k))
            learner.observe(requests, requests * (1 + k), 0, 0, requests * k, k, seconds)


def price(learner: StepTimeLearner, k: int) -> float:
    return learner.model().seconds(16, 16 * (1 + k), 0, 0, k)


@pytest.mark.parametrize("factor", [2.0, 1.0, 3.0])
def test_a_restarted_learner_goes_by_what_it_has_seen_since(factor: float) -> None:
    """Also where what it thinks of earlier steps is wrong."""
    learner = StepTimeLearner()
    learn(learner, 1.0, 400)
    before = price(learner, 7)
    learn(learner, 2.0, 32)
    learner.restart(num_recent=96, factor=factor)
    assert price(learner, 7) == pytest.approx(2.0 * before, rel=0.02)


def test_what_was_not_seen_since_costs_as_many_times_more() -> None:
    learner = StepTimeLearner()
    learn(learner, 1.0, 400)
    before = {k: price(learner, k) for k in (0, 3, 7)}
    learn(learner, 2.0, 64, lengths=(0,))
    learner.restart(num_recent=64, factor=2.0)
    assert learner.is_young
    for k in (0, 3, 7):
        assert price(learner, k) == pytest.approx(2.0 * before[k], rel=0.05)
    learn(learner, 2.0, 64, lengths=(0,))
    assert price(learner, 7) == pytest.approx(2.0 * before[7], rel=0.05)  # it goes on to be known
    learn(learner, 1.0, 64, lengths=(0,))
    learner.restart(num_recent=64, factor=0.5)  # and back
    assert price(learner, 7) == pytest.approx(before[7], rel=0.05)


def test_an_error_of_kinds_not_seen_since_is_no_change_of_the_world() -> None:
    learner = StepTimeLearner()
    learn(learner, 1.0, 400)
    learner.model()
    assert learner.is_familiar(16, 0, 16 * 7, 7)
    learn(learner, 2.0, 64, lengths=(0,))
    learner.restart(num_recent=64, factor=2.0)
    learner.model()
    assert learner.is_familiar(16, 0, 0, 0)
    assert not learner.is_familiar(16, 0, 16 * 7, 7)
    learn(learner, 2.0, 100, lengths=(0, 7))
    learner.model()
    assert learner.is_familiar(16, 0, 16 * 7, 7)
