"""kill -9, again and again, while an engine streams: what was acknowledged is stored, and nothing is stored twice."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from honed.adapt.protocol import wire
from honed.attach.events.outbox import Losses, Outbox
from honed.daemon.store.database import connect
from tests.daemon.conftest import DaemonProcess, wait_for
from tests.daemon.fake_engine import FakeEngine, make_batch

CYCLES = 6


class Sender:
    """An engine's outbox over the fake engine's socket: keeps what isn't acknowledged and sends it again."""

    def __init__(self, engine: FakeEngine) -> None:
        self.engine = engine
        self.outbox = Outbox(64 << 20, 64, lambda first, seq, lost: b"")
        self.acked = 0
        self.is_welcome = False

    def produce(self) -> None:
        frame = wire.encode(make_batch(self.outbox.last_seq + 1))
        self.outbox.add(frame, Losses())

    def pump(self, for_s: float) -> None:
        """Produce and send for a while, as far as there is a daemon."""
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            if self.is_welcome:
                self.produce()
            self.turn()

    def turn(self) -> None:
        if not self.is_welcome:
            self.engine.try_send(self.engine.hello_message())
        while self.is_welcome and (frame := self.outbox.next_frame()) is not None:
            self.engine.send_frame(frame)
            self.outbox.sent(frame)
        message = self.engine.receive(0.02)
        if isinstance(message, wire.Welcome):
            self.outbox.acknowledge(message.committed_seq)
            self.outbox.rewind()
            self.is_welcome = True
        elif isinstance(message, wire.Ack):
            self.acked = max(self.acked, message.seq)
            self.outbox.acknowledge(message.seq)

    def is_done(self) -> bool:
        self.turn()
        return self.is_welcome and not len(self.outbox)

    def lose_connection(self) -> None:
        self.engine.reconnect()
        self.is_welcome = False


@pytest.fixture
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    made = DaemonProcess(tmp_path_factory.mktemp("k"))
    yield made
    made.close()


def test_acknowledged_batches_survive_kill_9_and_none_is_stored_twice(process: DaemonProcess) -> None:
    process.start()
    sender = Sender(process.engine())
    chance = random.Random(1)
    for _ in range(CYCLES):
        before = sender.acked
        sender.pump(0.2 + chance.random() * 0.4)
        while sender.acked <= before:  # on a slow machine: else nothing would be at stake
            sender.pump(0.1)
        acked = sender.acked
        process.end(signal.SIGKILL)
        assert stored(process.state_dir)[0] >= acked
        sender.lose_connection()
        process.start()
    wait_for(sender.is_done, "all acknowledgements")
    process.end(signal.SIGTERM)
    committed, batches, distinct, rounds, rolled_up = stored(process.state_dir)
    assert committed == batches == distinct == sender.outbox.last_seq > CYCLES
    assert rounds == rolled_up == 8 * sender.outbox.last_seq


def stored(state_dir: Path) -> tuple[int, int, int, int, int]:
    database = connect(state_dir / "honed.db", read_only=True)
    row = database.conn.execute(
        """SELECT (SELECT max(committed_seq) FROM boots), (SELECT count(*) FROM batches),
             (SELECT count(DISTINCT seq) FROM batches), (SELECT sum(rounds) FROM boots),
             (SELECT sum(rounds) FROM rollups WHERE resolution_s = 3600)"""
    ).fetchone()
    assert database.conn.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
    database.close()
    found: tuple[int, int, int, int, int] = tuple(value or 0 for value in row)  # type: ignore[assignment]
    return found
