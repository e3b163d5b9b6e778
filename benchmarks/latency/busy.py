"""Training on a server that is hardly ever idle (`trainer.when = "spare"`): does it end, and what do users lose meanwhile?

A real server of the tiny pair with honed attached, and the real trainer process beside it, on the same cores. Requests arrive
as a Poisson process at 30, 60 and 90 % of the rate that the server manages with its batch full. A recalibration (a dry run, so
that all loads have the same drafter) is asked for and has to end. Meanwhile blocks of time with training and with paused
training alternate in a random order. After it the same is done without training in either (`same_twice`): what chance alone
does to the ratios.

    itl_mean, itl_p99     time between a stream's chunks (a verify round each): the mean a token, and p99 of the chunks
    ttft_mean             time to the first token
    won                   accepted tokens that the candidate won per 1,000 requests of the workload that it was trained for, as
                          the gate expects them, and the seconds of training

The trainer's budget holds the mean alone (`trainer.p99_budget` is 10): steps on two shared cores are rarely the same twice.

Requests count that begin and end in one block. Ratios are of all requests with training over all without; intervals are 95 %
bootstraps over pairs of blocks. Nobody stops arriving between blocks, so the server stays as busy as it was. The last line of
stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.server import vllm_server
from benchmarks.server.attached_server import Attached, attached
from benchmarks.server.client_load import REQUEST_TIMEOUT_S, Prompt, play, read_prompts, request_of
from benchmarks.server.measured import commit, hardware, keep, percentile
from benchmarks.server.processes import ROOT, ProcessError
from honed.daemon.client.client import FINISHED, AdminError

Document = dict[str, Any]

TINY = ROOT / "benchmarks" / "tiny"
LOADS = (30, 60, 90)
BOOTSTRAPS = 1000
SETTLE_S = 0.5
TRAINER = ("state", "beside_seconds", "beside_duty", "beside_harm", "beside_harm_error", "beside_slow_share", "beside_pause")


@dataclass(frozen=True)
class Plan:
    """Amount of measurement."""

    latency_budget: float = 0.1
    p99_budget: float = 10.0
    max_steps: int = 60
    block_s: float = 10.0
    same_pairs: int = 10
    """Of blocks without training in either; with training, until it ends."""
    most_s: float = 900.0
    """Longest wait for a recalibration."""
    max_tokens: int = 32
    concurrency: int = 16
    """Requests at once that fill the batch."""
    capacity_requests: int = 160


@dataclass
class Block:
    """Requests of one block, in seconds."""

    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    decode_s: float = 0.0
    tokens: int = 0
    failed: int = 0


Pair = dict[str, Block]
FIGURES: dict[str, Callable[[Sequence[Block]], float]] = {
    "itl_mean": lambda blocks: sum(b.decode_s for b in blocks) / max(sum(b.tokens for b in blocks), 1),
    "itl_p99": lambda blocks: percentile([gap for b in blocks for gap in b.gaps_s], 0.99),
    "ttft_mean": lambda blocks: statistics.fmean(first for b in blocks for first in b.first_s),
}


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loads", type=int, nargs="*", default=LOADS, help="per cent of capacity")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: benchmarks/results)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "busy-logs", help="folder for logs")
    arguments = parser.parse_args()
    try:
        vllm_server.check_pair()
        result = asyncio.run(run(Plan(), arguments.loads, arguments.logs))
    except KeyboardInterrupt:
        print("busy: stopped; everything that it started has ended", file=sys.stderr)
        return 130
    except (ProcessError, AdminError, OSError, httpx2.HTTPError) as error:
        print(f"busy: {error}", file=sys.stderr)
        return 1
    keep(result, "busy", arguments.out)
    loads = result["loads"]
    names = ("recalibrated", "seconds", "won", *(f"{name}_ratio" for name in FIGURES), "same_twice", "trainer")
    print(json.dumps({name: {load: one[name] for load, one in loads.items()} for name in names}), flush=True)
    return 0 if all(one["recalibrated"] for one in loads.values()) else 1


async def run(plan: Plan, loads: Sequence[int], logs: Path) -> Document:
    """Collect samples, measure the capacity, then each load."""
    sections: dict[str, dict[str, Any]] = {
        "recalibration": {"automatic": False, "max_seconds": 36_000.0},
        "controller": {"mode": "static", "capture_share": 1.0},
        "trainer": {
            "when": "spare",
            "latency_budget": plan.latency_budget,
            "p99_budget": plan.p99_budget,
            "torch_threads": 1,
            "max_steps": plan.max_steps,
            "max_gate_rows": 2048,
            "deadline_s": 36_000.0,
        },
    }
    async with attached(logs, sections, trains=True) as at:
        for workload in ("a", "b"):
            prompts = read_prompts(TINY / f"traffic_{workload}.jsonl", 200)
            await play(at.server.url, prompts, concurrency=8, max_tokens=80, workload=workload)
        prompts = read_prompts(TINY / "prompts_a.jsonl")
        many = (prompts * (1 + plan.capacity_requests // len(prompts)))[: plan.capacity_requests]
        told: Document = {"concurrency": plan.concurrency, "max_tokens": plan.max_tokens, "workload": "a", "capture": False}
        played = await play(at.server.url, many, ignore_eos=True, **told)
        capacity = len(many) / played.seconds
        print(f"capacity: {capacity:.2f} requests/s", flush=True)
        found = {}
        for load in loads:
            found[str(load)] = await Load(plan, at, prompts, capacity * load / 100).measure()
            print(f"{load} %: {json.dumps(found[str(load)])}", flush=True)
    return {
        "loads": found,
        "capacity_requests_per_s": round(capacity, 3),
        "plan": asdict(plan),
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


class Load:
    """Traffic of one rate, and what its requests see."""

    def __init__(self, plan: Plan, at: Attached, prompts: Sequence[Prompt], rate: float) -> None:
        self._plan, self._at, self._prompts, self._rate = plan, at, prompts, rate
        self._draw = random.Random(int(1000 * rate))
        self._block, self._from_s = Block(), 0.0
        self._is_over = False

    async def measure(self) -> Document:
        """Recalibrate under this load, then let blocks without training take turns."""
        async with httpx2.AsyncClient(base_url=self._at.server.url, timeout=REQUEST_TIMEOUT_S, trust_env=False) as client:
            arrivals = asyncio.create_task(self._arrive(client))
            try:
                await self._blocks(1, trains=False)  # uncounted
                began_s = time.monotonic()
                body = {"workloads": ["b"], "reason": "benchmark: beside traffic", "dry_run": True}
                operation = (await self._ask("POST", "/v1/recalibrations", body))["operation_id"]
                trained, trainer, view = list[Pair](), dict[str, Any](), dict[str, Any]()
                while time.monotonic() - began_s < self._plan.most_s:
                    pairs = await self._blocks(1, trains=True)
                    view = await self._ask("GET", f"/v1/operations/{operation}")
                    if view["state"] in FINISHED:
                        break
                    trained += pairs
                    now = (await self._ask("GET", "/v1/status"))["trainer"]
                    trainer = {name: now[name] for name in TRAINER} | {"steps": now["steps"]}
                    print(f"  {len(trained)} pairs: {trainer}", flush=True)
                else:
                    await self._ask("POST", f"/v1/operations/{operation}:cancel", {"reason": "benchmark: out of time"})
                seconds = time.monotonic() - began_s
                same = await self._blocks(self._plan.same_pairs, trains=False)
            finally:
                self._is_over = True
                await arrivals
        detail = view.get("detail") or {}
        gate = detail.get("gate") or []
        return {
            "recalibrated": view.get("state") == "succeeded" and bool(gate),
            "error": view.get("error") or "",
            "seconds": round(seconds, 1),
            "rate_per_s": round(self._rate, 3),
            "gate": gate,
            "won": won(gate, self._plan.max_tokens) | {"train_seconds": round(detail.get("train_seconds") or 0.0, 1)},
            "trainer": trainer,
            **{f"{name}_ratio": ratio(trained, name) for name in FIGURES},
            "same_twice": {f"{name}_ratio": ratio(same, name) for name in FIGURES},
            "requests_failed": sum(block.failed for pair in (*trained, *same) for block in pair.values()),
            "pairs": [len(trained), len(same)],
        }

    async def _blocks(self, number: int, *, trains: bool) -> list[Pair]:
        """Measure pairs of blocks, in each pair in a random order."""
        pairs = []
        for _ in range(number):
            pair: Pair = {}
            for name in self._draw.sample(("on", "off"), 2):
                word = "resume" if trains and name == "on" else "pause"
                await self._ask("POST", f"/v1/training:{word}", {"reason": "benchmark"})
                await self._until_paused(word == "pause")
                pair[name] = self._block = Block()
                self._from_s = time.monotonic() + SETTLE_S
                await asyncio.sleep(self._plan.block_s)
            self._block = Block()
            pairs.append(pair)
        return pairs

    async def _until_paused(self, is_paused: bool) -> None:
        """Wait until the trainer has heard of it."""
        until_s = time.monotonic() + 10.0
        while ((await self._ask("GET", "/v1/status"))["trainer"]["state"] == "paused") != is_paused:
            if time.monotonic() > until_s:
                raise ProcessError("the trainer doesn't follow a pause")
            await asyncio.sleep(0.05)

    async def _arrive(self, client: httpx2.AsyncClient) -> None:
        """Send requests until it is over; then wait for their ends."""
        tasks, next_s = set[asyncio.Task[None]](), time.monotonic()
        while not self._is_over:
            next_s += self._draw.expovariate(self._rate)
            await asyncio.sleep(max(next_s - time.monotonic(), 0.0))
            task = asyncio.create_task(self._send(client, self._draw.choice(self._prompts)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)

    async def _send(self, client: httpx2.AsyncClient, prompt: Prompt) -> None:
        """Send one request; it counts if it begins and ends in the same block."""
        block, began_s = self._block, time.monotonic()
        times, tokens = list[float](), list[int]()
        body = request_of(prompt, self._plan.max_tokens, "a", capture=False, ignore_eos=True)
        try:
            async with client.stream("POST", "/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        times.append(time.monotonic())
                        tokens += [len(choice.get("token_ids") or ()) for choice in json.loads(line[6:])["choices"]]
        except httpx2.HTTPError:
            block.failed += 1
            return
        if block is not self._block or began_s < self._from_s or not times:
            return
        block.first_s.append(times[0] - began_s)
        block.gaps_s += [later - earlier for earlier, later in itertools.pairwise(times)]
        block.decode_s += times[-1] - times[0]
        block.tokens += sum(tokens[1:])

    async def _ask(self, method: str, path: str, body: Document | None = None) -> Document:
        client = self._at.client
        asked = client.get(path) if method == "GET" else client.post(path, body or {})
        return dict(asked)


def won(gate: Sequence[Document], tokens: int) -> Document:
    """Accepted tokens won per 1,000 requests of so many tokens: of n tokens n - n / acceptance length are accepted drafts."""
    for row in gate:
        if row.get("must_gain"):
            return {"per_1000_requests": round(1000 * tokens * (1 / row["parent"] - 1 / row["candidate"]))}
    return {}


def ratio(pairs: Sequence[Pair], name: str, seed: int = 0) -> Document:
    """Ratio of a figure with training to that without, and its interval; empty without pairs."""

    def of(some: Sequence[Pair]) -> float:
        on, off = (FIGURES[name]([pair[kind] for pair in some]) for kind in ("on", "off"))
        return on / off

    if not pairs or not all(block.first_s and block.gaps_s for pair in pairs for block in pair.values()):
        return {}
    draw = random.Random(seed)
    ratios = sorted(of(draw.choices(pairs, k=len(pairs))) for _ in range(BOOTSTRAPS))
    low, high = ratios[int(0.025 * BOOTSTRAPS)], ratios[int(0.975 * BOOTSTRAPS) - 1]
    return {"ratio": round(of(pairs), 4), "low": round(low, 4), "high": round(high, 4)}


if __name__ == "__main__":
    sys.exit(main())
