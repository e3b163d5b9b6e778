"""Attention that tree rows can't have, refused before anything is written; and what a layer asks of the device in a step."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from honed.attach.trees.tree_layers import TreeLayers
from honed.attach.trees.tree_step import TreeStep, tree_step
from honed.kernels.trees import reference, tree_attention

HEADS, KV_HEADS, SIZE, PAGE, ROOM = 4, 2, 16, 8, 6
COUNTS = [3, 6]
NUM_ROWS, PADDED = 11, 16


class Attention:
    """As vLLM's, of a backend that honed knows."""

    head_size = 64

    def __init__(self, *, writes_cache: bool = False, backend: str = "TRITON_ATTN", **impl: Any) -> None:
        self.attn_backend = SimpleNamespace(get_name=lambda: backend, forward_includes_kv_cache_update=writes_cache)
        self.impl = SimpleNamespace(do_kv_cache_update=lambda *_: pytest.fail("something was written"), **impl)


@pytest.mark.fault("attention of trees by layers that attend otherwise")
@pytest.mark.parametrize(
    ("impl", "said"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "its cache is quantised"),
        ({"kv_cache_dtype": "int8_per_token_head"}, "its cache is quantised"),
        ({"chunk_lookback": 0, "sliding_window": (8191, 0)}, "its window is of aligned chunks"),
        ({"sliding_window": (7, 0)}, "its window of 8 tokens is shorter than a tree is deep"),
        ({"alibi_slopes": [1.0]}, "it has ALiBi"),
        ({"logits_soft_cap": 30.0}, "its scores are capped"),
        ({"kv_sharing_target_layer_name": "first"}, "its attention is of another kind"),
        ({"writes_cache": True}, "its attention writes the cache itself"),
    ],
)
def test_a_layer_that_tree_rows_cannot_have_is_refused(impl: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=said):
        TreeLayers({"layer": Attention(**impl)}, {"layer": 0}, lambda _: None, 31, None)


class OnDevice(torch.Tensor):
    """A tensor that says it is on a GPU."""

    is_cuda = True


class Attending(Attention):
    """A layer that keeps K and V of a token beside each other; its own attention marks all rows of the output."""

    num_heads, num_kv_heads, head_size = HEADS, KV_HEADS, SIZE

    def __init__(self, sinks: torch.Tensor | None = None, window: int = 0, backend: str = "TRITON_ATTN") -> None:
        super().__init__(scale=0.3, sinks=sinks, sliding_window=(window - 1, 0) if window else None, backend=backend)
        generator = torch.Generator().manual_seed(0)
        self.kv_cache = torch.randn(9, KV_HEADS, PAGE, 2 * SIZE, generator=generator)
        self.num_passes = 0
        self.impl.do_kv_cache_update, self.impl.forward = self.update, self.forward

    def update(self, _: Any, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        rows = cache.transpose(1, 2)
        rows[slots // PAGE, slots % PAGE] = torch.cat([keys, values], -1)

    def forward(self, *given: Any, **_: Any) -> None:
        self.num_passes += 1
        given[6].fill_(7.0)


Attending.__name__ = "Attention"


def step_of(first_rows: list[int]) -> TreeStep:
    """Two requests with trees of `COUNTS` nodes, whose prefixes are of 10 and 5 tokens."""
    log_probs = -torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1)).cumsum(-1)
    ids = torch.arange(24, dtype=torch.int32).view(2, 4, 3)
    trees = reference.tree_build(log_probs, ids, torch.tensor(COUNTS), ROOM)
    return tree_step(["a", "b"], [0, 1], first_rows, torch.tensor([10, 5]), COUNTS, trees)


def inputs() -> list[torch.Tensor]:
    """Query, key, value, as parts of one projection of padded rows."""
    rows = torch.randn(PADDED, HEADS + 2 * KV_HEADS, SIZE, generator=torch.Generator().manual_seed(2))
    return [part.as_subclass(OnDevice) for part in rows.split([HEADS, KV_HEADS, KV_HEADS], 1)]


