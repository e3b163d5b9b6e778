"""compact_kv here, on its twin; the kernel itself in a process of its own."""

from __future__ import annotations

import pytest
import torch

from honed.kernels.cache import compact_kv as kernel
from honed.kernels.cache.compact_kv import KvPlanes, compact_kv
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases


def planes() -> list[torch.Tensor]:
    """Two planes of 3 blocks of 4 slots; a row holds its slot's number."""
    slot = torch.arange(12.0).view(3, 4, 1, 1)
    return [slot.expand(3, 4, 2, 5).clone(), (100.0 + slot).expand(3, 4, 2, 5).clone()]


def test_accepted_rows_follow_the_anchor() -> None:
    both = planes()
    slots = torch.tensor([[8, 9, 10, 11, 0, 1], [4, 5, 6, 7, 2, 3]])
    compact_kv(KvPlanes.of(both), slots, torch.tensor([[2, 4, 5], [1, 3, -1]]), torch.tensor([3, 2]))
    for plane, base in zip(both, (0.0, 100.0), strict=True):
        rows = (plane[:, :, 0, 0] - base).view(-1)
        assert rows[[8, 9, 10, 11]].tolist() == [8, 10, 0, 1]
        assert rows[[4, 5, 6]].tolist() == [4, 5, 7]
        assert rows[[0, 1, 2, 3, 7]].tolist() == [0, 1, 2, 3, 7]
        assert (plane == plane[:, :, :1, :1]).all()


def test_the_op_is_registered_as_it_should_be() -> None:
    taken = KvPlanes.of(planes())
    slots, path, accepted = torch.tensor([[8, 9, 10]]), torch.tensor([[2]]), torch.tensor([1])
    arguments = (list(taken.tensors), taken.table, list(taken.pointers), slots, path, accepted)
    torch.library.opcheck(kernel._compact_kv, arguments)


def test_planes_that_are_not_alike_are_refused() -> None:
    first = torch.zeros(3, 4, 2, 5)
    with pytest.raises(ValueError, match="no planes"):
        KvPlanes.of([])
    with pytest.raises(ValueError, match="unit stride"):
        KvPlanes.of([first.transpose(2, 3)])
    for other in (first[:2], first.half(), torch.zeros(3, 2, 4, 5).transpose(1, 2)):
        with pytest.raises(ValueError, match="isn't like plane 0"):
            KvPlanes.of([first, other])


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="don't fit"):
        compact_kv(KvPlanes.of(planes()), torch.zeros(2, 3).long(), torch.zeros(1, 2).long(), torch.zeros(2).long())


@needs_triton
def test_the_kernel_equals_its_twin_under_the_interpreter() -> None:
    run_cases("compact_kv", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernel_equals_its_twin_on_a_gpu() -> None:
    run_cases("compact_kv", "cuda")
