"""Commands of the daemon, run on the engine's thread between two steps, also while the engine is idle.

A swap has two halves. Staging reads and checks the file and copies it to the device, on a thread in each worker, and may take
any time. Applying copies in place; only this delays the engine. A command that fails is answered with the reason, and what it
staged is freed. It changes nothing, unless applying fails: then nobody knows what the drafter is, and the daemon must restore
it.

Two versions may take turns (a canary): both are staged, and stay so. Every turn is on a lease: if the daemon goes silent, the
engine returns by itself to the version that it ran before the turns began, and frees the memory of both.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from honed.adapt.protocol import wire
from honed.attach.engine.engine_hook import RankError
from honed.attach.engine.guard import NoAnswer

logger = logging.getLogger("honed.attach")

ASLEEP = "the engine sleeps (vLLM's sleep mode), and its weights aren't on the device: wake it up, or wait until it is awake"
FOREIGN = "the drafter's weights came through vLLM's own endpoint; they are left alone until a version is promoted"
STAGE_TIMEOUT_S = 300.0
CHECKSUM_TIMEOUT_S = 50.0
MOST_TAKEN = 4
"""Most tensors that a checksum takes in between two steps."""
POLL_S, BUSY_POLL_S = 0.02, 0.2
"""Time between two calls to the workers, while the engine is idle and while it serves. They answer once the steps under way are
over, and an engine that schedules ahead loses its lead each time."""


class CommandRunner:
    """Queue between publisher thread and engine thread, and the swap under way, if any.

    Args:
        identity: (engine_id, boot_id), for the answers.
        rpc: (method, *args) -> one result a rank; engine thread only.
        report: sends the answers.
        on_swapped: called on the engine thread with (version, needs_cache_reset) right after the copy.
        on_lost: called on the engine thread when the copy has failed: some of the weights, or some ranks, may be new.
        wake: requests a call of `run` soon, even if the engine is idle.
        is_busy: whether the engine has requests.
    """

    def __init__(
        self,
        identity: tuple[str, str],
        rpc: Callable[..., list[Any]],
        report: Callable[[wire.CommandResult], None],
        on_swapped: Callable[[str, bool], None],
        on_lost: Callable[[], None],
        wake: Callable[[], None],
        is_busy: Callable[[], bool] = lambda: False,
    ) -> None:
        self._identity = identity
        self._rpc = rpc
        self._report = report
        self._on_swapped, self._on_lost = on_swapped, on_lost
        self._wake = wake
        self._is_busy = is_busy
        self._queue: deque[wire.Command] = deque()
        self._staging: tuple[wire.SwapCommand, float] | None = None
        self._hashing: tuple[wire.ChecksumCommand, float] | None = None
        self._num_sent = 0
        """Tensors sent for the checksum under way."""
        self._next_poll_s = 0.0
        self._answered: dict[str, wire.CommandResult] = {}
        self._lease: _Lease | None = None
        self._is_foreign = False
        self.is_asleep = False
        """Engine thread: the device's memory is gone. Commands are refused until it is back, and a lease may run over."""

    def put(self, command: wire.Command) -> None:
        """Publisher thread: take a command in."""
        self._queue.append(command)
        self._wake()

    @property
    def is_pending(self) -> bool:
        """Whether `run` has anything to do."""
        return bool(self._queue) or self._is_under_way or self._is_lease_over()

    @property
    def is_waiting(self) -> bool:
        """Whether `run` will have something to do though no command comes: one is under way, or a lease will end."""
        return self._is_under_way or self._lease is not None

    @property
    def _is_under_way(self) -> bool:
        return self._staging is not None or self._hashing is not None

    def run(self) -> None:
        """Engine thread: do all that needs no waiting. Cheap when there is nothing."""
        if self.is_asleep:
            self._refuse_all()
            return
        if self._staging is not None:
            self._poll_staging()
        elif self._hashing is not None:
            self._poll_checksum()
        while not self._is_under_way and self._queue:
            self._start(self._queue.popleft())
        if not self._is_under_way and self._is_lease_over():
            self._go_back()

    def _refuse_all(self) -> None:
        for under_way in (self._staging, self._hashing):
            if under_way is not None:
                self._queue.appendleft(under_way[0])
        was_staging = self._staging is not None
        self._staging = self._hashing = None
        while self._queue:
            self._answer(self._queue.popleft(), error=ASLEEP, detail={"asleep": "1"})
        if was_staging:
            self._release()

    def give_way(self) -> None:
        """Engine thread: give up the drafter's weights: only a swap that takes over may overwrite them."""
        may_hold = self._staging is not None or self._lease is not None
        self._is_foreign, self._lease = True, None
        if self._staging is not None:
            self._refuse_foreign(self._staging[0])
            self._staging = None
        if may_hold:
            self._release()
        if self._hashing is not None:
            self._abandon(self._hashing[0], "new weights came through vLLM's own endpoint while the old ones were hashed")

    def take_over(self) -> None:
        """Engine thread: note that the foreign weights are gone."""
        self._is_foreign = False

    def _refuse_foreign(self, command: wire.Command) -> None:
        self._answer(command, error=FOREIGN, detail={"foreign": "1"})

    def _start(self, command: wire.Command) -> None:
        if command.command_id in self._answered:  # sent again after a reconnect
            self._report(self._answered[command.command_id])
            return
        try:
            if isinstance(command, wire.ChecksumCommand):
                self._rpc("honed_begin_checksum")
                self._hashing, self._next_poll_s, self._num_sent = (command, time.monotonic()), 0.0, 0
                self._poll_checksum()
            elif self._is_foreign and not command.takes_over:
                self._refuse_foreign(command)
            else:
                answers = self._rpc("honed_stage", _staged_together(command))
                self._staging = (command, time.monotonic())
                self._next_poll_s = 0.0
                if not any(answers):  # held from an earlier turn
                    self._apply(command, 0.0)
        except NoAnswer:
            raise
        except Exception as error:
            self._abandon(command, _one_line(error))

    def _poll_staging(self) -> None:
        assert self._staging is not None
        command, since_s = self._staging
        now_s = time.monotonic()
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + (BUSY_POLL_S if self._is_busy() else POLL_S)
        try:
            answers: list[str] = self._rpc("honed_staged", command.weights.version)
            failed = [text for text in answers if text not in ("", "staging")]
            if failed:
                self._abandon(command, failed[0])
            elif "staging" not in answers:
                self._apply(command, now_s - since_s)
            elif now_s - since_s > STAGE_TIMEOUT_S:
                self._abandon(command, f"the weights were not read within {STAGE_TIMEOUT_S:.0f} s: is the disk slow?")
        except NoAnswer:
            raise
        except Exception as error:
            self._abandon(command, _one_line(error))

    def _poll_checksum(self) -> None:
        """Send a few more tensors to be hashed, on all ranks alike."""
        assert self._hashing is not None
        command, since_s = self._hashing
        now_s = time.monotonic()
        if now_s < self._next_poll_s:
            return
        self._next_poll_s = now_s + (BUSY_POLL_S if self._is_busy() else POLL_S)
        try:
            answers = self._take(0 if self._num_sent == 0 else -1)
            for _ in range(MOST_TAKEN - 1):
                if all(has_room for _, has_room, _ in answers):
                    answers = self._take(self._num_sent)
            sums = [found for found, _, _ in answers]
            if all(sums):
                self._hashing = None
                self._answer(command, detail={"sha256": sums[0]} | {f"rank{i}": s for i, s in enumerate(sums)})
            elif now_s - since_s > CHECKSUM_TIMEOUT_S:
                self._abandon(command, f"the weights were not hashed within {CHECKSUM_TIMEOUT_S:.0f} s")
        except NoAnswer:
            raise
        except Exception as error:
            self._abandon(command, _one_line(error))

    def _take(self, part: int) -> list[tuple[str, bool, int]]:
        self._num_sent += part >= 0
        return self._rpc("honed_checksum", part)

    def _apply(self, command: wire.SwapCommand, staged_s: float) -> None:
        version, turns = command.weights.version, command.turns
        began_ns = time.monotonic_ns()
        figures = self._copy(version, turns is not None)
        pause_ms = (time.monotonic_ns() - began_ns) / 1e6
        before, self._lease = self._lease, None
        self._staging, self._is_foreign = None, False
        if turns is not None:
            home = turns.home_version
            # A renewal brings what serves already, and so drops nothing itself.
            drops = command.drops_cache or (before is not None and before.home_version == home and before.drops_cache)
            self._lease = _Lease(time.monotonic() + turns.lease_s, home, home == version, drops)
        self._on_swapped(version, command.drops_cache)
        steps = [f"{f['step']:.0f}" for f in figures if "step" in f]
        logger.info("honed: drafter version %s serves; steps of each rank before it: %s", version, " ".join(steps))
        copy_ms = max((f.get("copy_ms", 0.0) for f in figures), default=0.0)
        torn = f"ranks swapped at different steps ({', '.join(steps)}): drafts between them used both versions' weights"
        self._answer(
            command,
            error=torn if len(set(steps)) > 1 else "",
            figures={"pause_ms": pause_ms, "stage_ms": staged_s * 1e3, "copy_ms": copy_ms, "ranks": float(len(figures))},
            detail={"version": version, "steps": " ".join(steps)},
        )

    def _copy(self, version: str, is_held_on: bool) -> list[dict[str, float]]:
        try:
            figures: list[dict[str, float]] = self._rpc("honed_apply", version, is_held_on)
        except NoAnswer:
            raise
        except Exception:
            self._is_foreign = False
            self._on_lost()
            raise
        return figures

    def _is_lease_over(self) -> bool:
        lease = self._lease  # read once: the publisher's thread asks, too
        return lease is not None and not self.is_asleep and time.monotonic() >= lease.until_s

    def _go_back(self) -> None:
        """Return to the version before the turns, and hold none any more: the daemon has been silent for too long."""
        assert self._lease is not None
        lease, self._lease = self._lease, None
        if lease.is_home:
            self._release()
            return
        try:
            self._copy(lease.home_version, False)
        except NoAnswer:
            raise
        except Exception as error:
            logger.warning("honed: can't go back to %s: %s", lease.home_version, _one_line(error))
            self._release()
        else:
            self._on_swapped(lease.home_version, lease.drops_cache)
            logger.warning("honed: the daemon is silent: back to drafter version %s", lease.home_version)

    def _abandon(self, command: wire.Command, error: str) -> None:
        self._staging = self._hashing = None
        self._answer(command, error=error)
        if isinstance(command, wire.SwapCommand):
            self._release()

    def _release(self) -> None:
        """Free what is staged, unless versions take turns. What is still being read is dropped when it has been read."""
        if self._lease is not None:
            return
        try:
            self._rpc("honed_stage", [])
        except NoAnswer:
            raise
        except Exception as error:
            logger.warning("honed: staged weights keep their memory until the next swap: %s", _one_line(error))

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


class _Lease(NamedTuple):
    """Time until which a turn may last without a message from the daemon."""

    until_s: float
    home_version: str
    is_home: bool
    """Whether that one serves in this turn: then the weights held beside it are all that the lease is about."""
    drops_cache: bool
    """Whether the two versions can't use each other's cached keys and values."""


def _staged_together(command: wire.SwapCommand) -> list[tuple[str, str, str]]:
    """(version, path, sha256) of the weights to stage: the command's, and those that they take turns with, if any."""
    wanted = [command.weights] + ([command.turns.beside] if command.turns is not None else [])
    return [(weights.version, weights.path, weights.sha256) for weights in wanted]


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or "no text"
    return (text if isinstance(error, RankError) else f"{type(error).__name__}: {text}")[:500]
