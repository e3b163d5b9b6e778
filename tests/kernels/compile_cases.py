"""Every kernel compiled for sm_90 through its own launcher, on a machine that needs no GPU: see test_compiled.py.

A driver that knows its target only stands in for CUDA's, and each launch stops where the kernel would be handed to the device.
So what is compiled has the types, sizes and alignments that launchers give it.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from honed.attach.trees.draft_candidates import DraftCandidates
from honed.attach.trees.grow import grow
from honed.kernels.cache import compact_kv
from honed.kernels.cache.compact_kv import KvPlanes
from honed.kernels.capture import context_features
from honed.kernels.recurrent import tree_conv, tree_delta_rule
from honed.kernels.training import block_loss_goal, block_loss_labels
from honed.kernels.trees import reference, top_candidates, tree_attention, tree_build, warm_up
from honed.kernels.trees.tree_attention_plan import Device, choose_plan
from honed.kernels.verify import verify_chain, walk_tree
from honed.kernels.verify.verify_chain import ChainVerdict

HALF = torch.bfloat16
WIDE = "ld.global.v4.b32"
"""16 bytes a thread."""


class Target:
    """What the compiler asks a driver for."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The kernels that were compiled, in the order of their launches."""
    kernels: list[Any] = []
    run = triton.JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))

    monkeypatch.setattr(triton.JITFunction, "run", compile_only)
    driver.set_active(Target())
    return kernels


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_context_features(compiled: list[Any]) -> None:
    # Annotations of its parameters that Triton doesn't know kept it from compiling at all; the interpreter doesn't mind them.
    states, rows = torch.zeros(9, 2560, dtype=HALF), torch.zeros(5, dtype=torch.int64)
    context_features.launch(states, rows, torch.zeros(2560, dtype=HALF), 1e-6, HALF)
    assert len(compiled) == 1


@pytest.mark.parametrize("max_nodes", [32, 60, 256])
def test_tree_build(compiled: list[Any], max_nodes: int) -> None:
    log_probs, ids = torch.zeros(2, 15, 8), torch.zeros(2, 15, 8, dtype=torch.int32)
    trees = tree_build.allocate(2, max_nodes, "cpu")
    tree_build.launch(log_probs, ids, trees.num_nodes, trees)
    wide = ids[:, :, None].expand(2, 15, 16, 8).contiguous()
    tree_build.launch(wide.float(), wide, trees.num_nodes, trees, wide)
    assert [one.metadata.num_warps for one in compiled] == [1, 1]  # nothing waits for another warp


