"""Which batches of a boot to take: each once and in order. Pure.

An engine that has been welcomed sends from the oldest batch that it still holds, on a connection that keeps order. So the
first batch after a welcome is as far back as the engine can go: a hole before it can't be filled any more (the database
was put back to an older state, say) and is counted. Any later hole is a frame that was lost or had no room here; taking
what follows it would acknowledge it too, and the engine would forget what it can still send. So that is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Offer(Enum):
    """What to do with a batch."""

    TAKE = "take"
    DUPLICATE = "duplicate"
    AHEAD = "ahead"


@dataclass(slots=True)
class BootSequence:
    """Where one boot of an engine stands."""

    accepted: int = 0
    """Highest number that was queued or stored."""
    peer: bytes | None = None
    """Connection that was welcomed."""
    is_fresh: bool = False
    """Nothing has come yet since the welcome."""
    gone: int = 0
    """Highest number that the engine is known not to hold any more."""

    def welcome(self, peer: bytes) -> None:
        """The engine was told, on this connection, what is committed."""
        self.peer, self.is_fresh = peer, True

    def offer(self, first_seq: int, seq: int, peer: bytes) -> tuple[Offer, int]:
        """Judge a batch that stands for numbers `first_seq` … `seq` (`first_seq` 0: only `seq`).

        Returns:
            the verdict, and for TAKE how many numbers before it will never come. `take` confirms it once it is queued.
        """
        if seq <= self.accepted:
            return Offer.DUPLICATE, 0
        before = (first_seq or seq) - 1
        if self.is_fresh and peer == self.peer:
            # Remembered, since there may be no room for this batch: it is then due again, and what follows it isn't.
            self.is_fresh, self.gone = False, before
        missing = max(0, before - self.accepted)
        return (Offer.AHEAD, 0) if missing and before > self.gone else (Offer.TAKE, missing)

    def take(self, seq: int) -> None:
        self.accepted = seq
