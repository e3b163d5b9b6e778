"""Runs a file of kernel cases in a process of its own.

TRITON_INTERPRET must be set before Triton is first imported and then holds for the whole process, vLLM included.
HONED_TEST_DEVICE tells the cases where to run: "cpu" (under the interpreter) or "cuda".
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run_cases(name: str, device: str) -> None:
    """Pass when every case of `name` passes, and some did."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(HERE / name)]
    environ = os.environ | {"HONED_TEST_DEVICE": device} | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
