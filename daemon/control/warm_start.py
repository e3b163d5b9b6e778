"""Warm start after a restart of daemon or engine: a new controller learns from the end of the stored log.

Without it every restart would explore anew, with fixed lengths until step times are known. It only uses boots with the same
target, drafter, engine settings and engine id. Other changes (another GPU, other clocks) are detected while running, as usual.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

from honed.adapt.control.controller import EngineController
from honed.adapt.protocol.wire import EngineHello
from honed.daemon.control.steering import Steering
from honed.daemon.ingest.engines import Engine
from honed.daemon.store.batch_tables import read_frame
from honed.daemon.store.database import connect

log = structlog.get_logger("honed.warm_start")

MOST_BATCHES = 400
"""A busy engine fills four per second."""
ALIKE = ("model_name", "target_path", "draft_model", "method", "runner", "vllm_version", "num_spec_tokens", "max_num_seqs")
"""Fields of an engine's hello that must be unchanged."""

_BOOTS = "SELECT boot_id, hello FROM boots WHERE engine_id = ? AND hello IS NOT NULL"
_NEWEST = """
SELECT boot_id, frame FROM batches
WHERE id IN (SELECT id FROM batches WHERE engine_id = ? ORDER BY id DESC LIMIT ?) AND malformed = '' ORDER BY id
"""
"""Chosen from the index alone: of all other batches no frame is read."""
_LAST_TRIAL = "SELECT old, new, ended_unix_s FROM canaries ORDER BY began_unix_s DESC LIMIT 1"


class WarmStart:
    """Makes the controllers of engines that say hello. Guarded by the service's lock, which the background takes itself.

    Args:
        tell_of_trial: tells a controller which versions take turns; called after it has learned.
        on_ready: called once an engine has its controller.
    """

    def __init__(
        self,
        steering: Steering,
        database: Path,
        *,
        lock: threading.RLock,
        in_background: Callable[[Callable[[], None]], object],
        tell_of_trial: Callable[[EngineController], None],
        on_ready: Callable[[], None],
    ) -> None:
        self._steering, self._database = steering, database
        self._lock, self._in_background = lock, in_background
        self._tell_of_trial, self._on_ready = tell_of_trial, on_ready

    def prepare(self, engine: Engine, hello: EngineHello) -> None:
        """Make a controller that fits the engine's hello.

        A second hello reports its CUDA graphs; then it gets another controller.
        """
        if engine.controller is not None and not self._steering.fits(engine.controller, hello):
            engine.controller = None
        if engine.controller is None and not engine.awaits_controller:
            engine.awaits_controller = True
            self._in_background(lambda: self._make(engine, hello))

    def _make(self, engine: Engine, hello: EngineHello) -> None:
        if engine.is_replaced:  # boots may follow each other faster than one learns
            with self._lock:
                self._steering.give(engine, None, 0)
            return
        controller = self._steering.new_controller(hello)
        learned, learned_seq = 0, 0
        try:
            if controller is not None:
                learned, learned_seq = learn_from_log(self._database, hello, controller)
            log.info("learned from the stored log", engine_id=hello.engine_id, batches=learned)
        except Exception as error:
            log.exception("learning from the stored log failed", error=str(error))
        with self._lock:
            if engine.is_replaced:
                self._steering.give(engine, None, 0)
                return
            if controller is not None:
                self._tell_of_trial(controller)  # the trial may have changed or ended
            self._steering.give(engine, controller, learned_seq)
            if engine.hello is not None and engine.hello != hello:
                self.prepare(engine, engine.hello)
            self._on_ready()


def learn_from_log(database: Path, hello: EngineHello, controller: EngineController) -> tuple[int, int]:
    """Let a new controller learn from its engine's stored batches. A record that can't be read is passed over, and logged.

    Until the last trial's end its two versions take turns, as they did then.

    Returns their number, and the last one's number in the boot of the hello (0: none is of that boot).
    Raises pysqlite3.Error if the database can't be read.
    """
    learned, learned_seq = 0, 0
    connection = connect(database, read_only=True)
    try:
        said = connection.conn.execute(_BOOTS, [hello.engine_id]).fetchall()
        rows = connection.conn.execute(_NEWEST, (hello.engine_id, MOST_BATCHES)).fetchall()
        trial = connection.conn.execute(_LAST_TRIAL).fetchone()
    finally:
        connection.close()
    old, new, ended_unix_s = trial or ("", "", None)
    controller.take_turns({old, new} if trial else ())
    boots = {boot for boot, text in said if _is_alike(boot, text, hello)} | {hello.boot_id}
    for boot_id, frame in rows:
        if boot_id not in boots:
            continue
        try:
            if (batch := read_frame(frame)) is None:
                raise ValueError("not an event batch")
            if ended_unix_s is not None and batch.sent_unix_ns > 1e9 * ended_unix_s:
                controller.end_turns()
            controller.observe(batch)  # its alarms are stored already, see `drift_alarms`
        except Exception as error:
            why = str(error) or type(error).__name__
            log.warning("can't learn from a stored batch", engine_id=hello.engine_id, boot_id=boot_id, error=why)
            continue
        learned += 1
        if boot_id == hello.boot_id:
            learned_seq = max(learned_seq, batch.seq)
    return learned, learned_seq


def _is_alike(boot_id: str, text: str, hello: EngineHello) -> bool:
    """Whether a boot's stored hello is of the same engine settings."""
    try:
        stored = msgspec.json.decode(text, type=EngineHello)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, TypeError) as error:
        log.warning("can't learn from a stored boot", engine_id=hello.engine_id, boot_id=boot_id, error=str(error))
        return False
    return all(getattr(stored, name) == getattr(hello, name) for name in ALIKE)
