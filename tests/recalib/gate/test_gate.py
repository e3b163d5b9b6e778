"""The gate: passes what gains, refuses what doesn't or can't be told."""

import itertools
import re

import numpy as np
import pytest

from honed.recalib.gate import gate
from honed.recalib.gate.evaluate import SessionFigures
from honed.recalib.gate.gate import GateSettings, judge, swap_p_value

SETTINGS = GateSettings(resamples=500)


def sessions(workload, count, acceptance, seed=0, rounds=60, spread=0.05, part=""):
    """Sessions whose rounds accept a Poisson-ish number of tokens; text, and so difficulty, is a session's own."""
    rng = np.random.default_rng(seed)
    easiness = rng.normal(0, spread, count)
    return [
        SessionFigures(f"{workload}-{i}", workload, 0, 0, rounds, int(rounds * max(0.0, acceptance * (1 + e))))
        for i, e in zip(range(count), easiness, strict=True)
    ]


def test_clear_gain_passes_and_is_reported():
    verdict = judge(sessions("a", 40, 1.0), sessions("a", 40, 1.3), ["a"], SETTINGS)
    (figure,) = verdict.figures
    assert verdict.passed
    assert verdict.reasons == []
    assert (figure.workload, figure.sessions, figure.must_gain, figure.passed) == ("a", 40, True, True)
    assert figure.gain_low <= figure.candidate / figure.parent <= figure.gain_high
    assert figure.parent == pytest.approx(2.0, abs=0.05)


def test_no_gain_is_refused_with_the_reason():
    verdict = judge(sessions("a", 40, 1.0, seed=1), sessions("a", 40, 1.0, seed=2), ["a"], SETTINGS)
    assert not verdict.passed
    assert "no sure gain on workload 'a'" in verdict.reasons[0]


def test_pairing_finds_a_small_gain_under_large_differences_between_sessions():
    """Sessions differ by 50 %, the gain is 3 %: only a comparison session by session can see it."""
    before = sessions("a", 60, 1.0, seed=3, spread=0.5, rounds=2000)
    after = sessions("a", 60, 1.06, seed=3, spread=0.5, rounds=2000)
    assert judge(before, after, ["a"], SETTINGS).passed


def test_loss_on_another_workload_refuses_what_gains():
    before = sessions("a", 40, 1.0) + sessions("b", 40, 1.0, seed=5)
    after = sessions("a", 40, 1.4) + sessions("b", 40, 0.8, seed=5)
    verdict = judge(before, after, ["a"], SETTINGS)
    assert [f.passed for f in verdict.figures] == [True, False]
    assert not verdict.passed
    assert "loss on workload 'b'" in verdict.reasons[0]


def test_small_loss_elsewhere_is_borne():
    before = sessions("a", 40, 1.0) + sessions("b", 40, 1.0, seed=5)
    after = sessions("a", 40, 1.4) + sessions("b", 40, 0.97, seed=5)
    assert judge(before, after, ["a"], SETTINGS).passed


def test_draft_trees_are_told_by_workload_and_decide_nothing():
    def with_trees(accepted, workload="a"):
        trees = tuple((40, number * accepted) for number in range(1, 5))
        return [SessionFigures(f"{workload}-{i}", workload, 0, 0, 40, 40, trees) for i in range(8)]

    verdict = judge(with_trees(20) + with_trees(10, "b"), with_trees(60) + with_trees(10, "b"), ["a"], SETTINGS)
    assert not verdict.passed
    of_a, of_b = verdict.figures
    assert of_a.parent_trees == {"7": 1.5, "15": 2.0, "31": 2.5, "63": 3.0}
    assert of_a.candidate_trees["7"] == 2.5
    assert of_b.parent_trees == of_b.candidate_trees == {"7": 1.25, "15": 1.5, "31": 1.75, "63": 2.0}
    whole = judge(with_trees(20) + with_trees(10, "b"), with_trees(20) + with_trees(10, "b"), [], SETTINGS).figures[0]
    assert whole.parent_trees["7"] == 1.375
    assert judge(sessions("a", 8, 1.0), sessions("a", 8, 1.0), ["a"], SETTINGS).figures[0].parent_trees == {}


