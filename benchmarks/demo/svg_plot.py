"""Line plots as inline SVG: a few dozen lines of arithmetic instead of a plotting library.

Colours are CSS variables of the page (`--series-1` …), so one picture serves light and dark. A gap in x larger than `gap`
breaks a line: nothing was measured there. Every point carries its figures as a tooltip.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

WIDTH, HEIGHT = 860, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 112, 34, 40


@dataclass(frozen=True)
class Series:
    """One line. `color` is 1, 2, …; a series keeps its colour in every plot of a page."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int = 1
    is_dashed: bool = False


@dataclass(frozen=True)
class Mark:
    """A moment to point out: a vertical line with a label above the plot."""

    x: float
    text: str


@dataclass(frozen=True)
class Band:
    """A span of x with a name, shaded: a phase."""

    start: float
    end: float
    text: str


@dataclass
class Axis:
    """A linear scale from values to pixels, with round ticks."""

    low: float
    high: float
    start_px: float
    end_px: float
    ticks: list[float] = field(default_factory=list)

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        return self.start_px + (value - self.low) / (self.high - self.low) * (self.end_px - self.start_px)


def line_plot(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    marks: Sequence[Mark] = (),
    bands: Sequence[Band] = (),
    y_low: float | None = None,
    gap: float = math.inf,
    unit: str = "",
    x_least_step: float = 0.0,
) -> str:
    """Plot one or several lines; without points, return a note instead."""
    xs = [x for s in series for x, _ in s.points] + [m.x for m in marks]
    ys = [y for s in series for _, y in s.points]
    if not ys:
        return f'<p class="note">{html.escape(title)}: nothing was measured.</p>'
    x_axis = axis(min(xs), max(xs), LEFT, WIDTH - RIGHT, 8, is_tight=True, least_step=x_least_step)
    y_axis = axis(min(ys) if y_low is None else min(y_low, *ys), max(ys), HEIGHT - BOTTOM, TOP, 5)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title, quote=True)}">',
        *(_band(band, x_axis) for band in bands),
        *_grid(x_axis, y_axis, x_label, y_label),
        *(_mark(mark, x_axis, row) for row, mark in enumerate(marks)),
    ]
    for s in series:
        parts += _line(s, x_axis, y_axis, gap, unit)
    parts += _names(series, x_axis, y_axis)
    return "\n".join([*parts, "</svg>"])


def axis(
    low: float,
    high: float,
    start_px: float,
    end_px: float,
    num_ticks: int,
    *,
    is_tight: bool = False,
    least_step: float = 0.0,
) -> Axis:
    """Make a scale that holds [low, high] with about `num_ticks` round ticks; `is_tight` doesn't widen it to the ticks."""
    if high - low < 1e-9:
        high = low + 1.0
    step = max(round_step((high - low) / num_ticks), least_step)
    if not is_tight:
        low, high = math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step
    first = math.ceil(low / step - 1e-9)
    ticks = [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]
    return Axis(low, high, start_px, end_px, ticks)


def round_step(rough: float) -> float:
    """Return the smallest of 1, 2, 2.5, 5, 10 times a power of ten that isn't below `rough`."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(f * power for f in (1, 2, 2.5, 5, 10) if f * power >= rough - 1e-12)


def _grid(x_axis: Axis, y_axis: Axis, x_label: str, y_label: str) -> list[str]:
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in x_axis.ticks:
        x = x_axis.at(tick)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{tick:g}</text>')
    parts.append(f'<line class="base" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text class="label" x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{html.escape(x_label)}</text>')
    parts.append(f'<text class="label" x="4" y="12">{html.escape(y_label)}</text>')
    return parts


def _band(band: Band, x_axis: Axis) -> str:
    start = max(x_axis.at(band.start), LEFT)
    end = min(x_axis.at(band.end), WIDTH - RIGHT)
    if end <= start:
        return ""
    shape = f'<rect class="band" x="{start:.1f}" y="{TOP}" width="{end - start:.1f}" height="{HEIGHT - BOTTOM - TOP}"/>'
    return f"<g>{shape}<title>{html.escape(band.text)}</title></g>"


def _mark(mark: Mark, x_axis: Axis, row: int) -> str:
    x = x_axis.at(mark.x)
    is_right = x > (LEFT + WIDTH - RIGHT) * 0.6
    anchor, at = ("end", x - 4) if is_right else ("start", x + 4)
    y = TOP + 10 + 13 * (row % 4)
    line = f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
    return f'{line}<text class="mark-text" x="{at:.1f}" y="{y}" text-anchor="{anchor}">{html.escape(mark.text)}</text>'


def _line(series: Series, x_axis: Axis, y_axis: Axis, gap: float, unit: str) -> list[str]:
    parts = []
    for run in _runs(series.points, gap):
        path = " ".join(f"{x_axis.at(x):.1f},{y_axis.at(y):.1f}" for x, y in run)
        dashes = ' stroke-dasharray="5 4"' if series.is_dashed else ""
        parts.append(f'<polyline class="line s{series.color}"{dashes} points="{path}"/>')
    for x, y in series.points:
        tip = html.escape(f"{series.name}: {y:.4g}{unit} at {x:.4g}")
        dot = f'<circle class="dot f{series.color}" cx="{x_axis.at(x):.1f}" cy="{y_axis.at(y):.1f}" r="2.6"/>'
        parts.append(f"<g>{dot}<title>{tip}</title></g>")
    return parts


def _runs(points: Sequence[tuple[float, float]], gap: float) -> list[list[tuple[float, float]]]:
    """Split the points wherever x jumps by more than `gap`."""
    runs: list[list[tuple[float, float]]] = []
    for point in points:
        if runs and point[0] - runs[-1][-1][0] <= gap:
            runs[-1].append(point)
        else:
            runs.append([point])
    return runs


def _names(series: Sequence[Series], x_axis: Axis, y_axis: Axis) -> list[str]:
    """Draw names at the right ends of the lines, moved apart where they would overlap."""
    ends = sorted(((y_axis.at(s.points[-1][1]), s) for s in series if s.points), key=lambda end: end[0])
    parts, last = [], -math.inf
    for y, s in ends:
        last = max(y, last + 15)
        x = WIDTH - RIGHT + 10
        parts.append(f'<circle class="dot f{s.color}" cx="{x}" cy="{last:.1f}" r="4"/>')
        parts.append(f'<text class="name" x="{x + 9}" y="{last + 4:.1f}">{html.escape(s.name)}</text>')
    return parts
