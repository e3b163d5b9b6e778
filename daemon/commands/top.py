"""`honed top`: the whole service live on one screen. It waits for a daemon that goes away."""

from __future__ import annotations

import contextlib
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.layout import Layout
from rich.live import Live
from rich.measure import Measurement
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from honed.daemon.client.client import AdminClient, Unreachable
from honed.daemon.client.terminal import JsonFlag, connect, print_json, put
from honed.daemon.client.visible import SafeConsole, visible_document
from honed.daemon.commands.show import cells
from honed.daemon.commands.show import status as show
from honed.daemon.commands.show.cells import Rows
from honed.daemon.views.findings import Finding, findings

BARS = "▁▂▃▄▅▆▇█"
SECONDS_BACK = 120
MOST_FINDINGS = 4
TALL = 36
"""Lines of a screen that has room for everything; a lower one shows the same, shorter."""
QUIT = frozenset("qQ\x03\x04\x1b")


@dataclass
class Frame:
    """Data of one refresh; if `late`, of an earlier one."""

    status: dict[str, Any] = field(default_factory=dict)
    workloads: list[dict[str, Any]] = field(default_factory=list)
    timeline: dict[str, Any] = field(default_factory=dict)
    operations: list[dict[str, Any]] = field(default_factory=list)
    trouble: str = ""
    """Reason why this refresh failed; "" if it succeeded."""

    def visible(self) -> Frame:
        """The same with all text safe for a terminal."""
        return Frame(**{name: visible_document(value) for name, value in vars(self).items()})


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(top)


def top(
    context: typer.Context,
    interval: Annotated[float, typer.Option(min=0.2, max=60.0, help="Seconds between refreshes.")] = 1.0,
    count: Annotated[int, typer.Option(min=0, help="Stop after this many refreshes; 0: at q.")] = 0,
    as_json: JsonFlag = False,
) -> None:
    """Show everything live on one screen; q ends it. --json prints a line each time. Without a terminal: once, as text."""
    with connect(context) as client:
        frame = read(client)  # no daemon at the start is an error, as in other commands
        if as_json:
            for shown in _frames(client, frame, interval, count):
                print_json({"status": shown.status, "workloads": shown.workloads, "trouble": shown.trouble})
                sys.stdout.flush()
        elif not sys.stdout.isatty():
            put(view(frame))
        else:
            _live(client, frame, interval, count)


def read(client: AdminClient) -> Frame:
    """Fetch once. Raises AdminError."""
    status = client.get("/v1/status")
    since = time.time() - SECONDS_BACK
    return Frame(
        status,
        client.get("/v1/workloads", window_s=300),
        client.get("/v1/timeline", resolution="1s", since=since),
        client.get("/v1/operations")[:5],
    )


def view(frame: Frame) -> RenderableType:
    """All parts stacked, for pipes."""
    frame = frame.visible()
    return Group(_verdict(frame, MOST_FINDINGS), _engines(frame), Curves(frame), _workloads(frame), _bottom(frame, 6))


