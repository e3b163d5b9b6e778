"""Cost of a swap of the drafter's weights to a busy server: pause by pause, under 16 streams.

A real server of the tiny pair with honed attached generates for 16 clients at a time without a break. An operator alternately
promotes two versions from the registry (`honed promote --force`), each staged beside the running steps, then copied in between
two of them. Each swap has two figures:

    pause   time for which the copy held the engine's thread, by its own clock, and in steps: over the median of the decode
            steps before and after
    stall   excess of the gap between the two steps around the swap over that median; includes waiting for the copy and
            everything else (also a prompt in the same step)

All greedy outputs are compared with those of the same server before the first swap. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2
from safetensors.torch import load_file, save_file

from benchmarks.server import vllm_server
from benchmarks.server.attached_server import Attached, attached
from benchmarks.server.client_load import Prompt, differing, play, read_prompts
from benchmarks.server.honed_side import caught_up, engine_of
from benchmarks.server.measured import commit, hardware, keep, percentile
from benchmarks.server.processes import ROOT, ProcessError
from honed.adapt.protocol import wire
from honed.daemon.client.client import FINISHED, AdminClient, AdminError
from honed.daemon.store.database import connect
from honed.recalib.registry.registry import Registry

Document = dict[str, Any]

STREAMS = 16
MAX_TOKENS = 64
BETWEEN_S = 0.3
NEARBY_STEPS = 20


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=None, help="result file (default: benchmarks/results)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "swap-logs", help="folder for logs")
    arguments = parser.parse_args()
    try:
        vllm_server.check_pair()
        result = asyncio.run(run(arguments.swaps, arguments.logs))
    except KeyboardInterrupt:
        print("swap: stopped; everything that it started has ended", file=sys.stderr)
        return 130
    except (ProcessError, AdminError, OSError, httpx2.HTTPError) as error:
        print(f"swap: {error}", file=sys.stderr)
        return 1
    keep(result, "swap", arguments.out)
    shown = ("pause_ms", "pause_steps", "stall_steps", "step_ms", "swaps", "greedy_identical", "requests_failed")
    print(json.dumps({key: result[key] for key in shown}), flush=True)
    return 0 if result["greedy_identical"] and not result["requests_failed"] else 1


async def run(num_swaps: int, logs: Path) -> Document:
    """Start, swap, and collect the results."""
    prompts = read_prompts(ROOT / "benchmarks" / "tiny" / "prompts_a.jsonl")[: 4 * STREAMS]
    sections = {"recalibration": {"automatic": False}, "controller": {"mode": "static", "capture_share": 0.0}}
    async with attached(logs, sections) as at:
        reference = await play(at.server.url, prompts, concurrency=STREAMS, max_tokens=MAX_TOKENS, ignore_eos=True)
        versions = await asyncio.to_thread(make_versions, at.state_dir)
        playing = asyncio.create_task(play_until_told(at, prompts, stop := asyncio.Event()))
        await asyncio.sleep(2.0)
        figures = [await swapped(at.client, versions[number % 2]) for number in range(num_swaps)]
        stop.set()
        rounds = await playing
        await caught_up(at.client, await vllm_server.settled(at.server))
        steps = read_steps(at.state_dir)
        replies = [reply for played in rounds for reply in played.replies]
        failed = sum(bool(reply.error) for reply in replies)
        wrong = sum(len(differing(reference.replies, played.replies)) for played in rounds)
        stalls = stalls_of(steps, [figure["pause_ms"] for figure in figures])
        engine = engine_of(at.client)
    pause_ms = [figure["pause_ms"] for figure in figures]
    step_ms = statistics.median(stall["step_ms"] for stall in stalls)
    return {
        "pause_ms": spread(pause_ms),
        "pause_steps": spread([stall["pause_ms"] / stall["step_ms"] for stall in stalls]),
        "stall_steps": spread([stall["gap_ms"] / stall["step_ms"] - 1.0 for stall in stalls]),
        "stall_ms": spread([stall["gap_ms"] - stall["step_ms"] for stall in stalls]),
        "copy_ms": spread([figure["copy_ms"] for figure in figures]),
        "stage_ms": spread([figure["stage_ms"] for figure in figures]),
        "step_ms": round(step_ms, 3),
        "swaps": num_swaps,
        "greedy_identical": wrong == 0,
        "requests": len(replies),
        "requests_failed": failed,
        "outputs_differing": wrong,
        "engine": {k: engine.get(k) for k in ("drafter_generation", "vllm_version", "runner", "lost_rounds")},
        "swaps_seen": stalls,
        "plan": {"streams": STREAMS, "max_tokens": MAX_TOKENS, "between_s": BETWEEN_S},
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


async def play_until_told(at: Attached, prompts: Sequence[Prompt], stop: asyncio.Event) -> list[Any]:
    """Play all prompts over and over, `STREAMS` at a time."""
    rounds = []
    while not stop.is_set():
        rounds.append(await play(at.server.url, prompts, concurrency=STREAMS, max_tokens=MAX_TOKENS, ignore_eos=True))
    return rounds


async def swapped(client: AdminClient, version: str) -> Document:
    """Promote a version and wait until the engine runs it; return the swap's figures."""
    path, body = f"/v1/drafters/{version}:promote", {"reason": "swap benchmark", "force": True}
    operation = await asyncio.to_thread(client.post, path, body)
    until_s = time.monotonic() + 60.0
    while operation["state"] not in FINISHED:
        if time.monotonic() > until_s:
            raise ProcessError(f"the swap to {version} has not ended: {operation}")
        await asyncio.sleep(0.05)
        operation = await asyncio.to_thread(client.get, f"/v1/operations/{operation['operation_id']}")
    if operation["state"] != "succeeded":
        raise ProcessError(f"the swap to {version} failed: {operation['error']}")
    await asyncio.sleep(BETWEEN_S)
    return dict(operation["detail"])


