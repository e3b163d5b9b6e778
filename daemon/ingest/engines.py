"""Present state of the engines: connections, latest messages, stored part of their boots."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import structlog

from honed.adapt.protocol.wire import FOREIGN_DRAFTER, EngineHello, EngineStatus, Policy
from honed.daemon.errors import UnknownError, there_are
from honed.daemon.ingest.sequences import BootSequence
from honed.daemon.retry import Retry
from honed.daemon.store.batch_tables import StoredBatch, save_facts, save_seen
from honed.daemon.store.rollups import Counts
from honed.daemon.store.store import Store
from honed.recalib.registry.access import User

log = structlog.get_logger("honed.engines")

RETURN_S = 3600.0
"""Time that engines have at least to come back after a start of the daemon, before they count as gone for good."""
SEEN_EVERY_S = 3600.0
"""Time after which it is stored again that an engine is there."""
MOST_ENGINES = 256
RETIRED_S = 86_400.0
"""An engine whose process is gone, and that was silent for so long, is retired, and forgotten."""
MOST_BOOTS_EACH = 16
"""Boots of an engine kept in memory; the database has all."""


@dataclass(slots=True)
class Boot:
    """One run of an engine process."""

    engine_id: str
    boot_id: str
    sequence: BootSequence
    peer: bytes = b""
    """Connection that introduced it, the only one that speaks for it; b"": none, or its connection has ended."""
    committed_seq: int = 0
    stored: Counts = field(default_factory=Counts)
    lost: dict[str, int] = field(default_factory=dict)
    missing_batches: int = 0
    malformed_batches: int = 0
    batches: int = 0
    lost_at_s: float = float("-inf")
    """Time of the last report, since the daemon's start, of lost, missing or malformed data."""
    hello: EngineHello | None = None
    user: User | None = None
    """The user of the process that sent the hello."""
    own_version: str = ""
    """Version of the checkpoint that its vLLM loaded."""
    target_updates: int = 0
    """Updates of its target's weights that it has told."""
    acted_updates: int = 0
    """Those that were acted on: a restarted daemon has to act on the others."""
    seen_s: float = float("-inf")
    """Time at which it was last stored that it is there."""

    def note_stored(self, item: StoredBatch, now_s: float) -> None:
        """Note that a batch of this boot is on disk."""
        before = self._num_gone
        self.committed_seq = max(self.committed_seq, item.seq)
        self.batches += 1
        self.stored.add(item.counts.total)
        self.missing_batches += item.missing
        self.malformed_batches += bool(item.counts.malformed)
        for name, value in item.losses.items():
            self.lost[name] = max(self.lost.get(name, 0), value)
        if self._num_gone > before:
            self.lost_at_s = now_s

    @property
    def _num_gone(self) -> int:
        return sum(self.lost.values()) + self.missing_batches + self.malformed_batches


@dataclass(slots=True)
class Engine:
    """An engine in its latest boot."""

    engine_id: str
    boot: Boot
    peer: bytes
    last_seen_s: float
    controller: Any = None
    awaits_controller: bool = False
    """True while a controller is being made from the stored log."""
    learned_seq: int = 0
    """The controller has learned this boot's batches up to this one from the log."""
    status: EngineStatus | None = None
    policy: Policy | None = None
    policy_sent_s: float = float("-inf")
    latest_rounds: Counts | None = None
    """Rounds of the latest batch that had any."""
    live_version: str = ""
    """Its drafter version by its latest message; "" if unregistered. May also be `wire.LOST_DRAFTER` or
    `wire.FOREIGN_DRAFTER`."""
    note: str = ""
    """Remark about this engine for the operator."""
    drafter_note: str = ""
    """Why the drafter that it came with isn't in the registry; "" if it is, or if it has none that honed trains."""
    is_welcome: bool = False
    """True once its latest hello was answered."""
    reading: Retry = field(default_factory=Retry)
    """Further attempts to read its drafter and its target."""
    is_lost: bool = False
    is_replaced: bool = False
    """True once another boot is the engine's latest one: it needs no controller any more."""

    @property
    def hello(self) -> EngineHello | None:
        return self.boot.hello

    @property
    def budget_nodes(self) -> int:
        """Most nodes (for a chain: draft tokens) that a request may verify under its policy; 0 without a policy."""
        if self.policy is None or self.hello is None:
            return 0
        policy, most = self.policy, self.hello.num_spec_tokens
        if policy.kind == "off":
            return most
        most = min(most, policy.max_k, policy.static_k if policy.kind == "static" else most)
        return most if policy.request_ceiling < 0 else min(most, policy.request_ceiling)

    @property
    def can_swap(self) -> bool:
        return self.hello is not None and "swap" in self.hello.capabilities

    @property
    def has_foreign_drafter(self) -> bool:
        """True if its drafter got other weights through vLLM's own endpoints."""
        return self.live_version == FOREIGN_DRAFTER

    @property
    def is_asleep(self) -> bool:
        """True if vLLM's sleep mode has removed its weights from the device."""
        return self.status is not None and self.status.is_asleep


