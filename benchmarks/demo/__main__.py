"""The demo: a drafter meets an unknown workload, and honed trains it while the server is idle.

It shows a user's day in a few minutes, with the real vLLM server and real processes. The drafter was made for workload A;
workload B is new. The target has layers that only cost time, so that a draft is cheap beside a step of the target, as on a
server. honed logs every verify round, detects B, trains a candidate when the server is idle, compares it on held-out
sessions, and swaps it into the running server. vLLM's own counters measure held-out prompts of both before and after. Greedy
outputs are compared with those of a vLLM without honed: of the held-out prompts, and of B's live traffic, where the
controller changes draft lengths while it learns. At the end vLLM restarts with room for draft trees, and plays B's held-out
prompts once more.

The last line of stdout is JSON. The exit code is 1 when a promise isn't kept; the figures are the same.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.demo import report as demo_report
from benchmarks.demo.display import Display, Watcher
from benchmarks.demo.figures import drafted_share, headline, honed_figures, promises_of, result_of, shell_line, toml
from benchmarks.make_tiny.stacked_target import make_stacked_target
from benchmarks.server import vllm_server
from benchmarks.server.client_load import Played, Prompt, differing, play, read_prompts
from benchmarks.server.honed_side import caught_up, engine_of, honed_command, pinned, start_daemon, vllm_args, wait_attached
from benchmarks.server.processes import ROOT, Child, ProcessError, Processes, free_port
from benchmarks.server.vllm_server import Server
from honed.daemon.client.client import FINISHED, AdminClient, AdminError

Document = dict[str, Any]


PHASES = {
    "reference_a": "A without honed",
    "reference_b": "B without honed",
    "reference_traffic_b": "traffic B without honed",
    "reference_traffic_b_trial": "traffic B on trial, without honed",
    "reference_traffic_b_after": "traffic B after, without honed",
    "a_before": "A before",
    "b_before": "B before",
    "traffic_a": "traffic A",
    "traffic_b": "traffic B",
    "traffic_b_trial": "traffic B on trial",
    "b_after": "B after",
    "a_after": "A after",
    "traffic_b_after": "traffic B after",
    "b_trees": "B after, with trees",
}
"""Phases in order, with their names."""


TREE_SLOTS = 15
"""Nodes of a draft tree; a chain has 7."""


@dataclass(frozen=True)
class Plan:
    """Size of the demo."""

    out: Path = ROOT / "demo-out"
    prompts: Path = ROOT / "benchmarks" / "tiny"
    heldout_prompts: int = 48
    traffic_a_prompts: int = 160
    traffic_b_prompts: int = 160
    trial_prompts: int = 40
    after_prompts: int = 48
    max_tokens: int = 80
    concurrency: int = 8
    extra_layers: int = 12
    """Layers without effect added to the target: a target step then costs several draft passes."""
    train_steps: int = 1600
    train_seconds: float = 400.0
    """Longest training; two idle cores needed some 180 s."""
    patience_s: float = 20.0
    """Longest wait for honed to begin by itself, with the server idle."""
    beside_training_s: float = 320.0
    """Longest wait for a recalibration, outside its training time."""

    @property
    def target(self) -> Path:
        """Folder of the target with the extra layers."""
        return self.out / "target"

    @property
    def operation_s(self) -> float:
        """Longest wait for the whole recalibration."""
        return self.train_seconds + self.beside_training_s


@dataclass
class Attached:
    """vLLM with honed, and the daemon's API."""

    server: Server
    client: AdminClient
    start_unix_s: float
    processes: Processes
    environment: dict[str, str]
    """Of honed's commands."""


