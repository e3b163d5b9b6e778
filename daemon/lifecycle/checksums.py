"""Compares the checksum of an engine's live weights with the registry's file.

The engine reads all drafter weights back between two steps, so this runs on request only. A swap needs none: staging
checks the file, and a swap copies the staged weights.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog

from honed.adapt.protocol import wire
from honed.daemon.errors import ConflictError
from honed.daemon.ingest.engines import Engines
from honed.daemon.lifecycle.drafters import Drafters
from honed.daemon.lifecycle.eligible_engines import TAKE_BACK, foreign
from honed.daemon.lifecycle.rollout import Rollout
from honed.daemon.lifecycle.swaps import Swaps
from honed.daemon.store.journal import Journal
from honed.daemon.store.operations import Operation, Operations
from honed.recalib.registry.weights_digest import weights_digests

log = structlog.get_logger("honed.checksums")

TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Asked:
    operation: Operation
    engine_id: str
    version: str
    deadline_s: float


class Checksums:
    """Running checks. Guarded by the service's lock, which the background takes itself."""

    def __init__(
        self,
        rollout: Rollout,
        *,
        engines: Engines,
        drafters: Drafters,
        swaps: Swaps,
        operations: Operations,
        journal: Journal,
        send: Callable[[bytes, wire.Command], None],
        lock: threading.RLock,
        in_background: Callable[[Callable[[], None]], object],
        monotonic: Callable[[], float],
    ) -> None:
        self._rollout, self._engines, self._drafters, self._swaps = rollout, engines, drafters, swaps
        self._operations, self._journal, self._send = operations, journal, send
        self._lock, self._in_background, self._monotonic = lock, in_background, monotonic
        self._asked: dict[str, _Asked] = {}

    def verify(self, engine_id: str, *, reason: str, actor: str, key: str | None = None) -> Operation:
        """Ask an engine for its checksum. Raises UnknownError, ConflictError."""
        engine = self._engines.get(engine_id)
        if not self._engines.is_connected(engine, self._monotonic()) or not engine.can_swap:
            raise ConflictError(
                f"engine {engine_id!r} is not connected, or can't say what it runs", cure="`honed engines` shows why."
            )
        if engine.is_asleep:
            raise ConflictError(f"engine {engine_id!r} sleeps (vLLM's sleep mode)", cure="Wake it up: POST /wake_up to vLLM.")
        if self._swaps.is_in_trial(engine):
            raise ConflictError("two versions take turns", cure="Wait until that is over: `honed canary` shows it.")
        if self._rollout.swapping is not None:
            raise ConflictError("a swap is under way", cure="Wait until that is over: `honed operations` shows it.")
        if engine.has_foreign_drafter:
            raise ConflictError(foreign(engine), cure=TAKE_BACK)
        if not engine.live_version:
            raise ConflictError(
                f"engine {engine_id!r} runs no version of the registry", cure="`honed drafters` lists them; promote one."
            )
        operation = self._operations.create("verify", "asking", reason, actor, key, engine_id=engine_id)
        self._journal.audit(actor, "verify", engine_id, reason, operation.operation_id)
        command = wire.ChecksumCommand(command_id=secrets.token_hex(8))
        deadline_s = self._monotonic() + TIMEOUT_S
        self._asked[command.command_id] = _Asked(operation, engine_id, engine.live_version, deadline_s)
        self._send(engine.peer, command)
        return operation

    def on_result(self, result: wire.CommandResult) -> None:
        """Handle an engine's answer."""
        asked = self._asked.pop(result.command_id, None)
        if asked is None:
            return
        if not result.ok:
            self._finish(asked, result.error or "the engine gave no reason")
            return
        if len(set(result.detail.values())) > 1:  # each rank's checksum covers all weights
            self._finish(asked, f"its ranks run different weights: promote {asked.version} anew (--force)")
            return
        self._in_background(lambda: self._compare(asked, result.detail.get("sha256", "")))

    def tick(self, now_s: float) -> None:
        """Give up on engines that don't answer."""
        for command_id in [c for c, asked in self._asked.items() if now_s > asked.deadline_s]:
            self._finish(self._asked.pop(command_id), f"it did not answer in {TIMEOUT_S:g} s")

    def _compare(self, asked: _Asked, reported: str) -> None:
        """Compare with the file. Reads all of it, so call it without the lock."""
        try:
            expected = weights_digests(self._drafters.path(asked.version) / "model.safetensors")
            error = "" if reported in expected else f"it does not run the weights of {asked.version}: promote it anew (--force)"
        except Exception as failure:  # whatever it is, the operation must end
            log.exception("a checksum can't be compared", version=asked.version, error=str(failure))
            error = str(failure) or type(failure).__name__
        with self._lock:
            self._finish(asked, error, reported)

    def _finish(self, asked: _Asked, error: str, reported: str = "") -> None:
        text = f"engine {asked.engine_id}: {error}" if error else ""
        state = "failed" if error else "succeeded"
        detail = {"version": asked.version, "reported_sha256": reported}
        self._operations.finish(asked.operation, state, error=text, **detail)
