"""Days of a server whose traffic drifts: what a drafter that learns wins, by when its trainer gets its turns.

Arithmetic of rates, minute by minute. At random times the traffic moves to a domain that the drafter doesn't know. Training
brings its acceptance length up along a measured curve, by the tokens trained on since the move. An attempt trains, is judged
and tried as honed's trainer and daemon do it: up to `trainer.max_steps` within half of `trainer.deadline_s`, a trial, a pause
of `recalibration.min_interval_s`, then another attempt while more may be won.

- Requests in service are Poisson (M/G/infinity: Gross et al., Fundamentals of Queueing Theory, 2.7). So a server that has n of
  them on average has none for exp(-n) of the time. That is all that `idle` can use.
- `spare` trains in that time too, and beside requests at the duty that its budgets allow. A share d of the device's time slows
  steps by `harm_per_duty` * d on average. Steps that meet a unit are slow ones, and p99 allows one in a hundred of them.
- `spare, mean alone` has no budget for p99. `spare, once` trains once for each move: what the attempts after it are worth.
- `night` waits until three o'clock and then has the device for as long as it needs, at no cost: more than a server can give.

Left out: alarms and samples (seconds at these rates), forgetting, gaps too short for a unit, prompts, and any change of the
rounds' number by honed's own draft lengths.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

Arm = Literal["none", "night", "idle", "spare, once", "spare", "spare, mean alone"]
ARMS: tuple[Arm, ...] = get_args(Arm)
MINUTE_S, DAY_S = 60.0, 86_400.0
NIGHT_S = 3 * 3600.0
SMALLEST_GAIN = 1.01
"""An attempt that wins less isn't sure: the gate refuses it, or its trial shows nothing."""


@dataclass(frozen=True)
class Curve:
    """Acceptance lengths by tokens trained on; linear between the points, flat after the last."""

    tokens: Sequence[float]
    lengths: Sequence[float]

    def at(self, tokens: float) -> float:
        """Acceptance length after training on so many tokens."""
        return float(np.interp(tokens, self.tokens, self.lengths))

    def stretched(self, factor: float) -> Curve:
        """Make the curve of a drafter that needs so many times the tokens."""
        return Curve([factor * tokens for tokens in self.tokens], self.lengths)


@dataclass(frozen=True)
class Server:
    """A server and its trainer, from measurements; times in milliseconds.

    Args:
        step_requests, step_ms: time of a step by its requests; linear between.
        train_tokens_per_s: tokens a second that training takes with the device to itself.
        judged_tokens: tokens whose training would take as long as judging a candidate.
        trial_s: how long a trial lasts, in seconds.
        unit_ms: time of one unit of training; the device holds it for `held_ms`, turns of serving included.
    """

    step_requests: Sequence[float]
    step_ms: Sequence[float]
    train_tokens_per_s: float
    judged_tokens: float
    unit_ms: float
    held_ms: float
    harm_per_duty: float
    trial_s: float = 30.0
    tokens_per_request: float = 256.0

    def step_s(self, requests: float) -> float:
        """Seconds of a step."""
        return float(np.interp(requests, self.step_requests, self.step_ms)) / 1e3

    def duty(self, requests: float, latency_budget: float, p99_budget: float) -> float:
        """Share of the time that training may take beside so many requests."""
        by_mean = latency_budget / self.harm_per_duty
        step_ms = 1e3 * self.step_s(requests)
        if p99_budget >= self.unit_ms / step_ms:  # a step that meets a unit isn't too slow
            return by_mean
        slow_steps = 1.0 + self.held_ms / step_ms
        return min(by_mean, 0.01 * self.unit_ms / (slow_steps * step_ms))


@dataclass(frozen=True)
class Rules:
    """Settings of honed that an attempt goes by; seconds."""

    deadline_s: float
    training_share: float
    min_interval_s: float
    max_attempts: int
    worth_more: float
    """Gain of a whole training after which another one follows."""
    most_tokens: float
    """Tokens of a whole training."""
    latency_budget: float
    p99_budget: float


@dataclass(frozen=True)
class Outcome:
    """What one arm got. `lengths` is the mean acceptance length of a round."""

    lengths: float
    accepted_per_1000_requests: float
    device_s_per_day: float
    hours_to_half: float
    """Median time from a move of the traffic until half of what training can win is won, or until the next move."""
    versions: float
    """Swaps to a new version per day."""
    requests_per_day: float


def requests_at(time_s: float, load: float | Literal["day"], most_requests: float) -> float:
    """Requests in service on average; "day": a tenth of the most at three in the night, nine tenths twelve hours later."""
    if not isinstance(load, str):
        return load * most_requests
    return most_requests * (0.5 - 0.4 * math.cos(2 * math.pi * (time_s - NIGHT_S) / DAY_S))


