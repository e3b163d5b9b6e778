"""Tests on another runner than this process has: in a process of their own, since one has one runner, scheduler and Triton."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.e2e.engine import ROOT


def check_on(runner: str, tests: list[str]) -> None:
    """Run these files, or tests, of this folder on a runner: "v1-async", "v2-async", …"""
    paths = [str(ROOT / "tests" / "e2e" / name) for name in tests]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *paths]
    environment = os.environ | {"HONED_TEST_RUNNER": runner}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
