"""Assembly of the ring's records into contiguous stretches of requests.

The rules, all by position within one request:

    the record begins where the stretch ends       it is appended
    it repeats positions with the same tokens      the held rows stay (a preempted request was prefilled again), even with
                                                   FLAG_GAP: the rows missing before the record are already held
    it repeats positions with other tokens         the later record is right: the stretch is cut there, the record appended
    it begins later, earlier, or has FLAG_GAP      the stretch ends, another one begins
    a version with another context                 likewise: its features mean something else. In a trial two versions take
                                                   turns within each request, and usually share what makes the features
    the stretch would grow beyond `max_rows`       likewise, but the next one begins with the last rows of this one, as context

So the first tokens of an answer to a long prompt have the end of the prompt before them. Only the rows of a prompt that is read
are dropped: a truncated context with absolute positions is a sound sample.

Unfinished requests have a memory limit. Beyond half of it the prompts held are shortened, and new requests are ignored until
they end: whole requests teach more than parts of all. The rest of the limit is for those that are still growing.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from honed.adapt.protocol.sample_ring import FLAG_GAP, FLAG_PREFILL, FLAG_REJECTED, KIND_END
from honed.recalib.samples.ring_reader import RingRecord
from honed.recalib.samples.stretch import Stretch

SHORT_PROMPT_ROWS = 256
"""Rows left of each prompt while memory is short."""
SILENT_S = 10.0
"""Time without a record after which a request may be given up."""


@dataclass
class _Open:
    """A stretch that is still growing."""

    session: str
    workload: str
    drafter_version: str
    first: int
    came_s: tuple[float, float]
    ids: list[NDArray[np.int32]] = field(default_factory=list)  # [n, 2]: tokens, and what `RingRecord.likely` tells
    features: list[NDArray[Any]] = field(default_factory=list)
    num_rows: int = 0
    row_bytes: int = 0
    num_prompt_tokens: int = 0
    breaks: list[int] = field(default_factory=list)
    seen_s: float = 0.0
    is_rejected: bool = False
    """The next token is the target's, in place of a rejected draft token."""
    context: str = ""

    @property
    def end(self) -> int:
        return self.first + self.num_rows

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def held_ids(self, first: int, count: int) -> NDArray[np.int32]:
        self.ids = [np.concatenate(self.ids)]
        return self.ids[0][first - self.first :, 0][:count]

    def cut_at(self, position: int) -> None:
        self.num_rows = position - self.first
        self.ids = [np.concatenate(self.ids)[: self.num_rows]]
        self.features = [np.concatenate(self.features)[: self.num_rows]]
        self.num_prompt_tokens = min(self.num_prompt_tokens, self.num_rows)
        self.breaks = [p for p in self.breaks if p < position]
        self.is_rejected = False

    def drop_first(self, num_rows: int) -> None:
        """Drop the first rows, which are a prompt's."""
        self.ids = [np.concatenate(self.ids)[num_rows:]]
        self.features = [np.concatenate(self.features)[num_rows:].copy()]
        self.first += num_rows
        self.num_rows -= num_rows
        self.num_prompt_tokens -= num_rows

    def keep_as_context(self, num_rows: int) -> None:
        """Keep the last rows alone, as context of what follows."""
        self.drop_first(max(self.num_rows - num_rows, 0))
        self.num_prompt_tokens, self.breaks = self.num_rows, []

    def append(self, record: RingRecord, skip: int) -> None:
        ids = np.stack((record.token_ids[skip:], record.likely[skip:]), axis=1)
        features = record.features[skip:]
        is_prompt = record.flags & FLAG_PREFILL and self.num_prompt_tokens == self.num_rows
        if self.is_rejected and skip == 0:
            self.breaks.append(record.first_position)
        self.is_rejected = bool(record.flags & FLAG_REJECTED)
        self.ids.append(ids)
        self.features.append(features)
        self.row_bytes = features.shape[1] * features.itemsize + 8
        self.num_rows += len(ids)
        self.num_prompt_tokens += len(ids) if is_prompt else 0

    def close(self) -> Stretch:
        token_ids, likely = np.ascontiguousarray(np.concatenate(self.ids).T)
        return Stretch(
            session=self.session,
            workload=self.workload,
            drafter_version=self.drafter_version,
            first_position=self.first,
            token_ids=token_ids,
            features=np.concatenate(self.features),
            num_prompt_tokens=self.num_prompt_tokens,
            breaks=tuple(self.breaks),
            earliest_s=self.came_s[0],
            taken_s=self.came_s[1],
            context=self.context,
            likely=likely if likely.max() >= 0 else None,
        )


