"""The real trainer process against a real ROUTER socket and a real sample ring."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import zmq

from honed.adapt.protocol import wire
from honed.attach.capture.ring_writer import RingWriter
from honed.attach.engine.busy_flag import BusyFlag
from honed.recalib.registry.registry import Registry
from tests.recalib.toy_traffic import WIDTH, make_pair, write_sessions

DEADLINE_S = 60.0

_ENTRY = """
import sys
from pathlib import Path
from honed.recalib.gate.gate import GateSettings
from honed.recalib.process.trainer import run
from honed.recalib.config.trainer import TrainerSettings
settings = TrainerSettings(nice=1, torch_threads=1, learning_rate=5e-3, min_training_tokens=2000, max_steps=400,
                           rows_per_micro_step=160, status_interval_s=0.2, micro_steps_per_update=1, save_state_s=0.5)
run(settings, sys.argv[1], gate=GateSettings(min_sessions=3, confidence=0.8), state_dir=Path(sys.argv[2]))
"""


@dataclass
class Daemon:
    """The daemon's end of the socket, and nothing more."""

    endpoint: str
    context: zmq.Context = field(default_factory=zmq.Context)
    peer: bytes = b""
    heard: list = field(default_factory=list)
    socket: zmq.Socket = None

    def bind(self) -> None:
        self.socket = self.context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(self.endpoint)

    def unbind(self) -> None:
        self.socket.close()

    def send(self, message) -> None:
        self.socket.send_multipart([self.peer, wire.encode(message)])

    def wait_for(self, wanted, is_it=lambda message: True):
        """The next message of a type for which `is_it` holds."""
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            if self.socket.poll(200):
                self.peer, frame = self.socket.recv_multipart()
                message = wire.decode_to_daemon(frame)
                self.heard.append(message)
                if isinstance(message, wanted) and is_it(message):
                    return message
        pytest.fail(f"no {wanted.__name__} came; the last messages were {self.heard[-3:]}")


@dataclass
class Site:
    """A machine with an engine's files, a registry and a trainer."""

    root: Path
    daemon: Daemon
    ring: RingWriter
    busy: BusyFlag
    registry: Registry
    parent: str
    target: Path
    process: subprocess.Popen

    def request(self, operation_id: str, **more) -> wire.TrainRequest:
        return wire.TrainRequest(
            **{
                "operation_id": operation_id,
                "capture_paths": [str(self.ring.path)],
                "target_path": str(self.target),
                "parent_version": self.parent,
                "workloads": ["b"],
                "max_seconds": 30.0,
                **more,
            }
        )


def start_trainer(endpoint: str, state: Path) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", _ENTRY, endpoint, str(state)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


@pytest.fixture
def site(tmp_path) -> Iterator[Site]:
    runtime, state = tmp_path / "run", tmp_path / "state"
    engine = runtime / "engines" / "engine-0"
    engine.mkdir(parents=True)
    target, drafter = make_pair(tmp_path)
    registry = Registry(state / "registry")
    parent = registry.import_checkpoint(drafter, target_path=str(target)).version
    daemon = Daemon(f"ipc://{runtime}/engine.sock")
    daemon.bind()
    process = start_trainer(daemon.endpoint, state)
    ring = RingWriter(engine / "ring", 1 << 22, WIDTH, "bfloat16", "fused")
    site = Site(tmp_path, daemon, ring, BusyFlag(engine / "busy"), registry, parent, target, process)
    yield site
    site.process.kill()
    site.process.wait()
    daemon.unbind()
    daemon.context.term()


def test_from_request_to_version_in_the_registry(site):
    """Samples before and after the request, work arriving in the middle, the daemon away at the end."""
    daemon = site.daemon
    hello = daemon.wait_for(wire.TrainerHello)
    assert (hello.operation_id, hello.device) == ("", "cpu")

    write_sessions(site.ring, "a", 40)
    daemon.wait_for(wire.TrainerStatus, lambda s: s.state == "idle" and s.samples >= 40)  # also when nothing is asked
    daemon.send(site.request("op-1"))
    daemon.wait_for(wire.TrainerStatus, lambda s: s.state == "collecting" and s.operation_id == "op-1")
    write_sessions(site.ring, "b", 60)

    daemon.wait_for(wire.TrainerStatus, lambda s: s.state == "training" and s.steps > 0)
    site.busy.set(True)
    waiting = daemon.wait_for(wire.TrainerStatus, lambda s: s.state == "waiting")
    later = daemon.wait_for(wire.TrainerStatus, lambda s: s.state == "waiting" and s.elapsed_s > waiting.elapsed_s)
    assert later.steps == waiting.steps  # nothing is trained while the engine has work
    site.busy.set(False)
    daemon.wait_for(wire.TrainerStatus, lambda s: s.steps > later.steps)

    daemon.send(wire.TrainPause(paused=True))
    daemon.wait_for(wire.TrainerStatus, lambda s: s.state == "paused")
    daemon.send(wire.TrainPause(paused=False))
    resumed = daemon.wait_for(wire.TrainerStatus, lambda s: s.state == "training")
    assert resumed.preemptions >= 1

    result = daemon.wait_for(wire.TrainResult)
    assert result.ok, result.error
    gained = next(g for g in result.gate if g.workload == "b")
    assert gained.must_gain
    assert gained.gain_low > 1.2
    assert result.version, result.error
    manifest = site.registry.verify(result.version)
    assert (manifest.parent, manifest.scope) == (site.parent, "kv-frozen")
    assert manifest.context_sha256 == site.registry.get(site.parent).context_sha256
    (gate,) = [row for row in manifest.figures.gate if row.workload == "b"]
    assert gate.candidate > gate.parent
    assert set(manifest.data_window["rows"]) == {"a", "b"}

    daemon.unbind()  # the daemon dies before it has taken note of the result
    daemon.bind()
    daemon.wait_for(wire.TrainerHello)
    daemon.send(wire.Welcome(daemon_id="d", boot_id="", committed_seq=0))
    assert daemon.wait_for(wire.TrainResult) == result

    site.process.send_signal(signal.SIGTERM)
    assert site.process.wait(DEADLINE_S) == 0


