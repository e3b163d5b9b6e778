"""Cells of tables: values of API documents as text. A missing value is a dash."""

from __future__ import annotations

import datetime as dt
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

NOTHING = "–"
MOST_ODDS = 6
"""Powers of ten beyond which odds are no longer written out."""


PROSE = frozenset(
    {"why", "because", "result", "note", "is", "gain", "outcome", "by position (conditional)", "S(j)", "predicted -> observed"}
)
"""Columns of words or several figures, which may wrap. Ids, states, times and figures never wrap."""
PROSE_WIDTH = 10
"""Least width of such a column on a narrow screen; a row that still doesn't fit exceeds the screen."""


class Rows(Table):
    """A table whose cells are taken literally: rich would read `[bold]` in a plain string as markup."""

    @classmethod
    def of(cls, *columns: str, show_header: bool = True) -> Self:
        table = cls(box=None, pad_edge=False, header_style="dim", show_header=show_header)
        for column in columns:
            is_prose = column in PROSE
            table.add_column(Text(column, no_wrap=False), overflow="fold", no_wrap=not is_prose)
            word = max(map(cell_len, column.split()), default=0)
            table._widths.append((min(word, PROSE_WIDTH) if is_prose else word, cell_len(column)))
        return table

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._widths: list[tuple[int, int]] = []
        """Minimum and preferred width of each named column."""

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Add a row of texts."""
        texts = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        for i, (cell, (least, most)) in enumerate(zip(texts, self._widths, strict=False)):
            width = cell.cell_len if isinstance(cell, Text) else 0
            floor = width if self.columns[i].no_wrap else min(width, PROSE_WIDTH)
            self._widths[i] = max(least, floor), max(most, width)
        super().add_row(*texts, style=style, end_section=end_section)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render; narrow the widest column first if needed, down to each column's minimum."""
        widths = [most for _, most in self._widths]
        gaps = 2 * (len(widths) - 1)
        while sum(widths) + gaps > options.max_width:
            spare = [
                (width, i) for i, (width, (least, _)) in enumerate(zip(widths, self._widths, strict=True)) if width > least
            ]
            if not spare:
                break
            widths[max(spare)[1]] -= 1
        for column, width in zip(self.columns, widths, strict=False):
            column.width = width
        yield from super().__rich_console__(console, options.update(max_width=max(options.max_width, sum(widths) + gaps)))


def text(value: Any) -> str:
    """The value as text."""
    return NOTHING if value is None or value == "" else str(value)


def count(value: Any) -> str:
    """A whole number with separators."""
    return f"{value:,}" if isinstance(value, int) else number(value, 0)


def number(value: Any, digits: int) -> str:
    """A number with `digits` decimals."""
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else NOTHING


def interval(low: Any, high: Any, digits: int) -> str:
    """Both ends with `digits` decimals."""
    return NOTHING if low is None or high is None else f"{number(low, digits)}–{number(high, digits)}"


def percent(value: Any) -> str:
    """A share in per cent."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else NOTHING


def micros(value: Any) -> str:
    """Microseconds."""
    return f"{value:.0f} µs" if isinstance(value, int | float) else NOTHING


def odds(log10: float | None) -> str:
    """An e-value by its log₁₀, as odds: how many times likelier it makes what it speaks for."""
    if log10 is None:
        return NOTHING
    if abs(log10) > MOST_ODDS:
        return f"over 10^{MOST_ODDS} : 1" if log10 > 0 else f"1 : over 10^{MOST_ODDS}"
    times = 10.0 ** abs(log10)
    shown = f"{times:,.1f}" if times < 9.95 else f"{times:,.0f}"
    return f"{shown} : 1" if log10 >= 0 else f"1 : {shown}"


def seconds(value: Any) -> str:
    """A span of time."""
    if not isinstance(value, int | float):
        return NOTHING
    return f"{value:.1f} s" if value < 60 else str(dt.timedelta(seconds=round(value)))


def moment(unix_s: Any) -> str:
    """A moment in local time."""
    if not isinstance(unix_s, int | float) or not unix_s:
        return NOTHING
    return dt.datetime.fromtimestamp(unix_s).strftime("%Y-%m-%d %H:%M:%S")


def plain(value: Any) -> str:
    """Any JSON value in one line."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ", ".join(f"{k}: {plain(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return " ".join(plain(v) for v in value)
    return text(value)
