"""What the daemon imports of this folder brings no torch with it."""

import subprocess
import sys

import pytest

from honed.recalib.trainer import check_device


@pytest.mark.parametrize("module", ["registry", "gate", "trainer_settings"])
def test_the_daemon_s_imports_bring_no_torch(module):
    code = f"import sys, honed.recalib.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_registry_needs_no_numpy():
    code = "import sys, honed.recalib.registry; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("device", ["coda", "cuda:x", ""])
def test_a_device_that_does_not_exist_is_named(device):
    with pytest.raises(ValueError, match=r"trainer\.device"):
        check_device(device)


def test_the_cpu_is_always_there():
    check_device("cpu")
