"""PromQL of the dashboards: common filters, rates, ratios with guarded denominators.

Every sum keeps hosts apart (`instance`). A ratio's denominator is greater than zero, so an idle server shows a gap, not 0/0.
vLLM's own metrics come from another scrape job and port, and name the engine differently. What both have is the host in
`instance`, without the port, and `model_name`.
"""

from __future__ import annotations

from typing import TypeAlias

DAEMON = 'job=~"$job",instance=~"$instance"'
ENGINE = f'{DAEMON},model_name=~"$model_name",engine=~"$engine"'
WORKLOAD = f'{ENGINE},workload=~"$workload"'
VLLM = 'instance=~"$host(:.*)?",model_name=~"$model_name"'
WORKS = 'state=~"training|waiting|gating"'
"""States of a trainer at work beside the engine: it computes, or it yields."""

Queries: TypeAlias = list[tuple[str, str]]
"""(PromQL, legend)."""


def rate(metric: str, by: str = "", labels: str = WORKLOAD) -> str:
    """Sum of a counter's rate, by host and `by`."""
    return f"sum by ({_with_host(by)}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def ratio(over: str, under: str, by: str = "", labels: str = WORKLOAD) -> str:
    """Divide two counters; no value while the lower one stands still."""
    return f"{rate(over, by, labels)} / ({rate(under, by, labels)} > 0)"


def new(metric: str, by: str, labels: str, span: str = "$__rate_interval") -> str:
    """Growth of a counter between two points of the plot, or in all of a longer span."""
    return f"sum by ({_with_host(by)}) (increase({metric}{{{labels}}}[{span}]))"


def largest(gauge: str, by: str = "", labels: str = ENGINE) -> str:
    """Maximum of a gauge, by host and `by`."""
    return f"max by ({_with_host(by)}) ({gauge}{{{labels}}})"


def quantile(share: float, histogram: str, by: str, labels: str) -> str:
    """Quantile of a histogram; no value while it stands still."""
    buckets = f"sum by ({_with_host(by)}, le) (rate({histogram}_bucket{{{labels}}}[$__rate_interval]))"
    return f"histogram_quantile({share:g}, {buckets}) and on ({_with_host(by)}) {rate(f'{histogram}_count', by, labels)} > 0"


def if_training(of_vllm: str, value: int) -> str:
    """A query of vLLM's, of hosts whose trainer is at work (1), or isn't (0)."""
    return f"{_named(of_vllm)} and on (host) {_named(largest('honed_trainer_state', labels=f'{DAEMON},{WORKS}'))} == {value}"


def _with_host(by: str) -> str:
    return f"instance, {by}" if by else "instance"


def _named(query: str) -> str:
    """The same with a label `host`: the instance without its port."""
    return f'label_replace({query}, "host", "$1", "instance", "(.*?)(:[0-9]+)?")'
