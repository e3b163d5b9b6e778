"""Training beside requests on a simulated device: the harm stays within the budget, at every load and price."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from honed.adapt.protocol.step_page import StepRow
from honed.recalib.process.harm import LEAST_STEPS, LOG_20, Bets, HarmMeter
from honed.recalib.process.spare_time import HOLD_S, STALE_NS, SpareTime

BUDGET = 0.02
LOOK_S, UNIT_S = 0.02, 0.004
ENGINES = ["engine-0"]


@dataclass
class Device:
    """One device in simulated time: steps of serving, and units of training that slow the step they fall on.

    Args:
        price: what a second of training costs a step that it falls on, in seconds; of the time.
        load: share of the time in which there are requests.
        prompts: share of the steps that have a prompt.
        prompt_price: the price in these.
    """

    spare: SpareTime
    price: Callable[[float], float]
    load: float = 1.0
    seed: int = 0
    noise: float = 0.05
    prompts: float = 0.0
    prompt_price: float = 0.0
    now_s: float = 1000.0
    taken_s: float = 0.0
    fair_s: float = 0.0
    rows: list[tuple[str, StepRow]] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    """Time of each of the last run's steps, over what such a step takes at the median."""
    prompt_ratios: list[float] = field(default_factory=list)
    """The same of steps with prompts, over what they took without training."""
    number: int = 0
    waiting: int = 0

    def run(self, seconds: float) -> tuple[float, float]:
        """Go on. Return the harm meanwhile, and training beside requests as a share of the time with requests."""
        draw, until_s, next_look_s = random.Random(self.seed + self.number), self.now_s + seconds, self.now_s
        taken_s, fair_s, worked_s = self.taken_s, self.fair_s, self.spare.seconds
        self.ratios.clear()
        self.prompt_ratios.clear()
        while self.now_s < until_s:
            if draw.random() > self.load:
                self.now_s += draw.expovariate(50.0)
                self.spare.idle(self.now_s)
            requests = draw.randint(1, 32)
            prompt = draw.randint(256, 1024) if draw.random() < self.prompts else 0
            typical = 0.008 + 0.0002 * requests + 1e-5 * prompt
            fair = typical * draw.lognormvariate(0.0, self.noise)
            began_s, left_s = self.now_s, fair
            while left_s > 0.0:
                if self.now_s >= next_look_s:
                    self.spare.observe(self.rows, self.now_s)
                    self.rows, next_look_s = [], self.now_s + LOOK_S
                if self.spare.may_work(self.now_s, ENGINES):
                    slowed_s = (self.prompt_price if prompt else self.price(self.now_s)) * UNIT_S
                    self.spare.worked(self.now_s, self.now_s + UNIT_S)
                    left_s += slowed_s
                tick_s = min(0.002, left_s)
                self.now_s, left_s = self.now_s + tick_s, left_s - tick_s
            self.number += 1
            spent_s = self.now_s - began_s
            sizes = 8 * requests + prompt, requests, self.waiting, prompt
            row = StepRow(self.number, int(self.now_s * 1e9), int(spent_s * 1e6), *sizes)
            self.rows.append(("engine-0", row))
            self.ratios.append(spent_s / typical)
            if prompt:
                self.prompt_ratios.append(spent_s / fair)
            self.taken_s, self.fair_s = self.taken_s + spent_s, self.fair_s + fair
        spent = self.taken_s - taken_s
        return spent / (self.fair_s - fair_s) - 1.0, (self.spare.seconds - worked_s) / spent


