"""Rules and configuration as promtool sees them: each alert fires when it should and is silent when it shouldn't."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from honed.daemon.metrics.render import render
from honed.daemon.service import Service
from tests.daemon.fake_engine import FakeEngine
from tests.dashboards.contents import ALERTS, FOLDER, RECORDING, rules
from tests.tools import needs, path_of

CASES = Path(__file__).with_name("alert_cases.yml")


def promtool(*arguments: object, given: bytes | None = None) -> str:
    """Run it; what it says when all is well."""
    command = [path_of("promtool"), *map(str, arguments)]
    done = subprocess.run(command, input=given, capture_output=True, check=False, timeout=120)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def cases() -> dict[str, Any]:
    """The cases, with the annotations of what should fire filled in from the rules."""
    document: dict[str, Any] = yaml.safe_load(CASES.read_text())
    annotations = {rule["alert"]: rule["annotations"] for rule in rules(ALERTS)}
    for test in document["tests"]:
        for case in test["alert_rule_test"]:
            for alert in case.get("exp_alerts", []):
                texts, value = annotations[case["alertname"]], alert.pop("value", "")
                alert["exp_annotations"] = {name: rendered(text, alert["exp_labels"], value) for name, text in texts.items()}
    return document


def rendered(text: str, labels: dict[str, str], value: str) -> str:
    text = re.sub(r"{{ \$labels\.(\w+) }}", lambda match: labels[match[1]], text)
    assert value or "$value" not in text, f"the case has no value for: {text}"
    return re.sub(r"{{ \$value[^}]*}}", value, text)


def beside_a_healthy_host(document: dict[str, Any]) -> dict[str, Any]:
    """The same cases, each on a Prometheus that also scrapes a host where all is well, with the same names on it."""
    well, *sick = document["tests"]
    assert well["name"] == "all is well"
    neighbour = [
        {"series": one["series"].replace('instance="a:', 'instance="well:'), "values": one["values"].replace("7x", "0x")}
        for one in well["input_series"]
    ]
    return document | {"tests": [test | {"input_series": test["input_series"] + neighbour} for test in sick]}


def test_every_alert_has_a_case_where_it_fires_and_one_where_it_does_not() -> None:
    all_cases = [case for test in yaml.safe_load(CASES.read_text())["tests"] for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in rules(ALERTS)}
    assert {case["alertname"] for case in all_cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in all_cases if not case.get("exp_alerts")} == names


@needs("promtool")
@pytest.mark.parametrize("change", [lambda document: document, beside_a_healthy_host], ids=["alone", "beside a healthy host"])
def test_alerts_fire_when_they_should(tmp_path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    for path in (ALERTS, RECORDING):
        shutil.copy(path, tmp_path)
    filled = tmp_path / "cases.yml"
    filled.write_text(yaml.safe_dump(change(cases())))
    assert "SUCCESS" in promtool("test", "rules", filled)


@needs("promtool")
@pytest.mark.parametrize("path", [ALERTS, RECORDING], ids=lambda path: path.stem)
def test_rules_are_well_formed(path: Path) -> None:
    assert f"{len(rules(path))} rules found" in promtool("check", "rules", path)


@needs("promtool")
def test_the_example_configuration_loads_the_rules() -> None:
    said = promtool("check", "config", FOLDER / "prometheus.yml")
    assert said.count("rules found") == 2


@needs("promtool")
def test_promtool_finds_nothing_wrong_with_the_metrics(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    engine.hello()
    engine.send(engine.batch(1))
    engine.send_status()
    engine.wait_acked(1)
    assert promtool("check", "metrics", given=render(service)) == ""


def test_provisioning_files_say_where_things_are() -> None:
    provider = yaml.safe_load((FOLDER / "grafana-dashboards.yml").read_text())["providers"][0]
    assert (provider["type"], provider["allowUiUpdates"]) == ("file", False)
    source = yaml.safe_load((FOLDER / "grafana-datasource.yml").read_text())["datasources"][0]
    assert source["type"] == "prometheus"
    scrapes = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    # $__rate_interval is made of the data source's interval: it has to be that of the scrapes.
    assert {source["jsonData"]["timeInterval"]} == {scrape["scrape_interval"] for scrape in scrapes}
    assert "honed" in {scrape["job_name"] for scrape in scrapes}
