"""Overhead of honed on a speculating server: tokens/s with honed attached and logging, over vLLM alone.

Two servers of the tiny pair run side by side, one plain, one attached (with a real `honed serve` beside it). They get requests
in turn, never at once: the other idles. A pair is one run of each; the order alternates (plain first, then attached first), so
that a drift of the machine affects both. A pair's ratio is attached / plain. The output has its median and the median's 95 %
bootstrap interval over the pairs, at 1 and at 16 concurrent requests.

An override pins the draft length to 7 on both sides (vLLM's counters are compared, and a difference is an error). So the
benchmark measures observing, logging and delivering, not the quality of a choice. An override is the shortest way through the
decider; the cost of full decisions is in `decide_us` of a server under traffic, and in the adapt benchmarks. vLLM's processes
spin for a second after their last message, which on a small machine takes a core from the next server. So a run begins once
both servers are quiet. The result has the other server's CPU use during a run; it should be almost zero. The last line of
stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.demo.figures import toml
from benchmarks.server import vllm_server
from benchmarks.server.client_load import Prompt, play, read_prompts
from benchmarks.server.honed_side import POLICY_S, engine_of, start_daemon, vllm_args, wait_attached
from benchmarks.server.measured import commit, hardware, keep
from benchmarks.server.processes import ROOT, ProcessError, Processes, free_port
from benchmarks.server.vllm_server import NUM_DRAFT_TOKENS, Counters, Server
from honed.daemon.client.client import AdminClient, AdminError

Document = dict[str, Any]

LEVELS = (1, 16)
BOOTSTRAPS = 4000


@dataclass(frozen=True)
class Run:
    """One run of one server: throughput, vLLM's counters, and the idle server's CPU share."""

    tokens_per_s: float
    counted: Counters
    idle_other: float


Pair = dict[str, Run]


@dataclass(frozen=True)
class Plan:
    """Amount of measurement: pairs, and requests a run by concurrency."""

    pairs: int = 16
    requests: tuple[int, ...] = (4, 48)
    max_tokens: int = 96


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=Plan.pairs, help="pairs of runs at each concurrency")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: benchmarks/results)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "overhead-logs", help="folder for logs")
    arguments = parser.parse_args()
    try:
        vllm_server.check_pair()
        result = asyncio.run(run(Plan(pairs=arguments.pairs), arguments.logs))
    except KeyboardInterrupt:
        print("overhead: stopped; everything that it started has ended", file=sys.stderr)
        return 130
    except (ProcessError, AdminError, OSError, httpx2.HTTPError) as error:
        print(f"overhead: {error}", file=sys.stderr)
        return 1
    keep(result, "overhead", arguments.out)
    shown = ("throughput_ratio", "log_us", "decide_us", "decision", "idle_cpu_share")
    print(json.dumps({key: result[key] for key in shown}), flush=True)
    return 0


async def run(plan: Plan, logs: Path) -> Document:
    """Start both servers, measure, and stop everything."""
    runtime_dir = Path(tempfile.mkdtemp(prefix="honed-bench-"))
    prompts = read_prompts(ROOT / "benchmarks" / "tiny" / "prompts_a.jsonl")
    try:
        with Processes(logs) as processes, AdminClient(runtime_dir / "admin.sock") as client:
            plain, attached = await start(processes, runtime_dir, client)
            body = {"value": NUM_DRAFT_TOKENS, "ttl_s": 6 * 3600, "reason": "overhead benchmark"}
            client.put("/v1/overrides/draft_tokens", body)
            await asyncio.sleep(POLICY_S)
            ratios: dict[str, dict[str, float]] = {}
            rates: dict[str, list[Pair]] = {}
            for concurrency, requests in zip(LEVELS, plan.requests, strict=True):
                level = await measure_level(plan, plain, attached, prompts, concurrency, requests)
                ratios[str(concurrency)], rates[str(concurrency)] = summary(level), level
            engine = engine_of(client)
            return {
                "throughput_ratio": ratios,
                "log_us": {p: engine.get(f"log_us_{p}") for p in ("p50", "p99")},
                "decide_us": {p: engine.get(f"decide_us_{p}") for p in ("p50", "p99")},
                "decision": engine.get("policy"),
                "idle_cpu_share": idle_cpu_share([pair for level in rates.values() for pair in level]),
                "pairs": {level: [_plain(pair) for pair in pairs] for level, pairs in rates.items()},
                "engine": {k: engine.get(k) for k in ("rounds", "lost_rounds", "vllm_version", "runner", "limits")},
                "plan": {"pairs": plan.pairs, "requests": plan.requests, "max_tokens": plan.max_tokens},
                "hardware": hardware(),
                "commit": commit(),
                "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            }
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)


async def start(processes: Processes, runtime_dir: Path, client: AdminClient) -> tuple[Server, Server]:
    """Start the daemon, then both servers one after the other (at once they would compete for the cores)."""
    config = runtime_dir / "honed.toml"
    sections = {
        "paths": {"runtime_dir": runtime_dir, "state_dir": runtime_dir / "state"},
        "http": {"metrics_listen": f"127.0.0.1:{free_port()}"},
        "recalibration": {"automatic": False},
    }
    config.write_text(toml(sections))
    _, environment = await asyncio.to_thread(start_daemon, processes, config, client)
    args = vllm_args(environment)
    plain = vllm_server.start(processes, "vllm-plain")
    print(f"vLLM alone is ready after {await asyncio.to_thread(vllm_server.wait, plain):.0f} s", flush=True)
    attached = vllm_server.start(processes, "vllm-attached", extra=args["flags"], environment=args["environment"])
    print(f"vLLM with honed is ready after {await asyncio.to_thread(vllm_server.wait, attached):.0f} s", flush=True)
    await asyncio.to_thread(wait_attached, attached.child, client)
    return plain, attached


async def measure_level(
    plan: Plan, plain: Server, attached: Server, prompts: Sequence[Prompt], concurrency: int, requests: int
) -> list[Pair]:
    """Measure pairs of runs at one concurrency, after an uncounted run of each."""
    chosen = [prompts[i % len(prompts)] for i in range(requests)]
    servers = {"plain": plain, "attached": attached}
    for name in servers:
        await one_run(name, servers, chosen, concurrency, plan.max_tokens)
    pairs: list[Pair] = []
    for number in range(plan.pairs):
        order = ("plain", "attached") if number % 2 == 0 else ("attached", "plain")
        pair = {name: await one_run(name, servers, chosen, concurrency, plan.max_tokens) for name in order}
        if pair["plain"].counted != pair["attached"].counted:
            raise ProcessError(f"the servers did different work: {pair}")
        pairs.append(pair)
        shown = f"plain {pair['plain'].tokens_per_s:.1f} tok/s, attached {pair['attached'].tokens_per_s:.1f}"
        print(f"{concurrency:2d} concurrent, pair {number + 1}/{plan.pairs}: {shown}", flush=True)
    return pairs


async def one_run(name: str, servers: dict[str, Server], prompts: Sequence[Prompt], concurrency: int, max_tokens: int) -> Run:
    """Run one server while the other idles. Every request generates the full length; a failed one is an error."""
    server, other = servers[name], next(s for n, s in servers.items() if n != name)
    before = await vllm_server.settled(server)
    await vllm_server.quiet([server, other])
    idle_s = other.child.cpu_seconds()
    played = await play(server.url, prompts, concurrency=concurrency, max_tokens=max_tokens, ignore_eos=True)
    idle_s = other.child.cpu_seconds() - idle_s
    if played.num_failed:
        raise ProcessError(next(reply.error for reply in played.replies if reply.error))
    return Run(played.tokens_per_s, await vllm_server.settled(server) - before, idle_s / played.seconds)


def summary(pairs: Sequence[Pair], seed: int = 0) -> dict[str, float]:
    """Median of the pairs' ratios, and the 95 % bootstrap interval of that median."""
    ratios = [pair["attached"].tokens_per_s / pair["plain"].tokens_per_s for pair in pairs]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAPS))
    low, high = medians[int(0.025 * BOOTSTRAPS)], medians[int(0.975 * BOOTSTRAPS) - 1]
    return {"median": round(statistics.median(ratios), 4), "low": round(low, 4), "high": round(high, 4)}


def idle_cpu_share(pairs: Sequence[Pair]) -> dict[str, float]:
    """Share of a core that each server used, on average, during the other's turn."""
    other = {"plain": "attached", "attached": "plain"}
    return {name: round(statistics.mean(pair[other[name]].idle_other for pair in pairs), 3) for name in other}


def _plain(pair: Pair) -> Document:
    return {name: asdict(run) for name, run in pair.items()}


if __name__ == "__main__":
    sys.exit(main())
