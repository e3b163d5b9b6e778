"""Trainer, daemon and engine are killed at every step of save -> alias -> swap -> canary -> promote.

Whatever was lost: afterwards exactly one version is active, and the engine runs its weights, byte for byte. Real daemon
process, real registry, real kill -9; the engine is the tests' own: it reads the files that it is told to load, and reports
their sum.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from honed.adapt.protocol import wire
from honed.recalib.registry.registry import Registry
from tests.daemon.conftest import DaemonProcess, wait_for
from tests.daemon.fake_engine import FakeTrainer, ServingEngine
from tests.daemon.lifecycle.test_lifecycle import write_checkpoint

pytestmark = pytest.mark.timeout(300)

DYING = Path(__file__).with_name("dying.py")

DAEMON_STEPS = [
    # The trainer has saved; the candidate gets its alias.
    ("honed.daemon.lifecycle.lifecycle.Lifecycle.try_out", "before", 1),
    ("honed.recalib.registry.registry.replace_link", "before", 1),
    # The trial begins.
    ("honed.daemon.store.canary_tables.save", "before", 1),
    ("honed.daemon.store.canary_tables.save", "after", 1),
    # Swaps, and the windows between them.
    ("honed.daemon.lifecycle.swaps.Swaps.begin", "before", 1),
    ("honed.daemon.lifecycle.swaps.Swaps.on_result", "before", 1),
    ("honed.daemon.lifecycle.swaps.Swaps.begin", "after", 3),
    ("honed.daemon.store.canary_tables.save_points", "after", 2),
    # The verdict: aliases previous, active, candidate; then the engines; then it is written down.
    ("honed.daemon.lifecycle.lifecycle.Lifecycle._make_active", "before", 1),
    ("honed.recalib.registry.registry.replace_link", "after", 2),
    ("honed.recalib.registry.registry.replace_link", "after", 3),
    ("honed.daemon.lifecycle.lifecycle.Lifecycle._send_home", "before", 1),
    ("honed.daemon.lifecycle.lifecycle.Lifecycle._send_home", "after", 1),
]
SAVE_STEPS = [
    ("honed.recalib.registry.registry.fsync_path", "before", 1),
    ("honed.recalib.registry.registry.fsync_path", "after", 2),
    ("honed.recalib.registry.registry.replace_file", "before", 1),
    ("honed.recalib.registry.registry.replace_file", "after", 1),
    ("os.rename", "before", 1),
    ("os.rename", "after", 1),
    ("honed.recalib.registry.registry.fsync_path", "after", 3),
]
ENGINE_STEPS = ["told to swap", "swapped, not said", "said", "first window", "told to go home"]


class DyingDaemon(DaemonProcess):
    """Dies at the step that `arm` names."""

    def spawn(self, *arguments: str, stderr: int = subprocess.PIPE) -> subprocess.Popen[str]:
        targets = ",".join(sorted({target for target, _, _ in DAEMON_STEPS}))
        command = [sys.executable, str(DYING), str(self.arm_file), "daemon", targets]
        return subprocess.Popen(command, env=self.env, stderr=stderr, text=True)

    @property
    def arm_file(self) -> Path:
        return self.state_dir.parent / "arm"

    def wait_dead(self) -> None:
        assert self.process is not None
        assert self.process.wait(30) == -signal.SIGKILL
        assert self.process.stderr is not None
        self.process.stderr.close()
        self.process = None


class DyingEngine(ServingEngine):
    """Is killed at a step, and comes back with what it was first started with."""

    dies_at = ""
    deaths = 0

    def _obey(self, command: wire.Command) -> None:
        is_going_home = isinstance(command, wire.SwapCommand) and command.turns is None
        if self.dies_at == "told to swap" or (self.dies_at == "told to go home" and is_going_home):
            self._come_back()
            return
        if self.dies_at == "swapped, not said":
            assert isinstance(command, wire.SwapCommand)
            self.live_version = command.weights.version
            self._come_back()
            return
        super()._obey(command)
        if self.dies_at == "said":
            self._come_back()

    def turn(self, rounds: int = 40) -> None:
        if self.dies_at == "first window" and self.swaps:
            self._come_back()
        super().turn(rounds)

    def _come_back(self) -> None:
        self.dies_at = ""
        self.deaths += 1
        self.swaps.clear()
        self.die(f"boot {self.deaths}")
        self.attach(capture_path="/ring")


@dataclass
class Site:
    """A daemon that can be killed at any step, an engine and a trainer."""

    daemon: DyingDaemon
    engine: DyingEngine
    trainer: FakeTrainer
    folder: Path
    made: int = 0

    @property
    def registry(self) -> Registry:
        return Registry(self.daemon.state_dir / "registry")

    def get(self, path: str) -> Any:
        with self.daemon.http() as client:
            return client.get(path).json()

    def begin(self) -> None:
        """A recalibration's result is on its way to the daemon: a better drafter."""
        with self.daemon.http() as client:
            answer = client.post("/v1/recalibrations", json={})
            assert answer.status_code == 202, answer.text
        self.trainer.expect(wire.TrainRequest)
        self.made += 1
        registry, active = self.registry, self.registry.alias("active")
        assert active is not None
        version = registry.create(
            lambda folder: write_checkpoint(folder, float(self.made)), parent=active, target_path="/models/tiny"
        ).version
        self.engine.acceptance = {active: 0.4, version: 0.8}
        self.trainer.send(wire.TrainResult(operation_id=answer.json()["operation_id"], ok=True, version=version, steps=1))

    def come_back(self) -> None:
        """The daemon is started again; engine and trainer notice."""
        self.daemon.start()
        self.engine.reconnect()
        self.engine.attach(capture_path="/ring")
        self.trainer.reconnect()
        self.trainer.introduce()

    def settle(self) -> None:
        """Serve until nothing is under way, and look: one active version, and the engine runs it."""

        def is_settled() -> bool:
            status = self.get("/v1/status")
            active = status["drafters"]["active"]
            is_quiet = status["canary"] is None and status["operation"] is None
            return is_quiet and self.engine.live_version == active == status["engines"][0]["drafter_version"]

        self.engine.serve(is_settled, "rest")
        registry = self.registry
        active = registry.alias("active")
        assert active is not None
        assert registry.verify(active).sha256 == self.engine.live_sha256
        assert registry.alias("candidate") is None
        assert [manifest.error for manifest in registry.versions() if manifest.state != "ready"] == []
        previous = registry.alias("previous")
        assert previous is None or registry.verify(previous)
        with self.daemon.http() as client:
            asked = client.post("/v1/engines/engine-0:verify").json()["operation_id"]
        done = self.engine.serve(lambda: (o := self.get(f"/v1/operations/{asked}"))["state"] != "running" and o)
        assert done["state"] == "succeeded", done


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("k")
    daemon = DyingDaemon(folder, HONED_EVENTS__ENGINE_LOST_S="300")
    write_checkpoint(folder / "drafter", 0.0)
    try:
        daemon.start()
        engine = DyingEngine(daemon.runtime_dir / "engine.sock", checkpoint=str(folder / "drafter"))
        trainer = FakeTrainer(daemon.runtime_dir / "engine.sock")
        engine.attach(capture_path="/ring")
        trainer.introduce()
        yield Site(daemon, engine, trainer, folder)
        engine.close()
        trainer.close()
    finally:
        daemon.close()


