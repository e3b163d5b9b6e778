"""Load and draft lengths of each engine in the last hour, in memory, in slots of a few seconds.

A slot sums the engine steps within it. Means are per step (requests) or per request (draft tokens).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from honed.adapt.protocol.wire import StepColumns

SLOT_S = 5
HELD_S = 3600
MOST_ENGINES = 64


@dataclass(slots=True)
class Slot:
    """Sums over the steps of `SLOT_S` seconds."""

    t: int
    """Wall second of its start."""
    steps: int = 0
    requests: int = 0
    draft_tokens: int = 0
    budget: int = 0
    """Most nodes (for a chain: draft tokens) that the policy allowed a request; the slot's maximum."""

    @property
    def requests_per_step(self) -> float:
        return self.requests / self.steps if self.steps else 0.0

    @property
    def draft_tokens_per_request(self) -> float:
        return self.draft_tokens / self.requests if self.requests else 0.0


class LoadHistory:
    """Slots by engine. Guarded by the service's lock."""

    def __init__(self) -> None:
        self._slots: dict[str, deque[Slot]] = {}

    def add(self, engine_id: str, steps: StepColumns, budget: int, now_s: float) -> None:
        """Add a batch's steps at their arrival time: a batch is much shorter than a slot."""
        slot = self._slot(engine_id, now_s)
        if slot is None:
            return
        slot.steps += len(steps.num_requests)
        slot.requests += sum(steps.num_requests)
        slot.draft_tokens += sum(steps.num_draft_tokens)
        slot.budget = max(slot.budget, budget)

    def forget(self, engine_id: str) -> None:
        """Drop an engine's slots."""
        self._slots.pop(engine_id, None)

    def slots(self, engine_id: str, since_s: float) -> list[Slot]:
        """Slots that began at or after a moment, oldest first; times without steps have none."""
        return [slot for slot in self._slots.get(engine_id, ()) if slot.t >= since_s]

    def _slot(self, engine_id: str, now_s: float) -> Slot | None:
        slots = self._slots.get(engine_id)
        if slots is None:
            if len(self._slots) >= MOST_ENGINES:
                self._forget_gone(now_s)
            if len(self._slots) >= MOST_ENGINES:
                return None
            slots = self._slots[engine_id] = deque(maxlen=HELD_S // SLOT_S)
        t = int(now_s) // SLOT_S * SLOT_S
        # If the clock was set back by more than that, the slots of a time that is yet to come go; else the present one goes on.
        if slots and slots[-1].t - t > SLOT_S:
            while slots and slots[-1].t > t:
                slots.pop()
        if not slots or t > slots[-1].t:
            slots.append(Slot(t))
        return slots[-1]

    def _forget_gone(self, now_s: float) -> None:
        """Drop engines without a step for as long as slots are held."""
        for engine_id in [one for one, slots in self._slots.items() if now_s - slots[-1].t > HELD_S]:
            self.forget(engine_id)
