"""Makes `honed-overview.json`: `python dashboards/make_dashboards.py` rewrites it, and a test says when that was forgotten.

Every ratio divides rates by a denominator that is greater than zero, so an idle server shows a gap, not 0/0. Descriptions
name the metrics, so that whoever looks at a panel can go on in Explore.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeAlias

from grafana_foundation_sdk.builders import common as common_builder
from grafana_foundation_sdk.builders import dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.variants import Dataquery
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model

FOLDER = Path(__file__).parent
SOURCE = common.DataSourceRef(type_val="prometheus", uid="${datasource}")
JOB = 'job=~"$job"'
ENGINE = f'{JOB},model_name=~"$model_name",engine=~"$engine"'
WORKLOAD = f'{ENGINE},workload=~"$workload"'

Panel: TypeAlias = timeseries.Panel | stat.Panel | statetimeline.Panel
Queries: TypeAlias = list[tuple[str, str]]  # (PromQL, legend)


def rate(metric: str, by: str, labels: str = WORKLOAD) -> str:
    """Sum of a counter's rate."""
    return f"sum by ({by}) (rate({metric}{{{labels}}}[$__rate_interval]))"


def ratio(over: str, under: str, by: str) -> str:
    """Two counters divided; nothing where the lower one stands still."""
    return f"{rate(over, by)} / ({rate(under, by)} > 0)"


def new(metric: str, by: str, labels: str) -> str:
    """How much a counter grew between two points of the plot."""
    return f"sum by ({by}) (increase({metric}{{{labels}}}[$__rate_interval]))"


def overview() -> dashboard.Dashboard:
    """The page to look at first: is drafting worth it, is anything lost, which weights serve, who decides."""
    board = (
        dashboard.Dashboard("honed / Overview")
        .uid("honed-overview")
        .description("How well a vLLM server's drafter does, and what honed does about it.")
        .tags(["honed", "vllm"])
        .editable()
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
    )
    for variable in variables():
        board = board.with_variable(variable)
    for change in changes():
        board = board.annotation(change)
    panel_id = 0
    for title, panels in rows():
        board = board.with_row(dashboard.Row(title).id(panel_id := panel_id + 1))
        for panel in panels:
            board = board.with_panel(panel.id(panel_id := panel_id + 1))
    return board


