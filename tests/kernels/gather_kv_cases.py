"""The Triton kernel of gather_kv against its plain twin, in a process of its own: see interpreting.py.

HONED_TEST_DEVICE says where: "cpu" (under Triton's interpreter) or "cuda".
"""

from __future__ import annotations

import os
from importlib import import_module

import pytest
import torch

from honed.kernels.cache import gather_kv as kernel
from honed.kernels.cache import reference
from honed.kernels.cache.reference import PagedPlane
from tests.kernels.quantised_cache import four_bits, four_bits_with_minimum, fp8, signed_hadamard

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")
ON_GPU = DEVICE == "cuda"
BLOCKS, BLOCK_SIZE = 30, 16


def rows_of(heads: int, head_size: int) -> torch.Tensor:
    return torch.randn(BLOCKS, BLOCK_SIZE, heads, head_size, generator=torch.Generator().manual_seed(heads + head_size))


def moved(plane: PagedPlane) -> PagedPlane:
    return PagedPlane(*(x.to(DEVICE) if isinstance(x, torch.Tensor) else x for x in plane))


def check(
    plane: PagedPlane,
    counts: tuple[int, ...] = (70, 0, 1, 33),
    starts: tuple[int, ...] = (5, 0, 16, 31),
    dtype: torch.dtype = torch.float32,
    max_rows: int = 100,
) -> torch.Tensor:
    """Launch the kernel itself, compare with the twin, return what the kernel made."""
    plane = moved(plane)
    packed = 2 if plane.data.dtype == torch.uint8 else 1
    blocks = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(1))[: len(counts) * 7]
    table = blocks.view(len(counts), 7).int().to(DEVICE)
    row_starts = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    shape = (sum(counts) + 2, plane.data.shape[2], plane.data.shape[3] * packed)
    made, wanted = (torch.full(shape, -7.0, dtype=dtype, device=DEVICE) for _ in range(2))
    first = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    kernel.launch(plane, table, first, row_starts, made, max_rows)
    reference.gather_kv(plane, table, first, row_starts, wanted, max_rows)
    assert (made[-2:] == -7.0).all()
    # A rotation is a sum in another order, and half precision may end a unit apart; the rest is one multiplication, exactly.
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}[dtype]
    is_exact = plane.unrotate is None and dtype == torch.float32
    relative, absolute = (0.0, 0.0) if is_exact else (tolerance, 1e-5)
    torch.testing.assert_close(made, wanted, rtol=relative, atol=absolute, equal_nan=True)
    return made


@pytest.mark.parametrize("head_size", [1, 20, 64, 96, 256, 576])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float_caches(dtype: torch.dtype, head_size: int) -> None:
    check(PagedPlane(rows_of(2, head_size).to(dtype)), dtype=dtype)


def test_no_requests_no_rows_no_blocks() -> None:
    plane = PagedPlane(rows_of(2, 16))
    check(plane, (0, 0), (0, 0))
    check(plane, (), ())
    check(plane, (4,), (0,), max_rows=0)


def test_requests_are_cut_to_the_rows_that_were_said() -> None:
    made = check(PagedPlane(rows_of(2, 16)), (70, 9), (0, 0), max_rows=40)
    assert (made[40:70] == -7.0).all()


def test_heads_before_slots() -> None:
    check(PagedPlane(rows_of(3, 64).transpose(1, 2).contiguous().transpose(1, 2)))


def test_keys_beside_values_in_one_tensor() -> None:
    check(PagedPlane(rows_of(2, 96)[..., 32:]))


@pytest.mark.parametrize("scale", [torch.tensor(0.25), torch.tensor([0.5, 0.125]), torch.rand(BLOCKS, BLOCK_SIZE, 2) + 0.1])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_caches(dtype: torch.dtype, scale: torch.Tensor) -> None:
    check(fp8(rows_of(2, 64), scale, dtype), dtype=torch.bfloat16)


@pytest.mark.parametrize("head_size", [2, 6, 64, 128])
def test_four_bits_with_a_hidden_zero_point(head_size: int) -> None:
    check(four_bits(rows_of(2, head_size)))


def test_four_bits_with_zero_points_of_their_own() -> None:
    check(four_bits_with_minimum(rows_of(2, 64)))


def test_four_bits_with_nothing_but_the_numbers() -> None:
    made = check(PagedPlane(four_bits(rows_of(2, 64)).data))
    assert made[:-2].unique().tolist() == list(range(16))


