"""View of the settings in force for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from honed.daemon.commands.show.cells import Rows

Document = dict[str, Any]


def config(document: Document) -> RenderableType:
    """Settings, a line each, as in honed.toml."""
    grid = Rows.of(show_header=False)
    for key, value in _flat(document):
        grid.add_row(Text(key, "dim"), json.dumps(value, ensure_ascii=False))
    return grid


def _flat(document: Document, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
