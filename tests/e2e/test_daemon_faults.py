"""The daemon is killed, stopped and started again beside a real vLLM server: no request notices, no round is lost unseen."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.server import client_load, honed_side, vllm_server
from benchmarks.server.processes import Child, Processes, free_port
from honed.daemon.client.client import AdminClient

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@dataclass
class Beside:
    """A vLLM server with honed attached, and the daemon."""

    processes: Processes
    server: vllm_server.Server
    client: AdminClient
    daemon: Child
    config: Path
    state_dir: Path
    flags: list[str]
    environment: dict[str, str]

    def restart_vllm(self) -> None:
        """kill -9 of the server and its engine, and another start with the same flags."""
        os.killpg(self.server.child.pid, signal.SIGKILL)
        self.server.child.popen.wait(30)
        self.server = vllm_server.start(self.processes, "vllm-again", extra=self.flags, environment=self.environment)
        vllm_server.wait(self.server)
        honed_side.wait_attached(self.server.child, self.client)

    def play_until(self, condition: Callable[[], bool], timeout_s: float = 120.0) -> None:
        """Traffic, a little at a time, until the condition holds."""
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, "played in vain"
            assert self.play(8, 32).num_failed == 0

    def restart_daemon(self) -> None:
        self.daemon, _ = honed_side.start_daemon(self.processes, self.config, self.client)

    def play(self, num_prompts: int, max_tokens: int) -> client_load.Played:
        return asyncio.run(self.played(num_prompts, max_tokens))

    async def played(self, num_prompts: int, max_tokens: int) -> client_load.Played:
        prompts = client_load.read_prompts(vllm_server.ROOT / "benchmarks" / "tiny" / "prompts_a.jsonl", num_prompts)
        return await client_load.play(
            self.server.url, prompts, concurrency=8, max_tokens=max_tokens, workload="a", ignore_eos=True
        )

    def assert_every_round_is_stored_once(self) -> None:
        """stored + lost = vLLM's own counters, exactly, by the API and by the database itself."""
        totals = asyncio.run(vllm_server.settled(self.server))
        engine = asyncio.run(honed_side.caught_up(self.client, totals))
        assert engine["rounds"] + engine["lost_rounds"] == totals.drafts
        assert engine["draft_tokens"] + engine["lost_draft_tokens"] == totals.draft_tokens
        assert engine["accepted_tokens"] + engine["lost_accepted_tokens"] == totals.accepted_tokens
        assert engine["lost_rounds"] == 0
        with sqlite3.connect(f"file:{self.state_dir}/honed.db?mode=ro", uri=True) as db:
            (batches, distinct) = db.execute("SELECT count(*), count(DISTINCT boot_id || seq) FROM batches").fetchone()
            assert batches == distinct > 0


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    folder = tmp_path_factory.mktemp("faults")
    config = folder / "honed.toml"
    runtime_dir, state_dir = folder / "run", folder / "state"
    config.write_text(
        f'[paths]\nruntime_dir = "{runtime_dir}"\nstate_dir = "{state_dir}"\n'
        f'[http]\nmetrics_listen = "127.0.0.1:{free_port()}"\n[recalibration]\nautomatic = false\n'
        "[canary]\nwindow_s = 0.2\nwindow_rounds = 32\n"
    )
    with Processes(folder / "logs") as processes, AdminClient(runtime_dir / "admin.sock") as client:
        daemon, environment = honed_side.start_daemon(processes, config, client)
        args = honed_side.vllm_args(environment)
        server = vllm_server.start(processes, "vllm", extra=args["flags"], environment=args["environment"])
        vllm_server.wait(server)
        honed_side.wait_attached(server.child, client)
        yield Beside(processes, server, client, daemon, config, state_dir, args["flags"], args["environment"])


def test_rounds_are_stored_once(beside: Beside) -> None:
    played = beside.play(8, 32)
    assert played.num_failed == 0
    beside.assert_every_round_is_stored_once()


def test_sigkill_of_the_daemon_fails_no_request_and_loses_no_round(beside: Beside) -> None:
    async def killed_while_streaming() -> client_load.Played:
        playing = asyncio.create_task(beside.played(32, 96))
        await asyncio.sleep(2.0)
        assert not playing.done(), "the traffic was over before the fault: make it longer"
        os.killpg(beside.daemon.pid, signal.SIGKILL)
        beside.daemon.popen.wait(10)
        await asyncio.sleep(3.0)
        await asyncio.to_thread(beside.restart_daemon)
        return await playing

    served_by = beside.server.child.pid
    played = asyncio.run(killed_while_streaming())
    assert played.num_failed == 0, [r.error for r in played.replies if r.error]
    assert beside.server.child.pid == served_by
    assert beside.server.child.popen.poll() is None
    beside.assert_every_round_is_stored_once()


