"""Follow an operation to its end in a terminal: a progress bar that names the current stage."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.text import Text

from honed.daemon.client.client import AdminClient
from honed.daemon.client.visible import SafeConsole
from honed.daemon.commands.show import status as show

View = dict[str, Any]

STAGES = {
    "asking": "asking the engine",
    "collecting": "collecting samples",
    "training": "training",
    "gating": "comparing with the active drafter on held-out sessions",
    "swapping": "swapping the weights into the running engine",
    "canary": "taking turns with the active version on live traffic",
    "watching": "watching live acceptance",
    "done": "done",
}
SPEED_S = 180.0
"""Seconds of a training over which its speed is measured: pauses for requests belong to it."""
SAYS = {"waiting": "waiting: the engine is busy or asleep", "paused": "paused by an operator"}


def follow(client: AdminClient, operation_id: str, *, quiet: bool = False) -> View:
    """Wait for an operation, showing its progress on stderr, and return its last view."""
    return watch(client.follow(operation_id), quiet=quiet)


def watch(views: Iterable[View], *, quiet: bool = False) -> View:
    """Show an operation's views as they arrive, and return the last one."""
    if quiet:
        return _last(views)
    console = SafeConsole(stderr=True)
    console.soft_wrap = not console.is_terminal
    return _bar(views, console) if console.is_terminal else _lines(views, console)


def headline(view: View) -> str:
    """The current stage in words."""
    detail = view.get("detail") or {}
    stage, trainer_state = str(view.get("stage") or ""), str(detail.get("state") or "")
    if stage in ("collecting", "training") and trainer_state in SAYS:
        return SAYS[trainer_state]
    return STAGES.get(stage, stage or str(view.get("state")))


def progress(view: View) -> str:
    """Training progress; "" for an operation that doesn't train."""
    return show.progress_line(view.get("detail") or {}) if view.get("kind") == "recalibrate" else ""


def _last(views: Iterable[View]) -> View:
    last: View = {}
    for last in views:  # noqa: B007 - only the last one is used
        pass
    return last


def _lines(views: Iterable[View], console: Console) -> View:
    """Print a line at each change of stage, for output without a terminal."""
    said, view = "", {}
    for view in views:
        if (text := headline(view)) != said:
            said = text
            how_far = f" ({facts})" if (facts := progress(view)) else ""
            console.print(f"{view.get('operation_id')}: {text}{how_far}")
    return view


class _TimeLeft(ProgressColumn):
    """The time that is left at the speed of the last minutes."""

    def render(self, task: Task) -> Text:
        left_s = task.time_remaining
        return Text("" if left_s is None or task.finished else f"{timedelta(seconds=int(left_s))} left", "cyan")


def _bar(views: Iterable[View], console: Console) -> View:
    what = TextColumn("{task.description}", markup=False)
    facts = TextColumn("{task.fields[facts]}", markup=False)
    columns = (SpinnerColumn(), what, BarColumn(12), facts, TimeElapsedColumn(), _TimeLeft())
    view: View = {}
    with Progress(*columns, console=console, transient=True, speed_estimate_period=SPEED_S) as shown:
        task: TaskID = shown.add_task("waiting", total=None, facts="")
        for view in views:
            share = show.share_done(view)
            shown.update(
                task,
                description=headline(view),
                total=None if share is None else 1.0,
                completed=share or 0.0,
                facts=show.steps_line(view.get("detail") or {}) if view.get("stage") == "training" else "",
            )
    return view