@dataclass
class Demo:
    """State and results of the demo so far."""

    plan: Plan
    display: Display
    prompts: dict[str, list[Prompt]]
    reference: dict[str, Played] = field(default_factory=dict)
    """Answers of vLLM without honed, by the prompts' name in `prompts`."""
    phases: list[Document] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)
    trigger: str = ""

    async def run(self, processes: Processes) -> Document:
        """Run the whole demo; return the record for the report."""
        await self.measure_reference(processes)
        runtime_dir = Path(tempfile.mkdtemp(prefix="honed-demo-"))  # short: a unix socket's path has 107 characters
        try:
            async with self.attached(processes, runtime_dir) as at, Watcher(at.client, self.display) as watcher:
                operation = await self.story(at)
                return await self.record(at, operation, watcher.training)
        finally:
            shutil.rmtree(runtime_dir, ignore_errors=True)

    async def measure_reference(self, processes: Processes) -> None:
        """Record vLLM's answers without honed: the reference for every later output."""
        self.display.phase("vLLM without honed: what it answers is the reference")
        server = vllm_server.start(processes, "vllm-reference", target=str(self.plan.target))
        self.note_command(server.child, vllm_server.own_environment())
        self.display.say(f"started in {await asyncio.to_thread(vllm_server.wait, server):.0f} s")
        references = {"heldout_a": "a", "heldout_b": "b", "traffic_b": "b", "traffic_b_trial": "b", "traffic_b_after": "b"}
        for name, workload in references.items():
            key = f"reference_{name.removeprefix('heldout_')}"
            played = self.reference[name] = await self.phase_of(key, workload, server, None, name, capture=False)
            if played.num_failed:
                first = next(r.error for r in played.replies if r.error)
                raise ProcessError(f"{played.num_failed} reference requests failed: {first}")
        processes.stop(server.child)
        self.display.say("stopped; the same server comes back with honed attached")

    @contextlib.asynccontextmanager
    async def attached(self, processes: Processes, runtime_dir: Path) -> AsyncIterator[Attached]:
        """Start the daemon, the trainer, and vLLM attached to them, as a user would with three commands."""
        self.display.phase("honed's daemon and trainer, and vLLM with honed attached")
        config = self.plan.out / "honed.toml"
        config.write_text(toml(settings_of(self.plan, runtime_dir)))
        with AdminClient(runtime_dir / "admin.sock") as client:
            daemon, environment = await asyncio.to_thread(start_daemon, processes, config, client)
            trainer = processes.start("honed-train", [honed_command(), "train"], environment)
            ours = {"HONED_CONFIG": str(config)}
            for child in (daemon, trainer):
                self.note_command(child, ours)
            server = await self.serve(processes, "vllm-honed", client, environment)
            yield Attached(server, client, time.time(), processes, environment)

    async def serve(
        self, processes: Processes, name: str, client: AdminClient, environment: dict[str, str], tree_slots: int = 0
    ) -> Server:
        """Start vLLM with what `honed vllm-args` prints, and wait until the daemon knows it."""
        args = await asyncio.to_thread(vllm_args, environment, tree_slots)
        flags, extra, target = args["flags"], args["environment"], str(self.plan.target)
        server = vllm_server.start(
            processes, name, extra=flags, environment=extra, target=target, is_speculating=not tree_slots
        )
        self.note_command(server.child, vllm_server.own_environment() | extra)
        seconds = await asyncio.to_thread(vllm_server.wait, server)
        await asyncio.to_thread(wait_attached, server.child, client)
        self.display.say(f"started in {seconds:.0f} s; honed's flags came from `honed vllm-args`")
        return server

    async def story(self, at: Attached) -> Document:
        """Play everything from the first prompt to the last; return the recalibration's final view."""
        show = self.display
        show.phase("Held-out prompts before any training, draft length pinned to 7 by an override, nothing captured")
        async with pinned(at.client):
            await self.measured("a_before", "a", at)
            await self.measured("b_before", "b", at)
        show.phase("Live traffic: some of A, then the new workload B; honed chooses the draft lengths and captures")
        await self.traffic("traffic_a", "a", at)
        await self.traffic("traffic_b", "b", at)
        show.phase("The server is idle: honed may train")
        operation = await self.recalibrated(at)
        detail = operation.get("detail") or {}
        if operation.get("state") == "succeeded":
            pause = f"{detail['pause_ms']:.1f} ms" if detail.get("pause_ms") is not None else "unknown"
            tried = f"{detail.get('version')} passed the gate, accepted more on live traffic and was swapped in"
            show.say(f"{tried}; pause {pause}, same vLLM process")
        else:
            show.say(f"the recalibration {operation.get('state')}: {operation.get('error') or 'no reason given'}")
        show.phase("The same held-out prompts again, draft length pinned to 7")
        async with pinned(at.client):
            await self.measured("b_after", "b", at)
            await self.measured("a_after", "a", at)
        show.phase("A little more live traffic of B: drafts where the controller expects them to be faster than none")
        await self.traffic("traffic_b_after", "b", at)
        return operation

    async def trees(self, at: Attached) -> None:
        """Restart vLLM with room for draft trees, and play B's held-out prompts with them."""
        self.display.phase(f"vLLM once more, with draft trees of {TREE_SLOTS} nodes in the place of chains of 7")
        version = engine_of(at.client)["drafter_version"]
        at.processes.stop(at.server.child)
        server = await self.serve(at.processes, "vllm-trees", at.client, at.environment, TREE_SLOTS)

        def has_drafter() -> bool:
            engine = engine_of(at.client)
            return bool(engine.get("connected")) and engine.get("drafter_version") == version

        await asyncio.to_thread(server.child.wait_until, has_drafter, 30.0, "the trained drafter in vLLM")
        with_trees = replace(at, server=server)
        async with pinned(at.client, TREE_SLOTS):
            await self.measured("b_trees", "b", with_trees)

    async def measured(self, key: str, workload: str, at: Attached) -> None:
        """Play held-out prompts and record vLLM's and honed's counts during them."""
        await self.phase_of(key, workload, at.server, at.client, f"heldout_{workload}", capture=False)

    async def traffic(self, key: str, workload: str, at: Attached) -> None:
        """Play live traffic: captured, and with draft lengths chosen by the controller."""
        await self.phase_of(key, workload, at.server, at.client, key, capture=True)

    async def phase_of(
        self,
        key: str,
        workload: str,
        server: Server,
        client: AdminClient | None,
        name: str,
        capture: bool,
        again: Callable[[], bool] = lambda: False,
    ) -> Played:
        """Play one phase with the prompts of that name; read vLLM's counters and honed's before and after.

        Args:
            again: whether to play them once more. The first replies are returned.
        """
        plan, prompts = self.plan, self.prompts[name]
        start_s, before, seen, turns = time.time(), server.counters(), engine_of(client), list[Played]()
        while not turns or again():
            turns.append(
                await play(
                    server.url,
                    prompts,
                    concurrency=plan.concurrency,
                    max_tokens=plan.max_tokens,
                    workload=workload if client is not None else "",
                    capture=capture,
                )
            )
        end_s = time.time()
        after = await vllm_server.settled(server)
        counted = after - before
        phase: Document = {
            "key": key,
            "name": PHASES[key],
            "start_s": start_s,
            "end_s": end_s,
            "requests": len(turns) * len(prompts),
            "failed": sum(played.num_failed for played in turns),
            "tokens": sum(played.num_tokens for played in turns),
            "tokens_per_s": sum(played.num_tokens for played in turns) / sum(played.seconds for played in turns),
            "pinned": key in ("a_before", "b_before", "b_after", "a_after", "b_trees"),
            "vllm": {**asdict(counted), "acceptance_length": counted.acceptance_length},
        }
        if client is not None:
            phase |= honed_figures(seen, await caught_up(client, after))
        if client is not None and name in self.reference:
            reference = self.reference[name].replies
            phase["differing"] = [one for played in turns for one in differing(reference, played.replies)]
            phase["identical"] = not phase["differing"]
        self.phases.append(phase)
        self.tell(phase)
        return turns[0]

    def tell(self, phase: Document) -> None:
        """Print one line about a finished phase."""
        v = phase["vllm"]
        k = v["draft_tokens"] / v["drafts"] if v["drafts"] else 0.0
        text = f"{phase['name']}: {phase['requests']} requests, {v['acceptance_length']:.3f} tokens/round by vLLM's counters"
        if honed := phase.get("honed"):
            text += f", {honed['acceptance_length']:.3f} by honed's"
        text += f", k {k:.2f}, {drafted_share(phase):.0%} of the tokens from such rounds, {phase['tokens_per_s']:.0f} tok/s"
        if phase["failed"]:
            text += f", {phase['failed']} FAILED"
        if "identical" in phase:
            text += ", output identical" if phase["identical"] else f", output DIFFERS for {len(phase['differing'])} prompts"
        self.display.say(text)

    async def recalibrated(self, at: Attached) -> Document:
        """Wait for honed to begin by itself, or request it as an operator would; follow the operation to its end."""
        operation_id, deadline_s = "", time.monotonic() + self.plan.patience_s
        while not operation_id and time.monotonic() < deadline_s:
            found = [o for o in at.client.get("/v1/operations") if o["kind"] == "recalibrate"]
            operation_id = found[0]["operation_id"] if found else ""
            await asyncio.sleep(0.5)
        if operation_id:
            why = found[0].get("reason") or "no reason given"
            began = time.strftime("%H:%M:%S", time.localtime(found[0]["created_unix_s"]))
            self.trigger = f"honed started the recalibration by itself, at {began}: {why}."
        else:
            body = {"workloads": ["b"], "reason": "demo: nothing had started by itself"}
            operation_id = at.client.post("/v1/recalibrations", body)["operation_id"]
            waited = f"{self.plan.patience_s:g} s of idleness"
            self.trigger = f"honed had not started by itself after {waited}: the demo asked it to, as an operator would."
        self.display.say(self.trigger)
        until_s = time.monotonic() + self.plan.operation_s
        view: Document = {}
        while time.monotonic() < until_s:
            view = at.client.get(f"/v1/operations/{operation_id}")
            if view["state"] in FINISHED:
                break
            at.server.child.check()
            if view["stage"] == "canary":
                await self.canary_traffic(at, operation_id, until_s)
            await asyncio.sleep(0.5)
        else:
            at.client.post(f"/v1/operations/{operation_id}:cancel", {"reason": "demo: out of time"})
            view |= {"state": "failed", "error": f"not finished after {self.plan.operation_s:g} s"}
        return view

    async def canary_traffic(self, at: Attached, operation_id: str, until_s: float) -> None:
        """Play traffic of B that wasn't trained on; old and new drafter alternate until one is proven better."""
        self.display.say("the candidate passed the gate; new live traffic of B, old and new drafter take turns on it")

        def is_on_trial() -> bool:
            stage = at.client.get(f"/v1/operations/{operation_id}")["stage"]
            return stage == "canary" and time.monotonic() < until_s

        key = "traffic_b_trial"
        await self.phase_of(key, "b", at.server, at.client, key, capture=False, again=is_on_trial)

    def note_command(self, child: Child, shown: dict[str, str]) -> None:
        """Record a command for the report, as one would type it in the repository's root."""
        self.commands.append(shell_line(child.name, shown, [str(word) for word in child.popen.args]))  # type: ignore[union-attr]

    async def record(self, at: Attached, operation: Document, training: list[Document]) -> Document:
        """Collect everything that the report needs, and the result."""
        totals = at.server.counters()
        engine = await caught_up(at.client, totals)
        is_same_process = at.server.child.popen.poll() is None and len(at.client.get("/v1/engines")) == 1
        await self.trees(at)
        result = result_of(self.phases, engine, totals, operation)
        return {
            "result": result,
            "promises": promises_of(result, operation, is_same_process),
            "phases": self.phases,
            "operation": at.client.get(f"/v1/operations/{operation['operation_id']}"),
            "training": training,
            "timeline": at.client.get("/v1/timeline", resolution="1s", since=at.start_unix_s),
            "start_unix_s": at.start_unix_s,
            "when": time.strftime("%Y-%m-%d %H:%M"),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, Python {platform.python_version()}",
            "commands": self.commands,
            "config": (self.plan.out / "honed.toml").read_text(),
            "trigger": self.trigger,
            "engine": engine,
            "status": at.client.get("/v1/status"),
            "drafters": at.client.get("/v1/drafters"),
            "audit": at.client.get("/v1/audit"),
        }


