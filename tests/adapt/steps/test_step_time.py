from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.lengths import compiled
from honed.adapt.protocol.wire import Policy
from honed.adapt.steps import step_time
from honed.adapt.steps.step_time import (
    PARAMETERS,
    StepTimeLearner,
    StepTimeModel,
    StepTimeSettings,
    batch_kind,
    pad_tokens,
    solve_non_negative,
)

K = 7
P = len(PARAMETERS)
parameter_lists = st.lists(st.floats(0.0, 1e-2), min_size=P, max_size=P)


def make_policy(step_seconds, captured=()):
    return Policy(
        generation=1,
        ttl_s=9.0,
        kind="goodput",
        static_k=K,
        max_k=K,
        step_seconds=list(step_seconds),
        captured_tokens=list(captured),
    )


def teach(learner, rng, truth, steps=1500, blocks=(0, 1, 2, 4, 7), noise=0.05, outliers=0.02, fixed_block=None):
    for _ in range(steps):
        requests, k = int(rng.integers(1, 33)), int(rng.choice(blocks))
        prefill = int(rng.integers(0, 300)) if rng.random() < 0.1 else 0
        context = requests * int(rng.integers(100, 2000))
        block = k if fixed_block is None else fixed_block
        tokens = requests * (1 + k) + prefill
        seconds = truth(requests, tokens, context, prefill, block) * rng.lognormal(0.0, noise)
        if rng.random() < outliers:
            seconds *= rng.uniform(5.0, 100.0)
        learner.observe(requests, tokens, context, prefill, requests * k, block, seconds)


def cpu_like(requests, tokens, context, prefill, block):
    return 5e-3 + 1e-4 * tokens + 1e-8 * context + 1e-5 * prefill + (6e-4 + 1.5e-4 * block if block else 0.0)


def test_it_finds_the_price_of_steps_despite_noise_and_outliers():
    learner = StepTimeLearner()
    teach(learner, np.random.default_rng(0), cpu_like)
    model = learner.model()
    for requests in (1, 8, 32):
        for k in (0, 1, 3, 7):
            step = (requests, requests * (1 + k), requests * 1000, 0, k)
            assert model.seconds(*step) == pytest.approx(cpu_like(*step), rel=0.05)


def test_where_there_are_many_kinds_the_latest_steps_of_each_are_fitted_to(monkeypatch):
    monkeypatch.setattr(step_time, "_MOST_FITTED", 3 * 40)
    learner = StepTimeLearner(StepTimeSettings(steps_per_kind=100))
    for i in range(450):  # each of three kinds 150 times: the latest 40 were quicker, and no forgetting says so
        k = (0, 3, 7)[i % 3]
        learner.observe(4, 4 * (1 + k), 400, 0, 4 * k, k, (1e-2 + 1e-3 * k) * (1.0 if i < 330 else 0.5))
    for k in (0, 3, 7):
        assert learner.model().seconds(4, 4 * (1 + k), 400, 0, k) == pytest.approx(0.5 * (1e-2 + 1e-3 * k), rel=0.01)


def kinked(requests, tokens, context, prefill, block):
    """Two tokens take another kernel, slower than that of three; beyond six there is one more tile."""
    seconds = 70e-3 + 2e-4 * tokens + 1e-5 * prefill + (2e-3 if block else 0.0)
    return seconds * (1.12 if tokens == 2 else 1.1 if 6 < tokens <= 8 else 1.0)


def learn_kinked(seed, has_slow_times):
    rng, learner, slow = np.random.default_rng(seed), StepTimeLearner(), 1.0
    for number in range(6000):
        if has_slow_times and number % 16 == 0:
            slow = 1.3 if rng.random() < 0.3 else 1.0
        if number % 24 == 0:  # a setting stays for a while
            k, requests = int(rng.choice((0, 1, 2, 3, 5, 7))), int(rng.choice((1, 4)))
        tokens, context = requests * (1 + k), requests * int(rng.integers(100, 300))
        seconds = slow * kinked(requests, tokens, context, 0, k) * rng.lognormal(0.0, 0.05)
        learner.observe(requests, tokens, context, 0, requests * k, k, seconds)
    return learner.model()


def scatter(model):
    """How far prices of one request's steps are from the truth, relative, but for what they have in common."""
    prices = [model.seconds(1, 1 + k, 200, 0, k) / kinked(1, 1 + k, 200, 0, k) for k in (0, 1, 2, 3, 5, 7)]
    return float(np.std(np.log(prices)))


