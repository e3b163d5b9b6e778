"""Dashboards and alerts: as generated, about metrics and labels that exist, and with data in them on a real Prometheus."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from honed.adapt import wire
from honed.daemon.metrics import render
from honed.daemon.service import Service
from honed.daemon.settings import Settings
from honed.dashboards import make_dashboards
from tests.daemon.conftest import DaemonProcess, wait_for
from tests.daemon.fake_engine import FakeEngine, FakeTrainer
from tests.daemon.test_lifecycle import write_checkpoint

FOLDER = Path(make_dashboards.__file__).parent
BOARDS = sorted(FOLDER.glob("*.json"))
ALERTS = FOLDER / "honed-alerts.yml"
TEST_ALERTS = Path(__file__).with_name("honed-alerts.test.yml")

MAYBE_EMPTY = {"honed_speedup_estimated_ratio"}
"""Exist once the controller has learnt what a step costs."""
SCRAPE_LABELS = {"job", "instance"}
VARIABLES = {"datasource", "job", "model_name", "engine", "workload"}

METRIC = re.compile(r"\b(honed_[a-z0-9_]+)\b(?:\{([^}]*)\})?")
MATCHER = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)")
GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"{tool} is not installed (Debian package prometheus)")


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def board_queries() -> list[str]:
    """Every PromQL text of the dashboards' panels and annotations."""
    found = []
    for path in BOARDS:
        board = json.loads(path.read_text())
        found += [target["expr"] for panel in panels(board) for target in panel["targets"]]
        found += [mark["expr"] for mark in board["annotations"]["list"]]
    return found


