"""walk_tree: what it refuses, and its kernel in a process of its own.

Where walks go, `tests/attach/trees/test_walk.py` shows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from honed.kernels.verify.walk_tree import walk_tree
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases


@needs_triton
def test_the_kernel_equals_its_twin_under_the_interpreter() -> None:
    run_cases("walk_tree", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernel_equals_its_twin_on_a_gpu() -> None:
    run_cases("walk_tree", "cuda")


def arguments() -> list[Any]:
    nodes = torch.zeros(2, 3, dtype=torch.int32)
    return [nodes, nodes - 1, torch.tensor([3, 2]), torch.zeros(2, 4, dtype=torch.int64), 5]


@pytest.mark.parametrize(
    ("index", "wrong", "message"),
    [
        (1, torch.zeros(2, 4), "parents .2, 4."),
        (2, torch.zeros(3), "counts .3."),
        (3, torch.zeros(2, 3), "drawn .2, 3."),
        (4, -1, "max_depth -1"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(index: int, wrong: Any, message: str) -> None:
    given = arguments()
    given[index] = wrong
    with pytest.raises(ValueError, match=message):
        walk_tree(*given)
