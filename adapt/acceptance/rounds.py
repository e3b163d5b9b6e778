"""Reads the columns of an event batch as arrays, once, and splits them by workload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.protocol.wire import EventBatch, RoundColumns


@dataclass(frozen=True, slots=True)
class Rounds:
    """Verify rounds with at least one draft token, oldest first; every array is [R]."""

    request: npt.NDArray[np.uint64]
    num_draft_tokens: Ints
    """Where the request ended within the round: those delivered, which were accepted. What follows a text's end isn't text."""
    num_accepted_tokens: Ints
    num_invalid_tokens: Ints
    """Drafts never verified: rejected by a grammar or trimmed by vLLM's own adaptive verification."""
    position: Ints
    """Position of the last verified token: about the length of the context."""
    feature: Floats | None = None
    """See `RoundColumns.feature`; None: unknown for all."""

    def __len__(self) -> int:
        return len(self.request)


def rounds_by_workload(batch: EventBatch) -> Iterator[tuple[str, Rounds]]:
    """Yield each workload's rounds in order of first mention. Raises ValueError when the columns don't fit together."""
    columns = batch.rounds
    drafted = _ints(columns.num_draft_tokens, "num_draft_tokens", len(columns.num_draft_tokens))
    count = len(drafted)
    label = _ints(columns.workload, "workload", count)
    accepted = _ints(columns.num_accepted_tokens, "num_accepted_tokens", count)
    invalid = _ints(columns.num_invalid_tokens or [0] * count, "num_invalid_tokens", count)
    invalid = np.maximum(invalid, 0) + trimmed_tokens(columns, count)
    if columns.num_delivered:
        delivered = _ints(columns.num_delivered, "num_delivered", count)
        is_cut = delivered <= accepted
        drafted, accepted = np.where(is_cut, delivered, drafted), np.minimum(delivered, accepted)
        invalid = np.where(is_cut, 0, invalid)
    position = _ints(columns.position or [0] * count, "position", count)
    request = _hashes(columns.request, count)
    feature = _floats(columns.feature, "feature", count) if columns.feature else None
    if count and not 0 <= label.min() <= label.max() < len(batch.workloads):
        raise ValueError("batch names a workload by an index that its list of workloads doesn't have")
    has_draft = drafted - invalid > 0
    for index, workload in enumerate(batch.workloads):
        mine = has_draft & (label == index)
        if mine.any():
            shown = None if feature is None else feature[mine]
            yield workload, Rounds(request[mine], drafted[mine], accepted[mine], invalid[mine], position[mine], shown)


def trimmed_tokens(columns: RoundColumns, count: int) -> Ints:
    """Drafts of each of `count` rounds that vLLM's own adaptive verification trimmed, [R]; ValueError as above."""
    if not columns.num_trimmed_tokens:
        return np.zeros(count, dtype=np.int64)
    return np.maximum(_ints(columns.num_trimmed_tokens, "num_trimmed_tokens", count), 0)


def _ints(values: Sequence[int], name: str, count: int) -> Ints:
    if len(values) != count:
        raise ValueError(f"batch column {name} has {len(values)} entries, the others {count}")
    try:
        return np.array(values, dtype=np.int64)
    except OverflowError as error:
        raise ValueError(f"batch column {name} has a figure that doesn't fit into 64 bits") from error


def _floats(values: Sequence[float], name: str, count: int) -> Floats:
    if len(values) != count:
        raise ValueError(f"batch column {name} has {len(values)} entries, the others {count}")
    return np.array(values, dtype=np.float64)


def _hashes(values: Sequence[int], count: int) -> npt.NDArray[np.uint64]:
    if len(values) != count:
        raise ValueError(f"batch column request has {len(values)} entries, the others {count}")
    try:
        return np.array(values, dtype=np.uint64)
    except OverflowError as error:
        raise ValueError("batch column request has a figure that isn't an unsigned 64-bit hash") from error