def alerts() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture
def exposed(service: Service, settings: Settings, folder: Path, make_engine: Callable[..., FakeEngine]) -> dict[str, set[str]]:
    """Metric -> its labels, of a daemon that an engine and a trainer talk to; no labels for a family without samples."""
    write_checkpoint(folder / "drafter", 0.0)
    engine = make_engine()
    engine.hello(drafter_path=str(folder / "drafter"))
    engine.send(engine.batch(1))
    engine.send_status()
    engine.wait_acked(1)
    trainer = FakeTrainer(settings.paths.engine_socket)
    trainer.introduce()
    trainer.send(wire.TrainerStatus(trainer_id="trainer-0", state="training", steps=3))
    wait_for(lambda: 'honed_trainer_state{state="training"} 1.0' in render(service).decode(), "the trainer's state")
    trainer.close()
    with service.lock:
        service.requests["GET", "/metrics", "200"] += 1
        service.steering.alarms["engine-0", "default"] += 1
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(render(service).decode()):
        found.setdefault(f"{family.name}_total" if family.type == "counter" else family.name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_committed_dashboards_are_what_the_script_makes() -> None:
    assert [path.name for path in BOARDS] == ["honed-overview.json"]
    made = make_dashboards.render(make_dashboards.overview())
    assert BOARDS[0].read_text() == made, "run: python dashboards/make_dashboards.py"


def test_every_dashboard_has_the_variables_and_uses_them() -> None:
    for path in BOARDS:
        board = json.loads(path.read_text())
        assert {variable["name"] for variable in board["templating"]["list"]} == VARIABLES
        assert {"vllm", "honed"} <= set(board["tags"])
        ids = [panel["id"] for panel in board["panels"]]
        assert len(set(ids)) == len(ids)
    for query in board_queries():
        assert all('job=~"$job"' in (labels or "") for _, labels in METRIC.findall(query)), query
        assert set(re.findall(r"\$(\w+)", query)) <= VARIABLES | {"__rate_interval"}, query


def test_descriptions_name_the_panels_metrics() -> None:
    for path in BOARDS:
        for panel in panels(json.loads(path.read_text())):
            names = {name for target in panel["targets"] for name, _ in METRIC.findall(target["expr"])}
            assert names
            assert set(METRIC.findall(panel["description"])) == {(name, "") for name in names}, panel["title"]


def test_denominators_are_guarded() -> None:
    for query in [*board_queries(), *(rule["expr"] for rule in alerts())]:
        for denominator in query.split(" / ")[1:]:
            assert denominator.startswith("("), query
            assert denominator.endswith("> 0)"), query


def test_metrics_and_labels_exist(exposed: dict[str, set[str]]) -> None:
    queries = [*board_queries(), *(rule["expr"] for rule in alerts())]
    for query in queries:
        labels = set(SCRAPE_LABELS)
        for name, matchers in METRIC.findall(query):
            assert name in exposed, f"{name} in {query}"
            if name in MAYBE_EMPTY:
                continue
            labels |= exposed[name]
            assert set(MATCHER.findall(matchers)) <= exposed[name] | SCRAPE_LABELS, query
        for grouping in GROUPING.findall(query):
            assert {label.strip() for label in grouping.split(",")} <= labels, query
    assert {name for query in queries for name, _ in METRIC.findall(query) if not exposed[name]} <= {
        "honed_events_received_total",
        "honed_event_queue_length",
        "honed_db_errors_total",
        *MAYBE_EMPTY,
    }


def test_legends_and_templates_name_labels_that_the_query_keeps(exposed: dict[str, set[str]]) -> None:
    texts = [
        (target["expr"], target["legendFormat"])
        for path in BOARDS
        for panel in panels(json.loads(path.read_text()))
        for target in panel["targets"]
    ]
    for query, legend in texts:
        grouped = GROUPING.search(query)
        name = METRIC.findall(query)[0][0]
        if name not in MAYBE_EMPTY:
            kept = {label.strip() for label in grouped[1].split(",")} if grouped else exposed[name]
            assert set(re.findall(r"{{(\w+)}}", legend)) <= kept, (query, legend)
    for rule in alerts():
        grouped = GROUPING.search(rule["expr"])
        kept = {label.strip() for label in grouped[1].split(",")} if grouped else SCRAPE_LABELS
        assert set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"]))) <= kept, rule["alert"]


def test_every_alert_has_a_case_where_it_fires_and_one_where_it_does_not() -> None:
    cases = [case for test in yaml.safe_load(TEST_ALERTS.read_text())["tests"] for case in test["alert_rule_test"]]
    names = {rule["alert"] for rule in alerts()}
    assert {case["alertname"] for case in cases if case.get("exp_alerts")} == names
    assert {case["alertname"] for case in cases if not case.get("exp_alerts")} == names


@needs("promtool")
def test_alerts_fire_when_they_should() -> None:
    done = subprocess.run(["promtool", "test", "rules", str(TEST_ALERTS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs("promtool")
def test_promtool_finds_nothing_wrong_with_the_metrics(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    engine.hello()
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    done = subprocess.run(["promtool", "check", "metrics"], input=render(service), capture_output=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, b"")


class Prometheus:
    """A real one that scrapes one address twice a second."""

    def __init__(self, folder: Path, target: str) -> None:
        config = {
            "global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"},
            "scrape_configs": [{"job_name": "honed", "static_configs": [{"targets": [target]}]}],
        }
        folder.mkdir()
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.port = free_port()
        arguments = [f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
        arguments += [f"--web.listen-address=127.0.0.1:{self.port}", "--log.level=error"]
        self.process = subprocess.Popen(["prometheus", *arguments])

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series that an expression has now."""
        answer = httpx2.get(f"http://127.0.0.1:{self.port}/api/v1/query", params={"query": expr}, timeout=20.0)
        assert answer.status_code == 200, (expr, answer.text)
        found: list[dict[str, Any]] = answer.json()["data"]["result"]
        return found

    def is_ready(self) -> bool:
        try:
            return httpx2.get(f"http://127.0.0.1:{self.port}/-/ready", timeout=5.0).status_code == 200
        except httpx2.TransportError:
            assert self.process.poll() is None
            return False

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(30)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture
def prometheus(daemon: DaemonProcess, folder: Path) -> Iterator[Prometheus]:
    address = f"127.0.0.1:{free_port()}"
    daemon.env["HONED_HTTP__METRICS_LISTEN"] = address
    daemon.start()
    running = Prometheus(folder / "prometheus", address)
    yield running
    running.close()


def fill(query: str) -> str:
    """The query as Grafana sends it with "All" chosen everywhere."""
    return re.sub(r"\$(job|model_name|engine|workload)\b", ".*", query.replace("$__rate_interval", "4s"))


def is_rare(query: str) -> bool:
    """Whether it may well be empty on a healthy server: estimates that take time, fallbacks, marks of swaps and roll-backs."""
    return METRIC.findall(query)[0][0] in {*MAYBE_EMPTY, "honed_fallback_active"} or query.startswith("increase(")


@needs("prometheus")
def test_every_panel_and_variable_has_data_under_traffic(daemon: DaemonProcess, prometheus: Prometheus, folder: Path) -> None:
    write_checkpoint(folder / "drafter", 0.0)
    engine = FakeEngine(daemon.runtime_dir / "engine.sock")
    engine.hello(drafter_path=str(folder / "drafter"))
    wait_for(prometheus.is_ready, "Prometheus")
    filled = [fill(query) for query in board_queries()]
    for query in filled:
        prometheus.query(query)  # those of rare things must at least be understood
    missing = [query for query in filled if not is_rare(query)]
    seq, deadline = 0, time.monotonic() + 60.0
    while missing and time.monotonic() < deadline:
        seq += 1
        engine.send(engine.batch(seq))
        engine.send_status()
        engine.wait_acked(seq)
        missing = [query for query in missing if not prometheus.query(query)]
    assert not missing
    for path in BOARDS:
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if found := re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]):
                series = prometheus.query(re.sub(r"\$\w+", ".*", found[1]))
                assert all(one["metric"].get(found[2]) for one in series), variable["name"]
                assert series, variable["name"]
    engine.close()
