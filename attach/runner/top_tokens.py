"""The target's most likely token after each row of a step: what a drafter of sampled traffic learns.

A server drafts its drafter's most likely tokens, and the target accepts them most often if they are its own. Where it samples,
the emitted token is another one at random. Only the logits tell, which vLLM keeps for a moment: they are looked at before its
sampler changes them. This reads them once more, so it is done only in steps that have captured rows of sampled answers.

Letters: T = scheduled tokens, L = rows of logits, V = size of the vocabulary.
"""

from __future__ import annotations

import torch


class TopTokens:
    """Those of one step; it has none before it `looks`, and after they are taken."""

    def __init__(self) -> None:
        self.is_wanted = False
        """Whether this step's are wanted."""
        self._tokens: torch.Tensor | None = None
        self._order: torch.Tensor | None = None

    def begin(self, is_wanted: bool) -> None:
        """A step begins."""
        self.is_wanted, self._tokens, self._order = is_wanted, None, None

    def look(self, logits: torch.Tensor) -> None:  # [L, V]
        """Take them from the step's logits; those of later calls in the same step are of other rows."""
        if self.is_wanted and self._tokens is None:
            self._tokens = logits.argmax(dim=-1).to(torch.int32)

    def reorder(self, order: torch.Tensor) -> None:  # [≥ T]
        """Note that row i of the drafter's inputs is row `order[i]` of the target's pass: where trees were verified."""
        self._order = order

    def take(self, logits_rows: torch.Tensor, num_rows: int) -> torch.Tensor | None:  # [L] -> [T] int32
        """Return the token after each row, −1 where there were no logits; None if there were none at all.

        Args:
            logits_rows: rows that the logits are of.
            num_rows: T.
        """
        tokens, self._tokens, self.is_wanted = self._tokens, None, False
        if tokens is None or len(tokens) != len(logits_rows):
            return None
        of_rows = torch.full((num_rows,), -1, dtype=torch.int32, device=tokens.device)
        of_rows[logits_rows.long()] = tokens
        return of_rows if self._order is None else of_rows[self._order[:num_rows]]
