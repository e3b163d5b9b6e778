import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.adapt.lengths.block_size import (
    DEAR,
    LOST_GRAPH,
    OperatingPoint,
    choose,
    choose_equal,
    latency_gains,
    rates_of,
)
from honed.adapt.steps.step_time import PARAMETERS, StepTimeModel, batch_kind


def make_model(base=5e-3, token=1e-4, drafting=5e-4, block=0.0, captured=()):
    return StepTimeModel.of(captured, base=base, per_token=token, drafting=drafting, per_block_token=block)


def make_survival(seed, count, num_spec_tokens, low=0.2, high=0.98):
    rng = np.random.default_rng(seed)
    return np.cumprod(rng.uniform(low, high, (count, num_spec_tokens)), axis=1)


def goodput(survival, lengths, model, prefill=0):
    expected = len(lengths) + sum(row[:k].sum() for row, k in zip(survival, lengths, strict=True))
    seconds = model.seconds(len(lengths), len(lengths) + prefill + int(sum(lengths)), 0, prefill, int(max(lengths)))
    return expected / (seconds - prompt_seconds(len(lengths), model, prefill))


def prompt_seconds(count, model, prefill):
    """What the prompts of a step take, whatever is drafted."""
    with_prompts, without = (model.seconds(count, count + tokens, 0, tokens, 0) for tokens in (prefill, 0))
    return with_prompts - without


def brute_force(survival, model, ceilings=None, prefill=0):
    count, k = survival.shape
    limits = [k] * count if ceilings is None else ceilings
    return max(goodput(survival, ks, model, prefill) for ks in itertools.product(*[range(n + 1) for n in limits]))


def allocate(survival, model, **given):
    return np.array(choose(survival, model, **given).num_draft_tokens, dtype=np.int64)


models = st.builds(
    make_model,
    base=st.floats(1e-3, 1e-2),
    token=st.floats(0.0, 3e-3),
    drafting=st.floats(0.0, 3e-3),
    block=st.sampled_from([0.0, 1e-4, 1e-3]),
    captured=st.sampled_from([(), (4, 8, 16), (2, 3, 5, 9, 12)]),
)
seeds = st.integers(0, 2**32 - 1)
kinds = st.dictionaries(
    st.tuples(st.sampled_from([batch_kind(count) for count in (1, 2, 3, 4, 40)]), st.integers(0, 5)), st.floats(-0.4, 0.4)
)
"""What a machine's kinds of steps cost beside the formula."""


def with_kinds(model, found):
    return replace(model, kinds=tuple((batch, k, effect) for (batch, k), effect in found.items()))


@given(seeds, st.integers(1, 4), st.integers(1, 4), models, kinds)
def test_small_batches_get_the_optimum_where_kinds_of_steps_have_prices_of_their_own(
    seed, count, num_spec_tokens, model, found
):
    model, survival = with_kinds(replace_block(model), found), make_survival(seed, count, num_spec_tokens)
    lengths = allocate(survival, model)
    assert goodput(survival, lengths, model) == pytest.approx(brute_force(survival, model))


def replace_block(model):
    """The same without a price by the block's length: effects are applied to that of the mean one."""
    parameters = dict(zip(PARAMETERS, model.parameters, strict=True)) | {"per_block_token": 0.0}
    return StepTimeModel.of(model.captured_tokens, **parameters)


@settings(max_examples=30)
@given(seeds, models, kinds)
def test_one_length_for_everybody_follows_kinds_too(seed, model, found):
    model, survival = with_kinds(model, found), make_survival(seed, 4, 4)
    choice = choose_equal(survival.sum(axis=0).tolist(), 4, model)
    assert choice.rate == pytest.approx(max(goodput(survival, [k] * 4, model) for k in range(5)))