def make_versions(state_dir: Path) -> tuple[str, str]:
    """Make two variants of the loaded drafter; cached keys and values depend on the same weights in all three."""
    registry = Registry(state_dir / "registry")
    stock = registry.alias("active")
    assert stock is not None
    source = registry.path(stock)
    tensors = load_file(source / "model.safetensors")

    def write(folder: Path, factor: float) -> None:
        (folder / "config.json").write_bytes((source / "config.json").read_bytes())
        changed = {n: (t * factor).contiguous() if "mlp." in n or "o_proj" in n else t for n, t in tensors.items()}
        save_file(changed, folder / "model.safetensors")

    target = registry.get(stock).target_path
    made = [
        registry.create(lambda folder, by=factor: write(folder, by), parent=stock, scope="kv-frozen", target_path=target)
        for factor in (0.98, 1.02)
    ]
    return made[0].version, made[1].version


def read_steps(state_dir: Path) -> list[tuple[int, float, str]]:
    """Read (step, its end in ms, version whose drafts it verified) of every step of the one engine, in order."""
    database = connect(state_dir / "honed.db", read_only=True)
    try:
        rows = database.conn.execute("SELECT frame FROM batches ORDER BY seq").fetchall()
    finally:
        database.close()
    steps: list[tuple[int, float, str]] = []
    for (frame,) in rows:
        batch = wire.decode_to_daemon(zlib.decompress(frame))
        assert isinstance(batch, wire.EventBatch)
        steps += [(n, end / 1e6, batch.drafter_version) for n, end in zip(batch.steps.step, batch.steps.end_ns, strict=True)]
    return sorted(steps)


def stalls_of(steps: Sequence[tuple[int, float, str]], pauses_ms: Sequence[float]) -> list[dict[str, float]]:
    """Each swap's gap between steps, beside the median of the steps around it.

    A step has the version that drafted its tokens, so the first one with a new name is the second after the swap.
    """
    ends = [end for _, end, _ in steps]
    gaps = [later - earlier for earlier, later in itertools.pairwise(ends)]  # gaps[i]: before step i + 1
    names = [name for _, _, name in steps]
    flips = [i for i in range(2, len(steps)) if names[i] != names[i - 1] and names[i - 1]]
    if len(flips) != len(pauses_ms):
        raise ProcessError(f"{len(pauses_ms)} swaps were made, but the log of steps has {len(flips)}")
    found = []
    for flip, pause_ms in zip(flips, pauses_ms, strict=True):
        swap = flip - 2  # index of the gap between the last step before the swap and the first after it
        nearby = gaps[max(0, swap - NEARBY_STEPS) : swap] + gaps[swap + 1 : swap + 1 + NEARBY_STEPS]
        found.append({"pause_ms": pause_ms, "gap_ms": gaps[swap], "step_ms": statistics.median(nearby)})
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    """p50 and p99."""
    return {"p50": round(percentile(values, 0.5), 4), "p99": round(percentile(values, 0.99), 4)}


if __name__ == "__main__":
    sys.exit(main())
