"""Client of a served target, vLLM's OpenAI-compatible server, for `honed calibrate` and `honed retention`.

It sends plain requests, a set number concurrently, each with its own `cache_salt`: a prompt answered from the prefix cache
computes no hidden states to capture and takes no time to measure. honed's labels travel in vLLM's own `vllm_xargs`; a
server without honed ignores them.

An error of one prompt is in its reply; an error of the server is a TargetError.

Source: vLLM 0.32 `entrypoints/openai/{completion,chat_completion}/protocol.py`, `entrypoints/serve/tokenize`, `v1/metrics`.
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx2

from honed.daemon.calibration.prompts_file import Prompt
from honed.daemon.client.client import EXIT_FAILED, EXIT_USAGE, fault_of_url

CONNECT_S, ANSWER_S = 10.0, 30.0
SETTLE_S, SETTLE_TIMES = 0.25, 40
"""A step's counters appear shortly after its tokens."""


class TargetError(RuntimeError):
    """The server can't do the request; `cure` says what to do."""

    def __init__(self, message: str, *, cure: str = "", exit_code: int = EXIT_FAILED) -> None:
        super().__init__(message)
        self.cure = cure
        self.exit_code = exit_code


@dataclass(frozen=True)
class Sampling:
    """Sampling of completions; None: the server's default."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def body(self) -> dict[str, Any]:
        """Fields of a request."""
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass
class Reply:
    """Result of a prompt; `error` is empty if it was answered."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Played:
    """Replies to several prompts, in order, and the total time."""

    replies: list[Reply] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def errors(self) -> list[str]:
        """Error of each prompt that wasn't answered."""
        return [reply.error for reply in self.replies if reply.error]

    @property
    def completion_tokens(self) -> int:
        """All generated tokens."""
        return sum(reply.completion_tokens for reply in self.replies)

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens."""
        return sum(reply.prompt_tokens for reply in self.replies)


@dataclass(frozen=True)
class Counters:
    """vLLM's own counters, summed over its engines; `-` gives the increase between two readings."""

    generated_tokens: int = 0
    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(*(now - then for now, then in zip(_values(self), _values(earlier), strict=True)))

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(one + two for one, two in zip(_values(self), _values(other), strict=True)))


def _values(counters: Counters) -> tuple[int, ...]:
    return (counters.generated_tokens, counters.rounds, counters.draft_tokens, counters.accepted_tokens)


def _address(text: str) -> str:
    """Probable URL for a wrong one: with http://, if that is what it lacks."""
    likely = f"http://{text.rpartition('//')[2]}"
    return "http://host:port" if fault_of_url(likely) else likely


COUNTERS = {
    "vllm:generation_tokens_total": "generated_tokens",
    "vllm:spec_decode_num_drafts_total": "rounds",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
}


def parse_counters(text: str) -> Counters:
    """Parse vLLM's /metrics; absent counters are 0, as without speculation. Raises ValueError."""
    from prometheus_client.parser import text_string_to_metric_families

    sums = dict.fromkeys(COUNTERS.values(), 0)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name in COUNTERS:
                sums[COUNTERS[sample.name]] += int(sample.value)
    return Counters(**sums)


