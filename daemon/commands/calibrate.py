"""`honed calibrate`: a drafter for a served target that has none or was fine-tuned since."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from honed.adapt.protocol.capture_limit import MOST_CAPTURED
from honed.daemon.calibration import calibrate
from honed.daemon.calibration.calibrate import CalibrationError, Collected
from honed.daemon.calibration.prompts_file import HELP, PromptsError, read_prompts
from honed.daemon.calibration.served_target import Sampling, ServedTarget, TargetError, read_key
from honed.daemon.client.client import EXIT_FAILED, EXIT_USAGE, FINISHED, AdminClient
from honed.daemon.client.terminal import JsonFlag, Reason, checked_scope, connect, emit, fail, say
from honed.daemon.client.visible import SafeConsole
from honed.daemon.commands.show import cells
from honed.daemon.commands.show import status as show
from honed.daemon.commands.watching import follow, watch

Url = Annotated[str, typer.Option(help="vLLM's address, http://host:port.")]
Prompts = Annotated[Path | None, typer.Option(help=HELP)]
Limit = Annotated[int, typer.Option(min=0, help="Only the first N prompts; 0: all.")]
Model = Annotated[str, typer.Option(help="Served model name; optional if there is only one.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Most tokens to generate for a prompt.")]
Temperature = Annotated[float | None, typer.Option(min=0, help="Unset: the server's.")]
TopP = Annotated[float | None, typer.Option(min=0, max=1, help="Unset: the server's.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Concurrent requests.")]
KeyFile = Annotated[Path | None, typer.Option(help="File with the server's API key.")]

RING_CURE = "raise HONED_RING_BYTES in vLLM's environment, or lower --concurrency"
MODULE = "honed.recalib.drafter.new_drafter"
"""Module run as a separate program because it needs torch."""


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("calibrate")(command)


def command(
    context: typer.Context,
    url: Url = "",
    prompts: Prompts = None,
    limit: Limit = 0,
    model: Model = "",
    max_tokens: MaxTokens = 512,
    temperature: Temperature = None,
    top_p: TopP = None,
    concurrency: Annotated[
        int, typer.Option(min=1, max=MOST_CAPTURED, help=f"Concurrent requests, {MOST_CAPTURED} at most: no more are captured.")
    ] = 16,
    api_key_file: KeyFile = None,
    engine: Annotated[str, typer.Option(help="Engine; optional if there is only one.")] = "",
    scope: Annotated[
        str, typer.Option(callback=checked_scope, help="full or kv-frozen; default: full if the engine captures layers.")
    ] = "",
    max_seconds: Annotated[float | None, typer.Option(min=1, help="Longest time to train.")] = None,
    promote: Annotated[bool, typer.Option("--promote", help="Swap it in at once, without a trial or monitoring.")] = False,
    new_drafter: Annotated[
        Path | None, typer.Option(help="Only write an untrained drafter for --target here, for serving the target.")
    ] = None,
    target: Annotated[Path | None, typer.Option(help="Checkpoint of the target, for --new-drafter.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Layers of the new drafter; default: 5.")] = None,
    block_size: Annotated[int | None, typer.Option(min=2, help="New drafter's; default: its family's, or 16.")] = None,
    mask_token_id: Annotated[int | None, typer.Option(min=0, help="New drafter's; default: an unused token.")] = None,
    reason: Reason = "",
    as_json: JsonFlag = False,
) -> None:
    """Train a drafter on your own prompts, sent to a served target that honed is attached to."""
    if new_drafter is not None:
        _write_new(new_drafter, target, layers, block_size, mask_token_id, as_json)
        return
    if not url or prompts is None:
        raise typer.BadParameter("give --url and --prompts (or --new-drafter and --target)")
    sampling = Sampling(max_tokens, temperature, top_p)
    with told(), connect(context) as client:
        found = read_prompts(prompts, limit)
        with ServedTarget(url, model=model, key=read_key(api_key_file)) as served:
            served.check()
            needed = calibrate.look(client, engine, scope)
            with progress("tokenising", len(found), quiet=as_json) as tick:
                fits = calibrate.fitting(served, found, max_tokens, tick)
            if fits.too_long:
                lines = ", ".join(map(str, fits.too_long[:10])) + (", …" if len(fits.too_long) > 10 else "")
                say(f"{len(fits.too_long)} prompts don't fit the server's context and are left out: {lines}", err=True)
            calibrate.check_enough(fits, max_tokens, needed)
            with progress("collecting completions", len(fits.prompts), quiet=as_json) as tick:
                collected = calibrate.collect(
                    client,
                    served,
                    fits.prompts,
                    sampling,
                    concurrency=concurrency,
                    engine_id=engine,
                    on_reply=lambda reply: tick(),
                )
        if collected.lost_records:
            say(f"{collected.lost_records} records were overwritten before they were read: {RING_CURE}", err=True)
        operation_id = calibrate.ask(client, collected.engine_id, needed.scope, max_seconds, reason)
        document = _train(client, operation_id, collected, promote, reason, as_json)
        emit(document, as_json, _render)
    if not document["version"] or (promote and document["promotion"]["state"] != "succeeded"):
        raise typer.Exit(EXIT_FAILED)


@contextmanager
def told() -> Iterator[None]:
    """End the command with the error in prompts, server or captures."""
    try:
        yield
    except (PromptsError, TargetError, CalibrationError) as error:
        fail(str(error), cure=error.cure, exit_code=error.exit_code)


@contextmanager
def progress(what: str, total: int, *, quiet: bool) -> Iterator[Any]:
    """Show a bar on stderr; yield the function that advances it."""
    console = SafeConsole(stderr=True, quiet=quiet)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


def _train(
    client: AdminClient, operation_id: str, collected: Collected, wants_promotion: bool, reason: str, as_json: bool
) -> dict[str, Any]:
    try:
        operation = watch(calibrate.until_registered(client, client.follow(operation_id)), quiet=as_json)
    except KeyboardInterrupt:
        say(f"it still runs: `honed operations {operation_id}`, `honed cancel {operation_id}`", err=True)
        raise typer.Exit(130) from None
    version = str((operation.get("detail") or {}).get("version") or "")
    promotion = None
    if version and wants_promotion:
        promotion = follow(client, calibrate.promote(client, version, reason), quiet=as_json)
    return {"version": version, "collected": collected.view(), "operation": operation, "promotion": promotion}


def _render(document: dict[str, Any]) -> RenderableType:
    collected, version, promotion = document["collected"], document["version"], document["promotion"]
    head = (
        f"{cells.count(collected['prompts'])} prompts, {cells.count(collected['completion_tokens'])} tokens generated in "
        f"{cells.seconds(collected['seconds'])}, {cells.count(collected['captured_rows'])} rows captured"
        + (f", {cells.count(collected['failed'])} failed" if collected["failed"] else "")
    )
    lines: list[RenderableType] = [Text(head), show.operation(document["operation"])]
    if promotion is not None:
        lines.append(show.operation(promotion))
    elif version and document["operation"]["state"] not in FINISHED:
        lines.append(Text(f"{version} is registered and in a trial on live traffic: `honed canary`, `honed promote {version}`"))
    return Group(*lines)


def _write_new(
    folder: Path,
    target: Path | None,
    layers: int | None,
    block_size: int | None,
    mask_token_id: int | None,
    as_json: bool,
) -> None:
    if target is None:
        raise typer.BadParameter("give --target, the checkpoint that the new drafter is for", param_hint="--new-drafter")
    given = {"--num-layers": layers, "--block-size": block_size, "--mask-token-id": mask_token_id}
    options = [text for name, value in given.items() if value is not None for text in (name, str(value))]
    asked = [sys.executable, "-m", MODULE, str(folder), "--target", str(target), *options]
    made = subprocess.run(asked, capture_output=True, text=True, check=False)
    if made.returncode:
        said = made.stderr.strip().splitlines() or ["no error message"]
        if "No module named 'torch'" in said[-1]:
            fail("making a drafter needs PyTorch", cure="pip install '/path/to/honed[train]'", exit_code=EXIT_USAGE)
        fail(f"no drafter was written: {said[-1]}", exit_code=EXIT_FAILED if made.returncode == 1 else EXIT_USAGE)
    emit(json.loads(made.stdout), as_json, _render_new)


def _render_new(document: dict[str, Any]) -> RenderableType:
    drafter, tokens = document["drafter"], document["block_size"] - 1
    return Group(
        Text(
            f"{drafter}: untrained, {document['num_layers']} layers, {tokens} draft tokens, mask token "
            f"{document['mask_token_id']}, target layers {cells.plain(document['target_layer_ids'])}"
        ),
        Text(
            f"Serve the target with it: HONED_FEATURES=layers, and `honed vllm-args --drafter {drafter}`; "
            "then honed calibrate --url … --prompts …",
            "dim",
        ),
    )
