"""The way of captured rows into the ring: at once, or on a thread, in order, within a bound, and what goes wrong is told."""

from __future__ import annotations

import contextlib
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from honed.adapt.protocol.sample_ring import FLAG_GAP, FLAG_PREFILL, FLAG_REJECTED, KIND_END
from honed.attach.capture import captured_rows
from honed.attach.capture.captured_rows import CapturedRequest, CapturedRows, RowWriter
from honed.attach.capture.pinned_arena import Slot
from honed.attach.capture.ring_writer import RingWriter
from honed.recalib.samples.ring_reader import RingReader

H = 4


class Ring:
    """Stands where the ring is: it notes what comes, and can be made to wait or to refuse."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def write_rows(self, key: str, workload: str, version: str, first: int, tokens: Any, *_: Any) -> None:
        assert self.may_go.wait(30)
        if version == "bad":
            raise ValueError("refused")
        self.seen += [f"{key}@{first + i}" for i in range(len(tokens))]

    def write_end(self, key: str, workload: str) -> None:
        self.seen.append(f"end of {key}")


def request(key: str) -> CapturedRequest:
    return CapturedRequest(key, "s", "w", 1)


def rows(of: CapturedRequest, first: int, count: int, version: str = "v1", is_apart: bool = True) -> CapturedRows:
    """Rows of one request; `is_apart`: as from a GPU, whose rows are written on the thread."""
    positions = torch.arange(first, first + count)
    return CapturedRows([of], [count], torch.zeros(count, H), positions.int(), positions, None, event(is_apart), version)


def event(is_apart: bool) -> Any:
    return SimpleNamespace(query=lambda: True) if is_apart else None


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """Every write of this process to any file fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait(writer: RowWriter) -> None:
    deadline_s = time.monotonic() + 30
    while not writer.is_done:
        assert time.monotonic() < deadline_s, "never written"
        time.sleep(0.001)


@pytest.mark.parametrize("is_apart", [False, True])
def test_rows_and_ends_come_in_order(is_apart: bool) -> None:
    ring, a, b = Ring(), request("a"), request("b")
    writer = RowWriter(lambda size, dtype: ring)  # type: ignore[arg-type, return-value]
    for of, first, count in ((a, 0, 2), (b, 0, 1), (a, 2, 1)):
        writer.take(rows(of, first, count, is_apart=is_apart))
    writer.take_end(a)
    writer.take(rows(b, 1, 1, is_apart=is_apart))
    writer.take_end(b)
    wait(writer)
    assert ring.seen == ["a@0", "a@1", "b@0", "a@2", "end of a", "b@1", "end of b"]
    assert (writer.num_rows, writer.num_skipped) == (5, 0)


def test_nobody_waits_for_the_ring() -> None:
    ring, a = Ring(), request("a")
    writer = RowWriter(lambda size, dtype: ring)  # type: ignore[arg-type, return-value]
    ring.may_go.clear()
    for first in range(50):
        writer.take(rows(a, first, 1))
    assert ring.seen == []
    assert not writer.is_done
    ring.may_go.set()
    wait(writer)
    assert len(ring.seen) == 50


def test_pinned_memory_is_given_back_once_its_rows_are_written() -> None:
    ring, a = Ring(), request("a")
    writer = RowWriter(lambda size, dtype: ring)  # type: ignore[arg-type, return-value]
    ring.may_go.clear()
    slots = [Slot(torch.empty(64), 0, 64) for _ in range(4)]
    for number, version in enumerate(("v1", "bad")):
        writer.take(replace(rows(a, number, 1, version), held=tuple(slots[2 * number : 2 * number + 2])))
    assert not any(slot.is_free for slot in slots)
    ring.may_go.set()
    wait(writer)
    assert all(slot.is_free for slot in slots), "also of rows that were refused"


def test_what_goes_wrong_on_the_thread_is_told_once_and_stops_nothing() -> None:
    ring, a = Ring(), request("a")
    writer = RowWriter(lambda size, dtype: ring)  # type: ignore[arg-type, return-value]
    writer.take(rows(a, 0, 2, "bad"))
    writer.take(rows(a, 2, 1))
    wait(writer)
    with pytest.raises(ValueError, match="refused"):
        writer.raise_failure()
    writer.raise_failure()
    assert ring.seen == ["a@2"]
    assert (writer.num_rows, writer.num_skipped) == (1, 2)


