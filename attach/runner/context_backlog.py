"""Context rows of steps without drafts, kept until the next draft pass: nothing reads their K/V before.

They are stored together then, or when there are more than `most_rows` of them.

A freed block that another request gets meanwhile may appear twice among the kept rows: the later row wins, as it would have.
Letters: T = context rows of a step, A = size of the target's hidden states, as the drafter gets them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MOST_ROWS = 128
"""Few: the next step that drafts pays for all of them, and drafting would look expensive."""
PADDING_SLOT_ID = -1
"""vLLM's constant: a row with this slot is not stored."""


class ContextBacklog:
    """Context rows that the drafter hasn't stored yet.

    Args:
        store: (states [T, A], positions [T], slots [T]).
        most_rows: rows that are kept; with 0 a step's rows are stored at once.
    """

    def __init__(self, store: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None], most_rows: int = MOST_ROWS) -> None:
        self._store = store
        self._most_rows = most_rows
        self._rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._num_rows = 0

    def __len__(self) -> int:
        return self._num_rows

    def add(self, states: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> None:
        """Keep a step's rows; the tensors must not change afterwards."""
        self._rows.append((states, positions, slots))
        self._num_rows += len(states)
        if self._num_rows > self._most_rows:
            self.flush()

    def flush(self) -> None:
        """Store the kept rows."""
        if not self._rows:
            return
        rows, num_rows, self._rows, self._num_rows = self._rows, self._num_rows, [], 0
        if len(rows) == 1:
            self._store(*rows[0])
        elif num_rows > 2 * MOST_ROWS:  # they include a long prompt: comparing all pairs would cost more
            for one in rows:
                self._store(*one)
        else:
            states, positions, slots = (torch.cat(column) for column in zip(*rows, strict=True))
            self._store(states, positions, latest_only(slots))


def latest_only(slots: torch.Tensor) -> torch.Tensor:
    """Set all but the last of equal slots [n] to PADDING_SLOT_ID, without waiting for the device."""
    is_same = slots[:, None] == slots[None, :]
    return slots.masked_fill(is_same.triu_(1).any(dim=1), PADDING_SLOT_ID)
