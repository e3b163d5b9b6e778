"""Two versions take turns on a daemon and a serving engine: verdicts and what follows, restarts, and what an operator sees."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from honed.adapt.monitor.drift import Alarm
from honed.adapt.protocol import wire
from honed.daemon.api.app import make_app
from honed.daemon.errors import ConflictError, StoreError
from honed.daemon.ingest.engines import Engine
from honed.daemon.lifecycle.canaries import ABANDONED_S, LEASE_S, PAUSE_S
from honed.daemon.service import Service
from honed.daemon.settings.settings import Settings
from honed.daemon.views.findings import findings
from tests.daemon.conftest import wait_for
from tests.daemon.fake_engine import FakeTrainer, ServingEngine
from tests.daemon.lifecycle.test_lifecycle import Stage, check_pause, drift, first_life, write_checkpoint


@pytest.fixture
def stage(service: Service, settings: Settings, folder: Path) -> Iterator[Stage]:
    write_checkpoint(folder / "drafter", 0.0)
    engine = ServingEngine(settings.paths.engine_socket, checkpoint=str(folder / "drafter"))
    trainer = FakeTrainer(settings.paths.engine_socket)
    first = engine.attach(capture_path="/ring").drafter_version
    trainer.introduce()
    with TestClient(make_app(service)) as client:
        yield Stage(service, engine, trainer, client, first, folder)
    engine.close()
    trainer.close()


def candidate(stage: Stage, value: float, **acceptance: float) -> tuple[str, str]:
    """A recalibration's candidate goes on trial; `old` and `new` are the chances that a draft is accepted."""
    operation_id, _ = stage.recalibrate()
    new = stage.version(value)
    stage.engine.acceptance = {stage.first: acceptance.get("old", 0.6), new: acceptance.get("new", 0.6)}
    stage.trainer.send(wire.TrainResult(operation_id=operation_id, ok=True, version=new))
    wait_for(lambda: stage.client.get("/v1/status").json()["canary"], "the trial")
    return operation_id, new


@pytest.fixture
def other(stage: Stage) -> Iterator[ServingEngine]:
    """Another engine, which hasn't said hello yet."""
    path, checkpoint = stage.service.settings.paths.engine_socket, str(stage.folder / "drafter")
    engine = ServingEngine(path, checkpoint=checkpoint, engine_id="engine-1")
    yield engine
    engine.close()


def pairs(stage: Stage) -> int:
    return int((stage.client.get("/v1/status").json()["canary"] or {"pairs": 0})["pairs"])


def test_a_candidate_that_accepts_less_is_taken_back_and_never_offered_again(stage: Stage) -> None:
    operation_id, new = candidate(stage, 1.0, old=0.7, new=0.4)
    done = stage.finish(operation_id)
    assert done["state"] == "failed"
    assert f"{stage.first} stays active" in done["error"]
    assert stage.aliases() == {"active": stage.first, "floor": stage.first, "candidate": None, "previous": None}
    stage.engine.serve(lambda: stage.engine.live_version == stage.first, "the old version")
    wait_for(lambda: stage.service.lifecycle.rollbacks == {"canary": 1}, "the count")
    refused = stage.client.post(f"/v1/drafters/{new}:promote")
    assert refused.status_code == 409
    assert "worse on live traffic" in refused.json()["detail"]
    again, _ = stage.recalibrate()
    twin = stage.version(1.0)  # another number, the same weights
    stage.trainer.send(wire.TrainResult(operation_id=again, ok=True, version=twin))
    assert "aren't offered again: found worse on live traffic" in stage.wait_state(again, "failed")["error"]


def test_while_they_take_turns_active_stays_and_both_are_held(stage: Stage) -> None:
    _, new = candidate(stage, 1.0)
    stage.engine.serve(lambda: pairs(stage) >= 4, "pairs of windows")
    assert stage.aliases() | {"floor": None} == {"active": stage.first, "candidate": new, "previous": None, "floor": None}
    swaps = stage.engine.swaps
    assert {swap.weights.version for swap in swaps} == {stage.first, new}
    for swap in swaps:
        assert swap.turns is not None
        assert {swap.weights.version, swap.turns.beside.version} == {stage.first, new}
        assert (swap.turns.home_version, swap.drops_cache) == (stage.first, False)
        assert swap.turns.lease_s > 0


def test_only_engines_that_take_part_are_counted(stage: Stage, other: ServingEngine) -> None:
    """One that can't swap counted for the old version alone, with its own kind of traffic."""
    other.attach(capabilities=["events", "draft_length"])
    assert other.live_version == stage.first
    candidate(stage, 1.0)
    other.workload = "elsewhere"
    other.serve(lambda: ("engine-1", "elsewhere") in stage.service.live.workloads(), "rounds of the other")
    stage.engine.serve(lambda: pairs(stage) >= 2, "pairs of windows")
    trial = stage.service.rollout.trial
    assert trial is not None
    assert trial.canary.figures().keys() == {"", "default"}


