"""A step on a GPU finds its pinned memory ready, and none is used again while a copy or the ring's writer needs it.

CUDA's streams and events are stood in for; copies are done when their event is due.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from honed.attach.capture import capture
from honed.attach.capture.capture import LEAST_PINNED, MOST_PINNED, Capturer
from honed.attach.capture.pinned_arena import ALIGN, PinnedArena, Slot
from honed.attach.runner.top_tokens import TopTokens
from tests.attach.capture.test_capture import H, Recorder, schedule, view


class Cuda:
    """Stands in for CUDA: what is queued is done at `run`, in order; `pinned`: each allocation of pinned memory."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pinned: list[tuple[str, int]] = []
        self._queue: deque[Callable[[], object]] = deque()
        empty, copy = torch.empty, torch.Tensor.copy_

        def allocate(*size: Any, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
            made = empty(*size, **rest)
            if pin_memory:
                self.pinned.append((threading.current_thread().name, made.nbytes))
            return made

        def queue_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if not non_blocking:
                return copy(target, source)
            self._queue.append(lambda: copy(target, source))
            return target

        def pin(tensor: torch.Tensor) -> torch.Tensor:
            self.pinned.append((threading.current_thread().name, tensor.nbytes))
            return tensor

        patch.setattr(torch, "empty", allocate)
        patch.setattr(torch.Tensor, "copy_", queue_copy)
        patch.setattr(torch.Tensor, "pin_memory", pin)
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
        for name in ("Stream", "stream", "current_stream"):
            patch.setattr(torch.cuda, name, lambda *_: _Stream())
        patch.setattr(torch.cuda, "Event", lambda: _Event(self._queue))
        patch.setattr(capture, "use_device", lambda device: None)
        patch.setattr(capture, "_compile", lambda *_: None)

    def run(self) -> None:
        """Do everything that was queued."""
        while self._queue:
            self._queue.popleft()()


class _Stream(contextlib.nullcontext[None]):
    def wait_stream(self, other: _Stream) -> None:
        pass


class _Event:
    def __init__(self, queue: deque[Callable[[], object]]) -> None:
        self._queue, self._has_passed = queue, False

    def record(self) -> None:
        self._queue.append(lambda: setattr(self, "_has_passed", True))

    def query(self) -> bool:
        return self._has_passed


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def capturer_of(ring: Recorder, step_bytes: int = 0) -> Capturer:
    made = Capturer(lambda size, dtype: ring, lambda: (torch.ones(H), 1e-6), "fused", b"key", TopTokens())  # type: ignore[arg-type, return-value]
    made.prepare(torch.device("cuda"), step_bytes)
    assert made._preparing is not None
    made._preparing.join(60)
    made.set_share(1.0, "v1")
    return made


def written(capturer: Capturer) -> None:
    deadline_s = time.monotonic() + 30
    while not capturer.writer.is_done:
        assert time.monotonic() < deadline_s, "never written"
        time.sleep(0.001)


@pytest.mark.fault("pinned memory allocated within a step")
def test_no_step_allocates_pinned_memory(cuda: Cuda) -> None:
    """Each new size took the driver tens of milliseconds."""
    ring = Recorder()
    made = capturer_of(ring)
    assert cuda.pinned == [("honed-prepare", LEAST_PINNED)]
    for number in range(20):
        made.on_schedule(schedule({f"r{number}": list(range(1, 2 + number))}))
        made.on_step(view({f"r{number}": [(i, 1 + i) for i in range(1 + number)]}, rejected=[0]))
        cuda.run()
        made.on_schedule(schedule(finished=(f"r{number}",)))
        written(made)
    assert [row["tokens"] for row in ring.rows] == [list(range(1, 2 + number)) for number in range(20)]
    assert len(cuda.pinned) == 1


@pytest.mark.parametrize(("step_bytes", "taken"), [(0, LEAST_PINNED), (LEAST_PINNED + 5,) * 2, (1 << 40, MOST_PINNED)])
def test_there_is_room_for_one_step_at_least_and_a_bound(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, step_bytes: int, taken: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(capture, "PinnedArena", asked.append)
    capturer_of(Recorder(), step_bytes)
    assert asked == [taken]


def test_without_pinned_memory_nothing_is_captured(
    cuda: Cuda, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(num_bytes: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(capture, "PinnedArena", refuse)
    ring = Recorder()
    made = capturer_of(ring)
    made.on_schedule(schedule({"x": [5]}))
    made.on_step(view({"x": [(0, 5)]}))
    assert (ring.rows, made.writer.num_skipped) == ([], 0)
    assert "256 MiB of pinned memory: CUDA error: out of memory" in caplog.text


def test_memory_that_a_copy_still_needs_is_not_used_again(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several steps are under way at once; of those for which no memory is left, all are counted."""
    monkeypatch.setattr(capture, "LEAST_PINNED", 10 * ALIGN)
    ring = Recorder()
    made = capturer_of(ring)  # room for two steps, of four tensors each, and for another one's ids
    made.on_schedule(schedule({"x": [5, 6, 7, 8, 9]}))
    steps = [view({"x": [(2 * i, 5 + i), (2 * i + 1, 6 + i)]}, seed=i) for i in range(4)]
    for step in steps:
        made.on_step(step)
    assert made.writer.num_skipped == 4
    cuda.run()
    made.on_schedule(schedule())
    written(made)
    assert [row["tokens"] for row in ring.rows] == [[5, 6], [6, 7]]
    for row, step in zip(ring.rows, steps, strict=False):
        rows = step.states()
        torch.testing.assert_close(torch.from_numpy(row["features"]), rows / (rows.square().mean(-1, True) + 1e-6).sqrt())
    made.on_step(view({"x": [(8, 1), (9, 2)]}))
    cuda.run()
    made.on_schedule(schedule())
    written(made)
    assert ring.rows[-1]["tokens"] == [1, 2], "all of it is there again"


def test_rows_that_are_forgotten_keep_their_memory_until_the_copy_is_over(cuda: Cuda) -> None:
    made = capturer_of(Recorder())
    made.on_schedule(schedule({"x": [5]}))
    made.on_step(view({"x": [(0, 5)]}))
    made.begin_anew()
    assert made._arena is not None
    slots = list(made._arena._slots)
    assert [slot.is_free for slot in slots] == [False, False]
    cuda.run()
    made.on_schedule(schedule())
    assert [slot.is_free for slot in slots] == [True, True]
    assert made.writer.num_rows == 0


def test_a_step_that_fails_half_way_gives_its_memory_back(cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    made = capturer_of(Recorder())
    made.on_schedule(schedule({"x": [5]}))

    def fail(*_: Any) -> None:
        raise ValueError("no states")

    monkeypatch.setattr(made, "_features", fail)
    with pytest.raises(ValueError, match="no states"):
        made.on_step(view({"x": [(0, 5)]}))
    assert made._arena is not None
    (slot,) = made._arena._slots
    assert not slot.is_free
    cuda.run()
    made.on_schedule(schedule())
    assert slot.is_free


@pytest.mark.parametrize("seed", range(4))
def test_slots_in_use_never_overlap_and_all_room_comes_back(cuda: Cuda, seed: int) -> None:
    chance, arena = random.Random(seed), PinnedArena(64 * ALIGN)
    in_use: list[Slot] = []
    refused = 0
    for _ in range(3000):
        if in_use and chance.random() < 0.5:
            in_use.pop(0 if chance.random() < 0.8 else chance.randrange(len(in_use))).free()
            continue
        sizes = [chance.randrange(600) for _ in range(chance.randint(1, 3))]
        slot = arena.take(sizes)
        if slot is None:
            refused += 1
            continue
        ends = [slot.tensor([size], torch.uint8) for size in sizes]
        assert sum(map(len, ends)) == sum(sizes)
        assert 0 <= slot.begin <= slot.end <= 64 * ALIGN
        assert all(slot.end <= one.begin or one.end <= slot.begin for one in in_use)
        in_use.append(slot)
    assert 0 < refused < 1500
    for slot in in_use:
        slot.free()
    assert arena.take([64 * ALIGN]) is not None
