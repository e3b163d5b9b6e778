"""Metrics of drafter weights: versions and their roles, swaps, promotions, roll-backs, trials of two versions."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from honed.daemon.errors import HonedError
from honed.daemon.ingest.engines import Engines
from honed.daemon.lifecycle.drafters import Drafters
from honed.daemon.lifecycle.sharing import Sharing
from honed.daemon.lifecycle.swaps import Swaps
from honed.daemon.lifecycle.trial import Trial
from honed.daemon.metrics.labels import engine_counter, engine_gauge, engines_present, engines_shown, gauge, labels_of
from honed.daemon.service import Service

KINDS = ("recalibrate", "adopt", "promote", "rollback", "watch", "verify", "purge")
RESULTS = ("succeeded", "failed", "cancelled")


def families(service: Service) -> Iterator[Metric]:
    """The group, under the service's lock."""
    yield from _roles(service.drafters)
    yield from _of_engines(service.engines, service.swaps, service.drafters.active, service.monotonic())
    yield from _changes(service)
    yield gauge("honed_swap_pause_seconds", "Pause of the engine by the latest swap.", service.swaps.last_pause_s)
    yield from _trial(service.rollout.trial)
    is_due = float(service.rollout.due is not None)
    yield gauge("honed_verdict_due", "1 while a trial's verdict can't be carried out, since no alias can be moved.", is_due)
    yield from _sharing(service.sharing)


def _roles(drafters: Drafters) -> Iterator[Metric]:
    info = GaugeMetricFamily("honed_drafter_info", "1 for the version in a role.", labels=["role", "version", "sha256"])
    for role, version in drafters.aliases().items():
        if version:
            try:
                sha256 = drafters.manifest(version).sha256
            except HonedError:
                sha256 = ""
            info.add_metric([role, version, sha256], 1)
    yield info
    unusable = GaugeMetricFamily(
        "honed_drafter_unusable", "1 while the version in a role can't be used: damaged, removed or unknown.", labels=["role"]
    )
    faults = drafters.faults()
    for role, version in drafters.aliases().items():
        if version or role in faults:
            unusable.add_metric([role], role in faults)
    yield unusable


def _of_engines(engines: Engines, swaps: Swaps, active: str, now_s: float) -> Iterator[Metric]:
    live = engine_gauge("honed_engine_drafter_info", "1 for the engine's drafter version.", "version")
    text = "1 while the engine could run the active version: one of its method and target; 0 also while it sleeps."
    fits = engine_gauge("honed_engine_fits_active", text)
    updates = engine_counter("honed_target_updates", "Updates of the target's weights in the running engine.")
    for engine in engines_present(engines, now_s):
        fits.add_metric(labels_of(engine), swaps.fits(engine, active, takes_over=True))
        if engine.live_version:
            live.add_metric([*labels_of(engine), engine.live_version], 1)
    for engine in engines_shown(engines):
        if engine.status is not None:
            updates.add_metric(labels_of(engine), engine.status.target_updates)
    yield from (live, fits, updates)


def _changes(service: Service) -> Iterator[Metric]:
    swaps = CounterMetricFamily("honed_swaps", "Swap commands answered, by result.", labels=["result"])
    for result in ("ok", "turn", "postponed", "failed"):
        swaps.add_metric([result], service.swaps.results[result])
    promotions = CounterMetricFamily("honed_promotions", "Versions made active, by reason.", labels=["reason"])
    for reason in ("recalibrate", "adopt", "promote"):
        promotions.add_metric([reason], service.lifecycle.promotions[reason])
    rollbacks = CounterMetricFamily("honed_rollbacks", "Versions rolled back, by reason.", labels=["reason"])
    for reason in ("canary", "operator"):
        rollbacks.add_metric([reason], service.lifecycle.rollbacks[reason])
    ended = CounterMetricFamily("honed_operations", "Operations that ended, by kind and result.", labels=["kind", "result"])
    for kind in KINDS:
        for result in RESULTS:
            ended.add_metric([kind, result], service.operations.ended[kind, result])
    yield from (swaps, promotions, rollbacks, ended)


def _trial(trial: Trial | None) -> Iterator[Metric]:
    yield gauge("honed_canary_active", "1 while two drafter versions take turns.", float(trial is not None))
    evidence = GaugeMetricFamily(
        "honed_canary_log_evidence",
        "log10 of the evidence on the version on trial, by workload (empty: all traffic) and direction.",
        labels=["version", "workload", "says"],
    )
    if trial is not None:
        for workload, figures in trial.canary.figures().items():
            for says in ("worse", "better"):
                evidence.add_metric([trial.canary.new, workload, says], figures[f"evidence_{says}"])
    yield evidence


def _sharing(sharing: Sharing) -> Iterator[Metric]:
    moved = CounterMetricFamily(
        "honed_shared_versions", "Versions copied to and from the shared registry.", labels=["direction"]
    )
    for direction in ("pushed", "fetched"):
        moved.add_metric([direction], sharing.moved[direction])
    yield moved
    failed = "Failed checks of the shared registry."
    yield CounterMetricFamily("honed_shared_registry_errors", failed, value=sharing.errors)