def variables() -> list[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    """What all panels are filtered by."""
    names = {
        "job": "label_values(honed_build_info, job)",
        "model_name": f"label_values(honed_engine_connected{{{JOB}}}, model_name)",
        "engine": f'label_values(honed_engine_connected{{{JOB},model_name=~"$model_name"}}, engine)',
        "workload": f"label_values(honed_verify_rounds_total{{{ENGINE}}}, workload)",
    }
    made: list[dashboard.DatasourceVariable | dashboard.QueryVariable] = [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    ]
    for name, query in names.items():
        made.append(
            dashboard.QueryVariable(name)
            .label(name.replace("_", " ").capitalize())
            .datasource(SOURCE)
            .query(query)
            .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
            .sort(model.VariableSort.ALPHABETICAL_ASC)
            .multi(True)
            .include_all(True)
            .all_value(".*")
            .current(model.VariableOption(selected=True, text="All", value="$__all"))
        )
    return made


def changes() -> list[dashboard.AnnotationQuery]:
    """Marks where the weights changed."""
    swaps = f'increase(honed_swaps_total{{{JOB},result="ok"}}[1m]) > 0'
    rollbacks = f"increase(honed_rollbacks_total{{{JOB}}}[1m]) > 0"
    return [
        mark("Swaps", swaps, "new weights", "blue"),
        mark("Roll-backs", rollbacks, "rolled back: {{reason}}", "red"),
    ]


def mark(name: str, expr: str, title: str, color: str) -> dashboard.AnnotationQuery:
    """An annotation out of a query."""
    annotation = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(color)
    return annotation.expr(expr).step("60s").title_format(title)


def rows() -> list[tuple[str, list[Panel]]]:
    """All panels, row by row."""
    return [("Now", now()), ("Acceptance", acceptance()), ("Flow", flow()), ("Weights and control", weights())]


def now() -> list[Panel]:
    """Figures of this moment."""
    length = f"1 + {ratio('honed_accepted_tokens_total', 'honed_verify_rounds_total', 'job')}"
    lost = f"sum by (job) (honed_events_lost_total{{{ENGINE}}})"
    return [
        number("Acceptance length", "Tokens a verify round emits, bonus token included.", [(length, "")], decimals=2),
        number(
            "Estimated speed-up",
            "Tokens per second against not drafting at all, as the controller estimates it.",
            [(f"honed_speedup_estimated_ratio{{{ENGINE}}}", "{{engine}}")],
            decimals=2,
        ),
        number("Engines heard", "Engines that the daemon hears.", [(f"sum by (job) (honed_engine_connected{{{ENGINE}}})", "")]),
        number("Rounds lost", "Verify rounds that engines had to drop, in their present boots.", [(lost, "")], worst=1),
        number(
            "Active drafter",
            "Version in the role active.",
            [(f'honed_drafter_info{{{JOB},role="active"}}', "{{version}}")],
            shows_name=True,
        ),
        number("Database errors", "Refusals by the database.", [(f"honed_db_errors_total{{{JOB}}}", "")], worst=1),
    ]


def acceptance() -> list[Panel]:
    """What the drafter is worth."""
    by = "workload, drafter_version"
    legend = "{{workload}} {{drafter_version}}"
    accepted, rounds = "honed_accepted_tokens_total", "honed_verify_rounds_total"
    drafted = "honed_draft_tokens_total"
    at = ratio("honed_position_accepted_total", "honed_position_drafted_total", "position")
    return [
        plot(
            "Acceptance length",
            "Tokens a round emits, bonus token included, by workload and drafter version.",
            [(f"1 + {ratio(accepted, rounds, by)}", legend)],
            low=1,
        ),
        plot(
            "Acceptance rate",
            "Share of draft tokens that are accepted. Falls when more are drafted; compare it at equal draft lengths.",
            [(ratio(accepted, drafted, by), legend)],
            unit="percentunit",
            low=0,
            high=1,
        ),
        plot(
            "Accepted by position",
            "Of the rounds that drafted a position (from 0), the share that accepted it.",
            [(at, "position {{position}}")],
            unit="percentunit",
            low=0,
            high=1,
        ),
        plot(
            "Draft tokens a round",
            "What the controller chose, by workload.",
            [(ratio(drafted, rounds, "workload"), "{{workload}}")],
            low=0,
        ),
    ]


def flow() -> list[Panel]:
    """Tokens and events, and what of them got lost."""
    by = "model_name, engine, reason"
    return [
        plot(
            "Tokens emitted",
            "Tokens a second, plain decode steps included.",
            [(rate("honed_emitted_tokens_total", "workload"), "{{workload}}")],
            low=0,
        ),
        plot(
            "Events",
            "Verify rounds a second that reached the daemon, and batches waiting to be committed.",
            [
                (rate("honed_events_received_total", "job", JOB), "rounds/s"),
                (f"honed_event_queue_length{{{JOB}}}", "batches waiting"),
            ],
            low=0,
        ),
        plot(
            "Events lost",
            "Rounds dropped by engines, batches that never came or contradicted themselves, frames that nobody could read.",
            [
                (new("honed_events_lost_total", by, ENGINE), "rounds {{engine}} {{reason}}"),
                (new("honed_event_batches_lost_total", by, ENGINE), "batches {{engine}} {{reason}}"),
                (new("honed_frames_rejected_total", "reason", JOB), "frames {{reason}}"),
            ],
            low=0,
        ),
        plot(
            "Cost inside vLLM",
            "p99 of what honed does on the engine's thread, a step.",
            [
                (f"honed_engine_decide_seconds{{{ENGINE}}}", "decide {{engine}}"),
                (f"honed_engine_log_seconds{{{ENGINE}}}", "log {{engine}}"),
            ],
            unit="s",
            low=0,
        ),
    ]


def weights() -> list[Panel]:
    """Which weights serve, how they came there, and who decides."""
    return [
        timeline(
            "Drafter in use",
            "Versions in the role active; a gap ends where another one took over.",
            [(f'honed_drafter_info{{{JOB},role="active"}}', "{{version}}")],
        ),
        timeline("Trainer", "The state that the trainer is in.", [(f"honed_trainer_state{{{JOB}}} > 0", "{{state}}")]),
        plot(
            "Swaps and roll-backs",
            "Weights changed in running engines, and versions taken back.",
            [
                (new("honed_swaps_total", "result", JOB), "swap {{result}}"),
                (new("honed_rollbacks_total", "reason", JOB), "roll-back {{reason}}"),
            ],
            low=0,
        ),
        plot(
            "Policy",
            "Age of each engine's policy (negative: it has none), and 1 while it decides without one.",
            [
                (f"honed_policy_age_seconds{{{ENGINE}}}", "age {{engine}}"),
                (f"honed_fallback_active{{{ENGINE}}} > 0", "fallback {{engine}} {{reason}}"),
            ],
            unit="s",
        ),
    ]


def plot(
    title: str, text: str, queries: Queries, *, unit: str = "short", low: float | None = None, high: float | None = None
) -> timeseries.Panel:
    """Lines over time."""
    panel = timeseries.Panel().title(title).description(describe(text, queries)).datasource(SOURCE).unit(unit)
    panel = panel.height(8).span(12).legend(legend()).line_width(1).fill_opacity(8)
    panel = panel.tooltip(common_builder.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    panel = panel if low is None else panel.min(low)
    panel = panel if high is None else panel.max(high)
    return panel.targets(targets(queries))


def number(
    title: str, text: str, queries: Queries, *, decimals: int = 0, worst: float | None = None, shows_name: bool = False
) -> stat.Panel:
    """The present value; red from `worst` on."""
    steps = [model.Threshold(value=None, color="green" if worst is not None else "text")]
    if worst is not None:
        steps.append(model.Threshold(value=worst, color="red"))
    panel = stat.Panel().title(title).description(describe(text, queries)).datasource(SOURCE).decimals(decimals)
    panel = panel.height(4).span(4).color_mode(common.BigValueColorMode.VALUE).graph_mode(common.BigValueGraphMode.NONE)
    panel = panel.text_mode(common.BigValueTextMode.NAME if shows_name else common.BigValueTextMode.VALUE)
    panel = panel.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    # At this instant: over the range, a version that was active an hour ago would be shown beside the present one.
    return panel.reduce_options(common_builder.ReduceDataOptions().calcs(["lastNotNull"])).targets(targets(queries, True))


def timeline(title: str, text: str, queries: Queries) -> statetimeline.Panel:
    """Bars while something holds."""
    panel = statetimeline.Panel().title(title).description(describe(text, queries)).datasource(SOURCE)
    panel = panel.height(8).span(12).show_value(common.VisibilityMode.NEVER).legend(legend())
    return panel.targets(targets(queries))


def legend() -> common_builder.VizLegendOptions:
    """Below the plot."""
    options = common_builder.VizLegendOptions().show_legend(True)
    return options.display_mode(common.LegendDisplayMode.LIST).placement(common.LegendPlacement.BOTTOM)


def targets(queries: Queries, is_instant: bool = False) -> list[Builder[Dataquery]]:
    """Queries, named A, B, …"""
    made: list[Builder[Dataquery]] = []
    for i, (expr, legend) in enumerate(queries):
        query = prometheus.Dataquery().ref_id(chr(ord("A") + i)).datasource(SOURCE).expr(expr).legend_format(legend)
        made.append(query.instant() if is_instant else query.range())
    return made


def describe(text: str, queries: Queries) -> str:
    """The text, and the metrics that it speaks of."""
    names: dict[str, None] = {}
    for expr, _ in queries:
        names.update(dict.fromkeys(word for word in expr.replace("{", "(").split("(") if word.startswith("honed_")))
    return f"{text} Metrics: {', '.join(names)}."


def render(board: dashboard.Dashboard) -> str:
    """The JSON as it is committed."""
    return json.dumps(board.build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    """Write every dashboard beside this script."""
    (FOLDER / "honed-overview.json").write_text(render(overview()))


if __name__ == "__main__":
    main()
