"""What dashboards, rules and alerts hold, for those who check it: queries, and how Grafana fills them in."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from tests.tools import ROOT

FOLDER = ROOT / "dashboards"
BOARDS = sorted(FOLDER.glob("*.json"))
ALERTS, RECORDING = FOLDER / "honed-alerts.yml", FOLDER / "honed-recording.yml"

METRIC = re.compile(r"(?<!:)\b(honed_[a-z0-9_]+|process_[a-z0-9_]+)\b(?!:)(?:\{([^}]*)\})?")
FOREIGN = re.compile(r"\b(vllm:[a-z0-9_]+|up)\b(?:\{([^}]*)\})?")
RECORDED = re.compile(r"\b((?:host|instance)(?:_[a-z]+)*:[a-z0-9_]+:[a-z0-9_]+)")
"""Names of the series that recording rules make."""
LABEL_VALUES = re.compile(r"label_values\((.+), (\w+)\)")


@dataclass(frozen=True)
class Query:
    """One PromQL text, and where it stands."""

    where: str
    expr: str
    legend: str = ""
    description: str = ""

    def filled(self, interval: str, instance: str = ".*") -> str:
        """As Grafana sends it with an instance chosen, or "All" everywhere."""
        return fill(self.expr, interval, instance)


def fill(expr: str, interval: str = "4s", instance: str = ".*") -> str:
    """The expression with variables filled in."""
    expr = expr.replace("$instance", instance).replace("$host", re.sub(r":\d+$", "", instance))
    expr = expr.replace("$__rate_interval", interval).replace("$__range", "1h")
    return re.sub(r"\$(job|model_name|engine|workload)\b", ".*", expr)


def board_of(path: Path) -> dict[str, Any]:
    """A dashboard's document."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Its panels, without the titles of rows."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def panel_queries() -> list[Query]:
    """Every target of every panel."""
    return [
        Query(f"{path.name}: {panel['title']}", target["expr"], target["legendFormat"], panel["description"])
        for path in BOARDS
        for panel in panels(board_of(path))
        for target in panel["targets"]
    ]


def annotation_queries() -> list[Query]:
    """Every mark of every dashboard."""
    return [
        Query(f"{path.name}: {mark['name']}", mark["expr"], mark["titleFormat"])
        for path in BOARDS
        for mark in board_of(path)["annotations"]["list"]
    ]


def variable_queries() -> list[tuple[str, str]]:
    """(PromQL of the series, label) of every variable that is a query."""
    found = {}
    for path in BOARDS:
        for variable in board_of(path)["templating"]["list"]:
            if (asked := variable.get("query")) and (match := LABEL_VALUES.fullmatch(asked)):
                found[match[1], match[2]] = None
    return list(found)


def rules(path: Path) -> list[dict[str, Any]]:
    """The rules of a file."""
    return [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def all_queries() -> list[Query]:
    """Panels, marks, recording rules and alerts."""
    found = [*panel_queries(), *annotation_queries()]
    found += [
        Query(f"{path.name}: {rule.get('alert') or rule['record']}", rule["expr"])
        for path in (RECORDING, ALERTS)
        for rule in rules(path)
    ]
    return found
