"""The Triton kernels against their plain twin, in a process of its own: see test_tree_attention.py.

HONED_TEST_DEVICE says where: "cpu" (under Triton's interpreter) or "cuda".
"""

from __future__ import annotations

import itertools
import os

import pytest
import torch

from honed.kernels.trees import reference
from honed.kernels.trees import tree_attention as kernel
from honed.kernels.trees.reference import AttendedPrefix, PagedPrefix
from honed.kernels.trees.tree_attention_plan import Plan

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")
TOLERANCE = {torch.float32: 4e-6 if DEVICE == "cpu" else 1e-4, torch.float16: 3e-3, torch.bfloat16: 2e-2}
ONE_LAUNCH = Plan(block_m=16, block_n=16, num_warps=4, num_stages=2, num_splits=1, merge_block_m=16)
SPLIT = Plan(block_m=32, block_n=16, num_warps=4, num_stages=2, num_splits=3, merge_block_m=16)
SPARE_ROWS = 2
"""Rows past the last request's, as a padded batch has them."""


class Batch:
    """Random trees and prefixes; whatever may not be looked at is NaN."""

    def __init__(
        self,
        rows: list[int],
        lengths: list[int],
        heads: tuple[int, int] = (4, 2),
        head_size: int = 16,
        page: int = 16,
        dtype: torch.dtype = torch.float32,
        cache_dtype: torch.dtype | None = None,
    ) -> None:
        self.generator = torch.Generator().manual_seed(sum(rows) + sum(lengths))
        (num_heads, num_kv_heads), num = heads, sum(rows) + SPARE_ROWS
        self.num_rows, self.max_rows = sum(rows), max(*rows, 1)
        self.q = self.randn(num, num_heads, head_size).to(dtype)
        self.k, self.v = self.randn(num, num_kv_heads, head_size).to(dtype), self.randn(num, num_kv_heads, head_size).to(dtype)
        for part in (self.q, self.k, self.v):
            part[self.num_rows :] = float("nan")
        self.starts = torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32, device=DEVICE)
        bits = self.randn(len(rows), self.max_rows, (self.max_rows // 32 + 1) * 32) > 0.3
        bits[0, 0] = False  # a row that attends to no row
        self.masks = reference.pack_bits(bits)
        self.paged = self.prefix(lengths, num_kv_heads, head_size, page, dtype, cache_dtype)
        self.room = self.paged.block_table.shape[1] * page

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(DEVICE)

    def prefix(
        self,
        lengths: list[int],
        num_kv_heads: int,
        head_size: int,
        page: int,
        dtype: torch.dtype,
        cache_dtype: torch.dtype | None,
    ) -> PagedPrefix:
        most = max(1, -(-max(lengths) // page))
        num_pages = most * len(lengths) + 1
        cache = 0.5 * self.randn(num_pages, 2, page, num_kv_heads, head_size)  # as vLLM lays it out: K and V side by side
        order = torch.randperm(num_pages, generator=self.generator)[: most * len(lengths)]
        table = order.view(len(lengths), most).int()
        is_held = torch.zeros(num_pages, page, dtype=torch.bool)
        for request, length in enumerate(lengths):
            for i in range(most):
                is_held[table[request, i], : max(0, length - i * page)] = True
            table[request, -(-length // page) :] = 2**30
        cache.transpose(1, 2)[~is_held.to(DEVICE)] = float("nan")
        scales = (torch.tensor(0.5, device=DEVICE), torch.tensor([2.0], device=DEVICE)) if cache_dtype else (None, None)
        cache = cache.to(cache_dtype or dtype)
        held = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        return PagedPrefix(cache[:, 0], cache[:, 1], table.to(DEVICE), held, *scales)

    def windowed(self, window: int) -> PagedPrefix:
        """The same prefix for rows at random depths below 9, whose window holds so many tokens, their own among them."""
        lengths, firsts = self.paged.lengths.tolist(), []
        table, k_cache, v_cache = self.paged.block_table.clone(), self.paged.k_cache.clone(), self.paged.v_cache.clone()
        page = k_cache.shape[1]
        for request, (start, end) in enumerate(itertools.pairwise(self.starts.tolist())):
            depths = [0, *torch.randint(1, 9, (max(end - start - 1, 0),), generator=self.generator).tolist()][: end - start]
            first = max(lengths[request] - window + 1, 0)
            firsts += [max(lengths[request] + depth - window + 1, 0) for depth in depths]
            for gone in range(min(first, lengths[request])):  # blocks before a window are given away
                k_cache[table[request, gone // page], gone % page] = float("nan")
                v_cache[table[request, gone // page], gone % page] = float("nan")
        firsts += [0] * SPARE_ROWS
        held = torch.tensor(firsts, dtype=torch.int32, device=DEVICE)
        return self.paged._replace(k_cache=k_cache, v_cache=v_cache, firsts=held)

    def check(self, prefix: PagedPrefix | AttendedPrefix | None, plan: Plan | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch the kernels themselves, compare with the twin, return what they made."""
        given = (self.q, self.k, self.v, self.starts, self.masks, self.max_rows, 0.3, prefix)
        wanted, wanted_lse = reference.tree_attention(*given)
        out, lse = torch.full_like(self.q, 7.0), torch.full(self.q.shape[:2], 7.0, device=DEVICE)
        kernel.launch(*given, self.room, out, lse, plan)
        num, tolerance = self.num_rows, TOLERANCE[self.q.dtype]
        assert wanted[:num].isfinite().all()
        torch.testing.assert_close(out[:num], wanted[:num], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(lse[:num], wanted_lse[:num], rtol=tolerance, atol=tolerance)
        assert (out[num:] == 7.0).all()
        assert (lse[num:] == 7.0).all()
        return out, lse


@pytest.mark.parametrize("plan", [ONE_LAUNCH, SPLIT], ids=["one launch", "split"])
@pytest.mark.parametrize(
    ("heads", "head_size", "page"), [((4, 2), 16, 16), ((6, 2), 32, 5), ((3, 3), 16, 64), ((8, 1), 64, 16)]
)
def test_odd_shapes_idle_requests_and_prefixes_of_no_token(
    heads: tuple[int, int], head_size: int, page: int, plan: Plan
) -> None:
    batch = Batch([3, 0, 5, 2, 1], [0, 9, 200, 64, 129], heads, head_size, page)
    out, lse = batch.check(batch.paged, plan)
    assert not out[0].any()  # neither a prefix nor an ancestor
    assert (lse[0] == float("-inf")).all()


@pytest.mark.parametrize("plan", [ONE_LAUNCH, SPLIT], ids=["one launch", "split"])
@pytest.mark.parametrize(("window", "page"), [(3, 16), (20, 5), (20, 16), (100, 64), (1000, 16)])
def test_sliding_windows(window: int, page: int, plan: Plan) -> None:
    batch = Batch([3, 0, 20, 2, 1], [0, 9, 200, 64, 129], page=page)
    out, _ = batch.check(batch.windowed(window), plan)
    whole, _ = batch.check(batch.paged, plan)
    assert torch.equal(out[: batch.num_rows], whole[: batch.num_rows]) == (window > 200 + 9)


@pytest.mark.parametrize("plan", [ONE_LAUNCH, SPLIT], ids=["one launch", "split"])
def test_trees_of_several_mask_words_and_tiles(plan: Plan) -> None:
    batch = Batch([40, 70, 0], [20, 0, 50], (2, 1))
    batch.check(batch.paged, plan)


@pytest.mark.parametrize("plan", [ONE_LAUNCH, SPLIT], ids=["one launch", "split"])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float16, None),
        (torch.bfloat16, None),
        (torch.bfloat16, torch.float8_e4m3fn),
        (torch.float16, torch.float8_e4m3fn),
    ],
)
def test_types(dtype: torch.dtype, cache_dtype: torch.dtype | None, plan: Plan) -> None:
    batch = Batch([3, 2], [0, 140], (4, 1), 64, 16, dtype, cache_dtype)
    batch.check(batch.paged, plan)


def test_the_widest_head() -> None:
    batch = Batch([2, 1], [17, 3], (2, 1), 256)
    batch.check(batch.paged, ONE_LAUNCH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_after_another_kernels_pass_and_without_a_prefix(dtype: torch.dtype) -> None:
    batch = Batch([3, 0, 40], [0, 0, 0], dtype=dtype)
    batch.check(None, ONE_LAUNCH)
    lse = batch.randn(4, len(batch.q)).T  # heads first, as flash-attn gives it
    out = batch.randn(*batch.q.shape).to(dtype)
    lse[1], out[1] = float("-inf"), float("nan")  # an empty prefix leaves anything
    batch.check(AttendedPrefix(out, lse), ONE_LAUNCH)


def test_tensors_that_are_parts_of_wider_ones() -> None:
    batch = Batch([3, 4], [5, 40])
    wide = torch.cat([batch.q, batch.k, batch.v], 1)  # one projection for all three
    batch.q, batch.k, batch.v = wide[:, :4], wide[:, 4:6], wide[:, 6:]
    batch.masks = torch.cat([batch.masks, batch.masks], 1)[:, :, :]
    batch.check(batch.paged, ONE_LAUNCH)


@pytest.mark.parametrize("plan", [ONE_LAUNCH, SPLIT], ids=["one launch", "split"])
def test_an_output_that_is_part_of_a_wider_one(plan: Plan) -> None:
    """Rows within a step's padded ones, as a layer of an engine has them: nothing beside them is written."""
    batch = Batch([3, 4], [5, 140])
    wanted, _ = batch.check(batch.paged, plan)
    wide = torch.full((len(batch.q) + 5, 6, 16), 7.0, device=DEVICE)
    out, lse = wide[3 : 3 + len(batch.q), 1:5], torch.empty(batch.q.shape[:2], device=DEVICE)
    given = (batch.q, batch.k, batch.v, batch.starts, batch.masks, batch.max_rows, 0.3, batch.paged, batch.room)
    kernel.launch(*given, out, lse, plan)
    assert torch.equal(out[: batch.num_rows], wanted[: batch.num_rows])
    out[: batch.num_rows] = 7.0
    assert (wide == 7.0).all()


def test_large_scores_do_not_overflow() -> None:
    batch = Batch([3, 4], [5, 70])
    batch.q *= 1e4
    batch.check(batch.paged, SPLIT)


@pytest.mark.skipif(DEVICE != "cuda", reason="slow under the interpreter")
@pytest.mark.parametrize("cache_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("head_size", [64, 128, 256])
@pytest.mark.parametrize("rows", [[33] * 8, [257, 0, 1, 16]])
def test_plans_as_they_are_chosen(rows: list[int], head_size: int, cache_dtype: torch.dtype | None) -> None:
    for lengths in ([4096, 0, 17, 1000, 5, 64, 999, 2048], [300] * 8):
        batch = Batch(rows, lengths[: len(rows)], (32, 8), head_size, 16, torch.bfloat16, cache_dtype)
        batch.check(batch.paged, None)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_nothing_syncs_and_a_graph_replays_with_other_inputs() -> None:
    batch = Batch([16, 3, 0, 16], [400, 0, 20, 1024], (8, 2), 128, 16, torch.bfloat16)
    given = (batch.q, batch.k, batch.v, batch.starts, batch.masks, 16)
    out, lse = kernel.tree_attention(*given, prefix=batch.paged)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernel.tree_attention(*given, prefix=batch.paged, out=out, lse=lse)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.tree_attention(*given, prefix=batch.paged, out=out, lse=lse)
    batch.paged.lengths.copy_(torch.tensor([12, 0, 20, 1000]))
    batch.starts.copy_(torch.tensor([0, 5, 21, 21, 35]))
    graph.replay()
    wanted, _ = reference.tree_attention(*given, 128**-0.5, batch.paged)
    torch.testing.assert_close(out[:35], wanted[:35], rtol=2e-2, atol=2e-2)