def test_a_trial_holds_up_no_engine_that_takes_no_part(stage: Stage, other: ServingEngine) -> None:
    """One of another target got back what it had lost, was checked and had its drift noted only after the trial."""
    other.attach(target_path="/models/other")
    own = other.live_version
    assert own != stage.first
    candidate(stage, 1.0)
    other.live_version = "lost"
    other.send_status(drafter_version="lost")
    other.serve(lambda: other.live_version == own, "its own version", rounds=0)
    asked = stage.client.post("/v1/engines/engine-1:verify").json()["operation_id"]
    other.serve(lambda: stage.operation(asked)["state"] == "succeeded", "the check", rounds=0)
    assert stage.client.post("/v1/engines/engine-0:verify").status_code == 409
    alarm = Alarm("regressed", "default", own, (1,), 3.0, 500, 1.2, 1.9, "default lost", 1234.5)
    with stage.service.lock:
        stage.service.on_alarm(stage.service.engines.by_id["engine-1"], alarm)
        assert stage.service.rollout.trial is not None
        stage.service.recalibrations.alarms.release(is_explained=True)
    (standing,) = stage.client.get("/v1/status").json()["drift_alarms"]
    assert standing["engine_id"] == "engine-1"


def test_a_second_model_beside_the_active_one_s_is_sent_to_a_daemon_of_its_own(stage: Stage, other: ServingEngine) -> None:
    """`honed promote` would only turn the two round."""
    other.attach(target_path="/models/other")
    notes = {one["engine_id"]: one["note"] for one in stage.client.get("/v1/engines").json()}
    assert notes["engine-0"] == ""
    assert "a second model needs a daemon and a trainer of its own" in notes["engine-1"]
    assert "honed promote" not in notes["engine-1"]
    with stage.service.lock:
        stage.service.engines.by_id["engine-0"].last_seen_s -= 3600.0
    (left,) = [one["note"] for one in stage.client.get("/v1/engines").json() if one["engine_id"] == "engine-1"]
    assert f"`honed promote {other.live_version}` makes the one that it came with active" in left


def for_another_target(stage: Stage, value: float) -> str:
    """A version that the engine can't run."""
    return stage.service.drafters.registry.create(
        lambda folder: write_checkpoint(folder, value), target_path="/models/other"
    ).version


def test_a_trial_begins_only_where_an_engine_can_run_both_versions(stage: Stage) -> None:
    """It lasted a day in which nothing was compared, and held up every training."""
    foreign, new = for_another_target(stage, 2.0), stage.version(1.0)
    with stage.service.lock:
        stage.service.drafters.move({"active": foreign})
        operation = stage.service.operations.create("adopt", "canary", "", "test", None, version=new)
        with pytest.raises(ConflictError, match=f"no connected engine can take {foreign} and {new}; .*without a trial"):
            stage.service.lifecycle.try_out(operation, new)
        assert stage.service.rollout.trial is None
    assert stage.aliases()["candidate"] is None
    promoted = stage.promote(new, force=False)
    assert stage.operation(promoted)["stage"] == "done"
    assert stage.operation(promoted)["detail"]["watch"].startswith(
        f"not watched: no connected engine can take {foreign} and {new}"
    )
    drift(stage, "default", new)  # the previous version is the other target's
    assert stage.service.rollout.trial is None


def test_a_trial_waits_for_an_engine_that_sleeps(stage: Stage) -> None:
    """A turn that finds it asleep isn't a failure of the candidate; nothing more is sent to it until it wakes up."""
    operation_id, new = candidate(stage, 1.0, old=0.4, new=0.7)
    stage.engine.serve(lambda: pairs(stage) >= 1, "a pair of windows")
    stage.engine.num_refused_asleep = 0
    stage.engine.serve(lambda: stage.engine.num_refused_asleep, "a turn that is refused")
    stage.engine.send_status(drafter_version=stage.engine.live_version, is_asleep=True)
    wait_for(lambda: stage.client.get("/v1/engines").json()[0]["asleep"], "the status")
    told = stage.engine.num_refused_asleep
    for _ in range(5):
        with stage.service.lock:
            stage.service.tick(stage.service.monotonic())
    stage.engine.turn(rounds=0)
    assert stage.engine.num_refused_asleep == told
    assert stage.service.rollout.trial is not None
    assert stage.service.swaps.results["postponed"] == told
    assert stage.service.swaps.results["failed"] == 0
    stage.engine.num_refused_asleep = None
    stage.engine.send_status(drafter_version="lost", is_asleep=False)
    assert stage.finish(operation_id)["state"] == "succeeded"
    assert stage.aliases()["active"] == new