def test_a_session_under_two_labels_counts_once_with_all_of_its_rounds():
    def both(of_a, of_b):
        counts = [("a", 40, of_a), ("b", 20, of_b)]
        return [SessionFigures(f"s-{i}", name, 0, 0, rounds, n) for i in range(6) for name, rounds, n in counts]

    everything = judge(both(40, 20), both(60, 30), [], SETTINGS).figures[0]
    assert (everything.workload, everything.sessions) == ("", 6)
    uneven = judge(both(40, 5), both(60, 9), [], SETTINGS).figures[0]
    assert (uneven.parent, uneven.candidate) == (pytest.approx(1.0 + 45 / 60), pytest.approx(1.0 + 69 / 60))


def few(workload, accepted):
    """Six sessions of unlike success."""
    return [SessionFigures(f"{workload}-{i}", workload, 0, 0, 40, count) for i, count in enumerate(accepted)]


@pytest.mark.parametrize(
    ("accepted", "passed"),
    [
        ((60, 40, 40, 40, 40, 40), True),
        ((52, 24, 38, 40, 24, 42), True),  # 4 % less, within what six sessions vary
        ((36, 36, 36, 36, 37, 37), False),  # 5 % less in each
        ((60, 5, 40, 10, 38, 5), False),  # 17 % less, however they vary
    ],
)
def test_few_sessions_refuse_only_a_loss_that_is_sure_or_large(accepted, passed):
    before = sessions("a", 10, 1.0) + few("b", [40] * 6)
    verdict = judge(before, sessions("a", 10, 1.5) + few("b", accepted), ["a"], SETTINGS)
    assert verdict.passed == passed


@pytest.mark.fault("a gate that equal candidates fail by luck")
def test_a_candidate_like_its_parent_on_many_workloads_is_seldom_refused():
    rng, names = np.random.default_rng(0), [f"w{i}" for i in range(8)]

    def drafted():
        return [one for name in names for one in few(name, rng.binomial(120, 0.45, 6))]

    before, after = sessions("a", 10, 1.0), sessions("a", 10, 1.5)
    refused = sum(not judge(before + drafted(), after + drafted(), ["a"], SETTINGS).passed for _ in range(100))
    assert refused <= 30


def test_too_few_held_out_sessions_are_a_reason_to_refuse():
    verdict = judge(sessions("a", 3, 1.0), sessions("a", 3, 2.0), ["a", "unseen"], SETTINGS)
    assert [f.sessions for f in verdict.figures] == [3, 0]
    assert len(verdict.reasons) == 2
    assert "3 held-out sessions" in verdict.reasons[0]
    assert "'unseen' has 0" in verdict.reasons[1]


def test_other_workload_with_too_few_sessions_is_not_judged():
    before = sessions("a", 40, 1.0) + sessions("b", 2, 1.0)
    after = sessions("a", 40, 1.4) + sessions("b", 2, 0.1)
    verdict = judge(before, after, ["a"], SETTINGS)
    assert verdict.passed
    assert {figure.workload: figure.is_judged for figure in verdict.figures} == {"a": True, "b": False}


@pytest.mark.fault("a gate that equal candidates pass by luck")
def test_six_sessions_pass_only_if_nearly_all_gain():
    before, even = sessions("a", 6, 1.0), sessions("a", 6, 1.2)
    assert judge(before, even, ["a"], SETTINGS).figures[0].p_value == 1 / 64
    assert judge(before, even, ["a"], SETTINGS).passed
    mixed = [*sessions("a", 6, 0.9)[:3], *sessions("a", 6, 1.7)[3:]]
    verdict = judge(before, mixed, ["a"], SETTINGS)
    assert verdict.figures[0].candidate > verdict.figures[0].parent
    assert not verdict.passed
    assert re.search(r"by chance with p = 0\.\d+, at most 0\.05 passes", verdict.reasons[0])


@pytest.mark.fault("a gate that equal candidates pass by luck")
def test_an_attempt_with_a_small_share_of_the_error_needs_more_sessions():
    assert [SETTINGS.sessions_needed(share) for share in (1.0, 0.5, 0.1)] == [6, 6, 8]
    verdict = judge(sessions("a", 7, 1.0), sessions("a", 7, 1.5), ["a"], SETTINGS, share=0.1)
    assert "7 held-out sessions, 8 are needed" in verdict.reasons[0]
    assert judge(sessions("a", 8, 1.0), sessions("a", 8, 1.5), ["a"], SETTINGS, share=0.1).passed


