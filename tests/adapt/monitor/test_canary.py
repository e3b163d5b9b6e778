"""Two versions in turns: what decides, what doesn't, and what survives a restart."""

from __future__ import annotations

import json

import numpy as np
import pytest

from honed.adapt.monitor.canary import LEAST_PAIRS, Canary, CanarySettings, Verdict
from honed.adapt.monitor.evidence import BETS_SHAPE
from honed.adapt.protocol.workloads import MAX_WORKLOADS, OTHER_WORKLOAD
from tests.adapt.simulate import make_batch, simulate_rounds
from tests.adapt.trees_of_rounds import tree_batch

K = 7
CURVE = np.array([0.75, 0.72, 0.7, 0.7, 0.68, 0.68, 0.65])
FAST = CanarySettings(window_rounds=50, window_s=0.0)


def make_canary(settings=FAST, old_begins=True):
    return Canary(settings, "v1", "v2", K, old_begins=old_begins)


def window(canary, rng, curves, workloads=("a",), size=50):
    """One window of the version whose turn it is; `curves` by version, or by (version, workload)."""
    for workload in workloads:
        curve = curves.get((canary.serving, workload), curves.get(canary.serving, CURVE))
        lengths = rng.integers(1, K + 1, size)
        canary.observe(make_batch(lengths, simulate_rounds(rng, curve, lengths), workload, canary.serving))
    assert canary.is_window_over(1.0)
    return canary.turn(old_begins=bool(rng.integers(2)))


def run(canary, rng, curves, workloads=("a",), max_windows=1000):
    for _ in range(max_windows):
        if window(canary, rng, curves, workloads).decision != "undecided":
            break
    return canary.verdict


@pytest.mark.parametrize(("factor", "decision"), [(0.9, "worse"), (1.1, "better"), (0.02, "worse")])
def test_a_difference_is_found_and_the_decision_stays(factor, decision):
    canary = make_canary()
    verdict = run(canary, np.random.default_rng(1), {"v2": CURVE * factor})
    assert verdict.decision == decision
    assert verdict.change == pytest.approx(factor - 1.0, abs=0.06)
    assert verdict.rounds <= 4000
    assert run(canary, np.random.default_rng(2), {"v2": CURVE}, max_windows=20) is verdict


def run_trees(canary, rng, temperatures, budget=7, max_windows=1000):
    accepted = {"v1": [], "v2": []}
    for _ in range(max_windows):
        serving = canary.serving
        batch = tree_batch(rng, [budget] * 50, temperatures.get(serving, 1.0), version=serving)
        accepted[serving] += batch.rounds.num_accepted_tokens
        canary.observe(batch)
        if canary.turn(old_begins=bool(rng.integers(2))).decision != "undecided":
            break
    return canary.verdict, *(np.mean(accepted[version]) for version in ("v1", "v2"))


@pytest.mark.fault("a worse drafter promoted where trees are verified")
@pytest.mark.parametrize(("temperature", "decision"), [(2.0, "worse"), (1.0, "undecided"), (0.5, "worse")])
def test_of_trees_what_they_get_is_compared(temperature, decision):
    """The same order of candidates at other temperatures: worse trees. Chains within flat trees are right more often."""
    canary = Canary(FAST, "v1", "v2", 31, old_begins=True)
    verdict, old, new = run_trees(canary, np.random.default_rng(6), {"v2": temperature}, max_windows=400)
    assert verdict.decision == decision, (verdict.text, old, new)
    assert temperature == 1.0 or new < old


def test_a_better_tree_is_found_better():
    canary = Canary(FAST, "v1", "v2", 31, old_begins=True)
    verdict, old, new = run_trees(canary, np.random.default_rng(7), {"v1": 2.0})
    assert verdict.decision == "better"
    assert new > old


def test_ruined_weights_are_gone_after_some_ten_pairs():
    verdict = run(make_canary(), np.random.default_rng(3), {"v2": np.full(K, 0.02)})
    assert verdict.pairs <= 12


def test_equal_versions_end_without_proof():
    verdict = run(make_canary(CanarySettings(window_rounds=50, window_s=0.0, max_pairs=20)), np.random.default_rng(4), {})
    assert verdict.decision == "unproven"
    assert (verdict.pairs, verdict.rounds) == (20, 2000)
    assert "no proven difference" in verdict.text


def test_traffic_that_gets_harder_meanwhile_decides_nothing():
    # Acceptance falls by half while the two take turns: a comparison with what was before would blame the new version.
    rng, canary = np.random.default_rng(5), make_canary()
    for number in range(200):
        curve = CURVE * (1.0 - 0.5 * number / 200)
        window(canary, rng, {"v1": curve, "v2": curve})
    assert canary.verdict.decision == "undecided"


