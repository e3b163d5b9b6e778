"""What the daemon imports of this folder brings no torch with it."""

import os
import subprocess
import sys

import pytest
import torch

from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.process.trainer import check_device


@pytest.mark.parametrize("module", ["registry.registry", "gate.gate", "config.trainer"])
def test_the_daemon_s_imports_bring_no_torch(module):
    code = f"import sys, honed.recalib.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_registry_needs_no_numpy():
    code = "import sys, honed.recalib.registry.registry; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.fault("a mistyped device that training is said to run on")
@pytest.mark.parametrize("device", ["cdua", "cuda:x", "cuda:-1", "cuda:00", "cuda:1000", "cuda:0 ", "CPU", "mps", ""])
def test_a_device_that_does_not_exist_is_named(device):
    with pytest.raises(ValueError, match=f"device is {device!r}: use auto, cpu, cuda, or cuda:N"):
        TrainerSettings(device=device)


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:10"])
def test_devices_are_named_as_pytorch_names_them(device):
    assert TrainerSettings(device=device).device == device
    assert device == "auto" or str(torch.device(device)) == device


@pytest.mark.parametrize("listed", ["run/code", "", "~/run", "/run/\0"])
def test_a_runtime_directory_that_cannot_be_meant_is_named(listed):
    with pytest.raises(
        ValueError, match=r'other_runtime_dirs has .*: use absolute paths of folders, as in \["/run/honed-code"\]'
    ):
        TrainerSettings(other_runtime_dirs=("/run/honed-code", listed))


def test_its_own_runtime_directory_is_no_other_one(tmp_path):
    """Else its engines' memory would be counted twice."""
    (tmp_path / "link").symlink_to(tmp_path / "own")
    settings = TrainerSettings(
        other_runtime_dirs=(f"{tmp_path}/other", f"{tmp_path}/link", f"{tmp_path}/own/", f"{tmp_path}/other/")
    )
    assert settings.other_engines_dirs(tmp_path / "own" / "engines") == [tmp_path / "other" / "engines"]


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("cuda", "cuda:1"):
        check_device(device)
    with pytest.raises(ValueError, match=r"trainer\.device = 'cuda:2', but PyTorch sees cuda:0 … cuda:1 only"):
        check_device("cuda:2")


def test_the_cpu_is_always_there():
    check_device("cpu")


@pytest.mark.parametrize(("given", "priority"), [({}, "1"), ({"CUDA_MPS_CLIENT_PRIORITY": "0"}, "0")])
def test_others_go_first_on_processor_and_gpu(given, priority):
    code = """if True:
        import os, torch
        from honed.recalib.process.trainer import stand_back
        from honed.recalib.config.trainer import TrainerSettings
        stand_back(TrainerSettings(nice=3, torch_threads=1))
        print(os.nice(0), torch.get_num_threads(), os.environ["CUDA_MPS_CLIENT_PRIORITY"])
    """
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_MPS_CLIENT_PRIORITY"} | given
    told = subprocess.run([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    assert told.split() == [str(os.nice(0) + 3), "1", priority]
