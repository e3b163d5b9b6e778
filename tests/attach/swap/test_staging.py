"""New weights are staged where they take nothing from vLLM."""

from __future__ import annotations

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


def test_on_a_cpu_they_stay_where_they_are() -> None:
    tensors = {"weight": torch.ones(3)}
    assert Staging(torch.device("cpu")).bring(tensors) is tensors


def weights(factor: float) -> dict[str, torch.Tensor]:
    return {name: torch.full((1024, 1024), factor + i) for i, name in enumerate("abcd")}


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
