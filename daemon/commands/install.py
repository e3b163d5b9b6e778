"""`honed install` and `honed uninstall`: show the plan of `install`; carry it out only with --apply."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from honed.daemon.client.client import EXIT_USAGE, EXIT_WARNINGS
from honed.daemon.client.terminal import JsonFlag, fail, print_json
from honed.daemon.client.visible import SafeConsole
from honed.daemon.install import units
from honed.daemon.install.units import InstallError, Item, Place

SERVICES = ("honed.service", "honed-trainer.service")
TIMEOUT_S = 300.0
"""Longest wait for a command. systemd stops the trainer, then the daemon, and waits up to TimeoutStopSec for each."""
SAYS = {
    "new": ("+", "green", "new"),
    "same": ("=", "dim", "up to date"),
    "update": ("~", "cyan", "from an older honed: --apply updates it"),
    "changed": ("!", "yellow", "changed by someone else: left alone (`install --overwrite` replaces it and keeps a copy)"),
    "settings": ("=", "dim", "yours: left alone"),
    "replaced": ("~", "cyan", "replaced; the old file is kept as {path}.before-honed"),
    "ours": ("-", "red", "to be removed"),
    "removed": ("-", "red", "removed"),
    "gone": ("=", "dim", "absent"),
    "kept": ("=", "dim", "the file from before `honed install --overwrite`: left alone"),
}

Apply = Annotated[bool, typer.Option("--apply", help="Carry it out; without this nothing is written.")]
Root = Annotated[Path, typer.Option(help="Folder used as /, for images and for tests.")]


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command()(install)
    app.command()(uninstall)


def install(
    apply: Apply = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Also replace changed files; keeps them as NAME.before-honed.")
    ] = False,
    prefix: Annotated[Path | None, typer.Option(help="Environment whose bin/honed the units start; default: this one.")] = None,
    vllm_unit: Annotated[
        str, typer.Option(help="vLLM's unit, for its drop-in; default: vllm.service if it exists; -: none.")
    ] = "",
    root: Root = Path("/"),
    as_json: JsonFlag = False,
) -> None:
    """Install units, users, folders and example settings. Shows the plan; carries it out with --apply."""
    place = _place(root, prefix or Path(sys.prefix), vllm_unit)
    try:
        items = units.plan(place)
        written = units.apply(place, items, overwrite=overwrite) if apply else []
    except InstallError as error:
        fail(str(error), cure=error.cure)
    commands = _commands_after()
    failed = _run(commands) if apply and place.is_live else ""
    notes = [*units.obstacles(place), *([failed] if failed else [])]
    document: dict[str, Any] = {
        "applied": apply,
        "written": written,
        "files": [{"path": item.path, "state": _state(item, written), "diff": item.diff} for item in items],
        "commands": [" ".join(command) for command in commands],
        "ran": apply and place.is_live,
        "notes": notes,
        "next": _next_steps(place),
        "to_do_it": _again(["install"], prefix=prefix, vllm_unit=vllm_unit, root=root) + " --overwrite" * overwrite,
    }
    if as_json:
        print_json(document)
    else:
        SafeConsole(soft_wrap=True).print(_plan_view(items, document))
    if failed:
        raise typer.Exit(1)
    if notes or any(file["state"] == "changed" for file in document["files"]):
        raise typer.Exit(EXIT_WARNINGS)


def uninstall(apply: Apply = False, root: Root = Path("/"), as_json: JsonFlag = False) -> None:
    """Stop honed and remove its units. Settings, state and changed files stay and are listed."""
    place = _place(root, Path(sys.prefix), "-")
    services = [name for name in SERVICES if place.at(f"{units.UNIT_FOLDERS[0]}/{name}").exists()]
    stopping = [["systemctl", "disable", "--now", *services]] if services else []
    reload = ["systemctl", "daemon-reload"]
    try:
        items = units.plan_removal(place)
        if apply and place.has_systemd and items and (failed := _run(stopping)):
            fail(failed, cure="Nothing was removed. Stop both services, then run `honed uninstall --apply` again.")
        deleted = units.remove(place, items) if apply else []
    except InstallError as error:
        fail(str(error), cure=error.cure.replace("honed install", "honed uninstall"))
    failed = _run([reload]) if place.has_systemd and deleted else ""
    left = ["/etc/honed", "/etc/credstore/honed-*", "/var/lib/honed", "/var/cache/honed", "/run/honed"]
    document: dict[str, Any] = {
        "applied": apply,
        "deleted": deleted,
        "files": [{"path": item.path, "state": "removed" if item.path in deleted else item.state} for item in items],
        "commands": [" ".join(command) for command in (*stopping, reload)],
        "left": left,
    }
    if as_json:
        print_json(document)
    else:
        SafeConsole(soft_wrap=True).print(_removal_view(document, ran=apply and place.has_systemd, root=root))
    if failed:
        fail(failed, cure="The files are removed. Run `systemctl daemon-reload`.")


def _removal_view(document: dict[str, Any], *, ran: bool, root: Path) -> RenderableType:
    lines: list[RenderableType] = [_line(file["path"], file["state"]) for file in document["files"]]
    lines = lines or [Text("honed has installed nothing here")]
    if document["files"]:
        verb = "ran" if ran else "to be run"
        lines += ["", Text(f"{verb}: {'; '.join(document['commands'])}")]
        lines += ["", Text("Left in place (settings, drafters, log; `rm -r` what you don't want):")]
        lines.append(Text("  " + "  ".join(document["left"])))
        lines.append(Text("vLLM: remove honed's two flags and HONED_RUNTIME_DIR from its unit, at its next restart."))
        again = _again(["uninstall"], root=root)
        lines += [] if document["applied"] else ["", Text(f"Nothing was changed. To do it: {again}", "bold")]
    return Group(*lines)


def _place(root: Path, prefix: Path, vllm_unit: str) -> Place:
    place = Place(root.absolute(), prefix.absolute())
    if not vllm_unit:
        vllm_unit = "vllm.service" if units.has_unit(place, "vllm.service") else "-"
    if vllm_unit == "-":
        return place
    name = vllm_unit if vllm_unit.endswith(".service") else f"{vllm_unit}.service"
    if not re.fullmatch(r"[A-Za-z0-9:_.@\\-]+\.service", name):
        fail(f"{vllm_unit!r} isn't a unit's name", cure="Give it as vllm.service.", exit_code=EXIT_USAGE)
    return Place(place.root, place.prefix, name)


def _commands_after() -> list[list[str]]:
    return [
        ["systemd-sysusers", "/etc/sysusers.d/honed.conf"],
        ["systemd-tmpfiles", "--create", "/etc/tmpfiles.d/honed.conf"],
        ["systemctl", "daemon-reload"],
    ]


def _next_steps(place: Place) -> list[str]:
    command = "honed" if place.prefix == Path(sys.prefix) else shlex.quote(f"{place.prefix}/bin/honed")
    return [
        "usermod -aG honed USER_THAT_RUNS_VLLM",
        "systemctl enable --now honed honed-trainer",
        f"{command} vllm-args --format systemd    # into vLLM's unit; restart vLLM once",
        f"{command} doctor",
    ]


def _run(commands: list[list[str]]) -> str:
    """Run commands in order up to the first failure; return its message."""
    for command in commands:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=_quiet())
        except subprocess.TimeoutExpired:
            return f"`{' '.join(command)}` did not end within {TIMEOUT_S:g} s"
        except OSError as error:
            return f"`{' '.join(command)}` could not be run: {error}"
        if done.returncode:
            return f"`{' '.join(command)}` ended with {done.returncode}: {done.stderr.strip()}"
    return ""


def _quiet() -> dict[str, str]:
    return os.environ | {"SYSTEMD_PAGER": "", "LC_ALL": "C.UTF-8"}


def _plan_view(items: list[Item], document: dict[str, Any]) -> RenderableType:
    lines: list[RenderableType] = []
    for item, file in zip(items, document["files"], strict=True):
        lines.append(_line(item.path, file["state"]))
        if item.diff:
            lines += [Text(f"    {line}", _style(line)) for line in item.diff.splitlines()]
    verb = "ran" if document["ran"] else "to be run"
    lines += ["", Text(f"{verb}: {'; '.join(document['commands'])}")]
    lines += [Text(f"! {note}", "yellow") for note in document["notes"]]
    if document["applied"]:
        lines += ["", Text("Then:"), *(Text(f"  {step}") for step in document["next"])]
    else:
        lines += ["", Text(f"Nothing was changed. To do it: {document['to_do_it']}", "bold")]
    return Group(*lines)


def _state(item: Item, written: list[str]) -> str:
    return "replaced" if item.state == "changed" and item.path in written else item.state


def _again(words: list[str], *, root: Path, prefix: Path | None = None, vllm_unit: str = "") -> str:
    """The given command with --apply."""
    given = {"--root": root if root != Path("/") else None, "--prefix": prefix, "--vllm-unit": vllm_unit}
    options = [f"{name}={value}" for name, value in given.items() if value]
    return shlex.join(["honed", *words, "--apply", *options])


def _line(path: str, state: str) -> Text:
    sign, style, says = SAYS[state]
    return Text.assemble((f"{sign} {path}", style), f"  {says.format(path=path)}")


def _style(line: str) -> str:
    return "green" if line.startswith("+") else "red" if line.startswith("-") else "dim"
