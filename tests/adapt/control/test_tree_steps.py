"""Steps with chains and steps with trees are learned apart, on one machine."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from honed.adapt.acceptance.rounds import steps_with_trees
from honed.adapt.control.step_beliefs import StepBeliefs, step_rows
from honed.adapt.protocol.wire import StepColumns
from honed.adapt.steps.step_time import StepTimeModel, StepTimeSettings
from tests.adapt.simulate import make_batch

CHAIN = StepTimeModel.of(base=10e-3, per_token=0.2e-3, drafting=1e-3)
TREE = StepTimeModel.of(base=14e-3, per_token=0.2e-3, drafting=1e-3)


class Machine:
    """Runs steps of two requests, and tells their times."""

    def __init__(self) -> None:
        self.beliefs, self.rng = StepBeliefs(StepTimeSettings(), ()), np.random.default_rng(0)
        self.now_ns, self.factor = 0, 1.0

    def play(self, drafts: list[int], *, has_trees: bool, extra_s: dict[int, float] | None = None) -> None:
        """Play steps that verify so many drafts a request."""
        rows = []
        for number, k in enumerate(drafts):
            model, drafted = TREE if has_trees and k else CHAIN, 2 * k
            seconds = self.factor * model.seconds(2, 2 + drafted, 200, 0, 7, k > 0) * self.rng.normal(1.0, 0.01)
            seconds += (extra_s or {}).get(number, 0.0)
            self.now_ns += int(1e9 * seconds)
            rows.append((self.now_ns, int(1e6 * seconds), 2, 2 + drafted, 0, drafted, 200, 7))
        self.beliefs.observe(rows, [has_trees and k > 0 for k in drafts])

    def price(self, k: int) -> tuple[float, float]:
        """Predicted seconds of a step with so many drafts a request, of chains and of trees."""
        of_chains, of_trees = self.beliefs.model(), self.beliefs.tree_model()
        return of_chains.seconds(2, 2 + 2 * k, 200, 0, 7), of_trees.seconds(2, 2 + 2 * k, 200, 0, 7)


def learned() -> Machine:
    machine = Machine()
    for _ in range(12):
        machine.play([0, 7, 3, 7, 0, 3] * 8, has_trees=False)
        machine.play([0, 15, 7, 15, 0, 7] * 8, has_trees=True)
    return machine


def test_each_kind_has_its_own_price() -> None:
    of_chains, of_trees = learned().price(7)
    assert of_chains == pytest.approx(CHAIN.seconds(2, 16, 200, 0, 7), rel=0.02)
    assert of_trees == pytest.approx(TREE.seconds(2, 16, 200, 0, 7), rel=0.02)


def test_a_change_that_one_kind_shows_is_believed_of_the_other() -> None:
    """Trees kept the price of a slow hour, and were hardly tried for it."""
    machine = learned()
    machine.play([0, 7, 3, 7, 0, 3] * 20, has_trees=False)
    machine.factor = 2.0
    for _ in range(20):
        machine.play([0, 7, 3, 7, 0, 3] * 8, has_trees=False)
    for now, true in zip(machine.price(7), (CHAIN, TREE), strict=True):
        assert now == pytest.approx(2.0 * true.seconds(2, 16, 200, 0, 7), rel=0.1)


def test_few_trees_tell_no_price() -> None:
    """The first ones compile kernels."""
    machine = Machine()
    for _ in range(10):
        machine.play([0, 7, 3, 7, 0, 3] * 8, has_trees=False)
    machine.play([15, 15, 7], has_trees=True, extra_s={0: 3.0, 1: 0.9})
    machine.play([0] * 60, has_trees=False)
    assert machine.beliefs.model().is_ready
    assert not machine.beliefs.tree_model().is_ready
    machine.play([15, 7, 0] * 30, has_trees=True)
    assert machine.price(15)[1] == pytest.approx(TREE.seconds(2, 32, 200, 0, 7), rel=0.05)


def test_a_step_that_drafts_for_another_kind_than_it_verifies_counts_for_none() -> None:
    machine = Machine()
    for _ in range(40):  # growing trees takes 5 ms
        machine.play([7, 3, 7, 3, 7, 3], has_trees=False, extra_s={5: 5e-3})
        machine.play([15, 7, 15, 7, 15, 7], has_trees=True)
        machine.play([0, 0, 0], has_trees=False)
    assert machine.price(3)[0] == pytest.approx(CHAIN.seconds(2, 8, 200, 0, 7), rel=0.02)
    assert machine.price(7)[0] == pytest.approx(CHAIN.seconds(2, 16, 200, 0, 7), rel=0.02)


def test_what_a_step_verified_is_told_by_its_rounds() -> None:
    batch = make_batch([3, 15, 0], [1, 4, 0])
    rounds = msgspec.structs.replace(batch.rounds, step=[1, 2, 3], chain_tokens=[0, 7, 0])
    steps = StepColumns(step=[1, 2, 3, 4], num_draft_tokens=[3, 15, 0, 15])
    batch = msgspec.structs.replace(batch, rounds=rounds, steps=steps)
    assert steps_with_trees(batch) == [False, True, False, None], "those of the last step were of requests that had ended"


def test_step_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(ValueError, match="unequal length"):
        step_rows(StepColumns(step=[1, 2], end_ns=[1]))
