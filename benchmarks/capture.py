"""Cost of capturing training samples: tokens/s with capture at the default share and at all requests, over none.

One real server of the tiny pair with honed attached runs on a core of its own, as it would have a GPU, with 16 requests at a
time and the draft length pinned. Time in which the host gave that core to others is subtracted (`by_the_clock`: not
subtracted). Blocks have three runs, one at each share in random order. An operator's override sets a run's share. Requests keep
the decision made at their arrival, so a run begins when the server is idle. A block's ratio is its run's tokens/s over that of
its run without capture; the output has medians and 95 % bootstrap intervals over the blocks. The vLLM counters of a block's
runs are compared (the same work), and the captured rows are counted: none at share 0, all tokens at share 1. The last line of
stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.make_tiny.target_core import pin_target, stolen_share
from benchmarks.server import vllm_server
from benchmarks.server.attached_server import Attached, attached
from benchmarks.server.client_load import play, read_prompts
from benchmarks.server.honed_side import POLICY_S, engine_of
from benchmarks.server.measured import commit, hardware, keep
from benchmarks.server.processes import ROOT, ProcessError
from benchmarks.server.vllm_server import NUM_DRAFT_TOKENS
from honed.adapt.control.settings import ControllerSettings
from honed.daemon.client.client import AdminError

Document = dict[str, Any]

CONCURRENCY = 16
REQUESTS = 48
MAX_TOKENS = 96
BOOTSTRAPS = 4000
SHARES = {"none": 0.0, "default": ControllerSettings().capture_share, "all": 1.0}


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=28, help="blocks of one run at each share")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: benchmarks/results)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "capture-logs", help="folder for logs")
    arguments = parser.parse_args()
    try:
        vllm_server.check_pair()
        result = asyncio.run(run(arguments.blocks, arguments.logs))
    except KeyboardInterrupt:
        print("capture: stopped; everything that it started has ended", file=sys.stderr)
        return 130
    except (ProcessError, AdminError, OSError, httpx2.HTTPError) as error:
        print(f"capture: {error}", file=sys.stderr)
        return 1
    keep(result, "capture", arguments.out)
    print(
        json.dumps({key: result[key] for key in ("throughput_ratio", "interval", "by_the_clock", "rows_per_token")}), flush=True
    )
    return 0


async def run(num_blocks: int, logs: Path) -> Document:
    """Start, measure, and read off what was captured."""
    sections = {"recalibration": {"automatic": False}}
    async with attached(logs, sections, server_environment=pin_target()) as at:
        at.client.put(
            "/v1/overrides/draft_tokens", {"value": NUM_DRAFT_TOKENS, "ttl_s": 6 * 3600, "reason": "capture benchmark"}
        )
        for name in SHARES:
            await one_run(at, name)  # doesn't count
        rng, blocks = random.Random(0), []
        for number in range(num_blocks):
            block = {name: await one_run(at, name) for name in rng.sample(list(SHARES), len(SHARES))}
            if len({json.dumps(one["counted"]) for one in block.values()}) > 1:
                raise ProcessError(f"the runs did different work: {block}")
            blocks.append(block)
            shown = ", ".join(f"{name} {block[name]['tokens_per_s']:.1f}" for name in SHARES)
            print(f"block {number + 1}/{num_blocks}: {shown} tok/s", flush=True)
        engine = engine_of(at.client)
    figures = {name: summary(blocks, name) for name in ("default", "all")}
    by_the_clock = {name: summary(blocks, name, "clock_tokens_per_s") for name in ("default", "all")}
    return {
        "throughput_ratio": {name: one["median"] for name, one in figures.items()},
        "interval": {name: [one["low"], one["high"]] for name, one in figures.items()},
        "by_the_clock": by_the_clock,
        "rows_per_token": {
            name: round(statistics.mean(block[name]["rows"] / block[name]["tokens"] for block in blocks), 4) for name in SHARES
        },
        "shares": SHARES,
        "blocks": blocks,
        "engine": {k: engine.get(k) for k in ("rounds", "lost_rounds", "errors", "vllm_version", "runner", "limits")},
        "plan": {"blocks": num_blocks, "requests": REQUESTS, "max_tokens": MAX_TOKENS, "concurrency": CONCURRENCY},
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


async def one_run(at: Attached, name: str) -> Document:
    """Run once at a share; the engine is idle at the start, and its counts are up to date at the end."""
    body = {"value": SHARES[name], "ttl_s": 3600, "reason": "capture benchmark"}
    at.client.put("/v1/overrides/capture_share", body)
    await asyncio.sleep(POLICY_S)
    before, rows = await vllm_server.settled(at.server), engine_of(at.client).get("captured_rows", 0)
    await vllm_server.quiet([at.server])
    prompts = read_prompts(ROOT / "benchmarks" / "tiny" / "prompts_a.jsonl")
    chosen = [prompts[i % len(prompts)] for i in range(REQUESTS)]
    played = await play(at.server.url, chosen, concurrency=CONCURRENCY, max_tokens=MAX_TOKENS, workload="a", ignore_eos=True)
    if played.num_failed:
        raise ProcessError(next(reply.error for reply in played.replies if reply.error))
    counted = await vllm_server.settled(at.server) - before
    await asyncio.sleep(POLICY_S)  # the engine counts captured rows once it is idle
    return {
        "tokens_per_s": played.tokens_per_s / (1.0 - stolen_share([played])),
        "clock_tokens_per_s": played.tokens_per_s,
        "tokens": played.num_tokens,
        "rows": engine_of(at.client).get("captured_rows", 0) - rows,
        "counted": [counted.drafts, counted.draft_tokens, counted.accepted_tokens],
    }


def summary(blocks: Sequence[Document], name: str, figure: str = "tokens_per_s", seed: int = 0) -> dict[str, float]:
    """Median of the blocks' ratios to the run without capture, and its 95 % bootstrap interval."""
    ratios = [block[name][figure] / block["none"][figure] for block in blocks]
    rng = random.Random(seed)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(BOOTSTRAPS))
    low, high = medians[int(0.025 * BOOTSTRAPS)], medians[int(0.975 * BOOTSTRAPS) - 1]
    return {"median": round(statistics.median(ratios), 4), "low": round(low, 4), "high": round(high, 4)}


if __name__ == "__main__":
    sys.exit(main())
