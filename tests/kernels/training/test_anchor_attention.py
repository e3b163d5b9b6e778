"""Packed anchor blocks: each sees its interval of the context and itself, by every way of computing it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import FlexKernelOptions, flex_attention

from honed.kernels.training import anchor_attention as op
from honed.kernels.training import reference
from honed.kernels.training.anchor_attention import TILE, Visible, block_mask, by_flex

SHAPES = [
    # N, B, Q, G, D, T
    (1, 1, 1, 1, 8, 1),
    (5, 4, 4, 2, 8, 40),
    (3, 16, 6, 2, 16, 130),
    (9, 7, 2, 1, 16, 300),
    (20, 16, 2, 2, 8, 257),
]

KINDS = [{}, {"is_causal": True}, {"window": 16}, {"window": 40, "is_causal": True}]
"""Both ways or causal, without a window, with one as long as the longest block, and with a longer one."""


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> list[Any]:
    """Random q, own K and V, context K and V, begins, ends: some blocks see all, one nothing, the others an interval."""
    n, b, q, g, d, t = shape
    generator = torch.Generator().manual_seed(n * 100 + b)
    sizes = ((n, b, q, d), (n, b, g, d), (n, b, g, d), (t, g, d), (t, g, d))
    tensors = [torch.randn(size, generator=generator, dtype=torch.float64).to(device, dtype) for size in sizes]
    ends = torch.randint(t + 1, (n,), generator=generator)
    begins = (ends - torch.randint(t + 1, (n,), generator=generator)).clamp(min=0)
    begins[0], ends[0] = 0, t
    if n > 1:
        begins[1] = ends[1]
    return [*tensors, begins.to(device), ends.to(device)]


def anchor_attention(*arguments: Any, **kind: Any) -> torch.Tensor:
    """The op, with begins and ends as the twin takes them."""
    return op.anchor_attention(*arguments[:5], visible=Visible(*arguments[5:], **kind))


def query_by_query(arguments: list[Any], window: int | None = None, is_causal: bool = False) -> torch.Tensor:
    """PyTorch's attention on each query's own keys."""
    q, own_k, own_v, context_k, context_v, begins, ends = arguments
    out = torch.empty_like(q)
    for n, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        for i in range(q.shape[1]):
            low = begin if window is None else max(begin, end + i - window + 1)
            seen = i + 1 if is_causal else q.shape[1]
            pairs = ((context_k, own_k), (context_v, own_v))
            k, v = (torch.cat((context[low:end], own[n, :seen])).transpose(0, 1) for context, own in pairs)
            out[n, i] = F.scaled_dot_product_attention(q[n, i, :, None], k, v, enable_gqa=True)[:, 0]
    return out


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_twin_is_attention_query_by_query(shape: tuple[int, ...], kind: dict[str, Any]) -> None:
    arguments = inputs(shape)
    made = reference.anchor_attention(*arguments, scale=shape[4] ** -0.5, **kind)
    torch.testing.assert_close(made, query_by_query(arguments, **kind), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [1, 20, 10_000])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_in_parts_it_is_the_same_with_the_same_gradients(
    shape: tuple[int, ...], kind: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "PART_QUERIES", size)
    arguments = inputs(shape, torch.float64)
    trained = [tensor.requires_grad_() for tensor in arguments[:5]]
    made = anchor_attention(*arguments, **kind)
    wanted = reference.anchor_attention(*arguments, scale=shape[4] ** -0.5, **kind)
    torch.testing.assert_close(made, wanted)
    weights = torch.randn(made.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(torch.autograd.grad(made, trained, weights), torch.autograd.grad(wanted, trained, weights))


def test_gradients_by_finite_differences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "PART_QUERIES", 4)
    arguments = inputs((3, 2, 2, 1, 4, 5), torch.float64)
    trained = [tensor.requires_grad_() for tensor in arguments[:5]]
    assert torch.autograd.gradcheck(lambda *tensors: anchor_attention(*tensors, *arguments[5:]), trained)


def test_no_blocks_and_no_context() -> None:
    arguments = inputs((4, 3, 2, 1, 8, 10))
    none = [x[:0] for x in arguments[:3]] + arguments[3:5] + [x[:0] for x in arguments[5:]]
    assert anchor_attention(*none).shape == (0, 3, 2, 8)
    alone = arguments[:3] + [x[:0] for x in arguments[3:5]] + [torch.zeros(4, dtype=torch.int64)] * 2
    torch.testing.assert_close(anchor_attention(*alone), query_by_query(alone), rtol=1e-4, atol=1e-5)


def test_blocks_that_see_nothing_before_them_see_themselves() -> None:
    arguments = inputs((4, 3, 2, 1, 8, 10))
    arguments[5] = torch.tensor([0, 10, 7, 3])
    arguments[6] = torch.tensor([0, 10, 2, 3])  # block 2 begins after its end
    out = anchor_attention(*arguments)
    arguments[6] = arguments[5]
    assert out.isfinite().all()
    torch.testing.assert_close(out, query_by_query(arguments), rtol=1e-4, atol=1e-5)


def test_rows_outside_the_interval_do_not_count() -> None:
    arguments = inputs((3, 4, 2, 1, 8, 30))
    arguments[5], arguments[6] = torch.tensor([5, 5, 9]), torch.tensor([20, 12, 20])
    before = anchor_attention(*arguments)
    for context in arguments[3:5]:
        context[:5] = 100.0
        context[20:] = -100.0
    assert torch.equal(anchor_attention(*arguments), before)


KIB = 1 << 10
T4, RTX, A100, H200 = 64 * KIB, 99 * KIB, 163 * KIB, 227 * KIB
"""Shared memory of a block of threads."""


@pytest.mark.parametrize(
    ("head_size", "dtype", "shared_bytes", "tile"),
    [
        (256, torch.bfloat16, RTX, 32),
        (128, torch.bfloat16, RTX, 64),
        (256, torch.float32, RTX, 16),
        (128, torch.float32, RTX, 32),
        (128, torch.float32, T4, 16),
    ],
)
def test_tiles_are_small_where_a_card_has_little_shared_memory(
    head_size: int, dtype: torch.dtype, shared_bytes: int, tile: int
) -> None:
    """PyTorch's own choice is too large there, and ends the training: MTP heads have 256 values."""
    options = op.flex_options(head_size, dtype.itemsize, shared_bytes)
    assert options is not None
    assert {value for name, value in options.items() if "BLOCK" in name} == {tile}
    assert {name.removeprefix("fwd_").removeprefix("bwd_") for name in options} <= FlexKernelOptions.__annotations__.keys()
    assert TILE % tile == 0


