"""The status page: self-contained, under a strict policy, readable, and with the API's own figures."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from typing import Any

import pytest
from fastapi.testclient import TestClient

from honed.adapt.protocol import wire
from honed.daemon.api.app import make_app, make_read_only_app
from honed.daemon.errors import StoreError
from honed.daemon.page import document as page_document
from honed.daemon.page.document import CACHE_S, MOST_ENGINES, MOST_WORKLOADS, OTHERS, WINDOWS, PageDocuments
from honed.daemon.page.page import FOLDER, page
from honed.daemon.service import Service
from honed.daemon.store.rollups import Counts
from honed.daemon.views import views
from honed.recalib.registry.manifest import Figures
from tests.daemon.conftest import wait_for, wait_learned
from tests.daemon.fake_engine import FakeEngine
from tests.daemon.lifecycle.test_lifecycle import Stage, stage  # noqa: F401 (a fixture, used by name)

Document = dict[str, Any]


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_read_only_app(service), base_url="http://127.0.0.1:9464") as opened:
        yield opened


@pytest.fixture
def engine(service: Service, make_engine: Callable[..., FakeEngine]) -> FakeEngine:
    """An engine with 8 rounds of 3 drafts each of two workloads."""
    made = make_engine()
    made.hello()
    for seq, name in enumerate(("default", "chat"), start=1):
        made.send(made.batch(seq, workloads=[name]))
    made.wait_acked(2)
    wait_learned(service)
    return made


class Tags(HTMLParser):
    """Every tag with its attributes, and what stands in style and script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inside: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("style", "script"):
            self.inside.setdefault(self.tags[-1][0], data)


def test_nothing_comes_from_elsewhere_and_nothing_else_runs(client: TestClient) -> None:
    answer = client.get("/")
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    found = Tags(answer.text)
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(found.inside[tag].encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'", tag
        assert [name for name, _ in found.tags].count(tag) == 1
    for tag, attributes in found.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag
        assert attributes.get("src") is None
        assert attributes.get("href") in (None, "#main", "data:,")
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", answer.text)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|new Function", answer.text)
    assert client.get("/", headers={"Host": "evil.example"}).status_code == 421


def test_the_page_is_only_on_the_read_only_listener(service: Service) -> None:
    with TestClient(make_app(service)) as admin:
        assert admin.get("/").status_code == 404
        assert admin.get("/page.json").status_code == 404


def test_labels_belong_to_something(client: TestClient) -> None:
    tags = Tags(client.get("/").text).tags
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    named = [value for _, attributes in tags if (value := attributes.get("aria-labelledby"))]
    assert set(named) <= set(ids)
    assert {"lang"} <= set(next(attributes for tag, attributes in tags if tag == "html"))
    script = client.get("/").text
    assert set(re.findall(r'by_id\("(\w+)"\)', script)) <= set(ids)


def colors(scheme: str) -> dict[str, tuple[int, int, int]]:
    """Variables of the style sheet."""
    blocks = re.findall(r":root \{(.*?)\}", (FOLDER / "page.css").read_text(), re.DOTALL)
    assert len(blocks) == 2
    found = re.findall(r"--([\w]+): #(\w\w)(\w\w)(\w\w);", blocks[scheme == "dark"])
    return {name: (int(r, 16), int(g, 16), int(b, 16)) for name, r, g, b in found}


def contrast(a: tuple[int, int, int], b: tuple[int, int, int]) -> float:
    """WCAG 2.2's ratio of relative luminances."""

    def luminance(color: tuple[int, int, int]) -> float:
        parts = [c / 255 for c in color]
        r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_is_enough(scheme: str) -> None:
    found = colors(scheme)
    for name in ("ink", "muted", "good", "warn", "bad", "accent"):
        for ground in ("surface", "page"):
            assert contrast(found[name], found[ground]) >= 4.5, (name, ground)
    for number in range(1, 8):
        assert contrast(found[f"s{number}"], found["surface"]) >= 3.0, number
    assert contrast(found["surface"], found["accent"]) >= 4.5, "of a pressed button"


