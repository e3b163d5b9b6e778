"""A small file system of a test's own, which a script can fill."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools import ROOT


def run_on_tmpfs(folder: Path, size: str, script: str, *words: str, timeout_s: float = 60.0) -> str:
    """Run a Python script that must succeed, with a tmpfs of this size at `folder`; return what it printed, its errors first.

    Skips the test where no user namespace can be made.
    """
    command = f"mount -t tmpfs -o size={size} none {shlex.quote(str(folder))} && exec "
    command += shlex.join([sys.executable, "-c", script, *words])
    unshare = ["unshare", "-rm", "sh", "-c", command]
    done = subprocess.run(unshare, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("no user namespace with a tmpfs of its own can be made here")
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return done.stderr + done.stdout
