"""Days of a server whose traffic drifts, by when its trainer gets its turns."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

import pytest

from benchmarks.simulated.drifting import ARMS, Arm, Curve, Outcome, Rules, Server, requests_at, run

CURVE = Curve([0.0, 100_000.0, 200_000.0], [1.2, 1.8, 2.0])
SERVER = Server(
    step_requests=(1, 64),
    step_ms=(6.0, 32.0),
    train_tokens_per_s=10_000.0,
    judged_tokens=5_000.0,
    unit_ms=5.0,
    held_ms=10.0,
    harm_per_duty=1.0,
)
RULES = Rules(
    deadline_s=3600.0,
    training_share=0.5,
    min_interval_s=900.0,
    max_attempts=6,
    worth_more=1.05,
    most_tokens=400_000.0,
    latency_budget=0.02,
    p99_budget=0.02,
)


def outcome(
    arm: Arm,
    load: float | Literal["day"] = 0.6,
    curve: Curve = CURVE,
    rules: Rules = RULES,
    moves_per_day: float = 1e-9,
) -> Outcome:
    """Four days; by default the traffic moves once."""
    return run(arm, curve, SERVER, rules, load, most_requests=64, days=4, moves_per_day=moves_per_day, seed=3)


def test_without_training_the_drafter_stays_where_the_move_left_it() -> None:
    found = outcome("none")
    assert 1.2 < found.lengths < 1.4
    assert (found.device_s_per_day, found.versions) == (0.0, 0.0)
    assert found.accepted_per_1000_requests == pytest.approx(256_000 * (1 - 1 / found.lengths))


def test_idle_time_is_all_of_a_quiet_server_and_none_of_a_busy_one() -> None:
    assert outcome("idle", 0.01).hours_to_half < 0.2
    assert outcome("idle", 0.6).device_s_per_day == pytest.approx(0.0, abs=1e-9)
    assert outcome("idle", 0.6).lengths == outcome("none", 0.6).lengths


def test_the_night_comes_once_a_day() -> None:
    found = outcome("night", moves_per_day=1.0)
    assert found.device_s_per_day == pytest.approx(205_000 / 10_000 * found.versions)
    assert 0.5 < found.versions <= 1.0
    assert outcome("none").lengths < outcome("night").lengths < outcome("spare, mean alone").lengths


def test_the_budgets_bound_what_is_trained_beside_requests() -> None:
    assert SERVER.duty(64, 0.02, 10.0) == pytest.approx(0.02)
    by_p99 = SERVER.duty(64, 0.02, 0.02)
    units_per_step = by_p99 * 32.0 / 5.0
    assert units_per_step * (1 + 10.0 / 32.0) == pytest.approx(0.01), "one step in a hundred meets a unit"
    short = replace(SERVER, unit_ms=0.5)
    assert short.duty(64, 0.02, 0.02) == pytest.approx(0.02), "a step that meets such a unit is slower by less than the budget"


def test_what_was_cut_short_goes_on_and_once_does_not() -> None:
    once, all_of_it = outcome("spare, once"), outcome("spare")
    assert once.versions == pytest.approx(1 / 4)
    assert all_of_it.versions > 1
    assert once.hours_to_half > 10 * all_of_it.hours_to_half
    assert all_of_it.lengths > once.lengths + 0.3


def test_whole_trainings_follow_each_other_while_they_win_much() -> None:
    slow = CURVE.stretched(8.0)
    quiet = 0.01
    found = outcome("idle", quiet, slow)
    assert found.versions * 4 == 4
    assert found.device_s_per_day * 4 == pytest.approx(5 * 40.5), "the fifth wins nothing and is refused"
    assert outcome("idle", quiet, slow, replace(RULES, worth_more=2.0)).versions * 4 == 1


def test_an_attempt_that_wins_too_little_is_refused_and_not_repeated_for_ever() -> None:
    hopeless = CURVE.stretched(1000.0)
    found = outcome("spare", 0.9, hopeless)
    assert found.versions == 0
    assert found.device_s_per_day * 4 < 6 * 3600 * 0.02
    assert found.hours_to_half > 20


def test_a_day_is_quietest_at_night() -> None:
    assert requests_at(3 * 3600.0, "day", 64) == pytest.approx(6.4)
    assert requests_at(15 * 3600.0, "day", 64) == pytest.approx(57.6)
    assert requests_at(0.0, 0.5, 64) == 32.0


def test_every_arm_is_simulated() -> None:
    assert len(ARMS) == 6
    assert all(math.isfinite(outcome(arm, "day", moves_per_day=1.0).lengths) for arm in ARMS)