@pytest.mark.parametrize("way", ["promote", "rollback"])
def test_an_engine_that_falls_asleep_amid_a_swap_follows_later(stage: Stage, other: ServingEngine, way: str) -> None:
    """The whole swap failed, though the other engines had taken it."""
    other.attach()
    new = stage.version(1.0)
    other.num_refused_asleep = 0
    if way == "rollback":
        with stage.service.lock:
            stage.service.drafters.move({"active": new, "previous": stage.first})
            for engine in stage.service.engines.by_id.values():
                engine.live_version = stage.engine.live_version = other.live_version = new
    wanted = new if way == "promote" else stage.first
    path = f"/v1/drafters/{new}:promote" if way == "promote" else "/v1/drafters:rollback"
    operation_id = stage.client.post(path, json={"force": True} if way == "promote" else {}).json()["operation_id"]
    stage.engine.serve(lambda: stage.engine.live_version == wanted, "the swap", rounds=0)
    other.serve(lambda: stage.operation(operation_id)["state"] != "running", "the refusal", rounds=0)
    ended = stage.operation(operation_id)
    assert ended["state"] == "succeeded", ended
    assert "engine engine-1: the engine sleeps; it" in ended["detail"]["note"]
    assert stage.aliases()["active"] == wanted
    other.num_refused_asleep = None
    other.serve(lambda: other.live_version == wanted, "its own swap", rounds=0)


def test_a_turn_that_finds_weights_of_somebody_else_is_no_failure_of_the_candidate(stage: Stage) -> None:
    """It is on trial until the engine is honed's again, or somebody calls it off."""
    operation_id, _ = candidate(stage, 1.0, old=0.4, new=0.7)
    stage.engine.serve(lambda: pairs(stage) >= 1, "a pair of windows")
    stage.engine.is_given_weights = True
    stage.engine.serve(lambda: stage.engine.live_version == "foreign", "a turn that is refused")
    stage.engine.send_status(drafter_version="foreign")
    wait_for(lambda: stage.client.get("/v1/engines").json()[0]["drafter_version"] == "foreign", "the status")
    taken = len(stage.engine.swaps)
    for _ in range(5):
        with stage.service.lock:
            stage.service.tick(stage.service.monotonic())
        stage.engine.turn(rounds=40)
    assert len(stage.engine.swaps) == taken
    assert stage.service.rollout.trial is not None
    assert stage.client.post(f"/v1/operations/{operation_id}:cancel", json={}).status_code == 202
    assert stage.operation(operation_id)["state"] == "cancelled"
    assert stage.aliases()["active"] == stage.first


def test_a_better_candidate_of_a_version_that_is_active_no_more_fails(stage: Stage) -> None:
    """Its operation stayed in the stage "swapping" for good, though nothing was swapped."""
    operation_id, _ = candidate(stage, 1.0, old=0.4, new=0.7)
    stage.engine.serve(lambda: pairs(stage) >= 1, "a pair of windows")
    other = stage.version(2.0)
    with stage.service.lock:  # as another daemon of a shared registry, or an operator's hand in its folder, would
        stage.service.drafters.move({"active": other})
    done = stage.finish(operation_id)
    assert done["state"] == "failed"
    assert f"another version became active meanwhile; {other} stays active" in done["error"]
    assert stage.aliases()["active"] == other
    assert stage.aliases()["candidate"] is None


def test_nothing_proven_leaves_the_old_version(stage: Stage) -> None:
    operation_id, new = candidate(stage, 1.0)
    with stage.service.lock:
        trial = stage.service.rollout.trial
        assert trial is not None
        trial.active_s = trial.canary.settings.max_s
        stage.service.tick(stage.service.monotonic())
    done = stage.finish(operation_id)
    assert done["state"] == "failed"
    assert "no proven difference" in done["error"]
    assert stage.aliases()["active"] == stage.first
    # Not found worse: an operator may still want it.
    stage.promote(new, answer=False)
    stage.engine.serve(lambda: stage.aliases()["active"] == new == stage.engine.live_version, "the version")


@pytest.mark.parametrize("how", ["cancel", "rollback", "promote"])
def test_an_operator_ends_it(stage: Stage, how: str) -> None:
    operation_id, new = candidate(stage, 1.0)
    stage.engine.serve(lambda: pairs(stage) >= 2, "pairs of windows")
    other = stage.version(2.0)
    path = {
        "cancel": f"/v1/operations/{operation_id}:cancel",
        "rollback": "/v1/drafters:rollback",
        "promote": f"/v1/drafters/{other}:promote",
    }[how]
    body = {"reason": "enough"} | ({"force": True} if how == "promote" else {})
    answer = stage.client.post(path, json=body)
    assert answer.status_code == 202, answer.text
    assert stage.finish(operation_id)["state"] in ("cancelled", "failed")
    wanted = other if how == "promote" else stage.first
    stage.engine.serve(lambda: stage.aliases()["active"] == wanted and stage.engine.live_version == wanted, "the version")
    assert stage.aliases()["candidate"] is None
    wait_for(lambda: stage.client.get("/v1/status").json()["operation"] is None, "rest")
    retried = stage.client.post(f"/v1/drafters/{new}:promote", json={})
    assert retried.status_code == (409 if how == "rollback" else 202)
    if how == "rollback":  # whatever the evidence was: it was taken back, not found worse
        assert f"{new} isn't offered again: rolled back by admin token: enough" in retried.json()["detail"]
        (trial,) = [row for row in stage.client.get("/v1/canaries").json() if row["operation_id"] == operation_id]
        assert trial["decision"] == "withdrawn"
        assert stage.service.lifecycle.rollbacks == {"operator": 1}


