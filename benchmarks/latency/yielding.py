"""Cost of training to a server's users: latency with and without the trainer at work, and how fast it yields.

A real server of the tiny pair with honed attached, and the real trainer process beside it, run on the same cores. Bursts of
requests arrive as a Poisson process. In between the server is idle and the trainer trains (a recalibration that never ends).
Phases with training and phases with paused training alternate, with the same arrivals in both, the first burst at once. The
ratio is of the p99 of the gaps between a stream's chunks over all phases of each kind, with a bootstrap interval over pairs of
phases. (A chunk is one verify round's output: inter-token latency as vLLM's own benchmark counts it.) The pre-emption delays
are the trainer's own figures. `preempt_ms` is the time from the raising of the engine's busy flag until the trainer had
stopped; `preempt_computing_ms` is the computing in it. On shared cores most of it is waiting for a core in order to stop. The
benchmark's own computing (a status, a client) ends half a second before a phase's first burst: it would use the same cores
(beside it, p99 was over 100 ms).

A p99 depends on few moments, and on a virtual machine its host may have run something else in them. If that took more than
`most_stolen` of the cores' time in either phase of a pair, as the kernel counts it, another pair follows, and this one counts
in `all_pairs` only. Phases are short, so that there are others.

Then the trainer is pinned to one core and the server to the other (`itl_p99_ratio_pinned`): the rest of the ratio is not caused
by the trainer. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.server import vllm_server
from benchmarks.server.attached_server import Attached, attached
from benchmarks.server.client_load import REQUEST_TIMEOUT_S, Prompt, play, read_prompts, request_of
from benchmarks.server.measured import commit, hardware, keep, percentile, stolen_s, stolen_since
from benchmarks.server.processes import ROOT, ProcessError
from honed.daemon.client.client import AdminError

Document = dict[str, Any]

TINY = ROOT / "benchmarks" / "tiny"
BOOTSTRAPS = 2000
SETTLE_S = 0.5


@dataclass(frozen=True)
class Plan:
    """Amount of measurement."""

    pairs: int = 160
    most_s: float = 2400.0
    """Time after which no further pair is begun."""
    phase_s: float = 3.0
    bursts_per_s: float = 0.8
    most_requests: int = 4
    """A burst has 1 to this many."""
    max_tokens: int = 32
    most_stolen: float = 0.01
    """Largest share of the cores' time that the host may take in a phase of a pair that counts."""


@dataclass
class Phase:
    """One phase: gaps between chunks and times to the first one, in seconds; the share of the cores that the host took."""

    gaps_s: list[float]
    first_s: list[float]
    failed: int = 0
    stolen: float = 0.0
    preempt_s: list[float] = field(default_factory=list)
    """The trainer's pre-emption delays."""
    computing_s: list[float] = field(default_factory=list)
    """Computing time in each."""


Pair = dict[str, Phase]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=Plan.pairs, help="pairs of phases that count; pinned: half as many")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: benchmarks/results)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "yield-logs", help="folder for logs")
    arguments = parser.parse_args()
    try:
        vllm_server.check_pair()
        result = asyncio.run(run(Plan(pairs=arguments.pairs), arguments.logs))
    except KeyboardInterrupt:
        print("yielding: stopped; everything that it started has ended", file=sys.stderr)
        return 130
    except (ProcessError, AdminError, OSError, httpx2.HTTPError) as error:
        print(f"yielding: {error}", file=sys.stderr)
        return 1
    keep(result, "yield", arguments.out)
    shown = ("preempt_ms", "preempt_computing_ms", "itl_p99_ratio", "itl_p99_ratio_interval", "itl_p99_ratio_pinned", "itl_ms")
    last = {key: result[key] for key in (*shown, "preemptions", "requests_failed")}
    counted = {n: f"{result[n]['pairs']} of {result[n]['all_pairs']['pairs']}" for n in ("shared", "pinned")}
    every = {key: result["shared"]["all_pairs"][key] for key in ("itl_p99_ratio", "preempt_ms", "preemptions")}
    print(json.dumps(last | {"all_pairs": every, "pairs": counted}), flush=True)
    return 0


