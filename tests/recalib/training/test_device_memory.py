"""The trainer's device by the names that settings give it, as PyTorch's own functions take it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from honed.adapt.protocol import wire
from honed.attach.engine.busy_flag import BusyFlag
from honed.recalib.config.engine_gpus import EngineGpus, engine_gpus
from honed.recalib.config.memory import MemoryBudgetError
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.training import device_memory, training_run
from honed.recalib.training.device_memory import DeviceError, available_bytes, check_gpu, devices_of, give_back, hold_to, use
from honed.recalib.training.progress import Progress
from tests.tools import ROOT

GIB = 1 << 30
TINY = ROOT / "benchmarks" / "tiny"


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
    device = use(torch.device(name))
    assert device == torch.device("cuda", index)
    hold_to(device, 20 * GIB)
    assert gpus == [("current", device), ("limit", (0.25, index))]


def test_a_cpus_free_memory_is_known_and_has_no_limit() -> None:
    device = use(torch.device("cpu"))
    assert device == torch.device("cpu")
    assert 1 << 20 < available_bytes(device) < 1 << 50
    assert available_bytes(device, limit_bytes=1 << 20) == 1 << 20
    hold_to(device, 1)
    give_back()


OURS, OTHER = "6d9c4b9e-8f6b-4f0e-9a53-0d1e2f3a4b5c", "00000000-8f6b-4f0e-9a53-0d1e2f3a4b5c"


@pytest.mark.fault("a training in memory that vLLM has planned for")
@pytest.mark.parametrize(("gpu", "fits"), [(OURS, False), (OTHER, True)])
def test_what_engines_will_still_want_is_left_to_them(
    gpus: list[tuple[str, object]], monkeypatch: pytest.MonkeyPatch, gpu: str, fits: bool
) -> None:
    """Else vLLM is out of memory at its next large batch, and ends."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=OURS))
    settings = TrainerSettings(device="cuda:1", precision="float32")
    request = wire.TrainRequest("o", str(TINY / "target"), "v0", scope="kv-frozen")
    feed: Any = SimpleNamespace(is_fused=True)
    engines = [EngineGpus("e", True, {gpu: 60 * GIB - 1})]
    run = training_run.TrainingRun(
        request, settings, TINY / "drafter", feed, Progress(), lambda: 0.0, None, engines=lambda: engines
    )
    with contextlib.nullcontext() if fits else pytest.raises(MemoryBudgetError, match=r"want 60\.0 GiB, has 1 MiB for it"):
        run.check_memory()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_allocations_end_at_the_limit() -> None:
    device = use(torch.device("cuda"))
    _, total = torch.cuda.mem_get_info(device)
    try:
        hold_to(device, GIB)
        with pytest.raises(torch.cuda.OutOfMemoryError):
            torch.empty(2 * GIB, dtype=torch.uint8, device=device)
    finally:
        hold_to(device, total)
        give_back()