def attend(layer: Any, layers: TreeLayers, step: TreeStep, given: list[torch.Tensor], num_tokens: int = NUM_ROWS) -> Any:
    layers.begin()
    layers.step = step
    table = torch.tensor([[3, 8, 1], [7, 2, 0]], dtype=torch.int32)
    metadata = SimpleNamespace(num_actual_tokens=num_tokens, block_table=table)
    output = torch.full((PADDED, HEADS, SIZE), 5.0)
    layer.impl.forward(layer, *given, layer.kv_cache, metadata, output)
    assert not layers.has_failed
    return output


def by_twin(*given: Any) -> None:
    *inputs, _, out, lse = given
    for place, made in zip((out, lse), reference.tree_attention(*inputs), strict=True):
        place.copy_(made)


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_rows_beside_each_other_attend_in_place_as_gathered_ones_do(
    has_sinks: bool, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "launch", by_twin)
    layer = Attending(torch.arange(float(HEADS)) if has_sinks else None, window)
    layers = TreeLayers({"layer": layer}, {"layer": 0}, lambda _: None, ROOM, None)
    layers.wrap()
    step, given = step_of([0, 4]), inputs()
    assert step.rows_at == slice(0, NUM_ROWS)
    in_place = attend(layer, layers, step, given)
    assert layer.num_passes == 0
    assert torch.equal(in_place, attend(layer, layers, dataclasses.replace(step, rows_at=step.rows), given))
    assert (in_place[NUM_ROWS:] == 5.0).all()
    assert (in_place[:NUM_ROWS] != 5.0).all()

    # Elsewhere in the step, with rows of others around them: those keep what vLLM made.
    moved = [torch.cat([part[NUM_ROWS:], part[:NUM_ROWS]]).as_subclass(OnDevice) for part in given]
    later = step_of([5, 9])
    assert later.rows_at == slice(5, PADDED)
    beside = attend(layer, layers, later, moved, PADDED)
    assert layer.num_passes == 1
    assert torch.equal(beside[5:], in_place[:NUM_ROWS])
    assert (beside[:5] == 7.0).all()


def test_rows_with_others_between_them_or_in_another_order_are_gathered() -> None:
    for first_rows in ([0, 5], [7, 0]):
        step = step_of(first_rows)
        assert step.rows_at is step.rows


class Counting(TorchDispatchMode):
    """Counts what is asked of the device: all operations that aren't views."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.asked[func.name()] += 1
        return func(*args, **kwargs or {})


def test_a_layer_of_a_step_of_trees_alone_asks_for_its_attention_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    launches = list[Any]()
    monkeypatch.setattr(tree_attention, "launch", lambda *given, **_: launches.append(given))
    held = {name: Attending() for name in ("first", "second", "third")}
    layers = TreeLayers(held, dict.fromkeys(held, 0), lambda _: None, ROOM, None)
    layers.wrap()
    step, given = step_of([0, 4]), inputs()
    attend(held["first"], layers, step, given)  # what a step does once is done
    table = torch.zeros((2, 3), dtype=torch.int32)
    output = torch.empty(PADDED, HEADS, SIZE)
    metadata = SimpleNamespace(num_actual_tokens=NUM_ROWS, block_table=table)
    layers.step = step
    held["second"].impl.forward(held["second"], *given, held["second"].kv_cache, metadata, output)
    with Counting() as counted:
        held["third"].impl.forward(held["third"], *given, held["third"].kv_cache, metadata, output)
    assert len(launches) == 3
    assert counted.asked == {}


class Noting(Attending):
    """A layer whose backend notes what it is given. A row's output follows from its query and all it is told of its request."""

    def __init__(self, backend: str = "FLASH_ATTN", sinks: torch.Tensor | None = None) -> None:
        super().__init__(sinks, backend=backend)
        self.given: list[tuple[int, Any]] = []

    def forward(self, *given: Any, **_: Any) -> None:
        query, metadata, output = given[1], given[5], given[6]
        self.given.append((len(query), metadata))
        starts = metadata.query_start_loc
        assert len(starts) - 1 == len(metadata.seq_lens) == len(metadata.block_table)
        assert starts[0] == 0
        assert starts[-1] == metadata.num_actual_tokens == len(metadata.slot_mapping)
        for request, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
            assert end - start <= metadata.max_query_len
            assert metadata.seq_lens[request] <= metadata.max_seq_len
            positions = torch.arange(start - end, 0) + metadata.seq_lens[request]
            told = positions + 100 * metadata.block_table[request].sum() + 10_000 * metadata.slot_mapping[start:end]
            output[start:end] = query[start:end].as_subclass(torch.Tensor) + told[:, None, None]


