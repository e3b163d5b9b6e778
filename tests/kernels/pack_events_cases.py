"""The Triton kernel of pack_events against its plain twin, in a process of its own: see interpreting.py.

HONED_TEST_DEVICE says where: "cpu" (under Triton's interpreter) or "cuda".
"""

from __future__ import annotations

import os

import pytest
import torch

from honed.kernels.events import pack_events as kernel
from honed.kernels.events import reference
from honed.kernels.events.layout import EventLayout
from honed.kernels.events.pack_events import EventBuffer
from tests.kernels.packed_steps import LAYOUTS, step_inputs

DEVICE = os.environ.get("HONED_TEST_DEVICE", "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_bytes(layout: EventLayout, dtype: torch.dtype) -> None:
    inputs = [None if x is None else x.to(DEVICE) for x in step_inputs(layout, dtype)]
    made, wanted = (EventBuffer.of(layout, DEVICE).data for _ in range(2))
    kernel.launch(made, layout, *inputs)
    reference.pack_events(wanted, layout, *inputs)
    assert torch.equal(made, wanted)


def test_rows_that_are_part_of_wider_ones() -> None:
    layout = EventLayout(3, 4, max_depth=2)
    inputs = step_inputs(layout, torch.float32)
    wide = [torch.cat((torch.full((3, 1), 99), x), dim=1).to(DEVICE)[:, 1:] if x is not None else None for x in inputs[5:7]]
    moved = [None if x is None else x.to(DEVICE) for x in inputs]
    made, wanted = (EventBuffer.of(layout, DEVICE).data for _ in range(2))
    kernel.launch(made, layout, *moved[:5], *wide, *moved[7:])
    reference.pack_events(wanted, layout, *moved)
    assert torch.equal(made, wanted)


@pytest.mark.skipif(DEVICE != "cuda", reason="CUDA graphs need a GPU")
def test_in_a_cuda_graph() -> None:
    layout = LAYOUTS[-1]
    inputs = [None if x is None else x.to(DEVICE) for x in step_inputs(layout, torch.float32)]
    buffer, wanted = EventBuffer.of(layout, DEVICE), EventBuffer.of(layout, DEVICE).data
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel.pack_events(buffer, *inputs[:6], parents=inputs[6], path=inputs[7], candidates=inputs[8], log_probs=inputs[9])
    inputs[0] += 1
    reference.pack_events(wanted, layout, *inputs)
    graph.replay()
    assert torch.equal(buffer.data, wanted)