def test_figures_are_those_of_the_api(client: TestClient, engine: FakeEngine, service: Service) -> None:
    found = client.get("/page.json?window=5min").json()
    status = views.status(service)
    assert found["status"]["acceptance"] == status["acceptance"]
    moving = {"lag_s": 0, "batch_age_s": 0}
    assert found["status"]["events"] | moving == status["events"] | moving
    assert found["workloads"] == views.workloads(service, 300.0)
    assert found["engines"][0]["rounds"] == 16
    for one in found["acceptance"]:
        assert (one["workload"] in ("chat", "default"), sum(one["rounds"])) == (True, 8)
        assert [length for length in one["length"] if length is not None] == [2.5]
        assert [[share for share in row if share is not None] for row in one["positions"]] == [[0.75], [0.6667], [0.5]]
    slots = found["load"][0]["slots"]
    assert sum(slot[1] > 0 for slot in slots) >= 1
    assert {(slot[1], slot[2]) for slot in slots} == {(8, 3)}


@pytest.mark.parametrize(("window", "points"), [("5min", 60), ("1h", 60), ("7d", 168)])
def test_every_window_has_the_same_rounds(client: TestClient, engine: FakeEngine, window: str, points: int) -> None:
    found = client.get(f"/page.json?window={window}").json()
    assert len(found["times"]) == points
    assert sum(sum(one["rounds"]) for one in found["acceptance"]) == 16
    assert sum(one["rounds"] for one in found["workloads"]) == 16
    assert all(len(one["length"]) == len(one["draft_tokens"]) == points for one in found["acceptance"])


def test_odd_windows_are_refused(client: TestClient) -> None:
    assert client.get("/page.json?window=1y").status_code == 422
    assert client.get("/page.json?window=5min&window=x").status_code == 422


