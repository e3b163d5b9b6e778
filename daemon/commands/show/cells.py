"""Cells of tables: values of API documents as text. A missing value is a dash."""

from __future__ import annotations

import datetime as dt
from typing import Any, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

NOTHING = "–"
MOST_ODDS = 6
"""Powers of ten beyond which odds are no longer written out."""


PROSE = frozenset(
    {
        *("why", "because", "result", "note", "is", "gain", "outcome", "by position, %", "S(j), %", "predicted -> observed, %"),
        *("a, by position", "b, by position", "times, from so many tokens on"),
    }
)
"""Columns of words or several figures. Where the table is too wide for the screen they go below their row."""
DETAILS = ("sha256", "parent", "scope", "MiB", "old", "drafter", "who", "took", "since", "drift", "engine", "stage", "to")
"""Columns that follow them, in this order, until the rest fits. What still doesn't fit exceeds the screen."""


class Rows(Table):
    """A table whose cells are taken literally: rich would read `[bold]` in a plain string as markup. No cell is broken."""

    @classmethod
    def of(cls, *columns: str, show_header: bool = True) -> Self:
        table = cls(box=None, pad_edge=False, header_style="dim", show_header=show_header)
        for column in columns:
            table.add_column(Text(column, no_wrap=False), overflow="fold", no_wrap=True)
        table.names = columns
        return table

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.names: tuple[str, ...] = ()
        self.is_brief = False
        """Whether columns that don't fit are left out."""
        self._cells: list[list[RenderableType | None]] = []

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Add a row of texts."""
        texts: list[RenderableType | None] = [Text(cell) if isinstance(cell, str) else cell for cell in cells]
        self._cells.append(texts)
        super().add_row(*texts, style=style, end_section=end_section)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render; on a narrow screen with some of the columns below their rows."""
        if not self.names:
            yield from super().__rich_console__(console, options)
            return
        kept, below = self._fitted(options.max_width)
        table = Table(box=None, pad_edge=False, header_style="dim", show_header=self.show_header)
        for column, width in kept.items():
            table.add_column(Text(self.names[column], no_wrap=False), overflow="fold", no_wrap=True, width=width)
        for cells in self._cells:
            table.add_row(*(cells[column] for column in kept))
        wide = options.reset_height().update(width=max(options.max_width, sum(kept.values()) + 2 * (len(kept) - 1)))
        lines = console.render_lines(table, wide, pad=False, new_lines=True)
        heading = len(lines) - len(self._cells)
        yield from (segment for line in lines[:heading] for segment in line)
        for line, cells in zip(lines[heading:], self._cells, strict=True):
            yield from line
            found = [(self.names[column], cells[column]) for column in below if not self.is_brief]
            shown = [
                Text.assemble((f"{name} ", "dim"), cell)
                for name, cell in found
                if isinstance(cell, Text) and cell.plain not in ("", NOTHING)
            ]
            if shown:
                yield Padding(Text("; ").join(shown), (0, 0, 0, 2))

    def _fitted(self, most: int) -> tuple[dict[int, int], list[int]]:
        """The columns that fit beside each other, with their widths; and those that go below."""
        least, widths = dict[int, int](), dict[int, int]()
        for column, name in enumerate(self.names):
            texts = [cells[column] for cells in self._cells]
            own = max((text.cell_len for text in texts if isinstance(text, Text)), default=0)
            word = max(map(cell_len, name.split()), default=0) if self.show_header else 0
            least[column], widths[column] = max(own, word), max(own, cell_len(name) if self.show_header else 0)
        order = [column for column, name in enumerate(self.names) if name in PROSE]
        order += [self.names.index(name) for name in DETAILS if name in self.names]
        below: list[int] = []
        while order and sum(least.values()) + 2 * (len(least) - 1) > most:
            below.append(order.pop(0))
            del least[below[-1]], widths[below[-1]]
        while sum(widths.values()) + 2 * (len(widths) - 1) > most:  # a heading of several words takes several lines
            spare = max(((width, column) for column, width in widths.items() if width > least[column]), default=None)
            if spare is None:
                break
            widths[spare[1]] -= 1
        return widths, sorted(below)


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


def length(value: Any) -> str:
    """An acceptance length, or tokens or drafts a round."""
    return number(value, 2)


def shares(values: Any) -> str:
    """Shares by position, in whole per cent."""
    return " ".join(f"{100 * value:.0f}" for value in values or ()) or NOTHING


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
