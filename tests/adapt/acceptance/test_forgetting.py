"""After a change the estimate follows quickly; without one it is as steady as a long memory's."""

from __future__ import annotations

import numpy as np
import pytest

from honed.adapt.acceptance.estimate import AcceptanceCounts, RequestTable, chain_estimate
from honed.adapt.acceptance.forgetting import AdaptiveCounts
from tests.adapt.simulate import simulate_rounds

BEFORE, AFTER = np.full(7, 0.8), np.full(7, 0.55)
BATCH = 25


def feed(rng, acceptance, rounds, *counts):
    for _ in range(rounds // BATCH):
        drafted = rng.integers(1, 8, BATCH)
        accepted = simulate_rounds(rng, acceptance, drafted)
        for one in counts:
            one.observe(drafted, accepted)


def first(counts):
    if isinstance(counts, AdaptiveCounts):
        return float(counts.estimate()[0])
    return float(chain_estimate(counts.trials, counts.successes)[0])


@pytest.mark.parametrize("rounds", [100, 400])
@pytest.mark.parametrize(("before", "after"), [(BEFORE, AFTER), (AFTER, BEFORE)])
def test_after_a_change_the_estimate_follows_within_a_hundred_rounds(before, after, rounds):
    rng, errors, steady = np.random.default_rng(1), [], []
    for _ in range(20):
        adaptive, long = AdaptiveCounts(7, 4000.0), AcceptanceCounts(7, 4000.0)
        feed(rng, before, 8000, adaptive, long)
        feed(rng, after, rounds, adaptive, long)
        errors.append(abs(first(adaptive) - after[0]))
        steady.append(abs(first(long) - after[0]))
    assert np.mean(errors) < 0.06
    assert np.mean(steady) > 0.2  # what a long memory alone still believes


@pytest.mark.proof
def test_without_a_change_it_is_nearly_the_long_memory():
    rng, weights, errors, steady = np.random.default_rng(2), [], [], []
    for _ in range(20):
        adaptive, long = AdaptiveCounts(7, 4000.0), AcceptanceCounts(7, 4000.0)
        feed(rng, BEFORE, 20_000, adaptive, long)
        weights.append(adaptive.weights[-1])
        errors.append(first(adaptive) - BEFORE[0])
        steady.append(first(long) - BEFORE[0])
    assert np.mean(weights) > 0.8
    assert np.std(errors) < 1.5 * np.std(steady)


def test_however_many_rounds_come_at_once_the_best_memory_keeps_its_weight():
    rng, counts = np.random.default_rng(10), AdaptiveCounts(7, 4000.0)
    feed(rng, BEFORE, 8000, counts)
    drafted = np.full(2000, 7)
    counts.observe(drafted, simulate_rounds(rng, BEFORE, drafted))
    assert counts.weights[-1] > 0.9


def test_the_evidence_of_repetitive_rounds_counts_less():
    rng, counts = np.random.default_rng(3), [AdaptiveCounts(7, 4000.0) for _ in range(2)]
    feed(rng, BEFORE, 8000, *counts)
    for one, weight in zip(counts, (1.0, 0.125), strict=True):
        rng = np.random.default_rng(4)
        for _ in range(4):
            drafted = rng.integers(1, 8, BATCH)
            one.observe(drafted, simulate_rounds(rng, AFTER, drafted), weights=np.full(BATCH, weight))
    assert first(counts[0]) + 0.05 < first(counts[1]) < BEFORE[0]


def test_a_position_that_was_hardly_reached_since_a_change_is_told_by_the_others():
    rng, counts = np.random.default_rng(8), AdaptiveCounts(7, 4000.0)
    feed(rng, BEFORE, 8000, counts)
    before = counts.estimate()
    for _ in range(8):  # only the first position is tried
        drafted = np.ones(BATCH, dtype=np.int64)
        counts.observe(drafted, simulate_rounds(rng, np.full(7, 0.3), drafted))
    assert counts.estimate()[6] < before[6] - 0.1


@pytest.mark.parametrize("forgetting_rounds", [0.0, 10.0, 100.0, 1e9])
def test_no_memory_is_longer_than_the_longest(forgetting_rounds):
    counts = AdaptiveCounts(7, forgetting_rounds)
    feed(np.random.default_rng(9), BEFORE, 2000, counts)
    assert np.sum(counts.weights) == pytest.approx(1.0)
    assert (counts.trials <= max(forgetting_rounds, 1.0) + BATCH).all()
    assert abs(first(counts) - BEFORE[0]) < 0.35


def steps_of(rng, mean, strength, num_requests, num_rounds=40):
    """Requests that differ from each other, 16 at a time, a draft token each: yields (names, accepted) of each step."""
    for _ in range(num_requests // 16):
        own = rng.beta(strength * mean, strength * (1.0 - mean), 16)
        names = rng.integers(1, 2**63, 16).astype(np.uint64)
        for _ in range(num_rounds):
            yield names, (rng.random(16) < own).astype(np.int64)


@pytest.mark.proof
def test_other_requests_are_noticed_soon_though_requests_differ_much():
    """Within two waves of requests; later where each of their rounds counts alike."""
    rng, errors, alike = np.random.default_rng(6), [], []
    drafted = np.ones(16, dtype=np.int64)
    for _ in range(20):
        table, counts, equal = RequestTable(1), AdaptiveCounts(1, 4000.0), AdaptiveCounts(1, 4000.0)
        for mean, num_requests in ((0.4, 128), (0.12, 32)):
            for names, accepted in steps_of(rng, mean, 3.0, num_requests):
                strength = table.strength()
                counts.observe(drafted, accepted, weights=table.information(names, drafted, strength))
                equal.observe(drafted, accepted, weights=np.full(16, 0.125))
                table.observe(names, drafted, accepted)
        errors.append(first(counts) - 0.12)
        alike.append(first(equal) - 0.12)
    assert np.mean(errors) < 0.07
    assert np.mean(errors) < 0.6 * np.mean(alike)


@pytest.mark.proof
def test_requests_that_differ_much_are_no_change():
    """Their mean is told as well as by the long memory, give or take a few per cent of acceptance."""
    rng, errors, drafted = np.random.default_rng(7), [], np.ones(16, dtype=np.int64)
    for _ in range(10):
        table, counts = RequestTable(1), AdaptiveCounts(1, 4000.0)
        for names, accepted in steps_of(rng, 0.4, 3.0, 800):
            counts.observe(drafted, accepted, weights=table.information(names, drafted, table.strength()))
            table.observe(names, drafted, accepted)
        errors.append(first(counts) - 0.4)
    assert np.abs(errors).mean() < 0.06


def test_after_a_swap_all_memories_are_weak():
    rng, counts = np.random.default_rng(5), AdaptiveCounts(7, 4000.0)
    feed(rng, BEFORE, 8000, counts)
    counts.forget(0.02)
    feed(rng, AFTER, 400, counts)
    assert abs(first(counts) - AFTER[0]) < 0.08


def test_after_a_change_the_estimate_rests_on_few_trials():
    rng, counts, trials = np.random.default_rng(2), AdaptiveCounts(7, 4000.0), []
    for acceptance, batches in ((0.8, 100), (0.4, 5)):
        for _ in range(batches):
            counts.observe(np.full(20, 7), simulate_rounds(rng, np.full(7, acceptance), np.full(20, 7)))
        trials.append((counts.effective_trials[0], counts.trials[0]))
    assert trials[1][0] < 0.1 * trials[1][1]
    assert trials[0][0] > 2.0 * trials[1][0]
