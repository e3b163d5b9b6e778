"""Reads a step's verify events as the device packed them: one buffer in, arrays out.

The layout is that of kernels/events/layout.py, version 1. Offsets are in the buffer's header, so this file only knows the
header's words and the columns' types. A reader never looks past the buffer, whatever the header says.

Letters: B = requests in the step, K = draft tokens that fit, P = path, D = depths, m = candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.arrays import Ints

MAGIC = 0x54564548
VERSION = 1
HEADER_WORDS = 32
FIRST_OFFSET_WORD = 16


class StepPacketError(ValueError):
    """A buffer that isn't a step's events of this version; the text names the defect."""


@dataclass(frozen=True, eq=False)
class StepPacket:
    """Results of one step's drafts. Arrays are copies: the buffer may be overwritten."""

    step: int
    num_draft_tokens: npt.NDArray[np.int16]  # [B]
    num_accepted: npt.NDArray[np.int16]  # [B] bonus token excluded
    bonus_token_ids: npt.NDArray[np.int32]  # [B]
    draft_tokens: npt.NDArray[np.int32]  # [B, K], −1 past a request's number; for a tree: its nodes' tokens
    parents: npt.NDArray[np.int16] | None  # [B, K] parent nodes; −1: the anchor, and past a request's number; None: chains
    path: npt.NDArray[np.int16] | None  # [B, P] rows of the accepted nodes (node n is row n + 1), −1 past them; None: chains
    candidates: npt.NDArray[np.int32] | None  # [B, D, m]
    log_probs: npt.NDArray[np.float16] | None  # [B, D, m]

    def __len__(self) -> int:
        return len(self.num_accepted)

    def emitted(self, request: int) -> Ints:
        """The token ids that a request emitted in this step: accepted drafts, then the bonus token."""
        accepted = int(self.num_accepted[request])
        index = np.arange(accepted) if self.path is None else self.path[request, :accepted].astype(np.int64) - 1
        kept = self.draft_tokens[request, index]
        return np.append(kept, self.bonus_token_ids[request]).astype(np.int64)


def unpack(buffer: bytes | bytearray | memoryview | npt.NDArray[np.uint8]) -> StepPacket:
    """Read a buffer.

    Raises:
        StepPacketError: too short, another magic or version, or a header that doesn't fit the buffer or itself.
    """
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if len(raw) < 4 * HEADER_WORDS:
        raise StepPacketError(f"{len(raw)} bytes are too few for a header of {4 * HEADER_WORDS}")
    head = raw[: 4 * HEADER_WORDS].view("<i4").tolist()
    if head[0] != MAGIC:
        raise StepPacketError(f"starts with {head[0] & 0xFFFFFFFF:#010x} instead of {MAGIC:#010x}: not a step's events")
    if head[1] != VERSION:
        raise StepPacketError(f"is of version {head[1]}; this reader knows {VERSION}: use the same release on both sides")
    if head[2] != len(raw) or min(head[3:9]) < 0 or head[8] > head[3]:
        raise StepPacketError(f"header {head[2:9]} doesn't fit a buffer of {len(raw)} bytes")
    room, drafts, max_depth, depths, candidates, live = head[3:9]
    offsets = head[FIRST_OFFSET_WORD : FIRST_OFFSET_WORD + 8]

    def column(index: int, dtype: str, *shape: int) -> npt.NDArray[Any]:
        cells, size = int(np.prod((room, *shape), dtype=object)), np.dtype(dtype).itemsize
        start = offsets[index]
        if cells and not 4 * HEADER_WORDS <= start <= len(raw) - cells * size:
            raise StepPacketError(f"column {index} of {cells * size} bytes at {start} lies outside the buffer of {len(raw)}")
        rows = raw[start : start + cells * size].view(dtype) if cells else np.zeros(0, dtype=dtype)
        return rows.reshape(room, *shape)[:live].copy()

    is_tree, has_candidates = max_depth > 0, depths * candidates > 0
    packet = StepPacket(
        step=(head[9] & 0xFFFFFFFF) | head[10] << 32,
        num_draft_tokens=column(0, "<i2"),
        num_accepted=column(1, "<i2"),
        bonus_token_ids=column(2, "<i4"),
        draft_tokens=column(3, "<i4", drafts),
        parents=column(4, "<i2", drafts) if is_tree else None,
        path=column(5, "<i2", max_depth) if is_tree else None,
        candidates=column(6, "<i4", depths, candidates) if has_candidates else None,
        log_probs=column(7, "<f2", depths, candidates) if has_candidates else None,
    )
    _check(packet, drafts, max_depth if is_tree else drafts)
    return packet


def _check(packet: StepPacket, drafts: int, longest: int) -> None:
    counts, accepted = packet.num_draft_tokens, packet.num_accepted
    if (counts < 0).any() or (counts > drafts).any() or (accepted < 0).any() or (accepted > np.minimum(counts, longest)).any():
        raise StepPacketError(f"impossible counts of drafts {counts.tolist()} and of accepted ones {accepted.tolist()}")
    if packet.path is not None:
        is_kept = np.arange(longest) < accepted[:, None]
        if ((packet.path < 1) | (packet.path > drafts))[is_kept].any():
            raise StepPacketError("an accepted node isn't in the tree")
