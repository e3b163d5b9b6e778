import hashlib
import itertools
import math

import numpy as np
import pytest

from honed.adapt.acceptance.estimate import AcceptanceCounts, RequestTable, reached_and_accepted
from honed.adapt.monitor.drift import (
    MOST_TRIALS,
    Bet,
    Dispersion,
    DriftMonitor,
    DriftSettings,
    PageHinkley,
    Past,
    Trials,
    lower_curve,
)
from tests.adapt.simulate import run_drift, simulate_rounds

K = 7
GOOD = np.array([0.85, 0.8, 0.8, 0.8, 0.75, 0.75, 0.75])
POOR = np.array([0.3, 0.3, 0.25, 0.25, 0.25, 0.25, 0.25])


def trials_of(lengths, accepted):
    return Trials(*reached_and_accepted(lengths, accepted, max(lengths)), None)


def feed(monitor, rng, workload, curve, batches, size=60):
    alarms = []
    for _ in range(batches):
        lengths = rng.integers(1, K + 1, size)
        alarms += monitor.observe(workload, lengths, simulate_rounds(rng, curve, lengths))
    return alarms


def test_steady_acceptance_raises_no_alarm():
    # 20 runs of 12,000 rounds. By design one alarm in 10^6 batches: the chance of any here is below 20·200/10^6 = 0.4 %.
    rng = np.random.default_rng(0)
    assert [run_drift(rng, curve, 200)[0] for curve in (GOOD, POOR) * 10] == [-1] * 20


def test_a_loss_that_is_found_is_named_with_its_positions_and_its_evidence():
    rng, monitor = np.random.default_rng(1), DriftMonitor(K)
    monitor.reset("v7")
    assert feed(monitor, rng, "code", GOOD, 60) == []
    worse = GOOD.copy()
    worse[1] *= 0.6
    (alarm,) = feed(monitor, rng, "code", worse, 20)
    assert (alarm.kind, alarm.workload, alarm.drafter_version, alarm.positions) == ("regressed", "code", "v7", (2,))
    assert "most at draft position 2, e-value" in alarm.text
    assert monitor.figures("code")["alarm"] == alarm.text
    assert alarm.evidence >= 6.0
    assert alarm.acceptance_length < alarm.reference_length
    assert monitor.figures("code")["state"] == "drifted"


@pytest.mark.parametrize(("factor", "most_rounds"), [(0.85, 1800), (0.7, 600), (0.4, 240)])
def test_larger_losses_are_found_sooner(factor, most_rounds):
    for seed in range(5):
        rng = np.random.default_rng(seed)
        _, monitor = run_drift(rng, GOOD, 60)
        batch, _ = run_drift(rng, GOOD * factor, 200, monitor=monitor)
        assert 0 <= batch * 60 <= most_rounds


def test_an_alarm_says_when_the_change_began():
    rng, monitor, now_s = np.random.default_rng(5), DriftMonitor(K), 1e9
    for factor in [1.0] * 100 + [0.8] * 60:
        lengths, now_s = rng.integers(1, K + 1, 60), now_s + 10.0
        found = monitor.observe("w", lengths, simulate_rounds(rng, GOOD * factor, lengths), now_s=now_s)
        if found:
            break
    assert now_s - 1e9 > 1000.0
    assert found[0].since_s - 1e9 == pytest.approx(1010.0, abs=50.0)


def test_a_change_of_draft_length_is_no_drift():
    rng, monitor = np.random.default_rng(2), DriftMonitor(K)
    alarms = []
    for length in (7, 2, 5, 1, 7):
        for _ in range(30):
            lengths = np.full(60, length)
            alarms += monitor.observe("w", lengths, simulate_rounds(rng, GOOD, lengths))
    assert alarms == []


def test_an_improvement_is_no_drift():
    rng, monitor = np.random.default_rng(3), DriftMonitor(K)
    assert feed(monitor, rng, "w", POOR, 60) + feed(monitor, rng, "w", GOOD, 60) == []


def test_a_new_workload_far_below_the_best_is_reported_once():
    rng, monitor = np.random.default_rng(4), DriftMonitor(K)
    feed(monitor, rng, "a", GOOD, 30)
    alarms = feed(monitor, rng, "b", POOR, 40)
    assert [(alarm.kind, alarm.workload) for alarm in alarms] == [("low_for_new_workload", "b")]
    assert alarms[0].rounds <= 300
    assert f"most at draft positions {', '.join(map(str, alarms[0].positions))}, e-value" in alarms[0].text
    assert monitor.figures("b")["state"] == "low"
    for version, told in (("v2", ["low_for_new_workload"]), ("v2", [])):  # the second time after a trial
        monitor.reset(version)
        feed(monitor, rng, "a", GOOD, 30)
        assert [alarm.kind for alarm in feed(monitor, rng, "b", POOR, 10)] == told


