from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import Any

import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from honed.adapt.protocol import wire
from honed.daemon.api.app import make_app, make_read_only_app
from honed.daemon.api.limits import TokenBucket
from honed.daemon.errors import StoreError, there_are
from honed.daemon.service import Service
from honed.daemon.settings.sections import ControllerSection
from honed.daemon.settings.settings import Settings
from honed.daemon.views import views
from honed.daemon.views.engine_view import EngineView
from tests.daemon.conftest import Clock, wait_for, wait_learned
from tests.daemon.fake_engine import FakeEngine, FakeTrainer


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_app(service)) as opened:
        yield opened


@pytest.fixture
def engine(service: Service, make_engine: Callable[..., FakeEngine]) -> FakeEngine:
    """An engine with one stored batch: 8 rounds of 3 drafts, accepted 0, 1, 2, 3, 0, …"""
    made = make_engine()
    made.hello()
    made.send(made.batch(1))
    made.wait_acked(1)
    return made


READING = [
    "/v1/status",
    "/v1/config",
    "/v1/engines",
    "/v1/workloads",
    "/v1/timeline",
    "/v1/drafters",
    "/v1/operations",
    "/v1/overrides",
    "/v1/audit",
    "/v1/batches",
    "/healthz",
    "/readyz",
    "/metrics",
    "/openapi.json",
]


@pytest.mark.parametrize("path", READING)
def test_everything_can_be_read_while_nothing_is_there(client: TestClient, path: str) -> None:
    assert client.get(path).status_code == 200


def test_engines_show_which_cuda_graphs_were_captured(client: TestClient, make_engine: Callable[..., FakeEngine]) -> None:
    """Operators are told to look there; the two were made and then left out of the answer."""
    make_engine().hello(captured_tokens=[8, 16, 32], captured_lengths=[3, 7])
    (shown,) = client.get("/v1/engines").json()
    assert (shown["captured_tokens"], shown["captured_lengths"]) == ([8, 16, 32], [3, 7])


def test_an_answer_leaves_out_nothing_that_its_view_has(
    client: TestClient, service: Service, engine: FakeEngine, settings: Settings
) -> None:
    """A field that is made but isn't in the answer's schema would be dropped without a word."""
    with closing(FakeTrainer(settings.paths.engine_socket)) as trainer:
        trainer.introduce()
        wait_for(lambda: service.trainer.is_connected, "the trainer")
    wait_learned(service)
    assert names_of(client.get("/v1/status").json()) == names_of(views.status(service))
    assert names_of(client.get("/v1/engines").json()) == names_of(views.engines(service))
    assert names_of(client.get("/v1/workloads").json()) == names_of(views.workloads(service, 300.0))
    schema = client.get("/openapi.json").json()["components"]["schemas"]["EngineView"]
    assert set(schema["properties"]) == {field.name for field in dataclasses.fields(EngineView)}


def names_of(document: Any) -> Any:
    """A document without its values."""
    if isinstance(document, dict):
        return {name: names_of(value) for name, value in document.items()}
    return [names_of(one) for one in document] if isinstance(document, list) else None


