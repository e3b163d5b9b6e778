"""Attention of packed anchor blocks over a shared context, forward and backward.

Computes: reference.anchor_attention. Block n sees itself, in both directions or only backward, and the context rows begins[n] …
ends[n] − 1. That interval runs from its sample's first row to just before its anchor. A sliding window cuts it from the left,
by a row more for each query. Blocks don't see each other. Queries are those of a block's last tokens, or of all.
Moves: q, out, own K/V once; context K/V once for each tile of 128 queries that sees them, from the L2 cache. Floor: the
matmuls, 4·D·Q·B FLOPs for each (block, visible row) forward and 2.5 times that backward, at the matmul rate.
Layout: contiguous, heads before width, as from the projections. On a GPU context and blocks become one K/V sequence, with the
context padded to whole tiles, at least two. Small units get blind blocks until they fill two tiles, too.
On a GPU: FlexAttention with a BlockMask made from the anchors. Every mask here is an interval and a diagonal. So arithmetic on
[N] numbers tells which tiles are empty, full or partial, and no [N·B, T + N·B] mask is evaluated (`create_block_mask` would).
Only the partial tiles are wasted: one on each interval's end and the diagonal's. A custom kernel could save those and little
else, and attention is under a tenth of a layer's FLOPs (8B shape, 4k context). So FlexAttention is used, with its backward
pass, maintained by PyTorch. Values and gradients equal the twin's on an H200. Its time there is in docs/gpu.md.
Its tiles are PyTorch's own choice, but where these are too large for the card's shared memory: see `flex_options`.
On a CPU: PyTorch's masked attention (FlexAttention has no backward pass there) on parts of PART_QUERIES queries, each with the
rows that its blocks see. Packed samples aren't computed against each other, little of the diagonal is wasted, and no part's
scores are kept. It is one to four times as fast as the plain twin here, forward and backward.
Source: arXiv 2602.06036, section 3 (the packed blocks); FlexAttention, arXiv 2412.05496.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from honed.kernels.training import reference
from honed.kernels.training.sizes import PART_QUERIES

TILE = 128
FLEX_HEAD_SIZES = (16, 32, 64, 128, 256)
AMPLE_SHARED_BYTES = 160 << 10
"""Shared memory of a block of threads with which PyTorch's own tiles do (A100, H100, B200)."""
MOST_KERNELS = 64
"""Limit of FlexAttention's compiled kernels in a process."""


class Part(NamedTuple):
    """Blocks that are computed together on a CPU, and the rows they see."""

    blocks: torch.Tensor  # [P]
    rows: slice
    mask: torch.Tensor  # [P·B, rows + P·C], 0 or −inf


