"""Prometheus metrics, read off the live state at each scrape: counters since the daemon's start, divided in PromQL.

Labels are bounded: engines, workloads (`events.max_workloads`), drafter versions, positions. Never a request id.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Iterator
from typing import TYPE_CHECKING

import prometheus_client
import pysqlite3
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from honed.adapt import wire
from honed.daemon.errors import HonedError

if TYPE_CHECKING:
    from honed.daemon.service import Service

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
ROUND_LABELS = ["model_name", "engine", "workload", "drafter_version"]
ENGINE_LABELS = ["model_name", "engine"]
FALLBACKS = ("no_policy", "stale_policy", "observe_only", "error")
TRAINER_STATES = ("idle", "collecting", "training", "waiting", "gating", "paused")
CANARY_DECISIONS = ("better", "worse", "unproven", "stopped")
ROLES = ("active", "candidate", "previous", "floor")


def render(service: Service) -> bytes:
    """The exposition text."""
    registry = prometheus_client.CollectorRegistry()
    registry.register(LiveCollector(service))
    return prometheus_client.generate_latest(registry)


class LiveCollector:
    """Makes the metric families of one scrape."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def describe(self) -> list[Metric]:
        """Nothing: registering mustn't collect."""
        return []

    def collect(self) -> Iterator[Metric]:
        service = self._service
        # Made in full under the lock, so that a scrape shows one moment.
        with service.lock:
            families = [
                *self._ingest(),
                *self._rounds(),
                *self._control(),
                *self._training(),
                *self._weights(),
                *self._self(),
            ]
        yield from families

    # --- families -------------------------------------------------------------------------------------------------------

    def _ingest(self) -> Iterator[Metric]:
        service = self._service
        figures = service.ingest.figures
        yield counter("honed_events_received", "Verify rounds received, plain decode steps included.", figures.rounds)
        yield counter("honed_event_batches_received", "Batches received, each once.", figures.batches)
        yield counter("honed_event_batches_duplicate", "Batches that came again and were ignored.", figures.duplicates)
        lost = CounterMetricFamily(
            "honed_events_lost",
            "Rounds lost, by reason: queue_full (in an engine; as it says for its present boot).",
            labels=[*ENGINE_LABELS, "reason"],
        )
        missing = CounterMetricFamily(
            "honed_event_batches_lost",
            "Batches of the engine's present boot that never came (missing) or contradicted themselves (malformed).",
            labels=[*ENGINE_LABELS, "reason"],
        )
        for engine in service.engines.by_id.values():
            labels = self._engine(engine.engine_id)
            lost.add_metric([*labels, "queue_full"], engine.boot.lost.get("lost_rounds", 0))
            missing.add_metric([*labels, "missing"], engine.boot.missing_batches)
            missing.add_metric([*labels, "malformed"], engine.boot.malformed_batches)
        yield lost
        yield missing
        rejected = CounterMetricFamily("honed_frames_rejected", "Frames dropped, by reason.", labels=["reason"])
        for reason in sorted({"undecodable", *figures.rejected}):
            rejected.add_metric([reason], figures.rejected[reason])
        yield rejected
        yield gauge("honed_event_lag_seconds", "Age of the latest batch when it arrived.", figures.lag_s)
        yield gauge("honed_event_queue_length", "Batches received and not yet committed.", service.store.queued_batches)
        yield gauge("honed_last_event_timestamp_seconds", "When the latest batch arrived.", figures.last_batch_unix_s)
        skipped = service.steering.skipped_batches
        yield counter("honed_event_batches_not_learned", "Batches the controllers skipped for lack of time.", skipped)

    def _rounds(self) -> Iterator[Metric]:
        rounds = CounterMetricFamily("honed_verify_rounds", "Verify rounds with at least one draft token.", labels=ROUND_LABELS)
        drafted = CounterMetricFamily("honed_draft_tokens", "Draft tokens verified.", labels=ROUND_LABELS)
        accepted = CounterMetricFamily("honed_accepted_tokens", "Draft tokens accepted.", labels=ROUND_LABELS)
        emitted = CounterMetricFamily("honed_emitted_tokens", "Tokens emitted, also by plain steps.", labels=ROUND_LABELS)
        at = [*ROUND_LABELS, "position"]
        by_drafted = CounterMetricFamily("honed_position_drafted", "Rounds that drafted this position (from 0).", labels=at)
        by_accepted = CounterMetricFamily("honed_position_accepted", "Rounds that accepted this position.", labels=at)
        length = HistogramMetricFamily(
            "honed_acceptance_length", "Tokens a round emitted, bonus token included.", labels=ROUND_LABELS
        )
        for (engine_id, workload, version), counts in sorted(self._service.live.items()):
            labels = [*self._engine(engine_id), workload, version]
            rounds.add_metric(labels, counts.rounds)
            drafted.add_metric(labels, counts.draft_tokens)
            accepted.add_metric(labels, counts.accepted_tokens)
            emitted.add_metric(labels, counts.emitted_tokens)
            for position, value in enumerate(counts.drafted.tolist()):
                by_drafted.add_metric([*labels, str(position)], value)
            for position, value in enumerate(counts.accepted.tolist()):
                by_accepted.add_metric([*labels, str(position)], value)
            cumulative, buckets = 0, []
            for num_accepted, value in enumerate(counts.accepted_histogram().tolist()):
                cumulative += value
                buckets.append((str(float(num_accepted + 1)), cumulative))
            total = counts.rounds + counts.accepted_tokens
            length.add_metric(labels, [*buckets, ("+Inf", counts.rounds)], total)
        yield from (rounds, drafted, accepted, emitted, by_drafted, by_accepted, length)

    def _control(self) -> Iterator[Metric]:
        service = self._service
        lengths = GaugeMetricFamily(
            "honed_draft_tokens_per_round", "Draft tokens a round in the present boot.", labels=ENGINE_LABELS
        )
        age = GaugeMetricFamily(
            "honed_policy_age_seconds", "Age of the engine's policy; negative: it has none.", labels=ENGINE_LABELS
        )
        fallback = GaugeMetricFamily(
            "honed_fallback_active", "1 while the engine decides without a policy.", labels=[*ENGINE_LABELS, "reason"]
        )
        decisions = CounterMetricFamily(
            "honed_decisions", "Engine steps by what decided the draft lengths.", labels=[*ENGINE_LABELS, "reason"]
        )
        connected = GaugeMetricFamily("honed_engine_connected", "1 while the engine is heard.", labels=ENGINE_LABELS)
        log_p99 = GaugeMetricFamily("honed_engine_log_seconds", "p99 of logging a step in vLLM.", labels=ENGINE_LABELS)
        decide_p99 = GaugeMetricFamily("honed_engine_decide_seconds", "p99 of deciding a step in vLLM.", labels=ENGINE_LABELS)
        errors = CounterMetricFamily("honed_engine_errors", "Exceptions caught inside vLLM.", labels=ENGINE_LABELS)
        now_s = service.monotonic()
        for engine in service.engines.by_id.values():
            labels, status = self._engine(engine.engine_id), engine.status
            connected.add_metric(labels, service.engines.is_connected(engine, now_s))
            lengths.add_metric(labels, engine.boot.stored.draft_tokens_per_round)
            age.add_metric(labels, status.policy_age_s if status else -1.0)
            for reason in FALLBACKS:
                fallback.add_metric([*labels, reason], bool(status and status.fallback == reason))
            if status is not None:
                log_p99.add_metric(labels, status.log_us_p99 / 1e6)
                decide_p99.add_metric(labels, status.decide_us_p99 / 1e6)
                errors.add_metric(labels, status.errors)
        for (engine_id, reason), value in sorted(service.decisions.items()):
            decisions.add_metric([*self._engine(engine_id), reason], value)
        yield from (connected, lengths, age, fallback, decisions, log_p99, decide_p99, errors)
        yield from self._beliefs()
        drift = CounterMetricFamily("honed_drift_detections", "Drift alarms.", labels=[*ENGINE_LABELS, "workload"])
        for (engine_id, workload), value in sorted(service.steering.alarms.items()):
            drift.add_metric([*self._engine(engine_id), workload], value)
        yield drift

    def _beliefs(self) -> Iterator[Metric]:
        predicted = GaugeMetricFamily("honed_step_time_predicted_seconds", "Step time expected.", labels=ENGINE_LABELS)
        measured = GaugeMetricFamily("honed_step_time_measured_seconds", "Step time measured.", labels=ENGINE_LABELS)
        speedup = GaugeMetricFamily(
            "honed_speedup_estimated_ratio", "Estimated speed against not drafting.", labels=ENGINE_LABELS
        )
        for engine in self._service.engines.by_id.values():
            beliefs = self._service.steering.beliefs(engine)
            step_time = beliefs.get("step_time") or {}
            for family, value in (
                (predicted, step_time.get("predicted_seconds")),
                (measured, step_time.get("measured_seconds")),
                (speedup, beliefs.get("speedup_estimate")),
            ):
                if value is not None and math.isfinite(value):
                    family.add_metric(self._engine(engine.engine_id), value)
        yield from (predicted, measured, speedup)

    def _training(self) -> Iterator[Metric]:
        service = self._service
        trainer = service.trainer
        view = trainer.view()
        state = GaugeMetricFamily("honed_trainer_state", "1 for the state that the trainer is in.", labels=["state"])
        for name in (*TRAINER_STATES, "absent"):
            state.add_metric([name], (view["state"] if view else "absent") == name)
        yield state
        yield counter("honed_training_steps", "Micro-steps trained.", trainer.sums["steps"])
        yield counter("honed_training_tokens", "Tokens trained on.", trainer.sums["tokens"])
        yield counter("honed_training_preemptions", "Times the trainer yielded to the engine.", trainer.sums["preemptions"])
        if view is not None:
            yield gauge("honed_training_preemption_seconds", "p99 of the time to yield.", view["preemption_s_p99"])
            yield gauge("honed_gpu_idle_ratio", "Share of time in which the trainer could work.", view["idle_ratio"])
            yield gauge("honed_training_loss", "Latest training loss.", view["loss"])
            yield gauge("honed_samples_held_bytes", "Samples in the trainer's memory.", view["samples_bytes"])

    def _weights(self) -> Iterator[Metric]:
        service = self._service
        info = GaugeMetricFamily("honed_drafter_info", "1 for the version in a role.", labels=["role", "version", "sha256"])
        for role, version in service.drafters.aliases().items():
            if version:
                try:
                    sha256 = service.drafters.manifest(version).sha256
                except HonedError:
                    sha256 = ""
                info.add_metric([role, version, sha256], 1)
        yield info
        generation = GaugeMetricFamily(
            "honed_drafter_generation", "Swaps applied in the engine's present boot.", labels=ENGINE_LABELS
        )
        for engine in service.engines.by_id.values():
            if engine.status is not None:
                generation.add_metric(self._engine(engine.engine_id), engine.status.drafter_generation)
        yield generation
        swaps = CounterMetricFamily("honed_swaps", "Swap commands answered, by result; turn: in a trial.", labels=["result"])
        for result in ("ok", "turn", "failed"):
            swaps.add_metric([result], service.swaps.results[result])
        yield swaps
        yield gauge("honed_swap_pause_seconds", "How long the latest swap held the engine.", service.swaps.last_pause_s)
        rollbacks = CounterMetricFamily("honed_rollbacks", "Versions rolled back, by reason.", labels=["reason"])
        for reason in ("canary", "operator"):
            rollbacks.add_metric([reason], service.lifecycle.rollbacks[reason])
        yield rollbacks
        yield from self._canary()

    def _canary(self) -> Iterator[Metric]:
        canaries = self._service.lifecycle.canaries
        ended = CounterMetricFamily("honed_canaries", "Trials of drafter versions that ended, by verdict.", labels=["decision"])
        for decision in CANARY_DECISIONS:
            ended.add_metric([decision], canaries.results[decision])
        yield ended
        trial = canaries.trial
        yield gauge("honed_canary_active", "1 while two drafter versions take turns.", trial is not None)
        rounds = trial.canary.rounds if trial is not None else 0
        yield gauge("honed_canary_rounds", "Rounds compared in the present trial, both versions together.", rounds)
        evidence = GaugeMetricFamily(
            "honed_canary_log_evidence",
            "log10 of the evidence on the version on trial, by workload (empty: all traffic) and by what it says of it.",
            labels=["version", "workload", "says"],
        )
        change = GaugeMetricFamily(
            "honed_canary_change_ratio",
            "Estimated relative change of conditional acceptance by the version on trial.",
            labels=["version", "workload"],
        )
        for workload, figures in (trial.canary.figures() if trial is not None else {}).items():
            assert trial is not None
            for says in ("worse", "better"):
                evidence.add_metric([trial.canary.new, workload, says], figures[f"evidence_{says}"])
            change.add_metric([trial.canary.new, workload], figures["change"])
        yield from (evidence, change)

    def _self(self) -> Iterator[Metric]:
        service = self._service
        store = service.store
        yield gauge("honed_db_size_bytes", "Database and its log on disk.", store.size_bytes)
        commit = HistogramMetricFamily("honed_db_commit_seconds", "Time to commit a group of batches.")
        commit.add_metric([], *store.commit_times.exposition())
        yield commit
        yield counter("honed_db_errors", "Refusals by the database.", store.errors)
        requests = CounterMetricFamily("honed_admin_requests", "HTTP requests.", labels=["method", "route", "code"])
        for labels, value in sorted(service.requests.items()):
            requests.add_metric(list(labels), value)
        yield requests
        yield gauge("honed_start_time_seconds", "When the daemon started.", service.started_unix_s)
        build = InfoMetricFamily("honed_build", "What runs here.")
        versions = {"version": service.version, "python": platform.python_version(), "wire": str(wire.WIRE_VERSION)}
        build.add_metric([], versions | {"sqlite": pysqlite3.sqlite_version})
        yield build

    def _engine(self, engine_id: str) -> list[str]:
        engine = self._service.engines.by_id.get(engine_id)
        hello = engine.hello if engine is not None else None
        return [hello.model_name if hello else "", engine_id]


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)