@pytest.mark.parametrize(
    ("head_size", "dtype", "shared_bytes", "options"),
    [
        (256, torch.bfloat16, A100, {}),
        (256, torch.float32, H200, {}),
        (64, torch.bfloat16, RTX, {}),
        (256, torch.float32, T4, None),
        (80, torch.bfloat16, H200, None),
    ],
)
def test_other_tiles_are_pytorch_s_own_and_what_fits_nowhere_is_computed_in_parts(
    head_size: int, dtype: torch.dtype, shared_bytes: int, options: dict[str, int] | None
) -> None:
    assert op.flex_options(head_size, dtype.itemsize, shared_bytes) == options


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[1] >= 4], ids=str)
def test_the_last_tokens_of_a_block_alone_see_what_they_see_among_all(
    shape: tuple[int, ...], kind: dict[str, Any], queries: int
) -> None:
    arguments = inputs(shape)
    some = [arguments[0][:, -queries:], *arguments[1:]]
    wanted = query_by_query(arguments, **kind)[:, -queries:]
    scale = shape[4] ** -0.5
    for made in (
        anchor_attention(*some, **kind),
        by_flex(*some[:5], visible=Visible(*some[5:], **kind), scale=scale),
        reference.anchor_attention(*some, scale=scale, **kind),
    ):
        torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_flex_attention_with_our_mask_is_the_twin(shape: tuple[int, ...], kind: dict[str, Any]) -> None:
    arguments = inputs(shape)
    made = by_flex(*arguments[:5], visible=Visible(*arguments[5:], **kind), scale=0.3)
    torch.testing.assert_close(made, reference.anchor_attention(*arguments, scale=0.3, **kind), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [{}, {"is_causal": True}, {"window": 200}, {"window": 300, "is_causal": True}], ids=str)
