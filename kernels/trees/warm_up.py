"""Runs that compile the kernels of draft trees for every step that an engine may come to, and change nothing.

Triton compiles a kernel when it is first called, for seconds. Which kernel a call needs depends on its shape. So each run here
is a call of a shape that needs another one: of one request without rows, or with next to none.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from honed.kernels.trees import top_candidates, tree_attention, tree_build
from honed.kernels.trees.reference import words_of
from honed.kernels.trees.tree_attention_inputs import PagedPrefix
from honed.kernels.trees.tree_attention_plan import Plan, different_plans

Run = Callable[[], object]
_FEW_ROWS = 16
_HEAD_ROWS = 64
"""vLLM's head has a multiple of so many rows. So has each row of its logits, of which it gives a view."""


def attention_runs(
    k_cache: torch.Tensor,  # [blocks, block size, H_kv, E]
    v_cache: torch.Tensor,  # the same
    *,
    num_heads: int,
    num_slots: int,
    most_requests: int,
    most_tokens: int,
    window: int = 0,
    is_float_out: bool = False,
) -> Iterator[Run]:
    """Compile `tree_attention` for one kind of layer, for 1 … `most_requests` requests of 1 … `num_slots` nodes.

    Args:
        num_heads: H, query heads.
        num_slots: N, most nodes of a tree.
        most_tokens: most tokens of a request.
        window: tokens that a row attends to; 0: all.
        is_float_out: the output is wanted in float32.
    """
    device, dtype, page = k_cache.device, k_cache.dtype, k_cache.shape[1]
    num_kv_heads, head_size = k_cache.shape[2:]
    pages = -(-most_tokens // page)
    max_prefix = min(window or pages * page, pages * page)

    def ints(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    def run_of(plan: Plan) -> Run:
        def run() -> None:
            q = torch.zeros((_FEW_ROWS, num_heads, head_size), dtype=dtype, device=device)
            k = torch.zeros((_FEW_ROWS, num_kv_heads, head_size), dtype=dtype, device=device)
            prefix = PagedPrefix(k_cache, v_cache, ints(1, pages), ints(1), firsts=ints(_FEW_ROWS) if window else None)
            out = torch.empty_like(q, dtype=torch.float32 if is_float_out else dtype)
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=device)
            masks = ints(1, num_slots + 1, words_of(num_slots))
            scale = head_size**-0.5
            tree_attention.launch(q, k, k.clone(), ints(2), masks, 2, scale, prefix, max_prefix, out, lse, plan)

        return run

    sizes = num_kv_heads, num_heads // num_kv_heads, num_slots + 1, head_size, max_prefix, dtype.itemsize, dtype.itemsize
    yield from map(run_of, different_plans(most_requests, *sizes, tree_attention.limits(device)))


def candidate_runs(
    num_depths: int,
    num_candidates: int,
    vocabulary: int,
    dtype: torch.dtype,
    device: torch.device,
    most_requests: int,
    have_temperatures: Sequence[bool],
    have_padding: Sequence[bool] = (False,),
) -> Iterator[Run]:
    """Compile `top_candidates` for 1 … `most_requests` requests.

    Args:
        have_temperatures: with temperatures, without, or both.
        have_padding: rows of logits as vLLM's head leaves them, which it pads to a multiple of 64 tokens, without, or both.
    """
    lengths = {-(-vocabulary // _HEAD_ROWS) * _HEAD_ROWS if is_padded else vocabulary for is_padded in have_padding}

    def run_of(num_splits: int, length: int, has_temperature: bool) -> Run:
        def run() -> None:
            logits = torch.zeros((1, num_depths, length), dtype=dtype, device=device)[..., :vocabulary]
            temperature = torch.ones(1, device=device) if has_temperature else None
            log_probs = torch.empty((1, num_depths, num_candidates), device=device)
            ids = torch.empty(log_probs.shape, dtype=torch.int32, device=device)
            top_candidates.launch(logits, temperature, log_probs, ids, num_splits=num_splits)

        return run

    numbers = {top_candidates.choose_splits(requests * num_depths, vocabulary) for requests in range(1, most_requests + 1)}
    splits = {top_candidates.kernels_for(number, vocabulary): number for number in numbers}
    yield from itertools.starmap(run_of, itertools.product(splits.values(), sorted(lengths), have_temperatures))


def build_run(num_depths: int, num_candidates: int, num_slots: int, device: torch.device, num_predecessors: int = 0) -> Run:
    """Compile `tree_build`.

    Args:
        num_predecessors: P, for candidates that depend on the one before; 0: they don't.
    """

    def run() -> None:
        shape = (1, num_depths, *[num_predecessors] * bool(num_predecessors), num_candidates)
        log_probs, ids = torch.zeros(shape, device=device), torch.zeros(shape, dtype=torch.int32, device=device)
        budgets = torch.zeros(1, dtype=torch.int64, device=device)
        trees = tree_build.allocate(1, num_slots, device)
        tree_build.launch(log_probs, ids, budgets, trees, candidates=ids if num_predecessors else None)

    return run