@pytest.mark.parametrize("step", DAEMON_STEPS, ids=lambda step: f"{step[1]} {step[0].rpartition('.')[2]} {step[2]}")
def test_the_daemon_is_killed(site: Site, step: tuple[str, str, int]) -> None:
    site.daemon.arm_file.write_text(" ".join(map(str, step)))
    site.begin()
    site.engine.serve(lambda: not site.daemon.arm_file.exists(), f"the daemon's end {step}")
    site.daemon.wait_dead()
    site.come_back()
    site.settle()


@pytest.mark.parametrize("step", ENGINE_STEPS)
def test_the_engine_is_killed(site: Site, step: str) -> None:
    before = site.engine.deaths
    site.engine.swaps.clear()
    site.engine.dies_at = step
    site.begin()
    wait_for(lambda: site.get("/v1/status")["canary"], "the trial")
    site.settle()
    assert site.engine.deaths == before + 1


@pytest.mark.parametrize("step", SAVE_STEPS, ids=lambda step: f"{step[1]} {step[0].rpartition('.')[2]} {step[2]}")
def test_the_trainer_is_killed_while_it_saves(site: Site, step: tuple[str, str, int]) -> None:
    before, active = [m.version for m in site.registry.versions()], site.registry.alias("active")
    site.made += 1
    source, arm = site.folder / f"made{site.made}", site.folder / "arm-trainer"
    write_checkpoint(source, float(site.made))
    arm.write_text(" ".join(map(str, step)))
    targets = ",".join(sorted({target for target, _, _ in SAVE_STEPS}))
    command = [sys.executable, str(DYING), str(arm), "save", targets, str(site.registry.root), str(source), str(active)]
    died = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert died.returncode == -signal.SIGKILL, died.stderr
    registry = site.registry
    assert [m.version for m in registry.versions()][: len(before)] == before
    for manifest in registry.versions()[len(before) :]:
        registry.verify(manifest.version)
    assert [path.name for path in (registry.root / "versions").iterdir() if path.name.startswith(".")] == []
    assert registry.alias("active") == active
    site.settle()
    assert not os.path.exists(arm)
