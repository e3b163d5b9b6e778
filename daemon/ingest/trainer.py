"""The daemon's view of the trainer process: only one, the one heard last."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from typing import Any

import structlog

from honed.adapt.protocol import wire
from honed.daemon.store.histogram import Histogram

DELAY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
RECENT, SHOWN = 1000, 100
"""Numbers of latest pre-emptions: for the quantiles, and shown one by one."""

log = structlog.get_logger("honed.trainer")


class Trainer:
    """The connection to the trainer. Guarded by the service's lock."""

    def __init__(
        self, send: Callable[[bytes, Any], None], daemon_id: str, lost_after_s: float, monotonic: Callable[[], float]
    ) -> None:
        self._send, self._daemon_id, self._lost_after_s, self._monotonic = send, daemon_id, lost_after_s, monotonic
        self._peer = b""
        self._seen_s = float("-inf")
        self.hello: wire.TrainerHello | None = None
        self.status: wire.TrainerStatus | None = None
        self.is_paused = False
        self.sums: Counter[str] = Counter()
        """Steps, tokens, preemptions and dropped updates of all operations since the daemon started."""
        self.delays = Histogram(DELAY_BOUNDS_S)
        """Its pre-emptions since the daemon started, in seconds."""
        self.computing = Histogram(DELAY_BOUNDS_S)
        """Its compute time in these."""
        self._counted_of, self._counted = "", Counter[str]()
        """An operation, and what of it is in the sums."""
        self._recent_delays_s: deque[float] = deque(maxlen=RECENT)
        self._recent_computing_s: deque[float] = deque(maxlen=RECENT)

    @property
    def is_connected(self) -> bool:
        return self._monotonic() - self._seen_s <= self._lost_after_s

    @property
    def silent_s(self) -> float:
        return self._monotonic() - self._seen_s

    def hear(self, peer: bytes, message: wire.FromTrainer) -> None:
        """Handle a message, and answer a hello."""
        self._peer, self._seen_s = peer, self._monotonic()
        if isinstance(message, wire.TrainerHello):
            log.info("trainer says hello", trainer_id=message.trainer_id, device=message.device)
            self.hello, self.status = message, None
            # Also "not paused": that may have changed while one was gone.
            self.tell(wire.TrainPause(paused=self.is_paused))
            self.tell(wire.Welcome(daemon_id=self._daemon_id, boot_id="", committed_seq=0))
        elif isinstance(message, wire.TrainerStatus):
            self._add_up(message)
            self.status = message

    def _add_up(self, status: wire.TrainerStatus) -> None:
        """Add to our sums; its own figures restart with each operation. One that is resumed begins a little behind.

        A report without an operation adds no sums: it may still have the latest operation's, or be a new process's first one.
        """
        if status.operation_id not in ("", self._counted_of):
            self._counted_of, self._counted = status.operation_id, Counter()
        for name in ("steps", "tokens", "preemptions", "dropped_updates") if status.operation_id else ():
            self.sums[name] += max(0, getattr(status, name) - self._counted[name])
            self._counted[name] = getattr(status, name)
        for delay_s in status.preemption_delays_s:
            self.delays.observe(delay_s)
            self._recent_delays_s.append(delay_s)
        for computing_s in status.preemption_computing_s:
            self.computing.observe(computing_s)
            self._recent_computing_s.append(computing_s)

    def tell(self, message: wire.ToTrainer) -> None:
        """Send it something."""
        self._send(self._peer, message)

    def pause(self, paused: bool) -> None:
        """Pause or resume between two micro-steps; kept across reconnections."""
        self.is_paused = paused
        if self.is_connected:
            self.tell(wire.TrainPause(paused=paused))

    def view(self) -> dict[str, Any] | None:
        """Document for the API; None without a trainer."""
        if not self.is_connected:
            return None
        status = self.status
        return {
            "trainer_id": self.hello.trainer_id if self.hello else status.trainer_id if status else "",
            "device": (status.device if status else "") or (self.hello.device if self.hello else ""),
            "device_reason": status.device_reason if status else "",
            "yields_to": self.hello.yields_to if self.hello else [],
            "state": status.state if status else "idle",
            "operation_id": status.operation_id if status else "",
            "samples": status.samples if status else 0,
            "sessions": status.sessions if status else 0,
            "steps": status.steps if status else 0,
            "max_steps": status.max_steps if status else 0,
            "tokens": status.tokens if status else 0,
            "loss": status.loss if status else 0.0,
            "train_seconds": status.train_seconds if status else 0.0,
            "preemptions": status.preemptions if status else 0,
            "preemption_s_p50": _quantile(self._recent_delays_s, 0.5),
            "preemption_s_p99": _quantile(self._recent_delays_s, 0.99),
            "preemption_computing_s_p99": _quantile(self._recent_computing_s, 0.99),
            "preemption_delays_s": list(self._recent_delays_s)[-SHOWN:],
            "preemption_computing_s": list(self._recent_computing_s)[-SHOWN:],
            "idle_ratio": status.idle_ratio if status else 0.0,
            "beside_seconds": status.beside_seconds if status else 0.0,
            "beside_duty": status.beside_duty if status else 0.0,
            "beside_harm": status.beside_harm if status else 0.0,
            "beside_harm_error": status.beside_harm_error if status else 0.0,
            "beside_slow_share": status.beside_slow_share if status else 0.0,
            "beside_limit": status.beside_limit if status else "",
            "beside_pause": status.beside_pause if status else "",
            "samples_bytes": status.samples_bytes if status else 0,
            "spilled_bytes": status.spilled_bytes if status else 0,
            "lost_records": status.ring_lost_records if status else 0,
            "defective_rings": status.defective_rings if status else 0,
            "nonfinite_rows": status.nonfinite_rows if status else 0,
            "dropped_updates": status.dropped_updates if status else 0,
        }


def _quantile(values: Iterable[float], share: float) -> float:
    """Quantile; 0 without values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)] if ordered else 0.0
