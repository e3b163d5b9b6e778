"""The Triton kernels against their plain twins, in a process of its own: see recurrent/test_tree_delta_rule.py.

HONED_TEST_DEVICE says where: "cpu" (under Triton's interpreter) or "cuda".
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from honed.kernels.recurrent import reference, tree_conv
from honed.kernels.recurrent import tree_delta_rule as kernel
from honed.kernels.trees.tree_build import tree_build

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}


class Batch:
    """Random inputs of trees; states that no request has are NaN."""

    def __init__(self, budgets: list[int], heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype) -> None:
        self.generator = torch.Generator().manual_seed(sum(budgets))
        (num_keys, num), (key_width, width), count = heads, widths, len(budgets)
        log_probs = -self.randn(count, 6, 4).abs().cumsum(-1)
        self.trees = tree_build(log_probs, torch.zeros(count, 6, 4).int(), torch.tensor(budgets).to(DEVICE), max(budgets))
        sizes = [nodes + 1 for nodes in self.trees.num_nodes.tolist()]
        rows, self.max_rows = sum(sizes), max(sizes)
        self.starts = torch.tensor([0, *itertools.accumulate(sizes)], dtype=torch.int32, device=DEVICE)
        self.q, self.k = (self.randn(rows, num_keys, key_width).to(dtype) for _ in range(2))
        self.v = self.randn(rows, num, width).to(dtype)
        self.gates = -self.randn(rows, num).abs(), self.randn(rows, num).sigmoid()
        self.states = torch.full((2 * count + 1, num, width, key_width), float("nan"), dtype=dtype, device=DEVICE)
        self.root = 2 * torch.randperm(count, generator=self.generator).to(DEVICE)
        self.states[self.root] = self.randn(count, num, width, key_width).to(dtype)
        leaf = torch.tensor([int(torch.randint(0, size, (1,), generator=self.generator)) for size in sizes])
        self.accepted, self.path = torch.zeros(count, dtype=torch.int64), torch.full((count, 6), -1)
        for b, row in enumerate(leaf.tolist()):
            nodes = list[int]()
            while row:
                nodes.insert(0, row)
                row = int(self.trees.parents[b, row - 1]) + 1
            self.accepted[b] = len(nodes)
            self.path[b, : len(nodes)] = torch.tensor(nodes)
        self.accepted, self.path = self.accepted.to(DEVICE), self.path.to(DEVICE)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE)

    def args(self) -> tuple[torch.Tensor, ...]:
        return self.q, self.k, self.v, *self.gates, self.states, self.root, self.starts, self.trees.row_masks


@pytest.mark.parametrize(
    ("budgets", "heads", "widths", "dtype"),
    [
        ([5, 9], (1, 1), (16, 16), torch.float32),
        ([15, 0, 31], (2, 4), (16, 32), torch.float32),
        ([40], (1, 2), (32, 16), torch.bfloat16),
        ([63, 3], (1, 1), (16, 64), torch.float32),
    ],
)
def test_outputs_updates_and_states(
    budgets: list[int], heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype
) -> None:
    batch = Batch(budgets, heads, widths, dtype)
    wanted, wanted_updates = reference.tree_delta_rule(*batch.args(), max_rows=batch.max_rows)
    out, updates = kernel.launch(*batch.args(), max_rows=batch.max_rows)
    torch.testing.assert_close(out, wanted, **TOLERANCE)
    for found, expected in zip(updates, wanted_updates, strict=True):
        torch.testing.assert_close(found, expected, **TOLERANCE)
    target = torch.where(batch.accepted > 0, batch.root + 1, batch.root)
    states = batch.states.clone()
    reference.commit(states, batch.root, target, wanted_updates, batch.starts, batch.path, batch.accepted)
    kernel.launch_commit(batch.states, batch.root, target, updates, batch.starts, batch.path, batch.accepted)
    torch.testing.assert_close(batch.states, states, equal_nan=True, **(TOLERANCE if dtype == torch.float32 else {}))
    assert (batch.accepted > 0).any(), "no node was accepted: this shows nothing"


def test_states_of_any_strides() -> None:
    batch = Batch([12, 7], (1, 2), (16, 16), torch.float32)
    wanted, _ = reference.tree_delta_rule(*batch.args(), max_rows=batch.max_rows)
    batch.states = batch.states.mT.contiguous().mT
    out, updates = kernel.launch(*batch.args(), max_rows=batch.max_rows)
    torch.testing.assert_close(out, wanted, **TOLERANCE)
    states, target = batch.states.clone(), batch.root + 1
    reference.commit(states, batch.root, target, updates, batch.starts, batch.path, batch.accepted)
    kernel.launch_commit(batch.states, batch.root, target, updates, batch.starts, batch.path, batch.accepted)
    torch.testing.assert_close(batch.states, states, equal_nan=True, **TOLERANCE)


@pytest.mark.parametrize(("channels", "taps", "has_bias"), [(40, 4, False), (1030, 3, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_convolution(channels: int, taps: int, has_bias: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(channels)
    shapes = ((9, channels), (channels, taps), (channels,))
    inputs, weight, bias = (torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes)
    at = torch.randint(0, 9, (5, taps), generator=generator).to(DEVICE)
    wanted = torch.nn.functional.silu(reference.tree_conv(inputs, at, weight, bias if has_bias else None)).to(dtype)
    torch.testing.assert_close(tree_conv.launch(inputs, at, weight, bias if has_bias else None), wanted)
