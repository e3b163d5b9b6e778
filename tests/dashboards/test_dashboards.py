"""Dashboards and rules: as generated, complete, and about metrics and labels that a daemon really exposes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from prometheus_client.parser import text_string_to_metric_families

from honed.adapt.protocol import wire
from honed.daemon.metrics.render import render
from honed.daemon.service import Service
from honed.daemon.settings.settings import Settings
from honed.dashboards.make import boards
from honed.dashboards.make.queries import DAEMON, VLLM
from tests.daemon.conftest import wait_for
from tests.daemon.fake_engine import FakeEngine, FakeTrainer
from tests.daemon.lifecycle.test_lifecycle import write_checkpoint
from tests.dashboards.contents import (
    ALERTS,
    BOARDS,
    FOLDER,
    FOREIGN,
    METRIC,
    RECORDED,
    all_queries,
    annotation_queries,
    board_of,
    panel_queries,
    panels,
    rules,
)

MAYBE_EMPTY = {
    "honed_speedup_estimated_ratio",
    "honed_step_time_predicted_seconds",
    "honed_step_time_measured_seconds",
    "honed_canary_log_evidence",
}
"""Exist once the controller has learnt what a step costs, or while a version is watched."""
SCRAPE_LABELS = {"job", "instance"}
VARIABLES = {"datasource", "job", "instance", "host", "model_name", "engine", "workload"}
MARKS = {"Swaps", "Promotions", "Roll-backs", "Drift", "Overrides", "Target updates"}
ENGINE_LABELS = {"model_name", "engine"}

UNITS = "short|none|s|bytes|percentunit|ops|reqps|suffix: (tokens|steps|rows)/s"
"""Of Grafana's units those that are used here. The linter doesn't know those with a suffix, Grafana does."""

MATCHER = re.compile(r"([a-z_]+)\s*(?:=~|!~|!=|=)")
GROUPING = re.compile(r"\b(?:by|on|group_right|group_left)\s*\(([^)]*)\)")
DENOMINATOR = re.compile(r" / (.)")


@pytest.fixture
def exposed(service: Service, settings: Settings, folder: Path, make_engine: Callable[..., FakeEngine]) -> dict[str, set[str]]:
    """Metric -> its labels, of a daemon that an engine and a trainer talk to; no labels for a family without samples."""
    write_checkpoint(folder / "drafter", 0.0)
    engine = make_engine()
    version = engine.hello(drafter_path=str(folder / "drafter")).drafter_version
    engine.send(engine.batch(1))
    engine.expect(wire.Policy)
    engine.send_status(drafter_version=version)
    engine.wait_acked(1)
    with closing(FakeTrainer(settings.paths.engine_socket)) as trainer:
        trainer.introduce()
        trainer.send(wire.TrainerStatus(trainer_id="trainer-0", state="training", steps=3))
        wait_for(lambda: 'honed_trainer_state{state="training"} 1.0' in render(service).decode(), "the trainer's state")
    with service.lock:
        service.requests["GET", "/metrics", "200"] += 1
        service.steering.alarms["engine-0", "default"] += 1
    found: dict[str, set[str]] = {name: set(ENGINE_LABELS) for name in MAYBE_EMPTY}
    promote_another(service, engine, version)
    for family in text_string_to_metric_families(render(service).decode()):
        found.setdefault(f"{family.name}_total" if family.type == "counter" else family.name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def promote_another(service: Service, engine: FakeEngine, first: str) -> None:
    """Promote a second version, which is on trial then."""
    second = service.drafters.registry.create(
        lambda folder: write_checkpoint(folder, 1.0), parent=first, target_path="/models/tiny"
    ).version
    with service.lock:
        service.lifecycle.promote(second, reason="", actor="test")
    engine.answer_swap()
    wait_for(lambda: service.rollout.trial is not None, "the trial")


def test_the_committed_dashboards_are_what_the_script_makes() -> None:
    assert {path.name for path in BOARDS} == set(boards.BOARDS)
    for path in BOARDS:
        made = boards.render(boards.BOARDS[path.name]())
        assert path.read_text() == made, "run: make dashboards"


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_dashboards_pass_through_the_sdk_unchanged(path: Path) -> None:
    """The SDK drops what it doesn't know, so a misspelt key would be missing afterwards."""
    register_default_plugins()
    text = path.read_text()
    again = json.dumps(Dashboard.from_json(json.loads(text)), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False)
    assert again + "\n" == text


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_every_dashboard_has_the_variables_the_marks_and_the_links(path: Path) -> None:
    board = board_of(path)
    assert {variable["name"] for variable in board["templating"]["list"]} == VARIABLES
    assert {mark["name"] for mark in board["annotations"]["list"]} == MARKS
    assert {"vllm", "honed"} <= set(board["tags"])
    assert [link["tags"] for link in board["links"]] == [["honed"]]
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    titles = [panel["title"] for panel in panels(board)]
    assert len(titles) >= 12


