"""vLLM's adaptive verification as a rule. TRITON_INTERPRET holds for a whole process, so its cases run in their own."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import ROOT


@pytest.mark.skipif(not all(map(importlib.util.find_spec, ("triton", "vllm"))), reason="Triton or vLLM is not installed")
def test_vllms_own_code_under_the_interpreter():
    cases = Path(__file__).with_name("vllm_adaptive_cases.py")
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", str(cases)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
