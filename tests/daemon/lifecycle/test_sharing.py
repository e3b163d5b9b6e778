"""Two hosts, a daemon and an engine each, and a folder that both can reach."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from fsspec.implementations.local import LocalFileSystem
from safetensors.numpy import load_file, save_file

from honed.daemon.api.app import make_app
from honed.daemon.lifecycle.sharing import Sharing
from honed.daemon.service import Service
from honed.daemon.settings.settings import load
from honed.daemon.views.findings import findings
from honed.daemon.views.views import status
from honed.recalib.registry.manifest import Manifest, RegistryError
from honed.recalib.registry.shared import SharedRegistry
from tests.daemon.conftest import flags_in, wait_for
from tests.daemon.exposition import scrape
from tests.daemon.fake_engine import ServingEngine
from tests.daemon.lifecycle.hosts import Host, hosts
from tests.daemon.lifecycle.test_lifecycle import write_checkpoint


@pytest.fixture
def make_host(folder: Path) -> Iterator[Callable[..., Host]]:
    with hosts(folder, f"file://{folder}/shared") as make:
        yield make


def test_what_proved_itself_on_one_host_is_tried_out_and_promoted_on_the_other(make_host: Callable[..., Host]) -> None:
    one, other = make_host("one"), make_host("other")
    made = one.make(1.0)
    one.promote(made.version)
    wait_for(lambda: one.shared()["pushed"] == 1, "the push")

    name = f"v0002-{made.sha256[:8]}"
    other.engine.acceptance = {other.service.drafters.active: 0.4, name: 0.7}
    other.engine.serve(lambda: other.service.drafters.active == name, "the promotion on the other host")
    manifest = other.service.drafters.manifest(name)
    assert manifest.origin.endswith(f":{made.version}")
    assert manifest.target_path == str(other.target), "engines there know the target by another path"
    assert other.shared()["fetched"] == 1
    (operation,) = other.adoptions()
    assert operation.detail["version"] == name
    assert other.engine.serve(lambda: other.service.rollout.is_quiet or None, "quiet")
    found = scrape(other.service)
    assert found["honed_promotions_total"]["reason=adopt"] == 1
    assert found["honed_shared_versions_total"] == {"direction=pushed": 0, "direction=fetched": 1}
    assert found["honed_shared_registry_errors_total"] == {"": 0}


def test_what_was_fetched_before_a_restart_is_tried_out_after_it(make_host: Callable[..., Host], folder: Path) -> None:
    one, other = make_host("one"), make_host("other", try_fetched=False)
    made = one.make(1.0)
    one.promote(made.version)
    other.engine.serve(lambda: other.shared()["fetched"] == 1, "the version")
    assert other.adoptions() == []
    other.service.stop()
    again = make_host("other")
    name = f"v0002-{made.sha256[:8]}"
    again.engine.acceptance = {again.service.drafters.active: 0.4, name: 0.7}
    again.engine.serve(lambda: again.service.drafters.active == name, "the promotion after the restart")
    assert again.shared()["fetched"] == 0


def test_of_versions_that_wait_the_newest_that_fits_is_tried_first(make_host: Callable[..., Host], folder: Path) -> None:
    one = make_host("one", publish=False)
    registry = one.service.drafters.registry
    older, newer = one.make(1.0), one.make(2.0)
    unfit = registry.create(write_dspark, parent=older.version, scope="kv-frozen", target_path=str(one.target))
    assert unfit.method == "dspark"
    assert older.created_unix_s < newer.created_unix_s < unfit.created_unix_s
    place = SharedRegistry(f"file://{folder}/shared", registry)

    other = make_host("other")
    before, ours = other.service.drafters.active, other.make(9.0).version
    other.try_out(ours)
    place.push(older.version)
    wait_for(lambda: other.shared()["fetched"] == 1, "a version, while another trial runs")
    for manifest in (unfit, newer):
        place.push(manifest.version)
    wait_for(lambda: other.shared()["fetched"] == 2, "a newer one")
    name = {manifest.sha256: manifest.version for manifest in other.service.drafters.registry.versions()}
    other.engine.acceptance = {before: 0.5, ours: 0.5, name[newer.sha256]: 0.2, name[older.sha256]: 0.9}
    with other.service.lock:
        other.service.canaries.stop("test")
    other.engine.serve(lambda: other.service.drafters.active == name[older.sha256], "a trial of each that fits")
    tried = {operation.detail["version"]: operation.state for operation in other.adoptions()}
    assert tried[name[newer.sha256]] == "failed", "it came first, though the older one was fetched before it"
    assert unfit.sha256 not in name, "no engine here drafts with its method, so it isn't downloaded"


def test_a_new_host_fetches_no_history_and_keeps_no_more_than_others(make_host: Callable[..., Host], folder: Path) -> None:
    """While its active version was an engine's own, each poll fetched the next older one, however many there were."""
    one = make_host("one", publish=False)
    registry = one.service.drafters.registry
    place = SharedRegistry(f"file://{folder}/shared", registry)
    made = [one.make(float(number)) for number in range(1, 7)]
    for manifest in made[:4]:
        place.push(manifest.version)
    other = make_host("other", try_fetched=False, keep_versions=1)
    for num_fetched, newest in enumerate(made[3:], 1):
        if newest is not made[3]:
            place.push(newest.version)
        wait_for(lambda: other.shared()["fetched"] == num_fetched, "the newest")  # noqa: B023
        for _ in range(2):
            looked = other.shared()["last_success_unix_s"]
            wait_for(lambda: other.shared()["last_success_unix_s"] > looked, "the end of this look, and another one")  # noqa: B023
        assert other.shared()["fetched"] == num_fetched, "and none of the older ones"
        here = other.service.drafters.registry.versions
        wait_for(lambda: [one.sha256 for one in here()][1:] == [newest.sha256], "the end of the older ones")  # noqa: B023
    with other.service.lock:
        assert made[3].sha256 not in {one.sha256 for one in other.service.sharing._untried.values()}, "it is gone"


