"""Captured rows and their way into the sample ring: beside the steps, where they come from a GPU.

A long prompt's rows are tens of megabytes; making a ring allocates all of its memory. In a step, either would keep the
engine's thread from launching the next one. Copies and checksums release the interpreter's lock. On a CPU rows are written at
once: there is no spare core.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from honed.adapt.protocol.sample_ring import FLAG_GAP, FLAG_PREFILL, FLAG_REJECTED, finite_rows, runs_of
from honed.attach.capture.pinned_arena import Slot
from honed.attach.capture.ring_writer import RingWriter

IDLE_S = 10.0
"""The thread ends after this idle time; the next rows start one."""
_RING_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


@dataclass(slots=True)
class CapturedRequest:
    """A request whose rows are captured."""

    key: str
    session: str
    workload: str
    prompt_tokens: int
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    has_likely: bool = False
    """Whether the target's most likely tokens are captured: its own are drawn at random from the target's own distribution."""
    next_position: int = 0
    """Used by the writer only, as what follows."""
    is_over: bool = False
    """Whether the answer has ended: vLLM delivers nothing of what its last rounds computed beyond."""
    has_arrived: ClassVar[bool] = True

    def until_end(self, token_ids: npt.NDArray[np.int32], positions: npt.NDArray[np.int64]) -> int:  # [n], [n]
        """Count the rows up to the one that ends the answer, and note that it has ended."""
        if self.is_over:
            return 0
        ends = np.flatnonzero(np.isin(token_ids, list(self.stop_ids)) & (positions >= self.prompt_tokens))
        self.is_over = bool(len(ends))
        return int(ends[0]) + 1 if self.is_over else len(token_ids)


@dataclass(frozen=True, slots=True)
class CapturedRows:
    """Rows of one step on their way to the host, or there."""

    requests: list[CapturedRequest]
    counts: list[int]
    features: torch.Tensor  # [N, F]
    token_ids: torch.Tensor  # [N]
    positions: torch.Tensor  # [N]
    num_rejected: torch.Tensor | None  # [R']
    arrived: Any  # torch.cuda.Event | None
    drafter_version: str
    """Version of the weights that computed the features."""
    likely: torch.Tensor | None = None  # [N] int32, the target's most likely token after each row; −1: not known
    held: tuple[Slot, ...] = ()
    """Pinned memory of a step, theirs and what it copied to the device."""

    def release(self) -> None:
        """Give the pinned memory back, once they have arrived and are written, or aren't needed."""
        for slot in self.held:
            slot.free()

    @property
    def has_arrived(self) -> bool:
        """Whether they are on the host."""
        return self.arrived is None or self.arrived.query()