def test_status_and_workloads_show_what_was_stored(client: TestClient, engine: FakeEngine, service: Service) -> None:
    status = client.get("/v1/status").json()
    assert status["acceptance"]["total"] == {
        "rounds": 8,
        "draft_tokens": 24,
        "accepted_tokens": 12,
        "acceptance_length": 2.5,
        "acceptance_rate": 0.5,
        "draft_tokens_per_round": 3.0,
        "delivered_tokens": 20,
        "tokens_per_round": 2.5,
    }
    view = status["engines"][0]
    assert (view["connected"], view["rounds"], view["accepted_by_position"]) == (True, 8, [6, 4, 2])
    for window in (0, 300, 7200, 100_000):
        row = client.get(f"/v1/workloads?window_s={window}").json()[0]
        assert row["by_position"] == [6 / 8, 4 / 6, 2 / 4]
    points = client.get("/v1/timeline?resolution=1s&since=0&workload=default").json()["points"]
    assert sum(point["rounds"] for point in points) == 8
    assert client.get("/v1/timeline?resolution=1s&since=0&workload=x").json()["points"] == []
    assert [row["seq"] for row in client.get("/v1/batches?after=0").json()] == [1]
    assert client.get("/v1/batches?after=1").json() == []
    wait_learned(service)
    assert client.get("/v1/engines/engine-0/beliefs").json()["workloads"]["default"]["rounds"] > 0


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/engines/x/beliefs", None, 404),
        ("GET", "/v1/operations/x", None, 404),
        ("GET", "/v1/timeline?resolution=2s", None, 422),
        ("GET", "/v1/workloads?window_s=-1", None, 422),
        ("GET", "/v1/batches?after=99999999999999999999999", None, 422),
        ("GET", "/v1/batches?afer=1", None, 422),
        ("GET", "/v1/status?x=1", None, 422),
        ("GET", "/v1/status/", None, 404),
        ("OPTIONS", "/v1/status", None, 405),
        ("DELETE", "/v1/status", None, 405),
        ("POST", "/v1/recalibrations", {"engine": "x"}, 422),
        ("POST", "/v1/recalibrations", {"scope": "all"}, 422),
        ("POST", "/v1/recalibrations", {"dry_run": 1}, 422),
        ("POST", "/v1/recalibrations", {}, 409),
        ("POST", "/v1/drafters/v0001-00000000:promote", {}, 404),
        ("POST", "/v1/drafters/..%2f..:promote", {}, 404),
        ("POST", "/v1/drafters:rollback", {}, 409),
        ("POST", "/v1/operations/x:cancel", {}, 404),
        ("PUT", "/v1/overrides/nonsense", {"value": 1, "ttl_s": 1}, 404),
        ("PUT", "/v1/overrides/draft_tokens", {"value": 1.5, "ttl_s": 1}, 422),
        ("PUT", "/v1/overrides/draft_tokens", {"value": 1}, 422),
        ("PUT", "/v1/overrides/policy", {"value": "best", "ttl_s": 1}, 422),
        ("DELETE", "/v1/overrides/policy", None, 404),
    ],
)
def test_errors_are_problem_documents(
    client: TestClient, method: str, path: str, body: dict[str, object] | None, status: int
) -> None:
    answer = client.request(method, path, json=body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    document = answer.json()
    assert document["status"] == status
    assert document["title"]
    assert document["detail"]


@pytest.mark.fault("a library's own words about a wrong value")
@pytest.mark.parametrize(
    ("path", "body", "says", "cure"),
    [
        ("overrides/draft_tokens", {"value": 3, "ttl_s": 60 * 86400}, "ttl_s must be at most 2_592_000", ""),
        ("overrides/draft_tokens", {"value": 3, "ttl_s": 0}, "ttl_s must be above 0", ""),
        ("overrides/draft_tokens", {"value": True, "ttl_s": 1}, "value must be a whole number or a number or a text", ""),
        ("overrides/draft_tokens", {"value": "x" * 201, "ttl_s": 1}, "value must have at most 200 characters", ""),
        ("overrides/draft_tokens", {"value": 3}, "ttl_s is missing", "It takes reason, value, ttl_s."),
        ("overrides/draft_tokens", [], "the body must be a group of keys with values", "It takes reason, value, ttl_s."),
        (
            "recalibrations",
            {"max_secondz": 1},
            "max_secondz is unknown; did you mean max_seconds?",
            "It takes reason, engine_id",
        ),
        ("recalibrations", {"scope": "all"}, "scope must be '', 'kv-frozen' or 'full'", ""),
        ("recalibrations", {"dry_run": 1}, "dry_run must be true or false", ""),
        ("recalibrations", {"workloads": ["a", 1]}, "workloads.1 must be a text", ""),
        ("recalibrations", b"{", "the body isn't JSON (", "It takes reason, engine_id"),
        ("drafters:rollback", {"reason": 5}, "reason must be a text", ""),
        ("drafters:rollback", {"raison": "x"}, "raison is unknown; did you mean reason?", "It takes reason, version, dry_run."),
        ("drafters/x:promote", {"force": "yes"}, "force must be true or false", ""),
    ],
)
def test_a_wrong_value_is_one_plain_sentence(client: TestClient, path: str, body: Any, says: str, cure: str) -> None:
    method, content = "PUT" if "overrides" in path else "POST", body if isinstance(body, bytes) else json.dumps(body)
    answer = client.request(method, f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 422
    assert answer.json()["detail"].startswith(says)
    assert (answer.json()["cure"] or "-").startswith(cure or "-")


@pytest.mark.parametrize("kind", ["", "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_sent_as_json_is_told_how_to_send_it(client: TestClient, kind: str) -> None:
    answer = client.post("/v1/recalibrations", content=b'{"reason": "x"}', headers={"content-type": kind} if kind else {})
    document = answer.json()
    assert answer.status_code == 422
    assert document["detail"] == f"the body is sent {f'as {kind}' if kind else 'without a type'}"
    assert document["cure"] == "Send it as `Content-Type: application/json`."


@pytest.mark.parametrize(
    ("method", "path", "says", "cure"),
    [
        ("GET", "/v1/nothing", "GET /v1/nothing isn't a route of", "/openapi.json"),
        ("GET", "/v1/engines/x/beliefs", "no engine 'x' is known; there is engine-0", "engines`"),
        ("GET", "/v1/operations/x", "no operation 'x'; there are none", "honed operations"),
        ("POST", "/v1/operations/x:cancel", "no operation 'x'; there are none", "honed operations"),
        ("POST", "/v1/recalibrations", "no trainer is connected", "honed train"),
        ("POST", "/v1/drafters/v0001-00000000:promote", "'v0001-00000000'; there are none", "honed drafters"),
        ("POST", "/v1/drafters:rollback", "no previous drafter to go back to; active is none", "honed promote VERSION"),
        ("DELETE", "/v1/overrides/policy", "no override 'policy' is in force; there are none", "honed override list"),
        ("GET", "/v1/batches?afer=1", "unknown parameter 'afer'; did you mean after?", "It takes after, limit."),
        ("GET", "/v1/status?x=1", "unknown parameter 'x'", "It takes no parameters."),
        ("DELETE", "/v1/overrides", "/v1/overrides doesn't take DELETE", "It takes GET."),
    ],
)
def test_what_is_missing_or_in_the_way_comes_with_what_there_is_and_what_to_do(
    client: TestClient, engine: FakeEngine, method: str, path: str, says: str, cure: str
) -> None:
    document = client.request(method, path, json=None if method in ("GET", "DELETE") else {}).json()
    assert says in document["detail"]
    assert cure in document["cure"]


@pytest.mark.parametrize(
    ("names", "says"),
    [([], "there are none"), (["a"], "there is a"), ("ab", "there are a, b"), ("abcdefg", "there are 7, lastly c, d, e, f, g")],
)
def test_what_exists_is_listed_shortly(names: Iterable[str], says: str) -> None:
    assert there_are(names) == says


@pytest.mark.parametrize(
    ("path", "allow"),
    [("/v1/overrides/policy", "DELETE, PUT"), ("/v1/operations/x:cancel", "POST"), ("/v1/operations/x", "GET")],
)
def test_a_wrong_method_is_told_which_there_are(client: TestClient, path: str, allow: str) -> None:
    assert client.options(path).headers["allow"] == allow


def test_an_override_reaches_the_engine_and_ends(client: TestClient, engine: FakeEngine, service: Service) -> None:
    made = client.put("/v1/overrides/draft_tokens", json={"value": 1, "ttl_s": 60, "reason": "test"})
    assert made.status_code == 200
    engine.expect(wire.Policy, lambda p: p.kind == "static" and p.static_k == 1 and p.override == "draft_tokens")
    assert client.get("/v1/overrides").json()[0]["reason"] == "test"
    assert client.delete("/v1/overrides/draft_tokens").status_code == 204
    engine.expect(wire.Policy, lambda p: p.override == "")
    assert [row["action"] for row in client.get("/v1/audit").json()] == ["override.clear", "override.set"]


def test_more_draft_tokens_than_any_engine_has_are_refused(
    client: TestClient, engine: FakeEngine, make_engine: Callable[..., FakeEngine]
) -> None:
    answer = client.put("/v1/overrides/draft_tokens", json={"value": 4, "ttl_s": 60})
    assert answer.status_code == 422
    assert answer.json()["detail"] == "draft_tokens 4 is more than any connected engine can draft (engine-0 3)"
    assert "Give 0 to 3" in answer.json()["cure"]
    assert client.get("/v1/overrides").json() == []
    assert client.put("/v1/overrides/draft_tokens", json={"value": 3, "ttl_s": 60}).status_code == 200
    make_engine(engine_id="engine-1").hello(num_spec_tokens=7)
    assert client.put("/v1/overrides/draft_tokens", json={"value": 7, "ttl_s": 60}).status_code == 200
    engine.expect(wire.Policy, lambda policy: policy.kind == "static" and policy.static_k == 3)


def test_without_an_engine_any_reasonable_number_is_taken(client: TestClient) -> None:
    assert client.put("/v1/overrides/draft_tokens", json={"value": 9, "ttl_s": 60}).status_code == 200
    assert client.put("/v1/overrides/draft_tokens", json={"value": 9999, "ttl_s": 60}).status_code == 422


def test_policy_table_without_a_table_is_refused(client: TestClient) -> None:
    answer = client.put("/v1/overrides/policy", json={"value": "table", "ttl_s": 60})
    assert answer.status_code == 422
    assert "needs a table" in answer.json()["detail"]
    assert "controller.table" in answer.json()["cure"]


def test_policy_table_lives_as_long_as_the_settings_have_a_table(settings: Settings) -> None:
    settings.paths.state_dir.mkdir()
    settings.paths.runtime_dir.mkdir()
    with_table = ControllerSection.model_validate({"table": ((4, 5), (16, 2))})
    for controller, names in ((with_table, ["policy"]), (with_table, ["policy"]), (ControllerSection(), [])):
        service = Service(settings.model_copy(update={"controller": controller}), daemon_id="test")
        service.start()
        with TestClient(make_app(service)) as client:
            if service.overrides.listing() == [] and names:
                client.put("/v1/overrides/policy", json={"value": "table", "ttl_s": 60})
            assert [one["name"] for one in client.get("/v1/overrides").json()] == names
            last = client.get("/v1/audit").json()[0]
        service.stop()
    assert (last["actor"], last["action"]) == ("honed", "override.clear")
    assert "needs a table" in last["reason"]


@pytest.mark.fault("overrides that aren't finite numbers")
@pytest.mark.parametrize("name", ["draft_tokens", "capture_share", "policy"])
@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", "1" + "0" * 400, "true", "1e308"])
def test_a_number_that_is_none_is_refused(client: TestClient, service: Service, name: str, value: str) -> None:
    body = f'{{"value": {value}, "ttl_s": 60}}'
    answer = client.put(f"/v1/overrides/{name}", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    answer = client.put("/v1/overrides/policy", content=f'{{"value": "off", "ttl_s": {value}}}')
    assert answer.status_code == 422, answer.text
    assert service.overrides.listing() == []


def test_an_override_whose_time_is_over_is_gone(client: TestClient, service: Service) -> None:
    client.put("/v1/overrides/draft_tokens", json={"value": 1, "ttl_s": 60})
    with service.lock:
        service.overrides._monotonic = lambda: service.monotonic() + 61
        service.overrides.expire()
    assert client.get("/v1/overrides").json() == []


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_an_override_lasts_as_long_as_it_was_asked_to_though_somebody_sets_the_clock(
    client: TestClient, service: Service, jump_s: float
) -> None:
    client.put("/v1/overrides/draft_tokens", json={"value": 1, "ttl_s": 600})
    with service.lock:
        service.overrides._clock = lambda: service.clock() + jump_s
        service.overrides.expire()
        (active,) = service.overrides.active()
        assert active.until_s - service.monotonic() == pytest.approx(600, abs=20)
    (shown,) = client.get("/v1/overrides").json()
    assert shown["ttl_s"] == pytest.approx(600, abs=20)
    assert shown["until_unix_s"] == pytest.approx(service.clock() + jump_s + 600, abs=20)


def test_the_override_that_was_set_later_counts_after_a_restart_though_the_clock_was_set_back(settings: Settings) -> None:
    """`policy off`, set against trouble, gave way to an older length at the daemon's restart."""
    settings.paths.state_dir.mkdir()
    settings.paths.runtime_dir.mkdir()
    service = Service(settings, daemon_id="one")
    service.start()
    with TestClient(make_app(service)) as client:
        client.put("/v1/overrides/draft_tokens", json={"value": 2, "ttl_s": 86_400})
        service.overrides._clock = lambda: service.clock() - 3600.0
        client.put("/v1/overrides/policy", json={"value": "off", "ttl_s": 86_400})
    service.stop()
    for name, last in (("two", "policy"), ("three", "draft_tokens")):
        service = Service(settings, daemon_id=name)
        service.start()
        with TestClient(make_app(service)) as client:
            client.put("/v1/overrides/capture_share", json={"value": 0.5, "ttl_s": 60})
            names = [one.name for one in service.overrides.active()]
            assert names[-2:] == [last, "capture_share"]
            client.put("/v1/overrides/draft_tokens", json={"value": 2, "ttl_s": 86_400})
            client.delete("/v1/overrides/capture_share")
        service.stop()


def test_pausing_is_remembered(client: TestClient, service: Service) -> None:
    assert client.post("/v1/training:pause").status_code == 202
    assert service.trainer.is_paused
    assert client.post("/v1/training:resume", json={"reason": "go"}).status_code == 202
    assert not service.trainer.is_paused


def test_a_body_beyond_the_limit_is_refused(client: TestClient) -> None:
    big = b'{"reason": "' + b"x" * 70_000 + b'"}'
    refused = client.post("/v1/training:pause", content=big)
    assert (refused.status_code, refused.json()["cure"]) == (413, "Send less.")
    pieces = iter([big[:40_000], big[40_000:]])
    assert client.post("/v1/training:pause", content=pieces).status_code == 413


def test_too_many_changes_are_refused_and_reading_goes_on(service: Service) -> None:
    now_s = service.monotonic()
    service.monotonic = lambda: now_s
    allowed = service.settings.http.mutations_per_minute
    with TestClient(make_app(service)) as client:
        answers = [client.post("/v1/training:resume") for _ in range(allowed + 1)]
        assert [one.status_code for one in answers] == [202] * allowed + [429]
        assert answers[-1].json()["cure"] == "Wait a moment."
        assert client.get("/v1/overrides").status_code == 200


def test_the_bucket_fills_again() -> None:
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert [bucket.take() for _ in range(61)] == [True] * 60 + [False]
    clock.now += 2
    assert [bucket.take() for _ in range(3)] == [True, True, False]


def test_metrics_parse_and_agree_with_what_was_stored(client: TestClient, engine: FakeEngine) -> None:
    engine.send_status(fallback="")
    families = {family.name: family for family in text_string_to_metric_families(client.get("/metrics").text)}
    assert families["honed_verify_rounds"].samples[0].value == 8
    assert [s.value for s in families["honed_position_accepted"].samples] == [6, 4, 2]
    length = {s.labels.get("le", s.name): s.value for s in families["honed_acceptance_length"].samples}
    assert length["1.0"] == 2
    assert length["+Inf"] == 8
    assert length["honed_acceptance_length_sum"] == 20
    for name, family in families.items():
        assert name.startswith(("honed_", "process_"))
        assert family.documentation
        for sample in family.samples:
            assert not {"request", "request_id"} & set(sample.labels)


def test_the_loopback_listener_only_reads_and_knows_its_own_name(service: Service) -> None:
    with TestClient(make_read_only_app(service), base_url="http://127.0.0.1:9464") as client:
        assert client.get("/metrics").status_code == 200
        assert client.get("/healthz").json() == {"status": "ok", "problems": []}
        elsewhere = client.get("/v1/status").json()
        assert (elsewhere["status"], elsewhere["detail"]) == (404, "GET /v1/status isn't a route of 127.0.0.1:9464")
        assert "honed's port for metrics" in elsewhere["cure"]
        assert str(service.settings.paths.admin_socket) in elsewhere["cure"]
        assert client.post("/healthz").status_code == 405
        assert client.get("/healthz", headers={"Host": "evil.example"}).status_code == 421


def test_readiness_tells_of_a_refusing_database(client: TestClient, service: Service) -> None:
    service.store.is_failing, service.store.last_error = True, "database or disk is full"
    answer = client.get("/readyz")
    assert answer.status_code == 503
    assert "disk is full" in answer.json()["problems"][0]
    assert client.get("/healthz").status_code == 200


def test_the_age_of_a_batch_that_never_came_is_no_number_of_years(client: TestClient) -> None:
    assert client.get("/v1/status").json()["events"]["batch_age_s"] == -1


def test_the_status_says_that_the_database_was_deleted(client: TestClient, service: Service) -> None:
    service.settings.paths.database.unlink()
    with pytest.raises(StoreError):
        service.store.write(lambda db: None)
    answer = client.get("/v1/status")
    assert answer.status_code == 200
    assert "was deleted" in answer.json()["store"]["last_error"]