class _Learner:
    """The drafter of one arm, and the attempt that is under way."""

    def __init__(self, arm: Arm, curve: Curve, server: Server, rules: Rules) -> None:
        self._arm, self._curve, self._server, self._rules = arm, curve, server, rules
        self.length = curve.lengths[-1]
        self.device_s = 0.0
        self.versions = 0
        self._done = self._tried = curve.tokens[-1]
        self._wanted = False
        self._stage, self._left, self._from_s, self._pause_until_s, self._failed = "", 0.0, 0.0, 0.0, 0
        self._trial_until_s = 0.0
        self._is_cut = False

    def move(self) -> None:
        """The traffic moves: what was learned doesn't help, and an attempt under way has the wrong samples."""
        self.length, self._done, self._tried = self._curve.lengths[0], 0.0, 0.0
        self._wanted, self._stage, self._pause_until_s, self._failed = self._arm != "none", "", 0.0, 0

    def minute(self, now_s: float, requests: float) -> None:
        """Let a minute pass with so many requests in service."""
        if self._arm == "night":
            if self._wanted and now_s % DAY_S >= NIGHT_S and (now_s - MINUTE_S) % DAY_S < NIGHT_S:
                whole = self._curve.tokens[-1]
                self.device_s += (whole + self._server.judged_tokens) / self._server.train_tokens_per_s
                self._swap(whole)
            return
        if not self._stage:
            if not self._wanted or now_s < self._pause_until_s:
                return
            self._stage, self._from_s, self._left = "training", now_s, self._rules.most_tokens
        if self._stage == "trial":
            if now_s >= self._trial_until_s:
                self._end_trial(now_s)
            return
        worked = min(self._share(requests) * MINUTE_S * self._server.train_tokens_per_s, self._left)
        self.device_s += worked / self._server.train_tokens_per_s
        self._left -= worked
        if self._stage == "training":
            self._tried += worked
            waited_s = now_s - self._from_s
            self._is_cut = self._left > 0
            if not self._is_cut or waited_s >= self._rules.training_share * self._rules.deadline_s:
                self._stage, self._left = "judging", self._server.judged_tokens
            return
        if self._left > 0 and now_s - self._from_s < self._rules.deadline_s:
            return
        if self._left > 0 or self._curve.at(self._tried) < SMALLEST_GAIN * self.length:
            self._fail(now_s)
            return
        self._stage, self._trial_until_s = "trial", now_s + self._server.trial_s

    def _fail(self, now_s: float) -> None:
        """The gate refused it, or there was no time to judge it."""
        self._tried, self._stage, self._failed = self._done, "", self._failed + 1
        self._pause_until_s = now_s + self._rules.min_interval_s * 2.0 ** (self._failed - 1)
        self._wanted = self._done == 0.0 and self._failed < self._rules.max_attempts

    def _end_trial(self, now_s: float) -> None:
        self._stage, self._pause_until_s = "", now_s + self._rules.min_interval_s
        self._swap(self._tried)

    def _swap(self, tokens: float) -> None:
        gain = self._curve.at(tokens) / self.length
        self._done, self._tried, self._failed = tokens, tokens, 0
        self.length = self._curve.at(tokens)
        self.versions += 1
        self._wanted = self._arm != "spare, once" and (self._is_cut or gain >= self._rules.worth_more)

    def _share(self, requests: float) -> float:
        none = math.exp(-requests)
        if self._arm == "idle":
            return none
        p99_budget = math.inf if self._arm == "spare, mean alone" else self._rules.p99_budget
        return none + (1 - none) * self._server.duty(requests, self._rules.latency_budget, p99_budget)


def run(
    arm: Arm,
    curve: Curve,
    server: Server,
    rules: Rules,
    load: float | Literal["day"],
    *,
    most_requests: float,
    days: int,
    moves_per_day: float,
    seed: int,
) -> Outcome:
    """Let days pass; the traffic's first move is at a random time of the first one."""
    draw = random.Random(seed)
    learner = _Learner(arm, curve, server, rules)
    next_move_s = draw.uniform(0.0, DAY_S)
    half = (curve.lengths[0] + curve.lengths[-1]) / 2
    tokens = rounds = 0.0
    waits, moved_s = list[float](), -1.0
    for minute in range(int(days * DAY_S / MINUTE_S)):
        now_s = minute * MINUTE_S
        if now_s >= next_move_s:
            waits += [now_s - moved_s] if moved_s >= 0 else []
            moved_s, next_move_s = now_s, now_s + draw.expovariate(moves_per_day / DAY_S)
            learner.move()
        requests = requests_at(now_s, load, most_requests)
        verified = requests * MINUTE_S / server.step_s(requests)
        if moved_s >= 0 and learner.length >= half:
            waits, moved_s = [*waits, now_s - moved_s], -1.0
        rounds += verified
        tokens += verified * learner.length
        learner.minute(now_s, requests)
    waits += [days * DAY_S - moved_s] if moved_s >= 0 else []
    length = tokens / rounds
    return Outcome(
        lengths=length,
        accepted_per_1000_requests=1000 * server.tokens_per_request * (1 - 1 / length),
        device_s_per_day=learner.device_s / days,
        hours_to_half=statistics.median(waits) / 3600 if waits else 0.0,
        versions=learner.versions / days,
        requests_per_day=tokens / server.tokens_per_request / days,
    )