@settings(max_examples=20)
@given(seeds, models, kinds)
def test_large_batches_follow_kinds_too(seed, model, found):
    model, survival = with_kinds(replace_block(model), found), make_survival(seed, 40, 15)
    choice = choose(survival, model)
    lengths = np.array(choice.num_draft_tokens)
    assert choice.rate == pytest.approx(goodput(survival, lengths, model), rel=0.02)
    # A level of gains is admitted whole, and a kind of steps may end within one: of 1,500 random models 4 were below 0.98, the
    # worst at 0.92.
    assert choice.rate >= 0.88 * max(goodput(survival, [k] * 40, model) for k in range(16))


@given(seeds, st.integers(1, 4), st.integers(1, 4), models, st.integers(0, 30))
def test_small_batches_get_the_optimum(seed, count, num_spec_tokens, model, prefill):
    survival = make_survival(seed, count, num_spec_tokens)
    lengths = allocate(survival, model, num_prefill_tokens=prefill)
    assert goodput(survival, lengths, model, prefill) == pytest.approx(brute_force(survival, model, None, prefill))


@given(seeds, st.integers(1, 4), st.integers(1, 4), models, kinds, st.integers(0, 30), st.booleans())
def test_what_is_chosen_has_the_best_of_all_rates(seed, count, num_spec_tokens, model, found, prefill, is_latency):
    model, survival = with_kinds(replace_block(model), found), make_survival(seed, count, num_spec_tokens)
    gains = latency_gains(survival) if is_latency else survival
    ways = np.array(list(itertools.product(range(num_spec_tokens + 1), repeat=count)))
    rates, _ = rates_of(ways, gains, model, is_latency=is_latency, num_prefill_tokens=prefill)
    chosen = choose(gains, model, is_latency=is_latency, num_prefill_tokens=prefill)
    assert rates[ways.tolist().index(chosen.num_draft_tokens)] == pytest.approx(rates.max(), rel=1e-9)
    assert chosen.rate / chosen.rate_without == pytest.approx(rates.max() / rates[0], rel=1e-6)


def test_prompts_make_drafts_no_cheaper():
    """Regression: with the prompts' time in the ratio, a step of 2,000 prompt tokens drafted as if tokens cost nothing."""
    model, survival = make_model(base=2e-3, token=1e-3), make_survival(3, 4, 4)
    assert list(allocate(survival, model, num_prefill_tokens=2000)) == list(allocate(survival, model))
    many = make_survival(4, 128, 4)
    assert list(allocate(many, model, num_prefill_tokens=2000)) == list(allocate(many, model))


@given(seeds, models, st.lists(st.integers(0, 4), min_size=3, max_size=3))
def test_ceilings_are_kept_and_the_rest_is_optimal(seed, model, ceilings):
    survival = make_survival(seed, 3, 4)
    lengths = allocate(survival, model, ceilings=np.array(ceilings))
    assert (lengths <= ceilings).all()
    assert goodput(survival, lengths, model) == pytest.approx(brute_force(survival, model, ceilings))