@pytest.mark.parametrize("head_size", [2, 16, 96, 128])
def test_four_bits_rotated(head_size: int) -> None:
    check(four_bits(rows_of(2, head_size), signed_hadamard(head_size)))


def test_four_bits_with_zero_points_of_their_own_rotated_by_any_matrix() -> None:
    turn = torch.linalg.qr(torch.randn(64, 64, generator=torch.Generator().manual_seed(4)))[0]
    check(four_bits_with_minimum(rows_of(2, 64))._replace(unrotate=turn))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_floats_rotated(dtype: torch.dtype) -> None:
    check(PagedPlane(rows_of(2, 64).to(dtype), unrotate=signed_hadamard(64)), dtype=dtype)


def test_fp8_rotated() -> None:
    check(fp8(rows_of(2, 64), torch.rand(BLOCKS, BLOCK_SIZE, 2) + 0.1)._replace(unrotate=signed_hadamard(64)))


def test_scales_inside_the_rows() -> None:
    # vLLM's layout: [keys | scale | values | scale] in the bytes of a head.
    stored = four_bits(rows_of(2, 64))
    assert stored.scale is not None
    raw = torch.zeros(BLOCKS, 2, BLOCK_SIZE, 2 * 36, dtype=torch.uint8).transpose(1, 2)
    raw[..., 36:68] = stored.data
    raw[..., 68:72] = stored.scale[..., None].view(torch.uint8)
    inside = torch.as_strided(raw.contiguous().view(torch.float32), stored.scale.shape, (BLOCK_SIZE * 36, 36, 18), 17)
    assert torch.equal(inside, stored.scale)
    check(PagedPlane(raw[..., 36:68], inside, has_hidden_zero=True))


def test_vllm_s_own_writer_of_four_bits() -> None:
    if not ON_GPU:
        import_module("tests.e2e.triton_on_cpu").install()
    vllm = pytest.importorskip("vllm.v1.attention.ops.int4_per_token_head", reason="vLLM isn't installed")
    make = torch.Generator().manual_seed(6)
    keys, values = (torch.randn(40, 2, 96, generator=make).to(DEVICE) for _ in range(2))
    slots = torch.randperm(BLOCKS * BLOCK_SIZE, generator=make)[:40].to(DEVICE)
    raw = torch.zeros(BLOCKS, BLOCK_SIZE, 2, 2 * 52, dtype=torch.uint8, device=DEVICE)
    stored, scales = (raw[..., :48], raw[..., 52:100]), (raw.view(torch.float32)[..., 12], raw.view(torch.float32)[..., 25])
    vllm.reshape_and_cache_int4(keys, values, *stored, slots, k_scale_cache=scales[0], v_scale_cache=scales[1])
    undo = kernel.hadamard_unrotation(96, vllm._get_rht_signs(32, 0, torch.device(DEVICE)))
    for rows, data, scale in zip((keys, values), stored, scales, strict=True):
        made = torch.empty(40, 2, 96, device=DEVICE)
        # One request of one row for each slot.
        table, place = (slots // BLOCK_SIZE)[:, None], slots % BLOCK_SIZE
        plane = PagedPlane(data, scale, has_hidden_zero=True, unrotate=undo)
        kernel.launch(plane, table, place, torch.arange(41, device=DEVICE), made, 1)
        assert (made - rows).square().mean().sqrt() / rows.square().mean().sqrt() < 0.13


def test_what_is_not_finite_stays_where_it_is() -> None:
    rows = rows_of(2, 16)
    rows[3, 4, 1, 5], rows[3, 5, 0, 2] = float("nan"), float("inf")
    made = check(PagedPlane(rows), (112, 112, 112, 112), (0, 0, 0, 0), max_rows=112)
    assert (~made.isfinite()).sum() <= 2


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs need a GPU")
def test_in_a_cuda_graph() -> None:
    plane = moved(four_bits(rows_of(2, 128), signed_hadamard(128)))
    table = torch.arange(BLOCKS, device=DEVICE).view(3, 10)
    starts, row_starts = torch.tensor([0, 9, 3], device=DEVICE), torch.tensor([0, 40, 90, 151], device=DEVICE)
    made, wanted = (torch.zeros(151, 2, 128, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    kernel.gather_kv(plane, table, starts, row_starts, wanted, 100)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.gather_kv(plane, table, starts, row_starts, made, 100)
    made.zero_()
    graph.replay()
    assert torch.equal(made, wanted)
