"""What all commands share: how to reach the daemon, how to print an answer, and how a failure ends the process.

`connect` is the boundary: whatever goes wrong between a command and the daemon ends here as one line that says what
happened, one that says what to do, and an exit code (0 done, 1 failed, 2 usage or configuration, 3 daemon unreachable;
4, of `status --check` only, that there are warnings).
"""

from __future__ import annotations

import datetime as dt
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.text import Text

from honed.daemon.client.client import EXIT_USAGE, AdminClient, AdminError

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
    """How the daemon is to be reached, from the options before the command's name."""

    config: Path | None = None
    socket: Path | None = None
    url: str = ""
    token_file: Path | None = None
    timeout_s: float = 10.0

    def open(self) -> AdminClient:
        """A client; nothing is sent yet."""
        if self.url and not self.url.startswith(("http://", "https://")):
            fail(f"--url {self.url} is no address", cure="Write it like http://127.0.0.1:9465.", exit_code=EXIT_USAGE)
        token = ""
        if self.token_file is not None:
            try:
                token = self.token_file.read_text().strip()
            except OSError as error:
                fail(f"the token file can't be read: {error}", exit_code=EXIT_USAGE)
        if self.url:
            return AdminClient(url=self.url, token=token, timeout_s=self.timeout_s)
        path = self.socket or socket_of(load_settings(self.config).paths)
        return AdminClient(path, token=token, timeout_s=self.timeout_s)


def socket_of(paths: PathSettings) -> Path:
    """The daemon's socket; the service's, where a user who set no other folder has no daemon of its own."""
    from honed.daemon.settings.sections import default_runtime_dir

    own = paths.admin_socket
    if paths.runtime_dir == default_runtime_dir() and not os.path.exists(own) and SERVICE_DIR.is_dir():
        return SERVICE_DIR / own.name
    return own


def load_settings(config: Path | None, **paths: Path | None) -> Settings:
    """The daemon's settings, or the end of the process with what is wrong in them. Paths that are None don't count."""
    from honed.daemon.errors import SettingsError
    from honed.daemon.settings.settings import load

    given = {name: path for name, path in paths.items() if path is not None}
    try:
        return load(config, {"paths": given} if given else None)
    except SettingsError as error:
        fail(str(error), exit_code=EXIT_USAGE)


@contextmanager
def connect(context: typer.Context) -> Iterator[AdminClient]:
    """A client for the body of a command; an AdminError in it ends the process as described above."""
    connection = context.obj if isinstance(context.obj, Connection) else Connection()
    with connection.open() as client:
        try:
            yield client
        except AdminError as error:
            fail(str(error), cure=error.cure, exit_code=error.exit_code)


def fail(message: str, *, cure: str = "", exit_code: int = 1) -> NoReturn:
    """Say what happened and what to do about it, on stderr, and end."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble(("honed: ", "red"), message))
    if cure:
        console.print(Text.assemble(("  → ", "dim"), cure))
    raise typer.Exit(exit_code)


def emit(document: Any, as_json: bool, render: Callable[[Any], RenderableType]) -> None:
    """Print an answer: as JSON, or the way `render` shows it."""
    if as_json:
        print_json(document)
    else:
        put(render(document))


def put(renderable: RenderableType) -> None:
    """Print what a command answers. A pipe or a file has no width: there nothing is folded, unless COLUMNS gives it one."""
    console = Console(markup=False, highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        wide = console.options.update(width=UNBOUNDED, max_width=UNBOUNDED)
        console.width = max(console.width, Measurement.get(console, wide, renderable).maximum)
    console.print(renderable, crop=False)


def listing(path: str, render: Callable[[Any], RenderableType]) -> Callable[[typer.Context, bool], None]:
    """A command that shows what the admin API has at `path`."""

    def show(context: typer.Context, as_json: JsonFlag = False) -> None:
        with connect(context) as client:
            emit(client.get(path), as_json, render)

    return show


def print_json(document: Any) -> None:
    """Indented for people, one line for pipes."""
    json.dump(document, sys.stdout, indent=2 if sys.stdout.isatty() else None, ensure_ascii=False)
    sys.stdout.write("\n")


def duration_s(text: str) -> float:
    """Seconds of "90", "90s", "10m", "2h" or "1d". Raises typer.BadParameter for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if match is None or match[2] not in _UNITS_S:
        raise typer.BadParameter(f"{text!r} is not a duration: write 90s, 10m, 2h or 1d")
    return float(match[1]) * _UNITS_S[match[2]]


def duration_text(seconds: float) -> str:
    """As it would be written for `duration_s`, in the largest unit of which it is a whole number."""
    unit = next((unit for unit in ("d", "h", "m") if seconds and not seconds % _UNITS_S[unit]), "s")
    return f"{seconds / _UNITS_S[unit]:.10g}{unit}"


def moment_s(text: str, now_s: float) -> float:
    """Unix time of an ISO date ("2026-11-20T12:00"), of unix seconds, or of a duration ago ("2h")."""
    try:
        return dt.datetime.fromisoformat(text).timestamp()
    except ValueError:
        pass
    if re.fullmatch(r"\d{9,}(\.\d+)?", text):
        return float(text)
    try:
        return now_s - duration_s(text)
    except typer.BadParameter:
        raise typer.BadParameter(f"{text!r} is no time: write 2026-11-20T12:00, unix seconds, or 2h (ago)") from None
