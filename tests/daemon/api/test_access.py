"""Who may do what over TCP: every route, with no token, the wrong one, the reading one, and the admin's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.testclient import TestClient

from honed.daemon.api.access import USER_ID, actor_of, needs
from honed.daemon.api.app import make_app
from honed.daemon.api.problems import finish
from honed.daemon.errors import SettingsError, StartError
from honed.daemon.service import Service
from honed.daemon.settings.tokens import Tokens, credential_folders, load_tokens

READ, ADMIN = "r" * 32, "a" * 64


@pytest.fixture
def tokens(tmp_path: Path) -> Tokens:
    (tmp_path / "honed-read-token").write_text(f"{READ}\n")
    (tmp_path / "honed-admin-token").write_text(ADMIN)
    return load_tokens(None, None, credential_folders({"CREDENTIALS_DIRECTORY": str(tmp_path)}))


@pytest.fixture
def client(service: Service, tokens: Tokens) -> Iterator[TestClient]:
    """A stranger at the TCP listener."""
    with TestClient(make_app(service, tokens), base_url="http://127.0.0.1:9465") as opened:
        yield opened


def operations(service: Service) -> list[tuple[str, str]]:
    """Every operation of the document, with something in the places of its parameters."""
    paths: dict[str, dict[str, Any]] = make_app(service).openapi()["paths"]
    found = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    return [(m, p.replace("{", "").replace("}", "")) for m, p in found]


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_no_operation_answers_without_its_token(client: TestClient, service: Service) -> None:
    for method, path in [*operations(service), ("GET", "/openapi.json"), ("GET", "/nothing"), ("OPTIONS", "/v1/status")]:
        for headers in ({}, bearer(""), bearer("x" * 32), bearer(READ[:-1]), bearer(f"{ADMIN}a"), {"Authorization": ADMIN}):
            answer = client.request(method, path, headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Bearer realm="honed"'), (method, path)
            assert answer.headers["content-type"] == "application/problem+json"


def test_a_wrong_token_is_told_from_none(client: TestClient) -> None:
    without, wrong = client.get("/v1/status").json(), client.get("/v1/status", headers=bearer("x" * 32)).json()
    assert (without["detail"], wrong["detail"]) == ("no token was given", "the token isn't one of this daemon's")
    assert "--token-file" in without["cure"]
    assert "restart it" in wrong["cure"]


def test_the_reading_token_reads_and_changes_nothing(client: TestClient, service: Service) -> None:
    for method, path in operations(service):
        if path.endswith(":follow"):
            continue  # it never ends
        body = {"value": 1, "ttl_s": 60} if method == "PUT" else None if method in ("GET", "DELETE") else {}
        status = client.request(method, path, headers=bearer(READ), json=body).status_code
        assert (status == 403) == (method != "GET"), (method, path, status)
    assert not service.trainer.is_paused
    assert client.get("/v1/audit", headers=bearer(READ)).json() == []


def test_the_admin_token_does_both(client: TestClient) -> None:
    assert client.post("/v1/training:pause", headers=bearer(ADMIN)).status_code == 202
    assert client.get("/v1/status", headers=bearer(ADMIN)).json()["training_paused"] is True
    (row,) = client.get("/v1/audit", headers=bearer(ADMIN)).json()
    assert (row["actor"], row["action"]) == ("admin token", "training.pause")


def test_a_user_without_a_name_is_a_number() -> None:
    """A container's, say. One with a name: see the command line's tests, which ask over the unix socket."""
    assert actor_of(Request({"type": "http", "state": {USER_ID: 4_000_000}})) == "user 4000000"


def test_two_tokens_at_once_are_none(client: TestClient) -> None:
    answer = client.get("/v1/status", headers=[("authorization", f"Bearer {ADMIN}"), ("authorization", f"Bearer {READ}")])
    assert answer.status_code == 401


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil:1", "", "127.0.0.1@evil", "[::2]"])
def test_a_forged_host_is_refused_whatever_token_it_has(client: TestClient, host: str) -> None:
    answer = client.get("/v1/status", headers=bearer(ADMIN) | {"Host": host})
    assert answer.status_code == 421
    assert "127.0.0.1" in answer.json()["cure"]


@pytest.mark.fault("an IPv6 address without a port as host")
@pytest.mark.parametrize("host", ["127.0.0.1:9465", "localhost", "LOCALHOST:80", "[::1]:9465", "[::1]", "::1"])
def test_its_own_names_are_known(client: TestClient, host: str) -> None:
    assert client.get("/v1/status", headers=bearer(READ) | {"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1/../v1/status/../training:pause",
        "//v1/training:pause",
        "/v1/status/../training:pause",
        "/v1/training%3Apause/",
        "/V1/training:pause",
        "/v1/./training:pause",
        "/v1/training:pause/",
        "/v1/training:pause;x=1",
        "/v1%2ftraining:pause",
    ],
)
def test_no_way_of_writing_a_path_gets_around_the_role(client: TestClient, service: Service, path: str) -> None:
    request = client.build_request("POST", "http://127.0.0.1:9465/", headers=bearer(READ), json={})
    request.url = request.url.copy_with(raw_path=path.encode())
    assert client.send(request).status_code in (403, 404, 405)
    assert not service.trainer.is_paused


def test_strangers_use_up_no_rate(client: TestClient, service: Service) -> None:
    for _ in range(service.settings.http.mutations_per_minute + 5):
        assert client.post("/v1/training:pause", headers=bearer("x" * 32)).status_code == 401
    assert client.post("/v1/training:pause", headers=bearer(ADMIN)).status_code == 202
    refused = service.requests["POST", "unauthenticated", "401"]
    assert refused == service.settings.http.mutations_per_minute + 5
    counted = client.get("/metrics", headers=bearer(READ)).text
    assert f'{{code="401",method="POST",route="unauthenticated"}} {refused}' in counted


def test_a_router_that_nobody_put_behind_a_token_refuses(service: Service) -> None:
    app, router = FastAPI(), APIRouter(dependencies=[needs("read")])
    router.get("/secret")(lambda: "secret")
    app.include_router(router)
    finish(app)
    with TestClient(app) as client:
        assert client.get("/secret").status_code == 401


def test_the_unix_sockets_users_need_no_token(service: Service) -> None:
    with TestClient(make_app(service)) as client:
        assert client.post("/v1/training:pause").status_code == 202


def test_the_document_says_which_operations_need_a_token(service: Service) -> None:
    document = make_app(service).openapi()
    assert list(document["components"]["securitySchemes"]) == ["HTTPBearer"]
    assert all(one["security"] for methods in document["paths"].values() for one in methods.values())


def test_files_go_before_credentials_and_the_read_token_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text(ADMIN)
    made = load_tokens(None, tmp_path / "mine", [])
    assert made.role_of(f"Bearer {ADMIN}".encode()) == "admin"
    assert made.role_of(f"bearer  {ADMIN}".encode()) == "admin"
    assert made.role_of(f"Bearer {READ}".encode()) is None
    assert made.role_of(f"Basic {ADMIN}".encode()) is None
    assert ADMIN not in repr(made)


@pytest.mark.parametrize(
    ("read", "admin", "says"),
    [
        (None, None, "needs an admin token"),
        (READ, None, "needs an admin token"),
        (ADMIN, ADMIN, "are the same"),
        (None, "short", "32 or more printable characters"),
        (None, "two words of a token which are long enough", "32 or more printable characters"),
        (None, "ü" * 40, "32 or more printable characters"),
    ],
)
def test_tokens_that_protect_nothing_are_refused(tmp_path: Path, read: str | None, admin: str | None, says: str) -> None:
    for name, secret in (("honed-read-token", read), ("honed-admin-token", admin)):
        if secret is not None:
            (tmp_path / name).write_text(secret)
    with pytest.raises(SettingsError, match=says):
        load_tokens(None, None, credential_folders({"CREDENTIALS_DIRECTORY": str(tmp_path)}))


def test_a_token_file_that_was_named_must_be_there_and_may_still_come(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="doesn't exist"):
        load_tokens(None, tmp_path / "gone", [])
    with pytest.raises(StartError, match="can't be read"):
        load_tokens(tmp_path, None, [])


def test_who_may_only_read_uses_up_nothing_of_what_the_admin_may_change(client: TestClient, service: Service) -> None:
    for _ in range(service.settings.http.mutations_per_minute + 5):
        assert client.post("/v1/training:pause", headers=bearer(READ)).status_code == 403
    assert client.post("/v1/training:pause", headers=bearer(ADMIN)).status_code == 202
