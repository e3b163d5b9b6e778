"""A version's life through the API: recalibrate, promote, roll back; engines and trainer are spoken to over the real socket."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import structlog
from fastapi.testclient import TestClient
from safetensors.numpy import save_file

from honed.adapt.monitor.drift import Alarm
from honed.adapt.protocol import wire
from honed.daemon.api.app import make_app
from honed.daemon.control import warm_start
from honed.daemon.errors import ConflictError, StoreError
from honed.daemon.ingest.engines import SEEN_EVERY_S
from honed.daemon.lifecycle.lifecycle import GONE_S
from honed.daemon.lifecycle.old_versions import AWAY_S
from honed.daemon.lifecycle.recalibrations import MAX_RESTARTS
from honed.daemon.lifecycle.swaps import LOST_S, TIMEOUT_S, Swap
from honed.daemon.service import Service
from honed.daemon.settings.settings import Settings
from honed.daemon.store.operations import Operations
from honed.daemon.views.findings import findings
from honed.recalib.registry.manifest import Manifest
from honed.recalib.registry.registry import RegistryError
from tests.daemon.conftest import wait_for
from tests.daemon.fake_engine import FakeTrainer, ServingEngine


def write_checkpoint(folder: Path, value: float) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # Only the MLP differs: what is in an engine's cache stays right, as with scope "kv-frozen".
    same = {"fc.weight": np.ones((4, 4), np.float32), "hidden_norm.weight": np.ones(4, np.float32)}
    save_file(same | {"layers.0.mlp.up_proj.weight": np.full((4, 4), value, np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))


@dataclass
class Stage:
    """A daemon, an engine that runs a registered drafter, a trainer, and the API."""

    service: Service
    engine: ServingEngine
    trainer: FakeTrainer
    client: TestClient
    first: str
    folder: Path

    def version(self, value: float, **more: Any) -> str:
        """Another version, as the trainer would make it."""
        return self.service.drafters.registry.create(
            lambda folder: write_checkpoint(folder, value), parent=self.first, target_path="/models/tiny", **more
        ).version

    def operation(self, operation_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get(f"/v1/operations/{operation_id}").json()
        return found

    def wait_state(self, operation_id: str, state: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            found = self.operation(operation_id)
            return found if found["state"] == state else None

        return wait_for(look, f"state {state}")  # type: ignore[no-any-return]

    def recalibrate(self, **body: Any) -> tuple[str, wire.TrainRequest]:
        answer = self.client.post("/v1/recalibrations", json=body)
        assert answer.status_code == 202, answer.text
        return answer.json()["operation_id"], self.trainer.expect(wire.TrainRequest)

    def serve_workload(self, name: str) -> None:
        """Have a few rounds of it."""
        self.engine.workload = name
        self.engine.serve(lambda: ("engine-0", name) in self.service.live.workloads(), f"rounds of {name}")
        self.engine.workload = "default"

    def promote(self, version: str, *, force: bool = True, answer: bool = True) -> str:
        """By an operator, who doesn't want it watched unless `force` is off."""
        answered = self.client.post(f"/v1/drafters/{version}:promote", json={"force": force})
        assert answered.status_code == 202, answered.text
        operation_id: str = answered.json()["operation_id"]
        if answer:
            self.engine.answer_swap()
            self.wait_state(operation_id, "succeeded")
        return operation_id

    def finish(self, operation_id: str, rounds: int = 40) -> dict[str, Any]:
        """Do whatever is asked (a trial's turns may come first), in steps of so many requests, until it is over."""

        def look() -> dict[str, Any] | None:
            found = self.operation(operation_id)
            return found if found["state"] in ("succeeded", "failed", "cancelled") and found["stage"] == "done" else None

        found: dict[str, Any] = self.engine.serve(look, f"the end of {operation_id}", rounds)
        return found

    def aliases(self) -> dict[str, str | None]:
        found: dict[str, str | None] = self.client.get("/v1/drafters").json()["aliases"]
        return found


@pytest.fixture
def stage(service: Service, settings: Settings, folder: Path) -> Iterator[Stage]:
    write_checkpoint(folder / "drafter", 0.0)
    engine = ServingEngine(settings.paths.engine_socket, checkpoint=str(folder / "drafter"))
    trainer = FakeTrainer(settings.paths.engine_socket)
    welcome = engine.attach(capture_path="/ring")
    trainer.introduce()
    with TestClient(make_app(service)) as client:
        yield Stage(service, engine, trainer, client, welcome.drafter_version, folder)
    engine.close()
    trainer.close()


def test_the_first_checkpoint_becomes_active_and_the_floor(stage: Stage) -> None:
    assert stage.first.startswith("v0001-")
    assert stage.aliases() == {"active": stage.first, "floor": stage.first, "candidate": None, "previous": None}


def write_target(folder: Path) -> None:
    """A small target's checkpoint, in one file as a drafter's is."""
    folder.mkdir()
    save_file({"model.layers.0.mlp.up_proj.weight": np.ones((4, 4), np.float32)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"hidden_size": 4}))


@pytest.mark.parametrize("method", ["ngram", "dflash"])
def test_a_target_that_an_engine_takes_for_its_drafter_is_never_a_version(
    service: Service, settings: Settings, folder: Path, method: str
) -> None:
    """It became the active version and the floor, and was sent to every DFlash engine for ever."""
    write_target(folder / "target")
    write_checkpoint(folder / "drafter", 0.0)
    plain = ServingEngine(settings.paths.engine_socket, checkpoint=str(folder / "target"), engine_id="plain")
    drafting = ServingEngine(settings.paths.engine_socket, checkpoint=str(folder / "drafter"))
    try:
        assert plain.attach(method=method, capabilities=["events", "draft_length"]).drafter_version == ""
        assert service.drafters.active == ""
        first = drafting.attach().drafter_version
        assert [one.version for one in service.drafters.registry.versions()] == [service.drafters.active] == [first]
        plain.turn()
        drafting.serve(lambda: service.live.workloads() >= {("engine-0", "default")}, "rounds")
        assert drafting.swaps == plain.swaps == []
        note = service.engines.by_id["plain"].drafter_note
        assert ("holds no drafter" in note) == (method == "dflash")
        assert "/home" not in note, "it can be read"
    finally:
        plain.close()
        drafting.close()


def test_an_engine_of_another_method_is_given_no_version(stage: Stage, settings: Settings) -> None:
    """Whatever its hello claims: its drafter has other tensors."""
    new = stage.version(1.0)
    other = ServingEngine(settings.paths.engine_socket, engine_id="other")
    try:
        other.live_version = "v0009-0badcafe"
        other.attach(method="eagle3")
        with stage.service.lock:
            stage.service.swaps.tick(stage.service.monotonic())
            assert [engine.engine_id for engine in stage.service.eligible.swappable(new)] == ["engine-0"]
        stage.promote(new)
        other.turn(0)
        assert other.swaps == []
    finally:
        other.close()


def test_replicas_learn_together(stage: Stage, settings: Settings) -> None:
    """Data-parallel ones share the traffic, so each has a part of the samples. Another target's aren't for this drafter."""
    others = [
        ServingEngine(settings.paths.engine_socket, engine_id=name, checkpoint=stage.engine.checkpoint)
        for name in ("replica", "layers", "tuned", "silent")
    ]
    differs: list[dict[str, Any]] = [{}, {"features": "layers"}, {"target_path": "/models/other"}, {"capture_path": ""}]
    try:
        for other, more in zip(others, differs, strict=True):
            other.attach(**({"capture_path": f"/{other.engine_id}"} | more))
        operation_id, request = stage.recalibrate(engine_id="engine-0")
        assert request.capture_paths == ["/ring", "/replica"]
        stage.trainer.send(wire.TrainerStatus(trainer_id="trainer-0", state="collecting", operation_id=operation_id))
        others[0].expect(wire.Policy, lambda policy: policy.capture_share == 1.0)
        with stage.service.lock:
            now_s = stage.service.monotonic()
            asked = {name: stage.service.recalibrations.capture_override(name, now_s) for name in ("replica", "layers")}
        assert asked["replica"] is not None
        assert asked["layers"] is None
    finally:
        for other in others:
            other.close()


def test_a_pair_that_cannot_be_trained_is_refused_with_the_engine_s_reasons(stage: Stage) -> None:
    reasons = ["quantization is not supported for training", "the target's files have no tensor lm_head.weight"]
    stage.engine.attach(capabilities=["events", "draft_length", "swap"], untrained=reasons)
    refused = stage.client.post("/v1/recalibrations", json={})
    assert refused.status_code == 409
    assert "; ".join(reasons) in refused.json()["detail"]
    assert stage.client.get("/v1/engines").json()[0]["untrained"] == reasons


