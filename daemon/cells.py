"""Cells of tables: values of API documents as text. What is missing is a dash."""

from __future__ import annotations

import datetime as dt
from typing import Any, Self

from rich.console import RenderableType
from rich.style import StyleType
from rich.table import Table
from rich.text import Text

NOTHING = "–"


class Rows(Table):
    """A table whose cells are taken literally: rich would read `[bold]` in a plain string as markup."""

    @classmethod
    def of(cls, *columns: str, show_header: bool = True) -> Self:
        table = cls(box=None, pad_edge=False, header_style="dim", show_header=show_header)
        for column in columns:
            table.add_column(column, overflow="fold")
        return table

    def add_row(self, *cells: RenderableType | None, style: StyleType | None = None, end_section: bool = False) -> None:
        """Add a row of texts."""
        texts = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
        super().add_row(*texts, style=style, end_section=end_section)


def text(value: Any) -> str:
    """The value as text."""
    return NOTHING if value is None or value == "" else str(value)


def count(value: Any) -> str:
    """A whole number with separators."""
    return f"{value:,}" if isinstance(value, int) else number(value, 0)


def number(value: Any, digits: int) -> str:
    """A number with so many digits."""
    return f"{value:,.{digits}f}" if isinstance(value, int | float) else NOTHING


def percent(value: Any) -> str:
    """A share, as per cent."""
    return f"{100 * value:.1f} %" if isinstance(value, int | float) else NOTHING


def micros(value: Any) -> str:
    """Microseconds."""
    return f"{value:.0f} µs" if isinstance(value, int | float) else NOTHING


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
