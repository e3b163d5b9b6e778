"""Runs a file of kernel cases in a process of its own.

TRITON_INTERPRET must be set before Triton is first imported and then holds for the whole process, vLLM included.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_cases(name: str, device: str, **env: str) -> None:
    """Run `name` (beside this file), the kernel on `device`: "cpu" (TRITON_INTERPRET="1" given) or "cuda"."""
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:randomly"]
    environ = os.environ | {"HONED_TEST_DEVICE": device} | env
    done = subprocess.run(
        [*command, str(Path(__file__).with_name(name))], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
