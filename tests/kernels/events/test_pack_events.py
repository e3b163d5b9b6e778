"""pack_events here, on its twin, and back by adapt's reader; the kernel itself in a process of its own."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from honed.adapt.protocol.step_packet import StepPacket, unpack
from honed.kernels.events import pack_events as kernel
from honed.kernels.events.layout import EventLayout
from honed.kernels.events.pack_events import EventBuffer, pack_events
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases
from tests.kernels.packed_steps import LAYOUTS, step_inputs


def packed(layout: EventLayout, inputs: list[Any]) -> StepPacket:
    buffer = EventBuffer.of(layout, "cpu")
    pack_events(buffer, *inputs[:6], parents=inputs[6], path=inputs[7], candidates=inputs[8], log_probs=inputs[9])
    return unpack(buffer.data.numpy())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_packed_is_read_back(layout: EventLayout) -> None:
    inputs = step_inputs(layout, torch.float32)
    packet = packed(layout, inputs)
    live = max(layout.num_requests - 1, 0)
    assert (len(packet), packet.step) == (live, 2**40 + 7)
    columns = (None if x is None else x[:live] for x in inputs[2:])
    lengths, accepted, bonus, draft, parents, path, candidates, log_probs = columns
    is_draft = torch.arange(layout.num_draft_tokens) < lengths[:, None]
    for got, wanted in (
        (packet.num_draft_tokens, lengths),
        (packet.num_accepted, accepted),
        (packet.bonus_token_ids, bonus),
        (packet.draft_tokens, torch.where(is_draft, draft, -1)),
        (packet.path, path),
        (packet.candidates, candidates),
        (packet.parents, None if parents is None else torch.where(is_draft, parents, -1)),
        (packet.log_probs, None if log_probs is None else log_probs.half()),
    ):
        assert (got is None) == (wanted is None)
        if got is not None:
            np.testing.assert_array_equal(got, wanted.numpy())


def test_what_a_chain_emitted() -> None:
    layout = EventLayout(2, 3)
    drafts = torch.tensor([[11, 12, 13], [21, 22, 23]])
    inputs = [torch.tensor([1]), torch.tensor([2]), torch.tensor([3, 1]), torch.tensor([2, 0]), torch.tensor([99, 98]), drafts]
    packet = packed(layout, [*inputs, None, None, None, None])
    assert packet.emitted(0).tolist() == [11, 12, 99]
    assert packet.emitted(1).tolist() == [98]
    assert packet.draft_tokens.tolist() == [[11, 12, 13], [21, -1, -1]]


def test_what_a_tree_emitted() -> None:
    layout = EventLayout(1, 4, max_depth=3)
    inputs = [torch.tensor([1]), torch.tensor([1]), torch.tensor([4]), torch.tensor([2]), torch.tensor([99])]
    tree = [torch.tensor([[11, 12, 13, 14]]), torch.tensor([[-1, -1, 1, 2]]), torch.tensor([[2, 3, -1]])]
    packet = packed(layout, [*inputs, *tree, None, None])
    assert packet.emitted(0).tolist() == [12, 13, 99]


def test_the_next_step_overwrites_this_one() -> None:
    layout = LAYOUTS[-1]
    buffer = EventBuffer.of(layout, "cpu")
    first, second = step_inputs(layout, torch.float32), step_inputs(layout, torch.float32)
    second[0] = torch.tensor([-3])
    second[2] = torch.zeros(6, dtype=torch.int64)
    second[3] = torch.zeros(6, dtype=torch.int64)
    for inputs in (first, second):
        pack_events(buffer, *inputs[:6], parents=inputs[6], path=inputs[7], candidates=inputs[8], log_probs=inputs[9])
    packet = unpack(buffer.data.numpy())
    assert packet.step == -3
    assert (packet.draft_tokens == -1).all()


def test_columns_lie_at_multiples_of_sixteen_and_apart() -> None:
    for layout in LAYOUTS:
        spans = [(at, at + size) for at, size in zip(layout.offsets, layout.columns, strict=True) if size]
        assert all(at % 16 == 0 and at >= 128 for at, _ in spans)
        assert all(end <= later for (_, end), (later, _) in itertools.pairwise(spans))
        assert not spans or spans[-1][1] <= layout.size_bytes


@pytest.mark.parametrize("sizes", [(-1, 3), (3, 40_000), (2**20, 1000)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="pack_events"):
        EventLayout(*sizes)


@pytest.mark.parametrize("index", range(10))
def test_inputs_that_do_not_fit_are_refused(index: int) -> None:
    inputs: list[Any] = step_inputs(LAYOUTS[-1], torch.float32)
    for wrong in (None if index > 5 else torch.zeros(99), torch.zeros(99)):
        given = [*inputs[:index], wrong, *inputs[index + 1 :]]
        with pytest.raises(ValueError, match="don't fit the layout"):
            packed(LAYOUTS[-1], given)


def test_the_op_is_registered_as_it_should_be() -> None:
    layout = LAYOUTS[-1]
    sizes = [layout.num_requests, layout.num_draft_tokens, layout.max_depth, layout.depths, layout.candidates]
    arguments = (EventBuffer.of(layout, "cpu").data, sizes, *step_inputs(layout, torch.float32))
    torch.library.opcheck(kernel._pack_events, arguments)


@needs_triton
def test_the_kernel_equals_its_twin_under_the_interpreter() -> None:
    run_cases("pack_events", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernel_equals_its_twin_on_a_gpu() -> None:
    run_cases("pack_events", "cuda")