@pytest.mark.parametrize("how", ["rollback", "cancel"])
def test_two_who_take_a_candidate_out_at_once_leave_the_active_version(stage: Stage, how: str) -> None:
    """The second one took the active version out: by then no candidate was on trial."""
    active = stage.version(5.0)
    stage.promote(active)
    operation_id, new = candidate(stage, 1.0)
    first = "/v1/drafters:rollback" if how == "rollback" else f"/v1/operations/{operation_id}:cancel"
    assert stage.client.post(first, json={}).status_code == 202
    for body in ({}, {"version": new}):
        assert stage.client.post("/v1/drafters:rollback", json=body).status_code == 409
    assert stage.aliases()["active"] == active


def test_the_active_version_can_be_named_while_a_candidate_is_on_trial(stage: Stage) -> None:
    active = stage.version(5.0)
    stage.promote(active)
    operation_id, new = candidate(stage, 1.0)
    back = stage.client.post("/v1/drafters:rollback", json={"version": active})
    assert stage.finish(back.json()["operation_id"])["state"] == "succeeded"
    assert stage.aliases() | {"floor": None} == {"active": stage.first, "candidate": None, "previous": None, "floor": None}
    assert f"{active} was rolled back by" in stage.wait_state(operation_id, "cancelled")["error"]
    assert not stage.service.canaries.why_failed(new), "it may be tried again"


def test_a_promoted_version_is_watched_and_goes_when_the_previous_one_is_better(stage: Stage) -> None:
    new = stage.version(1.0)
    stage.engine.acceptance = {stage.first: 0.7, new: 0.4}
    operation_id = stage.promote(new, force=False)
    assert stage.operation(operation_id)["stage"] == "watching"
    assert stage.aliases()["active"] == new
    stage.engine.serve(lambda: stage.aliases()["active"] == stage.first, "the roll-back")
    stage.engine.serve(lambda: stage.engine.live_version == stage.first, "the old version")
    wait_for(lambda: stage.service.lifecycle.rollbacks == {"canary": 1}, "the count")
    assert "accepts fewer" in stage.operation(operation_id)["detail"]["watch"]
    assert stage.client.post(f"/v1/drafters/{new}:promote").status_code == 409


@contextmanager
def aliases_that_stay(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, str | None]]]:
    """As on a full disk; gives the changes that are refused."""
    refused: list[dict[str, str | None]] = []

    def refuse(changes: dict[str, str | None]) -> None:
        refused.append(changes)
        raise StoreError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(stage.service.drafters, "move", refuse)
        yield refused


