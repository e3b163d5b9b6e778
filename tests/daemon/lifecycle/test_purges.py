"""Samples are forgotten, whoever holds them, and the operation says whether they are."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient

from honed.adapt.protocol import wire
from honed.attach.capture.ring_writer import RingWriter
from honed.daemon.api.app import make_app
from honed.daemon.lifecycle.purges import erase_files
from honed.daemon.retry import Retry
from honed.daemon.service import Service
from honed.daemon.settings.settings import Settings, load
from honed.recalib.config.trainer import SampleSettings
from honed.recalib.samples.hold_out import HoldOut
from honed.recalib.samples.ring_reader import MOST_PROBLEMS, RingReader
from honed.recalib.samples.traffic import Traffic
from tests.daemon.conftest import flags_in, wait_for
from tests.daemon.fake_engine import FakeEngine, FakeTrainer

SECRET = "a-session-to-forget"


def write_samples(paths: Any) -> list[Path]:
    """Two engines' rings and a file on the trainer's disk; all that holds a sample."""
    rings = [paths.runtime_dir / "engines" / name / "ring" for name in ("engine-0", "engine-1")]
    for path in rings:
        ring = RingWriter(path, feature_size=8, feature_dtype="bfloat16", feature_kind="fused", capacity_bytes=1 << 16)
        ring.write_rows("request", "a", "", 0, np.arange(4, dtype=np.int32), np.zeros((4, 8), np.uint16), session=SECRET)
    spilled = paths.state_dir / "samples" / "8-bf16" / "1.safetensors"
    spilled.parent.mkdir(parents=True)
    spilled.write_text(SECRET)
    return [*rings, spilled]


def holding(paths: list[Path]) -> list[Path]:
    return [path for path in paths if path.exists() and SECRET.encode() in path.read_bytes()]


@pytest.fixture
def client(service: Service) -> Iterator[TestClient]:
    with TestClient(make_app(service)) as client:
        yield client


@pytest.fixture
def trainer(settings: Settings) -> Iterator[FakeTrainer]:
    trainer = FakeTrainer(settings.paths.engine_socket)
    yield trainer
    trainer.close()


def purge(client: TestClient) -> str:
    answer = client.post("/v1/samples:purge", json={"reason": "somebody asked for it"})
    assert answer.status_code == 202, answer.text
    operation_id: str = answer.json()["operation_id"]
    return operation_id


def ended(client: TestClient, operation_id: str) -> dict[str, Any]:
    def end() -> dict[str, Any]:
        view: dict[str, Any] = client.get(f"/v1/operations/{operation_id}").json()
        return view if view["state"] != "running" else {}

    return wait_for(end, "the end of the purge")


def test_without_a_trainer_the_daemon_erases_rings_and_disk(client: TestClient, settings: Settings) -> None:
    written = write_samples(settings.paths)
    assert holding(written) == written
    following = RingReader(written[0])
    following.poll()
    assert ended(client, purge(client))["state"] == "succeeded"
    assert holding(written) == []
    assert following.poll().is_purged, "whoever read it before is told to forget"
    (row,) = client.get("/v1/audit").json()
    assert (row["action"], row["reason"]) == ("samples.purge", "somebody asked for it")


def test_where_there_is_nothing_nothing_is_left(client: TestClient) -> None:
    assert ended(client, purge(client))["state"] == "succeeded"


def test_it_has_succeeded_when_the_trainer_says_so_and_not_before(client: TestClient, trainer: FakeTrainer) -> None:
    trainer.introduce()
    operation_id = purge(client)
    asked = trainer.expect(wire.Purge)
    assert asked.operation_id == operation_id
    assert client.get(f"/v1/operations/{operation_id}").json()["state"] == "running"
    second = client.post("/v1/samples:purge", json={})
    assert (second.status_code, operation_id in second.json()["detail"]) == (409, True)
    trainer.send(wire.Purged(operation_id="another"))
    trainer.send(wire.Purged(operation_id=operation_id))
    assert ended(client, operation_id)["state"] == "succeeded"


def test_what_the_trainer_could_not_erase_is_said(client: TestClient, trainer: FakeTrainer) -> None:
    trainer.introduce()
    operation_id = purge(client)
    trainer.send(wire.Purged(operation_id=operation_id, problems=["sample ring x may only be read", "and y"]))
    done = ended(client, operation_id)
    assert (done["state"], done["error"]) == ("failed", "sample ring x may only be read; and y")


def test_a_trainer_that_was_restarted_meanwhile_is_asked_again(client: TestClient, trainer: FakeTrainer) -> None:
    trainer.introduce()
    operation_id = purge(client)
    assert trainer.expect(wire.Purge).operation_id == operation_id
    trainer.introduce()
    assert trainer.expect(wire.Purge).operation_id == operation_id


def test_for_a_trainer_that_falls_silent_the_daemon_does_it(
    client: TestClient, service: Service, settings: Settings, trainer: FakeTrainer
) -> None:
    written = write_samples(settings.paths)
    trainer.introduce()
    operation_id = purge(client)
    with service.lock:
        service.purges.tick(service.monotonic())
    assert holding(written) == written
    with service.lock:
        service.trainer._seen_s -= settings.recalibration.trainer_lost_s + 1.0
        service.purges.tick(service.monotonic())
    assert ended(client, operation_id)["state"] == "succeeded"
    assert holding(written) == []
    trainer.send(wire.Purged(operation_id=operation_id))  # late, and no news
    trainer.introduce()


def test_a_ring_that_may_only_be_read_is_named(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    ring, other, _ = write_samples(settings.paths)
    opens = os.open

    def refuse(path: Any, flags: int, *more: Any, **others: Any) -> int:  # file modes stop nobody who runs the tests as root
        if path == "ring" and flags & os.O_RDWR and os.readlink(f"/proc/self/fd/{others['dir_fd']}") == str(ring.parent):
            raise PermissionError(path)
        return opens(path, flags, *more, **others)

    monkeypatch.setattr(os, "open", refuse)
    (problem,) = erase_files(ring.parents[1], settings.paths.state_dir / "samples")
    assert str(ring) in problem
    assert holding([ring, other]) == [ring]


def test_a_damaged_ring_is_named_and_the_others_are_erased(settings: Settings) -> None:
    ring, other, spilled = write_samples(settings.paths)
    ring.write_bytes(b"no ring")
    (problem,) = erase_files(ring.parents[1], settings.paths.state_dir / "samples")
    assert str(ring) in problem
    assert holding([other, spilled]) == []


@pytest.mark.fault("engine names and reasons without end")
def test_of_many_damaged_rings_a_bounded_number_is_named(settings: Settings) -> None:
    """Anyone who may make folders there would otherwise choose the size of the operation's error."""
    ring, other, _ = write_samples(settings.paths)
    for number in range(2 * MOST_PROBLEMS):
        odd = ring.parents[1] / f"a{number}" / "ring"
        odd.parent.mkdir()
        odd.touch()
    engines_dir, spill_dir = ring.parents[1], settings.paths.state_dir / "samples"
    assert len(erase_files(engines_dir, spill_dir)) == MOST_PROBLEMS
    assert len(Traffic(engines_dir.parent, SampleSettings(), HoldOut(b"k" * 16)).purge()) == MOST_PROBLEMS
    assert holding([ring, other]) == []


