"""The Triton kernel of compact_kv against its plain twin, in a process of its own: see interpreting.py.

HONED_TEST_DEVICE says where: "cpu" (under Triton's interpreter) or "cuda".
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from honed.kernels.cache import compact_kv as kernel
from honed.kernels.cache import reference
from honed.kernels.cache.compact_kv import KvPlanes

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")
ON_GPU = DEVICE == "cuda"
BLOCKS, BLOCK_SIZE = 12, 4


def plane_of(heads: int, width: int, dtype: torch.dtype, number: int, layout: str = "NHD") -> torch.Tensor:
    """Random bits as [blocks, block size, heads, width], NaNs and all."""
    make = torch.Generator().manual_seed(number)
    rows = (BLOCKS, BLOCK_SIZE, heads) if layout == "NHD" else (BLOCKS, heads, BLOCK_SIZE)
    data = torch.randint(256, (*rows, width * dtype.itemsize), generator=make, dtype=torch.uint8).to(DEVICE).view(dtype)
    return data if layout == "NHD" else data.transpose(1, 2)


def slots_of(num: int, nodes: int) -> torch.Tensor:
    """Slots that no two nodes share, in blocks that aren't in order."""
    order = torch.randperm(BLOCKS * BLOCK_SIZE, generator=torch.Generator().manual_seed(num + nodes))
    return order[: num * nodes].view(num, nodes).to(DEVICE)


def paths_of(paths: list[list[int]], longest: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.tensor([path + [-1] * (longest - len(path)) for path in paths], dtype=torch.int32).view(len(paths), longest)
    return rows.to(DEVICE), torch.tensor([len(path) for path in paths], dtype=torch.int32, device=DEVICE)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def check(planes: list[torch.Tensor], slots: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, group: int = 8) -> None:
    wanted = [plane.clone(memory_format=torch.preserve_format) for plane in planes]
    reference.compact_kv(wanted, slots, path, accepted)
    taken = KvPlanes.of(planes)
    kernel.launch(planes, taken.table, taken.pointers, slots, path, accepted, group)
    for plane, other in zip(planes, wanted, strict=True):
        assert torch.equal(bits(plane), bits(other))


PATHS = [[1, 2, 3], [2, 5], [], [3, 4, 5, 6]]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(
    ("heads", "width", "dtype"),
    [
        (2, 64, torch.bfloat16),
        (3, 8, torch.float16),
        (1, 1, torch.uint8),
        (2, 5, torch.uint8),
        (2, 3, torch.bfloat16),
        (2, 16, torch.float8_e4m3fn),
        (5, 72, torch.float32),
        (1, 1, torch.float32),
        (2, 3, torch.float64),
        (8, 300, torch.float32),
    ],
)
def test_types_layouts_and_odd_widths(heads: int, width: int, dtype: torch.dtype, layout: str) -> None:
    planes = [plane_of(heads, width, dtype, number, layout) for number in range(3)]
    check(planes, slots_of(4, 7), *paths_of(PATHS, 6))


@pytest.mark.parametrize("group", [1, 2, 8])
def test_every_rising_path_in_place_as_out_of_place(group: int) -> None:
    # All 63 paths of up to 6 of 6 nodes; each request's rows overlap their targets in some way of their own.
    paths = [list(path) for length in range(1, 7) for path in itertools.combinations(range(1, 7), length)]
    make = torch.Generator().manual_seed(5)
    plane = torch.randn(len(paths) * 7, 1, 1, 2, generator=make).to(DEVICE)
    slots = torch.arange(len(paths) * 7, device=DEVICE).view(len(paths), 7)
    check([plane], slots, *paths_of(paths, 6), group)


def test_a_path_longer_than_a_group_that_moves_by_one() -> None:
    check([plane_of(2, 8, torch.float32, 1)], slots_of(1, 40), *paths_of([list(range(2, 39))], 37))


def test_rows_that_are_part_of_something_wider_leave_it_alone() -> None:
    whole = torch.arange(BLOCKS * BLOCK_SIZE * 2 * 40, dtype=torch.int16, device=DEVICE).view(BLOCKS, BLOCK_SIZE, 2, 40)
    before = whole.clone()
    check([whole[..., 8:24]], slots_of(4, 7), *paths_of(PATHS, 6))
    assert torch.equal(whole[..., :8], before[..., :8])
    assert torch.equal(whole[..., 24:], before[..., 24:])


def test_keys_and_values_that_lie_beside_each_other() -> None:
    both = torch.randn(BLOCKS, BLOCK_SIZE, 2, 32, device=DEVICE)
    check([both[..., :16], both[..., 16:]], slots_of(4, 7), *paths_of(PATHS, 6))


def test_nothing_to_move() -> None:
    plane = plane_of(2, 8, torch.float32, 1)
    check([plane], slots_of(4, 7), *paths_of([[]] * 4, 6))
    check([plane], slots_of(4, 7), *paths_of([[1, 2, 3]] * 4, 6))
    check([plane], slots_of(4, 7), *paths_of([[]] * 4, 0))
    check([plane], slots_of(0, 7), *paths_of([], 6))


def test_nodes_without_a_slot_or_that_are_none_are_passed_over() -> None:
    slots = slots_of(4, 7)
    slots[1, 5] = slots[3, 1] = -1
    path, accepted = paths_of(PATHS, 6)
    path[0, 2] = 99
    check([plane_of(2, 8, torch.float32, 1)], slots, path, accepted)


def test_a_count_beyond_the_path_is_cut() -> None:
    path, accepted = paths_of(PATHS, 4)
    check([plane_of(2, 8, torch.float32, 1)], slots_of(4, 7), path, accepted + 9)


def test_a_plane_that_has_moved_is_refused() -> None:
    planes = [plane_of(2, 8, torch.float32, 1)]
    taken = KvPlanes.of(planes)
    with pytest.raises(ValueError, match="moved in memory"):
        kernel.launch([planes[0].clone()], taken.table, taken.pointers, slots_of(4, 7), *paths_of(PATHS, 6))


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_in_a_cuda_graph() -> None:
    planes = KvPlanes.of([plane_of(8, 128, torch.bfloat16, number) for number in range(64)])
    slots, (path, accepted) = slots_of(4, 7), paths_of(PATHS, 6)
    before = [plane.clone() for plane in planes.tensors]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.compact_kv(planes, slots, path, accepted)
    reference.compact_kv(before, slots, path, accepted)
    graph.replay()
    assert all(torch.equal(bits(plane), bits(other)) for plane, other in zip(planes.tensors, before, strict=True))