class Visible:
    """What each block sees; made once a step, since layers of the same kind share the values derived from it.

    Args:
        begins: [N] the first context row that a block sees.
        ends: [N] one past the last, at most T; begins ≥ ends: the block sees only itself.
        window: rows that a query sees up to and with itself, at least C. The query of token i sees the context from row
            ends + i + 1 − window on. None: no limit.
        is_causal: the query of token i sees its block's first i + 1 tokens, not all.
    """

    def __init__(self, begins: torch.Tensor, ends: torch.Tensor, *, window: int | None = None, is_causal: bool = False) -> None:
        if begins.shape != ends.shape or begins.dim() != 1:
            raise ValueError(f"anchor_attention: begins {list(begins.shape)} and ends {list(ends.shape)} must both be [N]")
        if window is not None and window < 1:
            raise ValueError(f"anchor_attention: window {window} must be at least 1")
        self.begins, self.ends, self.window, self.is_causal = begins, ends, window, is_causal
        self._parts: dict[tuple[int, int, torch.dtype], list[Part]] = {}
        self._block_masks: dict[tuple[int, int, int], BlockMask] = {}
        self._padded: dict[int, Visible] = {}

    def parts(self, queries: int, tokens: int, dtype: torch.dtype) -> list[Part]:
        """Return parts of at most PART_QUERIES queries; reads the values, which on a GPU would wait for the device."""
        key = (queries, tokens, dtype)
        if key not in self._parts:
            begins = self.begins_of(torch.zeros((), dtype=self.ends.dtype, device=self.ends.device))
            cuts = parts_of(begins.tolist(), self.ends.tolist(), max(1, PART_QUERIES // queries))
            self._parts[key] = [self._part(blocks, rows, queries, tokens, dtype) for blocks, rows in cuts]
        return self._parts[key]

    def block_mask(self, queries: int, tokens: int, context_rows: int) -> BlockMask:
        """Return FlexAttention's mask; see the function of the same name."""
        key = (queries, tokens, context_rows)
        if key not in self._block_masks:
            self._block_masks[key] = block_mask(self, *key)
        return self._block_masks[key]

    def padded(self, blocks: int) -> Visible:
        """Return the same with blocks that see only themselves after it, so that there are `blocks`."""
        if blocks <= len(self.ends):
            return self
        if blocks not in self._padded:
            begins, ends = (F.pad(x, (0, blocks - len(x))) for x in (self.begins, self.ends))
            self._padded[blocks] = Visible(begins, ends, window=self.window, is_causal=self.is_causal)
        return self._padded[blocks]

    def begins_of(self, queries: torch.Tensor, blocks: torch.Tensor | slice = slice(None)) -> torch.Tensor:
        """First context row that each query sees; `queries` are their tokens' numbers, and broadcast against `blocks`."""
        begins = self.begins[blocks]
        if self.window is None:
            return begins + torch.zeros_like(queries)
        return torch.maximum(begins, self.ends[blocks] + 1 - self.window + queries)

    def _part(self, blocks: list[int], rows: slice, queries: int, tokens: int, dtype: torch.dtype) -> Part:
        device = self.begins.device
        some = torch.tensor(blocks, device=device)
        number = torch.arange(len(blocks), device=device)
        token = torch.arange(tokens, device=device)
        of_query, of_token = number.repeat_interleave(queries), number.repeat_interleave(tokens)
        query = token[tokens - queries :].repeat(len(blocks))
        row = torch.arange(rows.start, rows.stop, device=device)
        begins = self.begins_of(query, some[of_query])
        in_context = (row >= begins[:, None]) & (row < self.ends[some[of_query], None])  # [P·B, rows]
        in_block = of_query[:, None] == of_token
        if self.is_causal:
            in_block &= token.repeat(len(blocks)) <= query[:, None]
        is_seen = torch.cat((in_context, in_block), dim=1)
        return Part(some, rows, torch.zeros(is_seen.shape, dtype=dtype, device=device).masked_fill_(~is_seen, float("-inf")))


def anchor_attention(
    q: torch.Tensor,  # [N, B, Q, D]
    own_k: torch.Tensor,  # [N, C, G, D]
    own_v: torch.Tensor,  # [N, C, G, D]
    context_k: torch.Tensor,  # [T, G, D]
    context_v: torch.Tensor,  # [T, G, D]
    visible: Visible,
    scale: float | None = None,  # 1 / √D
) -> torch.Tensor:  # [N, B, Q, D]
    """Attend from the last B of a block's C tokens to the context rows and to those of its own block that each sees.

    Sorted anchors aren't required, but need fewer tiles on a GPU.

    Raises:
        ValueError: shapes don't fit each other.
    """
    _check(q, own_k, own_v, context_k, context_v, visible)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if not q.numel():
        return q.clone()
    options = flex_options(q.shape[-1], q.itemsize, _shared_bytes(q.device)) if q.is_cuda else None
    if options is not None:
        return by_flex(q, own_k, own_v, context_k, context_v, visible, scale, _compiled_flex(), options)
    if torch.compiler.is_compiling():  # parts depend on values: trace the whole
        return reference.anchor_attention(
            q,
            own_k,
            own_v,
            context_k,
            context_v,
            visible.begins,
            visible.ends,
            scale,
            window=visible.window,
            is_causal=visible.is_causal,
        )
    return _in_parts(q, own_k, own_v, context_k, context_v, visible, scale)


def by_flex(
    q: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    visible: Visible,
    scale: float,
    attend: Callable[..., Any] = flex_attention,
    options: Mapping[str, int] | None = None,
) -> torch.Tensor:  # [N, B, Q, D]
    """Run FlexAttention: compiled on a GPU; for tests uncompiled on any device (dense form, forward only on a CPU).

    Everything that differs between units has at least two tiles and a dynamic size, since PyTorch compiles apart what has a
    size of one, and again what has a second size.
    """
    n, b, num_heads, d = q.shape
    c = own_k.shape[1]
    blocks = max(n, TILE // min(b, c) + 1)
    visible = visible.padded(blocks)
    rows = max(2 * TILE, len(context_k) + -len(context_k) % TILE)

    def padded(x: torch.Tensor, size: int) -> torch.Tensor:
        return F.pad(x, (0,) * (2 * x.dim() - 1) + (size - len(x),)) if size > len(x) else x

    k, v = (
        torch.cat((padded(context, rows), padded(own, blocks).flatten(0, 1)))  # [T' + N'·C, G, D]
        for context, own in ((context_k, own_k), (context_v, own_v))
    )
    sides = [x[None].transpose(1, 2) for x in (padded(q, blocks).flatten(0, 1), k, v)]  # [1, heads, rows, D]
    out: torch.Tensor = attend(
        *sides,
        block_mask=visible.block_mask(b, c, rows),
        scale=scale,
        enable_gqa=num_heads != own_k.shape[2],
        # PyTorch would use its decoding kernel for under 128 queries.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True} | dict(options or {}),
    )
    return out.transpose(1, 2).reshape(blocks, b, num_heads, d)[:n]


def flex_options(head_size: int, value_bytes: int, shared_bytes: int) -> dict[str, int] | None:
    """Choose FlexAttention's tiles for a GPU; {}: PyTorch's own; None: none fit, or it doesn't know heads of this size.

    PyTorch's own are too large for cards with 99 KiB of shared memory (RTX, A10, L4, L40S, GB10): at a head size of 256 those
    of one pass or of both; at 128 those of float32, and those of bfloat16 by some releases of Triton. With two stages four
    tiles of rows lie there at once, and scores. The templates of PyTorch 2.13 take less than is counted here, as Triton 3.5,
    3.6 and 3.9 compile them for sm_86 and sm_120.

    Args:
        value_bytes: of a value of queries, keys and values.
        shared_bytes: shared memory that a block of threads may have.
    """
    if head_size not in FLEX_HEAD_SIZES:
        return None
    if shared_bytes >= AMPLE_SHARED_BYTES or head_size < 128:
        return {}
    for tile in (64, 32, 16):
        if 4 * tile * head_size * value_bytes + 8 * tile * tile <= shared_bytes:
            sides = ("fwd_BLOCK_M", "fwd_BLOCK_N", "bwd_BLOCK_M1", "bwd_BLOCK_N1", "bwd_BLOCK_M2", "bwd_BLOCK_N2")
            return dict.fromkeys(sides, tile) | {"num_stages": 2, "num_warps": 4}
    return None


@functools.cache
def _shared_bytes(device: torch.device) -> int:
    """Shared memory that a block of threads may have; PyTorch tells it of NVIDIA's cards only."""
    found: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", AMPLE_SHARED_BYTES)
    return found


def block_mask(visible: Visible, queries: int, tokens: int, context_rows: int) -> BlockMask:
    """Tell which tiles of [N·B queries, context rows + N·C own rows] are empty, full or partial, without evaluating the mask.

    Args:
        context_rows: a whole number of tiles.
    """
    assert context_rows % TILE == 0, "pad the context to whole tiles"
    begins, ends, window, is_causal = visible.begins, visible.ends, visible.window, visible.is_causal
    num_queries, num_own, before = len(ends) * queries, len(ends) * tokens, tokens - queries

    def blocks_of(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First and last block that each tile touches, of rows of which `size` are of a block."""
        starts = torch.arange(0, len(ends) * size, TILE, device=ends.device)
        return starts // size, (starts + TILE - 1).clamp(max=len(ends) * size - 1) // size

    (first, last), (first_own, last_own) = blocks_of(queries), blocks_of(tokens)  # [tiles]
    span = (TILE - 1) // queries + 2  # blocks that a tile of queries can touch
    members = torch.minimum(first[:, None] + torch.arange(span, device=first.device), last[:, None])
    first_low, last_low = (  # of a block's first and last query: [tiles, span]; the last block may be repeated
        visible.begins_of(torch.full_like(members, token), members) for token in (before, tokens - 1)
    )
    high = ends[members]
    is_blind = high <= first_low
    outer_low = first_low.masked_fill(is_blind, context_rows).amin(1, keepdim=True)
    outer_high = high.masked_fill(is_blind, 0).amax(1, keepdim=True)
    column = torch.arange(0, context_rows, TILE, device=first.device)
    is_touched = (column < outer_high) & (column + TILE > outer_low)
    is_full = (column >= last_low.amax(1, keepdim=True)) & (column + TILE <= high.amin(1, keepdim=True))
    own = (first[:, None] <= last_own) & (first_own <= last[:, None])  # tiles that share a block
    partial = torch.cat((is_touched & ~is_full, own), dim=1)
    full = torch.cat((is_full, torch.zeros_like(own)), dim=1)

    offset = torch.full((), context_rows, device=ends.device)  # a number would be compiled into the kernel

    def is_visible(_b: torch.Tensor, _h: torch.Tensor, query: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        block, token, own = query // queries, query % queries + before, row - offset
        in_context = (row >= begins[block]) & (row < ends[block])
        if window is not None:
            in_context = in_context & (row > ends[block] + token - window)  # `&=` has no GPU code
        in_block = (own >= 0) & (own // tokens == block)
        return in_context | (in_block & (own % tokens <= token) if is_causal else in_block)

    return BlockMask.from_kv_blocks(
        *_ordered(partial),
        *_ordered(full),
        BLOCK_SIZE=TILE,
        mask_mod=is_visible,
        seq_lengths=(num_queries, context_rows + num_own),
    )


def _ordered(is_set: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # [1, 1, rows], [1, 1, rows, columns], int32
    """Count the set columns of each row, and order the columns with those first."""
    order = is_set.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    return is_set.sum(1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None].contiguous()


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    allow_recompiles()
    return torch.compile(flex_attention)


def allow_recompiles() -> None:
    """Raise PyTorch's limit of recompiles: units differ in blocks, rows and gradients, and need some ten kernels.

    Beyond its limit of eight, PyTorch silently computes attention with all its scores in memory.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, MOST_KERNELS)


def _in_parts(
    q: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    visible: Visible,
    scale: float,
) -> torch.Tensor:  # [N, B, Q, D]
    """Run PyTorch's masked attention on parts of the blocks, each with the context rows that its blocks see."""
    _, b, num_heads, d = q.shape
    parts = visible.parts(b, own_k.shape[1], q.dtype)
    outs = []
    for some, rows, mask in parts:
        k, v = (torch.cat((c[rows], own[some].flatten(0, 1))) for c, own in ((context_k, own_k), (context_v, own_v)))
        out = F.scaled_dot_product_attention(
            q[some].reshape(1, -1, num_heads, d).transpose(1, 2),
            k[None].transpose(1, 2),
            v[None].transpose(1, 2),
            attn_mask=mask,
            scale=scale,
            enable_gqa=num_heads != own_k.shape[2],
        )
        outs.append(out.transpose(1, 2).reshape(-1, b, num_heads, d))
    return torch.cat(outs)[torch.cat([part.blocks for part in parts]).argsort()]


def parts_of(begins: list[int], ends: list[int], size: int) -> Iterator[tuple[list[int], slice]]:
    """Split blocks into parts of at most `size`, each with the context rows that its blocks see.

    Blocks are sorted by the end of what they see. A part also ends if the next block sees none of its rows. So packed samples
    aren't computed against each other.
    """
    blocks: list[int] = []
    low = high = 0
    for i in sorted(range(len(ends)), key=ends.__getitem__):
        begin, end = (begins[i], ends[i]) if begins[i] < ends[i] else (low, high)
        outer = min(low, begin) if high > low else begin
        if blocks and (begin >= high > low or len(blocks) == size):
            yield blocks, slice(low, high)
            blocks, outer = [], begin
        blocks.append(i)
        low, high = outer, end
    if blocks:
        yield blocks, slice(low, high)


def _check(
    q: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    context_k: torch.Tensor,
    context_v: torch.Tensor,
    visible: Visible,
) -> None:
    is_right = (
        q.dim() == own_k.dim() == 4
        and own_k.shape == own_v.shape
        and context_k.shape == context_v.shape
        and own_k.shape[0] == q.shape[0]
        and own_k.shape[1] >= q.shape[1]
        and context_k.shape[1:] == own_k.shape[2:]
        and q.shape[3] == own_k.shape[3]
        and q.shape[2] % max(1, own_k.shape[2]) == 0
        and visible.begins.shape == q.shape[:1]
    )
    if is_right and visible.window is not None and visible.window < own_k.shape[1]:
        raise ValueError(f"anchor_attention: a window of {visible.window} is shorter than a block of {own_k.shape[1]}")
    if not is_right:
        shapes = ", ".join(str(list(x.shape)) for x in (q, own_k, own_v, context_k, context_v, visible.begins))
        raise ValueError(
            f"anchor_attention: {shapes} don't fit: they are q [N, B, Q, D], own K and V [N, C, G, D], context K and V "
            "[T, G, D], begins and ends [N], with Q a multiple of G and C at least B"
        )