def test_failed_cancelled_and_purged_operations_leave_nothing(site):
    daemon = site.daemon
    daemon.wait_for(wire.TrainerHello)
    write_sessions(site.ring, "b", 60)
    daemon.wait_for(wire.TrainerStatus, lambda s: s.samples >= 60)
    before = [m.version for m in site.registry.versions()]

    daemon.send(site.request("unknown-parent", parent_version="v0099-00000000"))
    result = daemon.wait_for(wire.TrainResult)
    assert not result.ok
    assert "no version" in result.error

    daemon.send(site.request("moved-target", target_path=str(site.root / "moved")))
    result = daemon.wait_for(wire.TrainResult)
    assert not result.ok
    assert "config.json is missing" in result.error

    site.busy.set(True)
    daemon.send(site.request("cancelled"))
    daemon.wait_for(wire.TrainerStatus, lambda s: s.state == "waiting")
    daemon.send(site.request("another"))
    assert "busy with operation cancelled" in daemon.wait_for(wire.TrainResult).error
    daemon.send(wire.TrainCancel(operation_id="cancelled", reason="changed my mind"))
    result = daemon.wait_for(wire.TrainResult)
    assert (result.operation_id, result.ok, result.error) == ("cancelled", False, "cancelled: changed my mind")

    daemon.send(site.request("purged"))
    daemon.wait_for(wire.TrainerStatus, lambda s: s.operation_id == "purged")
    daemon.send(wire.Purge(operation_id="p"))
    assert daemon.wait_for(wire.Purged) == wire.Purged(operation_id="p")
    assert "purged" in daemon.wait_for(wire.TrainResult).error
    assert daemon.wait_for(wire.TrainerStatus, lambda s: s.state == "idle").samples == 0

    weights = site.registry.path(site.parent) / "model.safetensors"
    weights.chmod(0o600)
    weights.write_bytes(weights.read_bytes()[:-2] + b"\xff\xff")
    daemon.send(site.request("damaged-parent"))
    result = daemon.wait_for(wire.TrainResult)
    assert not result.ok
    assert "sha256" in result.error

    assert [m.version for m in site.registry.versions()] == before
    site.process.send_signal(signal.SIGTERM)
    assert site.process.wait(DEADLINE_S) == 0


def test_a_killed_trainer_takes_its_operation_up_again(site):
    """SIGKILL in the middle of the training; the daemon asks the next process again, with the same request."""
    daemon = site.daemon
    daemon.wait_for(wire.TrainerHello)
    write_sessions(site.ring, "b", 60)
    daemon.wait_for(wire.TrainerStatus, lambda s: s.samples >= 60)
    request = site.request("op-1", max_steps=4000, max_seconds=3.0)
    daemon.send(request)
    saved = site.root / "state" / "training" / "op-1.safetensors"
    deadline = time.monotonic() + DEADLINE_S
    while not saved.exists() and time.monotonic() < deadline:
        daemon.wait_for(wire.TrainerStatus, lambda s: s.state == "training")
    site.process.kill()
    site.process.wait()

    site.process = start_trainer(daemon.endpoint, site.root / "state")
    hello = daemon.wait_for(wire.TrainerHello)
    assert hello.operation_id == ""
    daemon.send(request)
    first = daemon.wait_for(wire.TrainerStatus, lambda s: s.operation_id == "op-1" and s.steps > 0)
    assert first.train_seconds >= 0.5, "it goes on from where it had saved"
    assert first.memory_bytes > 0
    result = daemon.wait_for(wire.TrainResult)
    assert result.ok, result.error
    assert not saved.exists()