@pytest.fixture
def purging(folder: Path) -> Iterator[Service]:
    """A service that forgets what it has of a target that was updated."""
    flags = flags_in(folder)
    flags["recalibration"] |= {"on_target_update": "purge"}
    settings = load(None, flags, env={})
    settings.paths.state_dir.mkdir()
    settings.paths.runtime_dir.mkdir()
    running = Service(settings, daemon_id="test")
    running.start()
    yield running
    running.stop()


def update_target(service: Service, *totals: int) -> None:
    """An engine says how often its target was updated."""
    engine = FakeEngine(service.settings.paths.engine_socket)
    engine.hello()
    for total in totals:
        engine.send_status(target_updates=total)
    wait_for(lambda: (status := service.engines.by_id["engine-0"].status) and status.target_updates == totals[-1], "the status")
    engine.close()


def states(service: Service) -> list[str]:
    with service.lock:
        return [operation.state for operation in service.operations.listing()]


def test_samples_of_a_target_that_was_updated_go_where_that_is_wanted(purging: Service) -> None:
    written = write_samples(purging.settings.paths)
    update_target(purging, 0)
    assert holding(written) == written
    update_target(purging, 1)
    wait_for(lambda: not holding(written), "the purge")
    with TestClient(make_app(purging)) as client:
        (row,) = client.get("/v1/audit").json()
        (mark,) = client.get("/v1/timeline?since=0").json()["marks"]
    assert (row["actor"], row["action"], row["reason"]) == (
        "honed",
        "samples.purge",
        "the target of engine engine-0 was updated",
    )
    assert (mark["kind"], mark["engine_id"]) == ("target", "engine-0")


