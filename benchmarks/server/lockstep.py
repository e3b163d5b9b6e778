"""Engines that take turns on one core, so that a slow period of the machine affects all of them equally.

A shared machine has periods of seconds and of minutes in which everything takes a tenth longer, or half as long again.
Consecutive runs would need hours of repeats to distinguish rules by a few per cent. So every contender has its own engine, and
all get the same requests. Their runs are cut into slices of `SLICE_S`, and the contender with the least progress gets the next
one. A run's time is that of its own engine's steps.

- All engines are forked from one process that has loaded the weights: they read the same memory. The speed of one program
  differs by some per cent between processes, mostly by the place of its weights in memory.
- During the others' turns an engine's clock stands still. Its daemon is stopped (SIGSTOP), except for `AWAKE_S` in every second
  of its engine's time: it steers as often as beside an engine that runs without a break.

The engine's side is `lockstep_engine`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.server.processes import Child, ProcessError, Processes
from benchmarks.server.vllm_server import server_environment

SLICE_S = 0.15
"""A turn is a step or two, so that ten contenders have theirs in a second or two and share the machine's slow periods."""
STEERING_S = 1.0
"""Engine time between two periods in which its daemon runs: as often as it steers."""
AWAKE_S = 1.3
"""Length of such a period: a daemon steers a second after it finds that time has passed."""
START_S = 240.0
ANSWER_S = 120.0


@dataclass(frozen=True)
class Load:
    """Requests, a fixed number at a time."""

    prompts: Sequence[str]
    concurrency: int
    max_tokens: int


@dataclass(frozen=True)
class Seen:
    """Progress of a run, and its output since all places were taken by requests that had a token."""

    progress: float
    """Finished share of the requests' tokens."""
    is_over: bool
    num_tokens: int
    seconds: float
    num_steps: int
    token_ms: float
    """Median over the requests of the time between two of their tokens."""
    draft_ms: float = 0.0
    """Median of the draft passes; 0 if there was none."""


@dataclass
class Contender:
    """An engine, and its daemon if it has one."""

    name: str
    connection: Connection
    engine: Child
    """The process that it was forked from, whose log it writes to."""
    daemon: Child | None = None
    _since_woken_s: float = STEERING_S
    """Engine time since its daemon was woken."""
    _until_s: float = float("inf")
    """Time until which its daemon is awake; infinite if it is already stopped."""

    def ask(self, what: str, *args: object) -> object:
        """Send it a command; return its answer. Raises ProcessError when it has ended, or takes longer than ANSWER_S."""
        try:
            self.connection.send((what, *args))
            if self.connection.poll(ANSWER_S):
                return self.connection.recv()
        except (EOFError, OSError):
            pass
        self.engine.check()
        raise ProcessError(f"{self.name} doesn't answer; the end of {self.engine.log}:\n{self.engine.tail()}")

    def turn(self) -> Seen:
        """Let it run for a slice."""
        began_s = time.monotonic()
        if self._since_woken_s >= STEERING_S:
            self._since_woken_s, self._until_s = 0.0, began_s + AWAKE_S
            self.wake(True)
        seen = self.ask("go", SLICE_S)
        self._since_woken_s += time.monotonic() - began_s
        assert isinstance(seen, Seen)
        return seen

    def rest(self) -> None:
        """Stop its daemon if that has been awake for long enough."""
        if time.monotonic() >= self._until_s:
            self._until_s = float("inf")
            self.wake(False)

    def wake(self, is_awake: bool) -> None:
        """Resume or stop its daemon."""
        if self.daemon is not None:
            os.kill(self.daemon.pid, signal.SIGCONT if is_awake else signal.SIGSTOP)


@dataclass
class Lockstep:
    """All contenders; a context manager that resumes their daemons on exit, so that they can end."""

    processes: Processes
    folder: Path
    core: int
    """The engines' core."""
    contenders: dict[str, Contender] = field(default_factory=dict)
    _parent: tuple[Child, Connection] | None = None

    def __post_init__(self) -> None:
        self._listener = Listener(str(self.folder / "lockstep.sock"), backlog=16)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.wake_all()
        self._listener.close()

    def load(
        self, target: str, speculative: Mapping[str, Any], *, has_trees: bool = False, pause: Sequence[float] = (0.0, 0.0)
    ) -> None:
        """Start the process that loads the weights, for contenders to be forked from.

        Args:
            speculative: vLLM's `speculative_config`.
            has_trees: its draft tokens are slots for trees.
            pause: milliseconds by which the target's every pass is longer, and each of its rows makes it longer.
        """
        self._unload()
        own = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(self.core),
            "HONED_TREES": str(int(has_trees)),
        }
        address = str(self._listener.address)
        given = (address, str(self.core), target, json.dumps(speculative), json.dumps(pause))
        command = [sys.executable, "-m", "benchmarks.server.lockstep_engine", *given]
        child = self.processes.start("vllm", command, server_environment() | own)
        self._parent = child, self._accept(child)

    def fork(
        self, name: str, runtime_dir: Path | None = None, daemon: Child | None = None, *, has_trees: bool = False
    ) -> Contender:
        """Add a contender: one that speculates, with honed attached, or without a runtime directory one that doesn't.

        Args:
            has_trees: it verifies trees, if the engine was loaded with HONED_TREES; the others then verify chains.
        """
        assert self._parent is not None
        child, connection = self._parent
        connection.send(("fork", name, str(runtime_dir or ""), has_trees))
        contender = Contender(name, self._accept(child), child, daemon)
        self.contenders[name] = contender
        contender.ask("hello")
        return contender

    def _unload(self) -> None:
        """End all engines."""
        self.wake_all()
        if self._parent is not None:
            child, connection = self._parent
            connection.close()
            self.processes.stop(child)
        self._parent = None
        self.contenders.clear()

    def wake_all(self) -> None:
        """Resume all daemons."""
        for contender in self.contenders.values():
            with contextlib.suppress(ProcessLookupError):
                contender.wake(True)

    def stop_all(self) -> None:
        """Stop all daemons until their engines' turns."""
        for contender in self.contenders.values():
            contender.wake(False)

    def play(self, names: Sequence[str], load: Load) -> Mapping[str, Seen]:
        """Let contenders serve the same requests, slice by slice."""
        self.stop_all()
        for name in names:
            self.contenders[name].ask("play", load)
        seen, left = dict[str, Seen](), dict.fromkeys(names, 0.0)
        while left:
            name = min(left, key=left.__getitem__)
            seen[name] = now = self.contenders[name].turn()
            for contender in self.contenders.values():
                contender.rest()
            left[name] = now.progress
            if now.is_over:
                del left[name]
        return seen

    def _accept(self, child: Child) -> Connection:
        socket = self._listener._listener._socket  # type: ignore[attr-defined]
        socket.settimeout(1.0)
        for _ in range(int(START_S)):
            child.check()
            with contextlib.suppress(TimeoutError):
                return self._listener.accept()
        raise ProcessError(f"{child.name} did not start within {START_S:g} s; the end of {child.log}:\n{child.tail()}")
