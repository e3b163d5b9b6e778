"""Every query that a person or a rule asks runs on a real Prometheus, and has data of what test_events.py did."""

from __future__ import annotations

import time

from tests.dashboards.contents import (
    ALERTS,
    FOREIGN,
    METRIC,
    RECORDED,
    RECORDING,
    annotation_queries,
    fill,
    panel_queries,
    rules,
    variable_queries,
)
from tests.observability.stack import Stack

INTERVAL = "4s"


def test_every_panel_has_data(stack: Stack) -> None:
    end_s = time.time()
    empty = [
        (query.where, query.expr)
        for query in panel_queries()
        if not stack.prometheus.during(query.filled(INTERVAL), stack.start_s, end_s)
    ]
    assert not empty


def test_every_panel_shows_the_chosen_host_alone(stack: Stack) -> None:
    here, there = stack.instances
    for query in panel_queries():
        end_s = time.time()
        for instance, neighbour in ((here, there), (there, here)):
            series = stack.prometheus.span(query.filled(INTERVAL, instance), stack.start_s, end_s)
            found = {host_of(one["metric"]["instance"]) for one in series}
            assert found <= {host_of(instance)}, (query.where, instance, neighbour)
            assert found or instance == there, query.where


def host_of(instance: str) -> str:
    return instance.rpartition(":")[0]


def test_no_recording_rule_mixes_hosts(stack: Stack) -> None:
    known = {host_of(instance) for instance in stack.instances}
    for rule in rules(RECORDING):
        for one in stack.prometheus.span(rule["record"], stack.start_s, time.time()):
            labels = one["metric"]
            assert (labels.get("host") or host_of(labels["instance"])) in known, rule["record"]


def test_every_annotation_has_marks(stack: Stack) -> None:
    empty = [
        query.where
        for query in annotation_queries()
        if not stack.prometheus.during(query.filled(INTERVAL), stack.start_s, time.time())
    ]
    assert not empty


def test_every_variable_has_values(stack: Stack) -> None:
    asked = variable_queries()
    assert len(asked) == 6
    for selector, label in asked:
        series = stack.prometheus.series(fill(selector), stack.start_s)
        assert series, selector
        assert all(one.get(label) for one in series), (selector, label)


def test_every_recording_rule_records(stack: Stack) -> None:
    names = [rule["record"] for rule in rules(RECORDING)]
    empty = [name for name in names if not stack.prometheus.during(name, stack.start_s, time.time())]
    assert not empty


def test_every_alert_is_evaluated_and_what_it_looks_at_is_there(stack: Stack) -> None:
    found = {rule["name"]: rule for rule in stack.prometheus.rules()}
    for rule in rules(ALERTS):
        assert found[rule["alert"]]["health"] == "ok", found[rule["alert"]]
        looked_at = [
            name + (f"{{{labels}}}" if labels else "")
            for pattern in (METRIC, FOREIGN)
            for name, labels in pattern.findall(rule["expr"])
        ]
        looked_at += RECORDED.findall(rule["expr"])
        assert looked_at
        for selector in looked_at:
            assert stack.prometheus.during(selector, stack.start_s, time.time()), (rule["alert"], selector)


def test_only_what_happened_fires(stack: Stack) -> None:
    firing = {one["labels"]["alertname"] for one in stack.alertmanager.alerts()}
    # Answers come from a loaded two-core machine, so latency while training may well be worse; nothing else is.
    assert firing - {"HonedTrainerHurtsLatency", "HonedAcceptanceRegressed"} == {"HonedRolledBack"}
