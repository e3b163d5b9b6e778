"""Metrics of the daemon itself: its database, its disk, its HTTP, its process."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Iterator
from pathlib import Path

import pysqlite3
from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric

from honed.adapt.protocol import wire
from honed.daemon.ingest.engines import Engines
from honed.daemon.metrics.labels import counter, engine_gauge, engines_present, gauge, labels_of
from honed.daemon.service import Service

_PROCESS = ProcessCollector(registry=None)


def families(service: Service) -> Iterator[Metric]:
    """The group, under the service's lock."""
    store = service.store
    yield gauge("honed_db_size_bytes", "Database and its log on disk.", store.size_bytes)
    commit = HistogramMetricFamily("honed_db_commit_seconds", "Time to commit a group of batches.")
    commit.add_metric([], *store.commit_times.exposition())
    yield commit
    yield counter("honed_db_errors", "Errors of the database.", store.errors)
    yield gauge("honed_db_failing", "1 while the database refuses events or states.", float(store.is_failing))
    yield counter("honed_log_errors", "Failed writes of the daemon's log.", service.log_stream.errors)
    yield from _disk(service.settings.paths.state_dir)
    requests = CounterMetricFamily("honed_admin_requests", "HTTP requests.", labels=["method", "route", "code"])
    for labels, value in sorted(service.requests.items()):
        requests.add_metric(list(labels), value)
    yield requests
    yield gauge("honed_start_time_seconds", "Start time of the daemon.", service.started_unix_s)
    yield gauge("honed_tick_age_seconds", "Time since the controllers last ran.", service.monotonic() - service.last_tick_s)
    yield from _versions(service.version, service.engines, service.monotonic())


def process_families() -> Iterator[Metric]:
    """Memory, CPU time and open files of the process."""
    yield from _PROCESS.collect()


def _disk(state_dir: Path) -> Iterator[Metric]:
    try:
        usage = shutil.disk_usage(state_dir)
    except OSError:
        return
    yield gauge("honed_disk_free_bytes", "Free space on the state directory's filesystem.", usage.free)
    yield gauge("honed_disk_size_bytes", "Size of the state directory's filesystem.", usage.total)


def _versions(version: str, engines: Engines, now_s: float) -> Iterator[Metric]:
    build = InfoMetricFamily("honed_build", "Daemon versions.")
    versions = {"version": version, "python": platform.python_version(), "wire": str(wire.WIRE_VERSION)}
    build.add_metric([], versions | {"sqlite": pysqlite3.sqlite_version})
    yield build
    names = ("version", "vllm_version", "wire", "runner", "method")
    info = engine_gauge("honed_engine_info", "Versions in an engine.", *names)
    for engine in engines_present(engines, now_s):
        if (hello := engine.hello) is not None:
            versions_there = [hello.honed_version, hello.vllm_version, str(hello.wire_version), hello.runner, hello.method]
            info.add_metric([*labels_of(engine), *versions_there], 1)
    yield info
