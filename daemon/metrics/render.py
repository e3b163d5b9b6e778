"""Prometheus metrics, read from the live state at each scrape: counters since the daemon's start, divided in PromQL.

Each group of metrics is a module; `labels` keeps a scrape small.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import prometheus_client
from prometheus_client.core import Metric

from honed.daemon.metrics import acceptance, control, ingest, process, training, weights
from honed.daemon.service import Service

REST_PER_SCRAPE = 3.0
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
GROUPS = (ingest, control, training, weights, process)


def render(service: Service) -> bytes:
    """The exposition text."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(LiveCollector(service))
    return prometheus_client.generate_latest(registry)


class Scrapes:
    """The text of scrapes. Thread-safe.

    One is made at a time. For `REST_PER_SCRAPE` times as long as it took, others get the same. Asking needs no password, and
    whoever asks without end can't keep the daemon from its work.
    """

    def __init__(self, service: Service) -> None:
        self._service, self._lock = service, threading.Lock()
        self._text, self._fresh_until_s = b"", float("-inf")

    def get(self) -> bytes:
        """The exposition text."""
        with self._lock:
            began_s = self._service.monotonic()
            if began_s >= self._fresh_until_s:
                self._text = render(self._service)
                ended_s = self._service.monotonic()
                self._fresh_until_s = ended_s + REST_PER_SCRAPE * (ended_s - began_s)
            return self._text


class LiveCollector:
    """Makes the metric families of one scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        """Return nothing, so that registering doesn't collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        service = self._service
        # Read under the lock, so that a scrape shows one moment. What takes long is made outside it.
        with service.lock:
            families = [family for group in GROUPS for family in group.families(service)]
            rounds = acceptance.read(service.engines, service.live)
            controllers = control.controllers(service)
        yield from families
        yield from control.beliefs(controllers)
        yield from acceptance.families(rounds)
        yield from process.process_families()
