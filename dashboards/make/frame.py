"""Parts shared by all dashboards: variables, marks where something changed, links to each other."""

from __future__ import annotations

from collections.abc import Sequence

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models import dashboard as model

from honed.dashboards.make.panels import SOURCE, Panel
from honed.dashboards.make.queries import ENGINE, JOB, WORKLOAD

Rows = Sequence[tuple[str, list[Panel]]]


def board(name: str, text: str, rows: Rows) -> dashboard.Dashboard:
    """Make a dashboard from titled rows."""
    made = (
        dashboard.Dashboard(f"honed / {name}")
        .uid(f"honed-{name.lower().split()[0]}")
        .description(text)
        .tags(["honed", "vllm"])
        .editable()
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
    """Marks where weights or decisions changed."""
    swaps = f'increase(honed_swaps_total{{{JOB},result="ok"}}[1m]) > 0'
    promotions = f"increase(honed_promotions_total{{{JOB}}}[1m]) > 0"
    rollbacks = f"increase(honed_rollbacks_total{{{JOB}}}[1m]) > 0"
    drift = f"increase(honed_drift_detections_total{{{WORKLOAD}}}[1m]) > 0"
    overrides = f"increase(honed_override_changes_total{{{JOB}}}[1m]) > 0"
    updates = f"increase(honed_target_updates_total{{{ENGINE}}}[1m]) > 0"
    return [
        mark("Swaps", swaps, "new weights in an engine", "blue"),
        mark("Promotions", promotions, "a version became active: {{reason}}", "green"),
        mark("Roll-backs", rollbacks, "rolled back: {{reason}}", "red"),
        mark("Drift", drift, "drift of workload {{workload}}", "orange"),
        mark("Overrides", overrides, "override {{name}} {{change}}", "purple"),
        mark("Target updates", updates, "other weights of the target in engine {{engine}}", "yellow"),
    ]


def mark(name: str, expr: str, title: str, color: str) -> dashboard.AnnotationQuery:
    """Make an annotation from a query."""
    annotation = dashboard.AnnotationQuery().name(name).datasource(SOURCE).enable(True).icon_color(color)
    return annotation.expr(expr).step("60s").title_format(title)
