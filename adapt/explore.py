"""What to try now and then, so that the prices and the acceptance of lengths that aren't in use stay known."""

from __future__ import annotations

import random

MOST_EXPLORING = 16
"""Requests of a step that try something: else a large batch's step would cost as much as many steps of one request."""
FEW_EXPLORING = 4
"""Requests that draft something where nobody does: a step that verifies for all of a batch may cost half as much again."""
_MOVES = ("less", "more", "half", "none")
_MOVES_OF_ALL = ("less", "more", "less", "more", "less", "more", "half", "none")
"""Where the whole batch moves: what is far from the best costs most, and is tried less."""


def neighbour(
    rng: random.Random, lengths: list[int], limit: int, *, is_equal: bool = False, cold_length: int | None = None
) -> list[int]:
    """Move some of a step's draft lengths.

    Args:
        limit: the most any of them may become.
        is_equal: they are, and stay, one length for all.
        cold_length: what is drafted while nothing is known of prices; then all requests move. None: prices are known.
    """
    is_known = cold_length is None
    most = MOST_EXPLORING if any(lengths) else FEW_EXPLORING
    is_all = is_equal or len(lengths) <= most
    move = rng.choice(_MOVES_OF_ALL if is_all and is_known else _MOVES)
    if not any(lengths):
        few = (1, 2) if cold_length is None else (1, 2, max(cold_length, 1))
        other = [min(rng.choice(few), limit)] * len(lengths)
    elif move == "less":
        other = [max(k - 1, 0) for k in lengths]
    elif move == "more":
        other = [min(k + 1, limit) for k in lengths]
    elif move == "half":
        other = [k // 2 for k in lengths]
    else:
        return [0] * len(lengths)
    if is_all or not is_known:
        return other
    chosen = lengths.copy()
    for at in rng.sample(range(len(lengths)), most):
        chosen[at] = other[at]
    return chosen