def test_without_room_for_a_ring_none_is_tried_until_told_to() -> None:
    tries, a = [], request("a")

    def make(size: int, dtype: str) -> Any:
        tries.append((size, dtype))
        raise OSError("no space left on device")

    writer = RowWriter(make)
    for first in range(3):
        writer.take(rows(a, first, 1))
    writer.take_end(a)
    wait(writer)
    with pytest.raises(OSError, match="no space"):
        writer.raise_failure()
    assert (tries, writer.num_skipped, writer.has_ring) == ([(H, "float32")], 3, False)
    writer.retry()
    with pytest.raises(OSError, match="no space"):
        writer.take(rows(a, 3, 1, is_apart=False))
    assert len(tries) == 2


def test_an_idle_thread_ends_and_another_one_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_rows, "IDLE_S", 0.01)
    ring, a = Ring(), request("a")
    writer = RowWriter(lambda size, dtype: ring)  # type: ignore[arg-type, return-value]
    threads = set()
    for first in range(3):
        writer.take(rows(a, first, 1))
        assert writer._thread is not None
        threads.add(thread := writer._thread)
        thread.join(30)
        assert not thread.is_alive()
    writer.take_end(a)
    assert ring.seen == ["a@0", "a@1", "a@2", "end of a"]
    assert len(threads) == 3


@pytest.mark.fault("a full tmpfs under the sample ring")
@pytest.mark.parametrize("is_apart", [False, True])
def test_rows_that_the_filesystem_refuses_are_counted_and_leave_a_gap(tmp_path: Path, is_apart: bool) -> None:
    """Rows of all requests of a step are counted, and what follows isn't joined to what came before."""
    a, b = request("a"), request("b")
    writer = RowWriter(lambda size, dtype: RingWriter(tmp_path / "ring", 1 << 20, size, dtype))
    both = CapturedRows([a, b], [2, 3], torch.zeros(5, H), *(torch.tensor([2, 3, 0, 1, 2]),) * 2, None, event(is_apart), "v1")
    writer.take(rows(a, 0, 2, is_apart=is_apart))
    wait(writer)
    with no_room():
        with contextlib.ExitStack() as stack:
            if not is_apart:
                stack.enter_context(pytest.raises(OSError, match="File too large"))
            writer.take(both)
        wait(writer)
        writer.take_end(b)
    with pytest.raises(OSError, match="File too large"):
        writer.raise_failure()
    writer.raise_failure()
    writer.take(rows(a, 4, 2, is_apart=is_apart))
    wait(writer)
    writer.take_end(a)
    assert (writer.num_rows, writer.num_skipped) == (4, 5)
    *records, end = RingReader(tmp_path / "ring").poll().records
    assert [(r.request, r.first_position, r.flags) for r in records] == [("a", 0, FLAG_PREFILL), ("a", 4, FLAG_GAP)]
    assert (end.kind, end.request) == (KIND_END, "a")


@pytest.mark.fault("captured rows that aren't finite")
@pytest.mark.parametrize("is_apart", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_row_that_is_not_finite_is_dropped_and_counted(tmp_path: Path, dtype: torch.dtype, is_apart: bool) -> None:
    """One such row in a training makes all weights NaN."""
    ring = RingWriter(tmp_path / "ring", 1 << 16, H, str(dtype).removeprefix("torch."))
    writer, a = RowWriter(lambda size, dtype: ring), request("a")
    features = torch.ones(9, H).to(dtype)
    features[0, 1], features[3, 0], features[4, 3], features[8] = torch.nan, torch.inf, -torch.inf, torch.nan
    positions = torch.arange(9)
    rejected = torch.tensor([1])  # the last row is a refused draft's, and is no loss
    writer.take(CapturedRows([a], [9], features, positions.int(), positions, rejected, event(is_apart), "v1"))
    wait(writer)
    assert (writer.num_rows, writer.num_nonfinite, writer.num_skipped) == (5, 3, 0)
    found = RingReader(tmp_path / "ring").poll().records
    assert [record.token_ids.tolist() for record in found] == [[1, 2], [5, 6, 7]]
    assert [record.flags & FLAG_GAP for record in found] == [FLAG_GAP, FLAG_GAP]
    assert [record.flags & FLAG_REJECTED for record in found] == [0, FLAG_REJECTED]
    assert all(np.isfinite(record.features.astype(np.float32)).all() for record in found)
