"""Display of the running demo: a live panel in a terminal, plain lines elsewhere, with the same content."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from honed.daemon.client.client import AdminClient, AdminError
from honed.daemon.commands.show import status as show
from honed.daemon.commands.watching import headline

Document = dict[str, Any]

POLL_S = 1.0
PLAIN_EVERY_S = 5.0
WINDOW_S = 20


class Display:
    """Prints phases and remarks, and keeps the daemon's state below them up to date.

    Args:
        console: a terminal gets a live panel, anything else a line every PLAIN_EVERY_S.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, markup=False, soft_wrap=not sys.stdout.isatty())
        self._live: Live | None = None
        self._began_s = time.monotonic()
        self._printed_s = 0.0
        self._phase = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live = Live(Text(""), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def phase(self, text: str) -> None:
        """Announce a new phase of the demo."""
        self._phase = text
        self._printed_s = time.monotonic()
        self._print(Text(f"{self._clock()}  {text}", "bold"))

    def say(self, text: str) -> None:
        """Print a remark."""
        self._print(Text(f"{self._clock()}    {text}"))

    def picture(self, status: Document, workloads: list[Document], operation: Document | None) -> None:
        """Show the daemon's present state."""
        if self._live is not None:
            self._live.update(self._panel(status, workloads, operation))
        elif time.monotonic() - self._printed_s >= PLAIN_EVERY_S:
            self._printed_s = time.monotonic()
            self.say(f"… {plain_line(status, workloads, operation)}")

    def _panel(self, status: Document, workloads: list[Document], operation: Document | None) -> RenderableType:
        parts: list[RenderableType] = [show.workloads(workloads)] if workloads else []
        parts.append(Text(plain_line(status, [], operation), "dim"))
        return Panel(Group(*parts), title=Text(self._phase), title_align="left", border_style="dim")

    def _print(self, text: Text) -> None:
        self._console.print(text)
        self._console.file.flush()

    def _clock(self) -> str:
        seconds = int(time.monotonic() - self._began_s)
        return f"{seconds // 60}:{seconds % 60:02d}"


def plain_line(status: Document, workloads: list[Document], operation: Document | None) -> str:
    """Format the daemon's state in one line."""
    engines: list[Document] = status.get("engines") or [{}]
    engine = engines[0]
    parts = [f"{w['workload']}: {w['acceptance_length']:.2f} tokens/round" for w in workloads if w.get("rounds")]
    if (k := engine.get("draft_tokens_per_round")) and engine.get("num_running"):
        parts.append(f"k {k:.1f}")
    parts.append(f"{engine.get('rounds', 0):,} verify rounds logged")
    if operation and operation.get("state") == "running":
        parts.append(f"{headline(operation)}: {show.progress_line(operation.get('detail') or {})}")
    elif trainer := status.get("trainer"):
        parts.append(f"trainer {trainer.get('state')}")
    else:
        parts.append("no trainer")
    return ", ".join(parts)


class Watcher:
    """Polls the daemon once a second, shows its state, and keeps the data for the report's plots."""

    def __init__(self, client: AdminClient, display: Display) -> None:
        self._client, self._display = client, display
        self.training: list[Document] = []
        """Trainer's figures over time: t, steps, loss, samples, state."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _run(self) -> None:
        """Run until cancelled. A daemon that briefly doesn't answer isn't an error here."""
        while True:
            await asyncio.to_thread(self._look)
            await asyncio.sleep(POLL_S)

    def _look(self) -> None:
        try:
            status = self._client.get("/v1/status")
            workloads = self._client.get("/v1/workloads", window_s=WINDOW_S)
        except AdminError:
            return
        trainer = status.get("trainer") or {}
        if trainer.get("operation_id"):
            kept = {key: trainer.get(key) for key in ("steps", "loss", "samples", "sessions", "state")}
            self.training.append({"t": time.time(), **kept})
        self._display.picture(status, workloads, status.get("operation"))
