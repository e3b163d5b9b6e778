"""Access to the admin API: users of the unix socket may do everything; over TCP the token decides.

There are two steps, so that a forgotten one refuses instead of allowing. `Authenticate` (outermost on its listener) identifies
the caller and answers 401 to unknown ones, before reading a body or a route. `needs` is the dependency of every router: it
refuses unauthenticated requests and tokens without the right (403). `Actor` is the name for the audit table.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from fastapi.security.http import HTTPAuthorizationCredentials

from honed.daemon.api.limits import ROLE, App, Receive, Scope, Send, answer
from honed.daemon.errors import ForbiddenError, StartError, UnauthorizedError

Role = Literal["read", "admin"]
USER_ID = "honed.user_id"
"""Key of a connection's state: user of the unix socket's peer process."""
CREDENTIALS: dict[Role, str] = {"read": "honed-read-token", "admin": "honed-admin-token"}
"""Files in $CREDENTIALS_DIRECTORY, written by systemd's LoadCredential."""
MIN_LENGTH = 32
CHALLENGE = 'Bearer realm="honed"'
_TOKEN = re.compile(r"[\x21-\x7e]+")

bearer = HTTPBearer(auto_error=False, description="Over TCP only: the read or the admin token.")


@dataclass(frozen=True, repr=False)
class Tokens:
    """SHA-256 of the two secrets: comparing digests takes the same time for every guess."""

    by_role: Mapping[Role, bytes]

    def role_of(self, authorization: bytes) -> Role | None:
        """Role for the header `Authorization: Bearer …`. Always compares both tokens."""
        scheme, _, token = authorization.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        found: Role | None = None
        for role in ("read", "admin"):
            if hmac.compare_digest(digest, self.by_role.get(role, b"")):
                found = role
        return found if scheme.lower() == b"bearer" and token else None


def load_tokens(read_file: Path | None, admin_file: Path | None, env: Mapping[str, str] = os.environ) -> Tokens:
    """The tokens from the settings' files, else from systemd's credentials. The read token may be missing.

    Raises:
        StartError: admin token missing, unreadable or too weak; names the place and the cure.
    """
    given: dict[Role, Path | None] = {"read": read_file, "admin": admin_file}
    found: dict[Role, bytes] = {}
    for role, path in given.items():
        secret = _read(role, path, env)
        if secret:
            found[role] = hashlib.sha256(secret.encode()).digest()
    if "admin" not in found:
        raise StartError(
            "http.admin_listen needs an admin token: put one into /etc/credstore/honed-admin-token (`openssl rand -hex 32`), "
            "or name its file with http.admin_token_file"
        )
    if found.get("read") == found["admin"]:
        raise StartError("the read token and the admin token are the same: every reader could change everything")
    return Tokens(found)


class Authenticate:
    """ASGI middleware that notes the caller's role.

    Args:
        app: the protected application.
        tokens: None for a unix socket: its file's permissions select the users, who have every right.
        on_refused: called with the method of each refused request.
    """

    def __init__(self, app: App, tokens: Tokens | None, on_refused: Callable[[str], None] = lambda method: None) -> None:
        self._app, self._tokens, self._on_refused = app, tokens, on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            role: Role | None = "admin"
            shown: list[bytes] = []
            if self._tokens is not None:
                shown = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
                role = self._tokens.role_of(shown[0]) if len(shown) == 1 else None
            if role is None:
                self._on_refused(scope["method"])
                headers = [(b"www-authenticate", CHALLENGE.encode())]
                why = "the token isn't one of this daemon's" if shown else "no token was given"
                await answer(send, 401, "Unauthorized", why, headers)
                return
            scope[ROLE] = role
        await self._app(scope, receive, send)


def needs(role: Role) -> Any:
    """A router's dependency: the caller must have this role; an admin may also read."""

    def check(
        request: Request,
        shown: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],  # documents the token in OpenAPI
    ) -> None:
        has = request.scope.get(ROLE)
        if has not in ("read", "admin"):
            raise UnauthorizedError("the request was not authenticated")
        if role == "admin" and has != "admin":
            raise ForbiddenError("the read token can't change anything", cure="Use the admin token (--token-file).")

    return Depends(check)


def actor_of(request: Request) -> str:
    """The caller for the audit table: a user of this machine or, over TCP, the admin token."""
    user_id = request.scope.get("state", {}).get(USER_ID)
    if user_id is None:
        return "admin token"
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:  # e.g. a container's user
        return f"user {user_id}"


Actor = Annotated[str, Depends(actor_of)]


def _read(role: Role, path: Path | None, env: Mapping[str, str]) -> str:
    """A secret; "" if none is set."""
    folder = env.get("CREDENTIALS_DIRECTORY", "")
    place = path or (Path(folder) / CREDENTIALS[role] if folder else None)
    if place is None:
        return ""
    try:
        secret = place.read_text().strip()
    except FileNotFoundError as error:
        if path is None:
            return ""
        raise StartError(f"the {role} token's file {place} doesn't exist") from error
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"the {role} token's file {place} can't be read: {error}") from error
    if len(secret) < MIN_LENGTH or not _TOKEN.fullmatch(secret):
        make = f"make one with `openssl rand -hex 32 > {place}`"
        raise StartError(f"the {role} token in {place} must be one line of {MIN_LENGTH} or more printable characters; {make}")
    return secret
