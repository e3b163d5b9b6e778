"""The events of a simulated engine, in batches as the attachment sends them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.simulated.traffic import Traffic
from honed.adapt.protocol.arrays import Ints
from honed.adapt.protocol.wire import EventBatch, RoundColumns, StepColumns

BATCH_S = 0.25
"""Time over which steps are collected before a batch is sent."""


class EventLog:
    """Collects steps as the attachment does, and passes them on as batches."""

    def __init__(self, traffic: Traffic, send: Callable[[EventBatch, float], None]) -> None:
        self._traffic, self._send = traffic, send
        self._seq, self._sent_s = 0, 0.0
        self._steps: list[tuple[int | str, ...]] = []
        self._rounds: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []

    def add(self, step: tuple[int | str, ...], rounds: tuple[Ints, Ints, Ints, Ints, Ints], now_s: float) -> None:
        """Record a step and its rounds (request, position, drafted, accepted, emitted)."""
        self._steps.append(step)
        self._rounds.append(rounds)
        if now_s - self._sent_s >= BATCH_S:
            self.flush(now_s)

    def flush(self, now_s: float) -> None:
        """Send the collected steps."""
        if not self._steps:
            return
        self._seq, self._sent_s = self._seq + 1, now_s
        steps = StepColumns(**dict(zip(StepColumns.__struct_fields__, map(list, zip(*self._steps, strict=True)), strict=True)))
        request, position, drafted, accepted, emitted = (np.concatenate(column) for column in zip(*self._rounds, strict=True))
        numbers = np.repeat([row[0] for row in self._steps], [len(one[0]) for one in self._rounds])
        rounds = RoundColumns(
            step=numbers.tolist(),
            request=self._traffic.hashes[request].tolist(),
            workload=self._traffic.workload[request].tolist(),
            position=position.tolist(),
            num_draft_tokens=drafted.tolist(),
            num_accepted_tokens=accepted.tolist(),
            num_invalid_tokens=[0] * len(request),
            temperature=[1.0] * len(request),
            num_emitted=emitted.tolist(),
        )
        batch = EventBatch(
            engine_id="synthetic",
            boot_id=self._traffic.trace.name,
            seq=self._seq,
            sent_unix_ns=0,
            sent_mono_ns=round(now_s * 1e9),
            drafter_version="v1",
            workloads=[one.name for one in self._traffic.trace.workloads],
            steps=steps,
            rounds=rounds,
        )
        self._steps, self._rounds = [], []
        self._send(batch, now_s)
