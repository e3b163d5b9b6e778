"""Engines as the daemon sees them: each keeps its batches until they are acknowledged, and sends them again.

Only vLLM is missing. Outbox, window, heartbeats, hellos and resends are those of `attach/events`, over real ZeroMQ.
"""

from __future__ import annotations

import time
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from benchmarks.scrape import batch, hello_of, status_of
from honed.adapt.protocol import wire
from honed.attach.engine.environment import AttachSettings
from honed.attach.events.outbox import Losses, Outbox
from honed.attach.events.publisher import HEARTBEAT_S, RESEND_AFTER_S, WINDOW_BATCHES

WORKLOADS = 4


class Engine:
    """One engine's end of the events socket."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], path: Path, number: int) -> None:
        self.hello = hello_of(number)
        self.rounds = 0
        """Of all its batches."""
        self.acked = 0
        self.ack_s: list[float] = []
        """Time from each batch's end to its acknowledgement."""
        self.due_s = 0.0
        """When its next batch is complete."""
        self._rng = np.random.default_rng(number)
        self._outbox = Outbox(AttachSettings(path.parent, "").queue_bytes, WINDOW_BATCHES, self._gap)
        self._made_s: dict[int, float] = {}
        self._is_welcome = False
        self._beat_s = self._progress_s = 0.0
        self.socket = context.socket(zmq.DEALER)
        self.socket.set(zmq.LINGER, 0)
        self.socket.set(zmq.IMMEDIATE, 1)
        self.socket.set(zmq.SNDHWM, 2 * WINDOW_BATCHES)
        self.socket.set(zmq.RECONNECT_IVL, 20)  # vLLM's waits longer; a thousand restarts shouldn't
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED)
        self.socket.connect(f"ipc://{path}")

    @property
    def lost(self) -> Losses:
        """What its outbox had to drop, as it tells the daemon."""
        return self._outbox.lost

    @property
    def is_done(self) -> bool:
        """Whether the daemon has all of it."""
        return self._is_welcome and not len(self._outbox)

    def waiting_s(self) -> float:
        """Age of the oldest batch that isn't acknowledged; 0 without one."""
        return time.monotonic() - next(iter(self._made_s.values())) if self._made_s else 0.0

    def make(self, steps: int, requests: int) -> None:
        """Make a batch of as many steps, each of as many requests."""
        seq, lost = self._outbox.last_seq + 1, self.lost
        made = batch(self.hello, seq, 0, WORKLOADS, self._rng, steps, requests)
        told = msgspec.structs.replace(made, **self._told(lost))
        drafts, accepted = sum(made.rounds.num_draft_tokens), sum(made.rounds.num_accepted_tokens)
        self._made_s[seq] = time.monotonic()
        self.rounds += steps * requests
        self._outbox.add(wire.encode(told), Losses(steps * requests, drafts, accepted))

    def turn(self) -> None:
        """Receive and send what there is."""
        while self._monitor.poll(0):
            # Another connection may be another daemon: nothing is sent before its welcome.
            self._is_welcome = False
            if recv_monitor_message(self._monitor)["event"] == zmq.EVENT_CONNECTED:
                self._beat_s = 0.0
        while self.socket.poll(0):
            self._take(wire.decode_to_engine(self.socket.recv()))
        now_s = time.monotonic()
        if now_s - self._beat_s >= HEARTBEAT_S and self._try_send(
            wire.encode(status_of(self.hello) if self._is_welcome else self.hello)
        ):
            self._beat_s = now_s
        if not self._is_welcome:
            return
        if not self._outbox.is_waiting:
            self._progress_s = now_s
        elif now_s - self._progress_s > RESEND_AFTER_S:
            self._progress_s = now_s
            self._outbox.rewind()
        while (frame := self._outbox.next_frame()) is not None and self._try_send(frame):
            self._outbox.sent(frame)

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close()

    def _take(self, message: wire.ToEngine) -> None:
        if isinstance(message, wire.Welcome):
            self._acknowledge(message.committed_seq)
            self._outbox.rewind()
            self._is_welcome = True
        elif isinstance(message, wire.Ack):
            self._acknowledge(message.seq)

    def _acknowledge(self, seq: int) -> None:
        now_s = self._progress_s = time.monotonic()
        self._outbox.acknowledge(seq)
        self.acked = max(self.acked, seq)
        while self._made_s and next(iter(self._made_s)) <= seq:
            self.ack_s.append(now_s - self._made_s.pop(next(iter(self._made_s))))

    def _try_send(self, frame: bytes) -> bool:
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _gap(self, first_seq: int, seq: int, lost: Losses) -> bytes:
        empty = batch(self.hello, seq, 0, WORKLOADS, self._rng, 0, 0)
        return wire.encode(msgspec.structs.replace(empty, first_seq=first_seq, **self._told(lost)))

    def _told(self, lost: Losses) -> dict[str, int]:
        return {
            "lost_rounds": lost.rounds,
            "lost_draft_tokens": lost.draft_tokens,
            "lost_accepted_tokens": lost.accepted_tokens,
            "lost_batches": lost.batches,
        }


class Fleet:
    """Several engines on one thread.

    Args:
        path: the daemon's engine.sock.
        every_s: time from an engine's batch to its next one.
    """

    def __init__(self, path: Path, num_engines: int, every_s: float) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.engines = [Engine(self._context, path, number) for number in range(num_engines)]
        self._every_s = every_s
        self._poller = zmq.Poller()
        now_s = time.monotonic()
        for number, engine in enumerate(self.engines):
            engine.due_s = now_s + every_s * number / num_engines
            self._poller.register(engine.socket, zmq.POLLIN)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for engine in self.engines:
            engine.close()
        self._context.destroy(linger=0)

    @property
    def rounds(self) -> int:
        return sum(engine.rounds for engine in self.engines)

    @property
    def ack_s(self) -> list[float]:
        return [value for engine in self.engines for value in engine.ack_s]

    def pump(self, for_s: float, steps: int, requests: int) -> None:
        """Make batches when they are due, send and receive, for a while."""
        until_s = time.monotonic() + for_s
        while (now_s := time.monotonic()) < until_s:
            for engine in self.engines:
                while engine.due_s <= now_s:
                    engine.make(steps, requests)
                    engine.due_s += self._every_s
                engine.turn()
            next_s = min(until_s, *(engine.due_s for engine in self.engines))
            self._poller.poll(1 + int(min(max(next_s - time.monotonic(), 0.0), 0.02) * 1e3))

    def drain(self, timeout_s: float) -> bool:
        """Send what is left; return whether all of it was acknowledged in time."""
        until_s = time.monotonic() + timeout_s
        while not all(engine.is_done for engine in self.engines):
            if time.monotonic() > until_s:
                return False
            for engine in self.engines:
                engine.turn()
            self._poller.poll(20)
        return True