def test_a_worse_version_goes_as_soon_as_the_aliases_can_be_moved(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("honed.daemon.lifecycle.lifecycle._RETRY_S", 0.5)
    new, move = stage.version(1.0), stage.service.drafters.move
    stage.engine.acceptance = {stage.first: 0.7, new: 0.4}
    stage.promote(new, force=False)
    with aliases_that_stay(stage, monkeypatch) as refused:
        stage.engine.serve(lambda: len(refused) >= 3, "a third try")
        assert stage.aliases()["active"] == new
        status = stage.client.get("/v1/status").json()
        assert status["verdict_problem"].startswith(f"{new} was found worse, but is still active: no space left on device")
        assert status["verdict_problem"] in [one.text for one in findings(status)]
        assert "honed_verdict_due 1.0" in stage.client.get("/metrics").text
    assert stage.service.drafters.move == move
    stage.engine.serve(lambda: stage.aliases()["active"] == stage.first, "the roll-back")
    stage.engine.serve(lambda: stage.engine.live_version == stage.first, "the old version")
    assert stage.client.get("/v1/status").json()["verdict_problem"] == ""
    assert "honed_verdict_due 0.0" in stage.client.get("/metrics").text
    # Each try was an operation that had failed, and a line in the audit table.
    assert [one["kind"] for one in stage.client.get("/v1/operations").json()] == ["rollback", "promote"]
    assert [one["action"] for one in stage.client.get("/v1/audit").json()].count("rollback") == 1


def test_no_recalibration_begins_before_a_worse_version_is_rolled_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It began from the worse version, and the roll-back waited for its end."""
    monkeypatch.setattr("honed.daemon.lifecycle.lifecycle._RETRY_S", 0.5)
    new = stage.version(1.0)
    stage.engine.acceptance = {stage.first: 0.7, new: 0.4}
    stage.promote(new, force=False)
    with aliases_that_stay(stage, monkeypatch) as refused:
        stage.engine.serve(lambda: refused, "the verdict")
        drift(stage, "default", new)
        assert stage.client.get("/v1/status").json()["drift_alarms"]
        with stage.service.lock:
            stage.service.recalibrations.tick(stage.service.monotonic())
            assert stage.service.rollout.training is None
        asked = stage.client.post("/v1/recalibrations", json={})
        assert asked.status_code == 409
        assert f"{new} was found worse, but is still active: no space left" in asked.json()["detail"]
    stage.engine.serve(lambda: stage.service.rollout.training is not None, "the recalibration")
    assert stage.trainer.expect(wire.TrainRequest).parent_version == stage.first


@pytest.mark.parametrize("decision", ["worse", "better"])
def test_a_verdict_that_could_not_be_carried_out_outlives_a_restart_of_the_daemon(
    settings: Settings, folder: Path, monkeypatch: pytest.MonkeyPatch, decision: str
) -> None:
    """A worse version stayed active for good, and a better one was thrown away."""
    service, engine, trainer, first = first_life(settings, folder)
    trainer.introduce()
    try:
        with TestClient(make_app(service)) as client:
            stage = Stage(service, engine, trainer, client, first, folder)
            if decision == "worse":
                new = stage.version(1.0)
                engine.acceptance = {first: 0.7, new: 0.4}
                operation_id = stage.promote(new, force=False)
            else:
                operation_id, new = candidate(stage, 1.0, old=0.4, new=0.7)
            with aliases_that_stay(stage, monkeypatch) as refused:
                engine.serve(lambda: refused and client.get("/v1/status").json()["verdict_problem"], "the verdict")
        service.stop()
        assert service.drafters.active == (new if decision == "worse" else first)
        service = Service(settings, daemon_id="two")
        service.start()
        wanted = first if decision == "worse" else new
        wait_for(lambda: service.drafters.active == wanted, "the verdict to be carried out")
        engine.reconnect()
        engine.attach(capture_path="/ring")
        engine.serve(lambda: engine.live_version == wanted, "the version")
        with TestClient(make_app(service)) as client:
            assert client.get(f"/v1/operations/{operation_id}").json()["state"] == "succeeded"
            assert service.store.drain(10)
            (row,) = client.get("/v1/canaries").json()
            assert row["decision"] == decision
            assert bool(service.canaries.why_failed(new)) == (decision == "worse")
            assert client.get("/v1/status").json()["verdict_problem"] == ""
    finally:
        service.stop()
        engine.close()
        trainer.close()


def test_a_verdict_that_could_not_be_carried_out_is_overtaken_by_an_operator(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("honed.daemon.lifecycle.lifecycle._RETRY_S", 3600.0)
    new, other = stage.version(1.0), stage.version(2.0)
    stage.engine.acceptance = {stage.first: 0.7, new: 0.4}
    operation_id = stage.promote(new, force=False)
    with aliases_that_stay(stage, monkeypatch) as refused:
        stage.engine.serve(lambda: refused, "the verdict")
    assert stage.finish(stage.promote(other, answer=False))["state"] == "succeeded", "a swap of the trial's may come first"
    assert stage.aliases()["active"] == other
    assert stage.service.rollout.due is None
    assert stage.service.store.drain(10)
    (row,) = stage.client.get("/v1/canaries").json()
    assert (row["operation_id"], row["decision"]) == (operation_id, "worse")


def test_a_better_candidate_is_promoted_as_soon_as_the_aliases_can_be_moved(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short error of the disk threw away what hours of training had gained."""
    monkeypatch.setattr("honed.daemon.lifecycle.lifecycle._RETRY_S", 0.5)
    operation_id, new = candidate(stage, 1.0, old=0.4, new=0.7)
    with aliases_that_stay(stage, monkeypatch) as refused:
        stage.engine.serve(lambda: len(refused) >= 2, "a second try")
        assert stage.aliases()["active"] == stage.first
        assert stage.operation(operation_id)["state"] == "running"
    assert stage.finish(operation_id)["state"] == "succeeded"
    assert stage.aliases() | {"floor": None} == {"active": new, "candidate": None, "previous": stage.first, "floor": None}
    stage.engine.serve(lambda: stage.engine.live_version == new, "the new version")


def test_a_promoted_version_that_is_better_stays(stage: Stage) -> None:
    new = stage.version(1.0)
    stage.engine.acceptance = {stage.first: 0.4, new: 0.7}
    operation_id = stage.promote(new, force=False)
    assert "accepts more" in stage.finish(operation_id)["detail"]["watch"]
    stage.engine.serve(lambda: stage.engine.live_version == new, "the new version")
    assert stage.aliases()["active"] == new


def test_a_version_that_regresses_later_is_rolled_back(stage: Stage) -> None:
    new = stage.version(1.0)
    stage.promote(new)
    stage.engine.acceptance = {stage.first: 0.6, new: 0.3}
    drift(stage, "default", new)
    stage.engine.serve(lambda: stage.aliases()["active"] == stage.first, "the roll-back")
    kinds = [operation["kind"] for operation in stage.client.get("/v1/operations").json()]
    assert kinds[:3] == ["rollback", "watch", "promote"]


def test_an_engine_that_refuses_ends_it_without_a_verdict(stage: Stage) -> None:
    stage.engine.refuses = "shapes differ"
    operation_id, new = candidate(stage, 1.0)
    done = stage.finish(operation_id)
    assert done["state"] == "failed"
    assert "shapes differ" in done["error"]
    assert stage.aliases()["candidate"] is None
    assert new not in {swap.weights.version for swap in stage.engine.swaps}


def test_drift_whose_candidate_is_refused_by_the_engine_stands_again(stage: Stage) -> None:
    stage.serve_workload("default")
    drift(stage, "default")
    request = stage.trainer.expect(wire.TrainRequest)
    assert request.since_s == 1234.5
    stage.engine.refuses = "no room for the staged weights"
    stage.trainer.send(wire.TrainResult(operation_id=request.operation_id, ok=True, version=stage.version(1.0)))
    assert stage.finish(request.operation_id)["state"] == "failed"
    wait_for(lambda: stage.client.get("/v1/status").json()["drift_alarms"], "the alarm to stand again")
    (standing,) = stage.client.get("/v1/status").json()["drift_alarms"]
    assert standing["failed_attempts"] == 1
    assert "no room for the staged weights" in standing["hindrance"]


def test_a_training_that_was_cut_short_goes_on_from_the_version_that_it_won(stage: Stage) -> None:
    stage.serve_workload("default")
    drift(stage, "default")
    request = stage.trainer.expect(wire.TrainRequest)
    new = stage.version(1.0)
    stage.engine.acceptance = {stage.first: 0.4, new: 0.8}
    result = wire.TrainResult(operation_id=request.operation_id, ok=True, version=new, steps=90, is_cut_short=True)
    stage.trainer.send(result)
    assert stage.finish(request.operation_id)["state"] == "succeeded"
    with stage.service.lock:
        stage.service.tick(stage.service.monotonic())
    status = stage.client.get("/v1/status").json()
    assert [(one["answers"], one["failed_attempts"]) for one in status["drift_alarms"]] == [(1, 0)]
    assert not [one.text for one in findings(status) if "drift" in one.text]
    with stage.service.lock:
        stage.service.tick(stage.service.monotonic() + stage.service.settings.recalibration.min_interval_s)
    again = stage.trainer.expect(wire.TrainRequest)
    assert (again.parent_version, again.workloads, again.since_s) == (new, ["default"], request.since_s)
    assert again.error_share == request.error_share
    figures = wire.GateFigures("default", sessions=9, parent=1.5, candidate=1.5, gain_low=0.9, gain_high=1.1, passed=False)
    stage.trainer.send(wire.TrainResult(operation_id=again.operation_id, ok=True, error="gate: no sure gain", gate=[figures]))
    stage.wait_state(again.operation_id, "failed")
    with stage.service.lock:
        stage.service.tick(stage.service.monotonic())
    assert stage.client.get("/v1/status").json()["drift_alarms"] == []


def test_drift_that_is_found_during_a_trial_is_answered_after_it(stage: Stage) -> None:
    """Of two workloads that drift, the first sets the active version against the previous one."""
    new = stage.version(1.0)
    stage.promote(new)
    for workload in ("default", "b"):
        stage.serve_workload(workload)
    drift(stage, "default", new)
    assert stage.client.get("/v1/status").json()["canary"]
    drift(stage, "b", new)
    assert {one["workload"] for one in stage.client.get("/v1/status").json()["drift_alarms"]} == {"default", "b"}
    with stage.service.lock:
        assert stage.service.rollout.training is None
        stage.service.canaries.stop("enough of it")
    stage.engine.serve(lambda: stage.service.rollout.training is not None, "a recalibration")
    asked = stage.trainer.expect(wire.TrainRequest)
    assert asked.workloads == ["default"]
    stage.trainer.send(wire.TrainResult(operation_id=asked.operation_id, ok=False, error="x"))
    stage.wait_state(asked.operation_id, "failed")
    with stage.service.lock:
        stage.service.tick(stage.service.monotonic() + stage.service.settings.recalibration.min_interval_s)
    assert stage.trainer.expect(wire.TrainRequest).workloads == ["b"]


def test_every_turn_s_lease_is_renewed(stage: Stage) -> None:
    """Also the home version's, whose end would free the other one's memory."""
    candidate(stage, 1.0)
    trial = stage.service.rollout.trial
    assert trial is not None

    def are_rounds_counted() -> bool:
        with stage.service.lock:
            return stage.service.engines.boot("engine-0", "boot").committed_seq == stage.engine._seq

    for _ in range(2):
        stage.engine.serve(are_rounds_counted, "the last turn's rounds", rounds=0)  # they could end the next one
        with stage.service.lock:
            stage.service.tick(stage.service.monotonic())
            serving = trial.canary.serving
        stage.engine.serve(lambda version=serving: stage.engine.live_version == version and not trial.is_swapping, rounds=0)
        swapped = len(stage.engine.swaps)
        with stage.service.lock:
            stage.service.canaries.tick(trial.sent_s + LEASE_S / 2)
        stage.engine.serve(lambda before=swapped: len(stage.engine.swaps) > before, "the renewal", rounds=0)
        renewed = stage.engine.swaps[-1]
        assert (renewed.weights.version, renewed.drops_cache) == (serving, False)
        stage.engine.serve(lambda before=serving: trial.canary.serving != before, "the other's turn")


def test_an_engine_that_is_killed_comes_back_into_its_turn(stage: Stage) -> None:
    operation_id, new = candidate(stage, 1.0, old=0.4, new=0.7)
    stage.engine.serve(lambda: pairs(stage) >= 2, "pairs of windows")
    stage.engine.die("second boot")
    stage.engine.attach(capture_path="/ring")
    assert stage.finish(operation_id)["state"] == "succeeded"
    assert stage.engine.live_version == new


def with_another_fc(stage: Stage) -> str:
    """A version as with scope "full": what is in an engine's cache isn't right for it."""

    def write(folder: Path) -> None:
        import numpy as np
        from safetensors.numpy import load_file, save_file

        write_checkpoint(folder, 3.0)
        tensors = load_file(folder / "model.safetensors")
        save_file(tensors | {"fc.weight": np.zeros((4, 4), np.float32)}, folder / "model.safetensors")

    return stage.service.drafters.registry.create(write, parent=stage.first, target_path="/models/tiny").version


def test_versions_that_do_not_share_the_cache_get_long_windows(stage: Stage) -> None:
    stage.promote(with_another_fc(stage), force=False)
    trial = stage.service.rollout.trial
    assert trial is not None
    assert trial.canary.settings.window_s == trial.canary.settings.reset_window_s
    with stage.service.lock:
        stage.service.canaries.stop("enough")
    stage.engine.serve(lambda: stage.engine.swaps, "the swap")
    back = stage.client.post("/v1/drafters:rollback").json()["operation_id"]
    stage.finish(back)
    assert stage.engine.swaps[-1].drops_cache


def test_it_ends_when_its_engines_are_gone_for_good(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine of another target goes on: it must not wait for ever to be trained."""
    operation_id, new = candidate(stage, 1.0)
    with stage.service.lock:
        canaries, now_s = stage.service.canaries, stage.service.monotonic()
        monkeypatch.setattr(stage.service.engines, "connected", lambda now_s: [])
        canaries.tick(now_s)
        canaries.tick(now_s + ABANDONED_S - 60.0)
        assert stage.service.rollout.trial is not None
        monkeypatch.undo()
        canaries.tick(now_s + 1.0)  # there is one, even if it sleeps
        monkeypatch.setattr(stage.service.engines, "connected", lambda now_s: [])
        canaries.tick(now_s + ABANDONED_S + 0.5)
        assert stage.service.rollout.trial is not None
        canaries.tick(now_s + ABANDONED_S + 60.0)
        assert stage.service.rollout.trial is None
    done = stage.wait_state(operation_id, "failed")
    assert "no engine that can run both was connected for 24 hours" in done["error"]
    assert stage.aliases()["active"] == stage.first
    assert not stage.service.canaries.why_failed(new), "it wasn't found worse"


@pytest.mark.parametrize("idle_s", [0.0, 1.1 * ABANDONED_S])
def test_it_goes_on_after_a_restart_of_the_daemon(settings: Settings, folder: Path, idle_s: float) -> None:
    """After a day without traffic it ended at the first tick, before its engine had said hello again."""
    service, engine, trainer, first = first_life(settings, folder)
    trainer.introduce()
    try:
        with TestClient(make_app(service)) as client:
            operation_id, new = candidate(Stage(service, engine, trainer, client, first, folder), 1.0, old=0.5, new=0.56)
            engine.serve(lambda: (service.rollout.trial or service).canary.pairs >= 3, "pairs")  # type: ignore[union-attr]
        service.stop()
        trial = service.rollout.trial
        assert trial is not None
        before = trial.canary.figures()
        service = Service(settings, daemon_id="two", clock=lambda: time.time() + idle_s)
        service.start()
        resumed = service.rollout.trial
        assert resumed is not None
        with service.lock:
            service.tick(service.monotonic())
        assert resumed.canary.pairs == trial.canary.pairs
        assert resumed.canary.figures() == before
        engine.reconnect()
        engine.attach(capture_path="/ring")
        trainer.reconnect()
        trainer.introduce()
        with TestClient(make_app(service)) as client:
            assert client.get(f"/v1/operations/{operation_id}").json()["stage"] == "canary"
            done = Stage(service, engine, trainer, client, first, folder).finish(operation_id)
            assert done["state"] == "succeeded", done
            assert service.drafters.active == engine.live_version == new
            drift(Stage(service, engine, trainer, client, first, folder), "default")
        check_pause(service, trainer, "default")
    finally:
        service.stop()
        engine.close()
        trainer.close()


def test_it_can_be_seen(stage: Stage) -> None:
    operation_id, new = candidate(stage, 1.0, old=0.4, new=0.7)
    stage.engine.serve(lambda: pairs(stage) >= 2, "pairs of windows")
    status: dict[str, Any] = stage.client.get("/v1/status").json()
    assert (status["canary"]["new"], status["canary"]["old"]) == (new, stage.first)
    assert status["operation"]["operation_id"] == operation_id
    metrics = stage.client.get("/metrics").text
    assert "honed_canary_active 1.0" in metrics
    assert f'honed_canary_log_evidence{{says="better",version="{new}",workload=""}}' in metrics
    assert f'honed_canary_log_evidence{{says="better",version="{new}",workload="default"}}' in metrics
    stage.finish(operation_id)
    assert stage.service.store.drain(10)
    (row,) = stage.client.get("/v1/canaries").json()
    assert (row["operation_id"], row["kind"], row["decision"]) == (operation_id, "canary", "better")
    assert stage.service.store.read("SELECT state FROM canaries") == [{"state": "{}"}], "its state serves only to go on"
    points = stage.client.get(f"/v1/canaries/{operation_id}").json()["points"]
    everything = [point for point in points if point["workload"] == ""]
    assert [point["pairs"] for point in everything] == list(range(1, len(everything) + 1))
    assert everything[-1]["evidence_better"] > everything[0]["evidence_better"]
    assert stage.client.get("/v1/canaries/nothing").status_code == 404


def test_an_engine_is_verified_by_its_weights(stage: Stage) -> None:
    new = stage.version(1.0)
    stage.client.post(f"/v1/drafters/{new}:promote", json={"force": True})
    stage.engine.serve(lambda: stage.service.engines.by_id["engine-0"].live_version == new, "the swap")
    asked = stage.client.post("/v1/engines/engine-0:verify").json()["operation_id"]
    assert stage.finish(asked)["detail"]["version"] == new
    loaded = wire.DrafterWeights(version=new, path=str(stage.folder / "drafter"))  # it runs something else than it says
    stage.engine.swaps.append(wire.SwapCommand(command_id="", weights=loaded, drops_cache=False))
    asked = stage.client.post("/v1/engines/engine-0:verify").json()["operation_id"]
    assert "does not run the weights of" in stage.finish(asked)["error"]
    assert stage.client.post("/v1/engines/nothing:verify").status_code == 404


def test_ranks_that_run_different_weights_are_told(stage: Stage) -> None:
    new = stage.version(1.0)
    stage.client.post(f"/v1/drafters/{new}:promote", json={"force": True})
    stage.engine.serve(lambda: stage.service.engines.by_id["engine-0"].live_version == new, "the swap")
    stage.engine.other_ranks = {"rank1": stage.engine.digest()}
    asked = stage.client.post("/v1/engines/engine-0:verify").json()["operation_id"]
    assert stage.finish(asked)["state"] == "succeeded"
    stage.engine.other_ranks = {"rank1": "0" * 64}
    asked = stage.client.post("/v1/engines/engine-0:verify").json()["operation_id"]
    assert "its ranks run different weights" in stage.finish(asked)["error"]


def test_time_without_traffic_does_not_count_against_a_candidate(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    candidate(stage, 1.0)
    stage.engine.serve(lambda: pairs(stage) >= 1, "a pair of windows")
    canaries, trial = stage.service.canaries, stage.service.rollout.trial
    assert trial is not None
    with stage.service.lock:
        before_s, night_s = trial.active_s, 0.9 * ABANDONED_S
        assert trial.canary.settings.max_s < night_s
        morning_s = stage.service.monotonic() + night_s
        monkeypatch.setattr(canaries, "_monotonic", lambda: morning_s)
        batch = stage.engine.batch(10**6, drafter_version=trial.canary.serving)
        canaries.on_batch(stage.service.engines.by_id["engine-0"], batch)
        canaries.tick(morning_s)
        assert trial.active_s == pytest.approx(before_s + PAUSE_S)
        assert stage.service.rollout.trial is trial


def test_a_trial_goes_on_with_its_own_windows_limit_and_time(stage: Stage) -> None:
    stage.promote(with_another_fc(stage), force=False)
    trial = stage.service.rollout.trial
    assert trial is not None
    with stage.service.lock:
        trial.canary.settings = replace(trial.canary.settings, max_pairs=200)
        trial.active_s = 100.0
        stage.service.canaries._save(trial)
    assert stage.service.store.drain(10)
    with stage.service.lock:
        stage.service.rollout.trial = None
        assert stage.service.canaries.load() == {trial.operation_id}
        resumed = stage.service.rollout.trial
        assert resumed is not None
        settings = resumed.canary.settings
        assert (settings.window_s, settings.max_pairs) == (settings.reset_window_s, 200)
        assert resumed.active_s == 100.0


def test_a_window_begins_when_its_swap_is_done(stage: Stage) -> None:
    candidate(stage, 1.0)
    trial = stage.service.rollout.trial
    assert trial is not None
    with stage.service.lock:
        assert trial.is_swapping
        asked_s = trial.window_began_s = stage.service.monotonic() - 60.0
    stage.engine.serve(lambda: not trial.is_swapping, "the swap", rounds=0)
    assert trial.window_began_s > asked_s


def test_a_batch_from_before_an_engine_s_sleep_is_counted(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes after the report of the sleep."""
    candidate(stage, 1.0)
    trial = stage.service.rollout.trial
    assert trial is not None
    with stage.service.lock, monkeypatch.context() as asleep:
        asleep.setattr(Engine, "is_asleep", True)
        batch = stage.engine.batch(10**6, drafter_version=trial.canary.serving)
        stage.service.canaries.on_batch(stage.service.engines.by_id["engine-0"], batch)
        assert trial.heard_s > 0.0
