"""The boundary: whatever goes wrong on the way to the daemon has a name, a cure and an exit code."""

import socket
import threading
from pathlib import Path

import pytest

from honed.daemon.client.client import (
    EXIT_FAILED,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    AdminClient,
    AdminError,
    Refused,
    Unreachable,
    part,
)
from tests.daemon.small_server import serving


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "admin.sock"


def failure(path: Path, **options: float) -> Unreachable:
    with AdminClient(path, **options) as client, pytest.raises(Unreachable) as caught:
        client.get("/v1/status")
    assert caught.value.exit_code == EXIT_UNREACHABLE
    assert caught.value.cure
    return caught.value


def test_a_daemon_that_does_not_run_is_named_with_its_socket(path: Path) -> None:
    error = failure(path)
    assert "no daemon is running" in str(error)
    assert str(path) in str(error)
    assert "honed serve" in error.cure


def test_a_socket_left_behind_is_told_from_a_missing_one(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    assert "a stopped daemon left the file" in str(failure(path))


@pytest.mark.fault("a URL that can't be read")
@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:9465",
        "http://127.0.0.1:port",
        "http://[::1",
        "http://127.0.0.1:99999999999999999999",
        "http://",
        "http://..",
        f"http://{'a' * 70}:1",
        "http://\x01",
    ],
)
def test_a_url_that_cannot_be_a_servers_is_wrong_usage(url: str) -> None:
    with pytest.raises(AdminError, match="isn't an address: ") as caught:
        AdminClient(url=url)
    assert caught.value.exit_code == EXIT_USAGE
    assert "http://127.0.0.1:9465" in caught.value.cure


@pytest.mark.parametrize("url", ["http://[::1]:9465", "https://bücher.de", "http://honed:9465/", "http://[fe80::1%lo]:1"])
def test_a_url_that_can_be_a_servers_is_taken(url: str) -> None:
    with AdminClient(url=url) as client:
        assert client.where == url


def test_what_is_no_socket_is_said_to_be_none(path: Path) -> None:
    path.write_text("")
    error = failure(path)
    assert str(error) == f"{path} is a file, not a socket"
    assert "Check --socket" in error.cure
    assert str(failure(path.parent)) == f"{path.parent} is a folder, not a socket"