def test_no_recalibration_begins_while_a_version_is_swapped_in(stage: Stage) -> None:
    """It would train in full, and then find that its parent isn't active any more."""
    operation_id = stage.promote(stage.version(1.0), answer=False)
    refused = stage.client.post("/v1/recalibrations", json={})
    assert refused.status_code == 409
    assert f"operation {operation_id} is swapping a drafter" in refused.json()["detail"]
    stage.engine.answer_swap()
    stage.wait_state(operation_id, "succeeded")
    stage.recalibrate()


def test_what_vllm_threw_away_in_its_sleep_is_brought_back(stage: Stage) -> None:
    stage.engine.send_status(drafter_version=stage.first, is_asleep=True)
    wait_for(lambda: stage.client.get("/v1/engines").json()[0]["asleep"], "the status")
    new = stage.version(1.0)
    refused = stage.client.post(f"/v1/drafters/{new}:promote", json={})
    assert refused.status_code == 409
    assert "engine engine-0 sleeps" in refused.json()["detail"]
    assert stage.client.post("/v1/engines/engine-0:verify").status_code == 409
    stage.engine.send_status(drafter_version="lost", is_asleep=False)
    stage.engine.live_version = "lost"
    stage.engine.serve(lambda: stage.engine.live_version == stage.first, "the active version", rounds=0)


def test_an_engine_that_lost_its_weights_gets_its_own_back_where_the_active_ones_arent_for_it(stage: Stage) -> None:
    new = stage.version(1.0)
    with stage.service.lock:
        stage.service.drafters.move({"active": new})
        stage.service.engines.by_id["engine-0"].boot.own_version = stage.first
    own = stage.service.drafters.is_for
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage.service.drafters, "is_for", lambda version, hello: version != new and own(version, hello))
        stage.engine.send_status(drafter_version="lost")
        wait_for(lambda: stage.client.get("/v1/engines").json()[0]["drafter_version"] == "lost", "the status")
        stage.engine.serve(lambda: stage.engine.swaps, "the swap", rounds=0)
    assert stage.engine.live_version == stage.first


