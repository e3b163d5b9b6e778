"""Metrics for other hosts: TLS and passwords by a web-config file, on a real listener.

No listener here leaves this machine: one of its own addresses passes for another host's.
"""

from __future__ import annotations

import asyncio
import base64
import errno
import gc
import os
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml  # type: ignore[import-untyped]

from honed.daemon.api.limits import answer
from honed.daemon.api.passwords import _REMEMBERED, Passwords
from honed.daemon.errors import SettingsError, StartError
from honed.daemon.process import http_server
from honed.daemon.process.http_server import HttpServer
from honed.daemon.service import Service
from honed.daemon.settings import listen
from honed.daemon.settings.settings import load
from honed.daemon.settings.web_config import WebConfigFile
from honed.daemon.views import views
from tests.daemon.conftest import flags_in, wait_for
from tests.tools import needs

ELSEWHERE = "127.0.0.77"
"""Passes for an address that isn't loopback."""
PASSWORD = "correct horse"
Serve = Callable[..., int]


def hashed(password: str) -> str:
    return bcrypt.hashpw(password.encode(), bcrypt.gensalt(4)).decode()


def make_certificate(folder: Path, name: str) -> None:
    """A certificate that signs itself, NAME.crt, and its key, NAME.key."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    files = ["-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.crt")]
    names = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{ELSEWHERE}"]
    subprocess.run([*command, *files, *names], check=True, capture_output=True)


def write(folder: Path, **parts: Any) -> Path:
    path = folder / "web.yml"
    path.write_text(yaml.safe_dump(parts))
    return path


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, Any]:
    make_certificate(tmp_path, "server")
    return {"cert_file": "server.crt", "key_file": "server.key"}


@pytest.fixture
def serve(service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    """Starts the listeners with these settings; returns the port for metrics."""
    monkeypatch.setattr(listen, "is_loopback", lambda host: host != ELSEWHERE)
    started = []

    def start(**http: Any) -> int:
        flags = flags_in(folder)
        flags["http"] = {"metrics_listen": f"{ELSEWHERE}:0"} | http
        service.settings = load(None, flags, env={})
        server = HttpServer(service, service.settings)
        server.bind()
        server.start()
        started.append(server)
        return int(next(one for name, one, _ in server._sockets if name == "metrics").getsockname()[1])

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Garbage collection is off: closed connections must not count even before it runs."""
    gc.disable()
    yield
    gc.enable()


def trusting(folder: Path, name: str = "server") -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(folder / f"{name}.crt"))


def ask(
    port: int, context: ssl.SSLContext | None, user: str = "", path: str = "/metrics", method: str = "GET"
) -> tuple[HTTPResponse, bytes]:
    """One request; `user` is user:password."""
    kind: Any = HTTPConnection if context is None else HTTPSConnection
    connection = kind(ELSEWHERE, port, timeout=20.0, **({} if context is None else {"context": context}))
    headers = {"Authorization": f"Basic {base64.b64encode(user.encode()).decode()}"} if user else {}
    try:
        connection.request(method, path, headers=headers)
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


@needs("openssl")
def test_other_hosts_read_with_tls_and_a_password(serve: Serve, tmp_path: Path, tls: dict[str, Any], service: Service) -> None:
    file = write(tmp_path, tls_server_config=tls, basic_auth_users={"prometheus": hashed(PASSWORD)})
    port, context = serve(metrics_web_config=file), trusting(tmp_path)
    for user in ("", "prometheus:wrong", f"nobody:{PASSWORD}", f"prometheus:{'x' * 100}", "prometheus"):
        response, body = ask(port, context, user)
        assert (response.status, response.headers["WWW-Authenticate"]) == (401, 'Basic realm="honed"'), user
        assert b"honed_" not in body
    for _ in range(2):
        response, body = ask(port, context, f"prometheus:{PASSWORD}")
        assert (response.status, b"honed_build_info" in body) == (200, True)
    assert service.requests["GET", "unauthenticated", "401"] == 5
    with pytest.raises(ssl.SSLError):
        ask(port, ssl.create_default_context())
    with pytest.raises((OSError, HTTPException)):
        ask(port, None)


