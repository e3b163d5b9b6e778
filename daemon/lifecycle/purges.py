"""Samples are forgotten: those in the trainer's memory, on its disk, and in the engines' rings.

A trainer that is connected does all of that, and says so. Where there is none (it may hold the most of them: a host without
`[train]` fills its ring too), or it falls silent, the files are erased here: a trainer that hangs finds, when it goes on, that
its rings were purged, and forgets what it had read of them. A purge has succeeded when nothing is left, and not before.
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
from honed.daemon.store.journal import Journal
from honed.daemon.store.operations import Operation, Operations
from honed.recalib.samples.ring_reader import RingReader

log = structlog.get_logger("honed.purges")


class Purges:
    """The purge that is under way, if any. Guarded by the service's lock, which the background takes itself.

    Args:
        engines_dir: has the engines' rings.
        spill_dir: has the samples that the trainer keeps on disk.
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
        self._is_due_again = False

    def purge(self, *, reason: str, actor: str, key: str | None = None) -> Operation:
        """Forget every sample. Raises ConflictError while an earlier purge is under way."""
        if self._operation is not None:
            running = self._operation.operation_id
            raise ConflictError(f"purge {running} is under way", cure=f"Wait for its end: `honed operations {running}`.")
        self._operation = operation = self._operations.create("purge", "erasing", reason, actor, key)
        self._journal.audit(actor, "samples.purge", "", reason, operation.operation_id)
        if self._trainer.is_connected:
            self._ask()
        else:
            self._erase()
        return operation

    def purge_after_update(self, engine_id: str) -> None:
        """The target's weights are others: what was captured of the old ones goes. Once more where that is under way."""
        if self._operation is None:
            self.purge(reason=f"the target of engine {engine_id} was updated", actor="honed")
        else:
            self._is_due_again = True

    def on_trainer(self, message: wire.TrainerHello | wire.Purged) -> None:
        """It has purged; or it was restarted meanwhile, and may not have heard."""
        operation = self._operation
        if operation is None or self._is_erasing:
            return
        if isinstance(message, wire.TrainerHello):
            self._ask()
        elif message.operation_id == operation.operation_id:
            self._finish(message.problems)

    def tick(self) -> None:
        """Notice a trainer that is gone."""
        if self._operation is not None and not self._is_erasing and not self._trainer.is_connected:
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
        if self._is_due_again:
            self._is_due_again = False
            self.purge(reason="a target was updated meanwhile", actor="honed")


def erase_files(engines_dir: Path, spill_dir: Path) -> list[str]:
    """Overwrite the rings of all engines, and remove what lies on disk. Returns why something is left."""
    problems = [why for path in sorted(engines_dir.glob("*/ring")) if (why := RingReader(path).erase())]
    try:
        shutil.rmtree(spill_dir)
    except FileNotFoundError:
        pass
    except OSError as error:
        problems.append(f"samples on disk can't be removed: {error}; remove {spill_dir} yourself")
    return problems
