"""What the benchmark of draft lengths makes of its measurements."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from processes import ProcessError

import adapt

STEADY = [100.0, 102.0, 50.0, 101.0, 104.0]
"""Tokens/s of honed in five repeats."""
BESIDE = {"none": 2.0, "static-1": 1.25, "static-2": 1.05, "static-3": 1.01, "static-5": 1.04, "static-7": 1.4}
BESIDE |= {"table": 1.1, "threshold": 1.2, "kelly": 1.2}
"""How much faster honed is than the others."""


def repeats(**changes: float) -> list[adapt.Turns]:
    """Two repeats of all rules and three of the finalists; the machine's speed is another in every repeat."""
    beside = BESIDE | {name.replace("_", "-"): value for name, value in changes.items()}
    found: list[adapt.Turns] = []
    for number, speed in enumerate(STEADY):
        others = adapt.OTHERS if number < 2 else ("none", "table", *adapt.finalists(found))
        found.append([(rule, speed / beside.get(rule, 1.0)) for rule in adapt.in_turns(others, number)])
    return found


def test_honed_has_the_first_and_the_last_turn_and_never_waits_long() -> None:
    for by in range(len(adapt.OTHERS) + 1):
        order = adapt.in_turns(adapt.OTHERS, by)
        assert sorted(rule for rule in order if rule != adapt.OURS) == sorted(adapt.OTHERS)
        assert order[0] == order[-1] == adapt.OURS
        own = [at for at, rule in enumerate(order) if rule == adapt.OURS]
        assert max(later - sooner for sooner, later in itertools.pairwise(own)) == adapt.GAP + 1
        assert min(later - sooner for sooner, later in itertools.pairwise(own)) > 1


def test_every_rule_has_its_turn_as_the_first() -> None:
    assert [adapt.in_turns(("x", "y", "z"), by)[1] for by in range(4)] == ["x", "y", "z", "x"]


def test_a_ratio_is_to_honed_at_the_others_time() -> None:
    """A machine that slows by the same factor from turn to turn changes no ratio; a rule's own slowness does."""
    order = adapt.in_turns(("none", "table", "kelly"), 0)
    slowing = [(rule, 100.0 * 0.9**at / BESIDE.get(rule, 1.0)) for at, rule in enumerate(order)]
    assert adapt.ratios([slowing], "none") == pytest.approx([2.0])
    assert adapt.ratios([slowing], "table") == pytest.approx([1.1])
    assert adapt.ratios([slowing], "kelly") == pytest.approx([1.2])


def test_a_slow_spell_touches_only_the_turns_at_its_edges() -> None:
    order = adapt.in_turns(adapt.OTHERS, 0)
    spell = range(4, 9)  # begins and ends with a turn of honed's
    assert order[4] == order[8] == adapt.OURS
    turns = [(rule, (86.0 if at in spell else 100.0) / BESIDE.get(rule, 1.0)) for at, rule in enumerate(order)]
    for at, rule in enumerate(order):
        if rule != adapt.OURS and at not in (1, 2, 3, 9, 10, 11):
            assert adapt.ratio(turns, at) == pytest.approx(BESIDE[rule])


def test_only_lengths_near_the_best_go_on() -> None:
    assert adapt.finalists(repeats()[:2]) == ["static-2", "static-3", "static-5"]
    assert adapt.finalists(repeats(static_7=0.9)[:2]) == ["static-7"]


def test_a_length_once_left_out_stays_out() -> None:
    so_far = repeats()
    so_far[2:] = [
        [(rule, speed / 10 if rule.startswith("static-") else speed) for rule, speed in turns] for turns in so_far[2:]
    ]
    assert adapt.finalists(so_far) == ["static-2", "static-3", "static-5"]
    assert adapt.best_of(so_far) == "static-3"


def test_ratios_are_of_the_repeats_in_which_a_rule_had_a_turn() -> None:
    assert adapt.ratios(repeats(), "static-3") == pytest.approx([1.01] * 5)
    assert adapt.ratios(repeats(), "static-7") == pytest.approx([1.4] * 2)


def test_the_length_chosen_before_is_the_best_of_the_other_repeats() -> None:
    lucky = repeats()
    lucky[0] = [(rule, 200.0 if rule == "static-5" else speed) for rule, speed in lucky[0]]
    assert adapt.ratios_to_chosen_before(lucky) == pytest.approx([1.01] * 5)


def test_summary_holds_the_bars_figures_of_every_regime() -> None:
    measured = {f"{c}-{t}": repeats() for c, t in adapt.REGIMES} | {"shifting": repeats()}
    found = adapt.compared(measured)
    assert set(found["ratio_to_best_static"]) == {f"{c}-{t}" for c, t in adapt.REGIMES}
    assert set(found["ratio_to_best_static"].values()) == {1.01}
    assert set(found["ratio_to_none"].values()) == {2.0}
    assert found["shifting"] == {"to_best_single_static": 1.01, "to_tuned_table": 1.1}
    assert set(found["best_static"].values()) == {"static-3"}
    assert found["spread"]["16-b"]["ratio_to_best_static"] == [1.01, 1.01]


def test_the_trace_alone_has_a_summary_too() -> None:
    found = adapt.compared({"tuning-1": repeats()[:1], "shifting": repeats()})
    assert found["shifting"] == {"to_best_single_static": 1.01, "to_tuned_table": 1.1}
    assert found["ratio_to_none"] == {}
    assert set(found["best_static"]) == {"shifting"}


def bench_with(rates: adapt.Rates) -> adapt.Bench:
    nothing: Any = None
    return adapt.Bench(nothing, Path(), nothing, "", 64, {}, rates=rates, clock_rates=rates, replays=[{"policies": []}])


def test_an_interrupted_run_goes_on_with_what_it_had(tmp_path: Path) -> None:
    plan = {"repeats": 2, "commit": "abc"}
    before, after = bench_with({"1-a": repeats()[:3]}), bench_with({})
    before.table, before.kept = [(2, 3), (16, 0)], adapt.Kept(tmp_path / "build" / "kept.json", plan)
    assert before.kept.load(after) == []
    before.keep()
    assert adapt.Kept(before.kept.path, plan).load(after) == before.table
    assert adapt.ratios(after.rates["1-a"], "none") == adapt.ratios(before.rates["1-a"], "none")
    assert after.replays == before.replays


def test_what_another_plan_measured_is_not_taken(tmp_path: Path) -> None:
    kept = adapt.Kept(tmp_path / "kept.json", {"repeats": 2, "commit": "abc"})
    kept.save(bench_with({"1-a": repeats()}))
    with pytest.raises(ProcessError, match=r"kept\.json.*remove it"):
        adapt.Kept(kept.path, {"repeats": 2, "commit": "def"}).load(bench_with({}))
