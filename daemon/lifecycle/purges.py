"""Purges: deletion of samples in the trainer's memory, on its disk, and in the engines' rings.

A connected trainer does all of it and reports it. Without one (a host without `[train]` fills its ring too), or if it falls
silent, the daemon erases the files. A trainer that hangs finds later that its rings were purged, and deletes what it had read
from them. A purge succeeds only when nothing is left. One that a target's update asked for is repeated until then.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import structlog

from honed.adapt.protocol import wire
from honed.daemon.errors import ConflictError
from honed.daemon.ingest.trainer import Trainer
from honed.daemon.retry import Retry
from honed.daemon.store.journal import Journal
from honed.daemon.store.operations import Operation, Operations
from honed.recalib.samples.ring_reader import MOST_PROBLEMS, RingReader

log = structlog.get_logger("honed.purges")


class Purges:
    """The running purge, if any. Guarded by the service's lock, which the background takes itself.

    Args:
        engines_dir: folder of the engines' rings.
        spill_dir: folder of the trainer's samples on disk.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        operations: Operations,
        journal: Journal,
        engines_dir: Path,
        spill_dir: Path,
        lock: threading.RLock,
        in_background: Callable[[Callable[[], None]], object],
    ) -> None:
        self._trainer, self._operations, self._journal = trainer, operations, journal
        self._engines_dir, self._spill_dir = engines_dir, spill_dir
        self._lock, self._in_background = lock, in_background
        self._operation: Operation | None = None
        self._is_erasing = False
        self._on_success: dict[str, Callable[[], object]] = {}
        """Maps engines whose target was updated to what is called once nothing of before is left."""
        self._on_next_success: dict[str, Callable[[], object]] = {}
        """Those whose target was updated during the running purge: another one follows it."""
        self._retry = Retry()

    def purge(self, *, reason: str, actor: str, key: str | None = None) -> Operation:
        """Delete every sample. Raises ConflictError while an earlier purge is running."""
        if self._operation is not None:
            running = self._operation.operation_id
            raise ConflictError(f"purge {running} is running", cure=f"Wait for its end: `honed operations {running}`.")
        self._operation = operation = self._operations.create("purge", "erasing", reason, actor, key)
        self._journal.audit(actor, "samples.purge", "", reason, operation.operation_id)
        if self._trainer.is_connected:
            self._ask()
        else:
            self._erase()
        return operation

    def purge_after_update(self, engine_id: str, on_success: Callable[[], object]) -> None:
        """Delete samples of the target's old weights; if a purge is running, purge again afterwards.

        Args:
            on_success: called once nothing of them is left. After a restart the update has to be told again.
        """
        if self._operation is None:
            self._on_success[engine_id] = on_success
            self.purge(reason=f"the target of engine {engine_id} was updated", actor="honed")
        else:
            self._on_next_success[engine_id] = on_success

    def on_trainer(self, message: wire.TrainerHello | wire.Purged) -> None:
        """Handle the trainer's report, or its restart, after which it may have missed the request."""
        operation = self._operation
        if operation is None or self._is_erasing:
            return
        if isinstance(message, wire.TrainerHello):
            self._ask()
        elif message.operation_id == operation.operation_id:
            self._finish(message.problems)

    def tick(self, now_s: float) -> None:
        """Detect a trainer that is gone; repeat what has failed, with growing pauses."""
        if self._operation is None:
            if self._retry.is_due(now_s):
                self.purge(reason="samples of a target that was updated are left", actor="honed")
        elif not self._is_erasing and not self._trainer.is_connected:
            self._erase()

    def _ask(self) -> None:
        assert self._operation is not None
        self._trainer.tell(wire.Purge(operation_id=self._operation.operation_id))

    def _erase(self) -> None:
        self._is_erasing = True
        self._in_background(self._erase_files)

    def _erase_files(self) -> None:
        try:
            problems = erase_files(self._engines_dir, self._spill_dir)
        except Exception as error:
            log.exception("samples can't be erased", error=str(error))
            problems = [f"samples can't be erased: {error}"]
        with self._lock:
            self._is_erasing = False
            self._finish(problems)

    def _finish(self, problems: list[str]) -> None:
        assert self._operation is not None
        operation, self._operation = self._operation, None
        self._operations.finish(operation, "failed" if problems else "succeeded", error="; ".join(problems))
        if problems:
            self._retry.is_wanted = bool(self._on_success)
        else:
            for call in self._on_success.values():
                call()
            self._on_success, self._retry = {}, Retry()
        if self._on_next_success:
            self._on_success, self._on_next_success = self._on_success | self._on_next_success, {}
            self.purge(reason="a target was updated meanwhile", actor="honed")


def erase_files(engines_dir: Path, spill_dir: Path) -> list[str]:
    """Overwrite the rings of all engines, and remove samples on disk. Returns reasons why some are left."""
    problems = [why for path in sorted(engines_dir.glob("*/ring")) if (why := RingReader(path).erase())]
    try:
        shutil.rmtree(spill_dir)
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"samples on disk can't be removed: {error}; remove {spill_dir} yourself")
    return problems[:MOST_PROBLEMS]
