"""The trainer from end to end beside a running engine, on CUDA where there is a GPU: recalibrate, gate, canary, swap, verify.

Everything is real: vLLM's server of the tiny pair, `honed serve`, `honed train`, and clients over HTTP. The drafter was made
for workload A; workload B is new. A server without speculation gives the reference answers.

    learn    traffic of both workloads is captured, then one recalibration of B is asked for
    yield    bursts of requests arrive while it trains; the trainer reports its delays in stopping
    prove    the candidate passes the gate, then the old and the new drafter take turns on new traffic of B
    verify   the live weights are compared with the registry's; held-out prompts are played before and after

Every answer is compared with the reference, token by token. The reference is played twice at different concurrency, which shows
whether the batch's shape alone changes tokens. The result file is written after each stage; the last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import torch

from benchmarks.gpu.kept import Kept, in_ms
from benchmarks.server import vllm_server
from benchmarks.server.attached_server import Attached, attached
from benchmarks.server.client_load import Played, Prompt, Reply, play, read_prompts
from benchmarks.server.honed_side import caught_up, engine_of, pinned
from benchmarks.server.processes import ROOT, ProcessError, Processes
from benchmarks.server.vllm_server import Server
from honed.daemon.client.client import FINISHED, AdminError

Document = dict[str, Any]

TINY = ROOT / "benchmarks" / "tiny"
IS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if IS_CUDA else "cpu"
KEPT_LOGS = ROOT / "build" / "gpu-logs" / "whole-trainer"


@dataclass(frozen=True)
class Plan:
    """Amount of traffic and training."""

    held_out: int = 32
    traffic_a: int = 80
    traffic_b: int = 200
    trial: int = 40
    max_tokens: int = 80
    concurrency: int = 16
    max_steps: int = 1000
    train_seconds: float = 30.0
    burst_every_s: float = 1.0
    burst_tokens: int = 24
    operation_s: float = 160.0
    """Longest wait for the whole recalibration."""
    max_gate_rows: int = 16384
    is_dry: bool = False
    """Whether a judged candidate is enough: twenty seconds of a busy core teach nothing."""


DRY = Plan(
    held_out=6,
    traffic_a=24,
    traffic_b=72,
    trial=8,
    concurrency=8,
    train_seconds=20.0,
    max_steps=200,
    burst_every_s=4.0,
    operation_s=240.0,
    max_gate_rows=1024,
    is_dry=True,
)


@dataclass
class Answers:
    """Answers, compared with those without honed."""

    reference: dict[str, Reply]
    compared: int = 0
    failed: int = 0
    differing: list[Document] = field(default_factory=list)

    def check(self, stage: str, prompts: Sequence[Prompt], replies: Sequence[Reply]) -> None:
        """Compare replies with the reference; a shorter one with its beginning."""
        for prompt, reply in zip(prompts, replies, strict=True):
            if reply.error:
                self.failed += 1
                continue
            expected = self.reference[prompt.text].token_ids[: len(reply.token_ids)]
            self.compared += 1
            if reply.token_ids != expected:
                at = next((i for i, (a, b) in enumerate(zip(reply.token_ids, expected, strict=False)) if a != b), len(expected))
                self.differing.append({"stage": stage, "session": prompt.session, "at": at})

    def told(self) -> Document:
        """Return the figures for the result."""
        figures = {"compared": self.compared, "failed": self.failed, "differing": len(self.differing)}
        return {**figures, "which": self.differing[:20]}


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="smaller, for a CPU; a candidate needn't pass")
    parser.add_argument("--out", type=Path, default=None, help="result file, written after each stage")
    parser.add_argument("--logs", type=Path, default=KEPT_LOGS, help="folder for logs")
    arguments = parser.parse_args()
    kept = Kept(arguments.out)
    plan = DRY if arguments.dry else Plan()
    kept.update(plan=asdict(plan), trainer_device=DEVICE)
    try:
        vllm_server.check_pair()
        asyncio.run(run(plan, arguments.logs, kept))
    except (ProcessError, AdminError, OSError, httpx2.HTTPError) as error:
        kept.update(ok=False, error=str(error))
    told = {name: kept.document.get(name) for name in ("ok", "error", "state", "gains", "seconds_of", "answers", "verified")}
    print(json.dumps(told), flush=True)
    return 0 if kept.document.get("ok") else 1


async def run(plan: Plan, logs: Path, kept: Kept) -> None:
    """Start the processes and run the story."""
    prompts = {
        "held_a": read_prompts(TINY / "prompts_a.jsonl", plan.held_out),
        "held_b": read_prompts(TINY / "prompts_b.jsonl", plan.held_out),
        "traffic_a": read_prompts(TINY / "traffic_a.jsonl", plan.traffic_a),
        "traffic_b": read_prompts(TINY / "traffic_b.jsonl", plan.traffic_b + plan.trial),
    }
    sections: dict[str, dict[str, Any]] = {
        "recalibration": {"automatic": False, "max_seconds": plan.train_seconds},
        "controller": {"capture_share": 1.0},
        "canary": {"window_s": 0.2},
        "trainer": {"device": DEVICE, "max_steps": plan.max_steps, "max_gate_rows": plan.max_gate_rows},
    }
    with Processes(logs) as processes:
        plain = vllm_server.start(processes, "vllm-reference", is_speculating=False)
        answers = None if IS_CUDA else await answered(plan, processes, plain, prompts, kept)  # two cores start one at a time
        try:
            async with attached(logs, sections, trains=True) as at:
                answers = answers or await answered(plan, processes, plain, prompts, kept)
                try:
                    await story(plan, at, prompts, answers, kept)
                finally:
                    kept.update(answers=answers.told(), engine=await engine_figures(at))
        finally:
            kept.update(trainer_log=trainer_log(logs))


async def answered(plan: Plan, processes: Processes, plain: Server, prompts: dict[str, list[Prompt]], kept: Kept) -> Answers:
    """Collect the answers of the server without speculation, and end it."""
    seconds = await asyncio.to_thread(vllm_server.wait, plain)
    print(f"vLLM without speculation is ready after {seconds:.0f} s", flush=True)
    answers = Answers(await reference(plan, plain.url, prompts, kept))
    processes.stop(plain.child)
    return answers


async def reference(plan: Plan, url: str, prompts: dict[str, list[Prompt]], kept: Kept) -> dict[str, Reply]:
    """Return answers without speculation; keep how many differ when played again at another concurrency."""
    every = [prompt for group in prompts.values() for prompt in group]
    first = await play(url, every, concurrency=plan.concurrency, max_tokens=plan.max_tokens)
    held = prompts["held_a"] + prompts["held_b"]
    again = await play(url, held, concurrency=3, max_tokens=plan.max_tokens)
    if first.num_failed or again.num_failed:
        raise ProcessError(f"{first.num_failed + again.num_failed} reference requests failed: {first_error(first, again)}")
    found = {prompt.text: reply for prompt, reply in zip(every, first.replies, strict=True)}
    changed = sum(found[p.text].token_ids != r.token_ids for p, r in zip(held, again.replies, strict=True))
    kept.update(reference={"requests": len(every), "seconds": round(first.seconds, 2), "differing_when_played_twice": changed})
    return found


def first_error(*played: Played) -> str:
    """Return the first failed request's error."""
    return next((reply.error for one in played for reply in one.replies if reply.error), "")


