"""Measures what training beside requests costs their steps: windows with training and without take turns, in a random order.

A window's cost is the time of its steps over what they should take: a line in requests and tokens, fitted to steps of windows
without training (fitted to all, it would learn the harm). A pair's harm is the ratio of its two windows' costs, less 1. Chance
decides which of a pair comes first, so traffic that changes doesn't favour either.

Two tests bet on the harm x of each pair around the budget m, with bets that earlier pairs chose:

    E = Π (1 + λ (x − m))    grows where the mean harm is above m    (harm: restarted at 1 whenever it is below)
    E = Π (1 + λ (m − x))    grows where it is below                 (harmless: since the duty was last changed)

x − m is clipped to ±c, so both speak of the mean of clipped values: a rare pair that is far worse counts as c. Under its
hypothesis each factor has mean ≤ 1. So the second passes 20 with probability ≤ 1/20 while the harm is above the budget, however
often one looks (Ville). The first is raised falsely once in 20 pairs or rarer, if the harm is at the budget all the time:
training loses by it, not the users.

A pair counts for the first test if training was wanted in it, whatever stopped it then. That it fell on none of its steps tells
as much: at a low share most windows have no unit, and those that have one would seem to cost far more. A pair counts for the
second test only if at least half of the share was trained in recent pairs. Bets and estimate follow the last fifty or so.

The mean sees what a median can't: few steps meet a unit of training, and lose much. It doesn't see the tail: if one step in a
hundred meets a unit, the p99 is what such a step takes. So the same two tests bet on the p99. Let q be the p99, without
training, of steps' times over what they should take, and b its budget. A pair's value is the share of steps above (1 + b)·q in
the window with training, less the share above q in the other. Its mean is 0 if the p99 grows by b: as many are above as
should be. Traffic that moves both windows' tails, and a q that is a little wrong, move neither test.

A time to first token is made of a prompt's steps. They are few, and may suffer more than others: they fill the device. So the
same tests bet on their harm alone, with the mean's budget. A value pools pairs until both kinds of windows have had eight such
steps.

Steps that leave a request waiting for a place count nowhere. Nothing is trained beside them, so windows with training would be
calmer than those without.

Source: Waudby-Smith & Ramdas, arXiv 2010.09686 (bets); Shin, Ramdas & Rinaldo, arXiv 2203.03532 (restarts); Ham et al., arXiv
2210.08639 (designs whose order is random).
"""

from __future__ import annotations

import math
import random
from collections import deque
from dataclasses import dataclass

import numpy as np

from honed.adapt.protocol.arrays import Floats
from honed.adapt.protocol.step_page import StepRow

LOG_20 = math.log(20.0)
OFF_S, ON_S = (0.8, 1.2), (1.6, 2.4)
"""Time of steps in a window without training, and with it: drawn from these ranges."""
SETTLE_NS = 150_000_000
"""Steps that begin sooner after a window's beginning count in neither."""
LEAST_STEPS = 100
"""Steps without training before the first pair."""
MOST_RATIOS = 4096
LEAST_RATIOS = 200
LEAST_PREFILLS = 8
"""Steps with prompts in windows with training, and in those without, that make a value."""
TAIL = 0.01
"""Share of steps beyond the p99."""
_TAIL_WIDTH = 0.1
_FIT_EVERY = 64
_FORGETTING = 0.9995
_WIDTH = 4.0
"""c over the budget. For the tail c is `_TAIL_WIDTH`: most windows have far fewer than a tenth of slow steps."""
_MOST_BET = 0.9
_PRIOR_PAIRS = 2.0
_FADE = 1.0 - 1.0 / 50.0


class StepCosts:
    """What an engine's steps take without training: c₀ + c₁·requests + c₂·tokens, by least squares of relative errors."""

    def __init__(self) -> None:
        self._products: Floats = np.zeros((3, 3))
        self._sums: Floats = np.zeros(3)
        self._line: Floats = np.zeros(3)
        self.num_steps = 0

    def observe(self, row: StepRow) -> None:
        """Learn from a step without training."""
        x = np.array((1.0, row.requests, row.tokens)) / row.duration_us
        self._products = _FORGETTING * self._products + np.outer(x, x)
        self._sums = _FORGETTING * self._sums + x
        self.num_steps += 1
        if self.num_steps >= LEAST_STEPS and (self.num_steps - LEAST_STEPS) % _FIT_EVERY == 0:
            ridge = 1e-6 * np.diag(self._products.diagonal() + 1e-30)
            self._line = np.linalg.solve(self._products + ridge, self._sums).astype(np.float64)

    def expected_us(self, row: StepRow) -> float:
        """Return the microseconds that a step should take; 0: not known."""
        return max(float(self._line @ (1.0, row.requests, row.tokens)), 0.0)


@dataclass
class _Cost:
    """Time of some steps, and what they should take."""

    taken_s: float = 0.0
    expected_s: float = 0.0
    num_steps: int = 0

    def add(self, taken_s: float, expected_s: float, num_steps: int = 1) -> None:
        self.taken_s += taken_s
        self.expected_s += expected_s
        self.num_steps += num_steps

    @property
    def ratio(self) -> float:
        return self.taken_s / self.expected_s