def test_an_engine_that_stays_behind_is_asked_after_ever_longer_pauses(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    asked_s: list[int] = []
    with stage.service.lock, monkeypatch.context() as refusing:
        stage.service.drafters.move({"active": stage.version(1.0)})
        swaps, now_s = stage.service.swaps, float(int(stage.service.monotonic()))
        for second in range(32):
            refusing.setattr(swaps, "begin", lambda *_, second=second: asked_s.append(second))
            swaps.tick(now_s + second)
    assert asked_s == [0, 1, 3, 7, 15, 31]


def test_weights_that_came_through_vllms_own_endpoint_are_left_alone(stage: Stage) -> None:
    """Until an operator promotes a version: then they are overwritten, and the engine follows again."""
    stage.engine.send_status(drafter_version="foreign")
    stage.engine.live_version = "foreign"
    wait_for(lambda: stage.client.get("/v1/engines").json()[0]["drafter_version"] == "foreign", "the status")
    for _ in range(3):
        with stage.service.lock:
            stage.service.tick(stage.service.monotonic())
    stage.engine.turn(rounds=40)
    assert stage.engine.swaps == []
    for path in ("/v1/recalibrations", "/v1/engines/engine-0:verify"):
        refused = stage.client.post(path, json={})
        assert refused.status_code == 409
        assert "the drafter of engine engine-0 got its weights through vLLM's own endpoint" in refused.json()["detail"]
        assert "honed promote VERSION --force" in refused.json()["cure"]
    answer = stage.client.post(f"/v1/drafters/{stage.first}:promote", json={"force": True}).json()
    stage.engine.serve(lambda: stage.engine.swaps, "the swap", rounds=0)
    assert stage.engine.swaps[0].takes_over
    stage.wait_state(answer["operation_id"], "succeeded")
    assert stage.engine.live_version == stage.first
    new = stage.version(1.0)
    stage.client.post(f"/v1/drafters/{new}:promote", json={"force": True})
    stage.engine.serve(lambda: stage.engine.live_version == new, "the next swap", rounds=0)
    assert not stage.engine.swaps[1].takes_over


def test_a_recalibration_is_tried_out_on_live_traffic_and_promoted(stage: Stage) -> None:
    stage.serve_workload("b")
    operation_id, request = stage.recalibrate(workloads=["b"], reason="why not")
    assert (request.parent_version, request.workloads, request.capture_paths) == (stage.first, ["b"], ["/ring"])
    # While it collects, requests are captured.
    stage.engine.expect(wire.Policy, lambda policy: policy.capture_share == 1.0)
    stage.trainer.send(wire.TrainerStatus(trainer_id="trainer-0", state="training", operation_id=operation_id, steps=7))
    wait_for(lambda: stage.operation(operation_id)["stage"] == "training", "the stage")
    stage.engine.expect(wire.Policy, lambda policy: policy.capture_share < 1.0)  # it waits for no samples any more
    new = stage.version(1.0)
    stage.trainer.send(wire.TrainResult(operation_id=operation_id, ok=True, version=new, steps=9))
    stage.engine.acceptance = {stage.first: 0.4, new: 0.7}
    done = stage.finish(operation_id)
    assert (done["state"], done["detail"]["pause_ms"], done["detail"]["steps"]) == ("succeeded", 1.5, 9)
    assert stage.engine.live_version == new
    assert stage.aliases() | {"floor": None} == {"active": new, "previous": stage.first, "candidate": None, "floor": None}
    assert stage.service.store.drain(10)
    marks = stage.client.get("/v1/timeline?since=0").json()["marks"]
    assert [mark["kind"] for mark in marks] == ["canary", "canary", "promote"]


def test_old_versions_go_but_for_those_with_a_name(stage: Stage) -> None:
    versions = [stage.version(float(number)) for number in range(1, 20)]
    stage.promote(versions[0])

    def kept() -> list[str]:
        return [manifest.version for manifest in stage.service.drafters.registry.versions()]

    keep = stage.service.settings.registry.keep_versions
    wanted = [stage.first, versions[0], *versions[-keep:]]  # the floor and previous, the active one, the newest
    assert len(wanted) < 20
    wait_for(lambda: kept() == wanted, "the old versions' end")


def test_what_a_silent_engine_runs_stays(stage: Stage) -> None:
    """It serves on, say behind a broken socket, and comes back with a version that was gone."""
    runs = stage.version(1.0)
    with stage.service.lock:
        engine = stage.service.engines.by_id["engine-0"]
        engine.live_version = runs
        engine.last_seen_s -= 3600.0
    newest = [stage.version(float(number)) for number in range(2, 30)][-1]
    stage.service.old_versions.remove()
    left = {manifest.version for manifest in stage.service.drafters.registry.versions()}
    assert {stage.first, runs, newest} <= left
    assert len(left) < 20


def test_what_an_engine_came_with_stays(stage: Stage) -> None:
    """It gets that back where it has lost its weights and the active version isn't for it."""
    own = stage.version(1.0)
    with stage.service.lock:
        stage.service.engines.by_id["engine-0"].boot.own_version = own
    for number in range(2, 20):
        stage.version(float(number))
    stage.service.old_versions.remove()
    left = {manifest.version for manifest in stage.service.drafters.registry.versions()}
    assert own in left
    assert len(left) < 20


@pytest.mark.parametrize("away_s", [0.0, AWAY_S + 3600.0])
def test_what_an_engine_runs_stays_over_a_restart_of_the_daemon(settings: Settings, folder: Path, away_s: float) -> None:
    """The restarted daemon removed it before the engine had said hello again."""
    service, engine, trainer, first = first_life(settings, folder)
    try:
        stage = Stage(service, engine, trainer, TestClient(make_app(service)), first, folder)
        engine.live_version = runs = stage.version(1.0)
        engine.turn()
        engine.wait_acked(1)
        service.stop()
        service.drafters.registry.set_aliases({"active": None, "floor": None})
        for number in range(2, 30):
            stage.version(float(number))
        service = Service(settings, daemon_id="two", clock=lambda: time.time() + away_s)
        service.start()
        service.old_versions.remove()
        left = {manifest.version for manifest in service.drafters.registry.versions()}
        assert {first, runs} <= left
        assert len(left) < 20
    finally:
        service.stop()
        engine.close()
        trainer.close()


def test_what_an_engine_without_traffic_runs_stays_over_a_restart_of_the_daemon(settings: Settings, folder: Path) -> None:
    """It was connected all the time, but nothing was stored about it for a day."""
    service, engine, trainer, first = first_life(settings, folder)
    busy = ServingEngine(settings.paths.engine_socket, checkpoint=engine.checkpoint, engine_id="busy")
    try:
        busy.attach()
        stage = Stage(service, engine, trainer, TestClient(make_app(service)), first, folder)
        runs, before = stage.version(1.0), stage.version(2.0)
        for version in (before, runs):
            engine.send_status(drafter_version=version)
            wait_for(lambda version=version: service.engines.by_id["engine-0"].live_version == version, "the status")
            with service.lock:
                service.engines.by_id["engine-0"].boot.seen_s -= SEEN_EVERY_S
                service.ingest._clock = lambda: time.time() + AWAY_S + 3600.0
        busy.turn()
        busy.wait_acked(1)
        service.stop()
        service.drafters.registry.set_aliases({"active": None, "floor": None})
        for number in range(3, 30):
            stage.version(float(number))
        service = Service(settings, daemon_id="two", clock=lambda: time.time() + AWAY_S + 3600.0)
        service.start()
        service.old_versions.remove()
        left = {manifest.version for manifest in service.drafters.registry.versions()}
        assert {first, runs} <= left
        assert before not in left
    finally:
        service.stop()
        for one in (engine, busy, trainer):
            one.close()


def test_nothing_is_removed_at_a_start_before_it_is_known_what_engines_run(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alias of a candidate without a trial is removed at the start, and old versions with it."""
    service, engine, trainer, first = first_life(settings, folder)
    try:
        stage = Stage(service, engine, trainer, TestClient(make_app(service)), first, folder)
        engine.live_version = runs = stage.version(1.0)
        engine.turn()
        engine.wait_acked(1)
        service.stop()
        left_over = [stage.version(float(number)) for number in range(2, 30)][-1]
        service.drafters.registry.set_aliases({"active": None, "floor": None, "candidate": left_over})
        monkeypatch.setattr(Service, "in_background", lambda self, job: job())
        service = Service(settings, daemon_id="two")
        service.start()
        assert service.drafters.alias("candidate") == ""
        left = {manifest.version for manifest in service.drafters.registry.versions()}
        assert {first, runs} <= left
        assert len(left) < 20
    finally:
        service.stop()
        engine.close()
        trainer.close()


@pytest.mark.fault("ever new checkpoints that fill the disk")
def test_engines_that_name_ever_new_checkpoints_do_not_fill_the_disk(stage: Stage, settings: Settings) -> None:
    keep = settings.registry.keep_versions
    for number in range(keep + 5):
        write_checkpoint(stage.folder / f"other-{number}", 10.0 + number)
        other = ServingEngine(
            settings.paths.engine_socket,
            engine_id="other",
            boot_id=f"b{number}",
            checkpoint=str(stage.folder / f"other-{number}"),
        )
        other.attach()
        other.close()

    def kept() -> int:
        return len(stage.service.drafters.registry.versions())

    wait_for(lambda: kept() <= keep + 1, "the old versions' end")


@pytest.mark.fault("a checkpoint read again at every hello")
def test_a_checkpoint_that_did_not_change_is_read_once(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    registry = stage.service.drafters.registry
    import_checkpoint = registry.import_checkpoint

    def count(path: Path, **more: Any) -> Manifest:
        read.append(path)
        return import_checkpoint(path, **more)

    monkeypatch.setattr(registry, "import_checkpoint", count)
    for boot in ("second", "third"):
        stage.engine.die(boot)
        assert stage.engine.attach().drafter_version == stage.first
    assert read == []
    write_checkpoint(stage.folder / "drafter", 5.0)
    stage.engine.die("fourth")
    assert stage.engine.attach().drafter_version != stage.first
    assert len(read) == 1


def test_no_checkpoint_is_read_for_an_unknown_user(stage: Stage) -> None:
    write_checkpoint(stage.folder / "other", 6.0)
    hello = stage.engine.hello_message(drafter_path=str(stage.folder / "other"))
    with pytest.raises(RegistryError, match="the user of its process is unknown"):
        stage.service.drafters.identify(hello, None)
    assert [manifest.version for manifest in stage.service.drafters.registry.versions()] == [stage.first]


@pytest.mark.fault("engines that wait behind replays of the log")
def test_no_engine_waits_for_its_version_behind_a_replay(
    stage: Stage, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(warm_start, "learn_from_log", lambda *arguments: go_on.wait(60.0) and (0, 0))
    try:
        for number in range(3):
            other = ServingEngine(settings.paths.engine_socket, engine_id=f"other-{number}", checkpoint=stage.engine.checkpoint)
            assert other.attach().drafter_version == stage.first
            other.close()
    finally:
        go_on.set()


@pytest.mark.fault("an engine that doesn't answer its swap")
def test_an_engine_that_does_not_answer_holds_up_no_other(stage: Stage, settings: Settings) -> None:
    """One that is behind is brought to the active version while another one is silent."""
    new = stage.version(1.0)
    stage.promote(new)
    silent = ServingEngine(settings.paths.engine_socket, engine_id="silent", checkpoint=stage.engine.checkpoint)
    silent.attach()
    silent.expect(wire.SwapCommand)
    behind = ServingEngine(settings.paths.engine_socket, engine_id="behind", checkpoint=stage.engine.checkpoint)
    behind.attach()
    began_s = stage.service.monotonic()
    assert behind.answer_swap().weights.version == new
    assert stage.service.monotonic() - began_s < LOST_S / 2
    silent.close()
    behind.close()


@pytest.mark.parametrize(
    ("after_s", "silent_s", "error"),
    [
        (LOST_S + 10.0, 0.0, ""),
        (LOST_S + 10.0, LOST_S - 1.0, ""),
        (LOST_S + 10.0, LOST_S + 1.0, "was lost during the swap"),
        (TIMEOUT_S + 10.0, 0.0, "did not answer the swap command"),
    ],
)
def test_an_engine_that_is_there_may_read_weights_for_minutes(
    stage: Stage, after_s: float, silent_s: float, error: str
) -> None:
    operation_id = stage.promote(stage.version(1.0), answer=False)
    stage.engine.expect(wire.SwapCommand)
    with stage.service.lock:
        stage.service.engines._lost_after_s = 5.0
        later_s = stage.service.monotonic() + after_s
        stage.service.engines.by_id["engine-0"].last_seen_s = later_s - silent_s
        stage.service.swaps.tick(later_s)
    assert error in stage.operation(operation_id)["error"]
    assert stage.operation(operation_id)["state"] == ("failed" if error else "running")


def test_a_dry_run_swaps_nothing(stage: Stage) -> None:
    operation_id, request = stage.recalibrate(dry_run=True)
    assert request.dry_run
    stage.trainer.send(wire.TrainResult(operation_id=operation_id, ok=True))
    assert stage.wait_state(operation_id, "succeeded")["stage"] == "done"
    assert stage.aliases()["active"] == stage.first


def test_a_workload_that_was_never_seen_is_refused_with_those_there_are(stage: Stage) -> None:
    stage.serve_workload("b")
    refused = stage.client.post("/v1/recalibrations", json={"workloads": ["b", "nope"]})
    assert refused.status_code == 404
    assert "has never had a round of workload 'nope'; there is b" in refused.json()["detail"]
    assert stage.service.rollout.training is None


def test_a_workload_from_before_a_restart_is_known(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.serve_workload("b")
    assert stage.service.store.drain(10)
    monkeypatch.setattr(stage.service.live, "_cells", {})
    was_locked = []
    scan = stage.service.store.scan

    def watched(*query: Any) -> Iterator[dict[str, Any]]:
        was_locked.append(stage.service.lock._is_owned())  # type: ignore[attr-defined]
        return scan(*query)

    monkeypatch.setattr(stage.service.store, "scan", watched)
    stage.recalibrate(workloads=["b"])
    assert was_locked == [False]  # all rows of a month are read


def test_a_candidate_that_does_not_pass_the_gate_fails_with_its_figures(stage: Stage) -> None:
    operation_id, _ = stage.recalibrate()
    row = wire.GateFigures(workload="a", sessions=3, parent=2.0, candidate=1.9, gain_low=0.9, gain_high=1.0, passed=False)
    stage.trainer.send(wire.TrainResult(operation_id=operation_id, ok=False, error="it lost on a", gate=[row]))
    failed = stage.wait_state(operation_id, "failed")
    assert failed["error"] == "it lost on a"
    assert failed["detail"]["gate"][0]["candidate"] == 1.9


def test_a_swap_that_an_engine_refuses_leaves_the_old_version_active(stage: Stage) -> None:
    new = stage.version(1.0)
    operation_id = stage.client.post(f"/v1/drafters/{new}:promote").json()["operation_id"]
    stage.engine.answer_swap(ok=False, error="shapes differ")
    assert "engine-0: shapes differ" in stage.wait_state(operation_id, "failed")["error"]
    assert stage.aliases()["active"] == stage.first


def test_promote_and_roll_back(stage: Stage) -> None:
    new = stage.version(1.0)
    promoted = stage.promote(new)
    back = stage.client.post("/v1/drafters:rollback", json={"reason": "worse"}).json()
    assert stage.engine.answer_swap().weights.version == stage.first
    stage.wait_state(back["operation_id"], "succeeded")
    assert stage.aliases()["active"] == stage.first
    assert stage.operation(promoted)["stage"] == "done"
    assert stage.client.post("/v1/drafters:rollback").status_code == 409
    assert stage.service.store.drain(10)
    actions = [row["action"] for row in stage.client.get("/v1/audit").json()]
    assert actions[::-1] == ["promote", "promote.swapped", "rollback"]


def test_two_who_roll_back_at_once_take_one_version_out(stage: Stage) -> None:
    """The second one went behind the good version, which the first one had gone back to."""
    path, good, bad = "/v1/drafters:rollback", stage.version(1.0), stage.version(2.0)
    for version in (good, bad):
        stage.promote(version)
    one = stage.client.post(path, json={}, headers={"Idempotency-Key": "one"}).json()["operation_id"]
    stage.engine.answer_swap()
    stage.wait_state(one, "succeeded")
    for dry_run in (False, True):
        refused = stage.client.post(path, json={"dry_run": dry_run})
        assert refused.status_code == 409
        assert refused.json()["detail"].startswith(f"{bad} was taken out ")
        assert refused.json()["detail"].endswith(f" s ago, perhaps by somebody else, and {good} would go now")
        assert refused.json()["cure"] == f"Name the version that is to go: `honed rollback {good}`."
    again = stage.client.post(path, json={}, headers={"Idempotency-Key": "one"})
    assert (again.status_code, again.json()["operation_id"]) == (202, one)
    gone = stage.client.post(path, json={"version": bad})
    assert gone.status_code == 409
    assert gone.json()["detail"] == f"{bad} can't be taken out: {good} is active"
    assert stage.aliases()["active"] == good
    seen = {"If-Match": str(stage.client.get("/v1/drafters").json()["generation"])}
    for body, headers in (({"version": good}, {}), ({}, seen)):
        planned = stage.client.post(path, json={**body, "dry_run": True}, headers=headers)
        assert (planned.status_code, planned.json()["detail"]["rolled_back"]) == (202, good)
    with stage.service.lock:
        stage.service.lifecycle._gone_s -= GONE_S
    assert stage.client.post(path, json={}).status_code == 202
    assert stage.aliases()["active"] == stage.first


def test_an_engine_lost_in_the_swap_is_asked_again_when_it_comes_back(stage: Stage) -> None:
    new = stage.version(1.0)
    operation_id = stage.client.post(f"/v1/drafters/{new}:promote").json()["operation_id"]
    first = stage.engine.expect(wire.Command)
    stage.engine.reconnect()
    stage.engine.hello(drafter_version=stage.first)
    again = stage.engine.answer_swap()
    assert again.command_id == first.command_id
    stage.wait_state(operation_id, "succeeded")


def test_an_engine_that_swapped_but_could_not_say_so_settles_it_by_its_hello(stage: Stage) -> None:
    new = stage.version(1.0)
    operation_id = stage.client.post(f"/v1/drafters/{new}:promote").json()["operation_id"]
    stage.engine.expect(wire.Command)
    stage.engine.reconnect()
    stage.engine.hello(drafter_version=new)
    stage.wait_state(operation_id, "succeeded")
    assert stage.aliases()["active"] == new


def test_a_restarted_engine_is_brought_to_the_active_version(stage: Stage) -> None:
    new = stage.version(1.0)
    stage.promote(new)
    stage.engine.boot_id = "second boot"
    stage.engine.reconnect()
    assert stage.engine.hello(drafter_path=str(stage.folder / "drafter")).drafter_version == stage.first
    assert stage.engine.answer_swap().weights.version == new
    wait_for(lambda: stage.service.engines.by_id["engine-0"].live_version == new, "the active version")


def test_a_newer_drafter_that_an_engine_comes_with_is_not_passed_over_in_silence(stage: Stage) -> None:
    """The active version serves all the same, until somebody decides otherwise."""

    def notes() -> list[str]:
        return [one.text for one in findings(stage.client.get("/v1/status").json()) if "newer drafter" in one.text]

    new = stage.version(1.0)
    stage.promote(new)
    assert not notes()
    write_checkpoint(stage.folder / "bought", 7.0)
    stage.engine.boot_id = "second boot"
    stage.engine.reconnect()
    own = stage.engine.hello(drafter_path=str(stage.folder / "bought")).drafter_version
    assert own not in ("", stage.first, new)
    assert stage.engine.answer_swap().weights.version == new
    (text,) = wait_for(notes, "the note")
    assert f"honed promote {own}" in text
    stage.promote(own)
    assert not notes()


def damage(stage: Stage, version: str) -> None:
    """Change a byte of its weights, as a failing disk does."""
    weights = stage.service.drafters.path(version) / "model.safetensors"
    weights.chmod(0o640)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)


def remove(stage: Stage, version: str) -> None:
    shutil.rmtree(stage.service.drafters.path(version))


def swaps_sent(stage: Stage, after_s: float) -> int:
    """Swaps on their way after a tick."""
    with stage.service.lock:
        stage.service.swaps.tick(stage.service.monotonic() + after_s)
        return len(stage.service.swaps._sent)


@pytest.mark.fault("active weights damaged at rest")
@pytest.mark.parametrize("way_out", ["rollback", "promote", "restore"])
def test_damaged_active_weights_are_named_and_there_is_a_way_out(stage: Stage, way_out: str) -> None:
    """The engine restarts with its own drafter and refuses the damaged file: that went on for ever, and nothing said so."""
    other, new = stage.version(2.0), stage.version(1.0)
    stage.promote(new)
    whole = (stage.service.drafters.path(new) / "model.safetensors").read_bytes()
    damage(stage, new)
    stage.engine.boot_id = "second boot"
    stage.engine.reconnect()
    stage.engine.hello(drafter_path=str(stage.folder / "drafter"))
    assert stage.engine.answer_swap(ok=False, error="model.safetensors has another sha256: not used").weights.version == new
    status = wait_for(lambda: (s := stage.client.get("/v1/status").json())["drafter_problems"] and s, "the problem")
    assert new in status["drafter_problems"]["active"]
    (found,) = [one for one in findings(status) if "active drafter version" in one.text]
    assert (found.level, "honed rollback" in found.cure) == ("error", True)
    assert swaps_sent(stage, 2.0) == 0, "it would only be refused again"
    if way_out == "rollback":
        assert stage.client.post("/v1/drafters:rollback").status_code == 202
        wanted = stage.first
    elif way_out == "promote":
        assert stage.client.post(f"/v1/drafters/{other}:promote").status_code == 202
        wanted = other
    else:
        (stage.service.drafters.path(new) / "model.safetensors").write_bytes(whole)
        assert swaps_sent(stage, 2.0) == 1
        wanted = new
    assert stage.engine.answer_swap().weights.version == wanted
    wait_for(lambda: stage.aliases()["active"] == wanted == stage.engine.live_version, "the other version")
    assert stage.aliases()["previous"] != new
    wait_for(lambda: not stage.client.get("/v1/status").json()["drafter_problems"], "all to be well")


@pytest.mark.fault("an alias of a version that was removed")
def test_an_alias_of_a_removed_version_is_named_and_a_roll_back_goes_past_it(stage: Stage) -> None:
    """Somebody removed a folder: the roll-back to it answered that the database was unavailable."""
    one, two = stage.version(1.0), stage.version(2.0)
    stage.promote(one)
    stage.promote(two)
    assert stage.aliases()["previous"] == one
    remove(stage, one)
    problems = stage.client.get("/v1/status").json()["drafter_problems"]
    assert list(problems) == ["previous"]
    assert f"no version '{one}'" in problems["previous"]
    assert stage.client.post("/v1/drafters:rollback").status_code == 202
    assert stage.engine.answer_swap().weights.version == stage.first
    wait_for(lambda: stage.aliases()["active"] == stage.first, "the floor")


@pytest.mark.fault("a damaged alias that is set anew without a word")
def test_a_damaged_active_alias_is_named_and_a_promotion_sets_it_again(stage: Stage) -> None:
    trained, other = stage.version(1.0), stage.version(2.0)
    stage.promote(trained)
    alias = stage.service.drafters.registry.root / "aliases" / "active"
    alias.unlink()
    alias.write_bytes(b"")
    status = stage.client.get("/v1/status").json()
    assert list(status["drafter_problems"]) == ["active"]
    (found,) = [one for one in findings(status) if "active" in one.text]
    assert (found.level, "honed promote" in found.cure) == ("error", True)
    assert 'honed_drafter_unusable{role="active"} 1' in stage.client.get("/metrics").text
    stage.promote(other)
    assert stage.aliases()["active"] == other
    assert stage.client.get("/v1/status").json()["drafter_problems"] == {}


@pytest.mark.fault("active weights damaged at rest")
@pytest.mark.parametrize("spoil", [remove, damage])
def test_from_a_lost_active_version_every_whole_one_can_be_promoted(stage: Stage, spoil: Callable[[Stage, str], None]) -> None:
    one, two = stage.version(1.0), stage.version(2.0)
    stage.promote(one)
    spoil(stage, one)
    stage.service.drafters.read_ahead(one)
    assert list(stage.client.get("/v1/status").json()["drafter_problems"]) == ["active"]
    stage.promote(two, force=False)
    assert stage.aliases() | {"floor": None} == {"active": two, "previous": stage.first, "candidate": None, "floor": None}
    assert stage.service.rollout.trial is None, "it can't be watched against what is lost"
    assert stage.client.get("/v1/status").json()["drafter_problems"] == {}


@pytest.mark.fault("active weights damaged at rest")
def test_a_roll_back_goes_past_a_previous_version_that_is_damaged(stage: Stage) -> None:
    one, two = stage.version(1.0), stage.version(2.0)
    stage.promote(one)
    stage.promote(two)
    damage(stage, one)
    assert stage.client.post("/v1/drafters:rollback").json()["detail"]["version"] == stage.first


@pytest.mark.fault("an alias of a version that was removed")
def test_from_a_lost_active_version_nothing_is_trained(stage: Stage) -> None:
    new = stage.version(1.0)
    stage.promote(new)
    remove(stage, new)
    answer = stage.client.post("/v1/recalibrations", json={})
    assert answer.status_code == 409
    assert f"no version '{new}'" in answer.json()["detail"]
    assert "honed rollback" in answer.json()["cure"]


@pytest.mark.fault("an alias of a version that was removed")
def test_with_nothing_whole_to_go_back_to_the_reasons_are_given(stage: Stage) -> None:
    new = stage.version(1.0)
    stage.promote(new)
    remove(stage, stage.first)
    answer = stage.client.post("/v1/drafters:rollback")
    assert answer.status_code == 409
    assert f"no version '{stage.first}'" in answer.json()["detail"]
    assert "honed promote" in answer.json()["cure"]


@pytest.mark.fault("an alias of a version that was removed")
@pytest.mark.fault("a full disk that is called a start")
def test_a_registry_that_cannot_be_written_is_storage_that_is_unavailable(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage.promote(stage.version(1.0))

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("honed.recalib.registry.registry.replace_link", refuse)
    answer = stage.client.post("/v1/drafters:rollback")
    assert (answer.status_code, answer.json()["title"]) == (503, "Storage unavailable")
    assert "disk" in answer.json()["cure"]


def test_what_is_damaged_is_not_promoted(stage: Stage) -> None:
    new = stage.version(1.0)
    damage(stage, new)
    answer = stage.client.post(f"/v1/drafters/{new}:promote")
    assert answer.status_code == 409
    assert answer.headers["content-type"] == "application/problem+json"


def is_free(lock: threading.RLock) -> bool:  # type: ignore[valid-type]
    """True if another thread can take a lock that this one may hold."""
    found = []

    def look() -> None:
        found.append(lock.acquire(timeout=5.0))  # type: ignore[attr-defined]
        if found[0]:
            lock.release()  # type: ignore[attr-defined]

    other = threading.Thread(target=look)
    other.start()
    other.join()
    return found[0]


@pytest.mark.fault("aliases that are synced while everyone waits")
def test_nobody_waits_while_aliases_are_synced(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded disk each of six syncs took a second, and the router, the ticker and the API waited for them all."""
    version = stage.version(1.0)
    fsync, aliases, was_free = os.fsync, stage.service.drafters.registry.root / "aliases", []

    def sync(fd: int) -> None:
        was_free.append((os.readlink(f"/proc/self/fd/{fd}"), is_free(stage.service.lock)))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", sync)
    stage.promote(version)
    wait_for(lambda: str(aliases) in dict(was_free), "the sync after the promotion")
    was_free.clear()
    assert stage.client.post("/v1/drafters:rollback").status_code == 202
    wait_for(lambda: str(aliases) in dict(was_free), "the sync after the roll-back")
    assert all(free for _, free in was_free), was_free


def test_aliases_are_on_the_disk_before_what_is_written_about_them(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crash of the machine could leave a verdict on a version that is active still."""
    stage.promote(stage.version(1.0))
    registry, store, seen = stage.service.drafters.registry, stage.service.store, []
    sync_aliases = registry.sync_aliases

    def sync() -> None:
        if threading.current_thread().name == "honed-writer":
            seen.append((registry.alias("active"), store.read("SELECT * FROM marks WHERE kind = 'rollback'")))
        sync_aliases()

    monkeypatch.setattr(registry, "sync_aliases", sync)
    assert stage.client.post("/v1/drafters:rollback").status_code == 202
    wait_for(lambda: store.read("SELECT * FROM marks WHERE kind = 'rollback'"), "the mark")
    assert seen == [(stage.first, [])]


def test_nobody_waits_while_a_versions_files_are_read(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    verify, was_free = stage.service.drafters.registry.verify, []

    def verify_slowly(version: str) -> Manifest:
        """As of a large file: others must get at the lock meanwhile."""
        if is_free(stage.service.lock):
            was_free.append(version)
        return verify(version)

    monkeypatch.setattr(stage.service.drafters.registry, "verify", verify_slowly)
    first = stage.version(1.0)
    stage.promote(first)
    operation_id, _ = stage.recalibrate()
    second = stage.version(2.0)
    stage.trainer.send(wire.TrainResult(operation_id=operation_id, ok=True, version=second))
    wait_for(lambda: stage.operation(operation_id)["stage"] == "canary", "the canary")
    assert was_free == [first, second]


def test_what_was_read_is_read_again_once_it_has_changed(stage: Stage) -> None:
    drafters, version = stage.service.drafters, stage.version(1.0)
    drafters.read_ahead(version)
    drafters.verified(version)
    path = drafters.path(version) / "model.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.chmod(0o640)
    path.write_bytes(changed)
    with pytest.raises(ConflictError, match="the file was changed"):
        drafters.verified(version)
    drafters.read_ahead(version)  # says nothing
    with pytest.raises(ConflictError, match="the file was changed"):
        drafters.verified(version)


def test_without_a_trainer_or_an_engine_a_clear_refusal(service: Service) -> None:
    with TestClient(make_app(service)) as client:
        assert "no trainer is connected" in client.post("/v1/recalibrations", json={}).json()["detail"]
        version = service.drafters.registry.create(lambda folder: write_checkpoint(folder, 1.0)).version
        assert "no engine is connected" in client.post(f"/v1/drafters/{version}:promote").json()["detail"]
        forced = client.post(f"/v1/drafters/{version}:promote", json={"force": True})
        assert forced.status_code == 202, forced.text
        assert forced.json()["state"] == "succeeded"
        assert service.drafters.active == version


def test_a_trainer_that_restarts_is_asked_again_a_few_times(stage: Stage) -> None:
    operation_id, request = stage.recalibrate()
    assert request.error_share == 1.0
    stage.trainer.introduce(operation_id=operation_id)
    assert stage.operation(operation_id)["state"] == "running"
    for _ in range(MAX_RESTARTS):
        stage.trainer.introduce()
        assert stage.trainer.expect(wire.TrainRequest) == request
    stage.trainer.introduce()
    assert "restarted 4 times" in stage.wait_state(operation_id, "failed")["error"]


def test_a_silent_trainer_fails_its_operation(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    operation_id, _ = stage.recalibrate()
    later = stage.service.monotonic() + 1000
    monkeypatch.setattr(stage.service.trainer, "_monotonic", lambda: later)
    assert "silent" in stage.wait_state(operation_id, "failed")["error"]


def test_a_trainer_ends_what_nobody_waits_for_and_takes_up_the_next(stage: Stage) -> None:
    """As after a restart of the daemon, whose operations have failed by then: it would be busy for an hour."""
    stage.trainer.introduce(operation_id="op-before")
    assert stage.trainer.expect(wire.TrainCancel).operation_id == "op-before"
    operation_id, _ = stage.recalibrate()
    for one in (operation_id, "op-before"):
        stage.trainer.send(wire.TrainerStatus(trainer_id="trainer-0", state="training", operation_id=one))
    assert stage.trainer.expect(wire.TrainCancel).operation_id == "op-before"
    assert stage.operation(operation_id)["state"] == "running"


def test_cancelling_tells_the_trainer(stage: Stage) -> None:
    operation_id, _ = stage.recalibrate()
    assert stage.client.post("/v1/recalibrations", json={}).status_code == 409
    answer = stage.client.post(f"/v1/operations/{operation_id}:cancel", json={"reason": "no"})
    assert answer.json()["state"] == "cancelled"
    assert stage.trainer.expect(wire.TrainCancel).operation_id == operation_id
    assert stage.client.post(f"/v1/operations/{operation_id}:cancel").status_code == 409


def test_a_candidate_of_an_outdated_parent_is_not_swapped_in(stage: Stage) -> None:
    operation_id, _ = stage.recalibrate()
    other = stage.version(2.0)
    stage.promote(other)
    stage.trainer.send(wire.TrainResult(operation_id=operation_id, ok=True, version=stage.version(1.0)))
    assert "became active meanwhile" in stage.wait_state(operation_id, "failed")["error"]
    assert stage.aliases()["active"] == other


@pytest.mark.parametrize("where", ["drafters.read_ahead", "lifecycle.try_out", "canaries.tick"])
def test_a_candidate_whose_trial_cannot_begin_ends_its_recalibration(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Its training never ended, no other could begin, and nobody was told why."""
    operation_id, _ = stage.recalibrate()

    def fail(*_: object) -> None:
        raise KeyError("odd")

    part, name = where.split(".")
    with structlog.testing.capture_logs() as logs, monkeypatch.context() as patch:
        patch.setattr(getattr(stage.service, part), name, fail)
        stage.trainer.send(wire.TrainResult(operation_id=operation_id, ok=True, version=stage.version(1.0)))
        ended = stage.wait_state(operation_id, "failed")
    assert ended["error"] == "KeyError: 'odd'"
    assert [one["error"] for one in logs if one["event"] == "a candidate can't be tried out"] == ["'odd'"]
    with stage.service.lock:
        assert stage.service.rollout.training is None
        assert stage.service.rollout.trial is None
    stage.recalibrate()


def test_drift_starts_a_recalibration_and_then_waits(stage: Stage) -> None:
    stage.serve_workload("b")
    alarm = Alarm("regressed", "b", stage.first, (1,), 3.0, 500, 1.2, 1.9, "b lost")
    with stage.service.lock:
        stage.service.on_alarm(stage.service.engines.by_id["engine-0"], alarm)
    request = stage.trainer.expect(wire.TrainRequest)
    assert (request.workloads, request.reason) == (["b"], "b lost")
    stage.trainer.send(wire.TrainResult(operation_id=request.operation_id, ok=False, error="no samples"))
    stage.wait_state(request.operation_id, "failed")
    with stage.service.lock:
        stage.service.on_alarm(stage.service.engines.by_id["engine-0"], alarm)
        stage.service.tick(stage.service.monotonic())
        assert stage.service.rollout.training is None
        stage.service.tick(stage.service.monotonic() + 10_000)
        assert stage.service.rollout.training is not None


def first_life(settings: Settings, folder: Path) -> tuple[Service, ServingEngine, FakeTrainer, str]:
    """A daemon that is to be started again, an engine with its version, and a trainer that hasn't introduced itself yet."""
    write_checkpoint(folder / "drafter", 0.0)
    settings.paths.state_dir.mkdir()
    settings.paths.runtime_dir.mkdir()
    service = Service(settings, daemon_id="one")
    service.start()
    engine = ServingEngine(settings.paths.engine_socket, checkpoint=str(folder / "drafter"))
    trainer = FakeTrainer(settings.paths.engine_socket)
    return service, engine, trainer, engine.attach(capture_path="/ring").drafter_version


def drift(stage: Stage, workload: str, version: str = "") -> None:
    """Of the first version, unless told."""
    alarm = Alarm("regressed", workload, version or stage.first, (1,), 3.0, 500, 1.2, 1.9, f"{workload} lost", 1234.5)
    with stage.service.lock:
        stage.service.on_alarm(stage.service.engines.by_id["engine-0"], alarm)


def test_drift_of_two_workloads_at_once_is_answered_one_after_the_other(stage: Stage) -> None:
    for workload in ("b", "c"):
        stage.serve_workload(workload)
    with stage.service.lock:
        drift(stage, "b")
        drift(stage, "c")
    request = stage.trainer.expect(wire.TrainRequest)
    assert request.workloads == ["b"]
    stage.trainer.send(wire.TrainResult(operation_id=request.operation_id, ok=False, error="x"))
    stage.wait_state(request.operation_id, "failed")
    with stage.service.lock:
        stage.service.tick(stage.service.monotonic() + stage.service.settings.recalibration.min_interval_s)
        assert stage.service.rollout.training is not None
    assert stage.trainer.expect(wire.TrainRequest).workloads == ["c"]


@pytest.mark.parametrize("is_judged", [True, False])
def test_an_automatic_recalibration_that_failed_is_tried_again(stage: Stage, is_judged: bool) -> None:
    stage.serve_workload("b")
    with stage.service.lock:
        drift(stage, "b")
    request = stage.trainer.expect(wire.TrainRequest)
    figures = wire.GateFigures("b", sessions=9, parent=1.5, candidate=1.5, gain_low=0.9, gain_high=1.1, passed=False)
    gate, why = ([figures], "gate: no sure gain") if is_judged else ([], "not done after 3600 s")
    stage.trainer.send(wire.TrainResult(operation_id=request.operation_id, ok=is_judged, error=why, gate=gate))
    stage.wait_state(request.operation_id, "failed")
    wait_for(lambda: stage.client.get("/v1/status").json()["drift_alarms"], "the alarm to stand again")
    (standing,) = stage.client.get("/v1/status").json()["drift_alarms"]
    assert (standing["workload"], standing["failed_attempts"]) == ("b", 1)
    assert standing["hindrance"] == why
    (found,) = [one for one in findings(stage.client.get("/v1/status").json()) if "drifted" in one.text]
    assert "Another starts in" in found.cure
    status = stage.client.get("/v1/status").json()
    status["drift_alarms"][0] |= {"failed_attempts": 6, "due_in_s": None}
    (given_up,) = [one for one in findings(status) if "drifted" in one.text]
    assert "No further one starts automatically" in given_up.cure
    interval_s = stage.service.settings.recalibration.min_interval_s
    assert interval_s - 60.0 < standing["due_in_s"] <= interval_s
    with stage.service.lock:
        stage.service.tick(stage.service.monotonic() + interval_s)
    again = stage.trainer.expect(wire.TrainRequest)
    assert (again.workloads, again.reason) == (["b"], "b lost")
    shares = (0.5, 0.1 if is_judged else 0.5)
    assert (request.error_share, again.error_share) == shares, "those that are judged have the gate's error together"
    assert stage.client.get("/v1/status").json()["drift_alarms"] == []


def test_a_dry_run_answers_no_drift(stage: Stage) -> None:
    stage.serve_workload("b")
    drift(stage, "b")
    request = stage.trainer.expect(wire.TrainRequest)
    stage.trainer.send(wire.TrainResult(operation_id=request.operation_id, ok=False, error="x"))
    wait_for(lambda: stage.client.get("/v1/status").json()["drift_alarms"], "the alarm to stand again")
    operation_id, _ = stage.recalibrate(workloads=["b"], dry_run=True)
    stage.trainer.send(wire.TrainResult(operation_id=operation_id, ok=True))
    stage.wait_state(operation_id, "succeeded")
    with stage.service.lock:
        stage.service.tick(stage.service.monotonic())
    (standing,) = stage.client.get("/v1/status").json()["drift_alarms"]
    assert standing["workload"] == "b"


def test_what_keeps_drift_from_being_answered_is_said(stage: Stage) -> None:
    stage.serve_workload("b")
    stage.service.recalibrations._settings = stage.service.settings.recalibration.model_copy(update={"scope": "full"})
    with stage.service.lock:
        boot = stage.service.engines.by_id["engine-0"].boot
        assert boot.hello is not None
        boot.hello = msgspec.structs.replace(boot.hello, features="fused")
        drift(stage, "b")
        stage.service.tick(stage.service.monotonic())
    status = stage.client.get("/v1/status").json()
    assert "HONED_FEATURES=layers" in status["drift_alarms"][0]["hindrance"]
    (found,) = [one for one in findings(status) if "drifted" in one.text]
    assert "no recalibration can start" in found.text
    assert "HONED_FEATURES=layers" in found.text


def test_a_pause_that_keeps_drift_from_being_answered_is_said(stage: Stage) -> None:
    stage.serve_workload("b")
    recalibrations = stage.service.recalibrations
    with stage.service.lock:
        recalibrations._ended_s = stage.service.monotonic()
        drift(stage, "b")
        stage.service.tick(stage.service.monotonic())
    (alarm,) = stage.client.get("/v1/status").json()["drift_alarms"]
    assert alarm["hindrance"] == "the last one ended less than 900 s ago (recalibration.min_interval_s)"
    assert alarm["failed_attempts"] == 0
    with stage.service.lock:
        stage.service.tick(stage.service.monotonic() + stage.service.settings.recalibration.min_interval_s)
    stage.trainer.expect(wire.TrainRequest)


def test_drift_that_nothing_has_answered_outlives_restarts_of_the_daemon(settings: Settings, folder: Path) -> None:
    service, engine, trainer, first = first_life(settings, folder)
    interval_s = settings.recalibration.min_interval_s
    try:
        with TestClient(make_app(service)) as client:
            stage = Stage(service, engine, trainer, client, first, folder)
            stage.serve_workload("b")
            drift(stage, "b")  # nobody is there to answer it
        service.stop()
        service = Service(settings, daemon_id="two")
        service.start()
        engine.reconnect()
        engine.attach(capture_path="/ring")
        trainer.introduce()
        assert trainer.expect(wire.TrainRequest).workloads == ["b"]
        service.stop()  # amid the attempt
        service = Service(settings, daemon_id="three")
        service.start()
        (standing,) = wait_for(lambda: service.recalibrations.alarms.view(service.monotonic()), "the alarm to stand again")
        assert (standing["workload"], standing["text"], standing["failed_attempts"]) == ("b", "b lost", 1)
        assert standing["hindrance"] == "daemon restarted"
        service.stop()
        service = Service(settings, daemon_id="four")  # the attempts and the time of the next are kept as well
        service.start()
        (standing,) = service.recalibrations.alarms.view(service.monotonic())
        assert standing["failed_attempts"] == 1
        assert interval_s - 60.0 < standing["due_in_s"] <= interval_s
        for one in (engine, trainer):
            one.reconnect()
        engine.attach(capture_path="/ring")
        trainer.introduce()
        wait_for(lambda: service.trainer.is_connected, "the trainer")
        with service.lock:
            service.tick(service.monotonic() + interval_s)
        assert trainer.expect(wire.TrainRequest).workloads == ["b"]
    finally:
        service.stop()
        engine.close()
        trainer.close()


def test_the_pause_after_a_recalibration_outlives_a_restart_of_the_daemon(settings: Settings, folder: Path) -> None:
    service, engine, trainer, first = first_life(settings, folder)
    trainer.introduce()
    try:
        with TestClient(make_app(service)) as client:
            stage = Stage(service, engine, trainer, client, first, folder)
            stage.serve_workload("b")
            operation_id, _ = stage.recalibrate()
            trainer.send(wire.TrainResult(operation_id=operation_id, ok=False, error="x"))
            stage.wait_state(operation_id, "failed")
        service.stop()
        service = Service(settings, daemon_id="two")
        service.start()
        for one in (engine, trainer):
            one.reconnect()
        engine.attach(capture_path="/ring")
        trainer.introduce()
        with TestClient(make_app(service)) as client:
            drift(Stage(service, engine, trainer, client, first, folder), "b")
        check_pause(service, trainer, "b")
    finally:
        service.stop()
        engine.close()
        trainer.close()


def check_pause(service: Service, trainer: FakeTrainer, workload: str) -> None:
    """Drift of the workload is answered when the pause after the latest recalibration is over, and not before."""
    with service.lock:
        service.tick(service.monotonic())
        assert service.rollout.training is None
        service.tick(service.monotonic() + service.settings.recalibration.min_interval_s)
    assert trainer.expect(wire.TrainRequest).workloads == [workload]


@pytest.mark.parametrize("text", ["{}", "no JSON", '{"standing": [{"engine_id": 1}]}'])
def test_kept_drift_that_cannot_be_read_keeps_no_daemon_from_starting(settings: Settings, text: str) -> None:
    settings.paths.state_dir.mkdir()
    settings.paths.runtime_dir.mkdir()
    service = Service(settings, daemon_id="one")
    service.start()
    service.journal.insert("meta", {"key": "drift_alarms", "value": text}, key="key")
    service.stop()
    service = Service(settings, daemon_id="two")
    service.start()
    try:
        assert service.recalibrations.alarms.view(service.monotonic()) == []
    finally:
        service.stop()


def test_a_recalibration_may_wait_for_idle_time_as_long_as_the_trainer_lets_it(stage: Stage) -> None:
    operation_id, _ = stage.recalibrate(max_seconds=10.0)
    with stage.service.lock:
        stage.service.recalibrations.tick(stage.service.monotonic() + 3000.0)
    assert stage.operation(operation_id)["state"] == "running"


@pytest.mark.parametrize("path", ["org/drafter", "/home/somebody/drafter"])
def test_a_drafter_that_cannot_be_read_is_named(service: Service, settings: Settings, path: str) -> None:
    engine = ServingEngine(settings.paths.engine_socket)
    engine.hello(drafter_path=path)
    status = TestClient(make_app(service)).get("/v1/status").json()
    (found,) = [one for one in findings(status) if "retrained:" in one.text]
    assert f"{path}/config.json can't be read" in found.text
    assert "/home" in found.text
    engine.close()


def test_a_trainer_that_connects_is_told_whether_training_is_paused(stage: Stage) -> None:
    assert not stage.trainer.expect(wire.TrainPause).paused  # it has introduced itself
    stage.client.post("/v1/training:pause", json={"reason": "x"})
    assert stage.trainer.expect(wire.TrainPause).paused
    stage.trainer.introduce()
    assert stage.trainer.expect(wire.TrainPause).paused
    stage.client.post("/v1/training:resume", json={"reason": "x"})
    assert not stage.trainer.expect(wire.TrainPause).paused
    stage.trainer.introduce()
    assert not stage.trainer.expect(wire.TrainPause).paused


def test_a_full_disk_does_not_stop_a_roll_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    new = stage.version(1.0)
    stage.promote(new)

    def refuse(*_: Any, **__: Any) -> Any:
        raise StoreError("full")

    monkeypatch.setattr(stage.service.store, "write", refuse)
    assert stage.client.post("/v1/drafters:rollback").status_code == 202
    assert stage.engine.answer_swap().weights.version == stage.first


def test_a_roll_back_that_cannot_move_the_aliases_has_failed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.promote(stage.version(1.0))

    def refuse(changes: dict[str, str | None]) -> None:
        raise StoreError("full")

    monkeypatch.setattr(stage.service.drafters, "move", refuse)
    assert stage.client.post("/v1/drafters:rollback").status_code == 503
    newest = stage.client.get("/v1/operations").json()[0]
    assert (newest["kind"], newest["state"]) == ("rollback", "failed")
    assert "full" in newest["error"]


def test_the_same_key_gives_the_same_operation(stage: Stage) -> None:
    headers = {"Idempotency-Key": "abc"}
    one = stage.client.post("/v1/recalibrations", json={}, headers=headers).json()
    two = stage.client.post("/v1/recalibrations", json={}, headers=headers).json()
    assert one["operation_id"] == two["operation_id"]
    stage.trainer.expect(wire.TrainRequest)
    stage.trainer.send(wire.TrainResult(operation_id=one["operation_id"], ok=False, error="x"))
    stage.wait_state(one["operation_id"], "failed")
    assert stage.client.post("/v1/recalibrations", json={}, headers=headers).json()["state"] == "failed"


def test_a_change_based_on_an_older_generation_is_refused(stage: Stage) -> None:
    generation = stage.client.get("/v1/drafters").json()["generation"]
    new = stage.version(1.0)
    path = f"/v1/drafters/{new}:promote"
    stale = stage.client.post(path, headers={"If-Match": str(generation - 1)})
    assert (stale.status_code, stale.json()["title"]) == (412, "Changed meanwhile")
    assert stage.client.post(path, headers={"If-Match": "soon"}).status_code == 422
    assert stage.client.post(path, headers={"If-Match": f'"{generation}"'}).status_code == 202


def test_a_dry_run_says_what_would_be_done_and_does_nothing(stage: Stage) -> None:
    version, before = stage.version(1.0), stage.aliases()
    answer = stage.client.post(f"/v1/drafters/{version}:promote", json={"dry_run": True}, headers={"Idempotency-Key": "k"})
    assert answer.status_code == 202
    view = answer.json()
    assert (view["operation_id"], view["stage"]) == ("planned", "planned")
    assert (view["detail"]["version"], view["detail"]["engines"]) == (version, ["engine-0"])
    assert stage.client.post("/v1/drafters:rollback", json={"dry_run": True}).status_code == 409  # nothing to go back to
    assert stage.aliases() == before
    assert stage.client.get("/v1/operations").json() == []
    # The key isn't used up: it may be given to the real one.
    made = stage.client.post(f"/v1/drafters/{version}:promote", json={}, headers={"Idempotency-Key": "k"})
    stage.engine.answer_swap()
    stage.wait_state(made.json()["operation_id"], "succeeded")
    back = stage.client.post("/v1/drafters:rollback", json={"dry_run": True}).json()["detail"]
    assert (back["version"], back["rolled_back"]) == (stage.first, version)
    assert stage.aliases()["active"] == version


def test_a_key_of_an_operation_is_refused_for_another_request(stage: Stage) -> None:
    version = stage.version(1.0)
    headers = {"Idempotency-Key": "k"}
    path = f"/v1/drafters/{version}:promote"
    first = stage.client.post(path, json={"reason": "one"}, headers=headers).json()
    assert stage.client.post(path, json={"reason": "one"}, headers=headers).json()["operation_id"] == first["operation_id"]
    for other, body in ((path, {"reason": "two"}), ("/v1/drafters:rollback", {}), ("/v1/training:pause", {})):
        answer = stage.client.post(other, json=body, headers=headers)
        assert (answer.status_code, answer.json()["title"]) == (422, "Key was used before")
    assert len(stage.client.get("/v1/operations").json()) == 1


def test_a_proven_candidate_stays_a_success_where_an_engine_follows_later(stage: Stage) -> None:
    """Else its drift would be answered anew, with a stricter gate."""
    service = stage.service
    swap = Swap(stage.first, ["engine-0"], lambda swap: None, failures={"engine-0": "the engine failed"})
    for kind, state in (("recalibrate", "succeeded"), ("adopt", "succeeded"), ("promote", "failed")):
        with service.lock:
            operation = service.operations.create(kind, "swapping", "", "test", None)
            service.lifecycle._sent_home(operation, swap)
        assert operation.state == state
        assert "the engine failed; it is retried until they run" in operation.detail.get("note", operation.error)
    with service.lock:
        kinds = ("recalibrate", "adopt", "promote")
        begun = [service.operations.create(kind, "swapping", "", "test", None) for kind in kinds]
    service.store.write(lambda db: None)
    again = Operations(service.store, service.clock)
    again.load()
    assert [again.get(one.operation_id).state for one in begun] == ["succeeded", "succeeded", "failed"], "after a restart"


def test_a_roll_back_amid_which_the_daemon_is_restarted_has_succeeded(settings: Settings, folder: Path) -> None:
    """It was reported as failed although the aliases had moved, and repeating it went one version further."""
    service, engine, trainer, first = first_life(settings, folder)
    try:
        with TestClient(make_app(service)) as client:
            stage = Stage(service, engine, trainer, client, first, folder)
            new = stage.version(1.0)
            stage.promote(new)
            rolling = client.post("/v1/drafters:rollback", json={}).json()["operation_id"]
            engine.expect(wire.SwapCommand)
            with service.lock:
                promoting = service.operations.create("promote", "swapping", "", "test", None, version=new).operation_id
        service.stop()
        service = Service(settings, daemon_id="two")
        service.start()
        assert service.drafters.active == first
        assert service.operations.get(rolling).state == "succeeded"
        assert "engines follow" in service.operations.get(rolling).detail["note"]
        assert service.operations.get(promoting).state == "failed", "its version isn't active"
    finally:
        service.stop()
        engine.close()
        trainer.close()


@pytest.mark.parametrize("call", ["/v1/drafters:rollback", "/v1/operations/{}:cancel"])
def test_a_promotion_that_an_engine_does_not_answer_can_be_undone(stage: Stage, settings: Settings, call: str) -> None:
    """A bad version stayed in the others for up to five and a half minutes: everything answered that a swap was running."""
    service, new = stage.service, stage.version(1.0)
    silent = ServingEngine(settings.paths.engine_socket, engine_id="silent", checkpoint=stage.engine.checkpoint)
    try:
        silent.attach()
        operation_id = stage.promote(new, answer=False)
        stage.engine.answer_swap()
        wait_for(lambda: service.engines.by_id["engine-0"].live_version == new, "the swap of one engine")
        late = silent.expect(wire.SwapCommand)
        answer = stage.client.post(call.format(operation_id), json={"reason": "it is bad"})
        assert answer.status_code == 202, answer.text
        assert stage.operation(operation_id)["state"] == "cancelled"
        assert f"it is bad; {stage.first} stays active" in stage.operation(operation_id)["error"]
        stage.engine.serve(lambda: stage.engine.live_version == stage.first, "the way home")
        result = {"engine_id": "silent", "boot_id": silent.boot_id, "command_id": late.command_id}
        silent.send(wire.CommandResult(**result, ok=True))
        silent.answer_swap()
        wait_for(lambda: service.engines.by_id["silent"].live_version == stage.first, "its way home")
        assert (service.drafters.active, stage.operation(operation_id)["state"]) == (stage.first, "cancelled")
        second = stage.promote(new, answer=False)
        silent.answer_swap()
        stage.engine.answer_swap()
        stage.wait_state(second, "succeeded")
    finally:
        silent.close()


def test_a_proven_version_can_be_taken_back_before_all_engines_have_it(stage: Stage, settings: Settings) -> None:
    service, new = stage.service, stage.version(1.0)
    silent = ServingEngine(settings.paths.engine_socket, engine_id="silent", checkpoint=stage.engine.checkpoint)
    try:
        silent.attach()
        with service.lock:
            proven = service.operations.create("recalibrate", "swapping", "", "test", None, version=new)
            service.lifecycle._make_active(new, "recalibrate")
            service.lifecycle._send_home(new, proven)
        stage.engine.answer_swap()
        wait_for(lambda: service.engines.by_id["engine-0"].live_version == new, "the swap of one engine")
        answer = stage.client.post("/v1/drafters:rollback", json={})
        assert answer.status_code == 202, answer.text
        assert service.drafters.active == stage.first
        assert "retried" not in stage.wait_state(proven.operation_id, "succeeded")["detail"]["note"]
        assert stage.client.post("/v1/drafters:rollback", json={}).status_code == 409, "once is once"
        stage.engine.answer_swap()
        for _ in range(2):
            silent.answer_swap()
        stage.wait_state(answer.json()["operation_id"], "succeeded")
        assert stage.engine.live_version == silent.live_version == stage.first
    finally:
        silent.close()


def test_weights_arent_verified_amid_a_swap(stage: Stage) -> None:
    with stage.service.lock:
        stage.service.rollout.swapping = stage.service.operations.create("promote", "swapping", "", "test", None)
    answer = stage.client.post("/v1/engines/engine-0:verify")
    assert answer.status_code == 409
    assert "a swap is under way" in answer.text


@pytest.mark.fault("a fine-tuned target in a folder of its own")
def test_the_drafter_of_a_fine_tuned_target_learns_once_an_operator_says_so(stage: Stage) -> None:
    """No version was for the old drafter and the new target: nothing could be trained, and no command changed that."""

    def notes() -> list[str]:
        return [one.text for one in findings(stage.client.get("/v1/status").json()) if "another target" in one.text]

    stage.promote(stage.version(1.0))
    assert not notes()
    stage.engine.boot_id = "second boot"
    stage.engine.reconnect()
    drafter = str(stage.folder / "drafter")
    own = stage.engine.hello(drafter_path=drafter, target_path="/models/tuned", capture_path="/ring").drafter_version
    assert own not in ("", stage.first)
    (text,) = wait_for(notes, "the note")
    assert f"`honed promote {own}`" in text
    stage.trainer.introduce()
    assert stage.client.post("/v1/recalibrations", json={}).status_code == 409
    stage.promote(own)
    assert not notes()
    stage.recalibrate()


def test_nothing_is_trained_from_a_version_of_another_target(stage: Stage) -> None:
    """Its candidate could be tried on no engine, and the trial would never end."""
    elsewhere = stage.service.drafters.registry.create(
        lambda folder: write_checkpoint(folder, 3.0), target_path="/models/other"
    )
    with stage.service.lock:
        stage.service.drafters.move({"active": elsewhere.version})
    answer = stage.client.post("/v1/recalibrations", json={})
    assert answer.status_code == 409
    assert "target '/models/other', engine engine-0 has method 'dflash' and target '/models/tiny'" in answer.text
