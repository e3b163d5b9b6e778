"""The Triton kernel against its plain twin, in a process of its own: see test_context_features.py.

HONED_TEST_DEVICE says where: "cpu" (under Triton's interpreter) or "cuda".
"""

from __future__ import annotations

import os

import pytest
import torch

from honed.kernels.capture import context_features as kernel
from honed.kernels.capture import reference

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")
EPS = 1e-6
TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Relative; of the half-precision types one unit in the last place, since the twins may round a sum differently."""


def states_of(num_rows: int, hidden: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_rows * 1000 + hidden)
    return (3.0 * torch.randn(num_rows, hidden, generator=generator)).to(DEVICE, dtype)


def weight_of(hidden: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hidden)
    return (1.0 + 0.5 * torch.randn(hidden, generator=generator)).to(DEVICE, dtype)


def rows_of(num: int, num_rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num)
    return torch.randint(num_rows, (num,), generator=generator).to(DEVICE)


def check(states: torch.Tensor, rows: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Launch the kernel itself, compare with the twin, return what the kernel made."""
    made = kernel.launch(states, rows, weight, EPS, dtype)
    wanted = reference.context_features(states, rows, weight, EPS, dtype)
    assert (made.dtype, made.shape, made.is_contiguous()) == (dtype, wanted.shape, True)
    torch.testing.assert_close(made, wanted, rtol=TOLERANCE[dtype], atol=1e-6, equal_nan=True)
    return made


@pytest.mark.parametrize("hidden", [1, 2, 7, 64, 257, 1024])
@pytest.mark.parametrize(("num", "num_rows"), [(0, 1), (1, 1), (1, 9), (5, 1), (5, 9)])
def test_odd_shapes(hidden: int, num: int, num_rows: int) -> None:
    check(states_of(num_rows, hidden), rows_of(num, num_rows), weight_of(hidden))


@pytest.mark.parametrize("dtype_out", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype_in", [torch.float32, torch.float16, torch.bfloat16])
def test_types(dtype_in: torch.dtype, dtype_out: torch.dtype) -> None:
    check(states_of(9, 257, dtype_in), rows_of(5, 9), weight_of(257, dtype_in), dtype_out)


def test_the_widest_row() -> None:
    check(states_of(2, kernel.MAX_HIDDEN), rows_of(1, 2), weight_of(kernel.MAX_HIDDEN))


def test_no_rows_of_no_batch_and_rows_without_width() -> None:
    none = torch.empty(0, dtype=torch.int64, device=DEVICE)
    check(torch.empty(0, 7, device=DEVICE), none, weight_of(7))
    check(torch.empty(3, 0, device=DEVICE), rows_of(2, 3), torch.empty(0, device=DEVICE))


def test_states_that_are_part_of_a_wider_tensor() -> None:
    wide = states_of(18, 300)
    check(wide[::2, 10:267], rows_of(5, 9), weight_of(257))


def test_rows_and_weights_with_strides() -> None:
    # The kernel reads both as if they had none: it took rows 0, 1, 2 of every other row's index.
    indices = torch.tensor([8, 0, 1, 0, 3, 0], device=DEVICE)[::2]
    check(states_of(9, 64), indices, weight_of(128)[::2])


def test_narrow_row_numbers() -> None:
    check(states_of(9, 64), rows_of(5, 9).to(torch.int32), weight_of(64))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(bad: float) -> None:
    states = states_of(5, 64)
    states[2, 17] = bad
    made = check(states, torch.tensor([0, 2, 1, 4], device=DEVICE), weight_of(64))
    assert made[[0, 2, 3]].isfinite().all()
    assert not made[1].isfinite().all()


def test_rows_of_zeros_stay_zeros() -> None:
    assert not check(torch.zeros(2, 64, device=DEVICE), rows_of(3, 2), weight_of(64)).any()


def test_small_half_precision_states_keep_their_scale() -> None:
    # Squares of 1e-5 are 0 in float16: the mean has to be taken in float32.
    states = (1e-5 * states_of(4, 64)).to(torch.float16)
    assert check(states, rows_of(3, 4), weight_of(64)).abs().max() > 1e-3


@pytest.mark.skipif(DEVICE != "cuda", reason="the public function takes the twin on a CPU")
def test_on_a_gpu_the_public_function_is_the_kernel() -> None:
    states, rows, weight = states_of(9, 257), rows_of(5, 9), weight_of(257)
    made = kernel.context_features(states, rows, weight, EPS, torch.bfloat16)
    assert torch.equal(made, kernel.launch(states, rows, weight, EPS, torch.bfloat16))
    by_column = states_of(257, 9).T  # no unit stride: the twin
    torch.testing.assert_close(
        kernel.context_features(by_column, rows, weight, EPS), reference.context_features(by_column, rows, weight, EPS)
    )
