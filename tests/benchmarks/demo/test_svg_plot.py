"""Plots are well-formed, put points where their values are, and break where nothing was measured."""

import itertools
import xml.etree.ElementTree as ET

import pytest

from benchmarks.demo.svg_plot import Band, Mark, Series, axis, line_plot, round_step


def drawn(**options: object) -> ET.Element:
    text = line_plot(**{"series": [], "title": "t", "x_label": "x", "y_label": "y", **options})  # type: ignore[arg-type]
    return ET.fromstring(text)


def test_text_from_outside_is_escaped() -> None:
    evil = '<script>"&'
    root = drawn(series=[Series(evil, [(0, 1), (1, 2)])], title=evil, marks=[Mark(0.5, evil)], bands=[Band(0, 1, evil)])
    assert root.get("aria-label") == evil
    assert not [element for element in root.iter() if element.tag == "script"]


def test_a_larger_value_is_drawn_higher_and_further_right() -> None:
    root = drawn(series=[Series("s", [(0, 1), (5, 3)])])
    (points,) = [line.get("points") for line in root.iter("polyline")]
    (x1, y1), (x2, y2) = (map(float, point.split(",")) for point in str(points).split())
    assert x2 > x1
    assert y2 < y1


def test_a_gap_breaks_the_line() -> None:
    points = [(0, 1), (1, 1), (10, 1), (11, 1), (12, 2)]
    root = drawn(series=[Series("s", points)], gap=3)
    assert [len(str(line.get("points")).split()) for line in root.iter("polyline")] == [2, 3]
    assert len(list(root.iter("circle"))) == len(points) + 1  # and the one beside the name


def test_no_points_are_said_and_not_drawn() -> None:
    assert "nothing was measured" in line_plot([Series("s", [])], title="Loss", x_label="x", y_label="y")


def test_a_single_point_and_equal_values_are_drawn() -> None:
    drawn(series=[Series("s", [(3, 1)])])
    drawn(series=[Series("one", [(0, 2), (1, 2)]), Series("two", [(0, 2), (1, 2)])])


def test_names_never_lie_on_each_other() -> None:
    root = drawn(series=[Series(str(i), [(0, 1), (1, 1 + i / 1000)], i) for i in range(1, 5)])
    heights = sorted(float(str(t.get("y"))) for t in root.iter("text") if t.get("class") == "name")
    assert all(b - a >= 14 for a, b in itertools.pairwise(heights))


@pytest.mark.parametrize(("rough", "step"), [(0.9, 1), (1, 1), (1.1, 2), (2.2, 2.5), (3, 5), (7, 10), (0.03, 0.05)])
def test_steps_are_round(rough: float, step: float) -> None:
    assert round_step(rough) == pytest.approx(step)


def test_ticks_hold_the_values() -> None:
    made = axis(0.37, 4.2, 0, 100, 5)
    assert made.low <= 0.37
    assert made.high >= 4.2
    assert made.at(made.low) == 0
    assert made.at(made.high) == 100
    assert made.ticks == [0, 1, 2, 3, 4, 5]
