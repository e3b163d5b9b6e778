"""Writes docs/alerts.md: what each alert means and the steps to take, from the rules that Prometheus loads.

`python -m docs.make.alerts_page ROOT` writes the page of a checkout.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import yaml  # type: ignore[import-untyped]

PAGE, RULES = "docs/alerts.md", "dashboards/honed-alerts.yml"
HEAD = """# Alerts

`make reference` writes this page from `dashboards/honed-alerts.yml`, where the expressions are. None of these alerts means that
serving is broken: vLLM runs without honed, but slower or unobserved.
[Operate](operate.md#prometheus-and-grafana) says how to load the rules.
"""


def text(root: Path) -> str:
    """The page of a checkout."""
    parts = [HEAD]
    for group in yaml.safe_load((root / RULES).read_text())["groups"]:
        for rule in group["rules"]:
            told = {name: _plain(one) for name, one in rule["annotations"].items()}
            since = f", after {rule['for']}" if "for" in rule else ""
            steps = re.sub(r" (\d+)\. ", r"\n\1. ", told["runbook"])
            parts.append(
                f"## {rule['alert']}\n\n{rule['labels']['severity'].capitalize()}{since}: {told['summary']}.\n"
                f"{told['description']}\n\n{steps}\n"
            )
    return "\n".join(parts)


def _plain(template: str) -> str:
    """A template of Prometheus with names in the place of labels and values."""
    template = re.sub(r"{{ \$labels\.(\w+) }}", lambda match: f"*{match[1]}*", template)
    return re.sub(r"{{ \$value[^}]*}}", "*value*", template).strip()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    (folder / PAGE).write_text(text(folder))
