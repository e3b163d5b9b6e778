"""Handling of frames: decodes them, puts batches in order, passes other messages on.

Runs on the router's thread under the service's lock. Nothing here waits: a batch refused by a full store is not
acknowledged, so its engine sends it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from honed.adapt.protocol import wire
from honed.adapt.protocol.workloads import WorkloadNames
from honed.daemon.errors import StoreError
from honed.daemon.ingest.engines import Boot, Engine, Engines
from honed.daemon.ingest.sequences import Offer
from honed.daemon.store.batch_tables import StoredBatch
from honed.daemon.store.rollups import BatchCounts, MalformedBatchError, count_batch
from honed.daemon.store.store import Store

WARN_EVERY_S = 10.0
log = structlog.get_logger("honed.ingest")


@dataclass(slots=True)
class IngestFigures:
    """Counts of the socket since the daemon started."""

    batches: int = 0
    rounds: int = 0
    duplicates: int = 0
    ahead: int = 0
    no_room: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    lag_s: float = 0.0
    rejected_at_s: float = float("-inf")
    """Monotonic time of the latest rejected frame."""
    last_batch_unix_s: float = float("-inf")


class Ingest:
    """Handles the frames of engines and trainers.

    Args:
        hang_up: ends the connection of the peer whose frame is handled.
        on_hello: called after the hello of a new or returning boot of an engine.
        on_batch: called once for each batch, when it is taken.
        on_target_update: called after an engine's vLLM got other target weights.
    """

    def __init__(
        self,
        engines: Engines,
        store: Store,
        send: Callable[[bytes, wire.Ack], None],
        *,
        hang_up: Callable[[bytes], None],
        on_hello: Callable[[Engine], None],
        on_batch: Callable[[Engine, wire.EventBatch, StoredBatch], None],
        on_target_update: Callable[[Engine], None],
        on_command_result: Callable[[wire.CommandResult], None],
        on_trainer: Callable[[bytes, wire.FromTrainer], None],
        clock: Callable[[], float],
        monotonic: Callable[[], float],
    ) -> None:
        self._engines, self._store, self._send, self._hang_up = engines, store, send, hang_up
        self._on_hello, self._on_batch, self._on_target_update = on_hello, on_batch, on_target_update
        self._on_command_result, self._on_trainer = on_command_result, on_trainer
        self._clock, self._monotonic = clock, monotonic
        self.workloads = WorkloadNames()
        self.figures = IngestFigures()
        self._warned_s: dict[str, float] = {}

    def handle(self, peer: bytes, frame: bytes) -> None:
        """Handle one frame. Faults in it are counted, never raised."""
        try:
            message, defect = wire.decode_to_daemon(frame), ""
        except wire.WireError as error:
            if error.batch is None:
                self.reject("undecodable")
                log.debug("frame dropped", error=str(error))
                return
            message, defect = _empty(error.batch, int(self._clock() * 1e9)), str(error)
        try:
            self._dispatch(peer, message, frame, defect)
        except StoreError as error:
            # Without the database the committed number is unknown; the engine asks again.
            self.reject("store_unavailable")
            self._warn("message dropped", error=str(error))

    def _warn(self, event: str, **about: Any) -> None:
        """Log a peer's fault, each kind once in `WARN_EVERY_S`: a peer mustn't fill the journal. All are counted."""
        now_s = self._monotonic()
        if now_s - self._warned_s.get(event, float("-inf")) >= WARN_EVERY_S:
            self._warned_s[event] = now_s
            log.warning(event, **about)

    def reject(self, why: str) -> None:
        """Count a dropped frame."""
        self.figures.rejected[why] += 1
        self.figures.rejected_at_s = self._monotonic()

    def on_commit(self, group: list[StoredBatch]) -> None:
        """Count and acknowledge committed batches."""
        touched = {}
        for item in group:
            if (boot := self._engines.in_memory(item.engine_id, item.boot_id)) is None:
                continue  # forgotten meanwhile
            boot.note_stored(item, self._monotonic())
            touched[boot.engine_id, boot.boot_id] = boot
        for boot in touched.values():
            engine = self._engines.by_id.get(boot.engine_id)
            if engine is not None and engine.boot is boot:
                self._acknowledge(engine.peer, boot)

    def _dispatch(self, peer: bytes, message: wire.ToDaemon, frame: bytes, defect: str) -> None:
        if isinstance(message, wire.FromTrainer):
            self._on_trainer(peer, message)
        elif isinstance(message, wire.EngineHello):
            self._take_hello(peer, message)
        elif (engine := self._engines.speaker(message.engine_id, message.boot_id, peer, self._monotonic())) is None:
            self.reject("not_introduced")
            self._hang_up(peer)  # an engine that was forgotten believes that it is known, until it has to connect again
        elif isinstance(message, wire.EventBatch):
            self._take_batch(engine, message, frame, defect)
        elif isinstance(message, wire.CommandResult):
            self._on_command_result(message)
        else:
            engine.status, engine.live_version = message, message.drafter_version
            self._engines.note_seen(engine, self._monotonic(), int(self._clock() * 1e9))
            if message.target_updates > engine.boot.target_updates:  # some may have come while no daemon heard of it
                engine.boot.target_updates = message.target_updates
                self._on_target_update(engine)

    def _take_hello(self, peer: bytes, hello: wire.EngineHello) -> None:
        engine = self._engines.introduce(hello, peer, self._monotonic())
        if engine is None:
            self.reject("refused_hello")
            self._warn("an engine's hello is refused: its boot has a connection, or there are too many", id=hello.engine_id)
            return
        if hello.wire_version != wire.WIRE_VERSION:
            engine.note = f"speaks wire version {hello.wire_version}, this daemon {wire.WIRE_VERSION}"
        self._on_hello(engine)

    def _take_batch(self, engine: Engine, batch: wire.EventBatch, frame: bytes, defect: str) -> None:
        boot, figures = engine.boot, self.figures
        if boot.hello is not None and boot.hello.wire_version > wire.WIRE_VERSION:
            self.reject("wire_version")  # a newer engine's version means that we would misread it
            return
        offer, missing = boot.sequence.offer(batch.first_seq, batch.seq, engine.peer)
        if offer is not Offer.TAKE:
            figures.duplicates += offer is Offer.DUPLICATE
            figures.ahead += offer is Offer.AHEAD
            self._acknowledge(engine.peer, boot)
            return
        now_ns = int(self._clock() * 1e9)
        item = StoredBatch.of(batch, frame, now_ns, self._count(batch, now_ns, defect), missing)
        if not self._store.put(item):
            figures.no_room += 1
            return
        boot.sequence.take(batch.seq)
        figures.batches += 1
        figures.rounds += item.counts.total.rounds + item.counts.total.plain_rounds
        figures.lag_s = max(0.0, (now_ns - batch.sent_unix_ns) / 1e9)
        figures.last_batch_unix_s = now_ns / 1e9
        self._on_batch(engine, batch, item)

    def _count(self, batch: wire.EventBatch, now_ns: int, defect: str) -> BatchCounts:
        try:
            if defect:
                raise MalformedBatchError(defect)
            now_s = self._monotonic()
            return count_batch(batch, now_ns, lambda label: self.workloads(label, now_s))
        except MalformedBatchError as error:
            # Stored anyway: unacknowledged, it would block all later batches.
            self._warn("malformed batch", engine_id=batch.engine_id, seq=batch.seq, error=str(error))
            return BatchCounts(malformed=str(error))

    def _acknowledge(self, peer: bytes, boot: Boot) -> None:
        self._send(peer, wire.Ack(boot_id=boot.boot_id, seq=boot.committed_seq))


def _empty(numbers: wire.BatchNumbers, now_ns: int) -> wire.EventBatch:
    """A batch without content for one that can't be read, so that those behind it aren't held up."""
    return wire.EventBatch(
        engine_id=numbers.engine_id,
        boot_id=numbers.boot_id,
        seq=numbers.seq,
        first_seq=numbers.first_seq,
        sent_unix_ns=now_ns,
        sent_mono_ns=0,
        drafter_version="",
        workloads=[],
        steps=wire.StepColumns(),
        rounds=wire.RoundColumns(),
    )
