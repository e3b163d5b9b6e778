"""Parts shared by all dashboards: variables, marks where something changed, links to each other."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as model

from honed.dashboards.make.panels import SOURCE, Panel
from honed.dashboards.make.queries import DAEMON, ENGINE, WORKLOAD

Rows = Sequence[tuple[str, list[Panel]]]


def board(name: str, text: str, rows: Rows) -> dashboard.Dashboard:
    """Make a dashboard from titled rows."""
    made = (
        dashboard.Dashboard(f"honed / {name}")
        .uid(f"honed-{name.lower().split()[0]}")
        .description(text)
        .tags(["honed", "vllm"])
        .readonly()
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .link(links())
    )
    for variable in variables():
        made = made.with_variable(variable)
    for change in changes():
        made = made.annotation(change)
    panel_id = 0
    for title, panels in rows:
        made = made.with_row(dashboard.Row(title).id(panel_id := panel_id + 1))
        for panel in panels:
            made = made.with_panel(panel.id(panel_id := panel_id + 1))
    return made


def links() -> dashboard.DashboardLink:
    """Link to honed's other dashboards, with the same variables and time."""
    made = dashboard.DashboardLink("honed").type(model.DashboardLinkType.DASHBOARDS).tags(["honed"])
    return made.include_vars(True).keep_time(True)


def variables() -> list[dashboard.DatasourceVariable | dashboard.QueryVariable]:
    """Variables that panels are filtered by."""
    made: list[dashboard.DatasourceVariable | dashboard.QueryVariable] = [
        dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"),
        query_variable("job", "label_values(honed_build_info, job)").all_value(".+"),
        query_variable("instance", 'label_values(honed_build_info{job=~"$job"}, instance)').all_value(".+"),
        # Without a value for "All", Grafana puts in those found: the hosts of the chosen instances, for vLLM's own metrics.
        query_variable("host", f"label_values(honed_build_info{{{DAEMON}}}, instance)")
        .regex("/^(.*?)(?::[0-9]+)?$/")
        .hide(model.VariableHide.HIDE_VARIABLE),
    ]
    names = {
        "model_name": f"label_values(honed_engine_connected{{{DAEMON}}}, model_name)",
        "engine": f'label_values(honed_engine_connected{{{DAEMON},model_name=~"$model_name"}}, engine)',
        "workload": f"label_values(honed_verify_rounds_total{{{ENGINE}}}, workload)",
    }
    return made + [query_variable(name, query).all_value(".*") for name, query in names.items()]


def query_variable(name: str, query: str) -> dashboard.QueryVariable:
    """A variable with the values that a query finds; all of them unless some are chosen."""
    return (
        dashboard.QueryVariable(name)
        .label(name.replace("_", " ").capitalize())
        .datasource(SOURCE)
        .query(query)
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .current(model.VariableOption(selected=True, text="All", value="$__all"))
    )


def changes() -> list[dashboard.AnnotationQuery]:
    """Marks where weights or decisions changed."""
    swaps = f'increase(honed_swaps_total{{{DAEMON},result="ok"}}[1m]) > 0'
    promotions = f"increase(honed_promotions_total{{{DAEMON}}}[1m]) > 0"
    rollbacks = f"increase(honed_rollbacks_total{{{DAEMON}}}[1m]) > 0"
    drift = f"increase(honed_drift_detections_total{{{WORKLOAD}}}[1m]) > 0"
    overrides = f"increase(honed_override_changes_total{{{DAEMON}}}[1m]) > 0"
    updates = f"increase(honed_target_updates_total{{{ENGINE}}}[1m]) > 0"
    return [
        mark("Swaps", swaps, "{{instance}}: new weights in an engine", "blue"),
        mark("Promotions", promotions, "{{instance}}: a version became active, {{reason}}", "green"),
        mark("Roll-backs", rollbacks, "{{instance}}: rolled back, {{reason}}", "red"),
        mark("Drift", drift, "{{instance}}: drift of workload {{workload}}", "orange"),
        mark("Overrides", overrides, "{{instance}}: override {{name}} {{change}}", "purple"),
        mark("Target updates", updates, "{{instance}}: other weights of the target in engine {{engine}}", "yellow"),
    ]


def mark(name: str, expr: str, title: str, color: str) -> dashboard.AnnotationQuery:
    """Make an annotation from a query."""
    annotation = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(color)
    return annotation.expr(expr).step("60s").title_format(title)
