from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.lengths.block_size import OperatingPoint, choose
from honed.adapt.steps.step_time import PARAMETERS, StepTimeModel, batch_kind
from honed.adapt.trees.budget import TreeBudget, TreeBudgetSettings, TreeLimits, choose_nodes, stack_gains, sunk
from honed.adapt.trees.draft_tree import build_tree

CAPTURED = (1, 2, 4, 8, 16, 32, 64)
ROOFLINE = StepTimeModel.of(base=5e-3, per_request=1e-5, per_token=2e-5, per_token_above_64=4e-5, drafting=1e-3)
PADDED = StepTimeModel.of(CAPTURED, base=2e-3, per_token=1e-4, drafting=1e-3)
LINEAR = StepTimeModel.of(
    base=1e-3, per_token=1e-3, drafting=5e-4, drafting_per_request=1e-4, per_block_token=1e-4, per_block_token_and_request=1e-5
)
models = st.sampled_from([ROOFLINE, PADDED, LINEAR])
seeds = st.integers(0, 2**32 - 1)


def make_gains(seed, count, width):
    rng = np.random.default_rng(seed)
    return np.sort(rng.beta(0.3, 3.0, size=(count, width)), axis=1)[:, ::-1] * rng.uniform(0.2, 1.0, size=(count, 1))


def rate_of(gains, nodes, model, *, is_latency=False):
    """The rate of given numbers of nodes, from the formula."""
    count = len(gains)
    expected = [1.0 + float(row[:num].sum()) for row, num in zip(gains, nodes, strict=True)]
    block = 1 if sum(nodes) else 0
    seconds = model.seconds(count, count + sum(nodes), 0, 0, block)
    return count / (seconds * sum(1.0 / e for e in expected)) if is_latency else sum(expected) / seconds


@given(seeds, st.integers(1, 3), st.integers(1, 4), models, st.booleans())
def test_no_other_numbers_of_nodes_are_better(seed, count, width, model, is_latency):
    gains = make_gains(seed, count, width)
    choice = choose_nodes(gains, model, is_latency=is_latency)
    every = [np.unravel_index(i, (width + 1,) * count) for i in range((width + 1) ** count)]
    best = max(rate_of(gains, [int(n) for n in nodes], model, is_latency=is_latency) for nodes in every)
    assert rate_of(gains, choice.num_draft_tokens, model, is_latency=is_latency) == pytest.approx(best, rel=1e-9)
    assert choice.rate == pytest.approx(best, rel=1e-5)  # the least price of a step is counted once more or less


@given(seeds, st.integers(1, 40), st.integers(1, 12), st.sampled_from([ROOFLINE, PADDED]))
def test_it_is_what_chains_of_the_same_curves_would_get(seed, count, width, model):
    gains = make_gains(seed, count, width)
    ours, theirs = choose_nodes(gains, model), choose(gains, model)
    assert ours.rate == pytest.approx(theirs.rate)
    assert sum(ours.num_draft_tokens) == sum(theirs.num_draft_tokens)


@given(
    seeds,
    st.integers(1, 40),
    models,
    st.integers(0, 50),
    st.integers(0, 90),
    st.booleans(),
    st.integers(0, 9),
    st.booleans(),
    st.integers(0, 30),
)
def test_no_limit_is_ever_exceeded(seed, count, model, most_nodes, most_tokens, is_within, ceiling, is_latency, prefill):
    gains = make_gains(seed, count, 12)
    ceilings = np.random.default_rng(seed).integers(0, ceiling + 1, count)
    limits = TreeLimits(most_nodes, most_tokens, is_within)
    nodes = choose_nodes(
        gains,
        model,
        is_latency=is_latency,
        ceilings=ceilings,
        limits=limits,
        num_prefill_tokens=prefill,
        previous=OperatingPoint(0.01, 12),
        hysteresis=0.5,
    ).num_draft_tokens
    assert (np.array(nodes) <= ceilings).all()
    total = sum(nodes)
    assert total <= most_nodes
    assert total == 0 or count + prefill + total <= most_tokens
    assert total == 0 or not is_within or not model.captured_tokens or count + prefill + total <= CAPTURED[-1]


@given(seeds, st.integers(1, 40), models, st.booleans())
def test_a_permutation_of_the_batch_permutes_the_answer(seed, count, model, is_latency):
    gains = make_gains(seed, count, 8)
    order = np.random.default_rng(seed + 1).permutation(count)
    straight = choose_nodes(gains, model, is_latency=is_latency).num_draft_tokens
    assert choose_nodes(gains[order], model, is_latency=is_latency).num_draft_tokens == [straight[i] for i in order]


@given(seeds, st.integers(1, 20))
def test_a_total_budget_is_spent_where_it_gains_most(seed, budget):
    gains = make_gains(seed, 6, 8)
    free = StepTimeModel.of(base=1.0)
    nodes = choose_nodes(gains, free, limits=TreeLimits(most_nodes=budget)).num_draft_tokens
    assert sum(nodes) == budget
    admitted = sum(float(row[:n].sum()) for row, n in zip(gains, nodes, strict=True))
    assert admitted == pytest.approx(float(np.sort(gains.ravel())[::-1][:budget].sum()))


def test_padding_up_to_a_captured_size_is_used():
    flat = np.full((1, 64), 0.02)
    free_to_16 = StepTimeModel.of((16,), base=1e-3)
    nodes = choose_nodes(flat, StepTimeModel.of((16,), base=1e-3, per_token=1e-3)).num_draft_tokens[0]
    assert nodes == 15
    assert choose_nodes(flat, free_to_16).num_draft_tokens == [64]


