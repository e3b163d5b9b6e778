"""Acceptance that depends on the length of the context is found, taken apart from workloads and requests, or left alone."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.acceptance.context_shift import (
    NUM_BUCKETS,
    ContextCounts,
    bucket_starts,
    buckets_of,
    estimate_effect,
    shift_for,
    shifted_curves,
    tilt,
    trials_design_effect,
)
from honed.adapt.acceptance.estimate import RequestTable, chain_estimate, reached_and_accepted, scale_odds
from honed.adapt.lengths import compiled
from honed.adapt.lengths.request_beliefs import REQUEST
from honed.adapt.protocol.arrays import Floats
from tests.adapt.simulate import simulate_rounds

K = 5
CURVE = np.array([0.8, 0.75, 0.7, 0.7, 0.65])
NONE = np.zeros(NUM_BUCKETS)


def observed(
    rng: np.random.Generator, contexts: np.ndarray, slope: float, curve: Floats = CURVE, spread: float = 0.0, repeats: int = 1
) -> tuple[ContextCounts, RequestTable]:
    """Requests at given contexts, each of `repeats` rounds; log odds fall by `slope` per bucket, and scatter by `spread`."""
    counts, table = ContextCounts(K, 4000.0), RequestTable(K, 4096)
    effect = slope * (buckets_of(contexts) - 5.0) + spread * rng.standard_normal(len(contexts))
    acceptance = scale_odds(curve, np.exp(effect)[:, None])
    for _ in range(repeats):
        drafted = rng.integers(1, K + 1, len(contexts))
        passed = rng.random((len(contexts), K)) < acceptance
        accepted = np.minimum(np.cumprod(passed, axis=1).sum(axis=1), drafted)
        reached, accepted = reached_and_accepted(drafted, accepted, K)
        counts.observe(contexts, reached, accepted)
        table.observe(np.arange(len(contexts), dtype=np.uint64), reached, accepted)
    return counts, table


def spread_out(rng: np.random.Generator, count: int, low: int = 64, high: int = 16_000) -> np.ndarray:
    return np.exp(rng.uniform(np.log(low), np.log(high), count)).astype(np.int64)


# --- buckets ----------------------------------------------------------------------------------------------------------


def bucket_of(context: int) -> int:
    return int(buckets_of([context])[0])


@given(st.lists(st.integers(-(2**62), 2**62), max_size=20))
def test_the_engine_looks_up_the_same_buckets(contexts: list[int]) -> None:
    count, steps = len(contexts), np.arange(2.0 * NUM_BUCKETS).reshape(2, NUM_BUCKETS)
    requests, constants = np.ones(count, REQUEST), np.ones(2)
    requests["context"], requests["row"], requests["shift"] = contexts, np.arange(count) % 2, np.nan
    compiled.curves(np.arange(count), requests, constants, True, steps)
    assert requests["shift"].tolist() == [steps[i % 2, bucket_of(n)] for i, n in enumerate(contexts)]


def test_buckets_begin_where_they_say_and_never_end() -> None:
    assert [bucket_of(n) for n in bucket_starts()] == list(range(NUM_BUCKETS))
    assert [bucket_of(n - 1) for n in bucket_starts()] == [0, *range(NUM_BUCKETS - 1)]
    assert bucket_of(10**12) == NUM_BUCKETS - 1
    assert bucket_of(-(10**12)) == 0


# --- estimate ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slope", [0.4, -0.2])
def test_a_dependence_is_found_and_with_it_the_curve_of_every_context(slope: float) -> None:
    rng = np.random.default_rng(1)
    counts, _ = observed(rng, spread_out(rng, 30_000), slope)
    effect = estimate_effect([(counts, 1.0)])
    assert np.allclose(np.diff(effect[1:7]), slope, atol=0.08)
    shift = shift_for(effect, counts.weight)
    mixed = chain_estimate((counts.failures + counts.successes).sum(axis=0), counts.successes.sum(axis=0))
    apart = scale_odds(mixed, tilt(shift, counts.recent))
    for bucket in range(1, 7):
        truth = scale_odds(CURVE, np.exp(slope * (bucket - 5.0)))
        assert np.allclose(scale_odds(apart, shift[bucket]), truth, atol=0.03)


def test_the_mix_that_reaches_late_positions_does_not_tilt_the_curve() -> None:
    # Half of the rounds fail four times as often: counted together, late positions look easier than the first one.
    rng, flat = np.random.default_rng(2), np.full(K, 0.7)
    hard, _ = observed(rng, np.full(20_000, 9000), 0.0, scale_odds(flat, 4.0))
    easy, _ = observed(rng, np.full(20_000, 300), 0.0, flat)
    both = ContextCounts(K, 4000.0)
    for name in ("failures", "successes", "recent"):
        setattr(both, name, getattr(hard, name) + getattr(easy, name))
    mixed = chain_estimate((both.failures + both.successes).sum(axis=0), both.successes.sum(axis=0))
    shift = shift_for(estimate_effect([(both, 1.0)]), both.weight)
    apart = scale_odds(mixed, tilt(shift, both.recent))
    assert mixed[-1] - mixed[0] > 0.1
    assert np.ptp(apart) < 0.04
    assert np.allclose(scale_odds(apart, shift[bucket_of(300)]), flat, atol=0.03)
    assert shift[bucket_of(9000)] / shift[bucket_of(300)] == pytest.approx(4.0, rel=0.15)


@pytest.mark.parametrize("seed", range(10))
def test_without_a_dependence_the_factor_is_1(seed: int) -> None:
    rng = np.random.default_rng(seed)
    counts, table = observed(rng, spread_out(rng, 400), 0.0, spread=0.5, repeats=60)
    effect = estimate_effect([(counts, trials_design_effect(table, table.strength()))])
    assert np.abs(np.exp(effect) - 1.0).max() < 0.1


def test_requests_that_differ_are_not_taken_for_contexts_that_do() -> None:
    # The same rounds without the design effect: what a few requests have in common would count as the context's doing.
    found, naive = [], []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        counts, table = observed(rng, spread_out(rng, 60), 0.0, spread=0.6, repeats=60)
        found.append(np.abs(estimate_effect([(counts, trials_design_effect(table, table.strength()))])).max())
        naive.append(np.abs(estimate_effect([(counts, 1.0)])).max())
    assert np.mean(naive) > 0.3
    assert np.mean(found) < 0.1


def test_a_workload_whose_contexts_are_all_alike_says_nothing_however_different_it_is() -> None:
    rng = np.random.default_rng(3)
    chat, _ = observed(rng, np.full(5000, 500), 0.0, CURVE)
    papers, _ = observed(rng, np.full(5000, 20_000), 0.0, CURVE * 0.5)
    assert estimate_effect([(chat, 1.0), (papers, 1.0)]).tolist() == NONE.tolist()


def test_a_dependence_is_shared_and_every_workload_gets_it_relative_to_its_own_contexts() -> None:
    rng = np.random.default_rng(4)
    chat, _ = observed(rng, spread_out(rng, 10_000, 64, 3000), 0.4, CURVE)
    papers, _ = observed(rng, spread_out(rng, 10_000, 500, 16_000), 0.4, CURVE * 0.9)
    same, _ = observed(rng, np.full(3000, 300), 0.0, CURVE * 0.7)
    effect = estimate_effect([(chat, 1.0), (papers, 1.0), (same, 1.0)])
    assert np.allclose(np.diff(effect[1:7]), 0.4, atol=0.1)
    for counts in (chat, papers, same):
        shift = shift_for(effect, counts.weight)
        assert abs(float(counts.weight @ np.log(shift)) / counts.weight.sum()) < 1e-3
    assert shift_for(effect, same.weight)[bucket_of(300)] == 1.0
    assert shift_for(effect, same.weight)[bucket_of(9000)] > 3.0


def test_contexts_longer_than_any_that_was_seen_lean_on_the_longest() -> None:
    rng = np.random.default_rng(5)
    counts, _ = observed(rng, spread_out(rng, 20_000, 64, 4000), 0.4)
    effect = estimate_effect([(counts, 1.0)])
    assert effect[5] > effect[7] > effect[10] > 0.5 * effect[5] > 0.0


def test_nothing_known_is_a_factor_of_1() -> None:
    assert estimate_effect([]).tolist() == NONE.tolist()
    assert estimate_effect([(ContextCounts(K, 100.0), 1.0)]).tolist() == NONE.tolist()
    assert estimate_effect([(ContextCounts(0, 100.0), 1.0)]).tolist() == NONE.tolist()
    assert shift_for(NONE, NONE) == []
    rng = np.random.default_rng(0)
    faded, _ = observed(rng, spread_out(rng, 3000), 0.4)
    assert estimate_effect([(faded, 1.0)]).any()
    faded.forget(1e-30)
    assert estimate_effect([(faded, 1.0)]).tolist() == NONE.tolist()
    assert tilt([2.0] * NUM_BUCKETS, np.zeros((NUM_BUCKETS, K))).tolist() == [1.0] * K


rounds = st.lists(st.tuples(st.integers(-5, 2**40), st.integers(0, K), st.integers(0, K)), max_size=50)


@given(st.lists(st.tuples(rounds, st.floats(0.0, 1e3)), max_size=3))
def test_whatever_was_seen_the_factors_are_positive_numbers(workloads: list[tuple[list[tuple[int, int, int]], float]]) -> None:
    evidence = []
    for seen, design_effect in workloads:
        counts = ContextCounts(K, 100.0)
        columns = np.array(seen, dtype=np.int64).reshape(-1, 3)
        reached, accepted = reached_and_accepted(columns[:, 1], columns[:, 2], K)
        counts.observe(columns[:, 0], reached, accepted)
        evidence.append((counts, design_effect))
    effect = estimate_effect(evidence)
    for counts, _ in evidence:
        shift = shift_for(effect, counts.weight)
        assert all(0.01 < factor < 100.0 for factor in shift)
        if shift:
            factors = tilt(shift, counts.recent)
            assert ((factors > 0.01) & (factors < 100.0)).all()


@given(st.lists(st.integers(-5, 10**6), max_size=30), st.booleans())
def test_shifted_curves_hand_out_every_round_once(contexts: list[int], is_shifted: bool) -> None:
    shift = [1.0 + number for number in range(NUM_BUCKETS)] if is_shifted else []
    found = np.zeros(len(contexts), dtype=np.int64)
    for mine, curve in shifted_curves(CURVE, shift, np.array(contexts, dtype=np.int64)):
        found[mine] += 1
        for row in mine.tolist():
            assert np.allclose(curve, scale_odds(CURVE, shift[bucket_of(contexts[row])]) if shift else CURVE)
    assert (found == 1).all()


def test_forgetting_does_not_depend_on_how_rounds_were_batched() -> None:
    rng = np.random.default_rng(6)
    contexts, drafted = spread_out(rng, 2), np.full(1, K)
    first, second = (reached_and_accepted(drafted, simulate_rounds(rng, CURVE, drafted), K) for _ in range(2))
    counts = ContextCounts(K, 10.0)
    counts.observe(contexts[:1], *first)
    before = counts.recent.sum()
    counts.observe(contexts[1:], *second)
    assert counts.recent.sum() == pytest.approx(before * np.exp(-0.1) + second[1].sum())


def test_after_all_contexts_have_become_long_their_curve_is_what_it_is_now() -> None:
    # The curve has come to hold the long contexts alone; their factor must not be counted on top of it.
    rng, long = np.random.default_rng(7), 9000
    counts, _ = observed(rng, spread_out(rng, 20_000), 0.4)
    for _ in range(40):
        counts.recent *= 0.5
    recent, _ = observed(rng, np.full(5000, long), 0.0)
    counts.recent += recent.recent
    shift = shift_for(estimate_effect([(counts, 1.0)]), counts.weight)
    assert shift[bucket_of(long)] > 1.5
    now = scale_odds(CURVE, tilt(shift, counts.recent))
    assert np.allclose(scale_odds(now, shift[bucket_of(long)]), CURVE, atol=0.005)


def test_what_a_curve_s_contexts_were_is_counted_as_the_curve_is():
    """Which rests on the first rounds of requests above all: contexts of late ones are long, and say little of it."""
    counts = ContextCounts(2, 100.0)
    contexts, both = np.array([10, 5000]), np.array([2, 2])
    counts.observe(contexts, both, both, np.array([1.0, 0.125]))
    seen = counts.recent.sum(axis=1)
    assert seen[buckets_of([10])[0]] == pytest.approx(2.0)
    assert seen[buckets_of([5000])[0]] == pytest.approx(0.25)
    counts.observe(contexts, np.zeros(2, int), np.zeros(2, int), np.array([40.0, 10.0]))  # they age by as much
    assert counts.recent.sum() == pytest.approx(2.25 * math.exp(-0.5))
    assert counts.successes.sum() == pytest.approx(4.0, rel=1e-3)
