"""Metrics of received and lost rounds, batches and frames."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from honed.daemon.ingest.engines import Engines
from honed.daemon.metrics.labels import (
    counter,
    engine_counter,
    engine_gauge,
    engines_present,
    engines_shown,
    gauge,
    labels_of,
    summed,
)
from honed.daemon.service import Service

REJECTIONS = frozenset(
    {
        *("undecodable", "store_unavailable", "wire_version", "not_introduced", "refused_hello"),
        *("broken_protocol", "incomplete_messages", "too_many_connections"),
    }
)


def families(service: Service) -> Iterator[Metric]:
    """The group, under the service's lock."""
    figures = service.ingest.figures
    yield counter("honed_events_received", "Verify rounds received, plain decode steps included.", figures.rounds)
    yield counter("honed_event_batches_received", "Batches received, each once.", figures.batches)
    yield counter("honed_event_batches_duplicate", "Repeated batches, ignored.", figures.duplicates)
    ahead = "Batches refused since one before them hasn't come; engines resend both."
    yield counter("honed_event_batches_ahead", ahead, figures.ahead)
    yield counter("honed_event_batches_refused", "Batches refused by a full store; engines resend them.", figures.no_room)
    pooled = 'Workload labels in batches that counted as "other": all engines together send too many.'
    yield counter("honed_workload_labels_pooled", pooled, service.ingest.workloads.num_pooled)
    unroomed = 'Rounds that these metrics count as workload "other": too many engines, workloads and versions at a time.'
    yield counter("honed_rounds_pooled", unroomed, service.live.pooled_rounds)
    yield from _lost(service.engines)
    yield _waiting(service.engines, service.monotonic())
    rejected = CounterMetricFamily("honed_frames_rejected", "Frames dropped, by reason.", labels=["reason"])
    for reason, value in summed(figures.rejected, REJECTIONS).items():
        rejected.add_metric([reason], value)
    yield rejected
    yield gauge("honed_event_lag_seconds", "Age of the latest batch when it arrived.", figures.lag_s)
    yield gauge("honed_event_queue_length", "Batches received but not yet committed.", service.store.queued_batches)
    if figures.batches:
        yield gauge("honed_last_event_timestamp_seconds", "Time of the latest batch's arrival.", figures.last_batch_unix_s)
    skipped = service.steering.skipped_batches
    yield counter("honed_event_batches_not_learned", "Batches the controllers skipped for lack of time.", skipped)


def _lost(engines: Engines) -> Iterator[Metric]:
    lost = engine_counter(
        "honed_events_lost", "Rounds lost, by reason: queue_full (reported by an engine for its present boot).", "reason"
    )
    missing = engine_counter(
        "honed_event_batches_lost",
        "Batches of the engine's present boot that never arrived (missing) or were inconsistent (malformed).",
        "reason",
    )
    pooled = engine_counter(
        "honed_requests_pooled", 'Requests of the engine\'s present boot that counted as workload "other": too many labels.'
    )
    for engine in engines_shown(engines):
        labels, boot = labels_of(engine), engine.boot
        lost.add_metric([*labels, "queue_full"], boot.lost.get("lost_rounds", 0))
        missing.add_metric([*labels, "missing"], boot.missing_batches)
        missing.add_metric([*labels, "malformed"], boot.malformed_batches)
        if engine.status is not None:
            pooled.add_metric(labels, engine.status.pooled_requests)
    yield from (lost, missing, pooled)


def _waiting(engines: Engines, now_s: float) -> Metric:
    waiting = engine_gauge("honed_engine_queue_bytes", "Events in the engine waiting for acknowledgement.")
    for engine in engines_present(engines, now_s):
        if engine.status is not None:
            waiting.add_metric(labels_of(engine), engine.status.queue_bytes)
    return waiting
