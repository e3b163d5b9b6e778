import numpy as np
import pytest

from honed.adapt.acceptance.rounds import TreeRounds
from honed.adapt.acceptance.tree_gains import TreeGains


def trees(rng: np.random.Generator, chances: np.ndarray, sizes: np.ndarray) -> TreeRounds:
    """Trees whose node i is passed with a given chance."""
    hit = rng.random((len(sizes), len(chances))) < chances
    hit &= np.arange(len(chances)) < sizes[:, None]
    width = max(int(hit.sum(1).max(initial=0)), 1)
    nodes = np.full((len(sizes), width), -1)
    for row, is_hit in enumerate(hit):
        found = np.flatnonzero(is_hit)
        nodes[row, : len(found)] = found
    return TreeRounds(sizes, nodes, np.ones(len(sizes), dtype=np.bool_))


def test_values_are_the_chances_whatever_the_budgets_were():
    rng, chances = np.random.default_rng(0), 0.8 * 0.8 ** np.arange(15)
    gains = TreeGains(15, 1e9)
    for _ in range(30):
        gains.observe(trees(rng, chances, rng.integers(1, 16, size=200)))
    assert gains.values() == pytest.approx(chances, abs=0.03)
    assert np.cumprod(gains.acceptance()) == pytest.approx(gains.values(), abs=0.02)


def test_values_never_rise_and_unseen_nodes_go_on_falling():
    rng, chances = np.random.default_rng(1), 0.7 * 0.8 ** np.arange(31)
    gains = TreeGains(31, 1e9)
    gains.observe(trees(rng, chances, np.full(300, 7)))
    values = gains.values()
    assert (np.diff(values) <= 1e-12).all()
    assert values[6] > values[15] > values[30]


def test_a_workload_is_drawn_to_its_engine():
    rng = np.random.default_rng(2)
    engine, own = TreeGains(7, 1e9), TreeGains(7, 1e9)
    engine.observe(trees(rng, np.full(7, 0.5), np.full(1000, 7)))
    assert own.values(prior=engine.values()) == pytest.approx(engine.values())
    own.observe(trees(rng, np.full(7, 0.1), np.full(1000, 7)))
    assert own.values(prior=engine.values()) == pytest.approx(np.full(7, 0.1), abs=0.04)


def test_old_trees_fade():
    rng, gains = np.random.default_rng(3), TreeGains(7, 100.0)
    gains.observe(trees(rng, np.full(7, 0.9), np.full(1000, 7)))
    gains.observe(trees(rng, np.full(7, 0.1), np.full(1000, 7)))
    assert gains.values() == pytest.approx(np.full(7, 0.1), abs=0.1)
    assert gains.trials[0] == pytest.approx(100.0, rel=0.02)


def test_a_shorter_memory_has_followed_a_change_that_the_longest_hasnt():
    rng, gains = np.random.default_rng(4), TreeGains(7, 4000.0)
    gains.observe(trees(rng, np.full(7, 0.8), np.full(4000, 7)))
    gains.observe(trees(rng, np.full(7, 0.1), np.full(100, 7)))
    short, middle, longest = (gains.values(np.eye(3)[number]) for number in range(3))
    assert short == pytest.approx(np.full(7, 0.1), abs=0.15)
    assert (short < middle).all()
    assert (longest > 0.7).all()
    assert gains.values() == pytest.approx(longest)
    assert (gains.values(np.full(3, 1 / 3)) < longest).all()


def test_before_a_second_node_was_seen_nodes_are_worth_less_and_less():
    """Else one-node trees would promise as many tokens as there are slots."""
    rng, gains = np.random.default_rng(5), TreeGains(31, 4000.0)
    gains.observe(trees(rng, np.full(31, 0.7), np.full(200, 1)))
    assert gains.values()[0] == pytest.approx(0.7, abs=0.1)
    assert gains.values().sum() < 5.0


def test_nothing_seen_is_a_guess():
    gains = TreeGains(3, 100.0)
    assert not gains.is_known
    gains.observe(trees(np.random.default_rng(0), np.zeros(0), np.zeros(0, dtype=np.int64)))
    assert not gains.is_known
    assert ((gains.values() > 0) & (gains.values() < 1)).all()


def test_while_trees_are_verified_the_first_tokens_of_all_rounds_change_nothing():
    rng, gains, plain = np.random.default_rng(6), TreeGains(7, 400.0), TreeGains(7, 400.0)
    for chance in (0.7, 0.3):
        for _ in range(20):
            seen = trees(rng, chance * 0.7 ** np.arange(7), rng.integers(1, 8, size=30))
            worth = rng.random(30)
            gains.observe(seen, worth)
            plain.observe(seen, worth)
            gains.observe_firsts((seen.nodes == 0).any(1), worth)
    for weights in (None, np.array([0.5, 0.3, 0.2])):
        assert gains.values(weights) == pytest.approx(plain.values(weights))
        prior = np.linspace(0.6, 0.1, 7)
        assert gains.values(weights, prior) == pytest.approx(plain.values(weights, prior))


A = np.array([0.601, 0.478, 0.294, 0.241, 0.158, 0.132, 0.095, 0.094, 0.088, 0.087])
B = np.array([0.195, 0.072, 0.070, 0.050, 0.033, 0.033, 0.022, 0.022, 0.020, 0.020])
"""Shares of trees of the tiny pair whose node i the text passed, on a running engine, by domain."""


@pytest.mark.parametrize(("before", "after"), [(A, B), (B, A)])
def test_while_trees_rest_nodes_follow_what_chains_show(before: np.ndarray, after: np.ndarray):
    rng, gains = np.random.default_rng(7), TreeGains(10, 4000.0)
    seen = trees(rng, before, np.full(4000, 10))
    gains.observe(seen)
    gains.observe_firsts((seen.nodes == 0).any(1))
    assert gains.values() == pytest.approx(before, abs=0.03)
    gains.observe_firsts(rng.random(1500) < after[0])
    assert gains.values(np.array([0.5, 0.5, 0.0])).sum() == pytest.approx(after.sum(), rel=0.2)
    assert gains.values(np.array([0.5, 0.5, 0.0]))[0] == pytest.approx(after[0], abs=0.1)