def settings_of(plan: Plan, runtime_dir: Path) -> Document:
    """Make honed.toml: the defaults except for folders and a demo's shorter times."""
    return {
        "paths": {"runtime_dir": runtime_dir, "state_dir": plan.out / "state"},
        "http": {"metrics_listen": f"127.0.0.1:{free_port()}"},
        "controller": {"capture_share": 1.0},
        "recalibration": {"max_seconds": plan.train_seconds, "min_interval_s": 3600.0},
        "trainer": {"max_steps": plan.train_steps},
    }


def read_plan_prompts(plan: Plan) -> dict[str, list[Prompt]]:
    """Read held-out prompts and live traffic; the last of B's traffic is kept for the trial and for after the swap."""
    folder = plan.prompts
    learned, tried = plan.traffic_b_prompts, plan.traffic_b_prompts + plan.trial_prompts
    traffic_b = read_prompts(folder / "traffic_b.jsonl", tried + plan.after_prompts)
    return {
        "heldout_a": read_prompts(folder / "prompts_a.jsonl", plan.heldout_prompts),
        "heldout_b": read_prompts(folder / "prompts_b.jsonl", plan.heldout_prompts),
        "traffic_a": read_prompts(folder / "traffic_a.jsonl", plan.traffic_a_prompts),
        "traffic_b": traffic_b[:learned],
        "traffic_b_trial": traffic_b[learned:tried],
        "traffic_b_after": traffic_b[tried:],
    }


