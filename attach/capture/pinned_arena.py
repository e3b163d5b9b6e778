"""Pinned memory for what steps copy, allocated once: a step that allocated some would wait for the driver.

Slots are taken in the order of steps and given back in about that order, so the arena is a ring. A slot must not be given back
while a copy may still read or write it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from math import prod

import torch

ALIGN = 64


def padded(num_bytes: int) -> int:
    """Bytes that a tensor of so many takes in a slot."""
    return -(-num_bytes // ALIGN) * ALIGN


class Slot:
    """A part of the arena."""

    def __init__(self, memory: torch.Tensor, begin: int, end: int) -> None:
        self._memory, self._next = memory, begin
        self.begin, self.end = begin, end
        self.is_free = False

    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the next bytes of the slot, with whatever is there."""
        num_bytes = prod(shape) * dtype.itemsize
        begin, self._next = self._next, self._next + padded(num_bytes)
        return self._memory[begin : begin + num_bytes].view(dtype).view(*shape)

    def free(self) -> None:
        """Give it back; any thread may."""
        self.is_free = True


class PinnedArena:
    """A ring of pinned memory.

    Args:
        num_bytes: its size, which never changes.
    """

    def __init__(self, num_bytes: int) -> None:
        self._memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._slots: deque[Slot] = deque()
        self._lock = threading.Lock()

    def take(self, sizes: Sequence[int]) -> Slot | None:
        """Take a slot for tensors of these bytes; None: there is no room for it now."""
        size = max(sum(map(padded, sizes)), ALIGN)
        with self._lock:
            while self._slots and self._slots[0].is_free:
                self._slots.popleft()
            begin = self._begin(size)
            if begin is None:
                return None
            self._slots.append(slot := Slot(self._memory, begin, begin + size))
            return slot

    def _begin(self, size: int) -> int | None:
        if not self._slots:
            return 0 if size <= len(self._memory) else None
        first, end = self._slots[0].begin, self._slots[-1].end
        if end <= first:  # it has gone round
            return end if end + size <= first else None
        if end + size <= len(self._memory):
            return end
        return 0 if size <= first else None
