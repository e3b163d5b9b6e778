"""Commands fit a terminal of 80 columns and 24 lines, on a healthy host and on one without an engine.

These tests write the pictures of the documentation to the folder HONED_PICTURES.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
from pathlib import Path

import pytest

from benchmarks.server.honed_side import honed_command
from tests.observability.stack import Stack

WIDTH, HEIGHT = 80, 24
COMMANDS = {
    "status": ["status"],
    "top": ["top", "--count", "2"],
    "workloads": ["workloads"],
    "explain": ["explain"],
    "operations": ["operations"],
    "audit": ["audit"],
    "doctor": ["doctor"],
}


def screen(*command: str) -> list[str]:
    """Lines that a command shows on a terminal of its own; of a live screen the last one."""
    controller, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", HEIGHT, WIDTH, 0, 0))
    unset = ("HONED_", "COLUMNS", "LINES", "NO_COLOR")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(unset)} | {"TERM": "xterm-256color"}
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    said = b""
    while True:
        try:
            said += os.read(controller, 65536)
        except OSError:  # the terminal's other end is closed
            break
    os.close(controller)
    assert process.wait(30) in (0, 1, 4)
    shown = re.split(r"\x1b\[\??(?:1049h|H)", said.decode().split("\x1b[?1049l")[0])[-1]
    plain = re.sub(r"\x1b(\[[0-9;?]*[A-Za-z]|[()][A-Z0-9])", "", shown)
    return [line.rstrip() for line in plain.replace("\r", "").strip("\n").split("\n")]


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("host", ["well", "sick"])
def test_it_fits_a_small_terminal(stack: Stack, host: str, name: str) -> None:
    config = stack.folder / ("honed.toml" if host == "well" else "neighbour/honed.toml")
    lines = screen(honed_command(), "--config", str(config), *COMMANDS[name])
    assert max(map(len, lines)) <= WIDTH, [line for line in lines if len(line) > WIDTH]
    if name == "top":
        assert len(lines) == HEIGHT
        assert len([line for line in lines if line.startswith("╭")]) == 5
    if host == "sick" and name in ("status", "top"):
        assert any("no engine has attached" in line for line in lines)
    if host == "well" and name == "workloads":
        assert any("by position, %" in line for line in lines)
    if folder := os.environ.get("HONED_PICTURES"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        hidden = "\n".join(lines).replace(str(stack.folder), "/var/lib/honed").replace(str(stack.runtime_dir), "/run/honed")
        (Path(folder) / f"terminal-{host}-{name}.txt").write_text(hidden + "\n")