def test_what_no_engine_can_take_is_not_read_every_second(
    make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_host("one", try_fetched=False)
    registry = one.service.drafters.registry
    unfit = registry.create(write_dspark, scope="kv-frozen", target_path=str(one.target), origin="other:v0002")
    read, get = list[str](), registry.get
    with one.service.lock:
        one.service.sharing._untried = {unfit.version: unfit}
        monkeypatch.setattr(registry, "get", lambda version: (read.append(version), get(version))[1])
        assert one.service.sharing._next_to_try() == ""
    assert read
    assert unfit.version not in read


def write_dspark(folder: Path) -> None:
    """A drafter of a method that no engine here drafts with."""
    write_checkpoint(folder, 3.0)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"markov_head.markov_w1.weight": np.ones((4, 4), np.float32)}, folder / "model.safetensors")


def test_what_does_worse_there_goes_out_again_and_is_not_fetched_twice(make_host: Callable[..., Host]) -> None:
    one, other = make_host("one"), make_host("other")
    before = other.service.drafters.active
    made = one.make(1.0)
    one.promote(made.version)
    name = f"v0002-{made.sha256[:8]}"
    other.engine.acceptance = {before: 0.7, name: 0.3}
    other.engine.serve(lambda: any(o.state == "failed" for o in other.adoptions()), "the verdict")
    assert other.service.drafters.active == before
    successes = other.shared()["last_success_unix_s"]
    other.engine.serve(lambda: other.shared()["last_success_unix_s"] > successes, "another look")
    assert other.shared()["fetched"] == 1
    assert len(other.service.drafters.registry.versions()) == 2


