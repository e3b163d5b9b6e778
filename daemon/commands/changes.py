"""The commands that change something. Each sends one request to the admin API, with a reason for the audit table."""

from __future__ import annotations

import math
from typing import Annotated, Any

import typer

from honed.daemon.client.client import EXIT_FAILED, EXIT_USAGE, AdminClient, part
from honed.daemon.client.terminal import (
    IfMatch,
    JsonFlag,
    Reason,
    checked_scope,
    connect,
    duration_s,
    duration_text,
    fail,
    listing,
    print_json,
    put,
    say,
)
from honed.daemon.client.visible import visible_document
from honed.daemon.commands import completion
from honed.daemon.commands.show import status as show
from honed.daemon.commands.watching import follow

DryRun = Annotated[bool, typer.Option("--dry-run", help="Only check whether it would succeed.")]
Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it's over, showing progress.")]

PLANNED = "planned"
"""Stage of a dry run's operation."""

overrides = typer.Typer(help="Replace a decision of the controller for a time.", no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    for command in (recalibrate, promote, rollback, verify, cancel, pause, resume, purge):
        app.command()(command)
    app.add_typer(overrides, name="override")


def recalibrate(
    context: typer.Context,
    engine: Annotated[str, typer.Option(help="Engine; optional if there is only one.")] = "",
    workload: Annotated[list[str] | None, typer.Option(help="Workload that must gain; can be repeated.")] = None,
    scope: Annotated[str, typer.Option(callback=checked_scope, help="kv-frozen (swap without flush) or full.")] = "",
    max_seconds: Annotated[float | None, typer.Option(min=1, help="Longest time to train.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Train and compare, but don't swap.")] = False,
    wait: Wait = False,
    reason: Reason = "",
    as_json: JsonFlag = False,
) -> None:
    """Train a new drafter version on captured samples, compare it, and swap it in if it is better."""
    body = {
        "engine_id": engine or None,
        "workloads": workload or None,
        "scope": scope or None,
        "max_seconds": max_seconds,
        "reason": reason or None,
        "dry_run": dry_run or None,
    }
    with connect(context) as client:
        _finish(client, client.post("/v1/recalibrations", _given(body)), wait, as_json)


def promote(
    context: typer.Context,
    version: Annotated[str, typer.Argument(help="Version in the registry.", autocompletion=completion.versions)],
    force: Annotated[
        bool, typer.Option("--force", help="Even if no engine is connected, it is active already, or it failed; unwatched.")
    ] = False,
    dry_run: DryRun = False,
    wait: Wait = True,
    reason: Reason = "",
    if_match: IfMatch = None,
    as_json: JsonFlag = False,
) -> None:
    """Make a version active: swap it into the running engines and compare it with the previous one."""
    with connect(context) as client:
        body = _given({"reason": reason or None, "force": force or None, "dry_run": dry_run or None})
        _finish(client, client.post(f"/v1/drafters/{part(version)}:promote", body, if_match=if_match), wait, as_json)


def rollback(
    context: typer.Context,
    version: Annotated[str, typer.Argument(help="Version that is to go; optional.", autocompletion=completion.versions)] = "",
    dry_run: DryRun = False,
    wait: Wait = True,
    reason: Reason = "",
    if_match: IfMatch = None,
    as_json: JsonFlag = False,
) -> None:
    """Go back to the previous version, or take out a candidate or a version that is being promoted."""
    with connect(context) as client:
        body = _given({"version": version or None, "reason": reason or None, "dry_run": dry_run or None})
        _finish(client, client.post("/v1/drafters:rollback", body, if_match=if_match), wait, as_json)


def verify(
    context: typer.Context,
    engine: Annotated[str, typer.Argument(help="Engine, from `honed engines`.", autocompletion=completion.engines)],
    wait: Wait = True,
    reason: Reason = "",
    as_json: JsonFlag = False,
) -> None:
    """Read an engine's drafter weights back and compare them with the registry's."""
    with connect(context) as client:
        body = _given({"reason": reason or None})
        _finish(client, client.post(f"/v1/engines/{part(engine)}:verify", body), wait, as_json)


def cancel(
    context: typer.Context,
    operation_id: Annotated[str, typer.Argument(help="From `honed operations`.", autocompletion=completion.running)],
    reason: Reason = "",
    as_json: JsonFlag = False,
) -> None:
    """Cancel a recalibration, including its canary, or a running promotion. The active version stays."""
    with connect(context) as client:
        answer = client.post(f"/v1/operations/{part(operation_id)}:cancel", _given({"reason": reason or None}))
        _say(answer, as_json, f"{operation_id} is being cancelled")


def pause(context: typer.Context, reason: Reason = "", as_json: JsonFlag = False) -> None:
    """Stop training between two steps, until `honed resume`."""
    with connect(context) as client:
        _say(client.post("/v1/training:pause", _given({"reason": reason or None})), as_json, "training is paused")


def resume(context: typer.Context, reason: Reason = "", as_json: JsonFlag = False) -> None:
    """Resume training."""
    with connect(context) as client:
        _say(client.post("/v1/training:resume", _given({"reason": reason or None})), as_json, "training resumed")


def purge(
    context: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Don't ask.")] = False,
    wait: Wait = True,
    reason: Reason = "",
    as_json: JsonFlag = False,
) -> None:
    """Delete every sample captured for training: in the engines' rings, the trainer's memory and on disk."""
    with connect(context) as client:
        if not yes and not _agrees("Delete all captured samples of every engine?"):
            raise typer.Abort
        _finish(client, client.post("/v1/samples:purge", _given({"reason": reason or None})), wait, as_json)


overrides.command("list", help="Overrides in force.")(listing("/v1/overrides", show.overrides))


@overrides.command("set")
def set_override(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(help="draft_tokens, capture_share or policy.", autocompletion=completion.override_names)
    ],
    value: Annotated[str, typer.Argument(help="For example 0, 0.25 or off.")],
    ttl: Annotated[str, typer.Option(help="How long: 90s, 10m, 2h.")] = "10m",
    reason: Reason = "",
    as_json: JsonFlag = False,
) -> None:
    """Put an override in force."""
    ttl_s = duration_s(ttl)
    body = _given({"value": number_or_text(value), "ttl_s": ttl_s, "reason": reason or None})
    with connect(context) as client:
        _say(client.put(f"/v1/overrides/{part(name)}", body), as_json, f"{name} = {value} for {duration_text(ttl_s)}")