Noting.__name__ = "Attention"
OTHERS = [4, 1]
"""Rows of the requests beside those with trees: a prompt's chunk, and one without drafts."""


def mixed(sizes: list[int], **more: Any) -> SimpleNamespace:
    """FlashAttention's metadata of requests with so many rows; every number in it is another."""
    starts = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    count, rows = len(sizes), sum(sizes)
    return SimpleNamespace(
        num_actual_tokens=rows,
        max_query_len=max(sizes),
        query_start_loc=starts,
        max_seq_len=24,
        seq_lens=torch.tensor([14, 12, 21, 24][:count], dtype=torch.int32),
        block_table=torch.tensor([[3, 8, 1], [7, 2, 0], [4, 5, 6], [8, 1, 3]][:count], dtype=torch.int32),
        slot_mapping=torch.arange(100, 100 + rows),
        scheduler_metadata=torch.ones(4),
        **({"max_num_splits": 0, "causal": True, "mm_prefix_query_range_tensor": None, "max_dcp_context_kv_len": 0} | more),
    )


def wrapped(layer: Any, on_error: Any = pytest.fail) -> TreeLayers:
    layers = TreeLayers({"layer": layer}, {"layer": 0}, on_error, ROOM, None)
    layers.wrap()
    return layers


def attend_mixed(layer: Any, layers: TreeLayers, step: TreeStep, metadata: Any) -> torch.Tensor:
    layers.begin()
    layers.step = step
    output = torch.full((PADDED + 2, HEADS, SIZE), 5.0)
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(PADDED + 2, HEADS + 2 * KV_HEADS, SIZE, generator=generator).split([HEADS, KV_HEADS, KV_HEADS], 1)
    layer.impl.forward(layer, *(part.as_subclass(OnDevice) for part in rows), layer.kv_cache, metadata, output)
    return output


TREES = [count + 1 for count in COUNTS]


@pytest.mark.parametrize("has_sinks", [False, True])
def test_a_backend_is_not_asked_for_tree_rows_that_come_first(has_sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "launch", by_twin)
    found = {}
    for backend in ("TRITON_ATTN", "FLASH_ATTN"):
        layer = Noting(backend, torch.arange(float(HEADS)) if has_sinks else None)
        found[backend] = attend_mixed(layer, wrapped(layer), step_of([0, 4]), mixed(TREES + OTHERS)), layer.given
    (whole, of_all), (parted, of_others) = found["TRITON_ATTN"], found["FLASH_ATTN"]
    assert torch.equal(whole, parted)
    assert (parted[NUM_ROWS + sum(OTHERS) :] == 5.0).all()
    assert [rows for rows, _ in of_all] == [PADDED + 2]
    ((rows, metadata),) = of_others
    assert rows == PADDED + 2 - NUM_ROWS
    assert metadata.query_start_loc.tolist() == [0, 4, 5]
    assert metadata.scheduler_metadata is None


def test_what_the_backend_is_told_of_the_others_is_made_once_for_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree_attention, "launch", by_twin)
    layer = Noting()
    layers, step, metadata = wrapped(layer), step_of([0, 4]), mixed(TREES + OTHERS)
    attend_mixed(layer, layers, step, metadata)
    attend_mixed(layer, layers, step, metadata)
    attend_mixed(layer, layers, step, mixed(TREES + OTHERS))
    attend_mixed(layer, layers, step_of([0, 4]), metadata)
    first, again, of_other_group, next_step = (told for _, told in layer.given)
    assert first is again
    assert len({id(told) for told in (first, of_other_group, next_step)}) == 3
    assert metadata.num_actual_tokens == NUM_ROWS + sum(OTHERS), "vLLM's own was changed"