@pytest.mark.fault("guesses that hold up the right password")
def test_a_right_password_waits_for_no_guesses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus had no answer while somebody else tried passwords."""
    statuses: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await answer(send, 200, "", "", "")

    passwords = Passwords(app, WebConfigFile(write(tmp_path, basic_auth_users={"a": hashed(PASSWORD)})))

    async def try_out(password: str) -> int:
        async def send(message: Any) -> None:
            statuses.extend([message["status"]] if "status" in message else [])

        shown = b"Basic " + base64.b64encode(f"a:{password}".encode())
        await passwords({"type": "http", "headers": [(b"authorization", shown)]}, send, send)
        return statuses.pop()

    def hold(password: bytes, hash_: bytes) -> bool:
        begun.set()
        go_on.wait(60)
        return False

    async def attack() -> tuple[int, int]:
        assert await try_out(PASSWORD) == 200
        for number in range(2 * _REMEMBERED):
            assert await try_out(str(number)) == 401
        monkeypatch.setattr("honed.daemon.api.passwords._matches", hold)
        guess = asyncio.create_task(try_out("guess"))
        try:
            assert await asyncio.to_thread(begun.wait, 60)
            right = await asyncio.wait_for(try_out(PASSWORD), 5.0)
        finally:
            go_on.set()
        return right, await guess

    assert asyncio.run(attack()) == (200, 401)


@needs("openssl")
def test_new_passwords_and_certificates_hold_from_their_writing_on(
    serve: Serve, tmp_path: Path, tls: dict[str, Any], service: Service
) -> None:
    file = write(tmp_path, tls_server_config=tls, basic_auth_users={"a": hashed("one")})
    port = serve(metrics_web_config=file)
    assert ask(port, trusting(tmp_path), "a:one")[0].status == 200
    write(tmp_path, tls_server_config=tls, basic_auth_users={"a": hashed("two")})
    assert ask(port, trusting(tmp_path), "a:one")[0].status == 401
    assert ask(port, trusting(tmp_path), "a:two")[0].status == 200
    before = trusting(tmp_path)
    time.sleep(0.01)
    make_certificate(tmp_path, "server")
    assert ask(port, trusting(tmp_path), "a:two")[0].status == 200
    with pytest.raises(ssl.SSLError):
        ask(port, before, "a:two")
    file.write_text("tls_server_config: [")
    assert ask(port, trusting(tmp_path), "a:two")[0].status == 200, "what can't be read changes nothing"
    assert "isn't YAML" in views.status(service)["web_config_problem"]
    write(tmp_path, tls_server_config=tls, basic_auth_users={"a": hashed("three")})
    assert ask(port, trusting(tmp_path), "a:three")[0].status == 200
    assert not views.status(service)["web_config_problem"]


@needs("openssl")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "server.crt"}, "changes client_auth_type"),
        ({"min_version": "TLS13"}, "changes the versions of TLS"),
        (None, "turns TLS off"),
    ],
)
def test_what_an_open_listener_cant_take_over_waits_for_a_restart(
    serve: Serve, tmp_path: Path, tls: dict[str, Any], service: Service, change: dict[str, str] | None, said: str
) -> None:
    users = {"a": hashed("one")}
    port = serve(metrics_web_config=write(tmp_path, tls_server_config=tls, basic_auth_users=users))
    assert ask(port, trusting(tmp_path), "a:one")[0].status == 200
    changed = {} if change is None else {"tls_server_config": tls | change}
    write(tmp_path, basic_auth_users={"a": hashed("two")}, **changed)
    assert ask(port, trusting(tmp_path), "a:one")[0].status == 200
    assert f"{said}: restart honed" in views.status(service)["web_config_problem"]


def test_a_file_that_was_just_cut_off_opens_nothing(
    serve: Serve, tmp_path: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "is_loopback", lambda host: True)
    file = write(tmp_path, basic_auth_users={"a": hashed("b")})
    port = serve(metrics_web_config=file)
    file.write_text("")
    assert ask(port, None)[0].status == 401
    assert "has no users any more" in views.status(service)["web_config_problem"]
    write(tmp_path, basic_auth_users={"a": hashed("c")})
    assert ask(port, None, "a:c")[0].status == 200


@needs("openssl")
def test_clients_may_have_to_show_a_certificate(serve: Serve, tmp_path: Path, tls: dict[str, Any]) -> None:
    make_certificate(tmp_path, "client")
    asked = {"client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "client.crt", "min_version": "TLS13"}
    port = serve(metrics_web_config=write(tmp_path, tls_server_config=tls | asked))
    shown = trusting(tmp_path)
    shown.load_cert_chain(tmp_path / "client.crt", tmp_path / "client.key")
    assert ask(port, shown)[0].status == 200
    with pytest.raises((ssl.SSLError, ConnectionError)):
        ask(port, trusting(tmp_path))


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/readyz"])
def test_head_is_answered_as_get_without_the_body(serve: Serve, path: str) -> None:
    port = serve(metrics_plaintext=True)
    got, _ = ask(port, None, path=path)
    head, body = ask(port, None, path=path, method="HEAD")
    assert (head.status, body) == (got.status, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


def test_another_address_has_to_be_protected_or_meant(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"http\.metrics_web_config.*http\.metrics_plaintext = true"):
        serve()
    with pytest.raises(SettingsError, match="no tls_server_config"):
        serve(metrics_web_config=write(tmp_path, basic_auth_users={"a": hashed("b")}))
    assert ask(serve(metrics_plaintext=True), None)[0].status == 200


def test_loopback_may_have_passwords_without_tls(serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listen, "is_loopback", lambda host: True)
    port = serve(metrics_web_config=write(tmp_path, basic_auth_users={"a": hashed("b")}))
    assert ask(port, None)[0].status == 401
    assert ask(port, None, "a:b")[0].status == 200, "it answers to its own address, whichever of loopback's that is"


@pytest.mark.fault("connections without end from other hosts")
@needs("openssl")
def test_connections_that_say_nothing_leave_room_for_the_daemons_own(
    serve: Serve, tmp_path: Path, tls: dict[str, Any], monkeypatch: pytest.MonkeyPatch, no_collection: None
) -> None:
    monkeypatch.setattr(http_server, "MOST_REMOTE", 8)
    port, context = serve(metrics_web_config=write(tmp_path, tls_server_config=tls)), trusting(tmp_path)
    held = [socket.create_connection((ELSEWHERE, port), timeout=5.0) for _ in range(8)]
    time.sleep(0.2)
    for _ in range(3):
        with socket.create_connection((ELSEWHERE, port), timeout=5.0) as more:
            assert more.recv(1) == b"", "one too many is closed at once"
    for one in held:
        one.close()

    def answers() -> bool:
        try:
            return ask(port, context)[0].status == 200
        except OSError:
            return False

    wait_for(answers, "room for a new connection")


@pytest.mark.fault("a library's own words about a wrong value")
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tls_server_config: [", "isn't YAML"),
        ("- 1", "the file must be a group of keys with values"),
        ("tls_config: {}", r"tls_config is unknown; did you mean tls_server_config\?"),
        ("tls_server_config: {cert_file: a}", r"tls_server_config\.key_file is missing"),
        ("tls_server_config: {cert_file: a, key_file: b, cipher_suites: [x]}", "tls_server_config.cipher_suites is unknown"),
        ("tls_server_config: {cert_fil: a, key_file: b}", r"tls_server_config\.cert_fil is unknown; did you mean cert_file\?"),
        ("tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAnyClientCert}", "must be 'NoClientCert', "),
        ("tls_server_config: 5", "tls_server_config must be a group of keys with values"),
        ("tls_server_config: {cert_file: a, key_file: b, client_auth_type: RequireAndVerifyClientCert}", "client_ca_file"),
        ("basic_auth_users: {me: secret}", "'me' isn't a bcrypt hash.*htpasswd"),
    ],
)
def test_what_a_file_has_wrong_is_named(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "web.yml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=why) as raised:
        WebConfigFile(path)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("name", ["web.yml", "server.crt", "server.key"])
@needs("openssl")
def test_a_file_that_is_missing_is_named_and_may_still_come(tmp_path: Path, tls: dict[str, Any], name: str) -> None:
    web_config = write(tmp_path, tls_server_config=tls)
    (tmp_path / name).unlink()
    with pytest.raises(StartError, match=f"{name}.*: No such file" if name == "web.yml" else "certificate.* No such file"):
        WebConfigFile(web_config)


@needs("openssl")
def test_a_start_between_a_new_certificate_and_its_key_is_tried_again(tmp_path: Path, tls: dict[str, Any]) -> None:
    """It ended the service for good. A running daemon keeps the last ones meanwhile."""
    web_config = write(tmp_path, tls_server_config=tls)
    running = WebConfigFile(web_config)
    make_certificate(tmp_path, "renewed")
    (tmp_path / "renewed.crt").replace(tmp_path / "server.crt")
    with pytest.raises(StartError, match="MISMATCH"):
        WebConfigFile(web_config)
    context = running.context
    running.refresh()
    assert "MISMATCH" in running.fault
    assert running.context is context
    (tmp_path / "renewed.key").replace(tmp_path / "server.key")
    running.refresh()
    assert not running.fault
    assert running.context is not context


@pytest.mark.parametrize(("number", "kind"), [(errno.EACCES, SettingsError), (errno.EIO, StartError)])
def test_a_missing_right_stays_so_and_a_disk_may_heal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def refuse(path: Path) -> str:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(kind, match=os.strerror(number)):
        WebConfigFile(tmp_path / "web.yml")
