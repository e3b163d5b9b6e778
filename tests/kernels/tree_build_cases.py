"""The Triton kernel against its plain twin, in a process of its own: see test_tree_build.py.

HONED_TEST_DEVICE says where: "cpu" (under Triton's interpreter) or "cuda".
"""

from __future__ import annotations

import os

import pytest
import torch

from honed.kernels.trees import reference
from honed.kernels.trees import tree_build as kernel
from honed.kernels.trees.reference import DraftTrees

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")
INFINITY = float("inf")


def table_of(seed: int, shape: tuple[int, ...], values: list[float] | None = None) -> torch.Tensor:
    """Sorted log-probabilities; with `values` only those, so that there are ties."""
    generator = torch.Generator().manual_seed(seed)
    if values is None:
        drawn = -4.0 * torch.rand(shape, generator=generator)
    else:
        drawn = torch.tensor(values)[torch.randint(len(values), shape, generator=generator)]
    return drawn.sort(-1, descending=True).values.to(DEVICE)


def check(
    log_probs: torch.Tensor,
    budgets: list[int],
    max_nodes: int,
    candidates: torch.Tensor | None = None,
) -> DraftTrees:
    """Launch the kernel itself, compare with the twin bit by bit, return what the kernel made."""
    ids = (7 * torch.arange(log_probs.numel(), device=DEVICE).view(log_probs.shape) + 3).int()
    made = kernel.allocate(len(log_probs), max_nodes, DEVICE)
    for part in made:
        part.fill_(77)  # what isn't written shows
    given = torch.tensor(budgets, device=DEVICE)
    kernel.launch(log_probs, ids, given, made, candidates)
    wanted = reference.tree_build(log_probs, ids, given, max_nodes, candidates)
    for name, got, want in zip(DraftTrees._fields, made, wanted, strict=True):
        assert got.dtype == want.dtype, name
        assert torch.equal(got, want), name
    return made


@pytest.mark.parametrize(
    ("depths", "candidates", "max_nodes"), [(1, 1, 1), (1, 16, 5), (16, 1, 20), (3, 2, 9), (7, 5, 31), (15, 8, 32), (4, 3, 33)]
)
def test_odd_shapes_empty_and_full_budgets(depths: int, candidates: int, max_nodes: int) -> None:
    made = check(table_of(depths, (3, depths, candidates)), [0, max_nodes, max_nodes // 2 + 1], max_nodes)
    assert made.num_nodes[0] == 0
    assert made.row_masks[0, 0, 0] == 1  # an idle request still has its anchor
    assert not made.row_masks[0, 1:].any()


def test_budgets_beyond_the_room_and_below_nothing() -> None:
    made = check(table_of(1, (3, 4, 4)), [10_000, -3, 12], 12)
    assert made.num_nodes.tolist() == [12, 0, 12]


@pytest.mark.parametrize("seed", range(3))
def test_ties(seed: int) -> None:
    check(table_of(seed, (2, 6, 4), [0.0, -0.5, -1.0]), [24, 17], 24)


def test_the_longest_and_widest_key() -> None:
    # Sixteen ranks of four bits: at the last depth the key would need 64 of them and a depth.
    log_probs = torch.full((1, 16, 16), -1.0, device=DEVICE)
    log_probs[:, :, 0] = 0.0
    check(log_probs, [40], 40)
    log_probs = torch.full((1, 16, 16), -9.0, device=DEVICE)
    log_probs[:, :, 0] = -0.25
    made = check(log_probs, [40], 40)
    assert made.depths.max() == 16


def test_what_is_not_finite_is_never_drafted() -> None:
    log_probs = table_of(5, (5, 4, 3))
    log_probs[0] = float("nan")
    log_probs[1, 2] = -INFINITY
    log_probs[2, 1, 1:] = -INFINITY
    log_probs[3, 0, 0] = INFINITY
    log_probs[4, 1:, 0] = float("nan")
    made = check(log_probs, [15] * 5, 15)
    assert made.num_nodes[[0, 3]].tolist() == [0, 0]
    assert made.depths[1].max() == 2


def test_double_precision_tables_and_strides() -> None:
    wide = table_of(4, (2, 5, 8)).double() / 3.0
    check(wide[:, :, :3], [12, 12], 12)
    check(wide[:, ::2], [12, 12], 12)


def test_ties_of_paths_with_high_ranks_and_masks_of_several_words() -> None:
    # Two children, of sixteen children each, of one child each, all as likely: path (0, 15) stands before path (1, 0).
    log_probs = torch.full((1, 3, 16), -INFINITY, device=DEVICE)
    log_probs[0, 0, :2], log_probs[0, 1], log_probs[0, 2, 0] = 0.0, 0.0, 0.0
    made = check(log_probs, [66], 66)
    assert made.parents[0, 34:].tolist() == list(range(2, 34))


@pytest.mark.parametrize(
    ("depths", "rows", "kept", "max_nodes"), [(1, 1, 1, 1), (3, 2, 2, 9), (7, 16, 8, 31), (16, 3, 3, 40), (5, 16, 16, 33)]
)
def test_tokens_that_depend_on_the_one_before(depths: int, rows: int, kept: int, max_nodes: int) -> None:
    shape = (3, depths, rows, kept)
    candidates = torch.rand(3, depths, rows, rows, generator=torch.Generator().manual_seed(depths)).argsort(-1)[..., :kept]
    for values in (None, [0.0, -0.5, -1.0, -INFINITY]):
        check(
            table_of(depths, shape, values), [max_nodes, 0, max_nodes // 2], max_nodes, candidates=candidates.int().to(DEVICE)
        )


def test_no_requests() -> None:
    check(torch.zeros(0, 3, 2, device=DEVICE), [], 4)


@pytest.mark.skipif(DEVICE != "cuda", reason="slow under the interpreter")
@pytest.mark.parametrize("max_nodes", [255, 256, 300, 1024])
def test_large_budgets(max_nodes: int) -> None:
    check(table_of(7, (3, 15, 8)), [max_nodes, max_nodes - 1, 200], max_nodes)
    check(table_of(7, (3, 16, 16), [0.0, -0.5, -1.0]), [max_nodes, max_nodes - 1, 200], max_nodes)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_nothing_syncs_and_a_graph_replays_with_other_inputs() -> None:
    log_probs, budgets = table_of(8, (4, 15, 8)), torch.full((4,), 32, device=DEVICE)
    ids = torch.arange(480, device=DEVICE, dtype=torch.int32).view(4, 15, 8)
    kernel.tree_build(log_probs, ids, budgets, 32)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel.tree_build(log_probs, ids, budgets, 32)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        trees = kernel.tree_build(log_probs, ids, budgets, 32)
    log_probs.copy_(table_of(9, (4, 15, 8)))
    budgets.copy_(torch.tensor([0, 5, 32, 31]))
    graph.replay()
    for got, want in zip(trees, reference.tree_build(log_probs, ids, budgets, 32), strict=True):
        assert torch.equal(got, want)
