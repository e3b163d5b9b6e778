"""`honed dashboards`: writes Grafana's dashboards and Prometheus' rules, as this honed has them, into a folder."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from honed.daemon.client.terminal import JsonFlag, fail, print_json, say

SUFFIXES = (".json", ".yml")


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(dashboards)


def dashboards(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; it is made if it is missing.")],
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Also replace files that differ.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Write Grafana's dashboards and Prometheus' rules into a folder."""
    found = {one.name: one.read_text() for one in resources.files("honed.dashboards").iterdir() if one.name.endswith(SUFFIXES)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = {name: (folder / name).read_text() for name in found if (folder / name).exists()}
        if not overwrite and (other := sorted(name for name, text in there.items() if text != found[name])):
            fail(f"{folder} has other {', '.join(other)}", cure="Give another folder, or --overwrite.")
        written = sorted(name for name, text in found.items() if there.get(name) != text)
        for name in written:
            (folder / name).write_text(found[name])
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{folder}: {getattr(error, 'strerror', None) or error}")
    if as_json:
        print_json({"folder": str(folder), "written": written, "files": sorted(found)})
        return
    kept = len(found) - len(written)
    say(f"{len(written)} files written to {folder}" + (f"; {kept} are there already" if kept else ""))
    say("prometheus.yml says what to add to Prometheus' configuration, grafana-*.yml provision Grafana.")