def test_a_low_workload_that_recovers_is_watched_like_any_other():
    rng, monitor = np.random.default_rng(4), DriftMonitor(K, DriftSettings(rearm_rounds=1000))
    feed(monitor, rng, "a", GOOD, 30)
    feed(monitor, rng, "b", POOR, 40)
    assert monitor.figures("b")["state"] == "low"
    assert feed(monitor, rng, "b", GOOD, 30) == []
    assert monitor.figures("b")["state"] == "stable"
    assert [alarm.kind for alarm in feed(monitor, rng, "b", POOR, 16)] == ["regressed"]
    assert monitor.figures("b")["state"] == "drifted"
    assert feed(monitor, rng, "b", POOR, 60) == []  # low, but that was told
    assert monitor.figures("b")["state"] == "stable"


def test_a_workload_is_called_low_for_as_long_as_it_may_be_new():
    rng, monitor = np.random.default_rng(12), DriftMonitor(K, DriftSettings(new_workload_rounds=3000))
    feed(monitor, rng, "a", GOOD, 30)
    (alarm,) = feed(monitor, rng, "b", POOR, 45)
    assert monitor.figures("b")["state"] == "low"
    assert feed(monitor, rng, "b", POOR, (alarm.rounds + 3000) // 60 - 45 + 2) == []
    assert monitor.figures("b")["state"] == "stable"


def test_a_workload_near_the_border_of_low_is_not_called_fine_by_chance():
    rng, monitor = np.random.default_rng(13), DriftMonitor(K)
    feed(monitor, rng, "a", GOOD, 30)
    feed(monitor, rng, "b", GOOD * 0.65, 40)
    assert monitor.figures("b")["state"] == "low"
    feed(monitor, rng, "b", GOOD * 0.73, 100)
    assert monitor.figures("b")["state"] == "low"


def test_a_low_workload_that_gets_worse_is_suspect_and_its_reference_waits():
    rng, monitor = np.random.default_rng(14), DriftMonitor(K, DriftSettings(batches_per_false_alarm=1e12))
    feed(monitor, rng, "a", GOOD, 30)
    feed(monitor, rng, "b", GOOD * 0.5, 60)
    assert monitor.figures("b")["state"] == "low"
    for _ in range(30):
        assert feed(monitor, rng, "b", GOOD * 0.42, 1) == []
        if monitor.figures("b")["state"] == "suspect":
            break
    assert monitor.figures("b")["state"] == "suspect"
    reference = monitor.figures("b")["reference_length"]
    feed(monitor, rng, "b", GOOD * 0.42, 2)
    assert monitor.figures("b")["reference_length"] == reference
    feed(monitor, rng, "b", GOOD * 0.5, 30)
    assert monitor.figures("b")["state"] == "low"


def test_a_loss_too_small_to_prove_is_the_new_normal_until_more_is_lost():
    """Without a level of its own it would be suspect again and again; without the old one the second loss would hide."""
    rng = np.random.default_rng(17)
    monitor, states, now_s = DriftMonitor(K), [], 1e9

    def feed_at(curve, batches):
        nonlocal now_s
        found = []
        for _ in range(batches):
            now_s += 600.0
            lengths = rng.integers(1, K + 1, 600)
            found += monitor.observe("w", lengths, simulate_rounds(rng, curve, lengths), now_s=now_s)
            states.append(monitor.figures("w")["state"])
        return found

    assert feed_at(GOOD, 100) == []
    states.clear()
    assert feed_at(GOOD * 0.94, 300) == []
    entered = sum(one == "suspect" != before for before, one in itertools.pairwise(["stable", *states]))
    assert entered in (1, 2)
    assert set(states[-100:]) == {"stable"}
    states.clear()
    monitor = DriftMonitor(K)
    feed_at(GOOD, 100)
    assert feed_at(GOOD * 0.94, 50) == []
    assert states[-1] == "stable"
    assert len(feed_at(GOOD * 0.88, 60)) == 1


def test_a_new_workload_a_little_below_is_fine():
    rng = np.random.default_rng(5)
    for _ in range(10):
        monitor = DriftMonitor(K)
        feed(monitor, rng, "a", GOOD, 30)
        assert feed(monitor, rng, "b", GOOD * 0.85, 40) == []


def test_the_first_workload_has_nothing_to_be_low_against():
    assert feed(DriftMonitor(K), np.random.default_rng(6), "only", POOR, 60) == []


def test_after_an_alarm_the_new_level_becomes_the_reference():
    rng, monitor = np.random.default_rng(7), DriftMonitor(K, DriftSettings(rearm_rounds=1000))
    feed(monitor, rng, "w", GOOD, 60)
    assert len(feed(monitor, rng, "w", GOOD * 0.7, 60)) == 1
    assert feed(monitor, rng, "w", GOOD * 0.7, 60) == []
    assert (monitor.figures("w")["state"], monitor.figures("w")["alarm"]) == ("stable", "")
    assert len(feed(monitor, rng, "w", GOOD * 0.4, 60)) == 1


@pytest.mark.parametrize(("rounds_per_s", "fall_s"), [(50_000, 30.0), (50_000, 600.0), (400, 3600.0)])
def test_a_busy_engine_remembers_what_was_normal(rounds_per_s, fall_s):
    """Its rounds are so many that a reference which forgot by them would follow any decline that isn't abrupt."""
    rng, monitor, batches = np.random.default_rng(10), DriftMonitor(K), 150

    def watch(since_s, until_s, first, last):
        alarms, size = [], 2000
        for now_s, factor in zip(np.linspace(since_s, until_s, batches), np.linspace(first, last, batches), strict=True):
            lengths = rng.integers(1, K + 1, size)
            alarms += monitor.observe("w", lengths, simulate_rounds(rng, GOOD * factor, lengths), now_s=float(now_s))
        return alarms

    steady_s = batches * 2000 / rounds_per_s
    assert watch(0.0, steady_s, 1.0, 1.0) == []
    (alarm,) = watch(steady_s, steady_s + fall_s, 1.0, 0.65)
    assert alarm.kind == "regressed"
    assert monitor.figures("w")["state"] == "drifted"
    watch(steady_s + fall_s, steady_s + fall_s + 10_000.0, 0.65, 0.65)
    assert monitor.figures("w")["state"] == "stable"


def test_a_small_lasting_loss_becomes_normal_in_the_end():
    rng, monitor = np.random.default_rng(8), DriftMonitor(K, DriftSettings(rearm_rounds=2000))
    feed(monitor, rng, "w", GOOD, 300)
    feed(monitor, rng, "w", GOOD * 0.97, 600)
    assert monitor.figures("w")["state"] in ("stable", "drifted")


def test_rounds_that_repeat_each_other_weigh_less():
    trials = trials_of([1] * 100, [1] * 40 + [0] * 60)
    plain, repeated = Bet(1, is_restarting=False), Bet(1, is_restarting=False)
    plain.observe(trials, np.array([0.6]))
    repeated.observe(trials, np.array([0.6]), dispersion=4.0)
    assert 0.0 < repeated.log_e < plain.log_e


def test_the_bet_is_fair_at_its_null():
    rng, wealth = np.random.default_rng(9), []
    for _ in range(4000):
        bet = Bet(2, is_restarting=False)
        lengths = np.full(5, 2)
        bet.observe(trials_of(lengths, simulate_rounds(rng, [0.6, 0.5], lengths)), np.array([0.6, 0.5]))
        wealth.append(math.exp(bet.log_e))
    assert np.mean(wealth) == pytest.approx(1.0, abs=0.05)


def test_a_position_that_says_nothing_is_not_named_for_having_been_watched_long():
    bet, null = Bet(2, is_restarting=True), np.array([0.6, 0.6])
    for _ in range(200):
        bet.observe(trials_of([1] * 10, [1] * 6 + [0] * 4), null)
    for _ in range(10):
        bet.observe(trials_of([1] * 10, [1] + [0] * 9), null)
    assert bet.positions() == (0,)


def test_page_hinkley_forgives_noise_and_adds_up_a_shift():
    rng, detector = np.random.default_rng(10), PageHinkley(0.5)
    for deviation in rng.normal(size=1000):
        detector.observe(deviation)
    assert detector.statistic < 12.0
    for _ in range(20):
        detector.observe(-2.0)
    assert detector.statistic > 15.0


def test_a_young_reference_promises_less():
    young, old = AcceptanceCounts(2, 1e9), AcceptanceCounts(2, 1e9)
    young.observe([2] * 30, [1] * 30)
    old.observe([2] * 3000, [1] * 3000)
    assert lower_curve(young, 2.0, 1.0)[0] < lower_curve(old, 2.0, 1.0)[0]
    assert lower_curve(old, 2.0, 1.0)[1] < 0.01


class Requests:
    """Requests that differ, under a rule that stops drafting for those that look hard while many run."""

    def __init__(self, rng, draw, mean_rounds, size=50):
        self.rng, self.draw, self.mean_rounds, self.size = rng, draw, mean_rounds, size
        self.monitor, self.table, self.running, self.count = DriftMonitor(K), RequestTable(K), [], 0

    def step(self, load):
        """One round of each running request that gets drafts: requests, lengths, accepted."""
        self.running = [one for one in self.running if one["left"] > 0][:load]
        while len(self.running) < load:
            self.count += 1
            key = int.from_bytes(hashlib.blake2b(str(self.count).encode(), digest_size=8).digest())  # as engines make them
            left = self.rng.geometric(1 / self.mean_rounds)
            self.running.append({"key": key, "age": 0, "p": self.draw(self.rng), "s": 3.0, "n": 4.0, "left": left})
        is_hard = np.array([one["s"] < 0.6 * one["n"] for one in self.running])
        lengths = np.where(is_hard & (load > 16) & (self.rng.random(load) > 0.1), 0, 5)  # and one round in ten explores
        p = np.array([[one["p"](one["age"]) if callable(one["p"]) else one["p"]] * K for one in self.running])
        accepted = np.minimum(np.cumprod(self.rng.random(p.shape) < p, axis=1).sum(axis=1), lengths)
        for one, length, passed in zip(self.running, lengths, accepted, strict=True):
            one["left"] -= 1
            one["age"] += 1
            one["s"] += passed
            one["n"] += min(passed + 1, length)
        keys = np.array([one["key"] for one in self.running], dtype=np.uint64)
        return keys[lengths > 0], lengths[lengths > 0], accepted[lengths > 0]

    def feed(self, load, batches):
        alarms = []
        for _ in range(batches):
            keys, lengths, accepted = (
                np.concatenate(part) for part in zip(*(self.step(load) for _ in range(self.size)), strict=True)
            )
            past = Past(self.table, keys, self.table.strength(MOST_TRIALS))
            alarms += self.monitor.observe("w", lengths, accepted, past=past, now_s=self.count * 0.1)
            self.table.observe(keys, *reached_and_accepted(lengths, accepted, K))
        return alarms


def easy_or_hard(rng):
    return 0.85 if rng.random() < 0.5 else 0.5


@pytest.mark.parametrize("mean_rounds", [60, 4000])
def test_a_change_of_load_is_no_drift(mean_rounds):
    """While load is high only easy requests get drafts; when it falls the hard ones get them too."""
    for seed in range(3):
        requests = Requests(np.random.default_rng(seed), easy_or_hard, mean_rounds, size=10 if mean_rounds < 1000 else 100)
        assert requests.feed(64, 30) + requests.feed(4, 100) + requests.feed(64, 20) + requests.feed(4, 50) == []


def test_two_long_requests_after_two_others_are_no_drift():
    for seed in range(3):
        assert Requests(np.random.default_rng(seed), lambda rng: rng.beta(6, 3), 4000).feed(2, 400) == []


def test_requests_that_grow_harder_as_they_go_on_are_no_drift():
    for seed in range(2):
        requests = Requests(np.random.default_rng(seed), lambda rng: lambda age: 0.9 if age < 20 else 0.5, 100, size=4)
        requests.feed(16, 50)  # until requests of all ages run
        requests.monitor = DriftMonitor(K)
        assert requests.feed(16, 1000) == []


def test_high_acceptance_hides_no_loss():
    """The reference knows nothing at first: what it then takes for a surprise must not count for long."""
    requests = Requests(np.random.default_rng(0), lambda rng: 0.92, 400, size=100)
    assert requests.feed(4, 60) == []
    requests.running, requests.draw = [], lambda rng: 0.8
    (alarm,) = requests.feed(4, 20)
    assert alarm.kind == "regressed"


def test_a_loss_shows_in_new_requests_though_each_explains_its_own():
    found = []
    for seed in range(3):
        requests = Requests(np.random.default_rng(seed), lambda rng: rng.beta(6, 3), 60, size=10)
        assert requests.feed(16, 100) == []
        requests.draw = lambda rng: 0.65 * rng.beta(6, 3)
        found += requests.feed(16, 100)
    assert [alarm.kind for alarm in found] == ["regressed"] * 3


@pytest.mark.parametrize(("levels", "least", "most"), [((0.6, 0.6), 1.0, 1.3), ((0.3, 0.9), 3.0, 30.0)])
def test_the_dispersion_is_that_of_what_pasts_do_not_explain(levels, least, most):
    """Requests have stretches of 20 rounds, each at one of two levels."""
    rng, table, held = np.random.default_rng(0), RequestTable(1), Dispersion()
    keys, ones = np.arange(64, dtype=np.uint64), np.ones(64, dtype=np.int64)
    for number in range(100):
        if number % 20 == 0:
            p = rng.choice(levels, 64)
        accepted = (rng.random(64) < p).astype(np.int64)
        held.observe(Trials(ones, accepted, Past(table, keys, 512.0)), np.array([0.6]))
        table.observe(keys, ones, accepted)
    assert least <= held.value <= most


def test_odd_input_is_no_error():
    monitor = DriftMonitor(0)
    assert monitor.observe("w", [1], [1]) == []
    assert DriftMonitor(3).observe("w", [], []) == []
    assert monitor.figures("unknown")["state"] == "learning"