class ServedTarget:
    """One server, as a context manager; entering it sends nothing.

    Args:
        url: http://host:port.
        model: its name for the target; "": the first that it lists.
        key: bearer token of its `--api-key`.
        timeout_s: longest wait for one completion.

    Raises:
        TargetError: `url` isn't an address.
    """

    def __init__(self, url: str, *, model: str = "", key: str = "", timeout_s: float = 600.0) -> None:
        if fault := fault_of_url(url):
            cure = f"Write {_address(url)}."
            raise TargetError(f"{url!r} isn't a server's address: {fault}", cure=cure, exit_code=EXIT_USAGE)
        self.url, self.model, self._timeout_s = url.rstrip("/").removesuffix("/v1"), model, timeout_s
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        # Made once: loading certificates takes longer than a short prompt.
        self._tls = ssl.create_default_context() if self.url.startswith("https:") else False
        self._http = httpx2.Client(
            base_url=self.url, headers=self._headers, timeout=ANSWER_S, verify=self._tls, trust_env=False
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._http.close()

    def check(self) -> None:
        """Check that it answers and serves the model. Raises TargetError."""
        answer = self._ask("GET", "/v1/models")
        names = [str(one["id"]) for one in answer.get("data") or ()]
        if self.model and self.model not in names:
            raise TargetError(
                f"{self.url} doesn't serve {self.model!r}, only {', '.join(names) or 'nothing'}",
                cure="Give one of these with --model.",
                exit_code=EXIT_USAGE,
            )
        if not names:
            raise TargetError(f"{self.url} serves no model", cure="It must be an OpenAI-compatible server, such as vLLM's.")
        self.model = self.model or names[0]

    def count_tokens(self, prompt: Prompt) -> tuple[int, int]:
        """Tokens of a prompt, including its template, and the server's longest context.

        Raises:
            TargetError: the server has no /tokenize, or refuses the prompt.
        """
        asked = {"messages": prompt.messages} if prompt.is_chat else {"prompt": prompt.text}
        answer = self._ask("POST", "/tokenize", {"model": self.model, **asked}, f"line {prompt.line}: ")
        try:
            return int(answer["count"]), int(answer["max_model_len"])
        except (KeyError, TypeError, ValueError) as error:
            why = f"{self.url}/tokenize doesn't answer like vLLM's ({answer})"
            raise TargetError(why, cure="Use vLLM's own server; a proxy in between must forward /tokenize.") from error

    def counters(self) -> Counters:
        """vLLM's counters, once two readings are the same. Raises TargetError."""
        last = self._read_counters()
        for _ in range(SETTLE_TIMES):
            time.sleep(SETTLE_S)
            if (now := self._read_counters()) == last:
                break
            last = now
        return last

    def play(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        labels: Callable[[Prompt], Mapping[str, str | int]],
        *,
        concurrency: int,
        on_reply: Callable[[Reply], None] | None = None,
    ) -> Played:
        """Send all prompts, `concurrency` at a time; `labels` are honed's for each request."""
        return asyncio.run(self._play(prompts, sampling, labels, concurrency, on_reply or (lambda reply: None)))

    async def _play(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling,
        labels: Callable[[Prompt], Mapping[str, str | int]],
        concurrency: int,
        on_reply: Callable[[Reply], None],
    ) -> Played:
        gate, salt = asyncio.Semaphore(concurrency), secrets.token_hex(8)
        limits = httpx2.Limits(max_connections=concurrency)
        timeout = httpx2.Timeout(self._timeout_s, connect=CONNECT_S)
        async with httpx2.AsyncClient(
            base_url=self.url, headers=self._headers, timeout=timeout, limits=limits, verify=self._tls, trust_env=False
        ) as client:

            async def one(i: int, prompt: Prompt) -> Reply:
                body = {"model": self.model, "cache_salt": f"{salt}-{i}", "vllm_xargs": dict(labels(prompt)), **sampling.body()}
                async with gate:
                    reply = await _complete(client, prompt, body)
                on_reply(reply)
                return reply

            began_s = time.monotonic()
            replies = await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts)))
            return Played(list(replies), time.monotonic() - began_s)

    def _read_counters(self) -> Counters:
        try:
            return parse_counters(self._send("GET", "/metrics").text)
        except ValueError as error:
            raise TargetError(f"{self.url}/metrics can't be read: {error}", cure="Use vLLM's own server.") from error

    def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None, about: str = "") -> Any:
        answer = self._send(method, path, body, about)
        try:
            return answer.json()
        except ValueError as error:
            cure = "It must be an OpenAI-compatible server, such as vLLM's."
            raise TargetError(f"{self.url}{path} answered with something that isn't JSON", cure=cure) from error

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None, about: str = "") -> httpx2.Response:
        try:
            answer = self._http.request(method, path, json=body)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
            raise TargetError(
                f"{self.url} doesn't answer ({error})", cure="Check that the server runs, and the address: http://host:port."
            ) from error
        if answer.is_error:
            cures = {401: "Give its key with --api-key-file.", 404: "Use vLLM's own server, http://host:port."}
            text = f"{about}{self.url}{path} answered {answer.status_code}: {_reason(answer)}"
            raise TargetError(text, cure=cures.get(answer.status_code, ""))
        return answer


async def _complete(client: httpx2.AsyncClient, prompt: Prompt, body: Mapping[str, Any]) -> Reply:
    """Get one completion."""
    path, asked = "/v1/completions", {"prompt": prompt.text}
    if prompt.is_chat:
        path, asked = "/v1/chat/completions", {"messages": prompt.messages}  # type: ignore[dict-item]
    try:
        answer = await client.post(path, json={**body, **asked})
        if answer.is_error:
            return Reply(error=f"line {prompt.line}: HTTP {answer.status_code}: {_reason(answer)}")
        usage = answer.json()["usage"]
        return Reply(int(usage["prompt_tokens"]), int(usage["completion_tokens"]))
    except (httpx2.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
        return Reply(error=f"line {prompt.line}: {type(error).__name__}: {error}")


def _reason(answer: httpx2.Response) -> str:
    """Message of an error's body in one line."""
    try:
        found = answer.json()
        found = found.get("error", found)
        text = str(found.get("message", found) if isinstance(found, dict) else found)
    except (ValueError, AttributeError):
        text = answer.text
    return " ".join(text.split())[:300] or answer.reason_phrase


def read_key(path: Path | None) -> str:
    """The key in a file; "" without one. Raises TargetError."""
    if path is None:
        return ""
    try:
        return path.read_text("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise TargetError(f"the key can't be read: {error}", exit_code=EXIT_USAGE) from error
