"""The public function here; the kernel itself in a process of its own, under Triton's interpreter and on a GPU."""

from __future__ import annotations

import pytest
import torch

from honed.kernels.capture import context_features as kernel
from honed.kernels.capture import reference
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases


@needs_triton
def test_the_kernel_equals_its_twin_under_the_interpreter() -> None:
    run_cases("context_features", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernel_equals_its_twin_on_a_gpu() -> None:
    run_cases("context_features", "cuda")


def test_without_a_gpu_the_twin_runs() -> None:
    states, rows, weight = torch.randn(9, 7), torch.tensor([8, 0, 0]), torch.randn(7)
    made = kernel.context_features(states, rows, weight, 1e-6, torch.bfloat16)
    assert torch.equal(made, reference.context_features(states, rows, weight, 1e-6, torch.bfloat16))


def test_the_twin_is_the_formula() -> None:
    states = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    made = kernel.context_features(states, torch.tensor([1]), torch.tensor([1.0, 10.0]), 0.5)
    rms = ((9.0 + 16.0) / 2 + 0.5) ** 0.5
    torch.testing.assert_close(made, torch.tensor([[3.0 / rms, 40.0 / rms]]))


@pytest.mark.parametrize(
    ("states", "rows", "weight"),
    [((9,), (3,), (9,)), ((9, 7), (3,), (8,)), ((9, 7), (3,), (1, 7)), ((9, 7), (3, 1), (7,)), ((2, 9, 7), (3,), (7,))],
)
def test_shapes_that_do_not_fit_are_refused(states: tuple[int, ...], rows: tuple[int, ...], weight: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="don't fit"):
        kernel.context_features(torch.zeros(states), torch.zeros(rows, dtype=torch.int64), torch.ones(weight), 1e-6)
