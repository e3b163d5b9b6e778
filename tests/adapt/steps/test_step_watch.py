"""A lasting change of step times is noticed once and by its size; odd steps and noise are not."""

from __future__ import annotations

import numpy as np
import pytest

from honed.adapt.control.step_beliefs import StepBeliefs
from honed.adapt.steps.step_time import StepTimeLearner, StepTimeModel, StepTimeSettings
from honed.adapt.steps.step_watch import WINDOWS, StepWatch, UsualSteps


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


def test_a_spell_is_no_change_where_the_machine_has_many_but_a_greater_change_is() -> None:
    def first_alarm(factor: float, group: float) -> int:
        rng, watch = np.random.default_rng(2), StepWatch()
        noise = rng.normal(0.0, 0.05, 400)
        for i in range(400):
            is_slow = i >= 200 and (i < 248 or factor > 2.0)  # three time groups' worth, or for good
            if watch.observe(float(np.exp(noise[i])) * (factor if is_slow else 1.0), 1.0, group):
                return i
        return 0

    assert 200 < first_alarm(1.7, 0.0) < 248
    assert first_alarm(1.7, 0.2) == 0
    assert 200 < first_alarm(4.5, 0.2) < 220
    assert 200 < first_alarm(4.5, 5.0) < 220


def test_what_cannot_be_compared_is_left_out() -> None:
    watch = StepWatch()
    assert {watch.observe(0.0, 1.0), watch.observe(1.0, 0.0)} == {0}
    assert UsualSteps().observe("kind", (1, 1, 0, 0, 0, False), 0.0, StepTimeModel.of(base=1.0), 1.0) == 0.0


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


def test_what_is_usual_is_told_by_kind_and_context() -> None:
    usual, model = UsualSteps(), StepTimeModel.of(base=1e-2, per_context_token=1e-6)  # off by a factor of 2 and of 3

    def expected(kind: str, requests: int, context: int, seconds: float) -> float:
        step = requests, requests, context, 0, 0, False
        return usual.observe(kind, step, seconds, model, model.seconds(*step))

    assert [expected("small", 1, 1000, 0.02) for _ in range(8)][:3] == [0.0, 0.0, 0.0]
    assert expected("small", 1, 1000, 0.02) == pytest.approx(0.02)
    assert [expected("large", 64, 10_000, 0.06) for _ in range(8)][-1] == pytest.approx(0.06)
    assert expected("small", 1, 12_000, 0.04) == pytest.approx(0.04, rel=1e-4)
    usual.forget()
    assert expected("small", 1, 1000, 0.02) == 0.0


class World:
    """Steps of an engine, told to beliefs; seconds by batch size, whatever the model can make of them."""

    def __init__(self, seconds: dict[int, float]) -> None:
        self.beliefs, self.seconds = StepBeliefs(StepTimeSettings(), ()), seconds
        self.factor = dict.fromkeys(seconds, 1.0)
        self._rng, self._end_ns = np.random.default_rng(0), 10**12

    def run(self, requests: int, steps: int) -> None:
        for _ in range(steps):
            k = int(self._rng.integers(0, 8)) if self._rng.random() < 0.1 else 4
            seconds = self.seconds[requests] * self.factor[requests] * (1.0 + 0.02 * k) * self._rng.lognormal(0.0, 0.03)
            self._end_ns += int(1e9 * seconds)
            row = self._end_ns, int(1e6 * seconds), requests, requests * (1 + k), 0, requests * k, 400 * requests, k
            self.beliefs.observe([row])

    def num_changes(self) -> object:
        return self.beliefs.describe()["world_changes"]


CONCAVE = {1: 10e-3, 4: 16e-3, 16: 24e-3, 64: 40e-3}
"""As of a mixture of experts: the first requests of a batch each bring experts of their own into the step."""


def test_another_batch_size_is_no_change_of_the_world() -> None:
    """However badly the model fits: it was taken for one, again and again, and prices ended at several times the truth."""
    world = World(CONCAVE)
    for _ in range(10):
        for requests in (1, 16, 4, 64, 1, 4):
            world.run(requests, 200)
    assert world.num_changes() == 0
    assert not world.beliefs.is_young
    model = world.beliefs.model()
    for requests, seconds in CONCAVE.items():
        priced = model.seconds(requests, 5 * requests, 400 * requests, 0, 4)
        assert priced == pytest.approx(1.08 * seconds, rel=0.35)
    assert 0.01 < float(str(world.beliefs.describe()["spread"])) < 0.3


def test_a_long_prompt_is_no_change_of_the_world() -> None:
    """Its chunks take longer and longer, since each attends to all before; which chunk a step has isn't told."""
    world, rng = World(CONCAVE), np.random.default_rng(3)
    world.run(4, 400)
    price = world.beliefs.model().seconds(4, 4, 1600, 0, 0)
    for _ in range(6):
        for chunk in range(48):
            seconds = (0.05 + 0.2 * chunk / 48) * rng.lognormal(0.0, 0.02)
            world.beliefs.observe([(0, int(1e6 * seconds), 4, 2052, 2048, 0, 100_000, 0)])
        world.run(4, 100)
    assert world.num_changes() == 0
    assert world.beliefs.model().seconds(4, 4, 1600, 0, 0) == pytest.approx(price, rel=0.15)


@pytest.mark.parametrize("factor", [1.4, 2.5, 0.6])
def test_a_change_of_the_world_is_noticed_once_whatever_the_batch(factor: float) -> None:
    world = World(CONCAVE)
    for requests in (1, 16, 4, 64, 1, 4, 16):
        world.run(requests, 200)
    world.factor = dict.fromkeys(CONCAVE, factor)
    world.run(4, 64)
    assert world.num_changes() == 1
    for requests in (1, 16, 4, 64):
        world.run(requests, 200)
    assert world.num_changes() == 1


def test_what_changed_more_for_some_steps_than_for_others_is_one_change() -> None:
    """Another process on the device slows large batches more than small ones."""
    world = World(CONCAVE)
    for requests in (1, 16, 4, 64, 1, 4, 16):
        world.run(requests, 200)
    world.factor = {1: 1.5, 4: 2.0, 16: 3.0, 64: 4.0}
    for _ in range(3):
        for requests in (1, 16, 4, 64):
            world.run(requests, 200)
    assert world.num_changes() == 1