def test_every_query_is_filtered_by_the_variables() -> None:
    for query in [*panel_queries(), *annotation_queries()]:
        for name, labels in [*METRIC.findall(query.expr), *FOREIGN.findall(query.expr)]:
            # vLLM is another scrape job, on another port of the host.
            wanted = VLLM if name.startswith("vllm:") else DAEMON
            assert labels.startswith(wanted), (query.where, name)
        assert set(re.findall(r"\$(\w+)", query.expr)) <= VARIABLES | {"__rate_interval", "__range", "1"}, query.where


def test_no_sum_mixes_hosts() -> None:
    for query in all_queries():
        for grouping in re.findall(r"\bby \(([^)]*)\)", query.expr):
            assert {"instance", "host"} & {label.strip() for label in grouping.split(",")}, (query.where, grouping)
        assert not re.search(r"\b(sum|max|min|avg|count)\s*\((?!_)", re.sub(r"\w+_over_time", "", query.expr)), query.where
    for query in panel_queries():
        assert query.legend.startswith("{{instance}}"), query.where


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_what_grafanas_dashboard_linter_asks_for(path: Path) -> None:
    """Its rules that can be told from the JSON; two are beyond: counters shown as they are, and vLLM's job."""
    board = board_of(path)
    assert board["editable"] is False
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["label"] == "Data source"
    for name in ("job", "instance"):
        one = variables[name]
        assert (one["label"], one["multi"], one["allValue"]) == (name.capitalize(), True, ".+")
    for one in board["templating"]["list"]:
        if one["type"] == "query":
            assert one["refresh"] == 2
            assert one["datasource"]["uid"] == "${datasource}"
    for panel in panels(board):
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
        assert panel["datasource"]["uid"] == "${datasource}"
        if panel["type"] != "state-timeline":
            assert re.fullmatch(UNITS, panel["fieldConfig"]["defaults"]["unit"]), panel["title"]
        assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]
        for target in panel["targets"]:
            for span in re.findall(r"\b(?:i?rate)\([^\[]*\[([^\]]*)\]", target["expr"]):
                assert span == "$__rate_interval", panel["title"]
            for counter in re.findall(r"(\w*\(?)honed_\w+_total\b", target["expr"]):
                assert counter in ("rate(", "irate(", "increase("), panel["title"]


def test_descriptions_name_the_panels_metrics() -> None:
    for path in BOARDS:
        for panel in panels(board_of(path)):
            expressions = " ".join(target["expr"] for target in panel["targets"])
            names = {name for pattern in (METRIC, FOREIGN) for name, _ in pattern.findall(expressions)}
            assert names, panel["title"]
            listed = panel["description"].rpartition("Metrics: ")[2].rstrip(".").split(", ")
            assert set(listed) == names, panel["title"]
            assert panel["description"].index("Metrics: ") > 5, panel["title"]


def test_denominators_are_guarded() -> None:
    """Whatever is divided by stands in parentheses that end in `> 0`."""
    for query in all_queries():
        for match in DENOMINATOR.finditer(query.expr):
            inside = parenthesised(query.expr, match.start(1))
            assert inside.endswith("> 0"), query.where


def parenthesised(text: str, start: int) -> str:
    """What stands between the parenthesis at `start` and its partner."""
    assert text[start] == "(", text[start:]
    depth = 0
    for at in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return text[start + 1 : at]
    raise AssertionError(text)


def test_metrics_and_labels_exist(exposed: dict[str, set[str]]) -> None:
    for query in all_queries():
        labels = SCRAPE_LABELS | {"le"}
        for name, matchers in METRIC.findall(query.expr):
            assert name in exposed, f"{name} in {query.where}"
            labels |= exposed[name]
            assert set(MATCHER.findall(matchers)) <= exposed[name] | SCRAPE_LABELS, query.where
        if FOREIGN.search(query.expr) or RECORDED.search(query.expr):
            labels |= {"model_name", "engine", "workload"}
        if "label_replace" in query.expr or RECORDED.search(query.expr):
            labels |= {"host"}
        for grouping in GROUPING.findall(query.expr):
            assert {label.strip() for label in grouping.split(",") if label.strip()} <= labels, query.where


