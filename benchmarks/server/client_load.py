"""Plays prompts against an OpenAI server as a client would: streamed over HTTP, a fixed number at a time.

Requests are greedy, with token ids in the answer, so that two runs can be compared token by token.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.server.measured import stolen_s, stolen_since
from benchmarks.server.vllm_server import MODEL_NAME

REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Prompt:
    """A prompt and the document (session) that it comes from."""

    session: str
    text: str


@dataclass
class Reply:
    """Answer to a prompt; `error` is empty on success."""

    token_ids: list[int] = field(default_factory=list)
    error: str = ""
    first_token_s: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Played:
    """A whole phase: replies in the prompts' order, and its duration.

    `stolen_s`, by core: time in which the host ran something else on it; empty if unknown.
    """

    replies: list[Reply]
    seconds: float
    stolen_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def num_failed(self) -> int:
        """Requests without a complete answer."""
        return sum(bool(r.error) for r in self.replies)

    @property
    def num_tokens(self) -> int:
        """Tokens generated in that time."""
        return sum(len(r.token_ids) for r in self.replies)

    @property
    def tokens_per_s(self) -> float:
        """Throughput of the phase."""
        return self.num_tokens / self.seconds if self.seconds else 0.0


def read_prompts(path: Path, limit: int = 0) -> list[Prompt]:
    """Read prompts from a JSON-lines file ({"session", "prompt"}), the first `limit` of them (0: all)."""
    with path.open() as lines:
        documents = [json.loads(line) for line in lines if line.strip()]
    prompts = [Prompt(str(d["session"]), d["prompt"]) for d in documents]
    return prompts[:limit] if limit else prompts


async def play(
    url: str,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    max_tokens: int,
    workload: str = "",
    capture: bool = True,
    ignore_eos: bool = False,
    on_reply: Callable[[Reply], None] | None = None,
) -> Played:
    """Send the prompts, `concurrency` at a time, and collect the replies; a failed one is a reply with an error."""
    gate = asyncio.Semaphore(concurrency)
    limits = httpx2.Limits(max_connections=concurrency)
    async with httpx2.AsyncClient(base_url=url, timeout=REQUEST_TIMEOUT_S, limits=limits, trust_env=False) as client:

        async def one(prompt: Prompt) -> Reply:
            async with gate:
                reply = await stream(client, request_of(prompt, max_tokens, workload, capture, ignore_eos))
            if on_reply is not None:
                on_reply(reply)
            return reply

        began_s, stolen = time.monotonic(), stolen_s()
        replies = await asyncio.gather(*(one(prompt) for prompt in prompts))
        return Played(list(replies), time.monotonic() - began_s, stolen_s=stolen_since(stolen))


def request_of(prompt: Prompt, max_tokens: int, workload: str, capture: bool, ignore_eos: bool) -> dict[str, Any]:
    """Make the body of a completion request; honed's labels are in vLLM's own `vllm_xargs`."""
    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": prompt.text,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "stream": True,
        "return_token_ids": True,
        "ignore_eos": ignore_eos,
    }
    if workload:
        body["vllm_xargs"] = {"honed_workload": workload, "honed_session": prompt.session}
        if not capture:
            body["vllm_xargs"]["honed_capture"] = 0
    return body


async def stream(client: httpx2.AsyncClient, body: Mapping[str, Any]) -> Reply:
    """Send one request and read it to its end."""
    reply, began_s, finished = Reply(), time.monotonic(), False
    try:
        async with client.stream("POST", "/v1/completions", json=dict(body)) as answer:
            if answer.is_error:
                await answer.aread()
                reply.error = f"HTTP {answer.status_code}: {answer.text[:300]}"
                return reply
            async for line in answer.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    reply.error = str(chunk["error"])[:300]
                    return reply
                for choice in chunk["choices"]:
                    reply.first_token_s = reply.first_token_s or time.monotonic() - began_s
                    reply.token_ids += choice.get("token_ids") or []
                    finished = finished or choice.get("finish_reason") is not None
    except (httpx2.HTTPError, ValueError, KeyError) as error:
        reply.error = f"{type(error).__name__}: {error}"
    reply.seconds = time.monotonic() - began_s
    if not finished and not reply.error:
        reply.error = "the stream ended without a finish_reason"
    return reply


def differing(one: Sequence[Reply], other: Sequence[Reply]) -> list[int]:
    """Return indices of prompts whose token ids differ."""
    return [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a.token_ids != b.token_ids]