def screen(frame: Frame, height: int) -> Layout:
    """The same parts fitted to a terminal's height; problems and the newest figures are never cut off."""
    frame = frame.visible()
    is_tall = height >= TALL
    findings_shown, lines_below = (MOST_FINDINGS, 6) if is_tall else (2, 2)
    found, engines = len(_findings(frame)), frame.status.get("engines") or []
    engines_shown = min(len(engines), 8 if is_tall else 3)
    parts = [
        Layout(_verdict(frame, findings_shown), size=2 + max(1, min(findings_shown, found))),
        Layout(_engines(frame, engines_shown, is_brief=not is_tall), size=2 + max(1, engines_shown * (1 + is_tall))),
        Layout(Curves(frame), size=5),
        Layout(_workloads(frame, is_brief=not is_tall), ratio=1, minimum_size=5),
        Layout(_bottom(frame, lines_below), size=2 + lines_below),
    ]
    layout = Layout()
    layout.split_column(*parts)
    return layout


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars from 0 to their maximum."""
    shown = list(values)[-width:]
    most = max(shown, default=0.0)
    return "".join(BARS[round((len(BARS) - 1) * value / most)] if most > 0 else BARS[0] for value in shown)


def per_second(points: Sequence[dict[str, Any]], now_s: int, seconds: int = SECONDS_BACK) -> dict[str, list[float]]:
    """Tokens delivered, acceptance length and draft tokens a round for each complete second; 0 when idle."""
    sums: dict[int, list[int]] = {}
    for point in points:
        row = sums.setdefault(int(point["t"]), [0, 0, 0, 0])
        for i, name in enumerate(("delivered_tokens", "rounds", "accepted_tokens", "draft_tokens")):
            row[i] += int(point[name])
    rows = [sums.get(t, [0, 0, 0, 0]) for t in range(now_s - seconds, now_s - 1)]
    return {
        "tokens/s": [float(delivered) for delivered, *_ in rows],
        "acceptance length": [1 + accepted / rounds if rounds else 0.0 for _, rounds, accepted, _ in rows],
        "draft tokens a round": [drafted / rounds if rounds else 0.0 for _, rounds, _, drafted in rows],
    }


def _findings(frame: Frame) -> list[Finding]:
    late = [Finding("error", f"{frame.trouble}; the data shown is old")] if frame.trouble else []
    return [*late, *findings(frame.status)]


def _verdict(frame: Frame, most: int) -> RenderableType:
    found, status = _findings(frame), frame.status
    up = cells.seconds(status.get("uptime_s"))
    title = Text(f"honed {cells.text(status.get('version'))}, {cells.text(status.get('state'))}, up {up}")
    worst = found[0].level if found else "fine"
    style = {"error": "red", "warning": "yellow"}.get(worst, "green")
    lines = [Text(f"{'✗' if f.level == 'error' else '!'} {f.text}", "red" if f.level == "error" else "") for f in found]
    for line in lines:
        line.no_wrap, line.overflow = True, "ellipsis"
    more = f"and {len(lines) - most} more: `honed status`" if len(lines) > most else None
    body = Group(*lines[:most]) if lines else Text("all is well", "green")
    return Panel(body, title=title, title_align="left", subtitle=more, subtitle_align="left", border_style=style)


def _engines(frame: Frame, most: int | None = None, *, is_brief: bool = False) -> RenderableType:
    rows = frame.status.get("engines") or []
    # Those that are gone first: a screen may have no room for all.
    shown = sorted(rows, key=lambda row: bool(row.get("connected")))[:most]
    more = f"and {len(rows) - len(shown)} more: `honed engines`" if len(rows) > len(shown) else None
    body = show.brief_engines(shown) if is_brief else show.engines(shown)
    return Panel(body, title="engines", title_align="left", subtitle=more, subtitle_align="left", border_style="dim")


@dataclass(frozen=True)
class Curves:
    """Figures of the last complete second, with bars for those before it as far as the screen is wide."""

    frame: Frame

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Room for all bars; in a pipe nothing else limits it."""
        return Measurement(46, 38 + SECONDS_BACK).with_maximum(options.max_width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Render for the width at hand."""
        # The figures use the daemon's clock, which may be another machine's.
        points = self.frame.timeline.get("points") or []
        latest_s = max((int(point["t"]) for point in points), default=0)
        grid = Rows.of(show_header=False)
        for name, values in per_second(points, max(latest_s, int(time.time()))).items():
            bars = sparkline(values, max(options.max_width - 38, 8))
            grid.add_row(Text(name, "dim"), f"{values[-1]:10,.2f}", Text(bars, "cyan"))
        yield Panel(grid, title=f"the last {SECONDS_BACK} seconds", title_align="left", border_style="dim")


def _workloads(frame: Frame, *, is_brief: bool = False) -> RenderableType:
    rows = sorted(frame.workloads, key=lambda row: -(row.get("rounds") or 0))
    return Panel(
        show.workloads(rows, is_brief=is_brief), title="workloads, last 5 minutes", title_align="left", border_style="dim"
    )


def _bottom(frame: Frame, most: int) -> RenderableType:
    drafters = frame.status.get("drafters") or {}
    names = (f"{alias} {drafters[alias]}" for alias in ("active", "candidate", "previous") if drafters.get(alias))
    rows = [("drafter", "dim", ", ".join(names) or cells.NOTHING)]
    if trial := frame.status.get("canary"):
        rows.append(("canary", "cyan", show.canary_line(trial)))
    rows.append(("trainer", "dim", show.trainer_line(frame.status.get("trainer"))))
    for mark in reversed((frame.timeline.get("marks") or [])[-2:]):
        rows.append((cells.text(mark.get("kind")), "magenta", cells.text(mark.get("text"))))
    for operation in frame.operations[:3]:
        stage = operation.get("stage") if operation.get("state") == "running" else operation.get("state")
        text = f"{operation.get('kind')}: {stage} {operation.get('error') or ''}".strip()
        rows.append((cells.text(operation.get("operation_id")), "dim", text))
    grid = Table.grid(padding=(0, 2))
    for name, style, text in rows[:most]:
        grid.add_row(Text(name, style, no_wrap=True), Text(text, no_wrap=True, overflow="ellipsis"))
    return Panel(grid, title="drafter, training, events", title_align="left", border_style="dim")


def _frames(client: AdminClient, first: Frame, interval_s: float, count: int) -> Iterator[Frame]:
    """Yield frames. If the daemon doesn't answer, repeat the last one with the error."""
    frame, number = first, 0
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            yield frame
            number += 1
            if count and number >= count:
                return
            time.sleep(interval_s)
            frame = _next(client, frame)


def _next(client: AdminClient, frame: Frame) -> Frame:
    try:
        return read(client)
    except Unreachable as error:
        return Frame(frame.status, frame.workloads, frame.timeline, frame.operations, str(error))


def _live(client: AdminClient, frame: Frame, interval_s: float, count: int) -> None:
    number = 1
    console = SafeConsole()
    shown = Live(screen(frame, console.height), console=console, screen=True, auto_refresh=False)
    with keys() as pressed, shown as live, contextlib.suppress(KeyboardInterrupt):
        live.refresh()
        while not count or number < count:
            if pressed(interval_s) & QUIT:
                return
            frame, number = _next(client, frame), number + 1
            live.update(screen(frame, console.height), refresh=True)


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], frozenset[str]]]:
    """Yield a function that waits and returns the keys pressed; without a keyboard it only waits."""
    if not sys.stdin.isatty():
        yield _wait_only
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)

    def pressed(timeout_s: float) -> frozenset[str]:
        readable, _, _ = select.select([sys.stdin], [], [], timeout_s)
        return frozenset(sys.stdin.read(1)) if readable else frozenset()

    try:
        tty.setcbreak(sys.stdin)
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _wait_only(timeout_s: float) -> frozenset[str]:
    time.sleep(timeout_s)
    return frozenset()
