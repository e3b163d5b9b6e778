"""Shared code of the metric groups: families in one line, and bounded label sets whatever engines send.

A scrape shows at most MOST_ENGINES engines (those heard last), MOST_POSITIONS draft positions, MAX_WORKLOADS workloads
and `live_rounds.MOST_CELLS` combinations of them. Everything beyond is under "other" or not shown. Never a request id.

An engine's counters stay when it is gone, until it is forgotten a day later. Its gauges end: what it did last would look like
its present state. The exception is `honed_engine_connected`, which then is 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from honed.daemon.ingest.engines import Engine, Engines

ENGINE_LABELS = ["model_name", "engine"]
MOST_ENGINES = 64
MOST_POSITIONS = 64
OTHER = "other"


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """A counter without labels."""
    return CounterMetricFamily(name, text, value=value)


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """A gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def engine_counter(name: str, text: str, *more: str) -> CounterMetricFamily:
    """A counter by engine, and by `more`."""
    return CounterMetricFamily(name, text, labels=[*ENGINE_LABELS, *more])


def engine_gauge(name: str, text: str, *more: str) -> GaugeMetricFamily:
    """A gauge by engine, and by `more`."""
    return GaugeMetricFamily(name, text, labels=[*ENGINE_LABELS, *more])


def engines_shown(engines: Engines) -> list[Engine]:
    """Engines shown by a scrape: those heard last, ordered by id."""
    latest = sorted(engines.by_id.values(), key=lambda engine: -engine.last_seen_s)
    return sorted(latest[:MOST_ENGINES], key=lambda engine: engine.engine_id)


def engines_present(engines: Engines, now_s: float) -> list[Engine]:
    """Those among the engines shown that are connected: the others have no gauges."""
    return [engine for engine in engines_shown(engines) if engines.is_connected(engine, now_s)]


def labels_of(engine: Engine) -> list[str]:
    """Values of ENGINE_LABELS."""
    return [engine.hello.model_name if engine.hello else "", engine.engine_id]


def summed(values: Mapping[str, float], known: Set[str]) -> dict[str, float]:
    """All `known` names with their values, 0 if absent; the rest summed as "other"."""
    sums: Counter[str] = Counter(dict.fromkeys(sorted(known), 0))
    for name, value in values.items():
        sums[name if name in known else OTHER] += value  # type: ignore[assignment]
    return dict(sums)