async def story(plan: Plan, at: Attached, prompts: dict[str, list[Prompt]], answers: Answers, kept: Kept) -> None:
    """Measure before, recalibrate, measure after."""
    trial = prompts["traffic_b"][plan.traffic_b :]
    lengths: Document = {}
    for moment in ("before", "after"):
        if moment == "after":
            for workload, group in (("a", prompts["traffic_a"]), ("b", prompts["traffic_b"][: plan.traffic_b])):
                played = await play(
                    at.server.url, group, concurrency=plan.concurrency, max_tokens=plan.max_tokens, workload=workload
                )
                answers.check(f"traffic {workload}", group, played.replies)
            await recalibrated(plan, at, prompts, trial, answers, kept)
        async with pinned(at.client):
            for workload in "ab":
                group, counted = prompts[f"held_{workload}"], at.server.counters()
                played = await play(
                    at.server.url,
                    group,
                    concurrency=plan.concurrency,
                    max_tokens=plan.max_tokens,
                    workload=workload,
                    capture=False,
                )
                answers.check(f"held-out {workload} {moment}", group, played.replies)
                delta = await vllm_server.settled(at.server) - counted
                lengths[f"{workload}_{moment}"] = round(delta.acceptance_length, 4)
        kept.update(acceptance_length=lengths)
    gains = {w: round(lengths[f"{w}_after"] / lengths[f"{w}_before"], 4) for w in "ab"}
    verified = await verify(at)
    document = kept.document
    is_equal = not answers.differing and not answers.failed
    is_swapped = document["state"] == "succeeded" and bool(document["preemptions"])
    is_judged = bool((document["detail"] or {}).get("gate"))
    is_ok = is_equal and verified["state"] == "succeeded" and (is_judged if plan.is_dry else is_swapped)
    kept.update(gains=gains, verified=verified, ok=is_ok)