@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("are_all_asking", [True, False])
@pytest.mark.parametrize(("n", "b", "t"), [(1, 1, 0), (3, 16, 130), (40, 16, 700), (33, 7, 256), (9, 10, 511), (3, 200, 300)])
def test_the_tiles_of_the_mask_are_those_that_something_is_seen_in(
    n: int, b: int, t: int, are_all_asking: bool, is_sorted: bool, kind: dict[str, Any]
) -> None:
    """FlexAttention skips tiles that the mask leaves out, and doesn't look into those that it calls full."""
    begins, ends = inputs((n, b, 1, 1, 8, t))[5:]
    if is_sorted:
        order = ends.argsort()
        begins, ends = begins[order], ends[order]
    rows = t + -t % TILE
    queries = b if are_all_asking else (b + 2) // 3
    mask = block_mask(Visible(begins, ends, **kind), queries, b, rows)
    query, row = torch.arange(n * queries)[:, None], torch.arange(rows + n * b)
    is_seen = mask.mask_mod(torch.tensor(0), torch.tensor(0), query, row)
    for q in range(mask.kv_num_blocks.shape[-1]):
        partial = mask.kv_indices[0, 0, q, : mask.kv_num_blocks[0, 0, q]].tolist()
        full = mask.full_kv_indices[0, 0, q, : mask.full_kv_num_blocks[0, 0, q]].tolist()
        assert not set(partial) & set(full)
        tiles = is_seen[q * TILE : (q + 1) * TILE].split(TILE, dim=1)
        for index, tile in enumerate(tiles):
            if index in full:
                assert tile.all()
            elif index not in partial:
                assert not tile.any()


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_mask_changes_nothing_in_place(kind: dict[str, Any]) -> None:
    """Inductor makes GPU code of pure functions only: a window's `&=` kept drafters that have one from training there."""
    begins, ends = inputs((5, 16, 1, 1, 8, 200))[5:]
    number = torch.zeros(1, dtype=torch.long)
    traced = make_fx(block_mask(Visible(begins, ends, **kind), 16, 16, 256).mask_mod)(*(4 * [number]))
    calls = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert len(calls) > 5
    assert not [call for call in calls if call._schema.is_mutable]


