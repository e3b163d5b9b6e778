"""What the benchmark of draft lengths makes of its measurements."""

from __future__ import annotations

import pytest

import adapt

Rates = dict[str, list[float]]


def rates(**changes: list[float]) -> Rates:
    """Tokens/s of five repeats: length 3 is best, 2 and 5 are near, 1 and 7 were left out after two."""
    found = {
        "none": [50.0] * 5,
        "static-1": [80.0, 80.0],
        "static-2": [96.0, 98.0, 48.0, 97.0, 97.0],
        "static-3": [100.0, 102.0, 50.0, 101.0, 101.0],
        "static-5": [97.0, 99.0, 48.5, 98.0, 98.0],
        "static-7": [70.0, 70.0],
        "table": [90.0, 90.0],
        "threshold": [85.0, 85.0],
        "kelly": [85.0, 85.0],
        "goodput": [102.0, 103.0, 51.0, 101.0, 104.0],
    }
    return found | changes


def test_only_lengths_near_the_best_go_on() -> None:
    first = {rule: values[:2] for rule, values in rates().items()}
    assert adapt.finalists(first) == ["static-2", "static-3", "static-5"]
    assert adapt.finalists(first | {"static-7": [120.0, 121.0]}) == ["static-7"]


def test_a_length_once_left_out_stays_out() -> None:
    slow_since = rates(**{name: [100.0, 100.0, 10.0, 10.0, 10.0] for name in ("static-2", "static-3", "static-5")})
    assert adapt.finalists(slow_since) == ["static-2", "static-3", "static-5"]
    assert adapt.best_of(slow_since) in adapt.finalists(slow_since)


def test_ratios_are_of_one_repeat_each() -> None:
    found = rates()
    assert adapt.ratios(found, "static-3") == pytest.approx([1.02, 103 / 102, 1.02, 1.0, 104 / 101])
    assert adapt.ratios(found, "static-7") == pytest.approx([102 / 70, 103 / 70])


def test_the_length_chosen_before_is_the_best_of_the_other_repeats() -> None:
    lucky = rates(**{"static-5": [200.0, 99.0, 48.5, 98.0, 98.0]})
    chosen = adapt.ratios_to_chosen_before(lucky)
    assert chosen == pytest.approx([1.02, 103 / 102, 1.02, 1.0, 104 / 101])


def test_summary_holds_the_bars_figures_of_every_regime() -> None:
    measured = {f"{c}-{t}": rates() for c, t in adapt.REGIMES} | {"shifting": rates()}
    found = adapt.compared(measured)
    assert set(found["ratio_to_best_static"]) == {f"{c}-{t}" for c, t in adapt.REGIMES}
    assert set(found["ratio_to_best_static"].values()) == {1.02}
    assert set(found["ratio_to_none"].values()) == {2.04}
    assert found["shifting"] == {"to_best_single_static": 1.02, "to_tuned_table": round((102 / 90 + 103 / 90) / 2, 4)}
    assert set(found["best_static"].values()) == {"static-3"}
    assert found["spread"]["16-b"]["ratio_to_best_static"] == [1.0, round(104 / 101, 4)]


def test_every_rule_has_its_turn_as_the_first() -> None:
    assert [adapt.rotated(("x", "y", "z"), by)[0] for by in range(4)] == ["x", "y", "z", "x"]
