"""Attention of tree rows on a CPU, over K and V that the cache already holds: those of the prefix and of the rows themselves.

vLLM writes a step's K and V before its layers attend. So a tree's rows stand in the cache right after their prefix. One mask
says what each row attends to, and PyTorch's own fused attention does the rest. Places and masks are the same in all layers of a
group of caches: `CachedRows` is made once a step for each group and window.

Letters: B = requests, I = rows of the largest, R = rows of all of them, H = heads, H_kv = K/V heads, G = heads of a K/V head,
E = head size, L = tokens of the longest request with its rows, T = rows of the step, W = 32-bit words of a mask row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from honed.kernels.trees.reference import unpack_bits


class CachedRows(NamedTuple):
    """Where the keys of a step's tree rows are, and which of them each row attends to."""

    page: torch.Tensor  # [B, L] int64, of each token; past a request's last row: that one's
    in_page: torch.Tensor  # [B, L] int64, its place there
    rows: torch.Tensor  # [B, I] int64, of the step; past a request's last row: any
    place: torch.Tensor  # [R] int64 into [B · I]
    added: torch.Tensor  # [B, 1, G · I, L] float32, added to scores: 0 or −inf


def cached_rows(
    block_table: torch.Tensor,  # [B, pages]
    page_tokens: int,
    group: int,
    rows: torch.Tensor,  # [R] int64, rows of the step
    row_starts: torch.Tensor,  # [B + 1]
    row_masks: torch.Tensor,  # [B, ≥ I, W] int32
    max_rows: int,
    prefix: torch.Tensor,  # [B], tokens before the anchor
    firsts: torch.Tensor | None = None,  # [R]
) -> CachedRows:
    """Find the tokens' places, and make the mask.

    Args:
        group: G.
        rows: each request's anchor, then its nodes, request after request.
        firsts: the first token of the prefix that each row attends to; None: the first of all.
    """
    starts, o_i = row_starts.long(), torch.arange(max_rows)
    at = (starts[:-1, None] + o_i).clamp(max=len(rows) - 1)  # [B, I]
    counts = starts[1:] - starts[:-1]
    place = (o_i < counts[:, None]).flatten().nonzero()[:, 0]
    o_t = torch.arange(int((prefix + counts).max()))
    token = torch.minimum(o_t, (prefix + counts - 1)[:, None])  # [B, L]
    page = block_table.long().gather(1, token // page_tokens)
    own = o_t - prefix[:, None]  # [B, L], the row that stands there
    of_rows = unpack_bits(row_masks[:, :max_rows])[:, :, :max_rows]  # [B, I, I]
    may = of_rows.gather(2, own.clamp(0, max_rows - 1)[:, None].expand(-1, max_rows, -1).long())
    may &= ((own >= 0) & (own < max_rows))[:, None]
    before = (own < 0)[:, None].expand_as(may)
    may |= before if firsts is None else before & (o_t >= firsts[at][:, :, None])
    added = torch.where(may, 0.0, float("-inf")).repeat(1, group, 1)[:, None]
    return CachedRows(page, token % page_tokens, rows[at], place, added)


def cached_attention(
    q: torch.Tensor,  # [T, H, E]
    k_cache: torch.Tensor,  # [pages, page, H_kv, E]
    v_cache: torch.Tensor,  # the same
    where: CachedRows,
    scale: float,
) -> torch.Tensor:  # [R, H, E]
    """Attend from every tree row to the keys that its mask names, in float32."""
    (count, rows), kv_heads, width = where.rows.shape, k_cache.shape[2], q.shape[2]
    group = q.shape[1] // kv_heads
    by_head = q[where.rows].view(count, rows, kv_heads, group, width).permute(0, 2, 3, 1, 4).flatten(2, 3).float()
    keys, values = (cache[where.page, where.in_page].transpose(1, 2).float() for cache in (k_cache, v_cache))  # [B, H_kv, L, E]
    out = torch.nn.functional.scaled_dot_product_attention(by_head, keys, values, where.added, scale=scale)
    by_row = out.view(count, kv_heads, group, rows, width).permute(0, 3, 1, 2, 4).reshape(count * rows, -1, width)
    return by_row[where.place].to(q.dtype)