@pytest.mark.parametrize("share", [0.5, 0.1])
def test_with_a_high_confidence_a_clear_gain_passes_in_every_attempt(share):
    """2,000 swaps give p = 1/2001 at best, which was too much for all attempts but the first."""
    settings = GateSettings(confidence=0.999)
    before, after = sessions("a", 40, 1.0), sessions("a", 40, 1.3)
    verdict = judge(before, after, ["a"], settings, share=share)
    assert verdict.passed, verdict.reasons
    assert 0.0 < verdict.figures[0].p_value <= settings.error(share)


def test_a_confidence_that_no_test_could_reach_is_refused():
    with pytest.raises(ValueError, match=r"confidence.*at most 0\.9999"):
        GateSettings(confidence=0.99999)


def test_swaps_are_counted_alike_in_parts(monkeypatch):
    pairs = np.array([[60, 60 + i, 60, 62 + (i * 7) % 5] for i in range(16)])
    whole = swap_p_value(pairs, 1 << 16, 0), swap_p_value(pairs, 5000, 0)
    monkeypatch.setattr(gate, "MOST_AT_ONCE", 1000)
    assert (swap_p_value(pairs, 1 << 16, 0), swap_p_value(pairs, 5000, 0)) == whole


@pytest.mark.parametrize("seed", range(5))
def test_p_counts_the_swaps_that_gain_as_much(seed):
    pairs = np.random.default_rng(seed).integers(20, 60, (7, 4))

    def gain(swaps):
        rows = [row[[2, 3, 0, 1]] if swap else row for row, swap in zip(pairs, swaps, strict=True)]
        parent_rounds, parent_accepted, rounds, accepted = np.sum(rows, axis=0)
        return (1 + accepted / rounds) / (1 + parent_accepted / parent_rounds)

    every = [gain(swaps) for swaps in itertools.product((False, True), repeat=7)]
    exact = np.mean(np.array(every) >= every[0] - 1e-12)
    assert swap_p_value(pairs, 127, seed) == pytest.approx(exact)
    assert swap_p_value(pairs, 120, seed) == pytest.approx(exact, abs=0.15), "random swaps"


def test_margin_is_a_gain_that_the_estimate_must_exceed():
    settings = GateSettings(resamples=500, margin=0.15)
    assert judge(sessions("a", 40, 1.0), sessions("a", 40, 1.4), ["a"], settings).passed
    assert not judge(sessions("a", 40, 1.0), sessions("a", 40, 1.2), ["a"], settings).passed


def test_without_a_named_workload_all_traffic_must_gain():
    before = sessions("a", 20, 1.0) + sessions("b", 20, 1.0)
    assert judge(before, sessions("a", 20, 1.2) + sessions("b", 20, 1.2), [], SETTINGS).figures[0].workload == ""
    assert not judge(before, before, [], SETTINGS).passed


def test_parts_of_one_session_are_one_session():
    before, after = sessions("a", 6, 1.0), sessions("a", 6, 1.5)
    assert judge(before * 5, after * 5, ["a"], SETTINGS).figures[0].sessions == 6


def test_different_sessions_cannot_be_compared():
    with pytest.raises(ValueError, match="different sessions"):
        judge(sessions("a", 6, 1.0), sessions("a", 7, 1.0), ["a"], SETTINGS)


def test_a_candidate_like_its_parent_seldom_passes():
    """Of 200 candidates that are only noise, one in twenty passes."""
    passed = sum(
        judge(sessions("a", 40, 1.0, seed=2 * i), sessions("a", 40, 1.0, seed=2 * i + 1), ["a"], SETTINGS).passed
        for i in range(200)
    )
    assert 3 <= passed <= 19


def test_the_same_figures_give_the_same_verdict():
    args = (sessions("a", 12, 1.0, seed=1), sessions("a", 12, 1.05, seed=2), ["a"], SETTINGS)
    assert judge(*args) == judge(*args)


def test_a_session_with_several_workloads_is_one_pair() -> None:
    """Its counts are of one text: as several pairs they would seem to be as many independent ones."""

    def labelled(acceptance: float) -> list[SessionFigures]:
        return [SessionFigures(f"s{i}", name, 0, 0, 60, int(60 * acceptance)) for i in range(3) for name in "abcd"]

    verdict = judge(labelled(1.0), labelled(1.3), [], SETTINGS)
    assert verdict.figures[0].sessions == 3
    assert not verdict.passed
    assert "has 3 held-out sessions, 6 are needed" in verdict.reasons[0]