def test_prices_follow_what_no_formula_knows():
    model = learn_kinked(5, has_slow_times=False)
    assert scatter(model) < 0.01
    assert scatter(StepTimeModel(model.parameters)) > 0.03
    assert model.seconds(1, 2, 200, 0, 1) > 1.05 * model.seconds(1, 3, 200, 0, 2)


def test_on_a_machine_with_slow_times_they_follow_it_as_far_as_it_can_be_told():
    models = [learn_kinked(seed, has_slow_times=True) for seed in range(6)]
    with_kinds, without = (
        np.mean([scatter(one) for one in some]) for some in (models, [StepTimeModel(m.parameters) for m in models])
    )
    assert with_kinds < 0.8 * without


def test_they_outlive_a_change_of_the_world():
    """Another process on the device: all takes twice as long, and kernels still differ as they did."""
    rng, learner = np.random.default_rng(7), StepTimeLearner()

    def run(steps, slow, lengths):
        for number in range(steps):
            if number % 24 == 0:
                k = int(rng.choice(lengths))
            seconds = slow * kinked(1, 1 + k, 200, 0, k) * rng.lognormal(0.0, 0.05)
            learner.observe(1, 1 + k, 200, 0, k, k, seconds)

    run(3000, 1.0, (0, 1, 2, 3, 5, 7))
    assert scatter(learner.model()) < 0.01
    run(64, 2.0, (0, 2))
    learner.restart(64, 2.0)
    assert scatter(learner.model()) < 0.02
    run(200, 2.0, (0, 2, 3))
    assert scatter(learner.model()) < 0.02


def test_a_price_of_a_kind_is_between_its_neighbours_and_holds_for_steps_without_prompts():
    model = StepTimeModel.of(base=1e-2, per_token=1e-3)
    with_kinds = replace(model, kinds=((batch_kind(4), 1, 0.1), (batch_kind(4), 3, -0.2)))

    def factor(requests, drafts, prefill=0):
        step = (requests, requests + drafts + prefill, 0, prefill, 7)
        return with_kinds.seconds(*step) / model.seconds(*step)

    found = [factor(4, drafts) for drafts in (0, 4, 6, 8, 12, 28)]
    assert found == pytest.approx([1.1, 1.1, 1.025, 0.95, 0.8, 0.8])
    assert factor(1, 1) == factor(16, 16) == factor(4, 4, prefill=9) == 1.0


def test_fewer_drafts_than_requests_cost_as_steps_of_their_kind():
    """Which are learned as one draft each."""
    model = StepTimeModel.of(base=1e-2, per_token=1e-5)
    with_kinds = replace(model, kinds=((batch_kind(256), 0, 0.0), (batch_kind(256), 1, 0.2)))
    for num_drafts, factor in ((0, 1.0), (1, 1.2), (16, 1.2), (256, 1.2), (512, 1.2)):
        assert with_kinds.kind_factor(256, num_drafts) == pytest.approx(factor)
    table = compiled.with_kinds(model.price_tables(1024)[0], *with_kinds.kind_table(), 256, 2, model.parameter_array, 0)
    for num_drafts in (0, 1, 16, 256, 400):
        priced = with_kinds.seconds(256, 256 + num_drafts, 0, 0, int(num_drafts > 0))
        assert table[256 + num_drafts] + model.fixed_seconds(256, 0, 0) == pytest.approx(priced, rel=1e-6)


@pytest.mark.parametrize("kind", [(8, 1, float("nan")), (8, 1, 7.0), (8, 1, -1.0), (-1, 1, 0.1), (8, -1, 0.1), (999, 1, 0.1)])
def test_an_unusable_price_of_a_kind_is_none(kind):
    policy = msgspec.structs.replace(make_policy([1e-3] * P), kind_effects=[kind, (8, 2, 0.1)])
    assert StepTimeModel.from_policy(policy).kinds == ((8, 2, 0.1),)


def test_a_mixture_of_experts_is_followed():
    """Tokens bring experts into the step that no other token uses, fewer and fewer: 8 of 128 each."""

    def sparse(requests, tokens, context, prefill, block):
        return 6e-3 + 18e-3 * (1.0 - (1.0 - 8.0 / 128.0) ** tokens) + 1e-5 * prefill + (1e-3 if block else 0.0)

    learner = StepTimeLearner()
    teach(learner, np.random.default_rng(4), sparse)
    model = learner.model()
    for requests in (1, 4, 16, 32):
        for k in (0, 1, 3, 7):
            step = (requests, requests * (1 + k), requests * 1000, 0, k)
            assert model.seconds(*step) == pytest.approx(sparse(*step), rel=0.08)


