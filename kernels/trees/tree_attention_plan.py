"""Division of `tree_attention` into programs: from shapes alone, so that a CUDA graph's grid is fixed and nothing syncs.

One program attends `block_m` rows, query heads of one K/V head beside each other, to a part of that head's prefix. With fewer
programs per prefix, fewer partial results are written and read again, at 4 bytes a value against the cache's 2. With more, a
small batch fills the device better. `choose_plan` counts both in tiles of K/V, which take about the same time anywhere, and
takes the cheapest number of splits. The constants are counts of bytes, not measurements. With these stages and warps the sm_90
compiler spills nothing and keeps two tiles of K/V in flight.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

SPLITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LEAST_TILES = 4
"""Minimum tiles of K/V in a split, if its prefix is that long."""
START_TILES = 3
"""Cost of a program before its first tile: its queries, the tree's K/V, filling the pipeline."""
MERGE_TILES = 6
"""Cost of the second launch."""
MERGE_BLOCKS = (64, 32)
"""Choices of `merge_block_m` above the least, 16."""
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
    tiles = _choose_tiles(max_rows * group, head_size, q_itemsize, kv_itemsize, device)
    num_tiles = _ceil(max_rows * group, tiles.block_m) * num_kv_heads * num_requests
    pages = _ceil(max_prefix, tiles.block_n)

    def cost(splits: int) -> float:
        length = max(_ceil(pages, splits), LEAST_TILES)
        waves = _ceil(num_tiles * splits, tiles.slots)
        return waves * (length + START_TILES + (tiles.part if splits > 1 else 0)) + (MERGE_TILES if splits > 1 else 0)

    most = max(1, pages // LEAST_TILES)
    num_splits = min((splits for splits in SPLITS if splits <= most), key=cost)
    merge_block_m = MERGE_BLOCKS[0] if q_itemsize == 2 and head_size <= 128 else 16
    while merge_block_m > 16 and num_requests < _requests_for(merge_block_m, max_rows * group, num_kv_heads, device):
        merge_block_m //= 2
    return Plan(tiles.block_m, tiles.block_n, tiles.num_warps, tiles.num_stages, num_splits, merge_block_m)


class _Tiles(NamedTuple):
    """The part of a plan that doesn't depend on the number of requests, nor on their prefixes."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    slots: int
    """Programs that the device runs at once."""
    part: float
    """Tiles of K/V that cost as much as a partial result, written and read."""


def _choose_tiles(num_queries: int, head_size: int, q_itemsize: int, kv_itemsize: int, device: Device) -> _Tiles:
    is_half = q_itemsize == 2
    block_m = min(max(_power_of_2(num_queries), 16), 128 if is_half else 16)
    block_n = max(16, (8192 if is_half else 2048) // head_size)

    def fits(stages: int) -> bool:
        return (block_m * q_itemsize + STAGES[stages] * 2 * block_n * kv_itemsize) * head_size + 1024 <= device.shared_bytes

    while block_m > 16 and not fits(3):
        block_m //= 2
    most_stages = 5 if head_size <= 128 else 3
    num_stages = next((stages for stages in STAGES if stages <= most_stages and fits(stages)), 2) if is_half else 2
    num_warps = 8 if block_m == 128 or (head_size == 256 and block_m > 16) else 4
    slots = device.num_sms * (1 if num_warps == 8 else 2)
    return _Tiles(block_m, block_n, num_warps, num_stages, slots, 4 * block_m / (block_n * kv_itemsize))


def _requests_for(merge_block_m: int, num_queries: int, num_kv_heads: int, device: Device) -> int:
    """Fewest requests whose merge fills the device twice."""
    return _ceil(2 * device.num_sms, _ceil(num_queries, merge_block_m) * num_kv_heads)


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
    """Plans for 1 … `most_requests` requests of 2 … `most_rows` rows, one for each choice of kernels.

    Most counts of requests needn't be tried. Between two counts at which `merge_block_m` or the waves of an unsplit launch
    change, only the splits' costs change, and they rise: either all of these counts are split, or none, or those up to one of
    them. So the first and the last tell.
    """
    found: dict[Plan, Plan] = {}

    def is_split(num_requests: int, max_rows: int) -> bool:
        shape = num_requests, num_kv_heads, group, max_rows, head_size, max_prefix, q_itemsize, kv_itemsize
        plan = choose_plan(*shape, device)
        is_split = plan.num_splits > 1
        found.setdefault(plan._replace(num_splits=1 + is_split, merge_block_m=plan.merge_block_m * is_split), plan)
        return is_split

    for max_rows in range(2, most_rows + 1):
        num_queries = max_rows * group
        tiles = _choose_tiles(num_queries, head_size, q_itemsize, kv_itemsize, device)
        per_request, pages = _ceil(num_queries, tiles.block_m) * num_kv_heads, _ceil(max_prefix, tiles.block_n)
        # Splits save the last wave at best, which takes `pages` tiles. Each wave before it costs at least so many more.
        most_waves = 1 + pages / (START_TILES + 2 * tiles.part)
        turns = {_requests_for(block, num_queries, num_kv_heads, device) for block in MERGE_BLOCKS}
        for first, end in itertools.pairwise([1, *sorted(n for n in turns if 1 < n <= most_requests), most_requests + 1]):
            starts = [first]
            while (start := _ceil(starts[-1] * per_request, tiles.slots) * tiles.slots // per_request + 1) < end:
                starts.append(start)
            for num_requests in starts:
                if is_split(num_requests, max_rows) or _ceil(num_requests * per_request, tiles.slots) >= most_waves:
                    break
            for num_requests in reversed([*(start - 1 for start in starts[1:]), end - 1]):
                if not is_split(num_requests, max_rows):
                    break
    return list(found.values())


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
