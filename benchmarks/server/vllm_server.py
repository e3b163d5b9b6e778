"""The tiny pair in vLLM's OpenAI server, with or without honed, and vLLM's own counters for it."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx2
import torch

from benchmarks.server.processes import ROOT, Child, ProcessError, Processes, free_port

TARGET = "benchmarks/tiny/target"
DRAFTER = "benchmarks/tiny/drafter"
NUM_DRAFT_TOKENS = 7
MODEL_NAME = "tiny"
IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""Environment of a benchmark that runs vLLM in its own process, set before vLLM is imported."""
START_TIMEOUT_S = 240.0
QUIET_SHARE = 0.05
"""A server is quiet if it uses no more of a core than this."""
QUIET_TIMEOUT_S = 30.0
CUDA_FLAGS = "--attention-backend TRITON_ATTN --kv-cache-memory-bytes 536870912 --gpu-memory-utilization 0.05"
"""On a GPU: a backend that takes float32, and no more memory than the pair needs."""

_COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)_total\{([^}]*)\} (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class Counters:
    """vLLM's `vllm:spec_decode_num_*_total`; `-` gives the counts between two readings."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()

    def __sub__(self, earlier: Counters) -> Counters:
        before = earlier.accepted_by_position or (0,) * len(self.accepted_by_position)
        return Counters(
            self.drafts - earlier.drafts,
            self.draft_tokens - earlier.draft_tokens,
            self.accepted_tokens - earlier.accepted_tokens,
            tuple(now - then for now, then in zip(self.accepted_by_position, before, strict=True)),
        )

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted a round, the bonus token included: 1 + accepted / rounds."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else 0.0


@dataclass(frozen=True)
class Server:
    """A running server."""

    child: Child
    port: int

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def counters(self) -> Counters:
        """Read its counters once."""
        return parse_counters(httpx2.get(f"{self.url}/metrics", timeout=10.0, trust_env=False).raise_for_status().text)

    def is_ready(self) -> bool:
        """Return whether it answers."""
        try:
            return httpx2.get(f"{self.url}/health", timeout=2.0, trust_env=False).is_success
        except httpx2.TransportError:
            return False


def start(
    processes: Processes,
    name: str,
    *,
    extra: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    target: str = TARGET,
    is_speculating: bool = True,
) -> Server:
    """Start a server; it isn't ready yet when this returns (see `wait`)."""
    port = free_port()
    flags = server_flags(port, target, is_speculating)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *flags, *extra]
    return Server(processes.start(name, command, {**server_environment(), **(environment or {})}), port)


def wait(server: Server) -> float:
    """Wait until it serves; return the seconds that took."""
    return server.child.wait_until(server.is_ready, START_TIMEOUT_S, "answer on /health")


def server_flags(port: int, target: str = TARGET, is_speculating: bool = True) -> list[str]:
    """Return flags of the plain server. float32, since equality of outputs is tested token by token."""
    speculative = f'{{"method":"dflash","model":"{DRAFTER}","num_speculative_tokens":{NUM_DRAFT_TOKENS}}}'
    model = f"--model {target} --served-model-name {MODEL_NAME} --dtype float32 --max-model-len 1024 --max-num-seqs 16"
    listen = f"--host 127.0.0.1 --port {port} --enforce-eager"
    speculation = ("--speculative-config", speculative) if is_speculating else ()
    return [*model.split(), *listen.split(), *speculation, *(CUDA_FLAGS.split() if torch.cuda.is_available() else ())]


def server_environment() -> dict[str, str]:
    """Return the caller's environment without honed's variables, plus vLLM's own for a small and quiet server."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("HONED_") and not k.lower().endswith("_proxy")}
    return inherited | own_environment()


def own_environment() -> dict[str, str]:
    """Return vLLM's own variables."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(max(1, min(4, os.cpu_count() or 1))),
        "PYTHONUNBUFFERED": "1",
        "TRITON_F32_DEFAULT": "ieee",  # on CUDA Triton would multiply float32 with ten bits, and batches' answers would differ
    }


async def settled(server: Server) -> Counters:
    """Return vLLM's counters, once two readings are equal: the last step's stats arrive a moment after its tokens."""
    last = server.counters()
    for _ in range(50):
        await asyncio.sleep(0.2)
        if (now := server.counters()) == last:
            return now
        last = now
    return last


async def quiet(servers: Sequence[Server], over_s: float = 0.5) -> None:
    """Wait until no server uses the CPU. Raises ProcessError when one stays busy."""
    until_s = time.monotonic() + QUIET_TIMEOUT_S
    while time.monotonic() < until_s:
        before = [server.child.cpu_seconds() for server in servers]
        await asyncio.sleep(over_s)
        used = [server.child.cpu_seconds() - b for server, b in zip(servers, before, strict=True)]
        if max(used) <= QUIET_SHARE * over_s:
            return
    raise ProcessError(f"after {QUIET_TIMEOUT_S:g} s without requests the servers still use {used} s of CPU in {over_s:g} s")


def check_pair(root: Path = ROOT) -> None:
    """Raise FileNotFoundError if the tiny pair is missing."""
    for folder in (TARGET, DRAFTER):
        if not (root / folder / "config.json").exists():
            raise FileNotFoundError(f"{folder} is missing: the tiny model pair belongs to the repository")


def parse_counters(text: str) -> Counters:
    """Sum vLLM's counters over engines. Raises ValueError when the text has none: a server without speculation."""
    totals: dict[str, int] = {}
    by_position: dict[int, int] = {}
    for name, labels, value in _COUNTER.findall(text):
        if position := _POSITION.search(labels):
            by_position[int(position[1])] = by_position.get(int(position[1]), 0) + int(float(value))
        else:
            totals[name] = totals.get(name, 0) + int(float(value))
    if "drafts" not in totals:
        raise ValueError("no vllm:spec_decode_* counters: does this server speculate?")
    positions = tuple(by_position[p] for p in sorted(by_position))
    return Counters(totals["drafts"], totals["draft_tokens"], totals["accepted_tokens"], positions)
