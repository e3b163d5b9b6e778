"""A vLLM server with honed attached and its daemon (and trainer), for benchmarks that need no second server."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.demo.figures import toml
from benchmarks.server import vllm_server
from benchmarks.server.honed_side import honed_command, start_daemon, vllm_args, wait_attached
from benchmarks.server.processes import Child, Processes, free_port
from benchmarks.server.vllm_server import Server
from honed.daemon.client.client import AdminClient


@dataclass(frozen=True)
class Attached:
    """The running processes, and the place of their state."""

    server: Server
    client: AdminClient
    state_dir: Path
    trainer: Child | None


@contextlib.asynccontextmanager
async def attached(
    logs: Path,
    sections: Mapping[str, Mapping[str, Any]],
    *,
    trains: bool = False,
    server_environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Attached]:
    """Start daemon, trainer (if wanted) and server; end them all on exit."""
    runtime_dir = Path(tempfile.mkdtemp(prefix="honed-bench-"))  # short: a unix socket's path has 107 characters
    state_dir = runtime_dir / "state"
    settings = {
        "paths": {"runtime_dir": runtime_dir, "state_dir": state_dir},
        "http": {"metrics_listen": f"127.0.0.1:{free_port()}", "mutations_per_minute": 100_000},
        **sections,
    }
    config = runtime_dir / "honed.toml"
    config.write_text(toml(settings))
    try:
        with Processes(logs) as processes, AdminClient(runtime_dir / "admin.sock") as client:
            _, environment = await asyncio.to_thread(start_daemon, processes, config, client)
            trainer = processes.start("honed-train", [honed_command(), "train"], environment) if trains else None
            args = await asyncio.to_thread(vllm_args, environment)
            variables = {**args["environment"], **(server_environment or {})}
            server = vllm_server.start(processes, "vllm", extra=args["flags"], environment=variables)
            seconds = await asyncio.to_thread(vllm_server.wait, server)
            await asyncio.to_thread(wait_attached, server.child, client)
            print(f"vLLM with honed is ready after {seconds:.0f} s", flush=True)
            yield Attached(server, client, state_dir, trainer)
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)
