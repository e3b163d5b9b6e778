"""Attention of tree rows over the cache alone, against the twin that is given the rows' own K and V."""

from __future__ import annotations

import pytest
import torch

from honed.kernels.trees import reference
from honed.kernels.trees.cached_attention import cached_attention, cached_rows
from honed.kernels.trees.reference import PagedPrefix
from honed.kernels.trees.tree_build import tree_build

HEADS, KV_HEADS, SIZE, PAGE, DEPTHS = 6, 2, 8, 4, 4


@pytest.mark.parametrize("window", [0, 6, 100])
@pytest.mark.parametrize(("nodes", "lengths"), [([5], [9]), ([6, 40, 1], [10, 3, 21]), ([3, 3], [8, 8])])
def test_it_is_the_attention_of_the_rows_own_keys_and_values(nodes: list[int], lengths: list[int], window: int) -> None:
    generator = torch.Generator().manual_seed(sum(nodes) + sum(lengths))
    count, most = len(nodes), max(nodes)
    log_probs = -torch.rand(count, DEPTHS, 4, generator=generator).cumsum(-1)
    trees = tree_build(log_probs, torch.zeros_like(log_probs).int(), torch.tensor(nodes), most)
    sizes = torch.tensor([0, *nodes]) + torch.tensor([0] + [1] * count)
    starts, prefix = sizes.cumsum(0).int(), torch.tensor(lengths, dtype=torch.int32)
    num_rows, others = int(starts[-1]), 3  # rows of requests without trees, before those with
    q = torch.randn(others + num_rows, HEADS, SIZE, generator=generator)
    k, v = torch.randn(2, num_rows, KV_HEADS, SIZE, generator=generator)
    pages = -(-(max(n + length for n, length in zip(nodes, lengths, strict=True)) + 1) // PAGE)
    table = 1 + torch.randperm(count * pages, generator=generator).view(count, pages).int()
    caches = torch.randn(2, count * pages + 1, PAGE, KV_HEADS, SIZE, generator=generator)
    caches[:, 0] = float("nan")
    for b, (n, length) in enumerate(zip(nodes, lengths, strict=True)):
        table[b, (n + length) // PAGE + 1 :] = 0  # what a request doesn't hold may be anything
        for place in range(n + 1):
            at = table[b, (length + place) // PAGE], (length + place) % PAGE
            caches[0][at], caches[1][at] = k[starts[b] + place], v[starts[b] + place]
    firsts = None
    if window:
        depths = torch.nn.functional.pad(trees.depths, (1, 0))
        of_rows = [prefix[b] + depths[b, : n + 1] - window + 1 for b, n in enumerate(nodes)]
        firsts = torch.cat(of_rows).clamp(min=0).int()
    rows = others + torch.arange(num_rows)
    where = cached_rows(table, PAGE, HEADS // KV_HEADS, rows, starts, trees.row_masks, most + 1, prefix, firsts)
    made = cached_attention(q, *caches, where=where, scale=0.3)
    paged = PagedPrefix(caches[0], caches[1], table, prefix, firsts=firsts)
    wanted, _ = reference.tree_attention(q[rows], k, v, starts, trees.row_masks, most + 1, 0.3, paged)
    torch.testing.assert_close(made, wanted)