def test_rounds_that_repeat_each_other_decide_nothing():
    # Every window is one request: all of its rounds share a mood. Counted as independent, 200 windows would decide every time.
    decided = 0
    for seed in range(40):
        rng, canary = np.random.default_rng(seed), make_canary()
        for _ in range(200):
            curve = np.clip(CURVE + rng.choice([-0.3, 0.25]), 0.0, 0.99)
            if window(canary, rng, {"v1": curve, "v2": curve}).decision != "undecided":
                decided += 1
                break
    assert decided <= 3


def test_the_workload_that_loses_is_named_though_another_gains():
    curves = {("v2", "a"): np.minimum(CURVE * 1.2, 0.98), ("v2", "b"): CURVE * 0.8}
    verdict = run(make_canary(), np.random.default_rng(6), curves, ("a", "b"))
    assert (verdict.decision, verdict.workload) == ("worse", "b")


def test_a_gain_on_one_workload_is_enough_when_none_loses():
    verdict = run(make_canary(), np.random.default_rng(7), {("v2", "b"): CURVE * 1.3}, ("a", "b"))
    assert verdict.decision == "better"


@pytest.mark.fault("a candidate that gains on one workload and loses on another")
@pytest.mark.parametrize("seed", range(4))
def test_a_gain_on_much_of_the_traffic_does_not_pay_for_a_loss_on_the_rest(seed):
    """Each window has 45 rounds of one workload and 5 of the other: all traffic gains, and was promoted."""
    rng, canary = np.random.default_rng(seed), make_canary()
    curves = {("v2", "a"): CURVE * 1.06, ("v2", "b"): CURVE * 0.91}
    while canary.verdict.decision == "undecided":
        for workload, size in (("a", 45), ("b", 5)):
            lengths = rng.integers(1, K + 1, size)
            curve = curves.get((canary.serving, workload), CURVE)
            canary.observe(make_batch(lengths, simulate_rounds(rng, curve, lengths), workload, canary.serving))
        canary.turn(old_begins=bool(rng.integers(2)))
    assert canary.verdict.decision in ("worse", "unproven")
    assert canary.verdict.workload == "b"


def test_different_lengths_for_the_two_are_no_difference():
    rng, canary = np.random.default_rng(8), make_canary()
    for _ in range(200):
        lengths = np.full(50, 7 if canary.serving == "v1" else 2)
        canary.observe(make_batch(lengths, simulate_rounds(rng, CURVE, lengths), "a", canary.serving))
        canary.turn(old_begins=bool(rng.integers(2)))
    assert canary.verdict.decision == "undecided"
    assert abs(canary.verdict.change) < 0.05


def test_a_window_wants_rounds_and_time_but_an_idle_engine_keeps_its_version():
    canary = make_canary(CanarySettings(window_rounds=50, window_s=1.0, max_window_s=30.0))
    batch = make_batch([3] * 30, [1] * 30, "a", "v1")
    assert not canary.is_window_over(1000.0)  # nothing came: swapping would be for nothing
    canary.observe(batch)
    assert not canary.is_window_over(2.0)
    assert canary.is_window_over(30.0)
    canary.observe(batch)
    assert not canary.is_window_over(0.5)
    assert canary.is_window_over(1.0)


def test_late_batches_count_for_their_version_and_strangers_for_none():
    canary = make_canary()
    canary.observe(make_batch([3] * 60, [1] * 60, "a", "v1"))
    canary.turn(old_begins=True)
    assert canary.serving == "v2"
    canary.observe(make_batch([3] * 40, [1] * 40, "a", "v1"))
    canary.observe(make_batch([3] * 40, [1] * 40, "a", "v0"))
    assert not canary.is_window_over(100.0)
    canary.observe(make_batch([3] * 50, [1] * 50, "a", "v2"))
    canary.turn(old_begins=False)
    assert (canary.rounds, canary.pairs, canary.serving) == (150, 1, "v2")


def test_giving_up_is_no_verdict_against_anyone():
    canary = make_canary()
    window(canary, np.random.default_rng(9), {})
    assert canary.give_up("shows nothing in 60 s").decision == "unproven"
    assert "shows nothing in 60 s" in canary.verdict.text


def test_it_goes_on_after_a_restart_as_if_there_had_been_none():
    rng, canary = np.random.default_rng(10), make_canary()
    for _ in range(10):
        window(canary, rng, {"v2": CURVE * 0.9})
    again = Canary.restored(FAST, json.loads(json.dumps(canary.state())), old_begins=True)
    assert (again.pairs, again.rounds, again.figures()) == (canary.pairs, canary.rounds, canary.figures())
    assert run(again, rng, {"v2": CURVE * 0.9}).decision == "worse"
    assert again.pairs > canary.pairs


@pytest.mark.parametrize("damage", [{"evidence": {"": {}}}, {"pairs": None}, {"evidence": {}}])
def test_a_state_that_is_none_is_refused(damage):
    with pytest.raises((KeyError, TypeError, ValueError)):
        Canary.restored(FAST, make_canary().state() | damage, old_begins=True)


