"""K and V of a layer's paged cache as [blocks, block size, heads, head size], whatever the backend's layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Views = tuple[Tensor, Tensor]  # each [blocks, block size, heads, head size]


def _cpu(cache: Tensor, heads: int) -> Views:
    """vLLM's CPU backend for float32: [blocks, heads, block size, K and V], each block's keys transposed."""
    blocks, _, size, double = cache.shape
    width = double // 2
    keys, values = cache.view(blocks, heads, size * 2, width).chunk(2, dim=2)
    block, head = keys.stride()[:2]
    transposed = keys.as_strided((blocks, heads, width, size), (block, head, size, 1), keys.storage_offset())
    return transposed.permute(0, 3, 1, 2), values.permute(0, 2, 1, 3)


def _side_by_side(cache: Tensor, heads: int) -> Views:
    """FlashAttention, Triton and FlexAttention: K and V of a token beside each other."""
    keys, values = cache.transpose(1, 2).chunk(2, dim=-1)
    return keys, values


_LAYOUTS: tuple[Callable[[Tensor, int], Views], ...] = (_cpu, _side_by_side)


def views_of(layer: Any) -> Views | None:
    """Views of an attention layer's cache, in a layout that this backend was seen to write; None: no known one is.

    The backend writes marked rows into a small cache of the same kind, and a view must show them in their place.
    """
    cache, impl, heads = layer.kv_cache, layer.impl, layer.num_kv_heads
    scratch = torch.zeros_like(cache[:3])
    if scratch.stride() != cache.stride():  # a cache whose strides differ from its shape's order
        scratch = torch.empty_strided(scratch.shape, cache.stride(), dtype=cache.dtype, device=cache.device).zero_()
    for layout in _LAYOUTS:
        try:
            keys, values = layout(scratch, heads)
            size, width = keys.shape[1], keys.shape[3]
            slots = torch.tensor([size + 1, 2 * size + 3], device=cache.device)
            rows = torch.arange(2 * heads * width, device=cache.device).view(2, heads, width)
            marked = ((rows % 61).to(layer.dtype if hasattr(layer, "dtype") else torch.float32) + 1.0).to(cache.dtype)
            impl.do_kv_cache_update(layer, marked, -marked, scratch, slots)
            shown = ((view[[1, 2], [1, 3]], wanted) for view, wanted in ((keys, marked), (values, -marked)))
            if all(torch.equal(found, wanted) for found, wanted in shown):
                return layout(cache, heads)
        except (RuntimeError, ValueError, IndexError, TypeError):
            continue
    return None
