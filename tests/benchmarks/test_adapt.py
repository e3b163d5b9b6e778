"""What the benchmark of draft lengths makes of its measurements."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import adapt

STEADY = [100.0, 102.0, 50.0, 101.0, 104.0]
"""Tokens/s of honed in five repeats."""
BESIDE = {"none": 2.0, "static-1": 1.25, "static-2": 1.05, "static-3": 1.01, "static-5": 1.04, "static-7": 1.4, "table": 1.1}
"""How much faster honed is than the others."""


def repeats(**changes: float) -> list[dict[str, float]]:
    """Five repeats; the machine's speed is another in every one of them."""
    beside = BESIDE | {name.replace("_", "-"): value for name, value in changes.items()} | {adapt.OURS: 1.0}
    return [{rule: speed / factor for rule, factor in beside.items()} for speed in STEADY]


def test_a_ratio_is_of_one_repeat() -> None:
    assert adapt.ratios(repeats(), "none") == pytest.approx([2.0] * 5)
    assert adapt.ratios(repeats(none=0.5), "none") == pytest.approx([0.5] * 5)


def test_the_best_length_is_the_one_that_honed_beats_least() -> None:
    assert adapt.best_of(repeats()) == "static-3"
    assert adapt.best_of(repeats(static_7=0.9)) == "static-7"


def test_the_length_chosen_before_is_the_best_of_the_other_repeats() -> None:
    lucky = repeats()
    lucky[0]["static-5"] = 200.0
    assert adapt.ratios_to_chosen_before(lucky) == pytest.approx([1.01] * 5)
    assert adapt.ratios_to_chosen_before(lucky[:1]) == pytest.approx([0.5])  # there is no other


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


def test_trees_are_held_against_the_best_chain_and_the_best_of_all() -> None:
    found = adapt.compared({"1-a": repeats(chains=1.2, tree_15=1.005)})
    assert found["trees"] == {"1-a": {"to_best_chain": 1.01, "to_best_chain_or_tree": 1.005}}
    assert "shifting" not in found
    assert "trees" not in adapt.compared({"1-a": repeats()})


def test_what_was_foretold_is_held_against_what_was_measured() -> None:
    """`honed replay` says a length's speed over honed's own."""
    statics = adapt.statics_of(repeats())
    foretold: list[dict[str, Any]] = [{"policies": [{"ratio": {"value": 1.1 / BESIDE[rule]}} for rule in statics]}] * 5
    assert set(adapt.replay_errors({"shifting": repeats()}, foretold).values()) == {0.1}
    foretold[0] = {"policies": [{"ratio": None}] * len(statics)}
    assert adapt.replay_errors({"shifting": repeats()}, foretold) == {}


def test_a_tuned_length_is_used_half_way_to_the_next_batch_size() -> None:
    assert adapt.table_of([3, 2, 0]) == [(2, 3), (8, 2), (16, 0)]


def test_two_engines_that_did_the_same_tell_how_far_to_trust_a_comparison() -> None:
    measured = {f"{c}-{t}": repeats()[:2] for c, t in adapt.REGIMES}
    found = adapt.same_twice(measured, [(2, 3), (8, 0), (16, 2)])
    assert found == {f"1-{t}": [0.9182] * 2 for t in adapt.TRAFFIC} | {f"16-{t}": [0.9545] * 2 for t in adapt.TRAFFIC}
    assert set(adapt.same_twice({}, [(16, 1)])) == set(measured)
