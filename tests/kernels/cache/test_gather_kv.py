"""gather_kv here, on its twin; the kernel itself in a process of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from honed.kernels.cache import gather_kv as kernel
from honed.kernels.cache.gather_kv import gather_kv, hadamard_unrotation
from honed.kernels.cache.reference import PagedPlane
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases
from tests.kernels.quantised_cache import four_bits, fp8, signed_hadamard


def rows_of(head_size: int) -> torch.Tensor:
    return torch.randn(3, 4, 2, head_size, generator=torch.Generator().manual_seed(head_size))


def gathered(plane: PagedPlane, head_size: int) -> torch.Tensor:
    """All twelve rows of blocks 2, 0, 1 as one request."""
    one = torch.tensor([0]), torch.tensor([0, 12])
    return gather_kv(plane, torch.tensor([[2, 0, 1]]), *one, torch.empty(12, 2, head_size), 12)


def test_rows_come_in_the_order_of_the_sequence() -> None:
    rows = rows_of(5)
    out = torch.zeros(5, 2, 5)
    made = gather_kv(PagedPlane(rows), torch.tensor([[2, 0], [1, 1]]), torch.tensor([2, 1]), torch.tensor([0, 3, 5]), out, 9)
    assert made is out
    assert torch.equal(made, torch.stack((rows[2, 2], rows[2, 3], rows[0, 0], rows[1, 1], rows[1, 2])))


@pytest.mark.parametrize("head_size", [64, 96, 128])
@pytest.mark.parametrize("is_rotated", [False, True])
def test_what_four_bits_stored_comes_back(head_size: int, is_rotated: bool) -> None:
    rows = rows_of(head_size)
    made = gathered(four_bits(rows, signed_hadamard(head_size) if is_rotated else None), head_size)
    wanted = rows[[2, 0, 1]].flatten(0, 1)
    # Rounding to 15 steps of about 5 standard deviations: 5 / 15 / √12 = 0.1 of the values' size.
    assert (made - wanted).square().mean().sqrt() / wanted.square().mean().sqrt() < 0.13


def test_what_fp8_stored_comes_back() -> None:
    rows = rows_of(64)
    torch.testing.assert_close(gathered(fp8(rows, torch.tensor(0.01)), 64), rows[[2, 0, 1]].flatten(0, 1), rtol=0.07, atol=1e-4)


@pytest.mark.parametrize("head_size", [2, 64, 96, 256])
def test_the_hadamard_is_undone(head_size: int) -> None:
    undo = signed_hadamard(head_size).float()
    width = head_size & -head_size
    assert torch.equal(undo @ undo.T * width, torch.eye(head_size))
    assert (undo.abs()[undo != 0] == 1.0 / width).all()


def arguments() -> dict[str, Any]:
    return {
        "plane": PagedPlane(rows_of(6)),
        "block_table": torch.tensor([[2, 0, 1]]),
        "starts": torch.tensor([0]),
        "row_starts": torch.tensor([0, 12]),
        "out": torch.empty(12, 2, 6),
        "max_rows": 12,
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"plane": PagedPlane(rows_of(6).transpose(2, 3))}, "unit stride"),
        ({"out": torch.empty(12, 2, 5)}, "out"),
        ({"out": torch.empty(2, 12, 6).transpose(0, 1)}, "contiguous"),
        ({"starts": torch.zeros(2)}, "block_table"),
        ({"row_starts": torch.zeros(1)}, "row_starts"),
        ({"plane": PagedPlane(rows_of(6), has_hidden_zero=True)}, "hidden zero point"),
        ({"plane": PagedPlane(rows_of(6), zero_point=torch.ones(1))}, "4-bit"),
        ({"plane": PagedPlane(rows_of(6), unrotate=torch.eye(5))}, "unrotate"),
    ],
)
def test_what_does_not_fit_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather_kv(**(arguments() | wrong))


def test_signs_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="takes 32 signs"):
        hadamard_unrotation(96, torch.ones(96))


def test_the_op_is_registered_as_it_should_be() -> None:
    plane = four_bits(rows_of(64), signed_hadamard(64))
    rest = (torch.tensor([[2, 0, 1]]), torch.tensor([0]), torch.tensor([0, 12]), torch.zeros(12, 2, 64), 12)
    torch.library.opcheck(kernel._gather_kv, (plane.data, plane.scale, None, plane.unrotate, True, *rest))


@needs_triton
def test_the_kernel_equals_its_twin_under_the_interpreter() -> None:
    run_cases("gather_kv", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernel_equals_its_twin_on_a_gpu() -> None:
    run_cases("gather_kv", "cuda")
