import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.trees.draft_tree import ROOT, build_tree, expected_acceptance_length


def make_log_probs(seed, depths, candidates):
    rng = np.random.default_rng(seed)
    probabilities = rng.dirichlet(np.full(candidates + 2, 0.6), size=depths)
    return np.log(np.maximum(np.sort(probabilities, axis=1)[:, ::-1][:, :candidates], 1e-12))


def best_by_exhaustion(log_probs, budget, off_chain=None):
    """Try every set of paths that contains its own prefixes."""
    depths, candidates = log_probs.shape
    paths = [p for d in range(1, depths + 1) for p in itertools.product(range(candidates), repeat=d)]
    below = log_probs if off_chain is None else off_chain
    mass = {p: float(np.exp(sum((below if any(p[:i]) else log_probs)[i, r] for i, r in enumerate(p)))) for p in paths}
    best = 0.0
    for size in range(1, min(budget, len(paths)) + 1):
        for chosen in itertools.combinations(paths, size):
            if all(len(p) == 1 or p[:-1] in chosen for p in chosen):
                best = max(best, sum(mass[p] for p in chosen))
    return 1.0 + best


@given(st.integers(0, 2**32 - 1), st.sampled_from([(2, 2), (3, 2), (2, 3)]), st.integers(1, 4))
def test_no_tree_of_the_same_budget_is_better(seed, shape, budget):
    log_probs = make_log_probs(seed, *shape)
    tree = build_tree(log_probs, budget)
    assert expected_acceptance_length(tree) == pytest.approx(best_by_exhaustion(log_probs, budget))


@given(st.integers(0, 2**32 - 1), st.sampled_from([(2, 2), (3, 2), (2, 3)]), st.integers(1, 4))
def test_nor_where_leaving_the_chain_changes_what_is_below(seed, shape, budget):
    log_probs, off_chain = make_log_probs(seed, *shape), make_log_probs(seed + 1, *shape)
    tree = build_tree(log_probs, budget, off_chain=off_chain)
    assert expected_acceptance_length(tree) == pytest.approx(best_by_exhaustion(log_probs, budget, off_chain))
    assert (np.diff(tree.score) <= 1e-12).all()


def test_both_tables_must_have_the_same_shape():
    with pytest.raises(ValueError, match="off the chain"):
        build_tree(make_log_probs(0, 3, 2), 4, off_chain=make_log_probs(0, 2, 2))


@given(st.integers(0, 2**32 - 1), st.integers(1, 8), st.integers(1, 8), st.integers(0, 60), st.booleans())
def test_a_tree_is_well_formed(seed, depths, candidates, budget, is_chain_first):
    log_probs = make_log_probs(seed, depths, candidates)
    tree = build_tree(log_probs, budget, is_chain_first=is_chain_first)
    possible = sum(candidates**d for d in range(1, depths + 1))
    assert len(tree) == min(budget, possible)
    assert len(tree.children()) == len(tree)  # no node twice
    for node, path in enumerate(tree.ancestors()):
        parent = int(tree.parent[node])
        assert parent < node
        assert tree.depth[node] == len(path) == (tree.depth[parent] + 1 if parent != ROOT else 1)
        score = sum(log_probs[i, tree.rank[step]] for i, step in enumerate(path))
        assert tree.score[node] == pytest.approx(score)
        if tree.rank[node] > 0:
            assert (parent, int(tree.rank[node]) - 1) in tree.children()


@given(st.integers(0, 2**32 - 1), st.integers(1, 40))
def test_a_larger_budget_only_adds_nodes(seed, budget):
    log_probs = make_log_probs(seed, 6, 5)
    small, large = build_tree(log_probs, budget), build_tree(log_probs, budget + 7)
    for name in ("rank", "parent", "depth", "score"):
        assert (getattr(large, name)[:budget] == getattr(small, name)).all()


@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_chain_first_starts_with_the_chain_and_never_beats_best_first(seed, budget):
    log_probs = make_log_probs(seed, 7, 4)
    tree = build_tree(log_probs, budget, is_chain_first=True)
    length = min(budget, 7)
    assert (tree.rank[:length] == 0).all()
    assert tree.depth[:length].tolist() == list(range(1, length + 1))
    assert expected_acceptance_length(tree) <= expected_acceptance_length(build_tree(log_probs, budget)) + 1e-12


def test_ties_go_to_the_shallower_then_to_the_smaller_path():
    log_probs = np.log(np.full((2, 2), 0.5))
    tree = build_tree(log_probs, 6)
    paths = [tuple(int(tree.rank[node]) for node in path) for path in tree.ancestors()]
    assert paths == [(0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]


def test_forbidden_candidates_are_never_drafted():
    log_probs = np.array([[-0.1, -np.inf], [-np.inf, -np.inf], [-0.1, -0.2]])
    for is_chain_first in (False, True):
        assert len(build_tree(log_probs, 9, is_chain_first=is_chain_first)) == 1


@pytest.mark.parametrize("log_probs", [[[-1.0, -0.5]], [[float("nan"), -1.0]], [[0.5, -1.0]], [-1.0, -2.0]])
def test_what_is_not_a_sorted_table_of_log_probabilities_is_refused(log_probs):
    with pytest.raises(ValueError, match=r"log-probabilities|candidates"):
        build_tree(np.array(log_probs), 4)


def test_no_budget_and_no_depths_give_the_empty_tree():
    assert len(build_tree(make_log_probs(0, 3, 2), 0)) == 0
    assert expected_acceptance_length(build_tree(np.zeros((0, 2)), 5)) == 1.0
