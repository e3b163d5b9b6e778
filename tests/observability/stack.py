"""Everything real at once: vLLM's CPU server with the tiny pair, honed's daemon and trainer, Prometheus, Alertmanager."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import torch
from safetensors.torch import load_file, save_file

from benchmarks.demo.figures import toml
from benchmarks.server import vllm_server
from benchmarks.server.client_load import Prompt, play, read_prompts
from benchmarks.server.honed_side import caught_up, honed_command, start_daemon, vllm_args, wait_attached
from benchmarks.server.processes import ROOT, Child, Processes, free_port
from benchmarks.server.vllm_server import Server
from honed.adapt.protocol.wire import GateFigures
from honed.daemon.client.client import AdminClient
from honed.recalib.registry.manifest import Figures
from honed.recalib.registry.registry import Registry
from tests.observability.watchers import Alertmanager, Prometheus

TINY = ROOT / "benchmarks" / "tiny"
DRAFTER = ROOT / vllm_server.DRAFTER


@dataclass
class Stack:
    """All of it, running."""

    folder: Path
    runtime_dir: Path
    client: AdminClient
    server: Server
    prometheus: Prometheus
    alertmanager: Alertmanager
    traffic: Traffic
    page_url: str
    start_s: float
    neighbour: Child
    """The daemon of a second host, which has no engine."""
    instances: tuple[str, str]
    """As Prometheus names the two."""

    def wait_for(self, condition: Callable[[], Any], what: str, timeout_s: float = 120.0) -> Any:
        """Poll until a condition gives something true."""
        deadline = time.monotonic() + timeout_s
        while not (found := condition()):
            assert time.monotonic() < deadline, f"waited {timeout_s:g} s in vain for {what}"
            assert not self.traffic.errors, self.traffic.errors[:3]
            self.server.child.check()
            time.sleep(0.5)
        return found

    def operation(self, path: str, body: dict[str, Any], timeout_s: float = 180.0) -> dict[str, Any]:
        """Begin an operation and wait for its end."""
        operation_id = self.client.post(path, body)["operation_id"]

        def ended() -> dict[str, Any] | None:
            view: dict[str, Any] = self.client.get(f"/v1/operations/{operation_id}")
            return view if view["finished_unix_s"] else None

        found: dict[str, Any] = self.wait_for(ended, f"the end of {path}", timeout_s)
        return found

    def spoilt_version(self) -> str:
        """Register a version of the drafter whose layers write noise: as large, as fast, hardly ever accepted.

        Its manifest has what a gate would have said of it, wrongly.
        """
        tensors = load_file(DRAFTER / "model.safetensors")
        noise = torch.Generator().manual_seed(0)
        for name, weight in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensors[name] = (0.5 * torch.randn(weight.shape, generator=noise)).to(weight.dtype)

        def write(folder: Path) -> None:
            shutil.copy(DRAFTER / "config.json", folder)
            save_file(tensors, folder / "model.safetensors")

        row = GateFigures(workload="docs", sessions=9, parent=2.0, candidate=3.0, gain_low=1.4, gain_high=1.6, passed=True)
        target = self.client.get("/v1/engines")[0]["target_path"]
        registry = Registry(self.folder / "state" / "registry")
        return registry.create(write, figures=Figures(gate=[row]), target_path=target, note="spoilt on purpose").version

    def reload_target(self) -> None:
        """Let vLLM read its target's weights again, as reinforcement learning does."""
        asked = httpx2.post(
            f"{self.server.url}/collective_rpc", json={"method": "reload_weights"}, timeout=60.0, trust_env=False
        )
        asked.raise_for_status()

    def settle(self) -> None:
        """Wait, without traffic, until the daemon has stored all that vLLM counted."""
        asyncio.run(self._settle())

    async def _settle(self) -> None:
        await caught_up(self.client, await vllm_server.settled(self.server))


