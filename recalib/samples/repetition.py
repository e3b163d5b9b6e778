"""Detection of degenerate loops, which are kept out of the samples.

When a model repeats one n-gram endlessly, any drafter that has seen the loop drafts it almost perfectly. Training on it teaches
the loop, and judging on it flatters. A loop in a prompt does no harm: it is only read. A row belongs to a loop of period p when
it lies in a run of rows with token[i] = token[i - p] of at least `min_loop_rows` and at least two whole further periods. The
first period isn't part of the run: without repetition it is ordinary text.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from honed.adapt.protocol.sample_ring import runs_of

MAX_LOOP_PERIOD = 16
"""Longest period, in tokens, of a repetition that is kept out of the samples."""
MIN_LOOP_ROWS = 32
"""Rows of a repetition from which on it is one."""


def loop_rows(token_ids: NDArray[np.int32], max_period: int, min_loop_rows: int) -> NDArray[np.bool_]:  # [T] -> [T]
    """Mark rows that repeat, again and again, the token one period earlier."""
    is_loop = np.zeros(len(token_ids), bool)
    for period in range(1, min(max_period, len(token_ids) - 1) + 1):
        for run in runs_of(token_ids[period:] == token_ids[:-period]):
            if run.stop - run.start >= max(min_loop_rows, 2 * period):
                is_loop[period + run.start : period + run.stop] = True
    return is_loop


def longest_varied_stretch(token_ids: NDArray[np.int32], begin: int, max_period: int, min_loop_rows: int) -> slice:
    """Find the longest run of rows from `begin` on without a loop (the first of equal ones); empty if there is none."""
    runs = runs_of(~loop_rows(token_ids, max_period, min_loop_rows)[begin:])
    longest = max(runs, key=lambda run: run.stop - run.start, default=slice(0, 0))
    return slice(begin + longest.start, begin + longest.stop)