class Bets:
    """Evidence that a mean is above the budget, and that it is below, from values that come one by one.

    Args:
        width: c, the distance from the budget at which values are clipped; 0: four times the budget.
    """

    def __init__(self, budget: float, width: float = 0.0) -> None:
        self._budget, self._width = budget, width or _WIDTH * budget
        self.forget()

    def forget(self) -> None:
        """Begin anew: what is measured has changed."""
        self.log_harm = self.log_harmless = 0.0
        self.count = self._sum = self._squares = 0.0

    def add(self, x: float, is_whole: bool = True) -> None:
        """Bet on a value, then learn from it.

        Args:
            is_whole: whether it may show that there is no harm.
        """
        over = min(max(x - self._budget, -self._width), self._width)
        self.log_harm = max(self.log_harm, 0.0) + math.log1p(self._bet(1.0) * over)
        if is_whole or over > 0.0:  # a window that was cut short for its harm speaks against it
            self.log_harmless += math.log1p(-self._bet(-1.0) * over)
        self.count = _FADE * self.count + 1.0
        self._sum = _FADE * self._sum + over
        self._squares = _FADE * self._squares + over**2

    @property
    def mean(self) -> float:
        """Mean of recent values, each as far from the budget as is counted; the budget without any."""
        return self._budget + self._sum / max(self.count, 1.0)

    @property
    def error(self) -> float:
        """Its standard error, from a spread of the budget on before values come."""
        pairs = self.count + _PRIOR_PAIRS
        variance = self._mean_square - (self._sum / pairs) ** 2
        return math.sqrt(max(variance, 0.0) / pairs)

    @property
    def _mean_square(self) -> float:
        return (self._squares + _PRIOR_PAIRS * self._budget**2) / (self.count + _PRIOR_PAIRS)

    def _bet(self, sign: float) -> float:
        """Share of the stake that would have grown it fastest so far (approximately: mean over mean square)."""
        mean = (sign * self._sum + self._budget * _PRIOR_PAIRS / 2) / (self.count + _PRIOR_PAIRS)
        return min(max(mean / self._mean_square, 0.0), _MOST_BET / self._width)