def test_a_flat_then_rising_price_is_followed():
    def gpu_like(requests, tokens, context, prefill, block):
        return 1e-2 + 3e-5 * max(tokens - 64, 0) + (1e-3 if block else 0.0)

    learner = StepTimeLearner()
    teach(learner, np.random.default_rng(1), gpu_like)
    model = learner.model()
    assert model.seconds(8, 64, 8000, 0, 7) == pytest.approx(1.1e-2, rel=0.05)
    assert model.seconds(32, 256, 32_000, 0, 7) == pytest.approx(1.676e-2, rel=0.08)


def test_a_runner_that_always_drafts_the_whole_block_is_not_believed_to_save_by_shortening_it():
    learner = StepTimeLearner()
    teach(learner, np.random.default_rng(2), cpu_like, fixed_block=K)
    assert learner.model().parameters[6:8] == (0.0, 0.0)
    skipping = StepTimeLearner()
    teach(skipping, np.random.default_rng(2), cpu_like, blocks=(0, 7))
    assert skipping.model().parameters[6:8] == (0.0, 0.0)
    assert skipping.model().draft_seconds(4, K)[1] > 0.0


def test_prices_are_right_although_the_machine_has_slow_times():
    """Half of the time all steps take 1.4 times as long, for dozens of steps, and each draft length at its own."""
    worst = []
    for seed in range(8):
        rng, learner = np.random.default_rng([5, seed]), StepTimeLearner()
        slowness, k = 1.0, 0
        for _ in range(3000):
            if rng.random() < 1 / 30:
                slowness = float(rng.choice([1.0, 1.4]))
            if rng.random() < 1 / 8:
                k = int(rng.choice([0, 1, 2, 4]))
            step = 4, 4 * (1 + k), 4000, 0
            seconds = slowness * cpu_like(*step, k) * rng.lognormal(0.0, 0.1)
            learner.observe(*step, 4 * k, k, seconds)
        model = learner.model()
        found, true = ([price(4, 4 * (1 + k), 4000, 0, k) for k in (0, 1, 2, 4)] for price in (model.seconds, cpu_like))
        worst.append(float(np.abs(np.diff(np.log(found)) - np.diff(np.log(true))).max()))
    assert max(worst) < 0.08  # 0.15 where these are taken for prices


def test_it_is_cold_until_draft_lengths_have_varied():
    learner = StepTimeLearner()
    teach(learner, np.random.default_rng(3), cpu_like, blocks=(5,))
    assert not learner.is_ready
    assert not learner.model().is_ready
    teach(learner, np.random.default_rng(3), cpu_like, steps=40, blocks=(0,))
    assert learner.model().is_ready


def test_it_follows_a_change_of_the_machine():
    learner = StepTimeLearner(StepTimeSettings(forgetting_steps=2000.0))
    teach(learner, np.random.default_rng(4), cpu_like)
    before = learner.model().seconds(8, 32, 8000, 0, 3)
    teach(learner, np.random.default_rng(5), lambda *step: 2.0 * cpu_like(*step), steps=8000)
    assert learner.model().seconds(8, 32, 8000, 0, 3) == pytest.approx(2.0 * before, rel=0.1)


def test_a_batch_size_that_never_varied_is_charged_to_the_base():
    learner, rng = StepTimeLearner(), np.random.default_rng(6)
    for _ in range(400):
        k = int(rng.choice((0, 2, 4)))
        learner.observe(4, 4 * (1 + k), 1600, 0, 4 * k, k, cpu_like(4, 4 * (1 + k), 1600, 0, k))
    assert learner.model().parameters[0] == pytest.approx(5e-3, rel=0.1)


@given(parameter_lists, st.tuples(*[st.integers(0, 3000)] * 5), st.tuples(*[st.integers(0, 3000)] * 5), st.booleans())
def test_time_never_falls_when_anything_grows(parameters, step, more, is_captured):
    parameters[0] += 1e-3
    model = StepTimeModel.from_policy(make_policy(parameters, (8, 16, 32, 512, 4096) if is_captured else ()))
    step = (max(step[0], 1), step[1], step[2], step[3], step[4] % (K + 1))
    larger = [a + b for a, b in zip(step, (*more[:4], 0), strict=True)]
    assert model.seconds(*larger) >= model.seconds(*step) * (1.0 - 1e-12) > 0.0


