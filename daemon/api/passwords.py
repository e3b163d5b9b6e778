"""Passwords of the read-only listener, as the web config names them."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
from collections.abc import Mapping

import bcrypt

from honed.daemon.api.limits import App, Receive, Scope, Send, answer
from honed.daemon.settings.web_config import WebConfigFile

_REMEMBERED = 100
"""Right passwords that needn't be checked again: bcrypt takes a tenth of a second, on purpose."""
_NOBODYS = b"$2b$10$rwZNvbOVcZ83sLyHcEun1OabdRfM4pePrrfdsB2Y4ZXJYSHJ0gMJm"
"""Compared with an unknown user's password, so that it takes as long as a known one's."""


class Passwords:
    """ASGI middleware: asks for a user and password if the web config names users.

    Args:
        app: the protected application.
        file: the web config.
    """

    def __init__(self, app: App, file: WebConfigFile) -> None:
        self._app, self._file = app, file
        self._known: dict[bytes, None] = {}
        self._turn = asyncio.Lock()
        """One password is checked at a time: guesses take one core at most."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self._file.refresh()
            users = self._file.config.basic_auth_users
            if users and not await self._may_pass(scope, users):
                headers = [(b"www-authenticate", b'Basic realm="honed"')]
                why = "a user and password of http.metrics_web_config are needed"
                await answer(send, 401, "Unauthorized", why, "Prometheus takes them in `basic_auth`.", headers)
                return
        await self._app(scope, receive, send)

    async def _may_pass(self, scope: Scope, users: Mapping[str, str]) -> bool:
        shown = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        scheme, _, encoded = (shown[0] if len(shown) == 1 else b"").partition(b" ")
        try:
            user, _, password = base64.b64decode(encoded, validate=True).partition(b":")
        except binascii.Error:
            return False
        if scheme.lower() != b"basic" or not user:
            return False
        hashed = users.get(user.decode(errors="replace"), "").encode()
        key = hashlib.sha256(b"\0".join((user, password, hashed))).digest()
        if key in self._known:  # it mustn't wait for others' guesses
            return True
        async with self._turn:
            if key not in self._known and await asyncio.to_thread(_matches, password, hashed or _NOBODYS) and hashed:
                while len(self._known) >= _REMEMBERED:
                    del self._known[next(iter(self._known))]
                self._known[key] = None
        return key in self._known


def _matches(password: bytes, hashed: bytes) -> bool:
    # bcrypt hashes 72 bytes at most, and refuses more: so does Prometheus.
    return len(password) <= 72 and bcrypt.checkpw(password, hashed)