@overrides.command("clear")
def clear_override(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Override.", autocompletion=completion.overrides)],
    as_json: JsonFlag = False,
) -> None:
    """Return the decision to the controller."""
    with connect(context) as client:
        _say(client.delete(f"/v1/overrides/{part(name)}"), as_json, f"{name}: the controller decides again")


def number_or_text(text: str) -> int | float | str:
    """The value for the API: a number if it is one. Raises typer.BadParameter for one that isn't finite."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if not math.isfinite(number):
            raise typer.BadParameter(f"{text!r} isn't a number that can be in force", param_hint="VALUE")
        return number
    return text


def _given(body: dict[str, Any]) -> dict[str, Any]:
    """The body without omitted fields, so that the daemon's defaults apply."""
    return {name: value for name, value in body.items() if value is not None}


def _say(answer: Any, as_json: bool, text: str) -> None:
    if as_json:
        print_json(answer)
    else:
        say(text)


def _agrees(question: str) -> bool:
    try:
        return typer.confirm(question)
    except typer.Abort:
        fail("no terminal to ask on, so nothing was done", cure="Give --yes.", exit_code=EXIT_USAGE)


def _finish(client: AdminClient, view: dict[str, Any], wait: bool, as_json: bool) -> None:
    """Print an accepted operation, or wait for it. Exit with 1 if it doesn't succeed."""
    operation_id = str(view["operation_id"])
    if view.get("stage") == PLANNED:
        takers = ", ".join(view["detail"]["engines"]) or "no engine yet"
        _say(view, as_json, f"would swap to {view['detail']['version']} in {takers}")
        return
    if wait:
        try:
            view = follow(client, operation_id, quiet=as_json)
        except KeyboardInterrupt:
            say(f"it still runs: `honed operations {operation_id}`, `honed cancel {operation_id}`", err=True)
            raise typer.Exit(130) from None
    if as_json:
        print_json(view)
    else:
        put(show.operation(visible_document(view)))
        if not wait:
            say(f"follow it with `honed operations {operation_id}`", err=True)
    if view["state"] in ("failed", "cancelled"):
        raise typer.Exit(EXIT_FAILED)
