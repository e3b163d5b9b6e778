"""Engine side's memory of batches that the daemon hasn't confirmed as stored.

Batches are numbered from 1 without gaps and stay until an `Ack` covers them. A byte cap drops the oldest batch that was never
sent, and counts its content. One empty batch stands for all that were dropped in a row, so the daemon sees an unbroken
sequence. A batch that was sent is never dropped: it may be stored already with its `Ack` only late, and would then be counted
twice. Their number is bounded by the sending window instead.

No I/O, no clock, no threads.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Losses:
    """Totals as vLLM counts them: rounds with at least one draft token."""

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    batches: int = 0

    def __add__(self, other: Losses) -> Losses:
        return Losses(
            self.rounds + other.rounds,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
            self.batches + other.batches,
        )


@dataclass(frozen=True, slots=True)
class _Batch:
    seq: int
    frame: bytes
    holds: Losses


class Outbox:
    """Encoded batches between production and acknowledgement.

    Args:
        max_bytes: cap on the batches that were never sent.
        window: most batches that may be sent and not yet acknowledged.
        encode_gap: (first_seq, seq, losses so far) -> the frame of the empty batch that replaces dropped ones.
    """

    def __init__(self, max_bytes: int, window: int, encode_gap: Callable[[int, int, Losses], bytes]) -> None:
        self._max_bytes = max_bytes
        self._window = window
        self._encode_gap = encode_gap
        self._unsent: deque[_Batch] = deque()
        self._unsent_bytes = 0
        self._sent: OrderedDict[int, bytes] = OrderedDict()
        self._resend: deque[int] = deque()
        self._gap: tuple[int, int] | None = None
        self.last_seq = 0
        self.acked_seq = 0
        self.lost = Losses()

    def __len__(self) -> int:
        return len(self._unsent) + len(self._sent) + (self._gap is not None)

    @property
    def num_bytes(self) -> int:
        """Bytes held, sent or not."""
        return self._unsent_bytes + sum(map(len, self._sent.values()))

    def add(self, frame: bytes, holds: Losses) -> None:
        """Keep a batch that was encoded with number `last_seq + 1`, and drop the oldest unsent ones above the cap."""
        self.last_seq += 1
        self._unsent.append(_Batch(self.last_seq, frame, holds))
        self._unsent_bytes += len(frame)
        while self._unsent_bytes > self._max_bytes and self._unsent:
            oldest = self._unsent.popleft()
            self._unsent_bytes -= len(oldest.frame)
            self.lost += oldest.holds + Losses(batches=1)
            self._gap = (self._gap[0] if self._gap else oldest.seq, oldest.seq)

    def lose(self, holds: Losses) -> None:
        """Count rounds that never became a batch."""
        self.lost += holds

    def acknowledge(self, seq: int) -> None:
        """Forget sent batches up to `seq`: they are stored. Numbers that were never sent are ignored."""
        while self._sent and next(iter(self._sent)) <= seq:
            number, _ = self._sent.popitem(last=False)
            self.acked_seq = number
        while self._resend and self._resend[0] not in self._sent:
            self._resend.popleft()

    def rewind(self) -> None:
        """Send all unacknowledged batches again, from the oldest."""
        self._resend = deque(self._sent)

    @property
    def is_waiting(self) -> bool:
        """Whether a sent batch isn't acknowledged yet."""
        return bool(self._sent)

    def next_frame(self) -> bytes | None:
        """The next batch to send; None when there is none or the window is full."""
        if self._resend:
            return self._sent[self._resend[0]]
        if len(self._sent) >= self._window:
            return None
        if self._gap:
            return self._encode_gap(*self._gap, self.lost)
        return self._unsent[0].frame if self._unsent else None

    def sent(self, frame: bytes) -> None:
        """Note that `frame`, from `next_frame`, was sent."""
        if self._resend:
            self._resend.popleft()
        elif self._gap:
            self._sent[self._gap[1]] = frame
            self._gap = None
        else:
            batch = self._unsent.popleft()
            self._unsent_bytes -= len(batch.frame)
            self._sent[batch.seq] = frame