@given(parameter_lists)
def test_a_model_survives_the_way_through_a_policy(parameters):
    parameters[0] += 1e-4
    model = StepTimeModel.from_policy(make_policy(parameters, (64, 8)))
    assert model == StepTimeModel(tuple(parameters), (8, 64))


@pytest.mark.parametrize("values", [[], [1.0], [float("nan")] * P, [-1.0] * P, [0.0] * P, [1e-3] * (P + 1)])
def test_what_is_not_a_model_is_not_ready(values):
    assert not StepTimeModel.from_policy(make_policy(values)).is_ready


def test_tokens_are_padded_to_captured_sizes():
    assert pad_tokens(np.array([1, 8, 9, 33]), (8, 32)).tolist() == [8, 8, 32, 33]
    model = StepTimeModel.of((8, 32), base=1e-3, per_token=1e-4)
    assert model.seconds(1, 3, 0, 0, 0) == model.seconds(1, 8, 0, 0, 0) < model.seconds(1, 9, 0, 0, 0)
    prices, captured_below = model.price_tables(100_000)
    assert captured_below[[7, 8, 31, 40, 100_000]].tolist() == [0, 8, 8, 32, 32]
    assert prices[100_000] == pytest.approx(100_000 * 1e-4)


def test_the_table_and_the_formula_agree():
    model = StepTimeModel.of((8, 32, 512), base=1e-3, per_token=1e-4, per_token_above_64=1e-5, per_token_above_256=1e-6)
    tokens = np.array([0, 9, 100, 8000])
    assert np.allclose(model.token_seconds(tokens), model.token_seconds(np.append(tokens, 100_000))[:-1])


@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_non_negative_least_squares_meets_its_optimality_conditions(seed, size):
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(20, size))
    gram, moment = a.T @ a + 1e-6 * np.eye(size), a.T @ rng.normal(size=20)
    x = solve_non_negative(gram, moment)
    gradient = gram @ x - moment
    assert (x >= 0.0).all()
    assert (gradient >= -1e-6).all()
    assert abs(x @ gradient) < 1e-6


def test_impossible_steps_are_ignored_and_memory_is_bounded():
    learner = StepTimeLearner(StepTimeSettings(max_kinds=4))
    for requests, tokens, seconds in ((0, 5, 0.1), (5, 0, 0.1), (5, 5, 0.0), (5, 5, float("nan")), (5, 5, 1e9)):
        learner.observe(requests, tokens, 0, 0, 0, 0, seconds)
    assert learner.num_steps == 0
    teach(learner, np.random.default_rng(7), cpu_like, steps=500)
    assert len(learner._kinds) == 4
    assert all(value >= 0.0 for value in learner.model().parameters)


def test_a_step_that_verifies_anything_costs_what_it_costs_to_leave_plain_decoding():
    """Drafts are verified a step later: what that costs isn't the drafter's, and both are saved by drafting nothing."""
    learner, rng = StepTimeLearner(), np.random.default_rng(0)
    before = 0
    for _ in range(600):
        block = int(rng.choice([0, 0, 1, 3]))
        drafted = 16 * before
        seconds = 0.06 + 1e-3 * (16 + drafted) + 4e-3 * (block > 0) + 0.02 * (drafted > 0)
        learner.observe(16, 16 + drafted, 1600, 0, drafted, block, seconds)
        before = block
    model = learner.model()
    assert model.seconds(16, 16, 1600, 0, 0) == pytest.approx(0.076, rel=0.03)
    assert model.seconds(16, 32, 1600, 0, 1) == pytest.approx(0.116, rel=0.03)
    assert model.seconds(16, 32, 1600, 0, 0, is_verifying=True) == pytest.approx(0.112, rel=0.03)
    assert model.seconds(16, 16, 1600, 0, 1, is_verifying=False) == pytest.approx(0.080, rel=0.03)
    assert model.draft_seconds(16, 3)[1] == pytest.approx(model.block_seconds(16, 1))
    assert model.block_seconds(16, 1, 1600) == pytest.approx(0.024, rel=0.1)