def test_nothing_is_verified_where_a_token_costs_more_than_it_gains():
    choice = choose_nodes(np.full((2, 3), 0.1), LINEAR)
    assert choice.num_draft_tokens == [0, 0]
    assert choice.rate == choice.rate_without


def test_a_small_improvement_leaves_the_operating_point_alone():
    gains = make_gains(3, 8, 16)
    best = choose_nodes(gains, ROOFLINE)
    near = OperatingPoint(best.point.threshold * 1.3, best.point.cap)
    held = choose_nodes(gains, ROOFLINE, previous=near, hysteresis=0.05)
    assert held.is_held
    assert held.point == near
    assert sum(held.num_draft_tokens) < sum(best.num_draft_tokens)
    assert choose_nodes(gains, ROOFLINE, previous=OperatingPoint(1.0, 0), hysteresis=1e-4) == best


def test_no_request_no_tree_one_and_a_thousand():
    assert choose_nodes(np.zeros((0, 4)), ROOFLINE).num_draft_tokens == []
    assert choose_nodes(np.zeros((3, 0)), ROOFLINE).num_draft_tokens == [0, 0, 0]
    assert choose_nodes(np.zeros((2, 5)), ROOFLINE).num_draft_tokens == [0, 0]
    assert len(choose_nodes(make_gains(0, 1, 9), ROOFLINE).num_draft_tokens) == 1
    many = choose_nodes(make_gains(0, 1024, 64), PADDED, limits=TreeLimits(most_nodes=4096))
    assert len(many.num_draft_tokens) == 1024
    assert sum(many.num_draft_tokens) <= 4096


@pytest.mark.parametrize("gains", [[[0.5, float("nan")]], [[0.2, 0.3]], [[1.5]], [[-0.1]], [0.5, 0.4]])
def test_what_are_no_gains_is_refused(gains):
    with pytest.raises(ValueError, match="gains"):
        choose_nodes(np.array(gains), ROOFLINE)


@given(seeds, st.integers(0, 30))
def test_a_best_first_trees_scores_are_gains(seed, budget):
    log_probs = np.log(np.sort(np.random.default_rng(seed).dirichlet(np.ones(6), size=5), axis=1)[:, ::-1][:, :4])
    choose_nodes(stack_gains([np.exp(build_tree(log_probs, budget).score)]), ROOFLINE)


def test_once_drafted_the_drafter_costs_the_same_with_and_without_nodes():
    paid = sunk(LINEAR, 7)
    for nodes in (0, 5):
        assert paid.seconds(4, 4 + nodes, 0, 0, 1) == pytest.approx(LINEAR.seconds(4, 4 + nodes, 0, 0, 7))


@given(st.integers(0, 64), st.integers(0, 200_000), st.integers(0, 90))
def test_whatever_the_step_costs_and_however_long_the_context_drafting_is_paid_for(nodes, context, prefill):
    """What it costs by token of context was once forgotten."""
    every = StepTimeModel.of(CAPTURED, **{name: 1e-6 * (3 + number) for number, name in enumerate(PARAMETERS)})
    every = replace(every, kinds=((batch_kind(4), 0, 0.1), (batch_kind(4), 3, -0.2)))
    whole = every.seconds(4, 4 + prefill + nodes, context, prefill, 7, is_verifying=nodes > 0)
    paid = sunk(every, 7).seconds(4, 4 + prefill + nodes, context, prefill, min(nodes, 1))
    assert paid == pytest.approx(whole)


SETTINGS = TreeBudgetSettings(most_nodes_per_request=8, min_rounds=16, explore_steps=4, recheck_steps=2, remembered_rounds=32)


def play(budget, gain, steps, model):
    """Steps of two requests whose trees promise `gain` for their first node; whether each step drafted."""
    drafted = []
    for _ in range(steps):
        drafted.append(budget.is_worth_drafting(["chat", "chat"], model))
        if drafted[-1]:
            budget.allocate([gain * 0.5 ** np.arange(8)] * 2, ["chat", "chat"], model)
    return drafted


def test_the_drafter_is_skipped_once_its_trees_are_known_not_to_pay():
    budget = TreeBudget(7, SETTINGS)
    drafted = play(budget, 0.05, 200, LINEAR)
    assert all(drafted[:8])  # two requests a step, sixteen trees before anything is skipped
    assert sum(drafted[8:]) < 12
    assert any(drafted[100:])  # it is tried now and then


def test_and_comes_back_when_they_do():
    budget = TreeBudget(7, SETTINGS)
    play(budget, 0.05, 60, LINEAR)
    cheap = StepTimeModel.of(base=5e-3, per_token=1e-5, drafting=1e-4)
    drafted = play(budget, 0.9, 200, cheap)
    assert all(drafted[100:])


@given(seeds, st.integers(1, 30))
def test_alone_a_request_gets_the_same_for_latency_as_for_goodput(seed, width):
    gains = make_gains(seed, 1, width)
    assert choose_nodes(gains, PADDED).num_draft_tokens == choose_nodes(gains, PADDED, is_latency=True).num_draft_tokens


def test_latency_skips_the_drafter_too_and_ceilings_hold():
    settings = replace(SETTINGS, is_latency=True)
    budget = TreeBudget(7, settings)
    assert sum(play(budget, 0.05, 200, LINEAR)[8:]) < 12
    choice = budget.allocate([np.full(9, 0.9)] * 3, ["chat"] * 3, ROOFLINE, ceilings=np.array([0, 2, 9]))
    assert choice.num_draft_tokens == [0, 2, 8]


def test_one_workload_does_not_pay_for_another_it_knows_nothing_of():
    budget = TreeBudget(7, SETTINGS)
    play(budget, 0.05, 60, LINEAR)
    assert budget.is_worth_drafting(["new"], LINEAR)
    assert not budget.is_worth_drafting([], LINEAR)
