from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pysqlite3
import pytest
from fastapi.testclient import TestClient

from honed.adapt.protocol import wire
from honed.daemon.api.app import MAX_BODY_BYTES, make_app, make_read_only_app
from honed.daemon.errors import StoreError
from honed.daemon.service import Service
from honed.daemon.settings.settings import load
from tests.daemon.conftest import flags_in
from tests.daemon.exposition import scrape
from tests.daemon.fake_engine import FakeEngine


def test_database_and_disk(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    engine.hello()
    engine.send(engine.batch(1))
    engine.wait_acked(1)
    found = scrape(service)
    assert found["honed_db_size_bytes"][""] == service.store.size_bytes > 0
    assert found["honed_db_commit_seconds_count"][""] >= 1
    assert found["honed_db_errors_total"] == {"": 0}
    usage = shutil.disk_usage(service.settings.paths.state_dir)
    assert found["honed_disk_size_bytes"] == {"": usage.total}
    assert 0 < found["honed_disk_free_bytes"][""] < usage.total


def test_a_refusing_database_shows(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise pysqlite3.OperationalError("disk I/O error")

    assert scrape(service)["honed_db_failing"] == {"": 0}
    monkeypatch.setattr(service.store._files, "check", fail)
    with pytest.raises(StoreError):
        service.store.write(lambda db: None)
    found = scrape(service)
    assert found["honed_db_failing"] == {"": 1}
    assert found["honed_db_errors_total"][""] >= 1


def test_a_scrape_works_while_the_state_directory_is_gone(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(path: object) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(shutil, "disk_usage", gone)
    found = scrape(service)
    assert "honed_disk_free_bytes" not in found
    assert "honed_build_info" in found


def test_requests_are_counted_by_route_not_by_path(service: Service) -> None:
    with TestClient(make_app(service)) as client:
        client.get("/v1/operations/one")
        client.get("/v1/operations/two")
        client.get("/nothing/at/all")
        client.request("BREW", "/v1/status")
    requests = scrape(service)["honed_admin_requests_total"]
    assert requests["code=404 method=GET route=/v1/operations/{operation_id}"] == 2
    assert requests["code=404 method=GET route=unknown"] == 1
    assert [value for labels, value in requests.items() if "method=other" in labels] == [1]


def test_refusals_and_internal_errors_are_counted_too(service: Service, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was answered before any route, or after an exception, wasn't."""

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    flags = flags_in(folder)
    flags["http"] |= {"mutations_per_minute": 1}
    service.settings = load(None, flags, env={})
    monkeypatch.setattr(service.drafters, "listing", fail)
    with TestClient(make_app(service), raise_server_exceptions=False) as client:
        client.post("/v1/training:pause", content=b"x" * (MAX_BODY_BYTES + 1))
        for _ in range(2):
            client.post("/v1/training:pause")
        client.get("/v1/drafters")
    with TestClient(make_read_only_app(service), base_url="http://127.0.0.1:9464") as client:
        client.head("/healthz")
        client.head("/healthz", headers={"Host": "evil.example"})
    assert scrape(service)["honed_admin_requests_total"] == {
        "code=413 method=POST route=unknown": 1,
        "code=202 method=POST route=/v1/training:pause": 1,
        "code=429 method=POST route=unknown": 1,
        "code=500 method=GET route=/v1/drafters": 1,
        "code=200 method=GET route=/healthz": 1,
        "code=421 method=GET route=unknown": 1,
    }


def test_versions_of_the_daemon_and_of_its_engines(service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    make_engine().hello(honed_version="0.0.9", vllm_version="0.33.0")
    found = scrape(service)
    build = next(iter(found["honed_build_info"]))
    assert f"version={service.version}" in build
    assert f"wire={wire.WIRE_VERSION}" in build
    assert list(found["honed_engine_info"]) == [
        "engine=engine-0 method=dflash model_name=tiny runner=v1 version=0.0.9 vllm_version=0.33.0 wire=1"
    ]


def test_the_process_tells_of_itself_under_our_prefix(service: Service) -> None:
    found = scrape(service)
    assert found["process_resident_memory_bytes"][""] > 1e6
    assert found["process_cpu_seconds_total"][""] > 0
    assert not [name for name in found if not name.startswith(("honed_", "process_"))]