@pytest.mark.fault("an update of the target while no daemon runs")
def test_an_update_that_no_daemon_heard_of_counts_once(purging: Service) -> None:
    update_target(purging, 0, 1)
    wait_for(lambda: states(purging) == ["succeeded"], "the first purge")
    purging.stop()
    for total, num_purges in ((1, 1), (2, 2), (2, 2)):
        again = Service(purging.settings, daemon_id="again")
        again.start()
        update_target(again, total)
        wait_for(lambda: states(again) == ["succeeded"] * num_purges, "the purges")  # noqa: B023
        again.stop()


@pytest.mark.fault("an update of the target while no daemon runs")
def test_an_update_whose_purge_was_cut_off_counts_again(purging: Service) -> None:
    """Samples of the old weights would be trained on otherwise."""
    trainer = FakeTrainer(purging.settings.paths.engine_socket)
    trainer.introduce()
    update_target(purging, 0, 1)
    trainer.expect(wire.Purge)  # and doesn't answer
    trainer.close()
    with purging.lock:
        purging.purges._in_background = lambda job: None
    purging.stop()
    again = Service(purging.settings, daemon_id="again")
    again.start()
    update_target(again, 1)
    wait_for(lambda: sorted(states(again)) == ["failed", "succeeded"], "the purge")
    again.stop()


@pytest.mark.fault("a purge after an update of the target that failed once")
def test_an_update_whose_purge_failed_is_purged_again_by_the_same_daemon(
    purging: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The update counted already, so samples of the old weights were trained on until the daemon was started again."""
    written, problems = write_samples(purging.settings.paths), [["Input/output error"], ["Input/output error"]]

    def erase(engines_dir: Path, spill_dir: Path) -> list[str]:
        return problems.pop() if problems else erase_files(engines_dir, spill_dir)

    with monkeypatch.context() as patch:
        patch.setattr("honed.daemon.lifecycle.purges.erase_files", erase)
        patch.setattr(purging.purges, "_retry", Retry(_pause_s=0.1))
        update_target(purging, 0, 1)
        wait_for(lambda: not holding(written), "the purge")
    wait_for(lambda: sorted(states(purging)) == ["failed", "failed", "succeeded"], "its end")
    with purging.lock:
        purging.purges.tick(purging.monotonic() + 1e6)
    assert len(states(purging)) == 3, "nothing is left to purge"


def test_an_update_whose_purge_failed_after_an_earlier_one_s_counts_again(
    purging: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first purge's success, or a drafter that was read by then, counted for both updates."""
    goes_on, problems = threading.Event(), [list[str]()]

    def erase(engines_dir: Path, spill_dir: Path) -> list[str]:
        goes_on.wait(60)
        return problems.pop() if problems else ["Input/output error"]

    with monkeypatch.context() as patch:
        patch.setattr("honed.daemon.lifecycle.purges.erase_files", erase)
        update_target(purging, 0, 1, 2)
        goes_on.set()
        wait_for(lambda: {"succeeded", "failed"} <= set(states(purging)), "both purges")
        with purging.lock:
            purging.engines.keep(purging.engines.by_id["engine-0"].boot)
        purging.stop()
    again = Service(purging.settings, daemon_id="again")
    again.start()
    update_target(again, 2)
    wait_for(lambda: states(again).count("succeeded") == 2, "the purge")
    again.stop()


def test_an_update_while_a_purge_is_under_way_is_followed_by_another_one(purging: Service) -> None:
    trainer = FakeTrainer(purging.settings.paths.engine_socket)
    trainer.introduce()
    update_target(purging, 0, 1, 2, 3)
    first = trainer.expect(wire.Purge).operation_id
    trainer.send(wire.Purged(operation_id=first))
    second = trainer.expect(wire.Purge).operation_id
    trainer.send(wire.Purged(operation_id=second))
    with TestClient(make_app(purging)) as client:
        assert ended(client, second)["state"] == "succeeded"
        assert {one["operation_id"] for one in client.get("/v1/operations").json()} == {first, second}
    trainer.close()


def test_samples_are_kept_otherwise(service: Service) -> None:
    written = write_samples(service.settings.paths)
    update_target(service, 0, 1)
    assert holding(written) == written
    assert not service.operations.listing()
