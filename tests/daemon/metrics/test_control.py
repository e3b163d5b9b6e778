from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from honed.adapt.protocol import wire
from honed.daemon.metrics.render import LiveCollector
from honed.daemon.service import Service
from honed.daemon.views import views
from tests.daemon.conftest import wait_for
from tests.daemon.exposition import scrape
from tests.daemon.fake_engine import FakeEngine

ENGINE = "engine=engine-0 model_name=tiny"


def attach(service: Service, make_engine: Callable[..., FakeEngine]) -> FakeEngine:
    engine = make_engine()
    engine.hello()
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    return engine


def test_load_and_lengths(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = attach(service, make_engine)
    engine.send_status(num_running=5, num_waiting=2, policy_age_s=0.25, decide_us_p99=40.0, log_us_p99=8.0, errors=3)
    wait_for(lambda: scrape(service).get("honed_engine_requests_running") == {ENGINE: 5}, "the status")
    found = scrape(service)
    assert found["honed_engine_connected"] == {ENGINE: 1}
    assert found["honed_engine_requests_waiting"] == {ENGINE: 2}
    assert found["honed_draft_tokens_per_round"] == {ENGINE: 3}
    assert found["honed_policy_age_seconds"] == {ENGINE: 0.25}
    assert found["honed_engine_decide_seconds"] == {ENGINE: 40e-6}
    assert found["honed_engine_log_seconds"] == {ENGINE: 8e-6}
    assert found["honed_engine_errors_total"] == {ENGINE: 3}
    engine.send(engine.batch(2, drafted=[1] * 8, accepted=[0] * 8))
    engine.wait_acked(2)
    assert scrape(service)["honed_draft_tokens_per_round"] == {ENGINE: 1}, "of now, not of the whole boot"


@pytest.mark.fault("gauges of an engine that is gone")
def test_an_engine_that_is_gone_leaves_its_counters_and_no_gauges(
    service: Service, make_engine: Callable[..., FakeEngine]
) -> None:
    engine = attach(service, make_engine)
    engine.send_status(errors=3)
    wait_for(lambda: ENGINE in scrape(service).get("honed_engine_errors_total", {}), "the status")
    kinds = {family.name: family.type for family in LiveCollector(service).collect()}
    before = scrape(service)
    service.engines._lost_after_s = -1.0
    after = scrape(service)
    of_engine = {name for name, series in before.items() if any("engine=" in labels for labels in series)}
    gone = {name for name in of_engine if name not in after}
    assert gone == {name for name in of_engine if kinds.get(name) == "gauge"} - {"honed_engine_connected"}
    assert {"honed_engine_requests_running", "honed_engine_info", "honed_policy_age_seconds"} < gone
    assert after["honed_engine_connected"] == {ENGINE: 0}
    assert after["honed_engine_errors_total"] == {ENGINE: 3}


def test_the_budget_is_what_the_policy_allows(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = attach(service, make_engine)
    engine.expect(wire.Policy)
    assert scrape(service)["honed_tree_budget_nodes"] == {ENGINE: 3}
    with service.lock:
        service.overrides.set("draft_tokens", 1, 60, "", "operator")
    service.steer(service.monotonic())
    found = scrape(service)
    assert found["honed_tree_budget_nodes"] == {ENGINE: 1}
    assert found["honed_override_active"] == {"name=capture_share": 0, "name=draft_tokens": 1, "name=policy": 0}
    assert found["honed_override_changes_total"]["change=set name=draft_tokens"] == 1
    with service.lock:
        service.overrides.clear("draft_tokens", "", "operator")
    found = scrape(service)
    assert found["honed_override_active"]["name=draft_tokens"] == 0
    assert found["honed_override_changes_total"]["change=cleared name=draft_tokens"] == 1


def test_of_two_overrides_the_one_set_later_counts(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine, generation = attach(service, make_engine), 0
    for name, value, kind in (("policy", "off", "off"), ("draft_tokens", 1, "static"), ("policy", "off", "off")):
        with service.lock:
            service.overrides.set(name, value, 60, "", "operator")
        service.steer(service.monotonic())
        generation = engine.expect(wire.Policy, partial(is_newer, kind=kind, generation=generation)).generation
    with service.lock:
        assert [one.name for one in service.overrides.active()] == ["draft_tokens", "policy"]


def test_a_clock_that_was_set_back_changes_neither_order_nor_length(service: Service) -> None:
    overrides = service.overrides
    with service.lock:
        overrides.set("draft_tokens", 1, 3600, "", "operator")
        overrides._clock = lambda: service.clock() - 600
        overrides.set("policy", "off", 3600, "", "operator")
        assert [one.name for one in overrides.active()] == ["draft_tokens", "policy"]
        service.store.write(lambda db: None)
        overrides._clock = lambda: 1e9
        overrides.load()
        assert all(end_s <= service.monotonic() + 3600 for end_s in overrides._ends_s.values())


def is_newer(policy: wire.Policy, kind: str, generation: int) -> bool:
    """Whether a policy is of this kind and came after that generation."""
    return policy.kind == kind and policy.generation > generation


def test_an_overrides_end_is_counted(service: Service) -> None:
    with service.lock:
        service.overrides.set("policy", "latency", 60, "", "operator")
        service.overrides._monotonic = lambda: service.monotonic() + 61
        service.overrides.expire()
    assert scrape(service)["honed_override_changes_total"]["change=expired name=policy"] == 1


def test_reasons_stay_within_the_known_ones(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = attach(service, make_engine)
    from_attachment = ("off", "observe", "error", "unplanned")
    for seq, reason in enumerate(("policy", "explore", "made up", "made up, too", *from_attachment), start=2):
        batch = engine.batch(seq)
        batch.steps.decision[0] = reason
        engine.send(batch)
    engine.wait_acked(9)
    assert scrape(service)["honed_decisions_total"] == {
        **{f"{ENGINE} reason={reason}": 0 for reason in ("no_policy", "stale_policy")},  # so that the first is an increase
        f"{ENGINE} reason=policy": 1,
        f"{ENGINE} reason=explore": 1,
        f"{ENGINE} reason=static": 1,
        f"{ENGINE} reason=other": 2,
        **{f"{ENGINE} reason={reason}": 1 for reason in from_attachment},
    }


def test_drift_counts_from_zero_so_that_the_first_alarm_is_an_increase(
    service: Service, make_engine: Callable[..., FakeEngine]
) -> None:
    attach(service, make_engine)
    assert scrape(service)["honed_drift_detections_total"] == {f"{ENGINE} workload=default": 0}
    with service.lock:
        service.steering.alarms["engine-0", "default"] += 1
    assert scrape(service)["honed_drift_detections_total"] == {f"{ENGINE} workload=default": 1}


def test_fallbacks_name_themselves(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = attach(service, make_engine)
    engine.send_status(fallback="stale_policy")
    wait_for(lambda: scrape(service)["honed_fallback_active"][f"{ENGINE} reason=stale_policy"] == 1, "the fallback")
    assert sum(scrape(service)["honed_fallback_active"].values()) == 1


def test_predictions_stand_beside_what_was_measured(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = attach(service, make_engine)
    assert "honed_speedup_estimated_ratio" not in scrape(service), "nothing is known yet"
    seq = 2
    while "honed_speedup_estimated_ratio" not in scrape(service):
        assert seq < 600, "the step-time model never became ready"
        for _ in range(50):
            length = seq % 4
            engine.send(engine.batch(seq, drafted=[length] * 8, accepted=[min(length, 2)] * 8))
            seq += 1
        engine.wait_acked(seq - 1)
        wait_for(lambda: not service.steering.num_waiting, "the controller")
    found = scrape(service)
    assert 0 < found["honed_step_time_measured_seconds"][ENGINE] < 60
    assert found["honed_step_time_predicted_seconds"][ENGINE] > 0
    beliefs = views.beliefs(service, ["engine-0"])["engine-0"]
    assert found["honed_speedup_estimated_ratio"][ENGINE] == beliefs["speedup_estimate"]