class Traffic:
    """Bursts of requests of two workloads, with idle moments between them, from a thread of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._prompts = {name: read_prompts(TINY / f"traffic_{name}.jsonl", 200) for name in ("a", "b")}
        self._source = {name: name for name in self._prompts}
        self._stop, self._may_go = threading.Event(), threading.Event()
        self._is_quiet = threading.Event()
        self.workloads = ["a"]
        self.requests = 0
        self.errors: list[str] = []
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._may_go.set()
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._may_go.set()
        self._thread.join(120)

    def turn(self, workload: str, into: str) -> None:
        """From now on requests with one workload's label are like another's (or, with its own name, like themselves again)."""
        self._source[workload] = into

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """No requests meanwhile; those under way are finished first."""
        self._may_go.clear()
        self._is_quiet.clear()
        assert self._is_quiet.wait(120)
        try:
            yield
        finally:
            self._may_go.set()

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            if not self._may_go.is_set():
                self._is_quiet.set()
                self._may_go.wait()
                continue
            workload = self.workloads[number % len(self.workloads)]
            prompts, size = self._prompts[self._source[workload]], (2, 8, 4)[number % 3]
            burst = [prompts[(number * 8 + i) % len(prompts)] for i in range(size)]
            self._play(workload, burst)
            number += 1
            self._stop.wait(0.5)

    def _play(self, workload: str, burst: list[Prompt]) -> None:
        played = asyncio.run(play(self._url, burst, concurrency=8, max_tokens=40, workload=workload))
        self.requests += len(burst)
        self.errors += [reply.error for reply in played.replies if reply.error]


@contextlib.contextmanager
def running(folder: Path, runtime_dir: Path) -> Iterator[Stack]:
    """Start all of it, in the order in which an operator would; end it in the opposite one."""
    listen = f"127.0.0.1:{free_port()}"
    config = folder / "honed.toml"
    settings = {
        "paths": {"state_dir": folder / "state", "runtime_dir": runtime_dir},
        "http": {"metrics_listen": listen},
        "controller": {"capture_share": 1.0},
        "recalibration": {"automatic": False, "max_seconds": 60.0},
        "trainer": {"max_steps": 400, "min_training_tokens": 512},
    }
    config.write_text(toml(settings))
    start_s = time.time()
    elsewhere = f"127.0.0.2:{free_port()}"
    plain = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    with Processes(folder / "logs") as processes, AdminClient(runtime_dir / "admin.sock") as client:
        _, environment = start_daemon(processes, config, client)
        args = vllm_args(environment)
        developing = {"VLLM_SERVER_DEV_MODE": "1"}  # for `reload_target`
        server = vllm_server.start(processes, "vllm", extra=args["flags"], environment=args["environment"] | developing)
        alertmanager = Alertmanager(processes, folder / "alertmanager", plain)
        neighbour = start_neighbour(processes, folder / "neighbour", elsewhere)
        targets = {"honed": [listen, elsewhere], "vllm": [f"127.0.0.1:{server.port}"]}
        prometheus = Prometheus(processes, folder / "prometheus", plain, targets, alertmanager.address)
        vllm_server.wait(server)
        wait_attached(server.child, client)
        processes.start("honed-train", [honed_command(), "train"], environment)
        traffic = Traffic(server.url)
        traffic.start()
        try:
            page_url, instances = f"http://{listen}/", (listen, elsewhere)
            watchers = (prometheus, alertmanager)
            yield Stack(folder, runtime_dir, client, server, *watchers, traffic, page_url, start_s, neighbour, instances)
        finally:
            traffic.stop()
            (folder / "status.json").write_text(json.dumps(client.get("/v1/status"), indent=1))


def start_neighbour(processes: Processes, folder: Path, listen: str) -> Child:
    """Start the daemon of another host, at another address of this one."""
    folder.mkdir()
    config = folder / "honed.toml"
    paths = {"state_dir": folder / "state", "runtime_dir": folder / "run"}
    config.write_text(toml({"paths": paths, "http": {"metrics_listen": listen}}))
    with AdminClient(folder / "run" / "admin.sock") as client:
        daemon, _ = start_daemon(processes, config, client, "honed-serve-neighbour")
    return daemon
