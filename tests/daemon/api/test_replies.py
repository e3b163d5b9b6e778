"""Idempotency keys over the API: replayed, reused, and across a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.testclient import TestClient

from honed.daemon.api.app import make_app
from honed.daemon.api.replies import KEPT_S, MOST, Replies
from honed.daemon.errors import ReusedKeyError
from honed.daemon.service import Service
from honed.daemon.settings.settings import Settings
from tests.daemon.conftest import Clock


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_app(service)) as opened:
        yield opened


def key(name: str) -> dict[str, str]:
    return {"Idempotency-Key": name}


def test_the_same_change_twice_is_made_once(client: TestClient) -> None:
    body = {"value": 1, "ttl_s": 600, "reason": "once"}
    first = client.put("/v1/overrides/draft_tokens", json=body, headers=key("k"))
    again = client.put("/v1/overrides/draft_tokens", json=body, headers=key("k"))
    assert (first.status_code, again.status_code) == (200, 200)
    assert first.json() == again.json()
    assert client.delete("/v1/overrides/draft_tokens", headers=key("d")).status_code == 204
    assert client.delete("/v1/overrides/draft_tokens", headers=key("d")).status_code == 204
    assert client.delete("/v1/overrides/draft_tokens", headers=key("e")).status_code == 404
    assert [row["action"] for row in client.get("/v1/audit").json()] == ["override.clear", "override.set"]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/training:pause", {"reason": "another reason"}),
        ("POST", "/v1/training:resume", {"reason": "first"}),
        ("PUT", "/v1/overrides/policy", {"value": "off", "ttl_s": 60}),
        ("DELETE", "/v1/overrides/policy", None),
        ("POST", "/v1/samples:purge", {"reason": "first"}),
        ("POST", "/v1/recalibrations", {"reason": "first"}),
        ("POST", "/v1/drafters:rollback", {"reason": "first"}),
        ("POST", "/v1/drafters/v0001-00000000:promote", {"reason": "first"}),
        ("POST", "/v1/operations/op-1:cancel", {"reason": "first"}),
    ],
)
def test_a_key_replayed_for_another_change_is_refused(
    client: TestClient, service: Service, method: str, path: str, body: dict[str, Any] | None
) -> None:
    assert client.post("/v1/training:pause", json={"reason": "first"}, headers=key("k")).status_code == 202
    answer = client.request(method, path, json=body, headers=key("k"))
    assert (answer.status_code, answer.json()["title"]) == (422, "Key was used before")
    assert "fresh key" in answer.json()["cure"]
    assert service.trainer.is_paused
    assert len(client.get("/v1/audit").json()) == 1


def test_a_pause_outlasts_the_daemon(settings: Settings) -> None:
    settings.paths.state_dir.mkdir()
    settings.paths.runtime_dir.mkdir()
    for was_paused, change in ((False, "pause"), (True, "pause"), (True, "resume"), (False, "")):
        service = Service(settings, daemon_id="test")
        service.start()
        try:
            client = TestClient(make_app(service))
            assert client.get("/v1/status").json()["training_paused"] is was_paused
            if change:
                assert client.post(f"/v1/training:{change}", json={"reason": "an upgrade"}).status_code == 202
        finally:
            service.stop()


def test_what_failed_may_be_tried_again_under_its_key(client: TestClient) -> None:
    body = {"value": 1, "ttl_s": 60}
    assert client.put("/v1/overrides/nonsense", json=body, headers=key("k")).status_code == 404
    assert client.put("/v1/overrides/draft_tokens", json=body, headers=key("k")).status_code == 200


def test_an_operations_key_outlives_a_restart(settings: Settings) -> None:
    settings.paths.state_dir.mkdir()
    settings.paths.runtime_dir.mkdir()
    service = Service(settings, daemon_id="test")
    service.start()
    operation = service.operations.create("recalibrate", "training", "drill", "operator", "k")
    service.operations.note_request(operation, "request")
    service.stop()
    again = Service(settings, daemon_id="test")
    again.start()
    found = again.operations.by_key("k")
    again.stop()
    assert found is not None
    assert (found.operation_id, found.request_hash) == (operation.operation_id, "request")


def test_keys_are_forgotten_after_a_day_and_when_there_are_too_many() -> None:
    clock = Clock()
    replies = Replies(clock)
    replies.keep("old", "a", 1)
    with pytest.raises(ReusedKeyError):
        replies.find("old", "b")
    clock.now += KEPT_S + 1
    assert replies.find("old", "b") is None
    for number in range(MOST + 2):
        replies.keep(f"key-{number}", "a", number)
    assert replies.find("key-1", "a") is None
    assert replies.find("key-2", "a") == 2
    assert replies.find(None, "a") is None
