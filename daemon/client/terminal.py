"""Shared code of all commands: reach the daemon, print an answer, end the process on failure.

`connect` is the boundary: every failure between a command and the daemon ends here. It prints one line that says what
happened and one that says what to do. Exit codes: 0 done, 1 failed, 2 usage or configuration, 3 daemon unreachable,
4 warnings (`status --check` only), 78 wrong settings of `honed serve` and `honed train`.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import RenderableType
from rich.measure import Measurement
from rich.text import Text

from honed.daemon.client.client import EXIT_USAGE, AdminClient, AdminError
from honed.daemon.client.visible import SafeConsole, abandon_output, visible_document

if TYPE_CHECKING:
    from honed.daemon.settings.sections import PathSettings
    from honed.daemon.settings.settings import Settings

JsonFlag = Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")]
Reason = Annotated[str, typer.Option("--reason", help="Why, for the audit table.")]
IfMatch = Annotated[
    int | None, typer.Option("--if-match", help="Only if the registry is still at this generation (`honed drafters`).")
]

SERVICE_DIR = Path("/run/honed")
"""Runtime folder of `honed.service`."""
UNBOUNDED = 100_000
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Connection:
    """Connection to the daemon, from the options of `honed` itself."""

    config: Path | None = None
    socket: Path | None = None
    url: str = ""
    token_file: Path | None = None
    timeout_s: float = 10.0

    def open(self) -> AdminClient:
        """Make a client; send nothing yet. Raises AddressError."""
        token = ""
        if self.token_file is not None:
            try:
                token = self.token_file.read_text("ascii").strip()
            except (OSError, UnicodeDecodeError) as error:
                fail(f"the token file {self.token_file} can't be read: {error}", exit_code=EXIT_USAGE)
            if not token:
                fail(f"the token file {self.token_file} is empty", exit_code=EXIT_USAGE)
        if self.url:
            return AdminClient(url=self.url, token=token, timeout_s=self.timeout_s)
        path = self.socket or socket_of(load_settings(self.config).paths)
        return AdminClient(path, token=token, timeout_s=self.timeout_s)


def socket_of(paths: PathSettings) -> Path:
    """The daemon's socket. The service's, if the user set no other folder and runs no daemon.

    Ends the process if somebody else may have made the user's own folder.
    """
    from honed.daemon.settings.sections import default_runtime_dir
    from honed.recalib.registry.access import check_owner

    own = paths.admin_socket
    if paths.runtime_dir != default_runtime_dir():
        return own
    if not os.path.exists(own) and SERVICE_DIR.is_dir():
        return SERVICE_DIR / own.name
    try:
        check_owner(paths.runtime_dir)
    except ValueError as error:
        fail(str(error), exit_code=EXIT_USAGE)
    return own


def load_settings(config: Path | None, *, exit_code: int = EXIT_USAGE, **paths: Path | None) -> Settings:
    """The daemon's settings. Paths of None are ignored. Wrong ones end the process, with the errors and this exit code."""
    from honed.daemon.errors import SettingsError, StartError
    from honed.daemon.settings.settings import load

    given = {name: path for name, path in paths.items() if path is not None}
    try:
        return load(config, {"paths": given} if given else None)
    except SettingsError as error:
        fail(str(error), exit_code=exit_code)
    except StartError as error:
        fail(str(error), exit_code=EXIT_USAGE)


@contextmanager
def connect(context: typer.Context) -> Iterator[AdminClient]:
    """Yield a client for a command's body; an AdminError ends the process as described above."""
    connection = context.obj if isinstance(context.obj, Connection) else Connection()
    try:
        with connection.open() as client:
            yield client
    except AdminError as error:
        fail(str(error), cure=error.cure, exit_code=error.exit_code)


def fail(message: str, *, cure: str = "", exit_code: int = 1) -> NoReturn:
    """Print what happened and what to do on stderr, and exit."""
    console = SafeConsole(stderr=True, soft_wrap=True)
    with suppress(OSError):  # a full disk, or a pipe without a reader: the exit code still tells
        console.print(Text.assemble(("honed: ", "red"), message))
        if cure:
            console.print(Text.assemble(("  → ", "dim"), cure))
    raise typer.Exit(exit_code)


def emit(document: Any, as_json: bool, render: Callable[[Any], RenderableType]) -> None:
    """Print an answer as JSON or with `render`."""
    if as_json:
        print_json(document)
    else:
        put(render(visible_document(document)))


def say(text: str, *, err: bool = False) -> None:
    """Print a line, or a few."""
    SafeConsole(stderr=err, soft_wrap=True).print(Text(text))


def put(renderable: RenderableType) -> None:
    """Print a command's answer. Lines wrap only on a terminal, or in a pipe or file if COLUMNS sets a width."""
    console = SafeConsole()
    if not console.is_terminal and "COLUMNS" not in os.environ:
        wide = console.options.update(width=UNBOUNDED, max_width=UNBOUNDED)
        console.width = max(console.width, Measurement.get(console, wide, renderable).maximum)
    console.print(renderable, crop=False)


def end_with(exit_code: int, answer: Callable[[], None]) -> None:
    """Print an answer that has a verdict, and exit with the verdict's code even if nobody reads the answer."""
    try:
        answer()
        sys.stdout.flush()
    except BrokenPipeError:
        abandon_output()
    if exit_code:
        raise typer.Exit(exit_code)


def listing(path: str, render: Callable[[Any], RenderableType]) -> Callable[[typer.Context, bool], None]:
    """Make a command that shows the admin API's answer at `path`."""

    def show(context: typer.Context, as_json: JsonFlag = False) -> None:
        with connect(context) as client:
            emit(client.get(path), as_json, render)

    return show


def print_json(document: Any) -> None:
    """Print JSON: indented on a terminal, one line in pipes. It is ASCII: other characters are escaped."""
    text = json.dumps(document, indent=2 if sys.stdout.isatty() else None)
    sys.stdout.write(text.replace("\x7f", "\\u007f") + "\n")


def duration_s(text: str) -> float:
    """Seconds of "90", "90s", "10m", "2h" or "1d". Raises typer.BadParameter for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS_S or math.isinf(float(match[1])):
        raise typer.BadParameter(f"{text!r} is not a duration: write 90s, 10m, 2h or 1d")
    return float(match[1]) * _UNITS_S[match[2]]


def checked_scope(text: str) -> str:
    """Callback of --scope. Raises typer.BadParameter for what isn't one; "" is the default."""
    if text not in ("", "full", "kv-frozen"):
        raise typer.BadParameter(f"{text!r}: use full or kv-frozen")
    return text


def duration_text(seconds: float) -> str:
    """Text for `duration_s`, in the largest unit that gives a whole number."""
    unit = next((unit for unit in ("d", "h", "m") if seconds and not seconds % _UNITS_S[unit]), "s")
    return f"{seconds / _UNITS_S[unit]:.10g}{unit}"


def moment_s(text: str, now_s: float) -> float:
    """Unix time of an ISO date ("2026-11-20T12:00"), of unix seconds, or of a duration ago ("2h")."""
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except ValueError:
        pass
    if re.fullmatch(r"\d{9,}(\.\d+)?", text) and not math.isinf(float(text)):
        return float(text)
    try:
        return now_s - duration_s(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r} isn't a time: write 2026-11-20T12:00, unix seconds, or 2h (ago)") from None
