"""What the tests of `honed calibrate` and `honed retention` share."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from benchmarks.server import honed_side, vllm_server

TINY = vllm_server.ROOT / "benchmarks" / "tiny"
SETTINGS = """
[paths]
runtime_dir = "{folder}/run"
state_dir = "{folder}/state"
[http]
metrics_listen = "127.0.0.1:{port}"
[recalibration]
automatic = false
"""
IS_SWITCHED_ON = pytest.mark.skipif(not os.environ.get("HONED_TEST_CALIBRATE"), reason="takes minutes: make test-calibrate")


def honed(environment: dict[str, str], *arguments: Any) -> Any:
    """A command's JSON; it must end with 0."""
    words = [honed_side.honed_command(), *(str(argument) for argument in arguments), "--json"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout)