@settings(max_examples=30)
@given(seeds, models, st.sampled_from([40, 256, 1024]))
def test_large_batches_lose_little_to_rounding(seed, model, count):
    survival = make_survival(seed, count, 15)
    choice = choose(survival, model)
    lengths = np.array(choice.num_draft_tokens)
    assert ((lengths >= 0) & (lengths <= 15)).all()
    assert choice.rate == pytest.approx(goodput(survival, lengths, model), rel=0.03)
    flat = np.sort(survival.ravel())[::-1]
    for total in range(0, flat.size + 1, max(flat.size // 50, 1)):
        other = (survival >= (flat[total - 1] if total else 2.0)).sum(axis=1)
        assert goodput(survival, lengths, model) >= 0.985 * goodput(survival, other, model)


@given(seeds, models, st.sampled_from([2, 9, 300]))
def test_a_permutation_of_requests_permutes_the_answer(seed, model, count):
    survival = make_survival(seed, count, 7)
    order = np.random.default_rng(seed).permutation(count)
    assert (allocate(survival[order], model) == allocate(survival, model)[order]).all()


@given(seeds, models, st.integers(1, 5), st.integers(1, 60))
def test_requests_that_share_a_curve_can_be_passed_as_one(seed, model, num_curves, count):
    curves = make_survival(seed, num_curves, 15)
    group = np.random.default_rng(seed).integers(0, num_curves, count)
    together, apart = choose(curves, model, group=group), allocate(curves[group], model)
    lengths = together.num_draft_tokens
    assert len(lengths) == count
    assert goodput(curves[group], lengths, model) >= 0.98 * goodput(curves[group], apart, model)
    assert together.rate == pytest.approx(goodput(curves[group], lengths, model), rel=0.03)


@settings(max_examples=30)
@given(seeds, models, st.integers(1, 40))
def test_large_batches_keep_ceilings_and_lose_little(seed, model, num_curves):
    rng, curves = np.random.default_rng(seed), make_survival(seed, num_curves, 15)
    group, ceilings = rng.integers(0, num_curves, 100), rng.integers(0, 16, 100)
    survival = np.where(np.arange(15) < ceilings[:, None], curves[group], 0.0)
    lengths = allocate(survival, model)  # a draft that is never accepted
    choice = choose(curves, model, group=group, ceilings=ceilings)
    assert (np.array(choice.num_draft_tokens) <= ceilings).all()
    assert choice.rate == pytest.approx(goodput(survival, choice.num_draft_tokens, model), rel=0.03)
    assert goodput(survival, choice.num_draft_tokens, model) >= 0.98 * goodput(survival, lengths, model)


def test_nothing_is_drafted_when_it_does_not_pay():
    survival = make_survival(0, 64, 7, low=0.05, high=0.2)
    choice = choose(survival, make_model(base=1e-4, token=1e-3))
    assert not any(choice.num_draft_tokens)
    assert choice.rate == choice.rate_without


def test_everything_is_drafted_when_tokens_are_free():
    assert (allocate(make_survival(1, 20, 7), make_model(token=0.0, drafting=0.0)) == 7).all()


@pytest.mark.parametrize("count", [4, 256])
def test_prompts_of_a_step_do_not_make_drafts_look_cheap(count):
    survival, model = make_survival(5, count, 7, low=0.3, high=0.5), make_model(base=1e-3, token=1e-3)
    assert not allocate(survival, model).any()
    assert not allocate(survival, model, num_prefill_tokens=2000).any()


def test_more_load_means_shorter_blocks():
    row = make_survival(2, 1, 7, low=0.6, high=0.7)
    mean = [allocate(np.repeat(row, count, axis=0), make_model()).mean() for count in (1, 16, 256)]
    assert mean[0] > mean[1] >= mean[2]


def test_one_long_request_does_not_drag_the_drafter_along_when_blocks_cost():
    survival = np.vstack([np.full(7, 0.99), np.tile(np.cumprod(np.full(7, 0.4)), (7, 1))])
    assert allocate(survival, make_model(base=1e-3, token=1e-6, drafting=0.0, block=1e-2)).max() < 7


def test_a_captured_size_is_filled_but_not_overrun():
    survival = np.linspace(0.72, 0.705, 200)[:, None].repeat(1, axis=1)  # one level, 200 requests
    model = make_model(base=4e-2, token=2e-4, drafting=0.0, captured=(200, 264, 2000))
    lengths = allocate(survival, model)
    assert lengths.sum() == 64
    assert lengths[:64].all()  # the most likely ones


def test_no_requests_and_no_draft_tokens_are_fine():
    assert allocate(np.zeros((0, 7)), make_model()).tolist() == []
    assert allocate(np.zeros((3, 0)), make_model()).tolist() == [0, 0, 0]


def test_a_previous_choice_is_held_within_the_hysteresis():
    rng = np.random.default_rng(8)
    survival = make_survival(9, 8, 7, low=0.55, high=0.65)
    changes = {}
    for hysteresis in (0.0, 0.05):
        previous, totals = None, []
        for _ in range(200):
            noisy = survival * rng.uniform(0.97, 1.03)
            model = make_model(base=5e-3 * rng.uniform(0.95, 1.05), token=3e-4)
            choice = choose(noisy, model, previous=previous, hysteresis=hysteresis)
            previous = choice.point
            totals.append(previous)
        changes[hysteresis] = sum(a != b for a, b in itertools.pairwise(totals))
    assert changes[0.05] <= 5 < changes[0.0]


@given(seeds, models, st.floats(0.0, 1.0), st.integers(0, 9), st.sampled_from([1, 3, 100]))
def test_holding_costs_at_most_the_hysteresis(seed, model, threshold, cap, count):
    survival = make_survival(seed, count, 7)
    best = choose(survival, model)
    held = choose(survival, model, previous=OperatingPoint(threshold, cap), hysteresis=0.1)
    # Twice as much where what was held on to admits none of these drafts.
    assert goodput(survival, held.num_draft_tokens, model) >= 0.98 * best.rate / (1.1 if any(held.num_draft_tokens) else 1.2)
    assert all(0 <= k <= 7 for k in held.num_draft_tokens)


@pytest.mark.parametrize("count", [4, 300])
@pytest.mark.parametrize(("cap", "needed"), [(0, 2.0), (7, 1.0)])
def test_to_draft_has_to_promise_a_gain_and_more_of_it_where_nothing_was_drafted(count, cap, needed):
    survival, previous = make_survival(3, count, 7), OperatingPoint(1.0 if cap == 0 else 0.5, cap)
    model = make_model(base=1e-3 * count)
    free = choose(survival, model)
    gain = free.margin
    assert gain > 0.1
    assert costs_of(free, survival) > DEAR
    assert not allocate(survival, model, previous=previous, hysteresis=gain * 1.01 / needed).any()
    assert allocate(survival, model, previous=previous, hysteresis=gain * 0.99 / needed).any()


@pytest.mark.parametrize("count", [4, 300])
@pytest.mark.parametrize(("cap", "needed"), [(0, 2.0), (7, 1.0)])
def test_drafts_that_cost_little_have_to_promise_little(count, cap, needed):
    survival = np.zeros((count, 7))
    survival[:, 0] = 0.11
    previous, model = OperatingPoint(1.0 if cap == 0 else 0.05, cap), make_model(base=1e-2 * count, drafting=5e-4 * count)
    free = choose(survival, model, previous=previous, hysteresis=0.0)
    assert 0.5 * DEAR > costs_of(free, survival) > 0.0
    needed *= costs_of(free, survival) / DEAR
    assert not allocate(survival, model, previous=previous, hysteresis=free.margin * 1.01 / needed).any()
    assert allocate(survival, model, previous=previous, hysteresis=free.margin * 0.99 / needed).any()


def costs_of(choice, survival):
    """By how much a choice lengthens a step, relative."""
    expected = len(survival) + sum(row[:k].sum() for row, k in zip(survival, choice.num_draft_tokens, strict=True))
    return expected / choice.rate / (len(survival) / choice.rate_without) - 1.0


@pytest.mark.parametrize(("cap", "needed"), [(0, 2.0), (3, 1.0)])
def test_so_it_has_where_all_have_one_length(cap, needed):
    sums, model, previous = [2.0, 1.0, 0.5], make_model(), OperatingPoint(0.0 if cap else 1.0, cap)
    gain = choose_equal(sums, 4, model).margin
    assert gain > 0.1
    for hysteresis, is_drafting in ((gain * 1.01 / needed, False), (gain * 0.99 / needed, True)):
        assert any(choose_equal(sums, 4, model, previous=previous, hysteresis=hysteresis).num_draft_tokens) == is_drafting


@pytest.mark.parametrize("share", [0.0096, 0.0133, 0.0155])
def test_cheap_drafts_begin_for_less_there_too(share):
    """Drafts that add half a hundredth to a step needn't gain the whole hysteresis."""
    model, previous = StepTimeModel.of(base=10e-3, per_token=1e-7, drafting=0.05e-3), OperatingPoint(1.0, 0)
    survival = np.outer(np.ones(8), share * 1.25 * np.array([1.0, 0.2, 0.04]))
    equal = choose_equal(survival.sum(axis=0).tolist(), 8, model, previous=previous, hysteresis=0.02)
    assert 0.0 < equal.margin < 0.02
    assert equal.num_draft_tokens == choose(survival, model, previous=previous, hysteresis=0.02).num_draft_tokens
    assert any(equal.num_draft_tokens)


def test_the_margin_is_told_whether_or_not_it_is_taken():
    survival, model = make_survival(3, 4, 7), make_model()
    assert choose(0.01 * survival, model).margin < 0.0
    assert choose_equal([0.01], 4, model).margin < 0.0
    taken = choose(survival, model)
    assert taken.margin == pytest.approx(taken.rate / taken.rate_without - 1.0)


def request_speed(survival, lengths, model):
    inverse = sum(1.0 / (1.0 + row[:k].sum()) for row, k in zip(survival, lengths, strict=True))
    tokens = len(lengths) + int(sum(lengths))
    return len(lengths) / (model.seconds(len(lengths), tokens, 0, 0, int(max(lengths))) * inverse)


@given(seeds, st.integers(1, 4), models)
def test_latency_mode_gets_the_best_time_per_token(seed, count, model):
    survival = make_survival(seed, count, 3)
    choice = choose(latency_gains(survival), model, is_latency=True)
    best = max(request_speed(survival, ks, model) for ks in itertools.product(range(4), repeat=count))
    assert request_speed(survival, choice.num_draft_tokens, model) == pytest.approx(best)
    assert choice.rate == pytest.approx(best)


@settings(max_examples=20)
@given(seeds, models)
def test_latency_mode_loses_little_on_large_batches(seed, model):
    survival = make_survival(seed, 100, 7)
    choice = choose(latency_gains(survival), model, is_latency=True)
    found = request_speed(survival, choice.num_draft_tokens, model)
    assert choice.rate == pytest.approx(found, rel=0.03)
    for k in range(8):
        assert found >= 0.985 * request_speed(survival, [k] * 100, model)


def test_latency_mode_favours_the_slowest_request():
    survival = np.vstack([np.cumprod(np.full(7, 0.95)), np.cumprod(np.full(7, 0.6))])
    model = make_model(base=2e-3, token=1e-3)
    fast, slow = choose(survival, model).num_draft_tokens
    fast_latency, slow_latency = choose(latency_gains(survival), model, is_latency=True).num_draft_tokens
    assert fast - slow > fast_latency - slow_latency


@given(seeds, st.integers(1, 6), models, st.integers(0, 30))
def test_one_length_for_everybody_is_the_best_of_those(seed, count, model, prefill):
    survival = make_survival(seed, count, 4)
    choice = choose_equal(survival.sum(axis=0).tolist(), count, model, num_prefill_tokens=prefill)
    assert len(set(choice.num_draft_tokens)) == 1
    best = max(goodput(survival, [k] * count, model, prefill) for k in range(5))
    assert choice.rate == pytest.approx(best)
    assert goodput(survival, choice.num_draft_tokens, model, prefill) == pytest.approx(best)


@given(seeds, st.integers(1, 6), models, st.lists(st.integers(0, 4), min_size=6, max_size=6))
def test_lengths_that_a_ceiling_makes_unequal_pay_for_the_graph(seed, count, model, ceilings):
    survival, limits = make_survival(seed, count, 4), np.array(ceilings[:count])
    allowed = np.where(np.arange(4) < limits[:, None], survival, 0.0)
    choice = choose_equal(allowed.sum(axis=0).tolist(), count, model, ceilings=limits)

    def rate(k):
        lengths = np.minimum(limits, k)
        tokens = count + allowed[:, :k].sum()
        seconds = model.seconds(count, count + int(lengths.sum()), 0, 0, k)
        return tokens / (seconds * (LOST_GRAPH if (lengths < k).any() else 1.0))

    best = max(range(5), key=rate)
    assert choice.rate == pytest.approx(rate(best))
    assert choice.num_draft_tokens == np.minimum(limits, choice.point.cap).tolist()
