"""Context rows of steps that drafted nothing, kept until something is drafted again: nobody reads their K/V before.

They are stored in one go then, or when there are more than `most_rows` of them.

A block that is freed and given to another request meanwhile may come up twice among the kept rows: the later row wins, as
it would have. Letters: T = context rows of a step, A = size of the target's hidden states, as they come to the drafter.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

MOST_ROWS = 128
"""Few: the step that drafts next pays for all of them, and would make drafting look dear."""
PADDING_SLOT_ID = -1
"""vLLM's: a row with this slot is not stored."""


class ContextBacklog:
    """Context rows that the drafter hasn't stored yet.

    Args:
        store: (states [T, A], positions [T], slots [T]).
        most_rows: that are kept; with 0 a step's rows are stored at once.
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
        """Store what was kept."""
        if not self._rows:
            return
        rows, num_rows, self._rows, self._num_rows = self._rows, self._num_rows, [], 0
        if len(rows) == 1:
            self._store(*rows[0])
        elif num_rows > 2 * MOST_ROWS:  # a long prompt among them: comparing all pairs would cost more
            for one in rows:
                self._store(*one)
        else:
            states, positions, slots = (torch.cat(column) for column in zip(*rows, strict=True))
            self._store(states, positions, latest_only(slots))


def latest_only(slots: torch.Tensor) -> torch.Tensor:
    """Set all but the last of equal slots [n] to PADDING_SLOT_ID, without waiting for the device."""
    is_same = slots[:, None] == slots[None, :]
    return slots.masked_fill(is_same.triu_(1).any(dim=1), PADDING_SLOT_ID)
