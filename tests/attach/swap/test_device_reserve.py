"""What vLLM has planned for and not allocated is known, or guarded against, and reading it never fails."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from honed.attach.swap.device_reserve import UNMEASURED_BYTES, DeviceReserve

GIB = 1 << 30
UUID = "6d9c4b9e-8f6b-4f0e-9a53-0d1e2f3a4b5c"


class Gpu:
    """A GPU as far as PyTorch's Python goes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.reserved = self.allocated = 0
        patch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved)
        patch.setattr(torch.cuda, "memory_allocated", lambda device: self.allocated)
        patch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


@pytest.mark.parametrize("worker", [SimpleNamespace(device=torch.device("cpu"), peak_activation_memory=GIB), SimpleNamespace()])
def test_on_a_cpu_nothing_is_reserved(worker: Any) -> None:
    made = DeviceReserve(worker)
    assert (made.gpu, made.num_bytes()) == ("", 0)


def test_the_peak_of_activations_stays_free_and_what_vllm_does_not_measure(gpu: Gpu) -> None:
    made = DeviceReserve(SimpleNamespace(device="cuda:1", peak_activation_memory=3 * GIB))
    assert (made.gpu, made.num_bytes()) == (UUID, 3 * GIB + UNMEASURED_BYTES)
    made = DeviceReserve(SimpleNamespace(device="cuda:1"))  # --kv-cache-memory: nothing was measured
    assert (made.gpu, made.num_bytes()) == (UUID, UNMEASURED_BYTES)


def test_what_the_allocator_has_come_to_hold_is_not_counted_twice(gpu: Gpu) -> None:
    gpu.reserved, gpu.allocated = 70 * GIB, 69 * GIB  # captured graphs' own
    made = DeviceReserve(SimpleNamespace(device="cuda", peak_activation_memory=3 * GIB))
    assert made.num_bytes() == 4 * GIB
    gpu.reserved = 72 * GIB
    assert made.num_bytes() == 2 * GIB, "after a large batch"
    assert made.num_bytes(staged=GIB) == 3 * GIB, "honed will use that itself"
    gpu.reserved = 90 * GIB
    assert made.num_bytes() == 0
    gpu.reserved = 60 * GIB
    assert made.num_bytes() == 4 * GIB, "a pool of vLLM's own, which PyTorch doesn't count"


class Broken:
    """A worker of a release that honed doesn't know."""

    device = "cuda"

    @property
    def peak_activation_memory(self) -> int:
        raise RuntimeError("not profiled")


@pytest.mark.parametrize(
    "worker", [Broken(), SimpleNamespace(device="cuda", peak_activation_memory="much"), SimpleNamespace(device="gpu")]
)
def test_reading_it_never_fails(worker: Any, gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    assert DeviceReserve(worker).num_bytes() >= 0
    assert "isn't known in full" in caplog.text


def test_a_gpu_without_a_uuid_has_a_reserve_all_the_same(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace())
    made = DeviceReserve(SimpleNamespace(device="cuda", peak_activation_memory=GIB))
    assert (made.gpu, made.num_bytes()) == ("", GIB + UNMEASURED_BYTES)


def test_a_device_that_fails_later_leaves_what_was_planned(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made = DeviceReserve(SimpleNamespace(device="cuda", peak_activation_memory=GIB))

    def fail(device: torch.device) -> int:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "memory_reserved", fail)
    assert made.num_bytes() == GIB + UNMEASURED_BYTES