def test_workloads_are_bounded_and_their_allowances_add_up():
    rng, canary = np.random.default_rng(11), make_canary()
    names = [f"w{number}" for number in range(MAX_WORKLOADS + 5)]
    window(canary, rng, {}, names)
    window(canary, rng, {}, names)
    assert len(canary.figures()) == MAX_WORKLOADS  # all traffic, and all names but "default"
    assert OTHER_WORKLOAD in canary.figures()
    again = Canary.restored(FAST, json.loads(json.dumps(canary.state())), old_begins=True)
    for _ in range(2):
        window(again, rng, {}, [f"more{number}" for number in range(5)])
    assert again.figures().keys() == canary.figures().keys(), "names keep their places over a restart"
    allowed = sum(np.exp(-FAST.log_bar("worse", number)) for number in range(MAX_WORKLOADS + 1))
    assert allowed <= FAST.false_roll_back


def test_an_unlabelled_workload_is_not_taken_for_all_traffic():
    canary = make_canary()
    window(canary, np.random.default_rng(12), {}, ("",))
    window(canary, np.random.default_rng(12), {}, ("",))
    assert len(canary.figures()) == 2


def test_before_the_first_pair_nothing_is_known():
    assert make_canary().verdict == Verdict("undecided", text="nothing was compared yet")


SHORT = CanarySettings(window_s=0.0)


def evidence_of(change, pairs=LEAST_PAIRS, seed=20):
    """What trials on ten other hosts have found after so many pairs."""
    rng, sums = np.random.default_rng(seed), {}
    for _ in range(10):
        canary = Canary(SHORT, "v1", "v2", K, old_begins=True)
        for _ in range(2 * pairs):
            window(canary, rng, {"v2": np.clip(CURVE * (1.0 + change), 0.0, 0.99)}, size=12)
        for name, bets in canary.report().items():
            sums[name] = sums.get(name, 0.0) + bets
    return sums


def joined(change, others, pairs, hears_others=True, seed=24):
    """A trial that hears others, after so many pairs of its own, which are too few to decide by themselves."""
    rng = np.random.default_rng(seed)
    canary = Canary(SHORT, "v1", "v2", K, old_begins=True, hears_others=hears_others)
    canary.hear(others, 10)
    for _ in range(2 * pairs):
        window(canary, rng, {"v2": np.clip(CURVE * (1.0 + change), 0.0, 0.99)}, size=12)
    return canary.verdict


@pytest.mark.parametrize(("change", "decision"), [(0.05, "better"), (-0.07, "worse")])
def test_many_hosts_decide_together_what_one_alone_could_not(change, decision):
    others = evidence_of(change)
    assert joined(change, {}, LEAST_PAIRS).decision == "undecided"
    assert joined(change, others, LEAST_PAIRS - 1).decision == "undecided", "a host looks at its own traffic first"
    verdict = joined(change, others, LEAST_PAIRS)
    assert verdict.decision == decision
    assert "together with other hosts' trials (10)" in verdict.text
    assert joined(change, others, LEAST_PAIRS, hears_others=False).decision == "undecided"


@pytest.mark.parametrize(("own", "others"), [(-0.05, 0.05), (0.07, -0.07)])
def test_a_host_whose_own_traffic_speaks_against_it_does_not_follow(own, others):
    assert joined(own, evidence_of(others), LEAST_PAIRS).decision == "undecided"


@pytest.mark.parametrize(
    ("workloads", "heard", "decision"),
    [
        (("a", "b"), ("", "a", "b"), "better"),
        (("a", "b"), ("",), "undecided"),  # neither is shown to lose little
        (("a",), ("",), "better"),  # the only one is all traffic
    ],
)
def test_others_show_that_workloads_lose_little(workloads, heard, decision):
    bets = np.full(BETS_SHAPE, 10.0)
    bets[0] = -10.0  # nobody's new version looks worse
    rng, canary = np.random.default_rng(5), Canary(SHORT, "v1", "v2", K, old_begins=True, hears_others=True)
    canary.hear(dict.fromkeys(heard, bets), 10)
    for _ in range(2 * LEAST_PAIRS):
        window(canary, rng, {"v2": CURVE * 1.03}, workloads, size=12)
    assert canary.verdict.change > 0.0
    assert canary.verdict.decision == decision


def test_hearing_others_makes_a_host_s_own_test_stricter_by_the_half_that_the_common_one_takes():
    def rounds(hears_others):
        canary = Canary(FAST, "v1", "v2", K, old_begins=True, hears_others=hears_others)
        verdict = run(canary, np.random.default_rng(22), {"v2": CURVE * 0.93})
        return verdict.decision, verdict.rounds, verdict.evidence_worse

    (alone, few, bar), (strict, more, higher_bar) = rounds(False), rounds(True)
    assert alone == strict == "worse"
    assert more >= few
    assert higher_bar >= np.log10(2 / (FAST.false_roll_back * 0.94)) > np.log10(1 / (FAST.false_roll_back * 0.94))
    assert bar >= np.log10(1 / (FAST.false_roll_back * 0.94))
