"""The desk at which the engine's Python and compiled code pass each other figures, and where the arrays are.

Between two engine steps the caches are somebody else's, and so is what numba needs to take its arguments apart: a call with
fourteen of them took 34 us there before it had done anything, one with a single array 9 (an old Xeon). So there is one record
in memory for all of them; it is written and read by `struct`, and what is called is told where it lies.

An address must not outlive its array: whoever writes one here holds the array.
"""

from __future__ import annotations

from array import array
from struct import Struct

import numpy as np
import numpy.typing as npt

DESK = np.dtype(
    [
        # of a call
        ("count", np.int64),  # N, requests asked about
        ("slots", np.int64),  # address of their slots, [N]
        ("contexts", np.int64),  # address of the lengths of contexts, of every so many-th of them from the first on
        ("num_contexts", np.int64),
        ("first", np.int64),
        ("every", np.int64),
        ("context_tokens", np.int64),  # sum of all contexts; −1: of what is known of them
        ("num_prefill_tokens", np.int64),
        ("are_contexts_known", np.int64),  # whether they say how likely the drafts are
        ("hold_cap", np.int64),  # see `block_size.to_hold`
        ("hold_threshold", np.float64),
        ("hold_hysteresis", np.float64),
        # of learning
        ("drafted", np.int64),  # address, [N]
        ("accepted", np.int64),  # address, [N]
        # what was found
        ("longest", np.int64),
        ("cap", np.int64),
        ("threshold", np.float64),
        ("margin", np.float64),  # see `block_size.Choice`
        # what is known: addresses and sizes
        ("lengths", np.int64),  # room for draft lengths, at least [N]
        ("known", np.int64),  # of each slot, [S] of `request_beliefs.REQUEST`
        ("num_slots", np.int64),
        ("workloads", np.int64),  # of each row, [W] of `policy_tables.WORKLOAD`
        ("num_rows", np.int64),
        ("steps", np.int64),  # of theta by row and bucket, [W, buckets]
        ("num_buckets", np.int64),
        ("has_shift", np.int64),
        ("gains", np.int64),  # [C, K]
        ("parts", np.int64),  # [C, K]
        ("num_curves", np.int64),
        ("depth", np.int64),  # K, as far as the policy's limit goes
        ("is_latency", np.int64),
        ("on_failure", np.int64),  # [W, K+1]
        ("on_success", np.int64),  # [W, K+1]
        ("num_outcomes", np.int64),  # K+1
        ("parameters", np.int64),  # of the `StepTimeModel`, [P]
        ("num_parameters", np.int64),
        ("token_seconds", np.int64),  # [T]
        ("captured_below", np.int64),  # [T]
        ("num_totals", np.int64),  # T
        ("kind_rows", np.int64),  # of each kind of batch, [B]
        ("num_batch_kinds", np.int64),
        ("kind_effects", np.int64),  # [rows, D]
        ("num_kind_rows", np.int64),
        ("num_kind_lengths", np.int64),  # D
    ]
)
"""All fields are 8 bytes wide."""

CALL, LEARN, FOUND = Struct("=10q2d"), Struct("=2q"), Struct("=2q2d")
LEARN_AT, FOUND_AT = CALL.size, CALL.size + LEARN.size
TABLES = (DESK.names or ())[(FOUND_AT + FOUND.size) // 8 :]


class Desk:
    """The record, and its address."""

    def __init__(self) -> None:
        self._room = bytearray(DESK.itemsize)
        self._record = np.frombuffer(self._room, DESK)
        self.address = address_of(self._record)

    def call(
        self,
        slots: array[int],
        contexts: array[int] | None = None,
        first: int = 0,
        every: int = 1,
        context_tokens: int = -1,
        num_prefill_tokens: int = 0,
        are_contexts_known: bool = True,
        hold: tuple[float, int, float] = (1.0, -1, 0.0),
    ) -> None:
        """Say what is asked about."""
        threshold, cap, hysteresis = hold
        at, num = contexts.buffer_info() if contexts is not None else (0, 0)
        CALL.pack_into(
            self._room,
            0,
            len(slots),
            slots.buffer_info()[0],
            at,
            num,
            first,
            every,
            context_tokens,
            num_prefill_tokens,
            are_contexts_known,
            cap,
            threshold,
            hysteresis,
        )

    def learn(self, drafted: array[int], accepted: array[int]) -> None:
        """Say what became of them."""
        LEARN.pack_into(self._room, LEARN_AT, drafted.buffer_info()[0], accepted.buffer_info()[0])

    def found(self) -> tuple[int, int, float, float]:
        """Longest draft length, cap, threshold and margin."""
        longest, cap, threshold, margin = FOUND.unpack_from(self._room, FOUND_AT)
        return longest, cap, threshold, margin

    def put(self, **tables: int | npt.NDArray[np.generic]) -> None:
        """Lay out what is known: sizes, and arrays by their addresses. Raises KeyError for what has no place."""
        for name, value in tables.items():
            if name not in TABLES:
                raise KeyError(name)
            self._record[name] = address_of(value) if isinstance(value, np.ndarray) else value


def address_of(values: npt.NDArray[np.generic]) -> int:
    """Where an array is. Raises ValueError for one that isn't in one piece."""
    if not values.flags.c_contiguous:
        raise ValueError("an array in pieces has no address")
    return int(values.ctypes.data)