def test_a_socket_that_may_not_be_used_says_so(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may use any socket, so the kernel's answer is given here.
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    monkeypatch.setattr("honed.daemon.client.client.os.access", lambda *_: False)
    error = failure(path)
    assert "permission denied" in str(error)
    assert "group" in error.cure


def test_a_daemon_that_hangs_is_given_up(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        assert "did not answer within 0.2 s" in str(failure(path, timeout_s=0.2))


def test_a_daemon_that_goes_away_in_the_middle(path: Path) -> None:
    with serving(path, lambda *_: None):
        assert "went away" in str(failure(path))


def test_a_tcp_address_where_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with AdminClient(url=url) as client, pytest.raises(Unreachable, match="no daemon answers at") as caught:
        client.get("/v1/status")
    assert "--url" in caught.value.cure


def test_tls_to_a_port_without_it_is_told() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"https://127.0.0.1:{server.getsockname()[1]}"
        with AdminClient(url=url) as client, pytest.raises(Unreachable, match="doesn't speak TLS as asked") as caught:
            client.get("/v1/status")
        thread.join()
    assert "http://" in caught.value.cure


def test_an_answer_that_is_not_json_is_somebody_else(path: Path) -> None:
    with serving(path, lambda *_: (200, "<html>")), AdminClient(path) as client:
        with pytest.raises(AdminError, match="isn't JSON") as caught:
            client.get("/v1/status")
        assert caught.value.exit_code == EXIT_FAILED


@pytest.mark.parametrize(
    ("status", "exit_code"),
    [(400, EXIT_USAGE), (404, EXIT_FAILED), (409, EXIT_FAILED), (412, EXIT_FAILED), (422, EXIT_USAGE), (503, EXIT_FAILED)],
)
def test_a_refusal_carries_the_problem_and_an_exit_code(path: Path, status: int, exit_code: int) -> None:
    problem = {"type": "about:blank", "title": "No", "status": status, "detail": "because it is Friday"}
    with serving(path, lambda *_: (status, problem)), AdminClient(path) as client:
        with pytest.raises(Refused, match="No: because it is Friday") as caught:
            client.post("/v1/recalibrations", {})
        assert caught.value.status == status
        assert caught.value.problem == problem
        assert caught.value.exit_code == exit_code


def test_the_daemons_own_cure_goes_before_a_general_one(path: Path) -> None:
    problem = {"title": "Not possible now", "status": 409, "detail": "no trainer", "cure": "Start one."}
    with serving(path, lambda *_: (409, problem)), AdminClient(path) as client, pytest.raises(Refused) as caught:
        client.get("/v1/status")
    assert caught.value.cure == "Start one."


@pytest.mark.parametrize("document", ["404 page not found", {"detail": "Not Found"}])
def test_a_server_that_is_not_honeds_admin_api_is_told_from_one_that_is(path: Path, document: object) -> None:
    says = pytest.raises(AdminError, match="GET /v1/status with 404, and not as honed does")
    with serving(path, lambda *_: (404, document)), AdminClient(path) as client, says as caught:
        client.get("/v1/status")
    assert "--url" in caught.value.cure


@pytest.mark.fault("a full disk that is called a start")
def test_storage_that_refuses_is_not_called_a_start(path: Path) -> None:
    problem = {"title": "Storage unavailable", "detail": "Read-only file system"}
    with serving(path, lambda *_: (503, problem)), AdminClient(path) as client, pytest.raises(Refused) as caught:
        client.post("/v1/drafters:rollback")
    assert caught.value.cure == ""


def test_a_refusal_without_a_problem_document_still_says_what(path: Path) -> None:
    with serving(path, lambda *_: (503, "busy")), AdminClient(path) as client, pytest.raises(Refused, match="Service"):
        client.get("/v1/status")


def test_changes_carry_a_fresh_idempotency_key_and_the_generation(path: Path) -> None:
    with serving(path, lambda *_: (202, {})) as seen, AdminClient(path, token="secret") as client:
        client.post("/v1/drafters:rollback", {"reason": "x"}, if_match=7)
        client.post("/v1/drafters:rollback")
        client.put("/v1/overrides/policy", {"value": "off"})
    keys = [request["headers"]["idempotency-key"] for request in seen]
    assert len(set(keys)) == 3
    assert seen[0]["headers"]["if-match"] == "7"
    assert "if-match" not in seen[1]["headers"]
    assert seen[0]["headers"]["authorization"] == "Bearer secret"
    assert [request["body"] for request in seen] == [{"reason": "x"}, {}, {"value": "off"}]


def test_query_arguments_that_are_none_are_left_out(path: Path) -> None:
    with serving(path, lambda *_: (200, [])) as seen, AdminClient(path) as client:
        client.get("/v1/timeline", resolution="1s", since=None)
    assert seen[0]["path"] == "/v1/timeline?resolution=1s"


def test_the_environments_proxy_never_sees_the_admin_api(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    with serving(path, lambda *_: (200, {"ok": 1})), AdminClient(path) as client:
        assert client.get("/v1/status") == {"ok": 1}


def test_following_ends_with_the_finished_view(path: Path) -> None:
    states = iter(["queued", "running", "running", "succeeded", "running"])
    with serving(path, lambda *_: (200, {"state": next(states)})), AdminClient(path) as client:
        assert [v["state"] for v in client.follow("op-1", poll_s=0)] == ["queued", "running", "running", "succeeded"]


def test_following_outlives_a_restart_but_not_a_death(path: Path) -> None:
    answers = iter([(200, {"state": "running"}), None, None, (200, {"state": "failed"})])
    with serving(path, lambda *_: next(answers)), AdminClient(path) as client:
        assert [v["state"] for v in client.follow("op-1", poll_s=0)] == ["running", "failed"]
    with AdminClient(path) as client, pytest.raises(Unreachable):
        list(client.follow("op-1", poll_s=0, patience_s=0))


def test_a_name_is_one_segment_of_the_path() -> None:
    assert part("../audit?x") == "..%2Faudit%3Fx"


def test_one_address_is_wanted(path: Path) -> None:
    with pytest.raises(ValueError, match="socket or its URL"):
        AdminClient(path, url="http://127.0.0.1:1")
    with pytest.raises(ValueError, match="socket or its URL"):
        AdminClient()
