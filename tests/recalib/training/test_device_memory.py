"""The trainer's device by the names that settings give it, as PyTorch's own functions take it."""

from __future__ import annotations

import pytest
import torch

from honed.recalib.training.device_memory import available_bytes, give_back, hold_to, use

GIB = 1 << 30


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, object]]:
    """Two GPUs with 80 GiB as far as PyTorch's Python goes; what it is told."""
    told: list[tuple[str, object]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: told.append(("current", device)))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (60 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda.memory, "_lazy_init", lambda: None)
    monkeypatch.setattr(
        torch.cuda.memory.torch._C, "_cuda_setMemoryFraction", lambda *a: told.append(("limit", a)), raising=False
    )
    return told


@pytest.mark.parametrize(("name", "index"), [("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_memory_is_held_to_a_device_of_any_name(name: str, index: int, gpus: list[tuple[str, object]]) -> None:
    """`cuda`, the name in every example, once ended each recalibration: PyTorch wants the number there."""
    device = use(name)
    assert device == torch.device("cuda", index)
    hold_to(device, 20 * GIB)
    assert gpus == [("current", device), ("limit", (0.25, index))]


def test_a_cpus_free_memory_is_known_and_has_no_limit() -> None:
    device = use("cpu")
    assert device == torch.device("cpu")
    assert 1 << 20 < available_bytes(device) < 1 << 50
    assert available_bytes(device, limit_bytes=1 << 20) == 1 << 20
    hold_to(device, 1)
    give_back(device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_allocations_end_at_the_limit() -> None:
    device = use("cuda")
    _, total = torch.cuda.mem_get_info(device)
    try:
        hold_to(device, GIB)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device=device)
    finally:
        hold_to(device, total)
        give_back(device)