class RowWriter:
    """Writes rows in the order in which they were computed.

    Args:
        make_ring: (feature_size, feature_dtype) -> the ring; called for the first rows, and for later ones after `retry`.
    """

    def __init__(self, make_ring: Callable[[int, str], RingWriter]) -> None:
        self._make_ring = make_ring
        self._ring: RingWriter | None = None
        self._is_refused = False
        self._thread: threading.Thread | None = None
        self._queue: queue.SimpleQueue[CapturedRows | CapturedRequest] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._failure: Exception | None = None
        self.num_rows = 0
        self.num_skipped = 0
        """Rows that couldn't be written."""
        self.num_nonfinite = 0
        """Rows with NaN or infinity, which are never written: one of them would spoil a training."""

    @property
    def has_ring(self) -> bool:
        """Whether there is a ring to write to."""
        return self._ring is not None

    @property
    def is_done(self) -> bool:
        """Whether all rows taken are written."""
        return self._num_waiting == 0

    def retry(self) -> None:
        """Make a ring again when rows come, though there was no room last time."""
        self._is_refused = False

    def take(self, rows: CapturedRows) -> None:
        """Write rows that have arrived, on the thread if they came from a GPU.

        What waits is bounded by the pinned memory that there is for them.

        Raises:
            ValueError, OSError: they couldn't be written; `raise_failure` raises the thread's errors.
        """
        if not rows.requests:
            rows.release()
        elif rows.arrived is not None:
            self._put(rows)
        else:
            self._write(rows)

    def take_end(self, request: CapturedRequest) -> None:
        """Note a finished request whose rows were taken; `raise_failure` raises what goes wrong."""
        if self.is_done:
            self._write_end(request)
        else:
            self._put(request)

    def raise_failure(self) -> None:
        """Raise the last error since the last call that wasn't raised, if any."""
        with self._lock:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _put(self, item: CapturedRows | CapturedRequest) -> None:
        with self._lock:
            self._num_waiting += 1
            self._queue.put(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="honed-capture", daemon=True)
                self._thread.start()

    def _work(self) -> None:
        while True:
            try:
                item = self._queue.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._num_waiting:
                        continue
                    self._thread = None
                    return
            try:
                if isinstance(item, CapturedRequest):
                    self._write_end(item)
                else:
                    self._write(item)
            except Exception as error:
                self._note(error)
            finally:
                if isinstance(item, CapturedRows):
                    item.release()
                with self._lock:
                    self._num_waiting -= 1
                del item

    def skip(self, num_rows: int) -> None:
        """Count rows that aren't written."""
        with self._lock:
            self.num_skipped += num_rows

    def _note(self, error: Exception) -> None:
        with self._lock:
            self._failure = error.with_traceback(None)  # its frames hold the rows

    def _write_end(self, request: CapturedRequest) -> None:
        try:
            if self._ring is not None:
                self._ring.write_end(request.key, request.workload)
        except OSError as error:
            self._note(error)

    def _write(self, rows: CapturedRows) -> None:
        features = _to_numpy(rows.features)
        if self._ring is None:
            if self._is_refused:
                self.skip(len(features))
                return
            try:
                self._ring = self._make_ring(features.shape[1], _RING_DTYPES[rows.features.dtype])
            except Exception:
                self.skip(len(features))
                self._is_refused = True
                raise
        token_ids = rows.token_ids.numpy().astype(np.int32)
        likely = None if rows.likely is None else rows.likely.numpy()
        positions = rows.positions.numpy()
        rejected = rows.num_rejected.tolist() if rows.num_rejected is not None else [0] * len(rows.counts)
        is_finite = finite_rows(features)
        begin = 0
        refused: ValueError | OSError | None = None
        for request, count, num_rejected in zip(rows.requests, rows.counts, rejected, strict=True):
            end = begin + count - num_rejected
            last = begin + request.until_end(token_ids[begin:end], positions[begin:end])
            is_rejected, end = num_rejected > 0 and last == end, last
            runs = [slice(begin + run.start, begin + run.stop) for run in runs_of(is_finite[begin:end])]
            self.num_nonfinite += end - begin - sum(run.stop - run.start for run in runs)
            begin += count
            for run in runs:
                flags = FLAG_REJECTED if is_rejected and run.stop == end else 0
                try:
                    given = request, rows.drafter_version, token_ids[run], positions[run], features[run]
                    self._write_request(*given, flags, None if likely is None or not request.has_likely else likely[run])
                except (ValueError, OSError) as error:
                    self.skip(run.stop - run.start)
                    refused = error
        if refused is not None:
            raise refused

    def _write_request(
        self,
        request: CapturedRequest,
        drafter_version: str,
        token_ids: npt.NDArray[np.int32],  # [n]
        positions: npt.NDArray[np.int64],  # [n]
        features: npt.NDArray[Any],  # [n, F]
        flags: int,
        likely: npt.NDArray[np.int32] | None,  # [n]
    ) -> None:
        count = len(token_ids)
        first = int(positions[0])
        if int(positions[-1]) - first != count - 1:
            raise ValueError(f"rows {first}…{int(positions[-1])} of a request are not consecutive ({count} rows): not captured")
        flags |= FLAG_PREFILL if first < request.prompt_tokens else 0
        if first != request.next_position:
            flags |= FLAG_GAP
        assert self._ring is not None
        self._ring.write_rows(
            request.key,
            request.workload,
            drafter_version,
            first,
            token_ids,
            features,
            flags,
            request.session,
            likely,
        )
        request.next_position = first + count  # only now: rows that couldn't be written leave a gap
        self.num_rows += count


def _to_numpy(features: torch.Tensor) -> npt.NDArray[Any]:
    # numpy has no bfloat16: its bits travel as uint16.
    return features.view(torch.uint16).numpy() if features.dtype == torch.bfloat16 else features.numpy()
