"""Training beside requests, as long as what that costs their users stays within a budget, which is measured, not believed.

The share of time that training takes while an engine has requests, its duty, begins at the budget: a device that is divided in
time gives steps of serving as much less. `HarmMeter` then says what it costs.

    mean, p99 or prompts above budget   half the duty, and nothing more for five minutes; the third time in an hour: an hour off
    all below                           more, as far as estimates and their errors allow
    five steps beside training in a row take 1.5 times what they should: none for a second, at once

No unit runs while a request waits for a place in the batch, or where an engine with work has ended no step lately: one that
sleeps has given its memory to others. Work is paid for from a credit that grows with the duty. It begins when the credit has
reached a drawn amount, so that it falls on steps of all kinds, and goes on until the credit is spent.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterable

from honed.adapt.protocol.step_page import StepRow
from honed.recalib.process.harm import LOG_20, HarmMeter

SLICE_S, MOST_DEBT_S = 0.02, 1.0
"""Most credit, and so the longest work at a stretch unless a unit is longer; most of what a longer one costs later."""
STALE_NS, JOINED_NS = 2_000_000_000, 1_000_000
"""Age of the latest step from which nothing runs; gap in work that doesn't count as one."""
HOLD_S, OFF_S, HOUR_S = 300.0, 3600.0, 3600.0
MOST_ALARMS = 3
PAUSE_S = 1.0
SLOW, SLOW_STEPS = 1.5, 5
LEAST_DUTY_SHARE = 1 / 16
"""Least duty, as a share of the budget. Less would train nothing in a useful time."""
MOST_GROWTH = 2.0


class SpareTime:
    """Decides when training may run beside requests. All times are of CLOCK_MONOTONIC.

    Args:
        budget: tolerated harm, as a share of the time of serving's steps.
        p99_budget: tolerated growth of their p99, as a share.
    """

    def __init__(self, budget: float, p99_budget: float, draw: random.Random | None = None) -> None:
        self._budget, self._draw = budget, draw or random.Random()
        self.duty = budget
        self.meter = HarmMeter(budget, p99_budget, self._draw)
        self.seconds = 0.0
        """Time of training beside requests so far."""
        self._credit_s = self._wanted_s = self._credited_s = 0.0
        self._holds_until_s = self._off_until_s = self._pauses_until_s = 0.0
        self._alarms_s: deque[float] = deque(maxlen=MOST_ALARMS)
        self._num_slow = 0
        self.limit = ""
        """What made the duty fall: "mean", "p99" or "time to first token"; empty if it has grown since."""
        self.harm, self.harm_error = 0.0, budget
        """Latest estimate of what training adds to steps beside it, and its standard error."""
        self._work: deque[tuple[int, int]] = deque(maxlen=64)
        """Latest stretches of training beside requests: from, until, in ns."""

    def observe(self, steps: Iterable[tuple[str, StepRow]], now_s: float) -> None:
        """Take in what engines did since the last call."""
        for engine_id, row in steps:
            self._watch(engine_id, row, now_s)
            if self.meter.observe(engine_id, row, int(now_s * 1e9), self.duty) is not None:
                self.harm, self.harm_error = self.meter.bets.mean, self.meter.bets.error
                self._decide(now_s)

    def why_not(self, now_s: float, engines: Collection[str]) -> str:
        """Return why nothing may run now beside the requests of these engines, whatever the credit; empty if it may."""
        if now_s < self._off_until_s:
            return f"training cost users more than its budget ({self.limit}) {MOST_ALARMS} times in an hour: off for an hour"
        if now_s < self._pauses_until_s:
            return "steps were slow beside training"
        rows = [self.meter.latest.get(engine_id) for engine_id in engines]
        if any(row is None or now_s * 1e9 - row.end_ns > STALE_NS for row in rows):
            return "no step has ended lately, or the daemon's trainer.when isn't \"spare\""
        if any(row and row.waiting for row in rows):
            return "requests wait for a place in the batch"
        is_measured = self.meter.is_on and all(map(self.meter.knows, engines))
        return "" if is_measured else "steps without training are measured"

    def may_work(self, now_s: float, engines: Collection[str]) -> bool:
        """Return whether a unit may begin, or work go on, now beside the requests of these engines."""
        since_s, self._credited_s = now_s - self._credited_s, now_s
        if self.why_not(now_s, engines):
            return False
        self.meter.want()
        if 0.0 < since_s < 1.0:
            self._credit_s = min(self._credit_s + since_s * self.duty, SLICE_S)
        if self._credit_s < self._wanted_s:
            return False
        self._wanted_s = 0.0
        return True

    def idle(self, now_s: float) -> None:
        """Note that no engine has work: such time earns no credit."""
        self._credited_s = now_s

    def worked(self, began_s: float, ended_s: float) -> None:
        """Pay for work beside requests, and draw the credit that the next needs."""
        spent_s = ended_s - began_s
        self.seconds += spent_s
        self.meter.worked(spent_s)
        self._credit_s = max(self._credit_s - spent_s, -MOST_DEBT_S)
        began_ns, ended_ns = int(began_s * 1e9), int(ended_s * 1e9)
        if self._work and began_ns - self._work[-1][1] < JOINED_NS:
            began_ns, _ = self._work.pop()
        self._work.append((began_ns, ended_ns))
        if self._credit_s < 0.0:
            self._wanted_s = SLICE_S * self._draw.uniform(0.2, 1.0)

    def _watch(self, engine_id: str, row: StepRow, now_s: float) -> None:
        """Stop at once where steps beside training are far slower than they should be."""
        began_ns = row.end_ns - 1000 * row.duration_us
        if not any(began_ns < ended and began < row.end_ns for began, ended in self._work):
            return
        self._num_slow = self._num_slow + 1 if self.meter.overrun(engine_id, row) > SLOW else 0
        if self._num_slow >= SLOW_STEPS:
            self._num_slow, self._pauses_until_s = 0, now_s + PAUSE_S

    def _decide(self, now_s: float) -> None:
        """Change the duty if the pairs so far say so."""
        meter, least = self.meter, LEAST_DUTY_SHARE * self._budget
        known = {"mean": meter.bets, "p99": meter.tail}
        if meter.has_prefills:  # else no requests began
            known["time to first token"] = meter.prefills
        if harmed := [name for name, bets in known.items() if bets.log_harm >= LOG_20]:
            self.limit = harmed[0]
            self._alarms_s.append(now_s)
            if len(self._alarms_s) == MOST_ALARMS and now_s - self._alarms_s[0] < HOUR_S:
                self._off_until_s = now_s + OFF_S
                self._alarms_s.clear()
            self.duty, self._holds_until_s = max(self.duty / 2, least), now_s + HOLD_S
            self.meter.forget()
        elif min(bets.log_harmless for bets in known.values()) >= LOG_20 and now_s >= self._holds_until_s and self.duty < 1.0:
            harms = [bets.mean + 2.0 * bets.error for name, bets in known.items() if name != "p99"]
            most = max(*harms, self._budget / MOST_GROWTH)
            if most < self._budget:
                self.duty, self.limit = min(self.duty * self._budget / most, 1.0), ""
                self.meter.forget()