class SessionAssembler:
    """Open requests of one ring; yields each completed stretch."""

    def __init__(
        self,
        max_rows: int = 2048,
        max_open: int = 4096,
        max_open_bytes: int = 1 << 28,
        came_s: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0),
        context_of: Callable[[str], str] = lambda version: version,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with none.

        Args:
            came_s: Unix times between which the record came that is being added.
            context_of: (drafter version) -> what is equal for versions whose features mean the same.
        """
        self._context_of, self._monotonic = context_of, monotonic
        self._came_s, self._max_rows, self._max_open, self.max_open_bytes = came_s, max_rows, max_open, max_open_bytes
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._ignored: OrderedDict[str, None] = OrderedDict()
        """Running requests that there was no memory for."""
        self._open_bytes = 0

    @property
    def open_bytes(self) -> int:
        """Memory of the unfinished requests."""
        return self._open_bytes

    def add(self, record: RingRecord) -> Iterator[Stretch]:
        """Add a record; yields the stretches that it ends."""
        if record.kind == KIND_END:
            self._ignored.pop(record.request, None)
            yield from self._close(record.request)
            return
        if record.request in self._ignored:
            return
        current = self._open.get(record.request)
        if current is None:
            yield from self._make_room()
            if self._is_short:
                self._ignore(record.request)
                return
        if current is not None and self._begins_anew(current, record):
            yield from self._close(record.request)
            current = None
        if current is None:
            given = record.session, record.workload, record.drafter_version, record.first_position
            current = _Open(*given, self._came_s(), context=self._context_of(record.drafter_version))
            self._open[record.request] = current
        self._open.move_to_end(record.request)
        current.seen_s = self._monotonic()
        before, overlap = current.num_bytes, self._settle_overlap(current, record)
        num_rows = current.num_rows + len(record.token_ids) - overlap
        if num_rows > self._max_rows and current.num_prompt_tokens > self._max_rows // 2:
            dropped = current.num_prompt_tokens - self._max_rows // 2
            current.drop_first(dropped)  # of the prompt, so that an answer isn't cut where it has hardly begun
            num_rows -= dropped
        if num_rows > self._max_rows and current.num_rows > current.num_prompt_tokens:
            yield current.close()
            current.keep_as_context(self._max_rows // 2)
            current.came_s = self._came_s()
        if overlap < len(record.token_ids):
            current.append(record, overlap)
        if current.num_rows > self._max_rows and current.num_rows == current.num_prompt_tokens:
            current.drop_first(current.num_rows - self._max_rows // 2)
        self._open_bytes += current.num_bytes - before
        if self._open_bytes > self.max_open_bytes:
            yield from self._make_room()
        while self._open_bytes > self.max_open_bytes and len(self._open) > 1:
            largest = max(self._open, key=lambda request: self._open[request].num_bytes)
            yield from self._close(largest)
            self._ignore(largest)

    def finish(self) -> Iterator[Stretch]:
        """End all stretches: the engine stopped, or a caller wants the present ones."""
        for request in list(self._open):
            yield from self._close(request)
        self._ignored.clear()

    def forget(self) -> None:
        """Drop all open stretches."""
        self._open.clear()
        self._ignored.clear()
        self._open_bytes = 0

    @property
    def _is_short(self) -> bool:
        """Whether there is no room for another request."""
        return self._open_bytes > self.max_open_bytes // 2 or len(self._open) >= self._max_open

    def _make_room(self) -> Iterator[Stretch]:
        """While there is none: shorten the prompts held, then close silent requests, since their end was lost."""
        if not self._is_short:
            return
        for current in self._open.values():
            if (surplus := current.num_prompt_tokens - SHORT_PROMPT_ROWS) > 0:
                self._open_bytes -= surplus * current.row_bytes
                current.drop_first(surplus)
        until_s = self._monotonic() - SILENT_S
        while self._is_short and (request := next(iter(self._open), "")) and self._open[request].seen_s < until_s:
            yield from self._close(request)

    def _ignore(self, request: str) -> None:
        """Take no more records of a request until it ends."""
        self._ignored[request] = None
        if len(self._ignored) > 4 * self._max_open:
            self._ignored.popitem(last=False)  # its end was lost

    def _begins_anew(self, current: _Open, record: RingRecord) -> bool:
        overlap = min(current.end - record.first_position, len(record.token_ids))
        is_known = record.first_position >= current.first and overlap > 0 and self._repeats(current, record, overlap)
        return bool(
            (record.flags & FLAG_GAP and not is_known)
            or not current.first <= record.first_position <= current.end
            or (
                record.drafter_version != current.drafter_version
                and self._context_of(record.drafter_version) != self._context_of(current.drafter_version)
            )
        )

    @staticmethod
    def _repeats(current: _Open, record: RingRecord, overlap: int) -> bool:
        return np.array_equal(current.held_ids(record.first_position, overlap), record.token_ids[:overlap])

    def _settle_overlap(self, current: _Open, record: RingRecord) -> int:
        """Make the stretch end where the record, or its remaining rows, begin; return how many rows of it are held already."""
        overlap = min(current.end - record.first_position, len(record.token_ids))
        if overlap > 0:
            if self._repeats(current, record, overlap):
                return overlap
            current.cut_at(record.first_position)
        return 0

    def _close(self, request: str) -> Iterator[Stretch]:
        current = self._open.pop(request, None)
        if current is not None:
            self._open_bytes -= current.num_bytes
            if current.num_rows:
                yield current.close()
