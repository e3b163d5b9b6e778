"""Runs a kernel's cases in a process of their own: under Triton's interpreter, on a GPU, or through the compiler only.

TRITON_INTERPRET must be set before Triton is first imported and then holds for the whole process, vLLM included.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parent

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run_cases(name: str, device: str) -> None:
    """Run NAME_cases.py with HONED_TEST_DEVICE set: "cpu" under the interpreter, "cuda" and "none" with the compiler."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(FOLDER / f"{name}_cases.py")]
    environ = os.environ | {"HONED_TEST_DEVICE": device, "OMP_NUM_THREADS": "1"}
    environ["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"
    done = subprocess.run(command, cwd=FOLDER.parents[1], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
