"""Metrics of decisions: load, policy, draft lengths, predicted and measured values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from honed.adapt.control.controller import EngineController
from honed.adapt.control.settings import MODES
from honed.daemon.control.overrides import NAMES, Overrides
from honed.daemon.ingest.engines import Engines
from honed.daemon.metrics.labels import counter, engine_counter, engine_gauge, engines_present, engines_shown, labels_of, summed
from honed.daemon.service import Service

FALLBACKS = ("no_policy", "stale_policy", "observe_only", "error")
DECISIONS = frozenset(
    {*MODES, "policy", "override", "cold", "explore", "no_policy", "stale_policy", "observe", "error", "unplanned"}
)
"""An engine's reasons for a step's lengths; see the table in `adapt.lengths.decider`."""
_FROM_ZERO = ("policy", "no_policy", "stale_policy", "error", "unplanned")
"""Those that a dashboard or an alert looks for before they happen."""

Controllers = list[tuple[list[str], EngineController]]
"""Values of ENGINE_LABELS, with the controller of their engine."""


def families(service: Service) -> Iterator[Metric]:
    """The group, under the service's lock."""
    errors = service.steering.errors
    yield counter("honed_controller_errors", "Errors while learning from a batch or making a policy.", errors)
    yield from _load(service.engines, service.monotonic())
    yield from _policy(service.engines, service.monotonic())
    yield from _decisions(service)
    yield from _overrides(service.overrides)


def _load(engines: Engines, now_s: float) -> Iterator[Metric]:
    connected = engine_gauge(
        "honed_engine_connected", "1 while the engine is connected, then 0 for a day. Its other gauges end."
    )
    running = engine_gauge("honed_engine_requests_running", "Requests in the engine's batch.")
    waiting = engine_gauge("honed_engine_requests_waiting", "Requests waiting for the engine.")
    lengths = engine_gauge("honed_draft_tokens_per_round", "Draft tokens per round, in the latest batch with rounds.")
    for engine in engines_shown(engines):
        connected.add_metric(labels_of(engine), engines.is_connected(engine, now_s))
    for engine in engines_present(engines, now_s):
        labels, status = labels_of(engine), engine.status
        if engine.latest_rounds is not None:
            lengths.add_metric(labels, engine.latest_rounds.draft_tokens_per_round)
        if status is not None:
            running.add_metric(labels, status.num_running)
            waiting.add_metric(labels, status.num_waiting)
    yield from (connected, running, waiting, lengths)


def _policy(engines: Engines, now_s: float) -> Iterator[Metric]:
    budget = engine_gauge(
        "honed_tree_budget_nodes",
        "Most nodes that a request may verify under the sent policy, root excluded; for a chain: draft tokens.",
    )
    age = engine_gauge("honed_policy_age_seconds", "Age of the engine's policy; negative: none.")
    fallback = engine_gauge("honed_fallback_active", "1 while the engine decides without a policy.", "reason")
    log_p99 = engine_gauge("honed_engine_log_seconds", "p99 of logging a step in vLLM.")
    decide_p99 = engine_gauge("honed_engine_decide_seconds", "p99 of deciding a step in vLLM.")
    errors = engine_counter("honed_engine_errors", "Exceptions caught inside vLLM.")
    for engine in engines_shown(engines):
        if engine.status is not None:
            errors.add_metric(labels_of(engine), engine.status.errors)
    for engine in engines_present(engines, now_s):
        labels, status = labels_of(engine), engine.status
        if engine.policy is not None:
            budget.add_metric(labels, engine.budget_nodes)
        age.add_metric(labels, status.policy_age_s if status else -1.0)
        for reason in FALLBACKS:
            fallback.add_metric([*labels, reason], bool(status and status.fallback == reason))
        if status is not None:
            log_p99.add_metric(labels, status.log_us_p99 / 1e6)
            decide_p99.add_metric(labels, status.decide_us_p99 / 1e6)
    yield from (budget, age, fallback, log_p99, decide_p99, errors)


def _decisions(service: Service) -> Iterator[Metric]:
    decisions = engine_counter("honed_decisions", "Engine steps by the reason of their draft lengths.", "reason")
    drift = engine_counter("honed_drift_detections", "Drift alarms.", "workload")
    counted: dict[str, Counter[str]] = {}
    for (engine_id, reason), value in service.decisions.items():
        counted.setdefault(engine_id, Counter())[reason] += value
    # Zeros too: Prometheus sees no increase if a counter first appears with its first event.
    alarms: Counter[tuple[str, str]] = Counter(dict.fromkeys(service.live.workloads(), 0))
    alarms.update(service.steering.alarms)
    known = {engine.engine_id: labels_of(engine) for engine in engines_shown(service.engines)}
    for engine_id, labels in known.items():
        for reason, steps in summed(counted.get(engine_id, {}), DECISIONS).items():
            if steps or reason in _FROM_ZERO:
                decisions.add_metric([*labels, reason], steps)
    for (engine_id, workload), value in sorted(alarms.items()):
        if engine_id in known:
            drift.add_metric([*known[engine_id], workload], value)
    yield from (decisions, drift)


def controllers(service: Service) -> Controllers:
    """Collect the data of `beliefs`. Call it under the service's lock."""
    return [
        (labels_of(engine), controller)
        for engine in engines_present(service.engines, service.monotonic())
        if (controller := service.steering.controller(engine)) is not None
    ]


def beliefs(found: Controllers) -> Iterator[Metric]:
    """Make gauges of step times and speed-up from what `controllers` returned. Call it without the lock: one may learn."""
    gauges = (
        ("predicted_seconds", engine_gauge("honed_step_time_predicted_seconds", "Step time predicted, smoothed.")),
        ("measured_seconds", engine_gauge("honed_step_time_measured_seconds", "Step time measured, smoothed.")),
        ("speedup", engine_gauge("honed_speedup_estimated_ratio", "Estimated speed relative to no drafts.")),
    )
    for labels, controller in found:
        headline = controller.headline()
        for name, family in gauges:
            value = headline.get(name)
            if value is not None and math.isfinite(value):
                family.add_metric(labels, value)
    yield from (family for _, family in gauges)


def _overrides(overrides: Overrides) -> Iterator[Metric]:
    active = GaugeMetricFamily("honed_override_active", "1 while an operator's override is in force.", labels=["name"])
    changes = CounterMetricFamily("honed_override_changes", "Overrides set, cleared and expired.", labels=["name", "change"])
    in_force = {one["name"] for one in overrides.listing()}
    for name in NAMES:
        active.add_metric([name], name in in_force)
        for change in ("set", "cleared", "expired"):
            changes.add_metric([name, change], overrides.changes[name, change])
    yield from (active, changes)
