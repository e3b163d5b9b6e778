"""Division of `tree_attention` into programs: from shapes alone, so that a CUDA graph's grid is fixed and nothing syncs.

One program attends `block_m` rows, query heads of one K/V head beside each other, to a part of that head's prefix. With fewer
programs per prefix, fewer partial results are written and read again, at 4 bytes a value against the cache's 2. With more, a
small batch fills the device better. `choose_plan` counts both in tiles of K/V, which take about the same time anywhere, and
takes the cheapest number of splits. The constants are counts of bytes, not measurements. With these stages and warps the sm_90
compiler spills nothing and keeps two tiles of K/V in flight.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LEAST_TILES = 4
"""Minimum tiles of K/V in a split, if its prefix is that long."""
START_TILES = 3
"""Cost of a program before its first tile: its queries, the tree's K/V, filling the pipeline."""
MERGE_TILES = 6
"""Cost of the second launch."""
STAGES = {5: 3, 3: 2, 2: 1}
"""Stages by tiles in shared memory: the page look-up takes a stage of its own, so 4 holds no more than 3."""


class Device(NamedTuple):
    """Properties of a device that bound a plan."""

    num_sms: int = 132
    shared_bytes: int = 232_448
    """Limit for a program; the defaults are an H200's."""


class Plan(NamedTuple):
    """Sizes that the kernels are compiled for, and the grid's."""

    block_m: int
    """Rows × query heads of one K/V head in a program."""
    block_n: int
    """Tokens of the prefix in a tile."""
    num_warps: int
    num_stages: int
    num_splits: int
    """Programs that share a prefix; 1: one launch does everything."""
    merge_block_m: int
    """`block_m` of the launch that merges: few queries a program, since it has only the tree to attend to."""


@functools.lru_cache(maxsize=1024)
def choose_plan(
    num_requests: int,
    num_kv_heads: int,
    group: int,
    max_rows: int,
    head_size: int,
    max_prefix: int,
    q_itemsize: int,
    kv_itemsize: int,
    device: Device,
) -> Plan:
    """Choose a plan for a shape.

    Args:
        group: query heads of a K/V head.
        max_rows: most rows of a request.
        max_prefix: most tokens of a prefix; 0: no prefix is attended to here.
        q_itemsize: bytes of a query's value; 4 is multiplied in three passes, in small tiles.
    """
    is_half = q_itemsize == 2
    block_m = min(max(_power_of_2(max_rows * group), 16), 128 if is_half else 16)
    block_n = max(16, (8192 if is_half else 2048) // head_size)

    def fits(stages: int) -> bool:
        return (block_m * q_itemsize + STAGES[stages] * 2 * block_n * kv_itemsize) * head_size + 1024 <= device.shared_bytes

    while block_m > 16 and not fits(3):
        block_m //= 2
    most_stages = 5 if head_size <= 128 else 3
    num_stages = next((stages for stages in STAGES if stages <= most_stages and fits(stages)), 2) if is_half else 2
    num_warps = 8 if block_m == 128 or (head_size == 256 and block_m > 16) else 4
    num_tiles = _ceil(max_rows * group, block_m) * num_kv_heads * num_requests
    slots = device.num_sms * (1 if num_warps == 8 else 2)
    pages = _ceil(max_prefix, block_n)
    part = 4 * block_m / (block_n * kv_itemsize)  # tiles of K/V that cost as much as a partial result, written and read

    def cost(splits: int) -> float:
        length = max(_ceil(pages, splits), LEAST_TILES)
        waves = _ceil(num_tiles * splits, slots)
        return waves * (length + START_TILES + (part if splits > 1 else 0)) + (MERGE_TILES if splits > 1 else 0)

    most = max(1, pages // LEAST_TILES)
    num_splits = min((splits for splits in SPLITS if splits <= most), key=cost)
    merge_block_m = 64 if is_half and head_size <= 128 else 16
    while merge_block_m > 16 and _ceil(max_rows * group, merge_block_m) * num_kv_heads * num_requests < 2 * device.num_sms:
        merge_block_m //= 2
    return Plan(block_m, block_n, num_warps, num_stages, num_splits, merge_block_m)


def different_plans(
    most_requests: int,
    num_kv_heads: int,
    group: int,
    most_rows: int,
    head_size: int,
    max_prefix: int,
    q_itemsize: int,
    kv_itemsize: int,
    device: Device,
) -> list[Plan]:
    """Plans for 1 … `most_requests` requests of 2 … `most_rows` rows, one for each choice of kernels."""
    found: dict[Plan, Plan] = {}
    for num_requests in range(1, most_requests + 1):
        for max_rows in range(2, most_rows + 1):
            shape = num_requests, num_kv_heads, group, max_rows, head_size, max_prefix, q_itemsize, kv_itemsize
            plan = choose_plan(*shape, device)
            is_split = plan.num_splits > 1
            found.setdefault(plan._replace(num_splits=1 + is_split, merge_block_m=plan.merge_block_m * is_split), plan)
    return list(found.values())


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
