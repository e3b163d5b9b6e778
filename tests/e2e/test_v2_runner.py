"""Runs the runner contract on vLLM's V2 model runner: another process, since a process has one runner and one Triton."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.engine import IS_V2, ROOT


@pytest.mark.e2e
@pytest.mark.v2
@pytest.mark.timeout(1500)
@pytest.mark.skipif(IS_V2, reason="this is the process that runs the contract on V2")
def test_the_runner_contract_holds_on_v2() -> None:
    contract = Path(__file__).with_name("test_runner_contract.py")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(contract)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"HONED_TEST_RUNNER": "v2"}, capture_output=True, text=True, check=False
    )
    print(done.stdout[-6000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
