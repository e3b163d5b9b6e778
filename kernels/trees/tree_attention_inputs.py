"""Inputs of `tree_attention` apart from the tree, and the check that all inputs fit together.

Letters: B = requests, I = rows of the largest, R = rows of all of them, W = words of a mask row, H = heads, H_kv = K/V heads, E
= head size, P = pages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

HEAD_SIZES = (16, 32, 64, 128, 256)
"""Head sizes that the kernel supports."""


class PagedPrefix(NamedTuple):
    """The prefix of every request, in a paged cache of vLLM's layout."""

    k_cache: torch.Tensor  # [P, page, H_kv, E]; float8_e4m3fn: times `k_scale`
    v_cache: torch.Tensor  # [P, page, H_kv, E]
    block_table: torch.Tensor  # [B, pages of the longest prefix] int32; entries past a prefix aren't read
    lengths: torch.Tensor  # [B] int32, tokens
    k_scale: torch.Tensor | None = None  # [] or [1] float32
    v_scale: torch.Tensor | None = None
    firsts: torch.Tensor | None = None  # [R] int32, first token that a row attends to; a request's first row has the least


class AttendedPrefix(NamedTuple):
    """The same, after another kernel attended to it."""

    out: torch.Tensor  # [R, H, E]
    lse: torch.Tensor  # [R, H] float32, natural log of Σ exp(score); −inf: empty, and `out` isn't read


def check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_starts: torch.Tensor,
    row_masks: torch.Tensor,
    max_rows: int,
    prefix: PagedPrefix | AttendedPrefix | None,
) -> None:
    """Refuse inputs that the op or its kernel can't take.

    Raises:
        ValueError: shapes or strides don't fit.
    """

    def refuse(what: str) -> None:
        raise ValueError(f"tree_attention: {what}")

    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or k.shape[::2] != q.shape[::2] or q.shape[1] % k.shape[1]:
        refuse(f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}: not [R, H, E], [R, H_kv, E], H a multiple of H_kv")
    if row_starts.dim() != 1 or row_masks.dim() != 3 or len(row_masks) != len(row_starts) - 1:
        refuse(f"row starts {list(row_starts.shape)} and masks {list(row_masks.shape)}: not [B + 1] and [B, I, W]")
    if row_masks.shape[1] < max_rows or row_masks.shape[2] * 32 < max_rows or row_masks.dtype != torch.int32:
        refuse(f"{max_rows} rows need int32 masks [B, ≥ {max_rows}, ≥ {-(-max_rows // 32)}], not {list(row_masks.shape)}")
    held = [q, k, v]
    if isinstance(prefix, PagedPrefix):
        held += prefix[:2]
        if prefix.k_cache.shape != prefix.v_cache.shape or prefix.k_cache.shape[2:] != k.shape[1:]:
            refuse(f"a cache of {list(prefix.k_cache.shape)} doesn't fit k {list(k.shape)}: it is [pages, page, H_kv, E]")
        if prefix.block_table.dim() != 2 or not len(prefix.block_table) == len(prefix.lengths) == len(row_masks):
            refuse(f"block table {list(prefix.block_table.shape)} and lengths {list(prefix.lengths.shape)}: one row a request")
        if prefix.firsts is not None and (prefix.firsts.shape != q.shape[:1] or prefix.firsts.dtype != torch.int32):
            refuse(f"first tokens {list(prefix.firsts.shape)} of {prefix.firsts.dtype}: not int32 [R], as q has rows")
        if (prefix.k_scale is None) != (prefix.v_scale is None):
            refuse("either both K and V have a scale, or neither")
    elif prefix is not None:
        held += prefix[:1]
        if prefix.out.shape != q.shape or prefix.lse.shape != q.shape[:2]:
            refuse(f"a prefix pass of {list(prefix.out.shape)} and {list(prefix.lse.shape)}: not [R, H, E] and [R, H], as q is")
    if any(part.stride(-1) != 1 and part.shape[-1] > 1 for part in held):
        refuse("the last dimension of q, k, v and of what the prefix holds must have unit stride")
    if q.is_cuda and q.shape[2] not in HEAD_SIZES:
        refuse(f"head size {q.shape[2]}, but the kernel has {HEAD_SIZES}: pad q, k and v with zeros, and pass `scale`")