def test_a_database_that_refuses_is_a_problem_document(
    client: TestClient, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise StoreError("database: disk I/O error")

    monkeypatch.setattr(service.store, "read", refuse)
    answer = client.get("/page.json")
    assert (answer.status_code, answer.json()["detail"]) == (503, "database: disk I/O error")
    assert client.get("/").status_code == 200, "the page itself says so"


def test_it_says_what_is_wrong(client: TestClient) -> None:
    texts = [one["text"] for one in client.get("/page.json").json()["findings"]]
    assert any("no engine has attached" in text for text in texts)


def test_many_workloads_become_one_line(client: TestClient, service: Service, make_engine: Callable[..., FakeEngine]) -> None:
    engine = make_engine()
    engine.hello()
    for seq in range(1, 12):
        engine.send(engine.batch(seq, workloads=[f"w{seq}"], rounds=seq))
    engine.wait_acked(11)
    found = client.get("/page.json?window=5min").json()
    names = [one["workload"] for one in found["acceptance"]]
    assert names == ["w11", "w10", "w9", "w8", "w7", OTHERS]
    assert len(names) == MOST_WORKLOADS
    assert sum(found["acceptance"][-1]["rounds"]) == sum(range(1, 7))


def test_sums_are_over_all_engines_and_connected_ones_come_first(
    client: TestClient, service: Service, make_engine: Callable[..., FakeEngine]
) -> None:
    """With eight that had left, the page said that no engine was connected."""
    names = [f"gpu-{number:02}" for number in range(MOST_ENGINES + 3)]
    for name in names:
        make_engine(engine_id=name).hello()
    with service.lock:
        for name in names[:MOST_ENGINES]:
            service.engines.by_id[name].last_seen_s -= 3600.0
    found = client.get("/page.json?window=5min").json()
    assert found["engines_total"] == {"engines": len(names), "connected": 3, "tokens_per_s": 0.0}
    assert [one["engine_id"] for one in found["engines"]] == names[MOST_ENGINES:] + names[: MOST_ENGINES - 3]


def test_the_plot_has_the_newest_of_many_rounds(service: Service) -> None:
    """Rows beyond 100,000, the newest, were left out."""
    until = int(service.clock()) // 5 * 5
    row = {"resolution_s": 1, "engine_id": "e", "drafter_version": "", "stored_s": until} | Counts(rounds=1).row()
    names, places = ", ".join(row), ", ".join(f":{name}" for name in row)
    every = "seconds(t) AS (VALUES (:until - 300) UNION ALL SELECT t + 1 FROM seconds WHERE t < :until - 1)"
    cells = "cells(n) AS (VALUES (0) UNION ALL SELECT n + 1 FROM cells WHERE n < 339)"
    sql = f"INSERT INTO rollups (bucket_s, workload, {names}) WITH {every}, {cells} SELECT t, n, {places} FROM seconds, cells"
    service.store.write(lambda db: db.conn.execute(sql, row | {"until": until}) and None)
    series = page_document.series(service.store, WINDOWS["5min"], list(range(until - 300, until, 5)))
    assert {rounds for line in series["acceptance"] for rounds in line["rounds"]} == {5, 5 * (340 - MOST_WORKLOADS + 1)}


def test_what_operators_write_stays_out(stage: Stage) -> None:  # noqa: F811
    secret = "because-of-customer-x"
    stage.client.put("/v1/overrides/draft_tokens", json={"value": 1, "ttl_s": 60, "reason": secret})
    operation_id, _ = stage.recalibrate(reason=secret)
    stage.trainer.send(wire.TrainerStatus(trainer_id="t", state="training", operation_id=operation_id, steps=3, max_steps=9))
    wait_for(lambda: stage.operation(operation_id)["stage"] == "training", "the stage")
    document = PageDocuments(stage.service).get("1h").decode()
    stage.client.post(f"/v1/operations/{operation_id}:cancel", json={"reason": secret})
    assert '"steps":3,"max_steps":9' in document
    assert '"name":"draft_tokens"' in document
    promoted = stage.client.post(f"/v1/drafters/{stage.version(1.0)}:promote", json={"reason": secret}).json()
    stage.engine.answer_swap()
    stage.wait_state(promoted["operation_id"], "succeeded")
    stage.client.post("/v1/drafters:rollback", json={"reason": secret})
    stage.engine.answer_swap()
    assert stage.service.store.drain(10)
    later = PageDocuments(stage.service).get("1h").decode()
    assert '"kind":"rollback"' in later
    for text in (document, later):
        assert secret not in text
        assert "/models/tiny" not in text


def test_versions_and_the_trial(stage: Stage) -> None:  # noqa: F811
    gate = [wire.GateFigures(workload="b", sessions=9, parent=2.0, candidate=3.0, gain_low=1.4, gain_high=1.6, passed=True)]
    second = stage.version(1.0, figures=Figures(gate=gate))
    answer = stage.client.post(f"/v1/drafters/{second}:promote", json={}).json()
    stage.engine.answer_swap()
    stage.wait_state(answer["operation_id"], "succeeded")
    assert stage.service.store.drain(10)
    found = page_document.document(stage.service, "5min")
    assert [(one["version"], one["roles"]) for one in found["versions"]] == [
        (second, ["active"]),
        (stage.first, ["previous", "floor"]),
    ]
    assert found["versions"][0]["watched"] == "on trial"
    (row,) = found["versions"][0]["gate"]
    assert {"workload", "parent", "candidate", "gain_low", "gain_high"} <= set(row), "what page_parts.js reads"
    trial = found["trial"]
    assert (trial["kind"], trial["new"], trial["old"]) == ("watch", second, stage.first)
    assert trial["serving"] in (second, stage.first)
    everything = trial["workloads"][0]
    assert (everything["workload"], everything["evidence_worse"]) == ("", 0.0)
    assert everything["bar_worse"] == pytest.approx(-math.log10(0.01 * 0.94))
    assert "canary" in [mark["kind"] for mark in found["marks"]]


def test_many_onlookers_cost_one_reading(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    documents = PageDocuments(service)
    monkeypatch.setattr(page_document, "document", lambda service, name: made.append(name) or {"n": len(made)})
    now_s = service.monotonic()
    service.monotonic = lambda: now_s
    assert documents.get("1h") == documents.get("1h") == b'{"n":1}'
    assert documents.get("7d") == b'{"n":2}'
    now_s += CACHE_S
    assert documents.get("1h") == b'{"n":3}'
    assert made == ["1h", "7d", "1h"]


def test_the_page_is_small() -> None:
    html, _ = page()
    assert len(html.encode()) < 64_000
