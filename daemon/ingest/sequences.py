"""Acceptance of a boot's batches: each once and in order. Pure.

After a welcome an engine sends from the oldest batch that it holds, on a connection that keeps order. The first batch after
a welcome is therefore the oldest available. A gap before it can't be filled (e.g. the database was restored to an older
state) and is counted. Any later gap is a frame that was lost or refused here. Taking the batches behind it would
acknowledge it too, and the engine would drop data it can still send; so they are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Offer(Enum):
    """Decision about a batch."""

    TAKE = "take"
    DUPLICATE = "duplicate"
    AHEAD = "ahead"


@dataclass(slots=True)
class BootSequence:
    """Progress of one boot of an engine."""

    accepted: int = 0
    """Highest queued or stored number."""
    peer: bytes | None = None
    """Welcomed connection."""
    is_fresh: bool = False
    """True if nothing has arrived since the welcome."""
    gone: int = 0
    """Highest number that the engine certainly no longer holds."""

    def welcome(self, peer: bytes) -> None:
        """Note that this connection was told the committed number; again, on one in use, that changes nothing."""
        if peer != self.peer:
            self.peer, self.is_fresh = peer, True

    def offer(self, first_seq: int, seq: int, peer: bytes) -> tuple[Offer, int]:
        """Decide about a batch for numbers `first_seq` … `seq` (`first_seq` 0: only `seq`).

        Returns:
            the decision, and for TAKE how many numbers before it will never arrive. Call `take` once it is queued.
        """
        if seq <= self.accepted:
            return Offer.DUPLICATE, 0
        before = (first_seq or seq) - 1
        if self.is_fresh and peer == self.peer:
            # Remembered, since the store may refuse this batch: then it is due again, and later ones aren't.
            self.is_fresh, self.gone = False, before
        missing = max(0, before - self.accepted)
        return (Offer.AHEAD, 0) if missing and before > self.gone else (Offer.TAKE, missing)

    def take(self, seq: int) -> None:
        self.accepted = seq