def test_for_sorted_anchors_the_mask_leaves_out_what_can_be_left_out() -> None:
    """Anchors over 4,096 rows of one sample: tiles before the last anchor of a tile of queries, and the own one."""
    anchors = torch.linspace(100, 4000, 64).long()
    begins = torch.zeros_like(anchors)
    mask = block_mask(Visible(begins, anchors), 16, 16, 4096)
    made = (mask.kv_num_blocks + mask.full_kv_num_blocks)[0, 0]
    last_of_tile = anchors.view(-1, 8)[:, -1]
    assert made.tolist() == ((last_of_tile + TILE - 1) // TILE + 1).tolist()
    windowed = block_mask(Visible(begins, anchors, window=512), 16, 16, 4096)
    first_row = (anchors.view(-1, 8)[:, 0] + 1 - 512).clamp(min=0)
    assert (windowed.kv_num_blocks + windowed.full_kv_num_blocks)[0, 0].tolist() == (made - first_row // TILE).tolist()
    assert all(earlier <= later for earlier, later in pairwise(mask.full_kv_num_blocks[0, 0].tolist()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-2), (torch.bfloat16, 5e-2)])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("shape", [(5, 16, 4, 2, 64, 40), (33, 10, 8, 2, 128, 700)], ids=str)
def test_on_a_gpu_values_and_gradients_are_the_twins(
    shape: tuple[int, ...], kind: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    arguments = inputs(shape, dtype, "cuda")
    trained = [tensor.requires_grad_() for tensor in arguments[:5]]
    wide = [tensor.detach().double().requires_grad_() for tensor in arguments[:5]]
    made = anchor_attention(*arguments, **kind)
    wanted = reference.anchor_attention(*wide, *arguments[5:], scale=shape[4] ** -0.5, **kind)
    torch.testing.assert_close(made.double(), wanted, rtol=tolerance, atol=tolerance)
    weights = torch.randn_like(made)
    gradients = torch.autograd.grad(made, trained, weights)
    for found, right in zip(gradients, torch.autograd.grad(wanted, wide, weights.double()), strict=True):
        torch.testing.assert_close(found.double(), right, rtol=tolerance, atol=tolerance * float(right.abs().max()))


def test_units_of_any_size_are_served_by_a_few_kernels() -> None:
    """As training and judging divide their work on a GPU. Beyond PyTorch's limit nothing would be compiled, without a word."""
    config, counter = torch._dynamo.config, CompileCounter()
    attend = torch.compile(flex_attention, backend=counter)
    sizes = [(1, 256), (2, 256), (4, 256), (16, 256), (32, 256), (9, 300), (13, 500), (1, 700), (20, 1000), (5, 90), (32, 2000)]
    torch._dynamo.reset()
    with config.patch(recompile_limit=config.recompile_limit, fail_on_recompile_limit_hit=True):
        op.allow_recompiles()
        for _ in range(2):
            seen = counter.frame_count
            for is_training in (False, True):
                for blocks, rows in sizes:
                    *tensors, begins, ends = inputs((blocks, 16, 4, 2, 16, rows))
                    with torch.set_grad_enabled(is_training):
                        by_flex(*tensors, visible=Visible(begins, ends), scale=0.25, attend=attend)
    torch._dynamo.reset()
    assert seen == counter.frame_count <= 4


@pytest.mark.parametrize("index", range(7))
def test_shapes_that_do_not_fit_are_refused(index: int) -> None:
    arguments = inputs((4, 3, 2, 1, 8, 10))
    arguments[index] = arguments[index][:-1]
    if index in (3, 4):
        arguments[index] = arguments[index][..., :-1]
    with pytest.raises(ValueError, match=r"don't fit|must both be"):
        anchor_attention(*arguments)


def test_a_window_shorter_than_a_block_is_refused() -> None:
    arguments = inputs((4, 3, 2, 1, 8, 10))
    with pytest.raises(ValueError, match="shorter than a block of 3"):
        anchor_attention(*arguments, window=2)
    with pytest.raises(ValueError, match="at least 1"):
        Visible(*arguments[5:], window=0)


@pytest.mark.parametrize("size", [1, 8, 1000])
def test_parts_hold_every_block_once_with_all_that_it_sees(size: int) -> None:
    begins, ends = (x.tolist() for x in inputs((50, 1, 1, 1, 1, 90))[5:])
    parts = list(op.parts_of(begins, ends, size))
    assert sorted(i for blocks, _ in parts for i in blocks) == list(range(50))
    for blocks, rows in parts:
        assert all(rows.start <= begins[i] and ends[i] <= rows.stop for i in blocks if begins[i] < ends[i])
        assert len(blocks) <= size


def test_packed_samples_are_parts_of_their_own() -> None:
    begins, ends = [0, 100, 0, 250, 100], [40, 170, 90, 300, 250]
    assert list(op.parts_of(begins, ends, 100)) == [
        ([0, 2], slice(0, 90)),
        ([1, 4], slice(100, 250)),
        ([3], slice(250, 300)),
    ]


def test_traced_it_is_the_twin() -> None:
    """Parts depend on values; what is compiled takes the whole instead."""
    arguments = inputs((5, 4, 4, 2, 8, 40))
    for kind in KINDS:
        traced = torch.compile(anchor_attention, backend="eager", fullgraph=True)(*arguments, **kind)
        torch.testing.assert_close(traced, anchor_attention(*arguments, **kind))
