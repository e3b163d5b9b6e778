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


def test_a_restarted_learner_knows_only_what_it_has_seen_since() -> None:
    learner = StepTimeLearner()

    def learn(factor: float, rounds: int) -> None:
        for i in range(rounds):
            for k in (0, 3, 7):
                requests = 1 + i % 16
                seconds = factor * (1e-3 + 1e-4 * requests * (1 + k))
                learner.observe(requests, requests * (1 + k), 0, 0, requests * k, k, seconds)

    learn(1.0, 400)
    before = learner.model().seconds(16, 128, 0, 0, 7)
    learn(2.0, 32)
    learner.restart(num_recent=96)
    assert learner.model().seconds(16, 128, 0, 0, 7) == pytest.approx(2.0 * before, rel=0.02)
