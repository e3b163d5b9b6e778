"""New weights are staged where they take nothing from vLLM."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from honed.attach.swap import staging
from honed.attach.swap.staging import RESERVE_BYTES, Staging, has_room

GIB = 1 << 30
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize(
    ("free", "wanted", "most", "is_there"),
    [
        (8 * GIB, 2 * GIB, 0, True),
        (2 * GIB, 2 * GIB, 0, False),  # nothing would be left
        (2 * GIB + RESERVE_BYTES, 2 * GIB, 0, True),
        (GIB, 2 * GIB, 2 * GIB, True),  # in what the last one had
        (GIB, 4 * GIB, 2 * GIB, False),  # two that take turns
        (RESERVE_BYTES - 1, GIB, 2 * GIB, False),  # vLLM has come to need it
    ],
)
def test_as_much_as_leaves_the_reserve(free: int, wanted: int, most: int, is_there: bool) -> None:
    assert has_room(free, wanted, most) == is_there


def test_what_vllm_will_still_want_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sizes its KV cache so that its largest batch's activations fit, and allocates them when that batch comes."""
    assert not has_room(5 * GIB, 2 * GIB, 0, 4 * GIB)
    assert has_room(6 * GIB, 2 * GIB, 0, 4 * GIB)
    assert not has_room(2 * GIB, 2 * GIB, 0, 0)
    free = [6 * GIB]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 80 * GIB))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    reserve = SimpleNamespace(num_bytes=lambda staged: 6 * GIB - 8192)
    there = Staging(torch.device("cpu"), reserve)  # type: ignore[arg-type]
    monkeypatch.setattr(there, "_stream", object())
    monkeypatch.setattr(there, "_move", lambda tensors: {})
    small, large = {"w": torch.empty(1024)}, {"w": torch.empty(4096)}
    assert there.bring(small) == {}
    assert there.bring(large) == large


def test_on_a_cpu_they_stay_where_they_are() -> None:
    tensors = {"weight": torch.ones(3)}
    assert Staging(torch.device("cpu")).bring(tensors) is tensors


def weights(factor: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((1024, 1024), factor + i) for i, name in enumerate("abcd")}


class Queue(contextlib.nullcontext[None]):
    """Stands in for a CUDA stream: what is copied on it is copied when somebody waits for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copy = copy = torch.Tensor.copy_

        def queue_copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            if not non_blocking:
                return copy(target, source)
            self._copies.append((target, source))
            return target

        patch.setattr(torch.Tensor, "copy_", queue_copy)
        patch.setattr(torch.cuda, "stream", lambda stream: stream)

    def synchronize(self) -> None:
        for target, source in self._copies:
            self._copy(target, source)
        self._copies.clear()


@pytest.mark.fault("pinned memory allocated within a step")
@pytest.mark.parametrize("buffer_bytes", [96, 1000, 1 << 20])
def test_weights_reach_the_device_through_one_pinned_buffer(monkeypatch: pytest.MonkeyPatch, buffer_bytes: int) -> None:
    """Which isn't written while a copy reads it."""
    pinned: list[int] = []
    empty = torch.empty

    def allocate(*size: Any, pin_memory: bool = False, **rest: Any) -> torch.Tensor:
        made = empty(*size, **rest)
        pinned.extend([made.nbytes] if pin_memory else [])
        return made

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.nbytes) or tensor)
    monkeypatch.setattr(staging, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 * GIB, 80 * GIB))
    there = Staging(torch.device("cpu"))
    monkeypatch.setattr(there, "_stream", Queue(monkeypatch))
    for seed in range(3):
        chance = torch.Generator().manual_seed(seed)
        shapes = {"norm": (7,), "k": (4, 31), "q": (16, 31), "scale": (), "none": (0, 3)}
        given = {name: torch.randn(shape, generator=chance).to(torch.bfloat16) for name, shape in shapes.items()}
        found = there.bring(given)
        assert all(torch.equal(found[name], tensor) for name, tensor in given.items())
        assert not any(found[name] is tensor for name, tensor in given.items())
    assert pinned == [buffer_bytes]


@pytest.mark.gpu
@needs_gpu
def test_on_a_device_with_room_they_are_on_it_and_memory_is_used_again() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    there, reserved = Staging(device), []
    for number in range(6):
        brought = there.bring(weights(float(number)))
        assert {tensor.device for tensor in brought.values()} == {device}
        assert [float(tensor.mean()) for tensor in brought.values()] == [number, number + 1, number + 2, number + 3]
        del brought
        reserved.append(torch.cuda.memory_reserved(device))
    assert len(set(reserved)) == 1


@pytest.mark.gpu
@needs_gpu
def test_after_a_sleep_they_need_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    there = Staging(torch.device("cuda"))
    there.bring(weights(2.0))
    there.rest(True)
    torch.cuda.empty_cache()
    assert all(tensor.is_pinned() for tensor in there.bring(weights(2.0)).values()), "vLLM sleeps"
    there.rest(False)
    monkeypatch.setattr(staging, "RESERVE_BYTES", 1 << 60)
    assert all(tensor.is_pinned() for tensor in there.bring(weights(2.0)).values()), "no room is left"


@pytest.mark.gpu
@needs_gpu
def test_on_a_full_device_they_wait_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "RESERVE_BYTES", 1 << 60)
    brought = Staging(torch.device("cuda")).bring(weights(2.0))
    assert all(tensor.is_pinned() for tensor in brought.values())
    live = torch.zeros(1024, 1024, device="cuda")
    live.copy_(brought["b"], non_blocking=True)
    torch.cuda.synchronize()
    assert float(live.mean()) == 3.0