async def run(plan: Plan, logs: Path) -> Document:
    """Collect samples, start a recalibration, measure."""
    sections: dict[str, dict[str, Any]] = {
        "recalibration": {"automatic": False, "max_seconds": 36_000.0},
        "controller": {"mode": "static", "capture_share": 1.0},
        "trainer": {"max_steps": 10_000_000, "deadline_s": 36_000.0, "collect_s": 3600.0},
    }
    async with attached(logs, sections, trains=True) as at:
        for workload in ("a", "b"):
            prompts = read_prompts(TINY / f"traffic_{workload}.jsonl", 80)
            await play(at.server.url, prompts, concurrency=8, max_tokens=80, workload=workload)
        operation = at.client.post("/v1/recalibrations", {"reason": "benchmark: never over", "dry_run": True})
        await training(at)
        shared = await measure(plan, at)
        with pinned(at):
            apart = await measure(replace(plan, pairs=max(plan.pairs // 2, 1), most_s=plan.most_s / 2), at)
        trainer = at.client.get("/v1/status")["trainer"]
        if trainer["operation_id"] != operation["operation_id"] or trainer["steps"] == 0:
            raise ProcessError(f"nothing was trained meanwhile: {trainer}")
    return {
        "preempt_ms": shared["preempt_ms"],
        "preempt_computing_ms": shared["preempt_computing_ms"],
        "preemptions": shared["preemptions"],
        "itl_p99_ratio": shared["itl_p99_ratio"],
        "itl_p99_ratio_interval": shared["itl_p99_ratio_interval"],
        "itl_p99_ratio_pinned": apart["itl_p99_ratio"],
        "itl_ms": shared["itl_ms"],
        "first_token_ms": shared["first_token_ms"],
        "pinned": apart,
        "shared": shared,
        "requests_failed": shared["all_pairs"]["requests_failed"] + apart["all_pairs"]["requests_failed"],
        "training_steps": trainer["steps"],
        "training_seconds": trainer["train_seconds"],
        "plan": asdict(plan),
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


async def training(at: Attached) -> None:
    """Wait until the trainer trains."""
    until_s = time.monotonic() + 120.0
    while ((trainer := at.client.get("/v1/status")["trainer"]) or {}).get("steps", 0) == 0:
        if time.monotonic() > until_s:
            raise ProcessError(f"the trainer has not begun to train: {trainer}")
        await asyncio.sleep(0.5)


async def measure(plan: Plan, at: Attached) -> Document:
    """Measure pairs of phases, with and without training, in alternating order."""
    prompts = read_prompts(TINY / "prompts_a.jsonl")
    tried: list[Pair] = []
    found: list[Pair] = []
    async with httpx2.AsyncClient(base_url=at.server.url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
        await phase(plan, at, client, prompts, seed=-1)  # uncounted
        until_s = time.monotonic() + plan.most_s
        while len(found) < plan.pairs and time.monotonic() < until_s:
            number = len(tried)
            order = ("off", "on") if number % 2 == 0 else ("on", "off")
            pair = {}
            for name in order:
                at.client.post(f"/v1/training:{'pause' if name == 'off' else 'resume'}", {"reason": "benchmark"})
                pair[name] = await phase(plan, at, client, prompts, seed=number)
            tried.append(pair)
            if max(one.stolen for one in pair.values()) <= plan.most_stolen:
                found.append(pair)
            shown = ", ".join(
                f"{name}: p99 {1e3 * percentile(pair[name].gaps_s, 0.99):.1f} ms, {pair[name].stolen:.2%} stolen"
                for name in ("off", "on")
            )
            print(f"pair {number + 1}, {len(found)} of {plan.pairs} count: {shown}", flush=True)
    at.client.post("/v1/training:resume", {"reason": "benchmark"})
    if not found:
        raise ProcessError(f"the host took more than {plan.most_stolen:.1%} of the cores in every pair: try at a quieter time")
    if not any(pair["on"].preempt_s for pair in found):
        raise ProcessError("training was never pre-empted: was the trainer at work at all?")
    return summary(found) | {"all_pairs": summary(tried)}


def summary(found: Sequence[Pair]) -> Document:
    """Summarise pairs of phases."""
    return {
        "itl_p99_ratio": round(ratio_of(found, 0.99), 4),
        "itl_p99_ratio_interval": interval(found, 0.99),
        "itl_p50_ratio": round(ratio_of(found, 0.5), 4),
        "itl_ms": {name: spread([g for pair in found for g in pair[name].gaps_s]) for name in ("off", "on")},
        "first_token_ms": {name: spread([f for pair in found for f in pair[name].first_s]) for name in ("off", "on")},
        "preempt_ms": spread([delay for pair in found for delay in pair["on"].preempt_s]),
        "preempt_computing_ms": spread([one for pair in found for one in pair["on"].computing_s]),
        "preemptions": sum(len(pair["on"].preempt_s) for pair in found),
        "gaps": {name: sum(len(pair[name].gaps_s) for pair in found) for name in ("off", "on")},
        "requests_failed": sum(one.failed for pair in found for one in pair.values()),
        "pairs": len(found),
    }


async def phase(plan: Plan, at: Attached, client: httpx2.AsyncClient, prompts: Sequence[Prompt], seed: int) -> Phase:
    """Send bursts for `phase_s`, the same ones for the same seed, after `SETTLE_S` in which nothing here computes."""
    rng, made = random.Random(seed), Phase([], [])
    tasks, at_s = [], 0.0
    preemptions = at.client.get("/v1/status")["trainer"]["preemptions"]
    await asyncio.sleep(SETTLE_S)
    began_s, stolen = time.monotonic(), stolen_s()
    while at_s < plan.phase_s:
        chosen = rng.choices(prompts, k=rng.randint(1, plan.most_requests))
        await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
        tasks += [asyncio.create_task(stream(client, plan, prompt, made)) for prompt in chosen]
        at_s += rng.expovariate(plan.bursts_per_s)
    await asyncio.gather(*tasks)
    taken = stolen_since(stolen)
    trainer = at.client.get("/v1/status")["trainer"]
    if new := trainer["preemptions"] - preemptions:
        made.preempt_s = trainer["preemption_delays_s"][-new:]
        made.computing_s = trainer["preemption_computing_s"][-new:]
    made.stolen = sum(taken.values()) / (max(len(taken), 1) * (time.monotonic() - began_s))
    return made


async def stream(client: httpx2.AsyncClient, plan: Plan, prompt: Prompt, made: Phase) -> None:
    """Send one request; record the times between its chunks."""
    last_s, is_first = time.monotonic(), True
    body = request_of(prompt, plan.max_tokens, "a", capture=False, ignore_eos=True)
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now_s = time.monotonic()
                (made.first_s if is_first else made.gaps_s).append(now_s - last_s)
                last_s, is_first = now_s, False
    except httpx2.HTTPError:
        made.failed += 1


def ratio_of(pairs: Sequence[Pair], share: float) -> float:
    """Quantile of all gaps with training over that without."""
    on, off = ([gap for pair in pairs for gap in pair[name].gaps_s] for name in ("on", "off"))
    return percentile(on, share) / percentile(off, share)


def interval(pairs: Sequence[Pair], share: float, seed: int = 0) -> dict[str, float]:
    """95 % bootstrap interval of the ratio, over pairs of phases."""
    rng = random.Random(seed)
    ratios = sorted(ratio_of(rng.choices(pairs, k=len(pairs)), share) for _ in range(BOOTSTRAPS))
    return {"low": round(ratios[int(0.025 * BOOTSTRAPS)], 4), "high": round(ratios[int(0.975 * BOOTSTRAPS) - 1], 4)}


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    return {"p50": round(1e3 * percentile(seconds, 0.5), 3), "p99": round(1e3 * percentile(seconds, 0.99), 3)}


@contextlib.contextmanager
def pinned(at: Attached) -> Iterator[None]:
    """Pin the trainer to the last core, server and clients to the others."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 or at.trainer is None:
        raise ProcessError("pinning the trainer needs two cores")
    before = set(cores)
    children = dict.fromkeys(at.server.child.session_pids(), cores[:-1])
    children |= dict.fromkeys(at.trainer.session_pids(), cores[-1:])
    try:
        for pid, allowed in (children | {os.getpid(): cores[:-1]}).items():
            set_affinity(pid, allowed)
        yield
    finally:
        for pid in (*children, os.getpid()):
            set_affinity(pid, before)


def set_affinity(pid: int, cores: Sequence[int] | set[int]) -> None:
    """Bind all threads of a process."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(int(task.name), cores)


if __name__ == "__main__":
    sys.exit(main())
