"""Metrics of training: the trainer's work, its yields, its samples."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from honed.daemon.ingest.engines import Engines
from honed.daemon.metrics.labels import counter, engine_counter, engines_shown, gauge, labels_of
from honed.daemon.service import Service

TRAINER_STATES = ("idle", "collecting", "training", "waiting", "gating", "paused", "absent")


def families(service: Service) -> Iterator[Metric]:
    """The group, under the service's lock."""
    trainer = service.trainer
    view = trainer.view()
    state = GaugeMetricFamily("honed_trainer_state", "1 for the trainer's present state.", labels=["state"])
    for name in TRAINER_STATES:
        state.add_metric([name], (view["state"] if view else "absent") == name)
    yield state
    yield counter("honed_training_steps", "Micro-steps trained.", trainer.sums["steps"])
    yield counter("honed_training_tokens", "Tokens trained on.", trainer.sums["tokens"])
    yield counter("honed_training_preemptions", "Times the trainer yielded to the engine.", trainer.sums["preemptions"])
    dropped = "Updates that changed no weight, since the loss or the gradient wasn't finite."
    yield counter("honed_training_dropped_updates", dropped, trainer.sums["dropped_updates"])
    delay = HistogramMetricFamily("honed_training_preemption_seconds", "Time from work's arrival until the trainer stopped.")
    delay.add_metric([], *trainer.delays.exposition())
    yield delay
    computing = HistogramMetricFamily("honed_training_preemption_computing_seconds", "Compute time of the trainer within it.")
    computing.add_metric([], *trainer.computing.exposition())
    yield computing
    unanswered = "Drift alarms that no recalibration has answered, or is answering; not those for which more may be won."
    yield gauge("honed_drift_alarms_unanswered", unanswered, service.recalibrations.alarms.num_unanswered)
    if view is not None and trainer.status is not None:  # after its hello all would be 0, counters too
        yield gauge("honed_gpu_idle_ratio", "Share of time when the trainer could work.", view["idle_ratio"])
        beside = "Training beside requests since the trainer's start."
        yield counter("honed_training_beside_requests_seconds", beside, view["beside_seconds"])
        duty = "Share of the time with requests that training may take now."
        yield gauge("honed_training_beside_requests_duty", duty, view["beside_duty"])
        harm = "Estimate of what training adds to the time of serving's steps beside it, as a share."
        yield gauge("honed_training_harm_ratio", harm, view["beside_harm"])
        slow = "Share of steps beside training that are slower than 99 of 100 without."
        yield gauge("honed_training_slow_steps_ratio", slow, view["beside_slow_share"])
        yield gauge("honed_training_loss", "Latest training loss.", view["loss"])
        yield gauge("honed_samples_held_bytes", "Samples in the trainer's memory.", view["samples_bytes"])
        yield gauge("honed_samples_spilled_bytes", "Samples on the trainer's disk.", view["spilled_bytes"])
        nonfinite = "Rows with NaN or infinity that the trainer dropped since its start."
        yield counter("honed_samples_nonfinite_rows", nonfinite, view["nonfinite_rows"])
    yield from _captured(service.engines)


def _captured(engines: Engines) -> Iterator[Metric]:
    captured = engine_counter("honed_captured_rows", "Context feature rows captured in the engine's present boot.")
    skipped = engine_counter("honed_capture_skipped_rows", "Rows that capture couldn't write in the engine's present boot.")
    nonfinite = engine_counter("honed_capture_nonfinite_rows", "Rows with NaN or infinity that capture dropped in this boot.")
    media = engine_counter("honed_capture_media_requests", "Requests with images or other media, not captured, in this boot.")
    for engine in engines_shown(engines):
        if engine.status is not None:
            captured.add_metric(labels_of(engine), engine.status.captured_rows)
            skipped.add_metric(labels_of(engine), engine.status.capture_skipped_rows)
            nonfinite.add_metric(labels_of(engine), engine.status.capture_nonfinite_rows)
            media.add_metric(labels_of(engine), engine.status.capture_media_requests)
    yield from (captured, skipped, nonfinite, media)
