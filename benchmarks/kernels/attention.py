"""Cases of `tree_attention`: paged prefixes and trees, against attention of contiguous K/V with the same mask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.kernels.case import Case, Goal, Run, Work
from honed.kernels.trees import reference
from honed.kernels.trees.reference import AttendedPrefix, PagedPrefix, pack_bits
from honed.kernels.trees.tree_attention import tree_attention

PAGE = 16
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}

# Letters: B requests, L tokens of a prefix, I rows of a tree with its anchor.


def ancestors_of(rows: int) -> torch.Tensor:  # [I, I]
    """Tell whether a row attends to another, in a tree of chains of eight that start at the anchor."""
    parents = [-1] + [0 if row % 8 == 1 else row - 1 for row in range(1, rows)]
    attends = torch.eye(rows, dtype=torch.bool)
    for row in range(1, rows):
        attends[row] |= attends[parents[row]]
    return attends


def attention_work(b: int, length: int, rows: int, device: torch.device) -> Work:
    """Give every request the same tree and a prefix of L tokens, in pages at random places."""
    torch.manual_seed(0)
    dtype = DTYPE[device.type]
    pages = -(-length // PAGE)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    q, k, v = (random(b * rows, heads, HEAD_SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
    caches = [random(b * pages, PAGE, KV_HEADS, HEAD_SIZE) for _ in range(2)]
    table = torch.randperm(b * pages, device=device).view(b, pages).int()
    lengths = torch.full((b,), length, device=device, dtype=torch.int32)
    starts = torch.arange(0, b * rows + 1, rows, device=device, dtype=torch.int32)
    attends = ancestors_of(rows).to(device)
    words = pack_bits(F.pad(attends, (0, -rows % 32))).expand(b, -1, -1).contiguous()
    prefix = PagedPrefix(*caches, block_table=table, lengths=lengths)
    out, lse = torch.empty_like(q), torch.empty(q.shape[:2], device=device)
    # The alternatives get the op's inputs gathered: K/V of a request one after the other, [B, H_kv, L + I, E].
    dense = []
    for cache, own in zip(caches, (k, v), strict=True):
        before = cache[table.long()].flatten(1, 2)[:, :length]
        dense.append(torch.cat((before, own.view(b, rows, KV_HEADS, HEAD_SIZE)), dim=1).transpose(1, 2).contiguous())
    wide_q = q.view(b, rows, HEADS, HEAD_SIZE).transpose(1, 2).contiguous()
    mask = torch.cat((torch.ones(rows, length, dtype=torch.bool, device=device), attends), dim=1)
    alternatives: dict[str, Run] = {
        "SDPA with a mask": lambda: F.scaled_dot_product_attention(wide_q, *dense, attn_mask=mask, enable_gqa=True)
    }
    if device.type == "cuda":
        alternatives["FlexAttention"] = by_flex(wide_q, dense, attends, length)
        alternatives |= after_flash(q, k, v, starts, words, rows, prefix, length, out, lse)
    else:
        scale = HEAD_SIZE**-0.5
        alternatives["plain twin"] = lambda: reference.tree_attention(q, k, v, starts, words, rows, scale, prefix)
    return Work(
        lambda: tree_attention(q, k, v, starts, words, rows, prefix=prefix, max_prefix=length, out=out, lse=lse),
        bytes_moved=sum(x.nbytes for x in dense) + q.nbytes + out.nbytes,
        flops=4 * b * rows * HEADS * HEAD_SIZE * (length + rows),
        alternatives=alternatives,
        is_graphed=True,
    )


def by_flex(q: torch.Tensor, dense: list[torch.Tensor], attends: torch.Tensor, length: int) -> Run:
    """Run FlexAttention with its block mask made beforehand."""
    rows = len(attends)

    def may(_b: torch.Tensor, _h: torch.Tensor, row: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        return (token < length) | attends[row, (token - length).clamp(0, rows - 1)]

    block_mask = create_block_mask(may, None, None, rows, length + rows, device=q.device)
    compiled: Callable[..., Any] = torch.compile(flex_attention)
    options = {"FORCE_USE_FLEX_ATTENTION": True}  # its decoding kernel isn't available for these shapes
    return lambda: compiled(q, *dense, block_mask=block_mask, enable_gqa=True, kernel_options=options)


def after_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    words: torch.Tensor,
    rows: int,
    prefix: PagedPrefix,
    length: int,
    out: torch.Tensor,
    lse: torch.Tensor,
) -> dict[str, Run]:
    """Run vLLM's flash-attn, if installed, for the prefix, and the op for the tree and the merge."""
    with contextlib.suppress(ImportError):
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        def run() -> object:
            attended, attended_lse = flash_attn_varlen_func(
                q,
                prefix.k_cache,
                prefix.v_cache,
                max_seqlen_q=rows,
                cu_seqlens_q=starts,
                max_seqlen_k=length,
                seqused_k=prefix.lengths,
                block_table=prefix.block_table,
                causal=False,
                return_softmax_lse=True,
            )
            done = AttendedPrefix(attended, attended_lse.T)
            return tree_attention(q, k, v, starts, words, rows, prefix=done, out=out, lse=lse)

        return {"flash-attn for the prefix": run}
    return {}


def attention_case(b: int, length: int, nodes: int, on: Any, *goals: Goal) -> Case:
    """A case of `tree_attention`; rows are the nodes plus the anchor."""
    shape = f"batch {b}, context {length}, {nodes} nodes, {HEADS}/{KV_HEADS} heads of {HEAD_SIZE}"
    return Case("tree_attention", shape, on, partial(attention_work, b, length, nodes + 1), goals)


CASES = [
    attention_case(64, 4096, 32, "cuda", Goal("ceiling_share", at_least=0.75), Goal("ratio:FlexAttention", at_least=2.0)),
    attention_case(1, 32_768, 32, "cuda"),
    attention_case(64, 4096, 255, "cuda"),
    attention_case(2, 512, 32, "cpu"),
]
