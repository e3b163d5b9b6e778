"""Clients that send a label for every request: the number of workloads stays bounded, and operators are told."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from honed.adapt.protocol.workloads import DEFAULT_WORKLOAD, MAX_WORKLOADS, OTHER_WORKLOAD
from honed.daemon.service import Service
from honed.daemon.views import views
from honed.daemon.views.findings import FEWER_LABELS, findings
from tests.daemon.conftest import wait_for
from tests.daemon.exposition import scrape
from tests.daemon.fake_engine import FakeEngine, make_batch


def told(service: Service) -> list[str]:
    return [one.text for one in findings(views.status(service)) if one.cure.endswith(FEWER_LABELS)]


def send(engine: FakeEngine, seq: int, labels: list[str]) -> None:
    batch = make_batch(seq, engine_id=engine.engine_id, rounds=len(labels), workloads=labels)
    batch.rounds.workload[:] = range(len(labels))
    engine.send(batch)
    engine.wait_acked(seq)


def test_labels_of_all_engines_beyond_the_bound_count_as_other(
    service: Service, make_engine: Callable[..., FakeEngine]
) -> None:
    for number in range(2):
        engine = make_engine(engine_id=f"engine-{number}")
        engine.hello()
        send(engine, 1, [f"user-{number}-{user}" for user in range(MAX_WORKLOADS - 2)])
        assert bool(told(service)) == bool(number), "one engine's labels fit, both engines' don't"
    names = {row["workload"] for row in views.workloads(service, 0.0)}
    assert len(names | {DEFAULT_WORKLOAD}) == MAX_WORKLOADS
    assert OTHER_WORKLOAD in names
    for _ in range(2):  # a scrape counts nothing itself
        assert scrape(service)["honed_workload_labels_pooled_total"] == {"": MAX_WORKLOADS - 2}
    (text,) = told(service)
    assert text == "all engines together send more than 64 workload labels within 10 minutes: the rest counts as 'other'"


@pytest.mark.parametrize("pooled", [0, 1234])
def test_an_engine_that_has_pooled_requests_is_named(
    service: Service, make_engine: Callable[..., FakeEngine], pooled: int
) -> None:
    engine = make_engine()
    engine.hello()
    engine.send_status(pooled_requests=pooled)
    wait_for(lambda: service.engines.by_id["engine-0"].status is not None, "the status")
    assert list(scrape(service)["honed_requests_pooled_total"].values()) == [pooled]
    (shown,) = views.engines(service)
    assert shown["pooled_requests"] == pooled
    texts = [
        "engine engine-0: 1,234 requests counted as workload 'other': "
        "clients send more than 64 workload labels within 10 minutes"
    ]
    assert told(service) == (texts if pooled else [])


def test_rounds_that_the_metrics_pool_are_told(
    service: Service, make_engine: Callable[..., FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.live, "_limit", 3)
    engine = make_engine()
    engine.hello()
    send(engine, 1, [f"kind-{number}" for number in range(4)])
    rounds = scrape(service)["honed_rounds_pooled_total"][""]
    assert rounds > 0
    (text,) = told(service)
    assert text == f"the metrics count {rounds:.0f} rounds as workload 'other': too many engines, workloads and versions"