def device(price: float | Callable[[float], float], p99_budget: float = 10.0, **more: float) -> Device:
    spare = SpareTime(BUDGET, p99_budget, draw=random.Random(1))
    return Device(spare, price if callable(price) else lambda _: price, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("load", [0.3, 0.6, 1.0])
@pytest.mark.parametrize("price", [0.3, 1.0, 3.0])
def test_the_harm_stays_within_the_budget(price: float, load: float) -> None:
    """A unit that costs three times its length is found out; one that costs little gets more."""
    made = device(price, load=load)
    made.run(240.0)
    harm, worked = made.run(300.0)
    assert harm < 1.15 * BUDGET
    assert worked > 0.1 * BUDGET / price


@pytest.mark.parametrize("price", [0.5, 1.0])
def test_the_p99_stays_within_its_budget(price: float) -> None:
    """Where one step in a hundred meets a unit, the p99 is what such a step takes: the mean's budget doesn't see that."""
    growth, worked = dict[float, float](), dict[float, float]()
    for p99_budget in (0.02, 10.0):
        made = device(price, p99_budget)
        made.run(900.0)
        _, worked[p99_budget] = made.run(900.0)
        growth[p99_budget] = float(np.quantile(made.ratios, 0.99)) / math.exp(made.noise * 2.326) - 1.0
        assert made.spare.limit == ("p99" if p99_budget < 1.0 else "")
    assert growth[0.02] < 0.025
    assert growth[10.0] > 0.035
    assert worked[0.02] > 0.2 * worked[10.0]


@pytest.mark.fault("training at a low share that seemed too dear for ever")
def test_a_low_share_is_measured_as_what_it_is_and_grows_again() -> None:
    """Most of its windows have no unit. Those that have one cost several times as much as all of them."""
    made = device(1.0, 0.02)
    made.spare.duty, shares = BUDGET / 16, list[float]()
    made.run(100.0)
    while made.spare.duty == BUDGET / 16:
        shares.append(made.run(200.0)[1])
        assert len(shares) < 9, "it never grew"
    assert shares[0] == pytest.approx(BUDGET / 16, rel=0.3)
    made.spare.duty = BUDGET / 16
    made.spare.meter.forget()
    made.spare._decide = lambda _: None  # type: ignore[method-assign]
    harm, _ = made.run(400.0)
    assert abs(made.spare.meter.bets.mean - harm) < 2.0 * made.spare.meter.bets.error


@pytest.mark.parametrize("prompts", [0.03, 0.3])
def test_prompts_that_suffer_more_than_other_steps_hold_it_back(prompts: float) -> None:
    """The mean of all steps hardly sees them, and they are what a user waits for first."""
    harm, limits = dict[float, float](), list[str]()
    for prompt_price in (0.3, 6.0):
        made = device(0.3, prompts=prompts, prompt_price=prompt_price)
        made.run(900.0)
        for _ in range(9):
            made.run(100.0)
            limits.append(made.spare.limit)
        made.run(600.0)
        harm[prompt_price] = float(np.mean(made.prompt_ratios)) - 1.0
    assert harm[6.0] < 1.5 * BUDGET
    assert "time to first token" in limits


def test_work_falls_on_steps_of_all_kinds() -> None:
    """It comes at times that are drawn: with a fixed period it could meet the same kind of step again and again."""
    made, began = device(0.0), list[float]()
    worked = made.spare.worked

    def noting(began_s: float, ended_s: float) -> None:
        began.append(began_s)
        worked(began_s, ended_s)

    made.spare.worked = noting  # type: ignore[method-assign]
    made.run(60.0)
    gaps = np.diff(began)
    waits = gaps[(gaps > 2 * UNIT_S) & (gaps < 1.0)]
    assert len(waits) > 20
    assert waits.std() > 0.2 * waits.mean()


def test_harm_that_appears_is_answered_within_two_minutes() -> None:
    made = device(lambda now_s: 0.5 if now_s < 1600.0 else 6.0)
    _, before = made.run(600.0)
    duty = made.spare.duty
    made.run(120.0)
    assert made.spare.duty <= duty / 2
    harm, worked = made.run(200.0)
    assert worked < before
    assert harm < 3.0 * before  # it was six times
    held = made.spare.duty
    made.run(HOLD_S - 220.0)
    assert made.spare.duty <= held


@pytest.mark.parametrize("p99_budget", [0.02, 10.0])
def test_where_training_costs_nothing_it_gets_the_device(p99_budget: float) -> None:
    made = device(0.0, p99_budget)
    made.run(900.0)
    harm, worked = made.run(120.0)
    assert abs(harm) < 0.01
    assert worked > 0.3


def test_steps_that_suddenly_crawl_end_it_at_once() -> None:
    made = device(lambda now_s: 1.0 if now_s < 1060.0 else 40.0)
    made.run(60.0)
    reasons = []
    for _ in range(100):
        made.run(0.1)
        reasons.append(made.spare.why_not(made.now_s, ENGINES))
    assert "steps were slow beside training" in reasons


def test_after_the_third_alarm_in_an_hour_it_is_off() -> None:
    made = device(30.0)
    made.run(1800.0)
    assert "off for an hour" in made.spare.why_not(made.now_s, ENGINES)
    harm, worked = made.run(60.0)
    assert worked == 0.0
    assert abs(harm) < 1e-6


def test_nothing_runs_while_requests_wait_or_no_step_ends() -> None:
    made = device(1.0)
    made.run(60.0)
    made.waiting = 3
    made.run(1.0)
    assert made.spare.why_not(made.now_s, ENGINES) == "requests wait for a place in the batch"
    _, worked = made.run(20.0)
    assert worked == 0.0
    made.waiting = 0
    made.run(1.0)
    while not made.spare.meter.is_on:
        made.run(0.1)
    assert made.spare.why_not(made.now_s + STALE_NS / 1e9 + 0.1, ENGINES).startswith("no step has ended lately")


def test_slow_steps_are_told() -> None:
    free, costly = device(0.0), device(1.0)
    free.run(400.0)
    costly.run(400.0)
    assert 0.002 < free.spare.meter.slow_share < 0.015
    assert costly.spare.meter.slow_share > 0.018


def test_an_engine_that_comes_amid_training_is_measured_first() -> None:
    """With the others gone no window would end, and nobody would see what its steps take."""
    made = device(1.0)
    made.run(60.0)
    while not made.spare.meter.is_on:
        made.run(0.1)
    newcomer, spare, now_s = "engine-1", made.spare, made.now_s
    assert spare.why_not(now_s, [newcomer]) != ""
    pairs = 0
    for number in range(1, 4000):
        now_s += 0.01
        row = StepRow(number, int(now_s * 1e9), 10_000, 64, 8, 0, 0)
        before = spare.meter.bets.count
        spare.observe([(newcomer, row)], now_s)
        if not spare.why_not(now_s, [newcomer]) and number % 10 == 0:
            spare.worked(now_s, now_s + 0.001)
        pairs += spare.meter.bets.count != before
        if number < LEAST_STEPS:
            assert spare.why_not(now_s, [newcomer]) == "steps without training are measured"
    assert pairs >= 5


def test_steps_of_a_saturated_engine_tell_nothing_of_training() -> None:
    """Nothing is trained beside them: where they take longer than others, windows without training would seem slow."""
    meter, draw, now_ns = HarmMeter(BUDGET, 10.0, random.Random(2)), random.Random(3), 10**12
    found = list[float]()
    for number in range(1, 200_000):
        is_calm = number // 300 % 2 == 0
        taken_us = int(10_000 * (1.0 if is_calm else 1.12) * draw.lognormvariate(0.0, 0.02))
        if meter.is_on and is_calm:
            taken_us = int(taken_us * (1.0 + BUDGET))
            meter.worked(BUDGET * taken_us / 1e6)
        now_ns += 1000 * taken_us
        row = StepRow(number, now_ns, taken_us, 64, 8, 0 if is_calm else 2, 0)
        harm = meter.observe("engine-0", row, now_ns, BUDGET)
        found += [] if harm is None else [harm]
    assert abs(float(np.mean(found)) - BUDGET) < 0.15 * BUDGET


@pytest.mark.parametrize("num_engines", [1, 4])
def test_a_window_is_as_long_with_several_engines(num_engines: int) -> None:
    """Their steps run beside each other: training that takes its share of the time has taken it of the window."""
    meter, now_ns, began_ns, lengths = HarmMeter(BUDGET, 10.0, random.Random(2)), 10**12, 10**12, list[float]()
    was_on, pairs = False, 0
    for number in range(1, 20_000):
        now_ns += 10_000_000
        if meter.is_on:
            meter.worked(BUDGET * 0.01)
        for engine in range(num_engines):
            row = StepRow(number, now_ns + engine, 10_000, 64, 8, 0, 0)
            pairs += meter.observe(f"engine-{engine}", row, now_ns, BUDGET) is not None
        if meter.is_on != was_on:
            lengths.append((now_ns - began_ns) / 1e9)
            was_on, began_ns = meter.is_on, now_ns
    assert float(np.median(lengths)) > 0.8
    assert meter.bets.count == pytest.approx(50.0, rel=0.5), pairs
    assert meter.bets.log_harmless > LOG_20


def test_steps_that_were_overwritten_before_they_were_read_count() -> None:
    """A unit that can't be divided may take longer than the page reaches back; what it delayed is its harm."""
    found = dict[bool, float]()
    for is_lost in (False, True):
        meter, now_ns, harms = HarmMeter(BUDGET, 10.0, random.Random(2)), 10**12, list[float]()
        for number in range(1, 40_000):
            is_slowed = meter.is_on and number % 100 >= 90
            now_ns += 20_000_000 if is_slowed else 10_000_000
            meter.worked(0.001 if meter.is_on else 0.0)
            row = StepRow(number, now_ns, 20_000 if is_slowed else 10_000, 64, 8, 0, 0)
            if is_lost and is_slowed:
                continue
            harm = meter.observe("engine-0", row, now_ns, BUDGET)
            harms += [] if harm is None else [harm]
        found[is_lost] = float(np.mean(harms))
    assert found[True] == pytest.approx(found[False], rel=0.3)


def test_rare_prompts_hold_growth_back_until_they_are_measured() -> None:
    made = device(0.1, prompts=0.003, prompt_price=3.0)
    made.run(300.0)
    assert made.spare.duty == BUDGET
    assert made.spare.meter.has_prefills


@pytest.mark.parametrize("spread", [0.2, 1.0, 4.0])
def test_harmless_is_rarely_said_of_what_costs_the_budget(spread: float) -> None:
    """At most one run in twenty, however often one looks."""
    generator, wrong = np.random.default_rng(3), 0
    for _ in range(400):
        bets = Bets(BUDGET)
        for x in generator.normal(BUDGET, spread * BUDGET, size=150):
            bets.add(float(x))
            if bets.log_harmless >= LOG_20:
                wrong += 1
                break
    assert wrong <= 0.05 * 400 + 2.0 * math.sqrt(0.05 * 0.95 * 400)


@pytest.mark.parametrize(("mean", "said"), [(0.0, "log_harmless"), (3 * BUDGET, "log_harm")])
def test_what_is_clear_is_said_soon(mean: float, said: str) -> None:
    generator, bets = np.random.default_rng(4), Bets(BUDGET)
    while getattr(bets, said) < LOG_20:
        bets.add(float(generator.normal(mean, BUDGET)))
        assert bets.count < 40
    assert getattr(bets, "log_harm" if said == "log_harmless" else "log_harmless") < LOG_20
    assert abs(bets.mean - mean) < 4 * bets.error
