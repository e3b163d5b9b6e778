"""PromQL of the dashboards: common filters, rates, ratios with guarded denominators.

A ratio's denominator is greater than zero, so an idle server shows a gap, not 0/0. vLLM's own metrics come from another scrape
job and name the engine differently; both have `model_name`.
"""

from __future__ import annotations

from typing import TypeAlias

JOB = 'job=~"$job"'
ENGINE = f'{JOB},model_name=~"$model_name",engine=~"$engine"'
WORKLOAD = f'{ENGINE},workload=~"$workload"'
VLLM = 'model_name=~"$model_name"'
WORKS = 'state=~"training|waiting|gating"'
"""States of a trainer at work beside the engine: it computes, or it yields."""

Queries: TypeAlias = list[tuple[str, str]]
"""(PromQL, legend)."""


def rate(metric: str, by: str, labels: str = WORKLOAD) -> str:
    """Sum of a counter's rate."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def ratio(over: str, under: str, by: str, labels: str = WORKLOAD) -> str:
    """Divide two counters; no value while the lower one stands still."""
    return f"{rate(over, by, labels)} / ({rate(under, by, labels)} > 0)"


def new(metric: str, by: str, labels: str) -> str:
    """Growth of a counter between two points of the plot."""
    return f"sum by ({by}) (increase({metric}{{{labels}}}[$__rate_interval]))"


def quantile(share: float, histogram: str, by: str, labels: str) -> str:
    """Quantile of a histogram; no value while it stands still."""
    grouping = f"{by}, le" if by else "le"
    buckets = f"sum by ({grouping}) (rate({histogram}_bucket{{{labels}}}[$__rate_interval]))"
    count = f"sum by ({by}) (rate({histogram}_count{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({share:g}, {buckets}) and on ({by}) {count} > 0"


def training_is(value: int) -> str:
    """True for all series while a trainer of these jobs is at work (1), or is not (0)."""
    return f"on () max(honed_trainer_state{{{JOB},{WORKS}}}) == {value}"
