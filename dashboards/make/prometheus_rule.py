"""Makes the rules an object for the Prometheus operator: `python -m honed.dashboards.make.prometheus_rule ROOT` rewrites it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

MADE, RULES = "deploy/kubernetes/prometheusrule.yaml", ("dashboards/honed-recording.yml", "dashboards/honed-alerts.yml")
HEAD = "# Made by `make dashboards` from dashboards/honed-recording.yml and dashboards/honed-alerts.yml.\n"


def render(root: Path) -> str:
    """The object with all rules of a checkout."""
    made: dict[str, Any] = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "honed", "labels": {"app.kubernetes.io/part-of": "honed"}},
        "spec": {"groups": [group for file in RULES for group in yaml.safe_load((root / file).read_text())["groups"]]},
    }
    text: str = yaml.safe_dump(made, sort_keys=False, width=120)
    return HEAD + text


if __name__ == "__main__":
    checkout = Path(sys.argv[1])
    (checkout / MADE).write_text(render(checkout))
