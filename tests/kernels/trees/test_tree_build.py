"""The twin against a heap of paths; the kernel itself under Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.kernels.trees import reference
from honed.kernels.trees import top_candidates as candidates
from honed.kernels.trees import tree_build as kernel
from tests.kernels.draft_tree import ROOT, build_tree
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases

VALUES = [0.0, -0.25, -0.5, -1.0 / 3.0, -1.0, -7.5, -np.inf]


@needs_triton
def test_the_kernel_equals_its_twin_under_the_interpreter() -> None:
    run_cases("tree_build", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernel_equals_its_twin_on_a_gpu() -> None:
    run_cases("tree_build", "cuda")


@st.composite
def tables(draw: st.DrawFn) -> np.ndarray:
    """Sorted log-probabilities [B, D, m]; of few values, so that ties abound, or of many."""
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 16)), draw(st.integers(1, 16)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    if draw(st.booleans()):
        drawn = rng.choice(VALUES, shape)
    else:
        drawn = np.log(rng.dirichlet(np.full(shape[2] + 1, 0.5), shape[:2])[..., :-1])
    return np.sort(drawn, axis=2)[..., ::-1].copy()


@settings(deadline=None, max_examples=60)
@given(tables(), st.lists(st.integers(-1, 70), min_size=3, max_size=3), st.integers(1, 60))
def test_it_is_the_best_tree_ties_included(log_probs: np.ndarray, budgets: list[int], max_nodes: int) -> None:
    num_requests = len(log_probs)
    ids = torch.arange(log_probs.size).view(log_probs.shape)
    asked = torch.tensor(log_probs), ids, torch.tensor(budgets[:num_requests]), max_nodes
    twin = reference.tree_build(*asked)
    made = kernel.tree_build(*asked)
    assert all(torch.equal(part, of_twin) for part, of_twin in zip(made, twin, strict=True))
    attends = reference.unpack_bits(made.row_masks).numpy()
    for b in range(num_requests):
        wanted = build_tree(log_probs[b], min(budgets[b], max_nodes))
        num = len(wanted)
        assert int(made.num_nodes[b]) == num
        for got, want in ((made.ranks, wanted.rank), (made.parents, wanted.parent), (made.depths, wanted.depth)):
            assert got[b, :num].tolist() == want.tolist()
        assert made.tokens[b, :num].tolist() == ids[b, wanted.depth - 1, wanted.rank].tolist()
        for node, path in enumerate(wanted.ancestors()):
            assert np.flatnonzero(attends[b, node + 1]).tolist() == [0, *(step + 1 for step in path)]
        assert np.flatnonzero(attends[b, 0]).tolist() == [0]
        assert not attends[b, num + 1 :].any()
        assert (made.parents[b, num:] == ROOT).all()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 4), st.integers(1, 40))
def test_where_tokens_depend_on_the_one_before_it_is_the_likeliest_tree(seed: int, depths: int, rows: int, budget: int) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(rows, 0.7), (depths, rows))  # of each place, below each place
    order = np.argsort(-shares, axis=-1, kind="stable")
    log_probs = np.log(np.take_along_axis(shares, order, -1))
    tokens = np.arange(depths * rows).reshape(depths, 1, rows)
    asked = (
        torch.tensor(log_probs[None]),
        torch.tensor(np.take_along_axis(np.broadcast_to(tokens, shares.shape), order, -1)[None]),
        torch.tensor([budget]),
        budget,
    )
    made = kernel.tree_build(*asked, candidates=torch.tensor(order[None]))
    twin = reference.tree_build(*asked, candidates=torch.tensor(order[None]))
    assert all(torch.equal(part, of_twin) for part, of_twin in zip(made, twin, strict=True))
    every: dict[tuple[int, ...], float] = {}
    for depth in range(1, depths + 1):
        for path in itertools.product(range(rows), repeat=depth):
            steps = zip((0, *path[:-1]), path, strict=True)
            every[path] = sum(np.log(shares[d, before, place]) for d, (before, place) in enumerate(steps))
    best = sorted(every.values(), reverse=True)[:budget]
    found, count = list[tuple[int, ...]](), int(made.num_nodes[0])
    for token, parent in zip(made.tokens[0, :count].tolist(), made.parents[0, :count].tolist(), strict=True):
        found.append((*(found[parent] if parent != ROOT else ()), token % rows))
    assert len(set(found)) == len(best)
    np.testing.assert_allclose([every[path] for path in found], best, atol=1e-9)


@pytest.mark.parametrize(
    ("shape", "candidates", "text"),
    [
        ((2, 3, 4), (2, 3, 4), "aren't both"),
        ((2, 3, 4, 4), (2, 3, 4, 3), "aren't both"),
        ((2, 3, 17, 4), (2, 3, 17, 4), "17 predecessors"),
        ((2, 3, 4, 17), (2, 3, 4, 17), "17 candidates"),
        ((2, 3, 4, 4), None, "don't fit"),
    ],
)
def test_candidates_that_do_not_fit_are_refused(shape: tuple[int, ...], candidates: tuple[int, ...] | None, text: str) -> None:
    places = None if candidates is None else torch.zeros(candidates)
    with pytest.raises(ValueError, match=text):
        kernel.tree_build(torch.zeros(shape), torch.zeros(shape), torch.zeros(2), 8, candidates=places)


def test_paths_with_high_ranks_are_compared() -> None:
    log_probs = np.full((3, 16), -np.inf)
    log_probs[0, :2], log_probs[1], log_probs[2, 0] = 0.0, 0.0, 0.0
    made = kernel.tree_build(torch.tensor(log_probs[None]), torch.zeros(1, 3, 16).int(), torch.tensor([66]), 66)
    assert made.parents[0].tolist() == build_tree(log_probs, 66).parent.tolist()


def test_from_logits_to_the_tree_of_their_distribution() -> None:
    logits = 3.0 * torch.randn(2, 5, 200, generator=torch.Generator().manual_seed(0))
    temperature = torch.tensor([0.0, 0.6])
    log_probs, ids = candidates.top_candidates(logits, 6, temperature)
    made = kernel.tree_build(log_probs, ids, torch.tensor([20, 20]), 20)
    for b, divisor in enumerate((1.0, 0.6)):
        q = torch.log_softmax(logits[b].double() / divisor, -1)
        top = q.topk(6)
        wanted = build_tree(top.values.numpy(), 20)
        assert made.tokens[b].tolist() == top.indices[wanted.depth - 1, wanted.rank].tolist()
        assert made.parents[b].tolist() == wanted.parent.tolist()


def test_past_the_budget_a_tree_is_empty() -> None:
    ids = torch.tensor([[[5, 6], [7, 8]]])
    trees = kernel.tree_build(torch.tensor([[[-0.1, -3.0], [-0.2, -3.0]]]), ids, torch.tensor([3]), 4)
    assert trees.tokens.tolist() == [[5, 7, 6, 0]]
    assert trees.parents.tolist() == [[ROOT, 0, ROOT, ROOT]]
    assert trees.row_masks.tolist() == [[[0b1], [0b11], [0b111], [0b1001], [0]]]


def test_bits_survive_packing() -> None:
    bits = torch.rand(3, 5, 96, generator=torch.Generator().manual_seed(1)) < 0.5
    assert torch.equal(reference.unpack_bits(reference.pack_bits(bits)), bits)
    assert reference.pack_bits(torch.ones(1, 32, dtype=torch.bool)).tolist() == [[-1]]


def test_the_registered_op() -> None:
    log_probs = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(2)).sort(-1, descending=True).values
    ids, budgets = torch.arange(24).view(2, 3, 4), torch.tensor([5, 2])
    args = (log_probs, ids, budgets, None, *kernel.allocate(2, 5, "cpu"))
    for part in args[4:]:
        part.zero_()
    torch.library.opcheck(torch.ops.honed.tree_build.default, args)


@pytest.mark.parametrize(
    ("log_probs", "ids", "budgets", "max_nodes", "text"),
    [
        ((2, 3, 4), (2, 3, 5), (2,), 8, "don't fit"),
        ((2, 3, 4), (2, 3, 4), (3,), 8, "don't fit"),
        ((3, 4), (3, 4), (3,), 8, "don't fit"),
        ((2, 17, 4), (2, 17, 4), (2,), 8, "17 depths"),
        ((2, 3, 17), (2, 3, 17), (2,), 8, "17 candidates"),
        ((2, 3, 4), (2, 3, 4), (2,), 1025, "1025 nodes"),
        ((2, 0, 4), (2, 0, 4), (2,), 8, "0 depths"),
    ],
)
def test_what_does_not_fit_is_refused(
    log_probs: tuple[int, ...], ids: tuple[int, ...], budgets: tuple[int, ...], max_nodes: int, text: str
) -> None:
    with pytest.raises(ValueError, match=text):
        kernel.tree_build(torch.zeros(log_probs), torch.zeros(ids), torch.zeros(budgets), max_nodes)