def test_a_daemon_stopped_for_30_seconds_stalls_nothing(beside: Beside) -> None:
    async def stopped() -> list[client_load.Played]:
        os.kill(beside.daemon.pid, signal.SIGSTOP)
        began_s, phases = time.monotonic(), []
        try:
            while time.monotonic() - began_s < 30.0:
                phases.append(await beside.played(8, 48))
        finally:
            os.kill(beside.daemon.pid, signal.SIGCONT)
        return phases

    reference = beside.play(8, 48)
    phases = asyncio.run(stopped())
    assert len(phases) >= 2
    assert max(phase.seconds for phase in phases) < 10.0 + 3.0 * reference.seconds, "an engine waited for the daemon"
    assert sum(p.num_failed for p in phases) == 0
    for phase in phases:
        assert not client_load.differing(phase.replies, reference.replies)
    beside.assert_every_round_is_stored_once()


def test_an_engine_that_is_idle_swaps_when_asked(beside: Beside, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    from honed.recalib.registry.registry import Registry

    before = beside.play(8, 48)
    registry = Registry(beside.state_dir / "registry")
    (stock,) = [m.version for m in registry.versions()]
    tensors = load_file(registry.path(stock) / "model.safetensors")
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_bytes((registry.path(stock) / "config.json").read_bytes())
    save_file({n: t * (1.05 if t.dim() == 2 else 1.0) for n, t in tensors.items()}, folder / "model.safetensors")
    other = registry.import_checkpoint(folder, target_path=str(vllm_server.ROOT / vllm_server.TARGET), note="test").version

    for version in (other, stock):
        operation = beside.client.post(f"/v1/drafters/{version}:promote", {"reason": "test", "force": True})
        done = wait_for(beside.client, operation["operation_id"])
        assert done["state"] == "succeeded", done
        assert done["detail"]["pause_ms"] > 0, done
        assert honed_side.engine_of(beside.client)["drafter_version"] == version
        after = beside.play(8, 48)
        assert not client_load.differing(before.replies, after.replies), "a swap changed greedy output"
    beside.assert_every_round_is_stored_once()


def wait_for(client: AdminClient, operation_id: str) -> dict[str, object]:
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        operation: dict[str, object] = client.get(f"/v1/operations/{operation_id}")
        if operation["state"] in ("succeeded", "failed", "cancelled"):
            return operation
        time.sleep(0.1)
    raise AssertionError("the operation never ended")


def test_daemon_and_vllm_are_killed_while_two_versions_take_turns(beside: Beside, tmp_path: Path) -> None:
    """Afterwards one version is active, and the engine's own checksum of its weights is that version's."""
    from safetensors.torch import load_file, save_file

    from honed.recalib.registry.registry import Registry

    registry = Registry(beside.state_dir / "registry")
    stock = registry.alias("active")
    assert stock is not None
    tensors = load_file(registry.path(stock) / "model.safetensors")
    folder = tmp_path / "spoilt"
    folder.mkdir()
    (folder / "config.json").write_bytes((registry.path(stock) / "config.json").read_bytes())
    # Nothing that cached keys and values depend on; it drafts hardly anything right.
    save_file({n: t * (0.1 if "o_proj" in n else 1.0) for n, t in tensors.items()}, folder / "model.safetensors")
    spoilt = registry.import_checkpoint(folder, target_path=str(vllm_server.ROOT / vllm_server.TARGET), note="test").version

    before = beside.play(8, 48)
    operation = beside.client.post(f"/v1/drafters/{spoilt}:promote", {"reason": "test"})
    assert wait_for(beside.client, operation["operation_id"])["state"] == "succeeded"

    beside.play_until(lambda: trial_of(beside.client).get("pairs", 0) >= 2)
    os.killpg(beside.daemon.pid, signal.SIGKILL)
    beside.daemon.popen.wait(10)
    beside.restart_daemon()
    beside.play_until(lambda: trial_of(beside.client).get("pairs", 0) >= 4 or registry.alias("active") == stock)

    beside.restart_vllm()
    after = beside.play(8, 48)
    assert not client_load.differing(before.replies, after.replies), "output depends on the drafter"
    beside.play_until(lambda: registry.alias("active") == stock and not trial_of(beside.client))
    status = beside.client.get("/v1/status")
    assert status["drafters"]["active"] == stock
    beside.play_until(lambda: honed_side.engine_of(beside.client)["drafter_version"] == stock)
    # The engine may have had its turn with it, and the swap that sends it home may be under way.
    beside.play_until(lambda: all(one["state"] != "running" for one in beside.client.get("/v1/operations")))
    engine_id = honed_side.engine_of(beside.client)["engine_id"]
    asked = beside.client.post(f"/v1/engines/{engine_id}:verify")
    assert wait_for(beside.client, asked["operation_id"])["state"] == "succeeded"


def trial_of(client: AdminClient) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/v1/status")["canary"] or {}
    return found
