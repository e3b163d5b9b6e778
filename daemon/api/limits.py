"""Checks of each request before its handling: a known host, a bounded body, a limited rate of changes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
Refusal = tuple[int, str, str, str]
"""Status, title, detail and cure."""
App = Callable[[Scope, Receive, Send], Awaitable[None]]

LOCAL_HOSTS = frozenset({"localhost", "127.0.0.1", "::1"})
READING = frozenset({"GET", "HEAD", "OPTIONS"})
ROLE = "honed.role"
"""Key of the authenticated role in the ASGI scope."""


class TokenBucket:
    """Rate limit: `per_minute` in a burst and on average."""

    def __init__(self, per_minute: int, monotonic: Callable[[], float]) -> None:
        self._rate, self._size, self._monotonic = per_minute / 60.0, float(per_minute), monotonic
        self._tokens, self._at = self._size, monotonic()

    def take(self) -> bool:
        now = self._monotonic()
        self._tokens = min(self._size, self._tokens + (now - self._at) * self._rate)
        self._at = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True


class Limits:
    """ASGI middleware.

    Args:
        app: the protected application.
        max_body_bytes: larger bodies are refused (413), also without a Content-Length.
        bucket: refuses an admin's changes above its rate (429). Others' changes are refused anyway and don't count.
        hosts: allowed host names of the listener (421); empty: any, for a unix socket. Without this check a web page
            could reach a loopback port through its own name (DNS rebinding).
    """

    def __init__(
        self, app: App, *, max_body_bytes: int, bucket: TokenBucket | None = None, hosts: frozenset[str] = frozenset()
    ) -> None:
        self._app, self._max_body_bytes, self._bucket, self._hosts = app, max_body_bytes, bucket, hosts
        self._too_large = 413, "Body too large", f"at most {max_body_bytes} bytes", "Send less."

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.lower(): value for name, value in scope["headers"]}
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            await answer(send, *refusal)
            return
        # Read in full here; the framework would turn this refusal into its own error if it read while parsing.
        messages, size = [], 0
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if size > self._max_body_bytes:
                await answer(send, *self._too_large)
                return
            if message["type"] != "http.request" or not message.get("more_body", False):
                break
        messages.reverse()

        async def replay() -> MutableMapping[str, Any]:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> Refusal | None:
        hosts = [value for name, value in scope["headers"] if name.lower() == b"host"]
        host = hosts[0].decode("latin-1") if len(hosts) == 1 else ""
        name = _host_name(host)
        if self._hosts and name.lower() not in self._hosts:
            names = " or ".join(sorted(self._hosts))
            return 421, "Unknown host", f"this listener isn't called {name!r}", f"Ask for it by {names}."
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or len(length) > 20 or int(length) > self._max_body_bytes:
            return self._too_large
        if (
            scope["method"] not in READING
            and scope.get(ROLE) == "admin"
            and self._bucket is not None
            and not self._bucket.take()
        ):
            return 429, "Too many changes", "their rate is over http.mutations_per_minute", "Wait a moment."
        return None


def _host_name(host: str) -> str:
    """The name in a Host header: without the port, and without the brackets of an IPv6 address."""
    name, _, port = host.rpartition(":")
    if not port.isdecimal() or (":" in name and not name.endswith("]")):
        name = host
    return name[1:-1] if name.startswith("[") and name.endswith("]") else name


async def answer(send: Send, status: int, title: str, detail: str, cure: str, extra: Headers = ()) -> None:
    """Send a problem document (RFC 9457)."""
    problem = {"type": "about:blank", "title": title, "status": status, "detail": detail, "cure": cure}
    body = json.dumps(problem).encode()
    length = (b"content-length", str(len(body)).encode())
    headers = [(b"content-type", b"application/problem+json"), length, *extra]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
