"""Made-up input for the fuzz: frames of every message and requests of every route, with one thing wrong, or several."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from benchmarks.scrape import batch, hello_of, status_of
from benchmarks.server.processes import ROOT
from honed.adapt.protocol import wire

DOCUMENT = ROOT / "daemon" / "openapi.json"
GONE = object()
"""Stands for a field that is left out."""
NUMBERS = (
    0,
    -1,
    1,
    2**31,
    2**53 + 1,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 1,
    -(2**63),
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    5e-324,
)
TEXTS = (
    "",
    "\0",
    "\x1b]0;x\x07",
    "../..",
    "/etc/passwd",
    "/dev/zero",
    "%s%n",
    "' OR 1=1 --",
    "\u202e",
    "é" * 300,
    "w" * 20_000,
)
NASTY: tuple[Any, ...] = (*NUMBERS, *TEXTS, None, True, [], [[]], {}, [2**64 - 1] * 9, [0] * 9, ["x"] * 9, [math.nan] * 9)
BYTES_SHARE = 0.3
"""Share of input whose bytes are mutated too."""
Path_ = tuple[str | int, ...]


def mutated_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change, cut, insert or repeat some bytes, up to four times."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        kind = rng.randrange(4)
        if kind == 0:
            made[at : at + 1] = rng.randbytes(1)
        elif kind == 1:
            del made[at : at + rng.randint(1, 32)]
        elif kind == 2:
            made[at:at] = rng.randbytes(rng.randint(1, 8))
        else:
            made[at:at] = made[max(at - 16, 0) : at]
    return bytes(made)


class Frames:
    """Mutated frames of an engine that is at odds with itself.

    Args:
        engine: its number, which says its id.
    """

    def __init__(self, engine: int, rng: random.Random) -> None:
        self._hello, self._rng = hello_of(engine), rng
        self._seq = 0
        raws = [msgspec.msgpack.decode(wire.encode(message)) for message in messages(self._hello)]
        self._messages = [(raw, _paths(raw)) for raw in raws]

    def hello(self, boot: int) -> bytes:
        """A hello that nothing is wrong with, for a new boot."""
        self._hello, self._seq = msgspec.structs.replace(self._hello, boot_id=f"boot-{boot}"), 0
        return wire.encode(self._hello)

    def frame(self) -> bytes:
        """A mutated frame of this boot."""
        raw, paths = self._rng.choice(self._messages)
        if "boot_id" in raw:
            raw = raw | {"boot_id": self._hello.boot_id}
        if "seq" in raw:
            self._seq += 1
            raw = raw | {"seq": self._seq}
        is_bytes = self._rng.random() < BYTES_SHARE
        if not is_bytes or self._rng.random() < 0.5:
            raw = _replaced(raw, self._rng.choice(paths), self._rng.choice((*NASTY, GONE)))
        made = msgspec.msgpack.encode(raw)
        return mutated_bytes(made, self._rng) if is_bytes else made


def messages(hello: wire.EngineHello) -> list[Any]:
    """One message of each kind that the daemon takes, and one that it doesn't; batches more often, as they go deepest."""
    first = batch(hello, 1, 0, 2, np.random.default_rng(0))
    gate = wire.GateFigures(workload="w", sessions=1, parent=1.0, candidate=1.0, gain_low=1.0, gain_high=1.0, passed=True)
    about = {"engine_id": hello.engine_id, "boot_id": hello.boot_id}
    return [
        # A frame that can't be read leaves a gap behind it; a batch that stands for all before it is taken anyway.
        *[msgspec.structs.replace(first, first_seq=1)] * 6,
        first,
        hello,
        status_of(hello),
        wire.CommandResult(**about, command_id="c", ok=False, figures={"pause_ms": 1.0}, detail={"a": "b"}),
        wire.TrainerHello(trainer_id="t", device="cpu", yields_to=["*"]),
        wire.TrainerStatus(
            trainer_id="t", state="idle", preemption_delays_s=[0.5], preemption_computing_s=[0.1], gate=[gate], memory_bytes=1
        ),
        wire.TrainResult(operation_id="op", ok=False, error="x", gate=[gate]),
        wire.Purged(operation_id="op", problems=["x"]),
        wire.TrainPause(paused=True),
    ]


METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "get", "X" * 100)
PAGE_ROUTES = ("/", "/page.json", "/metrics", "/healthz", "/readyz", "/openapi.json")
SUBJECTS = ("engine-0", "draft_tokens", "policy", "op", "v0001-00000000", "*")
WORDS: Mapping[str, Any] = {
    "reason": "because",
    "version": "v0001-00000000",
    "ttl_s": 60,
    "value": 3,
    "dry_run": True,
    "force": False,
    "scope": "full",
    "max_seconds": 10,
    "workloads": ["workload-0"],
    "engine_id": "engine-0",
    "limit": 10,
    "after": 0,
    "window": "1h",
    "window_s": 300,
    "since": 1,
    "resolution": "1s",
    "workload": "workload-0",
}
"""Values that bodies and queries may have."""
HEADERS = (
    *(
        "Content-Type: application/json",
        "Content-Type: text/plain",
        "Content-Type: application/json; charset=\xff",
        "Expect: 100-continue",
    ),
    *(
        "Content-Length: -1",
        "Content-Length: 99999999999",
        "Content-Length: 5",
        "Transfer-Encoding: chunked",
        "Upgrade: websocket",
    ),
    *(
        "Host: example.org",
        "Host:",
        "Authorization: Bearer x",
        "Last-Event-ID: 5",
        "Last-Event-ID: \xb2",
        'If-Match: "x"',
        "If-Match: *",
    ),
    *(
        "Idempotency-Key: one",
        "Idempotency-Key: ",
        f"Idempotency-Key: {'k' * 300}",
        f"X-Long: {'x' * 20_000}",
        "Connection: close",
    ),
)


class Requests:
    """Mutated requests to every route of the admin API and of the port of metrics and page."""

    def __init__(self, rng: random.Random, document: Path = DOCUMENT) -> None:
        self._rng = rng
        described = json.loads(document.read_text())
        self._operations = [
            (method.upper(), path, [one["name"] for one in operation.get("parameters", []) if one["in"] == "query"])
            for path, operations in described["paths"].items()
            for method, operation in operations.items()
        ] + [("GET", path, ["window"]) for path in PAGE_ROUTES]
        schemas = described["components"]["schemas"]
        self._bodies = [list(one["properties"]) for name, one in schemas.items() if name.endswith("Request")]

    def request(self) -> tuple[bytes, bool]:
        """A request, and whether its end can be told: then it has an answer to wait for."""
        rng = self._rng
        method, path, names = rng.choice(self._operations)
        if rng.random() < 0.1:
            method = rng.choice(METHODS)
        for name in ("operation_id", "version", "engine_id", "name"):
            path = path.replace(f"{{{name}}}", quote(str(self._value(SUBJECTS)), safe=rng.choice(("", "/:"))))
        query = "&".join(
            f"{name}={quote(str(self._value((WORDS.get(name, 1),))))}" for name in [*names, "x"] if rng.random() < 0.4
        )
        body = self._body() if method in ("POST", "PUT", "DELETE", "PATCH") else b""
        headers = ["Host: localhost", f"Content-Length: {len(body)}"] if body or rng.random() < 0.5 else ["Host: localhost"]
        is_odd = rng.random() < BYTES_SHARE
        headers += rng.sample(HEADERS, rng.randint(1, 3)) if is_odd else ["Content-Type: application/json"]
        head = "\r\n".join([f"{method} {path}{'?' * bool(query)}{query} HTTP/1.1", *headers, "", ""])
        made = head.encode("latin-1", errors="replace") + body
        if rng.random() < BYTES_SHARE / 2:
            return mutated_bytes(made, rng), False
        return made, not is_odd and method not in ("HEAD", *METHODS[7:])

    def _value(self, usual: Sequence[Any]) -> Any:
        return self._rng.choice(NASTY if self._rng.random() < 0.3 else usual)

    def _body(self) -> bytes:
        names = self._rng.choice(self._bodies)
        kind = self._rng.random()
        if kind < 0.1:
            return b""
        if kind < 0.2:
            return json.dumps(self._rng.choice(NASTY)).encode()
        chosen = [name for name in names if self._rng.random() < 0.7]
        return json.dumps({name: self._value((WORDS[name],)) for name in chosen}).encode()


def _paths(raw: Any, at: Path_ = ()) -> list[Path_]:
    """Ways to what is inside a decoded message; of a list, to its first two."""
    inside = raw.items() if isinstance(raw, dict) else enumerate(raw[:2]) if isinstance(raw, list) else ()
    return [path for key, value in inside for path in ((*at, key), *_paths(value, (*at, key)))]


def _replaced(raw: Any, path: Path_, value: Any) -> Any:
    """A copy with another value at a place."""
    copy, (key, *rest) = raw.copy(), path
    if rest:
        copy[key] = _replaced(raw[key], tuple(rest), value)
    elif value is GONE:
        del copy[key]
    else:
        copy[key] = value
    return copy
