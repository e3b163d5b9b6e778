"""The Triton kernel of walk_tree against its plain twin, in a process of its own: see test_walk_tree.py.

HONED_TEST_DEVICE says where: "cpu" (under Triton's interpreter) or "cuda".
"""

from __future__ import annotations

import os

import pytest
import torch

from honed.kernels.verify import reference
from honed.kernels.verify import walk_tree as kernel
from honed.kernels.verify.walk_tree import Walked

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")


def random_trees(num: int, nodes: int, vocab: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Tokens, parents, counts and draws: some draws are no child's token, and some nodes aren't verified."""
    make = torch.Generator().manual_seed(100 * num + nodes)
    tokens = torch.randint(vocab, (num, nodes), generator=make)
    parents = torch.stack([torch.randint(-1, n, (num,), generator=make) for n in range(nodes)], 1) if nodes else tokens
    counts = torch.randint(nodes + 1, (num,), generator=make)
    drawn = torch.randint(vocab, (num, nodes + 1), generator=make)
    return [part.to(DEVICE) for part in (tokens.to(dtype), parents.to(dtype), counts, drawn)]


def check(given: list[torch.Tensor], max_depth: int) -> Walked:
    made = kernel.launch(*given, max_depth)  # type: ignore[call-arg]
    for got, wanted in zip(made, reference.walk_tree(*given, max_depth), strict=True):  # type: ignore[call-arg]
        assert got.dtype == wanted.dtype == torch.int64
        assert torch.equal(got, wanted)
    return made


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num", "nodes", "vocab", "depth"),
    [(1, 0, 1, 0), (1, 0, 1, 3), (1, 1, 1, 1), (4, 2, 2, 2), (9, 15, 3, 15), (8, 31, 2, 7), (3, 63, 2, 0)],
)
def test_odd_shapes(num: int, nodes: int, vocab: int, depth: int, dtype: torch.dtype) -> None:
    check(random_trees(num, nodes, vocab, dtype), depth)


def test_walks_are_of_some_length_and_end_at_the_depth_that_is_asked_for() -> None:
    given = random_trees(16, 31, 2, torch.int32)
    assert check(given, 15)[1].max() > 3
    assert check(given, 3)[1].max() == 3


def test_of_equal_siblings_the_first_counts_and_parents_precede() -> None:
    tokens, drawn = torch.full((2, 3), 5), torch.full((2, 4), 5)
    parents = torch.tensor([[-1, -1, 1], [-1, 2, 0]])
    given = [x.to(DEVICE) for x in (tokens, parents, torch.tensor([3, 3]), drawn)]
    assert check(given, 3)[0].tolist() == [[1, -1, -1], [1, 3, -1]]


def test_inputs_with_strides_and_an_empty_batch() -> None:
    tokens, parents, counts, drawn = random_trees(6, 9, 2, torch.int32)
    wide = torch.stack((tokens, parents), 2)
    wanted = check([tokens, parents, counts, drawn], 5)
    for got, want in zip(check([wide[..., 0], wide[..., 1], counts, drawn], 5), wanted, strict=True):
        assert torch.equal(got, want)
    assert [list(x.shape) for x in check([x[:0] for x in (tokens, parents, counts, drawn)], 5)] == [[0, 5], [0], [0, 6]]


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_nothing_syncs() -> None:
    given = random_trees(16, 31, 2, torch.int32)
    check(given, 15)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel.walk_tree(*given, 15)  # type: ignore[call-arg]
    finally:
        torch.cuda.set_sync_debug_mode("default")