async def recalibrated(
    plan: Plan, at: Attached, prompts: dict[str, list[Prompt]], trial: list[Prompt], answers: Answers, kept: Kept
) -> None:
    """Recalibrate B, with bursts while it trains and traffic during the canary."""
    stages: dict[str, float] = {}
    body = {"workloads": ["b"], "reason": "benchmark: the whole trainer"}
    operation_id = at.client.post("/v1/recalibrations", body)["operation_id"]
    began_s = last_s = time.monotonic()
    view: Document = {}
    bursts, preemptions, delays_s = 0, 0, list[float]()
    held = prompts["held_a"] + prompts["held_b"]
    while time.monotonic() - began_s < plan.operation_s:
        view = at.client.get(f"/v1/operations/{operation_id}")
        trainer = at.client.get("/v1/status")["trainer"] or {}
        stage, now_s = str(view.get("stage") or view["state"]), time.monotonic()
        if trainer.get("state") == "gating" and stage != "canary":
            stage = "gating"
        stages[stage] = round(stages.get(stage, 0.0) + now_s - last_s, 3)
        last_s = now_s
        if (new := trainer.get("preemptions", 0) - preemptions) > 0:
            preemptions += new
            delays_s += trainer["preemption_delays_s"][-new:]
        kept.update(
            state=view["state"],
            detail=view.get("detail"),
            seconds_of=stages,
            bursts=bursts,
            preemptions=preemptions,
            preempt_ms=in_ms(delays_s),
            trainer={k: trainer.get(k) for k in ("steps", "tokens", "train_seconds", "idle_ratio")},
            loss=trainer.get("loss"),
            error=view.get("error") or "",
        )
        if view["state"] in FINISHED:
            break
        at.server.child.check()
        if at.trainer is not None:
            at.trainer.check()
        if stage == "canary":
            played = await play(
                at.server.url, trial, concurrency=plan.concurrency, max_tokens=plan.max_tokens, workload="b", capture=False
            )
            answers.check("canary", trial, played.replies)
            continue
        if trainer.get("steps", 0) > 0 and stage in ("training", "gating"):
            group = [held[(2 * bursts + i) % len(held)] for i in range(2)]
            played = await play(at.server.url, group, concurrency=2, max_tokens=plan.burst_tokens, workload="a", capture=False)
            answers.check("burst", group, played.replies)
            bursts += 1
        await asyncio.sleep(plan.burst_every_s if trainer.get("steps", 0) else 0.25)
    else:
        at.client.post(f"/v1/operations/{operation_id}:cancel", {"reason": "benchmark: out of time"})
        kept.update(error=f"not finished after {plan.operation_s:g} s: {view.get('stage')}")


async def verify(at: Attached) -> Document:
    """Verify the engine's weights as `honed verify` does."""
    engine = engine_of(at.client)
    asked = at.client.post(f"/v1/engines/{engine['engine_id']}:verify", {"reason": "benchmark"})
    until_s = time.monotonic() + 60.0
    view = asked
    while view["state"] not in FINISHED and time.monotonic() < until_s:
        await asyncio.sleep(0.2)
        view = at.client.get(f"/v1/operations/{asked['operation_id']}")
    return {"state": view["state"], "error": view.get("error") or "", **(view.get("detail") or {})}


async def engine_figures(at: Attached) -> Document:
    """Return rounds as honed stored them and as vLLM counted them, and the engine's description."""
    with contextlib.suppress(AdminError, httpx2.HTTPError):
        totals = at.server.counters()
        seen = await caught_up(at.client, totals)
        names = ("vllm_version", "runner", "rounds", "lost_rounds", "live_version", "capabilities", "limits")
        return {name: seen.get(name) for name in names} | {"vllm_num_drafts": totals.drafts}
    return {}


def trainer_log(logs: Path) -> list[str]:
    """Return the last lines of the trainer's log."""
    path = logs / "honed-train.log"
    return path.read_text(errors="replace").splitlines()[-60:] if path.exists() else []


if __name__ == "__main__":
    shutil.rmtree(KEPT_LOGS, ignore_errors=True)
    sys.exit(main())
