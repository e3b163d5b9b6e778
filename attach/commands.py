"""Commands of the daemon, carried out on the engine's thread between two steps, also while the engine is idle.

A swap has two halves. Staging reads and checks the file and brings it to the device; it runs on a thread in each worker and
may take as long as it likes. Applying copies in place; only this holds the engine up. A command that fails changes nothing
and is answered with the reason.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from honed.adapt import wire

STAGE_TIMEOUT_S = 300.0
POLL_S = 0.02


class CommandRunner:
    """The queue between publisher thread and engine thread, and the swap under way, if any.

    Args:
        identity: (engine_id, boot_id), for the answers.
        rpc: (method, *args) -> one result a rank; engine thread only.
        report: takes the answers.
        on_swapped: called on the engine thread with (version, needs_cache_reset) right after the copy.
        wake: asks that `run` be called soon, even if the engine is idle.
    """

    def __init__(
        self,
        identity: tuple[str, str],
        rpc: Callable[..., list[Any]],
        report: Callable[[wire.CommandResult], None],
        on_swapped: Callable[[str, bool], None],
        wake: Callable[[], None],
    ) -> None:
        self._identity = identity
        self._rpc = rpc
        self._report = report
        self._on_swapped = on_swapped
        self._wake = wake
        self._queue: deque[wire.Command] = deque()
        self._staging: tuple[wire.Command, float] | None = None
        self._next_poll_s = 0.0
        self._answered: dict[str, wire.CommandResult] = {}

    def put(self, command: wire.Command) -> None:
        """Publisher thread: take a command in."""
        self._queue.append(command)
        self._wake()

    @property
    def is_pending(self) -> bool:
        """Whether `run` has anything to do."""
        return bool(self._queue) or self._staging is not None

    def run(self) -> None:
        """Engine thread: do what can be done without waiting. Cheap when there is nothing."""
        if self._staging is not None:
            self._poll_staging()
        while self._staging is None and self._queue:
            self._start(self._queue.popleft())

    def _start(self, command: wire.Command) -> None:
        if command.command_id in self._answered:  # sent again after a reconnect
            self._report(self._answered[command.command_id])
            return
        try:
            if command.kind == "swap":
                args = command.args
                self._rpc("honed_stage", args["version"], args["path"], args.get("sha256", ""), args.get("scope", ""))
                self._staging = (command, time.monotonic())
                self._next_poll_s = 0.0
            elif command.kind == "checksum":
                sums = self._rpc("honed_checksum")
                self._answer(command, detail={"sha256": sums[0]} | {f"rank{i}": s for i, s in enumerate(sums)})
            else:
                self._answer(command, error=f"unknown command {command.kind!r}: daemon and attachment differ in version")
        except Exception as error:
            self._answer(command, error=_one_line(error))

    def _poll_staging(self) -> None:
        assert self._staging is not None
        command, since_s = self._staging
        now_s = time.monotonic()
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + POLL_S
        try:
            answers: list[str] = self._rpc("honed_staged", command.args["version"])
            failed = [text for text in answers if text not in ("", "staging")]
            if failed:
                self._abandon(command, failed[0])
            elif "staging" not in answers:
                self._apply(command, now_s - since_s)
            elif now_s - since_s > STAGE_TIMEOUT_S:
                self._abandon(command, f"the weights were not read within {STAGE_TIMEOUT_S:.0f} s: is the disk slow?")
        except Exception as error:
            self._abandon(command, _one_line(error))

    def _apply(self, command: wire.Command, staged_s: float) -> None:
        began_ns = time.monotonic_ns()
        figures: list[dict[str, float]] = self._rpc("honed_apply", command.args["version"])
        pause_ms = (time.monotonic_ns() - began_ns) / 1e6
        self._staging = None
        self._on_swapped(command.args["version"], command.args.get("scope", "") == "full")
        copy_ms = max((f.get("copy_ms", 0.0) for f in figures), default=0.0)
        self._answer(
            command,
            figures={"pause_ms": pause_ms, "stage_ms": staged_s * 1e3, "copy_ms": copy_ms, "ranks": float(len(figures))},
            detail={"version": command.args["version"]},
        )

    def _abandon(self, command: wire.Command, error: str) -> None:
        self._staging = None
        self._answer(command, error=error)

    def _answer(
        self,
        command: wire.Command,
        error: str = "",
        figures: dict[str, float] | None = None,
        detail: dict[str, str] | None = None,
    ) -> None:
        result = wire.CommandResult(
            engine_id=self._identity[0],
            boot_id=self._identity[1],
            command_id=command.command_id,
            ok=not error,
            error=error,
            figures=figures or {},
            detail=detail or {},
        )
        self._answered[command.command_id] = result
        while len(self._answered) > 64:
            self._answered.pop(next(iter(self._answered)))
        self._report(result)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no text"
    return f"{type(error).__name__}: {text}"[:500]