class Engines:
    """The engines by id, and their boots. Not thread-safe: the service's lock guards it.

    Args:
        store: has the boots of earlier runs of the daemon.
        lost_after_s: silence after which an engine counts as gone.
        on_forget: called with the id of an engine that is retired, or made room for another.
    """

    def __init__(self, store: Store, lost_after_s: float, on_forget: Callable[[str], None] = lambda engine_id: None) -> None:
        self._store, self._lost_after_s, self._on_forget = store, lost_after_s, on_forget
        self._boots: dict[tuple[str, str], Boot] = {}
        self.by_id: dict[str, Engine] = {}

    def boot(self, engine_id: str, boot_id: str) -> Boot:
        """The boot, from memory or else from the database."""
        key = (engine_id, boot_id)
        if key not in self._boots:
            earlier = [other for other, boot in self._boots.items() if other[0] == engine_id and not boot.peer]
            for other in earlier[: -MOST_BOOTS_EACH + 1]:
                del self._boots[other]
            self._boots[key] = self._load(engine_id, boot_id)
        return self._boots[key]

    def in_memory(self, engine_id: str, boot_id: str) -> Boot | None:
        """The boot, if memory has it: what the database has more of it is read with it later."""
        return self._boots.get((engine_id, boot_id))

    def introduce(self, hello: EngineHello, peer: bytes, now_s: float) -> Engine | None:
        """Note an engine's hello. None if another connection speaks for this boot, or there are too many engines."""
        engine_id, known = hello.engine_id, self.by_id.get(hello.engine_id)
        if known is None and len(self.by_id) >= MOST_ENGINES:
            quietest = min(self.by_id.values(), key=lambda engine: engine.last_seen_s)
            if self.is_connected(quietest, now_s):
                return None
            self._forget(quietest.engine_id)
        boot = self.boot(engine_id, hello.boot_id)
        if boot.peer not in (b"", peer):
            return None
        self.release(peer)
        boot.peer, boot.hello = peer, hello
        engine = self._seen(boot, now_s)
        engine.live_version = hello.drafter_version
        return engine

    def speaker(self, engine_id: str, boot_id: str, peer: bytes, now_s: float) -> Engine | None:
        """The engine in a boot for which this connection speaks; None if it doesn't."""
        boot = self._boots.get((engine_id, boot_id))
        return self._seen(boot, now_s) if boot is not None and boot.peer == peer else None

    def release(self, peer: bytes) -> None:
        """Note that a connection speaks for no boot any more: others may introduce its boot."""
        for boot in self._boots.values():
            if boot.peer == peer:
                boot.peer = b""

    def _seen(self, boot: Boot, now_s: float) -> Engine:
        engine = self.by_id.get(boot.engine_id)
        if engine is None or engine.boot is not boot:
            note = ""
            if engine is not None and self.is_connected(engine, now_s) and engine.peer != boot.peer:
                name = engine.engine_id
                note = f"two processes use the engine id {name!r}, or it was restarted within {self._lost_after_s:g} s"
            if engine is not None:
                _retire(engine)
            engine = self.by_id[boot.engine_id] = Engine(boot.engine_id, boot, boot.peer, now_s, note=note)
        engine.peer, engine.last_seen_s, engine.is_lost = boot.peer, now_s, False
        return engine

    def _forget(self, engine_id: str) -> None:
        _retire(self.by_id.pop(engine_id))
        for key in [key for key in self._boots if key[0] == engine_id]:
            del self._boots[key]
        self._on_forget(engine_id)

    def get(self, engine_id: str) -> Engine:
        """Raises UnknownError."""
        try:
            return self.by_id[engine_id]
        except KeyError as error:
            why = f"no engine {engine_id!r} is known; {there_are(self.by_id)}"
            raise UnknownError(why, cure="`honed engines` lists them.") from error

    def is_connected(self, engine: Engine, now_s: float) -> bool:
        return now_s - engine.last_seen_s <= self._lost_after_s

    def connected(self, now_s: float) -> list[Engine]:
        return [engine for engine in self.by_id.values() if self.is_connected(engine, now_s)]

    def tick(self, now_s: float) -> None:
        """Tell of engines that have fallen silent, once; forget those that are retired.

        One whose connection lives may only stand still, or the daemon itself has stood still.
        """
        for engine in list(self.by_id.values()):
            if not engine.boot.peer and now_s - engine.last_seen_s > RETIRED_S:
                log.info("an engine that was away for a day is forgotten", engine_id=engine.engine_id)
                self._forget(engine.engine_id)
            elif not engine.is_lost and not self.is_connected(engine, now_s):
                engine.is_lost = True
                log.warning("engine is silent", engine_id=engine.engine_id)

    def drafts_most(self, now_s: float) -> dict[str, int]:
        """Connected engine -> its configured draft tokens per round."""
        return {e.engine_id: e.hello.num_spec_tokens for e in self.connected(now_s) if e.hello is not None}

    def keep(self, boot: Boot) -> None:
        """Store what a restarted daemon has to know of a boot. A failure is logged."""
        facts = (boot.engine_id, boot.boot_id, boot.own_version, boot.acted_updates)
        self._store.keep(("facts", *facts[:2]), lambda db: save_facts(db, *facts)).add_done_callback(
            lambda done: done.exception() and log.error("facts of a boot were not written", error=str(done.exception()))
        )

    def note_seen(self, engine: Engine, now_s: float, unix_ns: int) -> None:
        """Store at times that an engine is there, and what it runs: without traffic nothing else tells a restarted daemon."""
        boot = engine.boot
        if now_s - boot.seen_s < SEEN_EVERY_S:
            return
        boot.seen_s = now_s
        seen = (boot.engine_id, boot.boot_id, engine.live_version, unix_ns)
        self._store.keep(("seen", *seen[:2]), lambda db: save_seen(db, *seen)).add_done_callback(
            lambda done: done.exception() and log.error("an engine's presence was not written", error=str(done.exception()))
        )

    def _load(self, engine_id: str, boot_id: str) -> Boot:
        rows = self._store.find("SELECT * FROM boots WHERE engine_id = ? AND boot_id = ?", (engine_id, boot_id))
        boot = Boot(engine_id, boot_id, BootSequence())
        if rows:
            row = rows[0]
            boot.sequence.accepted = boot.committed_seq = row["committed_seq"]
            boot.stored = Counts.from_row(row)
            boot.lost = {name: row[name] for name in row if name.startswith("lost_")}
            boot.missing_batches, boot.malformed_batches = row["missing_batches"], row["malformed_batches"]
            boot.batches = row["batches"]
            boot.own_version = row["own_version"]
            boot.target_updates = boot.acted_updates = row["target_updates"]
        return boot


def _retire(engine: Engine) -> None:
    """Free the controller, since batches that wait to be learned still refer to their engine."""
    engine.is_replaced, engine.controller = True, None
