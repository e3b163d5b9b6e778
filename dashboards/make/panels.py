"""Panels: lines, bars, present values, states over time. Descriptions name the metrics, for a further search in Explore."""

from __future__ import annotations

import re
from typing import TypeAlias

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model

from honed.dashboards.make.queries import Queries

TOKENS, STEPS, ROWS = "suffix: tokens/s", "suffix: steps/s", "suffix: rows/s"
"""Units that Grafana has no name for; "ops" are operations and "reqps" requests a second."""
SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
METRIC = re.compile(r"\b(?:honed_|process_|vllm:)[a-z0-9_]+\b|\bup\b")

Panel: TypeAlias = timeseries.Panel | stat.Panel | statetimeline.Panel


def plot(
    title: str,
    text: str,
    queries: Queries,
    *,
    unit: str = "short",
    low: float | None = None,
    high: float | None = None,
    bad: float | None = None,
    good: float | None = None,
    is_stacked: bool = False,
    right: str = "",
    right_unit: str = "",
    span: int = 12,
) -> timeseries.Panel:
    """Lines over time, with a dashed one at `bad` or `good`. `right` lists the letters of queries on the right axis."""
    panel = timeseries.Panel().title(title).description(describe(text, queries)).datasource(SOURCE).unit(unit)
    panel = panel.height(8).span(span).legend(legend()).line_width(1).fill_opacity(40 if is_stacked else 8)
    panel = panel.tooltip(common_builder.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    panel = panel if low is None else panel.min(low)
    panel = panel if high is None else panel.max(high)
    if is_stacked:
        panel = panel.stacking(common_builder.StackingConfig().mode(common.StackingMode.NORMAL))
    for letter in right:
        changed = [model.DynamicConfigValue("custom.axisPlacement", "right")]
        if right_unit:
            changed.append(model.DynamicConfigValue("unit", right_unit))
        panel = panel.override_by_query(letter, changed)
    is_marked = bad is not None or good is not None
    style = common.GraphThresholdsStyleMode.DASHED if is_marked else common.GraphThresholdsStyleMode.OFF
    panel = panel.thresholds(thresholds(bad, good)).thresholds_style(common_builder.GraphThresholdsStyleConfig().mode(style))
    return panel.targets(targets(queries))


def number(
    title: str,
    text: str,
    queries: Queries,
    *,
    unit: str = "short",
    decimals: int = 0,
    bad: float | None = None,
    good: float | None = None,
    shows_name: bool = False,
    span: int = 4,
) -> stat.Panel:
    """The present value; red from `bad` on, or below `good`."""
    panel = stat.Panel().title(title).description(describe(text, queries)).datasource(SOURCE).unit(unit).decimals(decimals)
    panel = panel.height(4).span(span).color_mode(common.BigValueColorMode.VALUE).graph_mode(common.BigValueGraphMode.NONE)
    panel = panel.text_mode(common.BigValueTextMode.NAME if shows_name else common.BigValueTextMode.AUTO)
    panel = panel.thresholds(thresholds(bad, good))
    # Instant query: over the range, a version that was active an hour ago would be shown beside the present one.
    return panel.reduce_options(common_builder.ReduceDataOptions().calcs(["lastNotNull"])).targets(targets(queries, True))


def timeline(title: str, text: str, queries: Queries, *, span: int = 12) -> statetimeline.Panel:
    """Bars while a state lasts."""
    panel = statetimeline.Panel().title(title).description(describe(text, queries)).datasource(SOURCE)
    panel = panel.height(8).span(span).show_value(common.VisibilityMode.NEVER).legend(legend()).thresholds(thresholds())
    return panel.targets(targets(queries))


def thresholds(bad: float | None = None, good: float | None = None) -> dashboard.ThresholdsConfig:
    """Colours: red from `bad` on or below `good`; without them Grafana would make everything above 80 red."""
    if good is not None:
        steps = [model.Threshold(value=None, color="red"), model.Threshold(value=good, color="green")]
    elif bad is not None:
        steps = [model.Threshold(value=None, color="green"), model.Threshold(value=bad, color="red")]
    else:
        steps = [model.Threshold(value=None, color="text")]
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


def legend() -> common_builder.VizLegendOptions:
    """Legend below the plot."""
    options = common_builder.VizLegendOptions().show_legend(True)
    return options.display_mode(common.LegendDisplayMode.LIST).placement(common.LegendPlacement.BOTTOM)


def targets(queries: Queries, is_instant: bool = False) -> list[Builder[Dataquery]]:
    """Queries, named A, B, …; each legend begins with the host."""
    made: list[Builder[Dataquery]] = []
    for i, (expr, text) in enumerate(queries):
        query = prometheus.Dataquery().ref_id(chr(ord("A") + i)).datasource(SOURCE).expr(expr)
        query = query.legend_format(f"{{{{instance}}}} {text}".strip())
        made.append(query.instant() if is_instant else query.range())
    return made


def describe(text: str, queries: Queries) -> str:
    """Join the text and the names of its metrics."""
    names = dict.fromkeys(name for expr, _ in queries for name in METRIC.findall(expr))
    return f"{text} Metrics: {', '.join(names)}."
