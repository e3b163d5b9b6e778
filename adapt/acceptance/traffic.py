"""Estimates what the rounds of all traffic accept on average, to tell people.

The curve of `estimate` is that of a request without history, from which requests' own curves start. It isn't what traffic gets:
of requests that differ, the hard ones take more rounds for the same text. Here rounds count alike.

A round shows its survival up to where it failed. One whose drafts were all accepted, or that had none, goes on as its request's
curve predicted: easy requests get longer drafts, and hard ones would look as easy if the others' late positions spoke for them.

Memories are those of `forgetting`, whose weights follow a change. Letters: R = rounds, K = draft tokens, M = memories.
"""

from __future__ import annotations

import numpy as np

from honed.adapt.acceptance.estimate import EDGE, survival
from honed.adapt.acceptance.forgetting import SHORTER_STRENGTH, memory_lengths
from honed.adapt.protocol.arrays import Floats, Ints


class Traffic:
    """Mean survival of rounds, with memories of several lengths."""

    def __init__(self, num_spec_tokens: int, forgetting_rounds: float) -> None:
        self._lengths = np.array(memory_lengths(forgetting_rounds))
        self._rounds: Floats = np.zeros(len(self._lengths))
        self._survived: Floats = np.zeros((len(self._lengths), num_spec_tokens))

    def observe(self, predicted: Floats, reached: Ints, accepted: Ints, independent_rounds: float) -> None:
        """Fold in rounds.

        Args:
            predicted: conditional acceptance of each round as predicted before it, [R, K].
            reached: positions that each round tried, [R]; `accepted`: those that it passed, [R].
            independent_rounds: what they are worth together: older ones age by it, as in `forgetting`.
        """
        position = np.arange(1, predicted.shape[1] + 1)
        shown = np.where(position <= accepted[:, None], 1.0, np.where(position <= reached[:, None], 0.0, predicted))
        kept = np.exp(-independent_rounds / self._lengths)
        self._rounds = kept * self._rounds + len(shown)
        self._survived = kept[:, None] * self._survived + survival(shown).sum(axis=0)

    def forget(self, factor: float) -> None:
        """Weaken what is known, for new weights of the drafter."""
        self._rounds *= factor
        self._survived *= factor

    def curve(self, weights: Floats, guess: Floats) -> Floats:  # [M], [K] -> [K]
        """Conditional acceptance whose survival is that of the rounds.

        Args:
            weights: of the memories, the shortest first.
            guess: the curve before any round was seen.
        """
        made = [survival(guess)]
        for rounds, survived in zip(self._rounds[::-1], self._survived[::-1], strict=True):
            made.append((survived + SHORTER_STRENGTH * made[-1]) / (rounds + SHORTER_STRENGTH))
        mean = weights @ np.array(made[:0:-1])
        conditional: Floats = np.clip(mean / np.concatenate(([1.0], mean[:-1])), EDGE, 1.0 - EDGE)
        return conditional
