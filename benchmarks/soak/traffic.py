"""Part "traffic": eight engines send for an hour, in bursts five times as much, while Prometheus and the page look on."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.server.measured import percentile
from benchmarks.server.processes import Processes
from benchmarks.soak.daemon import Daemon, samples
from benchmarks.soak.fleet import Fleet
from honed.attach.events.publisher import BATCH_S
from honed.daemon.client.client import AdminError

NUM_ENGINES = 8
STEPS = 10
"""Steps of a batch."""
REQUESTS, BURST_REQUESTS = 64, 320
"""Requests of a step: 20,480 and 102,400 rounds a second of all engines together."""
PERIODS = 6
BURST_SHARE = 0.1
"""Part of each period that is a burst: a minute in ten, when the run takes an hour."""
WARM_SHARE = 1 / 60
"""Part of the run before the first memory figure: the first minute of an hour."""
DRAIN_S = 120.0


class Watcher(threading.Thread):
    """Scrapes the metrics, and reads the page's document and the status, once a second."""

    def __init__(self, daemon: Daemon) -> None:
        super().__init__(name="watcher", daemon=True)
        self._daemon, self._end = daemon, threading.Event()
        self.scrape_s: list[float] = []
        self.page_s: list[float] = []
        self.status_s: list[float] = []
        self.rss_mb: list[tuple[float, float]] = []
        """(time, resident memory)."""
        self.failures: list[str] = []
        self.exposition = ""

    def run(self) -> None:
        with self._daemon.reader() as reader, self._daemon.admin() as admin:
            looks = (
                (self.scrape_s, lambda: setattr(self, "exposition", reader.text("/metrics"))),
                (self.page_s, lambda: reader.get("/page.json")),
                (self.status_s, lambda: admin.get("/v1/status")),
            )
            due_s = time.monotonic()
            while not self._end.wait(max(due_s - time.monotonic(), 0.0)):
                due_s += 1.0
                for taken, look in looks:
                    began_s = time.monotonic()
                    try:
                        look()
                    except AdminError as error:
                        self.failures.append(str(error))
                    taken.append(time.monotonic() - began_s)
                self.rss_mb.append((time.monotonic(), self._daemon.rss_mb()))

    def stop(self) -> None:
        self._end.set()
        self.join()


def run(processes: Processes, folder: Path, seconds: float) -> dict[str, Any]:
    """Return the part's figures; times in milliseconds, memory in MB."""
    daemon = Daemon(processes, folder)
    daemon.start()
    daemon.wait_ready()
    watcher = Watcher(daemon)
    with Fleet(daemon.engine_socket, NUM_ENGINES, BATCH_S) as fleet:
        began_s, cpu_s = time.monotonic(), daemon.child.cpu_seconds()
        watcher.start()
        for number in range(PERIODS):
            fleet.pump(seconds / PERIODS * (1 - BURST_SHARE), STEPS, REQUESTS)
            fleet.pump(seconds / PERIODS * BURST_SHARE, STEPS, BURST_REQUESTS)
            print(f"traffic: {fleet.rounds:,} rounds, {daemon.rss_mb():.0f} MB, period {number + 1}", flush=True)
            daemon.child.check()
        wall_s = time.monotonic() - began_s
        cpu_share = (daemon.child.cpu_seconds() - cpu_s) / wall_s
        is_drained = fleet.drain(DRAIN_S)
        watcher.stop()
        exit_code = daemon.stop()
        made, ack_ms = fleet.rounds, [value * 1e3 for value in fleet.ack_s]
        declared = sum(engine.lost.rounds for engine in fleet.engines)
    stored, unhandled = daemon.stored(), daemon.unhandled()
    lost = made - declared - stored["rounds"]
    return {
        "passed": not (lost or declared or unhandled or watcher.failures or exit_code) and is_drained,
        "seconds": round(wall_s, 1),
        "rounds": made,
        "rounds_per_s": round(made / wall_s),
        "lost": lost,
        "declared_lost": declared,
        "stored": stored,
        "rss_mb_start": round(next(mb for at_s, mb in watcher.rss_mb if at_s - began_s >= seconds * WARM_SHARE), 1),
        "rss_mb_end": round(watcher.rss_mb[-1][1], 1),
        "rss_mb_most": round(max(mb for _, mb in watcher.rss_mb), 1),
        "ack_ms_p50": round(percentile(ack_ms, 0.5), 1),
        "ack_ms_p99": round(percentile(ack_ms, 0.99), 1),
        "ack_ms_most": round(max(ack_ms), 1),
        "commit_ms_p99_at_most": commit_ms(watcher.exposition, 0.99),
        "scrape_ms_p99": round(percentile(watcher.scrape_s, 0.99) * 1e3, 1),
        "page_ms_p99": round(percentile(watcher.page_s, 0.99) * 1e3, 1),
        "status_ms_p99": round(percentile(watcher.status_s, 0.99) * 1e3, 1),
        "looks_failed": len(watcher.failures),
        "batches_not_learned": samples(watcher.exposition, "honed_event_batches_not_learned_total")[""],
        "cpu_share": round(cpu_share, 3),
        "unhandled": len(unhandled),
        "first_unhandled": [*watcher.failures, *unhandled][:3],
    }


def commit_ms(exposition: str, share: float) -> float:
    """Return the smallest bound of the daemon's histogram that this share of its commits doesn't exceed."""
    buckets = samples(exposition, "honed_db_commit_seconds_bucket", "le")
    return min(float(bound) for bound, count in buckets.items() if count >= share * buckets["+Inf"]) * 1e3