def test_auto_goes_to_the_next_device_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, free = [torch.device("cpu", 0), torch.device("cpu")], [0, 2**40]
    monkeypatch.setattr(training_run, "devices_of", lambda name, engines: devices)
    monkeypatch.setattr(training_run, "check_gpu", lambda device, engines: None)
    monkeypatch.setattr(training_run, "available_bytes", lambda device, limit, reserve: free[devices.index(device)])
    request = wire.TrainRequest("o", str(TINY / "target"), "v0", scope="kv-frozen")
    feed: Any = SimpleNamespace(is_fused=True)
    run = training_run.TrainingRun(request, TrainerSettings(), TINY / "drafter", feed, Progress(), lambda: 0.0, None)
    run.check_memory()
    assert run.device is devices[1]
    free[0] = 2**40
    run.check_memory()
    assert run.device is devices[0]
    free[:] = [0, 0]
    with pytest.raises(MemoryBudgetError):
        run.check_memory()


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Let nvidia-smi answer this."""

    def answers(text: str) -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(f"#!/bin/sh\nprintf '%s' '{text}'\n")
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    return answers


@pytest.mark.parametrize(("answer", "is_full"), [("1200", True), ("2048", False), ("[N/A]", False), ("", False)])
def test_a_full_gpu_is_looked_at_from_outside(
    smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, answer: str, is_full: bool
) -> None:
    smi(f"0, GPU-77aa, 9000\n3, GPU-55bb, {answer}\n" if answer else "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-55,GPU-77")
    with pytest.raises(DeviceError, match=r"1\.2 GiB are free") if is_full else contextlib.nullcontext():
        check_gpu(torch.device("cuda"))


@pytest.mark.parametrize(("visible", "first"), [("", 2), ("2,1", 0), ("GPU-a,GPU-c", 1), ("MIG-1", None)])
def test_auto_takes_the_gpu_with_most_room(
    smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, visible: str, first: int | None
) -> None:
    """Not the one that serves, where another one is free."""
    smi("0, GPU-a, 4000\n1, GPU-b, 3000\n2, GPU-c, 80000\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices_of("auto") == [
        torch.device("cuda", first) if first is not None else torch.device("cuda"),
        torch.device("cpu"),
    ]


@pytest.mark.fault("a training on the GPU of an engine that is down")
@pytest.mark.parametrize("has_told", [True, False])
def test_the_gpu_of_an_engine_that_is_down_is_left_to_it(
    smi: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, has_told: bool
) -> None:
    """It has most room then, and the engine could not start again."""
    smi(f"0, GPU-{OURS}, 4000\n1, GPU-{OTHER.upper()}, 80000\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    here, down = (BusyFlag(tmp_path / name / "busy") for name in ("here", "down"))
    here.tell_gpus({OURS: GIB})
    if has_told:
        down.tell_gpus({OTHER: GIB})
    assert devices_of("auto", engine_gpus(tmp_path)) == [torch.device("cuda", 1), torch.device("cpu")]
    down.close()
    engines = engine_gpus(tmp_path)
    if has_told:
        assert devices_of("auto", engines)[0] == torch.device("cuda", 0)
        check_gpu(torch.device("cuda", 0), engines)
    with pytest.raises(DeviceError, match="down isn't running, and will want the memory of cuda:1 at its start"):
        check_gpu(torch.device("cuda", 1), engines)
    assert devices_of("cuda:1", engines) == [torch.device("cuda:1")], "as was asked for"
    assert len(engine_gpus(tmp_path, ["here"])) == (2 if has_told else 1), "an engine of another device, as far as is known"
    started = BusyFlag(tmp_path / "down" / "busy")
    started.tell_gpus({OTHER: GIB})
    check_gpu(torch.device("cuda", 1), engine_gpus(tmp_path))
    here.close()
    started.close()


@pytest.mark.fault("a training on the GPU of an engine that is down")
def test_where_all_gpus_are_left_to_engines_it_says_so_and_trains_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, smi: Callable[[str], None]
) -> None:
    smi(f"0, GPU-{OURS}, 80000\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    request = wire.TrainRequest("o", str(TINY / "target"), "v0", scope="kv-frozen")
    feed: Any = SimpleNamespace(is_fused=True)
    engines, progress = [EngineGpus("chat-0", False, {OURS: GIB})], Progress()
    run = training_run.TrainingRun(
        request, TrainerSettings(), TINY / "drafter", feed, progress, lambda: 0.0, None, engines=lambda: engines
    )
    run.check_memory()
    assert run.device == torch.device("cpu")
    assert progress.device_reason.startswith("chat-0 isn't running")
    monkeypatch.setattr(training_run, "available_bytes", lambda *_: 0)
    with pytest.raises(MemoryBudgetError, match="no GPU was taken: chat-0 isn't running"):
        run.check_memory()


def test_a_gpu_without_a_compiler_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(DeviceError, match="install gcc"):
        check_gpu(torch.device("cuda"))
    program = tmp_path / "other"
    program.write_text("")
    program.chmod(0o755)
    monkeypatch.setenv("CC", str(program))
    check_gpu(torch.device("cuda"))


def test_auto_means_the_cpu_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices_of("auto") == [torch.device("cpu")]
    assert devices_of("cuda:1") == [torch.device("cuda:1")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices_of("auto") == [torch.device("cuda"), torch.device("cpu")]


def cgroup(folder: Path, limit: str, **stat: int) -> Path:
    """Files of the group that this process is in: a limit, memory in use and what of it is for files."""
    own = folder / Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2].strip("/")
    own.mkdir(parents=True, exist_ok=True)
    for name, text in (("memory.max", limit), ("memory.current", str(stat.pop("used")))):
        (own / name).write_text(f"{text}\n")
    (own / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))
    return folder


@pytest.mark.fault("written files that count as used memory")
def test_a_limit_counts_files_only_as_far_as_they_must_stay(tmp_path: Path) -> None:
    held = cgroup(tmp_path, str(32 * GIB), used=31 * GIB, inactive_file=20 * GIB, active_file=4 * GIB, file_dirty=GIB)
    assert device_memory._free_in_cgroup(held) == (32 - 31 + 20 + 4 - 1) * GIB
    held = cgroup(tmp_path, str(32 * GIB), used=31 * GIB, shmem=20 * GIB, inactive_anon=20 * GIB, file_dirty=GIB)
    assert device_memory._free_in_cgroup(held) == GIB, "files in memory aren't given back"
    assert device_memory._free_in_cgroup(cgroup(tmp_path, "max", used=31 * GIB)) == 2**62
    assert device_memory._free_in_cgroup(tmp_path / "none") == 2**62
