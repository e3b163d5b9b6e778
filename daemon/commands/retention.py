"""`honed retention`: how much of a drafter's gain a fine-tuned target keeps, by class."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.text import Text

from honed.daemon.calibration.compare_targets import ALL, Document, Measurement, Servers, compare, length_note
from honed.daemon.calibration.prompts_file import HELP, read_prompts
from honed.daemon.calibration.served_target import Sampling, ServedTarget, TargetError, read_key
from honed.daemon.client.client import EXIT_USAGE
from honed.daemon.client.held_override import Held
from honed.daemon.client.terminal import JsonFlag, connect, emit
from honed.daemon.commands.calibrate import (
    Concurrency,
    KeyFile,
    Limit,
    MaxTokens,
    Model,
    Temperature,
    TopP,
    Url,
    progress,
    told,
)
from honed.daemon.commands.show import cells
from honed.daemon.commands.show.cells import Rows

BASE, TUNED = "base", "tuned"
Prompts = Annotated[Path, typer.Option(help=HELP)]


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("retention")(command)


def command(
    context: typer.Context,
    url: Url,
    prompts: Prompts,
    base_url: Annotated[str, typer.Option(help="vLLM's address with the base target.")] = "",
    base: Annotated[Path | None, typer.Option(help="Or this command's --json output for the base target.")] = None,
    plain_url: Annotated[str, typer.Option(help="Server of the same target without speculation, as baseline.")] = "",
    plain_base_url: Annotated[str, typer.Option(help="The same for the base target.")] = "",
    limit: Limit = 0,
    model: Model = "",
    base_model: Annotated[str, typer.Option(help="Name the base target is served under.")] = "",
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    top_p: TopP = None,
    concurrency: Concurrency = 8,
    repeat: Annotated[int, typer.Option(min=1, help="Repetitions of the whole measurement; figures are medians.")] = 3,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Fix the draft length meanwhile by an override; needs the daemon.")
    ] = None,
    api_key_file: KeyFile = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare a fine-tuned target with its base under the same drafter: acceptance length, speed with and without drafts, and
    the shares kept. Without a base: one target's figures. The servers must have no other load meanwhile."""
    if base_url and base is not None:
        raise typer.BadParameter("give either --base-url or --base", param_hint="--base")
    with told(), ExitStack() as stack:
        found = read_prompts(prompts, limit)
        earlier = _read_base(base) if base is not None else None
        key = read_key(api_key_file)

        def server(address: str, name: str) -> ServedTarget:
            made = stack.enter_context(ServedTarget(address, model=name, key=key))
            made.check()
            return made

        servers = [Servers(TUNED, server(url, model), server(plain_url, model) if plain_url else None)]
        if base_url:
            plain = server(plain_base_url, base_model) if plain_base_url else None
            servers.insert(0, Servers(BASE, server(base_url, base_model), plain))
        if draft_tokens is not None:
            client = stack.enter_context(connect(context))
            held = stack.enter_context(Held(client, "draft_tokens", draft_tokens, "retention: comparable figures"))
        measurement = Measurement(found, Sampling(max_tokens, temperature, top_p, seed=0), concurrency)
        with progress("measuring", 2 * repeat * len(servers) * len(found), quiet=as_json) as tick:

            def on_reply() -> None:
                tick()
                if draft_tokens is not None:
                    held.renew()

            measured = measurement.run(servers, repeat, on_reply)
        document = _document(measured.get(BASE, earlier), measured[TUNED], measurement.notes)
        emit(document, as_json, render)


def _document(base: Document | None, tuned: Document, notes: list[str]) -> Document:
    retained = compare(base, tuned) if base is not None else []
    differing = length_note(base, tuned) if base is not None else ""
    return {BASE: base, TUNED: tuned, "retained": retained, "notes": [*notes, *filter(None, [differing])]}


def _read_base(path: Path) -> Document:
    """The target's figures from an earlier run. Raises TargetError."""
    try:
        found = json.loads(path.read_text())[TUNED]
        assert isinstance(found["classes"], dict)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise TargetError(
            f"{path} isn't output of this command ({type(error).__name__}: {error})",
            cure="Make it with `honed retention --url BASE --prompts FILE --json > base.json`.",
            exit_code=EXIT_USAGE,
        ) from error
    return dict(found)


def render(document: Document) -> RenderableType:
    """A line for each class and target; below them the shares kept."""
    table = Rows.of(
        "class", "target", "prompts", "k", "τ", "tokens/s", "without", "speed-up", "τ retained", "speed-up retained"
    )
    retained = {row["class"]: row for row in document["retained"]}
    for name in document[TUNED]["classes"]:
        for which in (BASE, TUNED):
            if document[which] is None or name not in document[which]["classes"]:
                continue
            row = document[which]["classes"][name]
            left = retained.get(name, {}) if which == TUNED else {}
            table.add_row(
                name or "(all)",
                which if document[BASE] is not None else "",
                cells.count(row["prompts"]),
                cells.number(row["draft_tokens_per_round"], 2),
                cells.number(row["acceptance_length"], 3),
                cells.number(row["tokens_per_s"], 1),
                cells.number(row["tokens_per_s_without"], 1),
                _speedup(row["speedup"]),
                cells.percent(left["acceptance_length_retained"]) if left else "",
                cells.percent(left["speedup_retained"]) if left else "",
                style="bold" if name == ALL else None,
            )
    notes: list[Any] = [Text(f"! {note}", "yellow") for note in document["notes"]]
    notes.append(
        Text("k: draft tokens a round; τ: tokens a round; speed-up: median, lowest and highest of the repetitions.", "dim")
    )
    return Group(table, *notes)


def _speedup(found: Document | None) -> str:
    if found is None:
        return cells.NOTHING
    return f"{found['median']:.2f} ({found['low']:.2f}–{found['high']:.2f})"
