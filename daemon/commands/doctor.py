"""`honed doctor`: problems of the set-up, their causes and their cures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from honed.daemon.client.terminal import Connection, JsonFlag, end_with, print_json, put
from honed.daemon.doctor.check import Check, exit_code, worst_first

SIGNS = {"error": ("✗", "red"), "warning": ("!", "yellow"), "unknown": ("?", "dim"), "ok": ("✓", "green")}


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(doctor)


def doctor(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- VLLM COMMAND]", help="A vLLM command to check before it is run.")
    ] = None,
    prometheus: Annotated[str, typer.Option(help="Prometheus server that should scrape honed.")] = "",
    as_json: JsonFlag = False,
) -> None:
    """Check the set-up; print each problem with its cause and cure. Exits with 0, 1 (errors) or 4 (only warnings)."""
    from honed.daemon.doctor.diagnose import Asked, diagnose

    connection = context.obj if isinstance(context.obj, Connection) else Connection()
    asked = Asked(connection.config, tuple(command or ()), prometheus)
    checks = worst_first(diagnose(asked, connection))

    def answer() -> None:
        if as_json:
            print_json({"checks": [asdict(check) for check in checks]})
        else:
            put(view(checks))

    end_with(exit_code(checks), answer)


def view(checks: Sequence[Check]) -> RenderableType:
    """A line for each check with the cure below it; a count at the end."""
    lines: list[Any] = []
    for check in checks:
        sign, style = SIGNS[check.level]
        lines.append(Text.assemble((f"{sign} {check.subject}: ", style), check.text))
        if check.cure and check.level != "ok":
            cure = Table.grid()
            cure.add_row(Text("    → ", "dim"), Text(check.cure))
            lines.append(cure)
    counts = {level: sum(check.level == level for check in checks) for level in SIGNS}
    words = (
        ("error", "error", "errors"),
        ("warning", "warning", "warnings"),
        ("unknown", "not checked", "not checked"),
        ("ok", "fine", "fine"),
    )
    said = (f"{counts[level]} {one if counts[level] == 1 else several}" for level, one, several in words if counts[level])
    lines += ["", Text(", ".join(said), "bold")]
    return Group(*lines)