@pytest.mark.fault("a damaged version before a sound one")
def test_a_damaged_version_costs_others_and_trials_nothing(
    make_host: Callable[..., Host], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = folder / "second"
    second.mkdir()
    (second / "config.json").write_text('{"hidden_size": 4}')
    save_file({"model.norm.weight": np.full(4, 2.0, np.float32)}, second / "model.safetensors")
    one = make_host("one", publish=False)
    registry = one.service.drafters.registry
    older, damaged = one.make(0.5), one.make(1.0)
    good = registry.create(lambda at: write_checkpoint(at, 2.0), scope="kv-frozen", target_path=str(second))
    place = SharedRegistry(f"file://{folder}/staging", registry)
    for manifest in (older, damaged, good):
        place.push(manifest.version)
    weights = folder / "staging" / "versions" / damaged.sha256 / "model.safetensors"
    weights.chmod(0o640)
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")

    other = make_host("other", pool_evidence=True, try_fetched=False)
    socket = other.service.settings.paths.engine_socket
    with closing(ServingEngine(socket, engine_id="engine-1", checkpoint=other.engine.checkpoint)) as engine:
        engine.attach(target_path=str(second))
        other.try_out(other.make(9.0).version)
        copied, get_file = list[str](), LocalFileSystem.get_file

        def noting(files: LocalFileSystem, at: str, *more: Any) -> None:
            copied.append(at)
            get_file(files, at, *more)

        monkeypatch.setattr(LocalFileSystem, "get_file", noting)
        (folder / "shared").mkdir(exist_ok=True)
        (folder / "staging" / "versions").rename(folder / "shared" / "versions")
        wait_for(lambda: other.shared()["fetched"] == 2, "the sound versions of both targets")
        assert {older.sha256, good.sha256} < {m.sha256 for m in other.service.drafters.registry.versions()}
        wait_for(lambda: list((folder / "shared" / "evidence").rglob("*.json")), "the trial's evidence")
        errors = other.shared()["errors"]
        wait_for(lambda: other.shared()["errors"] > errors + 1, "two more looks")
        assert "its manifest says" in other.shared()["last_error"]
        assert [Path(at).name for at in copied if damaged.sha256 in at] == [weights.name], "and it is downloaded once"


def test_where_a_transfer_fails_only_the_newest_version_is_tried(
    make_host: Callable[..., Host], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = make_host("one", publish=False)
    made = [one.make(value) for value in (1.0, 2.0)]
    place = SharedRegistry(f"file://{folder}/shared", one.service.drafters.registry)
    for manifest in made:
        place.push(manifest.version)
    asked = list[str]()

    def gone(_: SharedRegistry, manifest: Manifest, target_path: str) -> Manifest:
        asked.append(manifest.sha256)
        raise RegistryError("can't fetch: connection reset")

    monkeypatch.setattr(SharedRegistry, "fetch", gone)
    other = make_host("other")
    wait_for(lambda: other.shared()["errors"] > 1, "two looks")
    assert set(asked) == {made[-1].sha256}


def test_imported_weights_stay_where_they_are_and_older_ones_are_not_wanted(make_host: Callable[..., Host]) -> None:
    one, other = make_host("one", try_fetched=False), make_host("other", try_fetched=False)
    older = one.make(1.0)
    newer = other.make(2.0)
    other.promote(newer.version)
    wait_for(lambda: other.shared()["pushed"] == 1, "the push")
    wait_for(lambda: one.shared()["fetched"] == 1, "the fetch")
    assert one.shared()["pushed"] == 0, "what every host has from its engine is of no use to others"
    one.promote(older.version)
    wait_for(lambda: one.shared()["pushed"] == 1, "the push")
    looked = other.shared()["last_success_unix_s"]
    wait_for(lambda: other.shared()["last_success_unix_s"] > looked + 0.5, "two more looks")
    assert other.shared()["fetched"] == 0


def test_a_place_that_fails_is_said_and_harms_nothing_else(make_host: Callable[..., Host], folder: Path) -> None:
    (folder / "file").write_text("not a folder")
    one = make_host("one", url=f"file://{folder}/file")
    one.promote(one.make(1.0).version)
    wait_for(lambda: one.shared()["errors"] > 0, "the error")
    (finding,) = [f for f in findings(status(one.service)) if "shared" in f.text]
    assert finding.level == "warning"
    assert "shared registry file://" in finding.text
    assert one.service.problems == []


@pytest.mark.fault("a place for versions that hangs, and says nothing")
def test_a_place_that_hangs_is_shown_and_holds_up_no_trial(
    make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_host("one"), make_host("other")
    goes_on, pool = threading.Event(), Sharing._pool

    def hanging(self: Sharing, shared: SharedRegistry) -> None:
        if self is other.service.sharing and self.moved["fetched"]:
            goes_on.wait(60)
        pool(self, shared)

    monkeypatch.setattr(Sharing, "_pool", hanging)
    one.promote(one.make(1.0).version)
    try:
        wait_for(other.adoptions, "the trial of the fetched version")
        job = other.service.oldest_job()
        assert job is not None
        assert job[1].startswith("the shared registry file://")
    finally:
        goes_on.set()


@pytest.mark.fault("a fetched version dropped, since an engine was away for a moment")
def test_a_version_whose_engine_goes_while_it_is_read_is_tried_out_later(
    make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = make_host("one"), make_host("other")
    drafters, eligible = other.service.drafters, other.service.eligible
    read_ahead, swappable, reads = drafters.read_ahead, eligible.swappable, list[str]()

    def reading(version: str) -> None:
        reads.append(version)
        read_ahead(version)

    looks = iter([False] * 3)  # away from the first reading on, for some looks
    monkeypatch.setattr(drafters, "read_ahead", reading)
    monkeypatch.setattr(eligible, "swappable", lambda *names: swappable(*names) if not reads or next(looks, True) else [])
    one.promote(one.make(1.0).version)
    wait_for(lambda: other.adoptions() and other.service.rollout.trial is not None, "the trial of the fetched version")
    assert len(reads) >= 2
    assert [operation.state for operation in other.adoptions()] == ["running"]


def test_a_host_that_can_not_push_still_fetches(make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = make_host("one", try_fetched=False), make_host("other", try_fetched=False)
    push = SharedRegistry.push

    def read_only(self: SharedRegistry, version: str) -> bool:
        if self._registry is other.service.drafters.registry:
            raise RegistryError("can't push: permission denied")
        return push(self, version)

    monkeypatch.setattr(SharedRegistry, "push", read_only)
    other.promote(other.make(1.0).version)
    wait_for(lambda: "permission denied" in other.shared()["last_error"], "the error")
    one.promote(one.make(2.0).version)
    wait_for(lambda: other.shared()["fetched"] == 1, "the fetch")
    assert other.shared()["pushed"] == 0


def test_a_failed_push_is_said_while_the_fetch_waits(make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_host("one")
    has_failed, is_over = threading.Event(), threading.Event()

    def push(_: SharedRegistry, version: str) -> bool:
        has_failed.set()
        raise RegistryError("no answer")

    def missing(_: SharedRegistry, targets: Collection[str]) -> list[Manifest]:
        if has_failed.is_set():
            is_over.wait(60.0)
        return []

    monkeypatch.setattr(SharedRegistry, "push", push)
    monkeypatch.setattr(SharedRegistry, "missing", missing)
    try:
        one.promote(one.make(1.0).version)
        wait_for(lambda: one.shared()["last_error"] == "no answer", "the error", 10.0)
    finally:
        is_over.set()


@pytest.mark.fault("a damaged upload that nobody repairs")
def test_what_was_removed_there_comes_back_while_it_is_active(make_host: Callable[..., Host], folder: Path) -> None:
    one = make_host("one")
    made = one.make(1.0)
    one.promote(made.version)
    wait_for(lambda: one.shared()["pushed"] == 1, "the push")
    looked = one.shared()["last_success_unix_s"]
    wait_for(lambda: one.shared()["last_success_unix_s"] > looked + 0.5, "two more looks")
    assert one.shared()["pushed"] == 1, "it is there"
    shutil.rmtree(folder / "shared" / "versions" / made.sha256)
    wait_for(lambda: one.shared()["pushed"] == 2, "the next push")
    assert [m.sha256 for m in SharedRegistry(one.shared()["url"], one.service.drafters.registry).listing()] == [made.sha256]


def test_credentials_of_the_url_are_shown_to_nobody(make_host: Callable[..., Host]) -> None:
    host = make_host("one", url="memory://key:secret@bucket/honed")
    assert host.shared()["url"] == "memory://bucket/honed"


def test_a_url_that_nobody_can_read_stops_the_start(make_host: Callable[..., Host], monkeypatch: pytest.MonkeyPatch) -> None:
    routers: list[object] = []
    monkeypatch.setattr("honed.daemon.service.Router", lambda *arguments, **more: routers.append(arguments))
    with pytest.raises(RegistryError, match="nope"):
        make_host("one", url="nope://x")
    assert not routers, "a socket that nobody closes would hang the end of the process"


def test_nobody_is_shown_the_credentials_in_the_url(folder: Path) -> None:
    url = "memory://KEY:SE/CRET@bucket/honed"
    settings = load(None, flags_in(folder) | {"registry": {"url": url}}, env={})
    settings.paths.state_dir.mkdir()
    settings.paths.runtime_dir.mkdir()
    service = Service(settings, daemon_id="test")
    service.start()
    try:
        with TestClient(make_app(service)) as client:
            for path in ("/v1/config", "/v1/status"):
                answer = client.get(path).text
                assert "SE/CRET" not in answer
                assert '"memory://bucket/honed"' in answer
    finally:
        service.stop()


def test_hosts_that_pool_their_evidence_decide_together(make_host: Callable[..., Host]) -> None:
    one, other = make_host("one", pool_evidence=True), make_host("other", pool_evidence=True, try_fetched=False)
    before = one.service.drafters.active
    made = one.make(1.0)
    one.prove(made.version)
    wait_for(lambda: other.shared()["fetched"] == 1, "the version on the other host")

    name = f"v0002-{made.sha256[:8]}"
    other.try_out(name)
    trial = other.service.rollout.trial
    assert trial is not None
    other.engine.serve(lambda: trial.canary.num_others == 1, "the other's evidence", rounds=0)
    first = one.service.canaries.latest
    assert first is not None
    assert trial.canary.heard.keys() == {"", "default"}
    assert np.array_equal(trial.canary.heard[""], first.canary.report()[""]), "the last word of a trial that is over"
    other.engine.acceptance = {before: 0.40, name: 0.43}
    other.engine.serve(lambda: other.service.rollout.trial is None, "the verdict")
    assert trial.canary.verdict.decision == "better"
    assert (one.shared()["errors"], other.shared()["errors"]) == (0, 0)


def test_hosts_that_do_not_pool_tell_nothing(make_host: Callable[..., Host], folder: Path) -> None:
    one = make_host("one")
    one.prove(one.make(1.0).version)
    wait_for(lambda: one.shared()["pushed"] == 1, "the push")
    looked = one.shared()["last_success_unix_s"]
    wait_for(lambda: one.shared()["last_success_unix_s"] > looked, "the end of a look, which would tell evidence last")
    assert not (folder / "shared" / "evidence").exists()
