"""The shell completes names that the daemon knows. These tests ask as bash does."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.daemon.conftest import DaemonProcess


def completed(line: str, env: dict[str, str]) -> list[str]:
    """What bash is offered at the end of a line."""
    code = "import sys; sys.argv[0] = 'honed'; from honed.daemon.commands.main import app; app(prog_name='honed')"
    asked = {"_HONED_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **env, **asked}, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.fixture
def running(daemon: DaemonProcess) -> DaemonProcess:
    daemon.start()
    for name in ("chat-0", "chat-1", "code-0"):
        daemon.engine(engine_id=name, boot_id=name).hello()
    return daemon


def test_names_of_the_daemon_are_completed(running: DaemonProcess) -> None:
    assert completed("honed explain ch", running.env) == ["chat-0", "chat-1"]
    assert completed("honed verify ", running.env) == ["chat-0", "chat-1", "code-0"]
    socket = running.runtime_dir / "admin.sock"
    elsewhere = {**running.env, "HONED_RUNTIME_DIR": "/nowhere"}
    assert completed(f"honed --socket {socket} explain co", elsewhere) == ["code-0"]
    assert completed("honed override set p", running.env) == ["policy"]
    with running.http() as client:
        client.put("/v1/overrides/draft_tokens", json={"value": 0, "ttl_s": 60.0}, headers={"Idempotency-Key": "k"})
    assert completed("honed override clear ", running.env) == ["draft_tokens"]


def test_commands_are_completed(tmp_path: Path) -> None:
    assert completed("honed wo", {"HONED_RUNTIME_DIR": str(tmp_path)}) == ["workloads"]


def test_without_a_daemon_nothing_is_completed_nor_said(tmp_path: Path) -> None:
    began_s = time.monotonic()
    assert completed("honed promote ", {"HONED_RUNTIME_DIR": str(tmp_path), "HONED_STATE_DIR": str(tmp_path)}) == []
    assert time.monotonic() - began_s < 30.0
