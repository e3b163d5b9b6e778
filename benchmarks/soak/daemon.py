"""The daemon as a process, started, killed and looked at from outside."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.server.processes import Child, Processes, free_port
from honed.daemon.client.client import AdminClient, AdminError
from honed.daemon.store.database import connect

START_S = 60.0
TRACEBACK = "Traceback"
UNHANDLED = (TRACEBACK, "could not be handled")
"""Words of a log line about an error that the daemon doesn't handle."""


class Daemon:
    """One daemon's folder, and the process that serves it.

    Args:
        folder: short, since a unix socket's path may have 107 bytes.
        settings: environment variables beside those of the folders.
    """

    def __init__(self, processes: Processes, folder: Path, **settings: str) -> None:
        self._processes = processes
        self.runtime_dir, self.database = folder / "run", folder / "state" / "honed.db"
        self.port = free_port()
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HONED_")},
            "HONED_STATE_DIR": str(folder / "state"),
            "HONED_RUNTIME_DIR": str(self.runtime_dir),
            "HONED_HTTP__METRICS_LISTEN": f"127.0.0.1:{self.port}",
            "HONED_LOG_LEVEL": "warning",
            **settings,
        }
        self._child: Child | None = None
        self._logs: list[Path] = []

    @property
    def child(self) -> Child:
        assert self._child is not None, "the daemon isn't running"
        return self._child

    @property
    def engine_socket(self) -> Path:
        return self.runtime_dir / "engine.sock"

    def admin(self) -> AdminClient:
        """Open the admin socket."""
        return AdminClient(self.runtime_dir / "admin.sock", timeout_s=30.0)

    def reader(self) -> AdminClient:
        """Open the port of metrics and page."""
        return AdminClient(url=f"http://127.0.0.1:{self.port}", timeout_s=30.0)

    def start(self) -> None:
        """Start the process, and don't wait for it."""
        command = [sys.executable, "-m", "honed.daemon.process.serve"]
        self._child = self._processes.start(f"daemon-{len(self._logs)}", command, self._environment)
        self._logs.append(self._child.log)

    def wait_ready(self) -> None:
        """Wait until it answers. Raises ProcessError."""
        with self.admin() as client:
            self.child.wait_until(lambda: _answers(client), START_S, "answer on admin.sock")

    def kill(self) -> None:
        """Kill it with SIGKILL."""
        os.kill(self.child.pid, signal.SIGKILL)
        self.stop()

    def stop(self) -> int:
        """Stop it; return its exit code."""
        child, self._child = self.child, None
        return self._processes.stop(child)

    def rss_mb(self) -> float:
        """Return its resident memory in MB."""
        lines = Path(f"/proc/{self.child.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024

    def unhandled(self) -> list[str]:
        """Return what all its logs tell of something unexpected: lines, and whole tracebacks."""
        found = list[str]()
        for log in self._logs:
            lines = _lines(log)
            for line in lines:
                if any(word in line for word in UNHANDLED):
                    found.append(line + (_rest_of_traceback(lines) if line.startswith(TRACEBACK) else ""))
        return found

    def stored(self) -> dict[str, int]:
        """Sum the stored boots up: rounds, those declared lost, missing and malformed batches; and count their parts.

        `batch_rounds` is the same sum over the raw batches, `rollup_rounds` over the roll-ups by hour.
        """
        database = connect(self.database, read_only=True)
        try:
            row = database.conn.execute(
                """SELECT sum(rounds + plain_rounds) AS rounds, sum(lost_rounds) AS lost_rounds,
                     sum(missing_batches) AS missing_batches, sum(malformed_batches) AS malformed_batches,
                     (SELECT sum(rounds) FROM batches) AS batch_rounds,
                     (SELECT sum(rounds) FROM rollups WHERE resolution_s = 3600) AS rollup_rounds FROM boots"""
            ).fetchone()
            return {name: row[name] or 0 for name in row.keys()}  # noqa: SIM118 - a row iterates over its values
        finally:
            database.close()


def samples(text: str, name: str, label: str = "") -> Counter[str]:
    """Return a metric's samples in an exposition, summed up by the value of a label; without a label by ""."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels.get(label, "")] += int(sample.value)
    return found


def _answers(client: AdminClient) -> bool:
    try:
        return bool(client.get("/readyz"))
    except AdminError:
        return False


def _rest_of_traceback(lines: Iterator[str]) -> str:
    """Take lines up to the exception's own, which isn't indented."""
    taken = list[str]()
    for line in lines:
        taken.append(line)
        if not line.startswith(" "):
            break
    return "".join(taken)


def _lines(log: Path) -> Iterator[str]:
    with log.open(errors="replace") as text:
        yield from text
