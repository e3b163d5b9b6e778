"""Layout of a step's verify events in the one buffer that goes to the host; no torch in it.

Version 1, little-endian. A header of 32 int32 words, then columns at multiples of 16 bytes, their offsets in the header:

    word  0 magic "HEVT"   1 version   2 size of it all in bytes
          3 B requests, capacity   4 K draft tokens   5 P path   6 D depths   7 m candidates (0: none)
          8 requests in this step   9, 10 step number, low and high word   11 … 15 zero
         16 … 23 offsets of the columns in bytes, 0 for an absent column;   24 … 31 zero

    column              type      shape        meaning
    num_draft_tokens    int16     [B]          scheduled drafts; for a tree its nodes
    num_accepted        int16     [B]          bonus token excluded
    bonus_token_ids     int32     [B]
    draft_tokens        int32     [B, K]       −1 past a request's number; for a tree: its nodes' tokens
    parents             int16     [B, K]       trees only: parent nodes; −1: the anchor, and past a request's number
    path                int16     [B, P]       trees only: rows of the accepted nodes (node n's is n + 1), −1 past them
    candidates          int32     [B, D, m]    ids, where m > 0
    log_probs           float16   [B, D, m]    of the candidates, from the drafter; −inf below −65,504

Emitted tokens aren't stored: they are the accepted drafts and the bonus token. This file follows the rule of
adapt/protocol/wire.py: a version's columns never change, and a new column gets a header word that was 0. The reader,
adapt/protocol/step_packet.py, takes offsets from the header and so doesn't need this module.
"""

from __future__ import annotations

from dataclasses import dataclass

MAGIC = 0x54564548  # "HEVT"
VERSION = 1
HEADER_WORDS = 32
FIRST_OFFSET_WORD = 16
MAX_COUNT = 32_767


@dataclass(frozen=True)
class EventLayout:
    """Capacity for a step: sizes, and the offsets of the columns in bytes (0: absent)."""

    num_requests: int
    num_draft_tokens: int
    max_depth: int = 0
    """P, for trees; 0: chains, without parents and path."""
    depths: int = 0
    candidates: int = 0

    def __post_init__(self) -> None:
        sizes = (self.num_requests, self.num_draft_tokens, self.max_depth, self.depths, self.candidates)
        if min(sizes) < 0 or max(self.num_draft_tokens, self.max_depth) > MAX_COUNT:
            raise ValueError(f"pack_events: sizes {sizes} must be 0 or more, draft tokens and path at most {MAX_COUNT:,}")
        if self.size_bytes >= 1 << 31:
            raise ValueError(f"pack_events: {self.size_bytes:,} bytes is more than a step's events may take (2 GiB)")

    @property
    def columns(self) -> tuple[int, ...]:
        """Bytes of each column, in the order of the table."""
        requests, drafts, is_tree = self.num_requests, self.num_draft_tokens, int(self.max_depth > 0)
        cells = requests * self.depths * self.candidates
        return (
            2 * requests,
            2 * requests,
            4 * requests,
            4 * requests * drafts,
            2 * requests * drafts * is_tree,
            2 * requests * self.max_depth,
            4 * cells,
            2 * cells,
        )

    @property
    def offsets(self) -> tuple[int, ...]:
        offsets, end = [], 4 * HEADER_WORDS
        for size in self.columns:
            offsets.append(end if size else 0)
            end += -(-size // 16) * 16
        return tuple(offsets)

    @property
    def size_bytes(self) -> int:
        return 4 * HEADER_WORDS + sum(-(-size // 16) * 16 for size in self.columns)

    def header(self) -> list[int]:
        """Return the header's words for a step without requests."""
        sizes = [self.num_requests, self.num_draft_tokens, self.max_depth, self.depths, self.candidates]
        head = [MAGIC, VERSION, self.size_bytes, *sizes]
        head += [0] * (FIRST_OFFSET_WORD - len(head)) + list(self.offsets)
        return head + [0] * (HEADER_WORDS - len(head))