async def run(plan: Plan) -> Document:
    """Run the demo, write its output, and return the record. SIGTERM ends it as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with Processes(plan.out / "logs") as processes, Display() as display:
        demo = Demo(plan, display, read_plan_prompts(plan))
        record = await demo.run(processes)
        (plan.out / "record.json").write_text(json.dumps(record, indent=1))
        (plan.out / "report.html").write_text(demo_report.render(record))
        display.phase(f"The report: {plan.out / 'report.html'}")
        display.say(headline(record["result"]))
        for promise in record["promises"]:
            display.say(f"{'kept    ' if promise['kept'] else 'NOT KEPT'}  {promise['text']}: {promise['found']}")
    return record


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Plan.out, help="output folder (emptied first)")
    parser.add_argument("--prompts", type=Path, default=Plan.prompts, help="folder with prompts_*.jsonl, traffic_*.jsonl")
    parser.add_argument("--train-seconds", type=float, default=Plan.train_seconds, help="longest training")
    arguments = parser.parse_args()
    plan = Plan(out=arguments.out.resolve(), prompts=arguments.prompts, train_seconds=arguments.train_seconds)
    try:
        vllm_server.check_pair()
        prepare(plan.out)
        make_stacked_target(ROOT / vllm_server.TARGET, plan.target, plan.extra_layers)
        record = asyncio.run(run(plan))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("demo: stopped; everything that it started has ended", file=sys.stderr)
        return 130
    except (ProcessError, AdminError, OSError, httpx2.HTTPError) as error:
        print(f"demo: {error}\nLogs are in {plan.out / 'logs'}.", file=sys.stderr)
        return 1
    is_kept = all(promise["kept"] for promise in record["promises"])
    if not is_kept:
        broken = "; ".join(f"{p['text']} (found: {p['found']})" for p in record["promises"] if not p["kept"])
        print(f"demo: not every promise was kept: {broken}", file=sys.stderr)
    print(json.dumps(record["result"]), flush=True)
    return 0 if is_kept else 1


def prepare(out: Path) -> None:
    """Make an empty output folder; only a folder that looks like a demo's is emptied."""
    if out.exists() and any(out.iterdir()) and not (out / "honed.toml").exists() and not (out / "logs").exists():
        raise OSError(f"{out} is not empty and not a demo's output: choose another folder with --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)


if __name__ == "__main__":
    sys.exit(main())
