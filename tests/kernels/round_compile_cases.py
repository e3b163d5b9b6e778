"""The kernels of a verify round compiled for an H200 by their own launchers: see test_round_compile.py.

A driver that only knows its target stands in for CUDA's, and every launch ends where the kernel would be handed to the device:
what is compiled has the types, sizes and alignments that launchers give. The interpreter takes much that the compiler refuses,
and Triton makes a constant of every size that is 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from honed.kernels.cache import compact_kv, gather_kv
from honed.kernels.cache.compact_kv import KvPlanes
from honed.kernels.cache.reference import PagedPlane
from honed.kernels.events import pack_events
from honed.kernels.events.pack_events import EventBuffer
from honed.kernels.verify import verify_chain, verify_tree
from honed.kernels.verify.verify_chain import ChainVerdict
from honed.kernels.verify.verify_tree import TreeVerdict
from tests.kernels.packed_steps import LAYOUTS, step_inputs

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


@pytest.mark.parametrize(("num", "nodes", "vocab", "longest"), [(2, 32, 151_936, 15), (1, 1, 1, 1)])
def test_verify_tree(compiled: list[Any], num: int, nodes: int, vocab: int, longest: int) -> None:
    verify_tree.launch(
        torch.zeros(num, nodes + 1, vocab, dtype=HALF),
        ints(num, nodes),
        ints(num, nodes),
        ints(num, nodes),
        torch.ones(num),
        ints(num, dtype=torch.int64),
        ints(num, dtype=torch.int64),
        longest,
        None,
        TreeVerdict(ints(num), ints(num, longest), ints(num, longest + 1), ints(num)),
    )
    assert len(compiled) == 2
    assert vocab == 1 or WIDE in compiled[0].asm["ptx"]


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


@pytest.mark.parametrize(
    "plane",
    [
        PagedPlane(torch.zeros(8, 16, 8, 128, dtype=HALF)),
        PagedPlane(torch.zeros(8, 16, 8, 128, dtype=torch.float8_e4m3fn), torch.tensor(1.0)),
        PagedPlane(torch.zeros(8, 16, 8, 64, dtype=torch.uint8), torch.ones(8, 16, 8), torch.ones(8, 16, 8)),
        PagedPlane(torch.zeros(8, 16, 8, 64, dtype=torch.uint8), torch.ones(8, 16, 8), None, True, torch.eye(128)),
        PagedPlane(torch.zeros(8, 1, 1, 1, dtype=HALF)),
    ],
)
def test_gather_kv(compiled: list[Any], plane: PagedPlane) -> None:
    heads, width = plane.data.shape[2:]
    head_size = width * (2 if plane.data.dtype == torch.uint8 else 1)
    gather_kv.launch(plane, ints(1, 4), ints(1), ints(2), torch.zeros(4, heads, head_size, dtype=HALF), 4)
    assert width == 1 or WIDE in compiled[0].asm["ptx"]
    assert (plane.unrotate is not None) == ("mma" in compiled[0].asm["ptx"])  # on tensor cores


@pytest.mark.parametrize("layout", [LAYOUTS[1], LAYOUTS[-1]])
def test_pack_events(compiled: list[Any], layout: Any) -> None:
    pack_events.launch(EventBuffer.of(layout, "cpu").data, layout, *step_inputs(layout, torch.float32))
    assert len(compiled) == 1
