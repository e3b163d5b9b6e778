"""Metrics of the drafter's weights: which versions are what, swaps, promotions, roll-backs, and the watch over a fresh one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from honed.daemon.errors import HonedError
from honed.daemon.metric_families import engine_gauge, engines_shown, gauge, labels_of

if TYPE_CHECKING:
    from honed.daemon.service import Service

KINDS = ("recalibrate", "promote", "rollback")
RESULTS = ("succeeded", "failed", "cancelled")


def families(service: Service) -> Iterator[Metric]:
    """The group, under the service's lock."""
    yield from _versions(service)
    yield from _changes(service)
    yield gauge("honed_swap_pause_seconds", "How long the latest swap held the engine.", service.swaps.last_pause_s)
    yield from _watch(service)


def _versions(service: Service) -> Iterator[Metric]:
    info = GaugeMetricFamily("honed_drafter_info", "1 for the version in a role.", labels=["role", "version", "sha256"])
    for role, version in service.drafters.aliases().items():
        if version:
            try:
                sha256 = service.drafters.manifest(version).sha256
            except HonedError:
                sha256 = ""
            info.add_metric([role, version, sha256], 1)
    yield info
    live = engine_gauge("honed_engine_drafter_info", "1 for the drafter version that the engine runs.", "version")
    generation = engine_gauge("honed_drafter_generation", "Swaps applied in the engine's present boot.")
    for engine in engines_shown(service):
        if engine.live_version:
            live.add_metric([*labels_of(engine), engine.live_version], 1)
        if engine.status is not None:
            generation.add_metric(labels_of(engine), engine.status.drafter_generation)
    yield from (live, generation)


def _changes(service: Service) -> Iterator[Metric]:
    swaps = CounterMetricFamily("honed_swaps", "Swap commands answered, by result.", labels=["result"])
    for result in ("ok", "failed"):
        swaps.add_metric([result], service.swaps.results[result])
    promotions = CounterMetricFamily("honed_promotions", "Versions made active, by what made them.", labels=["reason"])
    for reason in ("recalibrate", "promote"):
        promotions.add_metric([reason], service.lifecycle.promotions[reason])
    rollbacks = CounterMetricFamily("honed_rollbacks", "Versions rolled back, by reason.", labels=["reason"])
    for reason in ("canary", "operator"):
        rollbacks.add_metric([reason], service.lifecycle.rollbacks[reason])
    ended = CounterMetricFamily("honed_operations", "Operations that ended, by kind and result.", labels=["kind", "result"])
    for kind in KINDS:
        for result in RESULTS:
            ended.add_metric([kind, result], service.operations.ended[kind, result])
    yield from (swaps, promotions, rollbacks, ended)


def _watch(service: Service) -> Iterator[Metric]:
    watch = service.lifecycle.watch
    yield gauge("honed_canary_active", "1 while a fresh version is watched.", float(watch is not None))
    evidence = engine_gauge("honed_canary_log_evidence", "log10 of the evidence against the version under watch.")
    by_engine = watch.by_engine if watch else {}
    for engine in engines_shown(service):
        if (one := by_engine.get(engine.engine_id)) is not None:
            value = one.verdict.evidence
            evidence.add_metric(labels_of(engine), value if math.isfinite(value) else 0.0)
    yield evidence
