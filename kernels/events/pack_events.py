"""Pack a step's verify events into one buffer, so that one asynchronous copy brings them to the host.

Computes: reference.pack_events: the columns of layout.py. One program a request. The host reads the copy with
adapt/protocol/step_packet.py, which needs no torch.

Moves: every input once and the buffer once. At B = 64, K = 15, 15 depths of 8 candidates, the buffer has 64·(8 + 4·15 + 6·120)
= 50 kB, so a launch's time is the floor. Separate copies of seven inputs of a few kilobytes would cost one host call each.
Layout: layout.py; inputs of any integer type (log-probabilities: any float type). Rows of draft tokens and parents may be part
of wider ones.
CUDA graphs: the grid depends on shapes only, nothing is read back; the buffer's address is fixed. The copy is
`pinned.copy_(buffer.data, non_blocking=True)` on the same stream; alternate buffers if it may outlast the next step.
Source: this project's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from honed.kernels.events import reference
from honed.kernels.events.layout import EventLayout

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _pack_kernel(
        halves_ptr: tl.tensor,
        words_ptr: tl.tensor,
        floats_ptr: tl.tensor,
        step_ptr: tl.tensor,
        num_requests_ptr: tl.tensor,
        num_draft_ptr: tl.tensor,
        num_accepted_ptr: tl.tensor,
        bonus_ptr: tl.tensor,
        draft_ptr: tl.tensor,
        parent_ptr: tl.tensor,
        path_ptr: tl.tensor,
        candidate_ptr: tl.tensor,
        log_prob_ptr: tl.tensor,
        draft_stride: tl.tensor,
        parent_stride: tl.tensor,
        room: tl.tensor,
        drafts: tl.tensor,
        max_depth: tl.tensor,
        cells: tl.tensor,
        at_count: tl.tensor,
        at_accepted: tl.tensor,
        at_bonus: tl.tensor,
        at_draft: tl.tensor,
        at_parent: tl.tensor,
        at_path: tl.tensor,
        at_candidate: tl.tensor,
        at_log_prob: tl.tensor,
        DRAFTS: tl.constexpr,
        PATH: tl.constexpr,
        CELLS: tl.constexpr,
        IS_TREE: tl.constexpr,
        HAS_CANDIDATES: tl.constexpr,
    ) -> None:
        i_b = tl.program_id(0)
        if i_b == 0:
            step = tl.load(step_ptr)
            tl.store(words_ptr + 8, tl.minimum(tl.maximum(tl.load(num_requests_ptr).to(tl.int32), 0), room))
            tl.store(words_ptr + 9, (step & 0xFFFFFFFF).to(tl.int32))
            tl.store(words_ptr + 10, (step >> 32).to(tl.int32))
        if i_b >= room:
            return
        count = tl.load(num_draft_ptr + i_b).to(tl.int32)
        tl.store(halves_ptr + at_count // 2 + i_b, count.to(tl.int16))
        tl.store(halves_ptr + at_accepted // 2 + i_b, tl.load(num_accepted_ptr + i_b).to(tl.int16))
        tl.store(words_ptr + at_bonus // 4 + i_b, tl.load(bonus_ptr + i_b).to(tl.int32))
        o_k = tl.arange(0, DRAFTS)
        m_k = o_k < drafts
        b_draft = tl.load(draft_ptr + i_b * draft_stride + o_k, mask=m_k & (o_k < count), other=-1).to(tl.int32)
        tl.store(words_ptr + at_draft // 4 + i_b * drafts + o_k, b_draft, mask=m_k)
        if IS_TREE:
            b_parent = tl.load(parent_ptr + i_b * parent_stride + o_k, mask=m_k & (o_k < count), other=-1).to(tl.int16)
            tl.store(halves_ptr + at_parent // 2 + i_b * drafts + o_k, b_parent, mask=m_k)
            o_p = tl.arange(0, PATH)
            b_path = tl.load(path_ptr + i_b * max_depth + o_p, mask=o_p < max_depth, other=-1).to(tl.int16)
            tl.store(halves_ptr + at_path // 2 + i_b * max_depth + o_p, b_path, mask=o_p < max_depth)
        if HAS_CANDIDATES:
            o_c = tl.arange(0, CELLS)
            b_id = tl.load(candidate_ptr + i_b * cells + o_c, mask=o_c < cells, other=0).to(tl.int32)
            b_log_prob = tl.load(log_prob_ptr + i_b * cells + o_c, mask=o_c < cells, other=0.0).to(tl.float16)
            tl.store(words_ptr + at_candidate // 4 + i_b * cells + o_c, b_id, mask=o_c < cells)
            tl.store(floats_ptr + at_log_prob // 2 + i_b * cells + o_c, b_log_prob, mask=o_c < cells)


@dataclass(frozen=True)
class EventBuffer:
    """The buffer on the device, with its header written; made once, outside CUDA graphs."""

    layout: EventLayout
    data: torch.Tensor  # [size_bytes] uint8

    @classmethod
    def of(cls, layout: EventLayout, device: torch.device | str) -> EventBuffer:
        data = torch.zeros(layout.size_bytes, dtype=torch.uint8, device=device)
        head = torch.tensor(layout.header(), dtype=torch.int32, device=device)
        data[: head.numel() * 4] = head.view(torch.uint8)
        return cls(layout, data)


def pack_events(
    buffer: EventBuffer,
    step: torch.Tensor,  # [1] int64
    num_requests: torch.Tensor,  # [1] integer: live requests, which come first; the rest is a graph's padding
    num_draft_tokens: torch.Tensor,  # [B] integers
    num_accepted: torch.Tensor,  # [B] integers
    bonus_token_ids: torch.Tensor,  # [B] integers
    draft_tokens: torch.Tensor,  # [B, K] integers; for a tree: its nodes
    *,
    parents: torch.Tensor | None = None,  # [B, K] integers, −1: the anchor
    path: torch.Tensor | None = None,  # [B, P] integers: rows, as from verify_tree
    candidates: torch.Tensor | None = None,  # [B, D, m] integers
    log_probs: torch.Tensor | None = None,  # [B, D, m] floats
) -> None:
    """Fill the buffer; Triton on a GPU, its plain twin elsewhere.

    Raises:
        ValueError: shapes don't fit the buffer's layout.
    """
    layout = buffer.layout
    room, drafts = layout.num_requests, layout.num_draft_tokens
    cells = (room, layout.depths, layout.candidates)
    tree = (None, None) if not layout.max_depth else ((room, drafts), (room, layout.max_depth))
    top = (None, None) if not cells[1] * cells[2] else (cells, cells)
    wanted = ((1,), (1,), (room,), (room,), (room,), (room, drafts), *tree, *top)
    counts = (step, num_requests, num_draft_tokens, num_accepted)
    inputs = (*counts, bonus_token_ids, draft_tokens, parents, path, candidates, log_probs)
    if tuple(None if x is None else tuple(x.shape) for x in inputs) != wanted or step.dtype != torch.int64:
        raise ValueError(
            f"pack_events: inputs {[None if x is None else list(x.shape) for x in inputs]} don't fit the layout, which has "
            f"{[None if x is None else list(x) for x in wanted]} and an int64 step: make an EventBuffer of another layout"
        )
    sizes = [room, drafts, layout.max_depth, layout.depths, layout.candidates]
    _pack_events(buffer.data, sizes, *inputs)


@torch.library.custom_op("honed::pack_events", mutates_args=("data",))
def _pack_events(
    data: torch.Tensor,
    sizes: list[int],
    step: torch.Tensor,
    num_requests: torch.Tensor,
    num_draft_tokens: torch.Tensor,
    num_accepted: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    draft_tokens: torch.Tensor,
    parents: torch.Tensor | None,
    path: torch.Tensor | None,
    candidates: torch.Tensor | None,
    log_probs: torch.Tensor | None,
) -> None:
    run = launch if data.is_cuda else reference.pack_events
    run(
        data,
        EventLayout(*sizes),
        step,
        num_requests,
        num_draft_tokens,
        num_accepted,
        bonus_token_ids,
        draft_tokens,
        parents,
        path,
        candidates,
        log_probs,
    )


@_pack_events.register_fake
def _(*_: Any) -> None:
    return None


def launch(data: torch.Tensor, layout: EventLayout, *inputs: torch.Tensor | None) -> None:
    """Run the Triton kernel itself (on a GPU, or under Triton's interpreter); inputs in the order of `pack_events`."""
    if triton is None:
        raise RuntimeError("Triton is not installed: pip install triton")
    cells = layout.depths * layout.candidates
    parts = [x if x is None or (x.dim() == 2 and x.stride(1) == 1) else x.contiguous() for x in inputs]
    parts[7] = None if parts[7] is None else parts[7].contiguous()  # the path
    strides = [0 if x is None else x.stride(0) for x in parts[5:7]]
    _pack_kernel[(max(layout.num_requests, 1),)](
        data.view(torch.int16),
        data.view(torch.int32),
        data.view(torch.float16),
        *parts,
        *strides,
        layout.num_requests,
        layout.num_draft_tokens,
        layout.max_depth,
        cells,
        *layout.offsets,
        DRAFTS=triton.next_power_of_2(max(layout.num_draft_tokens, 1)),
        PATH=triton.next_power_of_2(max(layout.max_depth, 1)),
        CELLS=triton.next_power_of_2(max(cells, 1)),
        IS_TREE=layout.max_depth > 0,
        HAS_CANDIDATES=cells > 0,
        num_warps=1,
    )