@pytest.mark.parametrize(
    ("first_rows", "sizes", "more"),
    [
        ([5, 9], OTHERS + TREES, {}),
        ([0, 5], [TREES[0], 1, TREES[1]], {}),
        ([0, 4], TREES + OTHERS, {"causal": False}),
        ([0, 4], TREES + OTHERS, {"causal": torch.ones(4, dtype=torch.int32)}),
        ([0, 4], TREES + OTHERS, {"mm_prefix_query_range_tensor": torch.zeros(16, 2)}),
        ([0, 4], TREES + OTHERS, {"max_dcp_context_kv_len": 8}),
        ([0, 4], TREES + OTHERS, {"of_a_later_release": [1]}),
    ],
)
def test_a_backend_is_given_all_rows_where_trees_are_elsewhere_or_more_is_told_of_rows(
    first_rows: list[int], sizes: list[int], more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tree_attention, "launch", by_twin)
    layer = Noting()
    index = [at for at, _ in enumerate(sizes) if sum(sizes[:at]) in first_rows]
    step = step_of(first_rows)
    step = dataclasses.replace(step, _counts=list(zip(index, COUNTS, strict=True)), batch_index=torch.tensor(index))
    metadata = mixed(sizes, **more)
    attend_mixed(layer, wrapped(layer), step, metadata)
    assert [(rows, told is metadata) for rows, told in layer.given] == [(PADDED + 2, True)]


def test_all_rows_are_the_backends_when_attention_of_trees_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(tree_attention, "launch", fails)
    layer, errors = Noting(), list[str]()
    layers = wrapped(layer, errors.append)
    attend_mixed(layer, layers, step_of([0, 4]), mixed(TREES + OTHERS))
    assert layers.has_failed
    assert errors == ["tree attention"]
    assert [rows for rows, _ in layer.given] == [PADDED + 2]


def flash_kernel(**given: Any) -> None:
    """FlashAttention's, for requests one after another; it marks rows that aren't those of a request."""
    q, starts, out = given["q"], given["cu_seqlens_q"].tolist(), given["out"]
    assert given["causal"] is True
    assert len(starts) - 1 == len(given["seqused_k"]) == len(given["block_table"])
    assert starts[-1] == len(q) == len(out)
    for request, (start, end) in enumerate(pairwise(starts)):
        pages, length = given["block_table"][request].long(), int(given["seqused_k"][request])
        assert end - start <= given["max_seqlen_q"]
        assert length <= given["max_seqlen_k"]
        keys, values = (given[name][pages].flatten(0, 1)[:length].transpose(0, 1) for name in ("k", "v"))  # [H_kv, L, E]
        rows = q[start:end].as_subclass(torch.Tensor).transpose(0, 1)
        may = torch.ones(end - start, length, dtype=torch.bool).tril(length - (end - start))
        attend = torch.nn.functional.scaled_dot_product_attention
        found = attend(rows, keys, values, may, scale=given["softmax_scale"], enable_gqa=True)
        out[start:end] = found.transpose(0, 1)


def test_vllms_flash_attention_gives_others_the_same_without_tree_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own code up to the kernel, which a CPU doesn't have."""
    flash = pytest.importorskip("vllm.v1.attention.backends.flash_attn")
    layer, found, sizes = Attending(), list[torch.Tensor](), list[int]()

    def kernel(**given: Any) -> None:
        sizes.append(len(given["q"]))
        flash_kernel(**given)

    monkeypatch.setattr(flash, "_FA4_DENSE_ATTENTION_KERNEL", kernel)
    monkeypatch.setattr(tree_attention, "launch", by_twin)
    impl = object.__new__(flash.FlashAttentionImpl)
    vars(impl).update(
        vllm_flash_attn_version=3,
        attn_type="decoder",
        head_size=SIZE,
        num_kv_heads=KV_HEADS,
        kv_cache_dtype="auto",
        supports_quant_query_input=False,
        sliding_window=(-1, -1),
        fa4_hd256=False,
        scale=0.3,
        alibi_slopes=None,
        logits_soft_cap=0,
        sinks=None,
        dcp_world_size=1,
        do_kv_cache_update=layer.update,
    )
    layer.impl, layer.attn_backend = impl, flash.FlashAttentionBackend
    layer._k_scale = layer._v_scale = torch.ones(1)
    layers = wrapped(layer)
    metadata = flash.FlashAttentionMetadata(**vars(mixed(TREES + OTHERS)))
    for is_first in (True, False):
        step = step_of([0, 4])
        monkeypatch.setitem(vars(step), "is_first", is_first)
        found.append(attend_mixed(layer, layers, step, metadata))
    assert sizes == [sum(OTHERS), NUM_ROWS + sum(OTHERS)]
    assert torch.equal(*found)