class HarmMeter:
    """Plans the windows and weighs their pairs.

    Args:
        budget: tolerated harm, as a share of steps' time.
        p99_budget: tolerated growth of the p99 of steps' times over what they should take, as a share.
    """

    def __init__(self, budget: float, p99_budget: float, draw: random.Random | None = None) -> None:
        self.bets, self.tail, self.prefills = Bets(budget), Bets(TAIL, _TAIL_WIDTH), Bets(budget)
        self._p99_budget = p99_budget
        self._draw = draw or random.Random()
        self._costs: dict[str, StepCosts] = {}
        self._off_ratios: deque[float] = deque(maxlen=MOST_RATIOS)
        self._slow_from = math.inf
        self._on_steps = self._slow_steps = 0.0
        self._ratios: list[float] = []
        """Time of each of the window's steps, over what it should take."""
        self.is_on = False
        """Whether training may run beside requests in this window."""
        self._is_first = True
        self._seen: dict[bool, tuple[float, float, float, bool]] = {}
        """A pair's windows: cost, share of the time spent training, share of slow steps, whether training was wanted."""
        self._seen_prefills: dict[bool, _Cost] = {}
        self._began_ns = 0
        self._all, self._with_prompts, self._worked_s = _Cost(), _Cost(), 0.0
        self._is_wanted = False
        """Whether anything was to be trained in the window, as far as the share goes."""
        self._recent_worked = self._recent_duty = 0.0
        self._time_of: dict[str, float] = {}
        """Time of each engine's steps in the window."""
        self.latest: dict[str, StepRow] = {}
        """Each engine's latest step."""
        self._pairs_prefills: dict[bool, _Cost] = {}
        self._forget_prefills()
        self._length_s = OFF_S[1]

    @property
    def slow_share(self) -> float:
        """Share of recent steps, in windows with training, that are slower than 99 of 100 without; 0.01: it costs nothing."""
        return self._slow_steps / self._on_steps if self._on_steps else 0.0

    @property
    def has_prefills(self) -> bool:
        """Whether a step with a prompt was seen since the duty was last changed."""
        return bool(self.prefills.count or any(pool.num_steps for pool in self._pairs_prefills.values()))

    def knows(self, engine_id: str) -> bool:
        """Whether it is known what this engine's steps should take."""
        return engine_id in self._costs and self._costs[engine_id].num_steps >= LEAST_STEPS

    def overrun(self, engine_id: str, row: StepRow) -> float:
        """Return a step's time over what it should take; 1 if that isn't known."""
        expected_us = self._costs[engine_id].expected_us(row) if engine_id in self._costs else 0.0
        return row.duration_us / expected_us if expected_us else 1.0

    def forget(self) -> None:
        """Weigh anew: the duty has changed."""
        for bets in (self.bets, self.tail, self.prefills):
            bets.forget()
        self._forget_prefills()
        self._recent_worked = self._recent_duty = 0.0

    def _forget_prefills(self) -> None:
        self._pairs_prefills = {True: _Cost(), False: _Cost()}
        self._are_pairs_whole = True

    def want(self) -> None:
        """Note that training would run now beside requests, as far as its share goes."""
        self._is_wanted = True

    def worked(self, seconds: float) -> None:
        """Note time of training beside requests."""
        self._is_wanted = True
        self._worked_s += seconds

    def observe(self, engine_id: str, row: StepRow, now_ns: int, duty: float) -> float | None:
        """Count a step. Return the pair's harm if this step ended a pair that tells something.

        Args:
            duty: share of its windows' time that training was meant to take.
        """
        before, self.latest[engine_id] = self.latest.get(engine_id), row
        if not row.duration_us or row.waiting or row.end_ns - 1000 * row.duration_us < self._began_ns + SETTLE_NS:
            return None
        costs = self._costs.setdefault(engine_id, StepCosts())
        expected_us = costs.expected_us(row)
        if not self.is_on or not expected_us:  # nothing is trained beside an engine whose steps aren't known
            costs.observe(row)
        if expected_us:
            self._count(engine_id, row, expected_us, before)
        return self._close(now_ns, duty) if max(self._time_of.values(), default=0.0) >= self._length_s else None

    def _count(self, engine_id: str, row: StepRow, expected_us: float, before: StepRow | None) -> None:
        """Add a step to the window, and with it those that were overwritten before they were read."""
        taken_us, num_steps = row.duration_us, 1
        if self.is_on and before is not None and before.number < row.number - 1 and before.end_ns >= self._began_ns:
            taken_us, num_steps = (row.end_ns - before.end_ns) // 1000, row.number - before.number
        self._all.add(taken_us / 1e6, num_steps * expected_us / 1e6, num_steps)
        self._time_of[engine_id] = self._time_of.get(engine_id, 0.0) + taken_us / 1e6
        if row.prefill_tokens:
            self._with_prompts.add(row.duration_us / 1e6, expected_us / 1e6)
        self._ratios.append(row.duration_us / expected_us)

    def _slow(self) -> float:
        """Count the window's steps. Return the share of those whose times are beyond what the p99 may be."""
        ratios, limit, fade = np.array(self._ratios), self._slow_from, 1.0 - 1.0 / MOST_RATIOS
        if not self.is_on:
            self._off_ratios.extend(self._ratios)
        elif self._is_wanted and math.isfinite(limit):
            for is_slow in (ratios > limit).tolist():
                self._on_steps = fade * self._on_steps + 1.0
                self._slow_steps = fade * self._slow_steps + is_slow
            limit *= 1.0 + self._p99_budget
        self._ratios.clear()
        return float((ratios > limit).mean())

    def _close(self, now_ns: int, duty: float) -> float | None:
        """End the window, begin the next, and return the pair's harm."""
        worked_share = self._worked_s / max(self._time_of.values())
        self._seen[self.is_on] = self._all.ratio, worked_share, self._slow(), self._is_wanted
        self._seen_prefills[self.is_on] = self._with_prompts
        harm = None
        if self._is_first:
            self.is_on = not self.is_on
        else:
            (on, worked, slow, is_wanted), (off, _, slow_without, _) = self._seen[True], self._seen[False]
            if is_wanted:
                self._recent_worked = _FADE * self._recent_worked + worked
                self._recent_duty = _FADE * self._recent_duty + duty
                harm, is_whole = on / off - 1.0, self._recent_worked >= self._recent_duty / 2
                self.bets.add(harm, is_whole)
                if math.isfinite(self._slow_from):
                    self.tail.add(TAIL + slow - slow_without, is_whole)
                self._pool_prefills(is_whole)
            if len(self._off_ratios) >= LEAST_RATIOS:  # the same for both windows of a pair
                self._slow_from = float(np.quantile(self._off_ratios, 1.0 - TAIL))
            self.is_on = self._draw.random() < 0.5
            self._seen.clear()
        self._is_first = not self._is_first
        self._length_s = self._draw.uniform(*(ON_S if self.is_on else OFF_S))
        self._began_ns, self._worked_s, self._is_wanted = now_ns, 0.0, False
        self._all, self._with_prompts = _Cost(), _Cost()
        self._time_of.clear()
        return harm

    def _pool_prefills(self, is_whole: bool) -> None:
        """Add the pair's steps with prompts; bet on them once there are enough."""
        on, off = (self._pairs_prefills[is_on] for is_on in (True, False))
        for pool, seen in ((on, self._seen_prefills[True]), (off, self._seen_prefills[False])):
            pool.add(seen.taken_s, seen.expected_s, seen.num_steps)
        self._are_pairs_whole &= is_whole
        if min(on.num_steps, off.num_steps) >= LEAST_PREFILLS:
            self.prefills.add(on.ratio / off.ratio - 1.0, self._are_pairs_whole)
            self._forget_prefills()