def test_nothing_that_should_have_samples_has_none(exposed: dict[str, set[str]]) -> None:
    """A family without labels has one sample, so what has no labels here is one of these, or was never filled."""
    plain = {name for query in all_queries() for name, _ in METRIC.findall(query.expr) if not exposed[name]}
    known = "event|last_event|controller_|db_|disk_|drift_alarms_|training_|gpu_|samples_|shared_registry_|swap_|canary_|start_"
    known += "|tick_|verdict_"
    assert all(re.match(rf"honed_({known})|process_", name) for name in plain), plain


def test_legends_and_templates_name_labels_that_the_query_keeps(exposed: dict[str, set[str]]) -> None:
    for query in [*panel_queries(), *annotation_queries()]:
        grouped = GROUPING.search(query.expr)
        names = METRIC.findall(query.expr)
        is_grouped = grouped is not None and not query.expr.startswith(("honed_", "increase("))
        kept = (
            {label.strip() for label in grouped[1].split(",")}
            if is_grouped and grouped
            else SCRAPE_LABELS | exposed.get(names[0][0] if names else "", set())
        )
        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= kept, (query.where, query.legend)


def test_every_alert_says_what_it_means_and_what_to_do() -> None:
    names = [rule["alert"] for rule in rules(ALERTS)]
    assert names == [
        "HonedDown",
        "HonedEventsLost",
        "HonedEventsStale",
        "HonedAcceptanceRegressed",
        "HonedNotDeciding",
        "HonedEngineErrors",
        "HonedSwapFailed",
        "HonedRolledBack",
        "HonedTrainerHurtsLatency",
        "HonedDatabaseErrors",
        "HonedDiskFilling",
        "HonedVersionMismatch",
        "HonedEngineGone",
        "HonedTrainerGone",
        "HonedTrainerPaused",
        "HonedRecalibrationsFailing",
        "HonedDriftUnanswered",
        "HonedSharedRegistryErrors",
        "HonedDrafterUnusable",
        "HonedVerdictDue",
    ]
    for rule in rules(ALERTS):
        assert rule["labels"]["severity"] in {"info", "warning", "critical"}
        assert set(rule["annotations"]) == {"summary", "description", "runbook", "runbook_url"}
        assert re.search(r"\$labels\.(instance|host) ", rule["annotations"]["summary"]), rule["alert"]
        assert rule["annotations"]["runbook"].startswith("1. ")
        # The case test renders nothing but labels and the value.
        templates = re.findall(r"{{(.*?)}}", json.dumps(rule["annotations"]))
        assert all(re.fullmatch(r" \$(labels\.\w+|value( \| humanize\w*)?) ", one) for one in templates), rule["alert"]
        assert "{{" not in rule["annotations"]["runbook"]


def test_runbooks_name_settings_and_metrics_that_exist(exposed: dict[str, set[str]], settings: Settings) -> None:
    known = settings.model_dump()
    for rule in rules(ALERTS):
        runbook = rule["annotations"]["runbook"]
        for section, name in re.findall(rf"\b({'|'.join(known)})\.([a-z_]+)", runbook):
            assert name in known[section], f"{section}.{name} in {rule['alert']}"
        for name, _ in METRIC.findall(runbook):
            assert name in exposed or name == "honed_session", f"{name} in {rule['alert']}"


def test_what_pre_emption_takes_from_users_stands_beside_the_whole_delay() -> None:
    [queries] = [
        [target["expr"] for target in panel["targets"]]
        for panel in panels(board_of(FOLDER / "honed-training.json"))
        if panel["title"] == "Pre-emptions"
    ]
    shown = {name for expr in queries for name, _ in METRIC.findall(expr) if name.endswith("_bucket")}
    both = {"honed_training_preemption_seconds", "honed_training_preemption_computing_seconds"}
    assert shown == {f"{name}_bucket" for name in both}
    [runbook] = [rule["annotations"]["runbook"] for rule in rules(ALERTS) if rule["alert"] == "HonedTrainerHurtsLatency"]
    assert '"Pre-emptions"' in runbook
    assert "p99 of computing" in runbook