@pytest.mark.parametrize(("window", "is_float_out"), [(0, False), (128, True)])
def test_after_its_runs_attention_of_trees_compiles_nothing(compiled: list[Any], window: int, is_float_out: bool) -> None:
    slots, tokens, page = 7, 8192, 16
    both = torch.zeros(3, page, 8, 2 * 128, dtype=HALF)
    cache = both[..., :128], both[..., 128:]
    for run in warm_up.attention_runs(
        *cache, num_heads=32, num_slots=slots, most_requests=24, most_tokens=tokens, window=window, is_float_out=is_float_out
    ):
        run()
    known = {kernel.hash for kernel in compiled}
    assert 2 <= len(known) <= 16
    for requests in (1, 2, 3, 7, 16, 24):
        for rows in (2, 3, 8):
            count = requests * rows
            # As in an engine: parts of one projection of padded rows, and rows of a wider output.
            q, k, v = torch.zeros(count + 3, 48, 128, dtype=HALF)[:count].split([32, 8, 8], 1)
            lengths, table = (
                torch.zeros(requests, dtype=torch.int32),
                torch.zeros(requests, tokens // page + 1, dtype=torch.int32),
            )
            firsts = torch.zeros(count, dtype=torch.int32) if window else None
            prefix = reference.PagedPrefix(*cache, table, lengths, firsts=firsts)
            plan = choose_plan(requests, 8, 4, rows, 128, window or table.shape[1] * page, 2, 2, Device())
            masks, starts = torch.zeros(requests, slots + 1, 1, dtype=torch.int32), torch.zeros(requests + 1, dtype=torch.int32)
            out = torch.empty(count + 3, 32, 128, dtype=torch.float32 if is_float_out else HALF)[:count]
            lse = torch.empty(q.shape[:2])
            tree_attention.launch(q, k, v, starts, masks, rows, 0.1, prefix, plan.num_splits, out, lse, plan)
    assert {kernel.hash for kernel in compiled} == known


@pytest.mark.parametrize(("vocabulary", "row"), [(151_936, 151_936), (32_003, 32_003), (32_003, 32_064)])
def test_after_its_runs_nothing_of_a_trees_growth_is_compiled(compiled: list[Any], vocabulary: int, row: int) -> None:
    of_v2 = SimpleNamespace(num_speculative_steps=7, max_num_reqs=64, device="cpu", vocab_size=vocabulary, dtype=HALF)
    for run in DraftCandidates(of_v2).kernels(15):
        run()
    known = {kernel.hash for kernel in compiled}
    assert 2 <= len(known) <= 16
    for requests in (1, 2, 5, 16, 33, 64):
        logits, ids = torch.zeros(requests, 7, row, dtype=HALF)[..., :vocabulary], ints(requests, 7, 8)
        top_candidates.launch(logits, torch.ones(requests), torch.zeros(ids.shape), ids)
        trees = tree_build.allocate(requests, 15, "cpu")
        tree_build.launch(torch.zeros(ids.shape), ids, torch.full((requests,), 15), trees)
    assert {kernel.hash for kernel in compiled} == known


def test_after_their_runs_trees_of_any_size_compile_nothing(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler asks for another number of nodes in each step."""
    slots, depth, vocabulary, most_requests, tokens = 31, 7, 32_000, 2, 4096
    cpu, cache = torch.device("cpu"), torch.zeros(3, 16, 2, 64, dtype=HALF)
    gates, states = torch.zeros(99, 4), torch.zeros(3, 4, 64, 64)

    def top(logits: torch.Tensor, count: int, temperature: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        found = torch.zeros(*logits.shape[:2], count), ints(*logits.shape[:2], count)
        top_candidates.launch(logits, temperature, *found)
        return found

    def build(log_probs: Any, ids: Any, budgets: Any, candidates: Any, trees: reference.DraftTrees) -> None:
        tree_build.launch(log_probs, ids, budgets, trees, candidates)

    def delta_rule(rows: int, starts: torch.Tensor, masks: torch.Tensor) -> None:
        k, v = torch.zeros(rows, 2, 64, dtype=HALF), torch.zeros(rows, 4, 64, dtype=HALF)
        given = k, k, v, gates[:rows], gates[:rows], states, starts[:-1].long(), starts, masks
        tree_delta_rule.launch(*given, slots + 1)

    monkeypatch.setattr(reference, "top_candidates", top)
    monkeypatch.setattr(tree_build, "build_on_host", build)
    sizes = {"num_heads": 2, "num_slots": slots, "most_requests": most_requests, "most_tokens": tokens}
    for run in (
        *warm_up.candidate_runs(depth, 8, vocabulary, HALF, cpu, most_requests, [False, True]),
        warm_up.build_run(depth, 8, slots, cpu),
        functools.partial(walk_tree.compile_walk, slots, depth, cpu),
        *warm_up.attention_runs(cache, cache, **sizes),
    ):
        run()
    delta_rule(2, ints(2), ints(1, slots + 1, 1))
    known = {kernel.hash for kernel in compiled}
    for nodes in (3, 12, 20):
        for requests in (1, 2):
            temperature = torch.ones(requests) if nodes > 3 else None
            trees = grow(torch.zeros(requests, depth, vocabulary, dtype=HALF), temperature, nodes, slots)
            rows, starts = requests * (nodes + 1), ints(requests + 1)
            q = torch.zeros(rows, 2, 64, dtype=HALF)
            prefix = reference.PagedPrefix(cache, cache, ints(requests, tokens // 16), ints(requests))
            plan = choose_plan(requests, 2, 1, nodes + 1, 64, tokens, 2, 2, Device())
            given = q, q, q, starts, trees.row_masks, nodes + 1, 0.1, prefix, plan.num_splits
            tree_attention.launch(*given, torch.empty_like(q), torch.empty(rows, 2), plan)
            drawn = torch.zeros(requests, trees.tokens.shape[1] + 1).long()
            walk_tree.launch(trees.tokens, trees.parents, torch.zeros(requests).long(), drawn, depth)
            delta_rule(rows, starts, trees.row_masks)
    assert {kernel.hash for kernel in compiled} == known


@pytest.mark.parametrize("slots", [7, 15, 31, 63])
def test_after_its_run_no_walk_is_compiled(compiled: list[Any], slots: int) -> None:
    walk_tree.compile_walk(slots, 7, torch.device("cpu"))
    known = {kernel.hash for kernel in compiled}
    assert len(known) == 1
    for requests in (1, 2, 16, 33):
        nodes = torch.zeros(requests, slots, dtype=torch.int32)
        walk_tree.launch(nodes, nodes, torch.zeros(requests).long(), torch.zeros(requests, slots + 1).long(), 7)
    assert {kernel.hash for kernel in compiled} == known
    assert compiled[0].metadata.num_warps == 1


@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_top_candidates(compiled: list[Any], dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 3, 151_936, dtype=dtype)
    log_probs, ids = torch.zeros(2, 3, 8), torch.zeros(2, 3, 8, dtype=torch.int32)
    top_candidates.launch(logits, torch.ones(2), log_probs, ids)
    assert len(compiled) == 2
    assert "ld.global.v4" in compiled[0].asm["ptx"]  # 16 bytes a thread


@pytest.mark.parametrize(
    ("batch", "rows", "head_size", "dtype", "cache_dtype", "page", "is_wide", "launches"),
    [
        (64, 32, 128, HALF, HALF, 16, True, 1),
        (1, 4, 128, HALF, HALF, 16, False, 2),
        (1, 8, 64, torch.float16, torch.float8_e4m3fn, 128, False, 2),
        (64, 16, 256, HALF, HALF, 16, True, 1),
    ],
)
def test_tree_attention(
    compiled: list[Any],
    batch: int,
    rows: int,
    head_size: int,
    dtype: torch.dtype,
    cache_dtype: torch.dtype,
    page: int,
    is_wide: bool,
    launches: int,
) -> None:
    q, k = torch.zeros(rows, 32, head_size, dtype=dtype), torch.zeros(rows, 8, head_size, dtype=dtype)
    starts = torch.zeros(batch + 1, dtype=torch.int32)
    masks = torch.zeros(batch, rows, 2, dtype=torch.int32)
    cache = torch.zeros(1, page, 8, head_size, dtype=cache_dtype)
    factor = torch.ones(1) if cache_dtype != dtype else None
    prefix = reference.PagedPrefix(cache, cache, masks[:, 0], starts[1:], factor, factor)
    plan = choose_plan(batch, 8, 4, rows, head_size, 4096, 2, cache.element_size(), Device())
    lse = torch.zeros(q.shape[:2])
    tree_attention.launch(q, k, k, starts, masks, rows, 0.1, prefix, 4096, torch.empty_like(q), lse, plan)
    assert len(compiled) == launches
    for kernel in compiled:
        assert kernel.metadata.shared <= 232_448
        assert "cp.async" in kernel.asm["ptx"]
    assert ("wgmma" in compiled[0].asm["ptx"]) == is_wide


@pytest.mark.parametrize(("batch", "launches"), [(1, 2), (64, 1)])
def test_tree_attention_in_a_window(compiled: list[Any], batch: int, launches: int) -> None:
    q, k = torch.zeros(17, 32, 64, dtype=HALF), torch.zeros(17, 8, 64, dtype=HALF)
    starts, masks = torch.zeros(batch + 1, dtype=torch.int32), torch.zeros(batch, 17, 1, dtype=torch.int32)
    cache, lse = torch.zeros(1, 16, 8, 64, dtype=HALF), torch.zeros(q.shape[:2])
    prefix = reference.PagedPrefix(cache, cache, masks[:, 0], starts[1:], firsts=torch.zeros(17, dtype=torch.int32))
    tree_attention.launch(q, k, k, starts, masks, 17, 0.1, prefix, 4096, torch.empty_like(q), lse)
    assert len(compiled) == launches


def test_tree_attention_after_another_kernels_pass(compiled: list[Any]) -> None:
    q, starts = torch.zeros(8, 4, 64, dtype=HALF), torch.zeros(3, dtype=torch.int32)
    masks, lse = torch.zeros(2, 4, 1, dtype=torch.int32), torch.zeros(8, 4)
    attended = reference.AttendedPrefix(q, torch.zeros(4, 8).T)
    tree_attention.launch(q, q, q, starts, masks, 4, 0.1, attended, 0, torch.empty_like(q), lse)
    assert len(compiled) == 1


@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_tree_delta_rule(compiled: list[Any], dtype: torch.dtype, rows: int) -> None:
    k, v = torch.zeros(rows, 16, 128, dtype=dtype), torch.zeros(rows, 32, 128, dtype=dtype)
    gates, states = torch.zeros(rows, 32), torch.zeros(2, 32, 128, 128, dtype=dtype)
    starts, masks = torch.zeros(2, dtype=torch.int32), torch.zeros(1, rows, rows // 32 + 1, dtype=torch.int32)
    _, updates = tree_delta_rule.launch(k, k, v, gates, gates, states, starts[:1], starts, masks, rows)
    path = torch.zeros(1, 15, dtype=torch.int64)
    tree_delta_rule.launch_commit(states, starts[:1], starts[:1], updates, starts, path, path[0, :1])
    tree_conv.launch(k.flatten(1), path, torch.zeros(2048, 15, dtype=dtype))
    assert len(compiled) == 3
    assert all(kernel.metadata.shared <= 101_376 for kernel in compiled)  # of small cards, too


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("dtype", [HALF, torch.float32])
def test_block_loss_of_labels(compiled: list[Any], dtype: torch.dtype, with_gradient: bool) -> None:
    hidden, head, labels = torch.zeros(4, 2560, dtype=dtype), torch.zeros(9000, 2560, dtype=dtype), torch.zeros(4).long()
    block_loss_labels.fold_labels(hidden, head, labels, with_gradient, is_triton=True)
    assert len(compiled) == 2  # a whole tile of the vocabulary, and the rest


def test_block_loss_of_goals(compiled: list[Any]) -> None:
    hidden, head = torch.zeros(4, 64, dtype=HALF), torch.zeros(9000, 64, dtype=HALF)
    block_loss_goal.fold_goal(hidden, head, hidden, head, True, is_triton=True)
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("num", "depth", "vocab", "full_q", "is_ragged"),
    [(2, 15, 151_936, False, True), (2, 3, 151_936, True, False), (1, 1, 1, True, True)],
)
def test_verify_chain(compiled: list[Any], num: int, depth: int, vocab: int, full_q: bool, is_ragged: bool) -> None:
    logits = torch.zeros(num, depth + 1, vocab, dtype=HALF)
    verify_chain.launch(
        logits.flatten(0, 1) if is_ragged else logits,
        ints(num, depth, dtype=torch.int64),
        ints(num),
        torch.ones(num),
        ints(num, dtype=torch.int64),
        ints(num, dtype=torch.int64),
        ints(num) if is_ragged else None,
        logits[:, :depth] if full_q else None,
        None,
        ChainVerdict(ints(num), ints(num, depth + 1), ints(num)),
    )
    assert len(compiled) == (3 if full_q else 2)
    for kernel in compiled:
        assert vocab == 1 or WIDE in kernel.asm["ptx"]


@pytest.mark.parametrize("layout", ["NHD", "HND", "a byte"])
def test_compact_kv(compiled: list[Any], layout: str) -> None:
    shapes = {"NHD": (8, 16, 8, 128), "HND": (8, 8, 16, 128), "a byte": (8, 1, 1, 1)}
    plane = torch.zeros(shapes[layout], dtype=HALF if layout != "a byte" else torch.uint8)
    planes = KvPlanes.of([plane.transpose(1, 2) if layout == "HND" else plane] * 2)
    compact_kv.launch(planes.tensors, planes.table, planes.pointers, ints(1, 9, dtype=torch.int64), ints(1, 4), ints(1))
    ptx = compiled[0].asm["ptx"]
    if layout != "a byte":
        # Every load of a group comes before its barrier, every store after it.
        read, written = ptx.split("bar.sync")
        assert (read.count(WIDE), read.count("st.global"), written.count("st.global.v4")) == (8, 0, 8)
