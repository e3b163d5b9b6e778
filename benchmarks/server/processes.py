"""Other programs, started and ended cleanly: each in its own process group, its output in a log file.

`Processes` ends only what it started, in reverse order, however its `with` block is left: at the end, by an exception, by
Ctrl-C, or by SIGTERM, which then does what Ctrl-C does. A group first gets SIGTERM and is killed only if it is still there
after a while. vLLM's engine core is a child of the server, so it ends with the group.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
STOP_S = 10.0
"""Time for a group to end by itself."""
SWEEP_S = 3.0
"""Time for the rest of it after its leader has ended: Python's resource tracker then frees shared memory."""


class ProcessError(RuntimeError):
    """A process ended unexpectedly, or didn't become ready; the text ends with its last lines of output."""


@dataclass
class Child:
    """A running program."""

    name: str
    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def pid(self) -> int:
        """The program's process id, which is also its group's."""
        return self.popen.pid

    def tail(self, lines: int = 15) -> str:
        """Return its last lines of output."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def cpu_seconds(self) -> float:
        """CPU time of its session's processes so far (including those that ended and were waited for)."""
        ticks = sum(int(field) for _, fields in _session(self.pid) for field in fields[11:15])
        return ticks / os.sysconf("SC_CLK_TCK")

    def session_pids(self) -> list[int]:
        """Process ids of its session: the program and its children."""
        return [pid for pid, _ in _session(self.pid)]

    def check(self) -> None:
        """Raise ProcessError if it has ended."""
        if (code := self.popen.poll()) is not None:
            raise ProcessError(f"{self.name} ended with exit code {code}; the end of {self.log}:\n{self.tail()}")

    def wait_until(self, is_ready: Callable[[], bool], timeout_s: float, what: str) -> float:
        """Poll until ready; return the seconds it took. Raises ProcessError when it ends or takes too long."""
        began_s = time.monotonic()
        while not is_ready():
            self.check()
            if time.monotonic() - began_s > timeout_s:
                late = f"{self.name}: no {what} after {timeout_s:g} s"
                raise ProcessError(f"{late}; the end of {self.log}:\n{self.tail()}")
            time.sleep(0.1)
        return time.monotonic() - began_s


class Processes:
    """Starts programs and ends them all on exit."""

    def __init__(self, log_dir: Path) -> None:
        self._log_dir = log_dir
        self._children: list[Child] = []
        self._handles_sigterm = False
        log_dir.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        self._handles_sigterm = is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for child in self._children:
            _signal(child, signal.SIGTERM)
        for child in reversed(self._children):
            _end(child)
        self._children.clear()
        if self._handles_sigterm:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Child:
        """Run a command in the repository's root, with exactly this environment."""
        log = self._log_dir / f"{name}.log"
        with log.open("wb") as output:
            popen = subprocess.Popen(
                list(command),
                cwd=ROOT,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # only we get Ctrl-C: we end the others, in order
            )
        child = Child(name, popen, log)
        self._children.append(child)
        return child

    def stop(self, child: Child) -> int:
        """End one program; return its exit code."""
        _signal(child, signal.SIGTERM)
        self._children.remove(child)
        return _end(child)

    def check(self) -> None:
        """Raise ProcessError if one of them has ended."""
        for child in self._children:
            child.check()


def _signal(child: Child, number: signal.Signals) -> None:
    """Signal the whole group. Its leader is ours and not reaped yet, so the number can't belong to another group."""
    if child.popen.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


def _end(child: Child) -> int:
    try:
        return child.popen.wait(STOP_S)
    except subprocess.TimeoutExpired:
        _signal(child, signal.SIGKILL)
        return child.popen.wait(10.0)
    finally:
        _sweep(child)


def _sweep(child: Child) -> None:
    """Kill the rest of the group after its leader has ended: the session was made for it, so all of it is ours."""
    until_s = time.monotonic() + SWEEP_S
    while (groups := _groups(child.pid)) and time.monotonic() < until_s:
        time.sleep(0.05)
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def _groups(session: int) -> set[int]:
    """Return the groups of a session's processes, without those that only wait to be reaped."""
    return {int(fields[2]) for _, fields in _session(session) if fields[0] != "Z"}


def _session(session: int) -> list[tuple[int, list[str]]]:
    """Read /proc/<pid>/stat of a session's processes from the state on (see proc(5)); empty if there is no /proc."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = entry.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append((int(entry.parent.name), fields))
    return found


def free_port() -> int:
    """Find a loopback port without a listener at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
