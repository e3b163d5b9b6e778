"""honed beside a benchmark: its command, the daemon as a process, and requests to its API."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from benchmarks.server.processes import Child, ProcessError, Processes
from benchmarks.server.vllm_server import DRAFTER, NUM_DRAFT_TOKENS, Counters
from honed.daemon.client.client import AdminClient, AdminError

Document = dict[str, Any]

POLICY_S = 2.5
"""Time in which an override reaches the engine: the daemon steers once a second."""
CAUGHT_UP_S = 15.0


def start_daemon(
    processes: Processes, config: Path, client: AdminClient, name: str = "honed-serve"
) -> tuple[Child, dict[str, str]]:
    """Start `honed serve` and wait until it answers; return the process, and the environment for honed's other commands."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HONED_")}
    environment = inherited | {"HONED_CONFIG": str(config)}
    daemon = processes.start(name, [honed_command(), "serve"], environment)
    daemon.wait_until(lambda: answers(client), 30.0, "answer on admin.sock")
    return daemon, environment


def wait_attached(engine: Child, client: AdminClient) -> None:
    """Wait until the daemon knows the engine."""
    engine.wait_until(lambda: bool(engine_of(client).get("connected")), 30.0, "engine in the daemon")


@contextlib.asynccontextmanager
async def pinned(client: AdminClient, draft_tokens: int = NUM_DRAFT_TOKENS) -> AsyncIterator[None]:
    """Pin the draft length, so that figures before and after can be compared."""
    body = {"value": draft_tokens, "ttl_s": 600, "reason": "benchmark: comparable figures"}
    client.put("/v1/overrides/draft_tokens", body)
    await asyncio.sleep(POLICY_S)
    try:
        yield
    finally:
        client.delete("/v1/overrides/draft_tokens")
        await asyncio.sleep(POLICY_S)


async def caught_up(client: AdminClient, totals: Counters) -> Document:
    """Return honed's view of the engine once it has stored as many rounds as vLLM counted (or after CAUGHT_UP_S)."""
    until_s = time.monotonic() + CAUGHT_UP_S
    engine = engine_of(client)
    while engine.get("rounds", 0) + engine.get("lost_rounds", 0) < totals.drafts and time.monotonic() < until_s:
        await asyncio.sleep(0.25)
        engine = engine_of(client)
    return engine


def engine_of(client: AdminClient | None) -> Document:
    """Return the one engine; empty while there is none."""
    engines: list[Document] = client.get("/v1/engines") if client is not None else []
    return engines[0] if engines else {}


def answers(client: AdminClient) -> bool:
    """Return whether the daemon answers."""
    try:
        return bool(client.get("/healthz"))
    except AdminError:
        return False


def honed_command() -> str:
    """Return this Python environment's `honed` command, or else the one on the PATH."""
    beside = Path(sys.executable).parent / "honed"
    return str(beside) if beside.exists() else shutil.which("honed") or str(beside)


def vllm_args(environment: dict[str, str], tree_slots: int = 0) -> Document:
    """Return the additions to vLLM's command from `honed vllm-args`; with tree slots those for the tiny drafter."""
    trees = ["--drafter", DRAFTER, "--tree-slots", str(tree_slots)] if tree_slots else []
    command = [honed_command(), "vllm-args", "--json", *trees]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    if made.returncode:
        raise ProcessError(f"honed vllm-args ended with {made.returncode}: {made.stderr.strip()}")
    return dict(json.loads(made.stdout))
