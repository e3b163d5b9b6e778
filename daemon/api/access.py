"""Who may do what with the admin API: the unix socket's users everything, over TCP whoever shows a token what it is for.

Two steps, so that a forgotten one refuses rather than allows. `Authenticate` (outermost on its listener) finds out who asks
and answers 401 to anybody unknown, before a body is read or a route looked up. `needs` is the dependency of every router: it
refuses a request that nobody authenticated, and one whose token isn't enough (403). `Actor` is who the audit table says it was.
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
"""Key of a connection's state: whose process is at the other end of the unix socket."""
CREDENTIALS: dict[Role, str] = {"read": "honed-read-token", "admin": "honed-admin-token"}
"""Files in $CREDENTIALS_DIRECTORY, where systemd's LoadCredential puts them."""
MIN_LENGTH = 32
CHALLENGE = 'Bearer realm="honed"'
_TOKEN = re.compile(r"[\x21-\x7e]+")

bearer = HTTPBearer(auto_error=False, description="Over TCP only: the read or the admin token.")


@dataclass(frozen=True, repr=False)
class Tokens:
    """SHA-256 of the two secrets: comparing digests takes the same time however much of a guess is right."""

    by_role: Mapping[Role, bytes]

    def role_of(self, authorization: bytes) -> Role | None:
        """Whose the header `Authorization: Bearer …` is. Both are always compared."""
        scheme, _, token = authorization.partition(b" ")
        digest = hashlib.sha256(token.strip()).digest()
        found: Role | None = None
        for role in ("read", "admin"):
            if hmac.compare_digest(digest, self.by_role.get(role, b"")):
                found = role
        return found if scheme.lower() == b"bearer" and token else None


def load_tokens(read_file: Path | None, admin_file: Path | None, env: Mapping[str, str] = os.environ) -> Tokens:
    """The tokens of the settings' files, or else of systemd's credentials. The read token may be missing.

    Raises:
        StartError: no admin token, one that can't be read, or one that is too weak; names the place and the cure.
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
        raise StartError("the read token and the admin token are the same: whoever may read could change everything")
    return Tokens(found)


class Authenticate:
    """ASGI middleware that notes the role of who asks.

    Args:
        app: what it protects.
        tokens: None for a listener whose users its file's permissions have chosen: they have every right.
        on_refused: told the method of each request that was refused.
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
                why = "the token isn't one of this daemon's" if shown else "no token was shown"
                await answer(send, 401, "Unauthorized", why, headers)
                return
            scope[ROLE] = role
        await self._app(scope, receive, send)


def needs(role: Role) -> Any:
    """A router's dependency: whoever asks must have this role; an admin has that of a reader, too."""

    def check(
        request: Request,
        shown: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)],  # says in the OpenAPI document what is needed
    ) -> None:
        has = request.scope.get(ROLE)
        if has not in ("read", "admin"):
            raise UnauthorizedError("nobody has looked at who asks")
        if role == "admin" and has != "admin":
            raise ForbiddenError("the read token doesn't change anything", cure="Use the admin token (--token-file).")

    return Depends(check)


def actor_of(request: Request) -> str:
    """Who asks, for the audit table: a user of this machine, or over TCP whoever has the admin token."""
    user_id = request.scope.get("state", {}).get(USER_ID)
    if user_id is None:
        return "admin token"
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:  # of a container, say
        return f"user {user_id}"


Actor = Annotated[str, Depends(actor_of)]


def _read(role: Role, path: Path | None, env: Mapping[str, str]) -> str:
    """A secret; "" where none was given."""
    folder = env.get("CREDENTIALS_DIRECTORY", "")
    place = path or (Path(folder) / CREDENTIALS[role] if folder else None)
    if place is None:
        return ""
    try:
        secret = place.read_text().strip()
    except FileNotFoundError as error:
        if path is None:
            return ""
        raise StartError(f"the {role} token's file {place} isn't there") from error
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"the {role} token's file {place} can't be read: {error}") from error
    if len(secret) < MIN_LENGTH or not _TOKEN.fullmatch(secret):
        make = f"make one with `openssl rand -hex 32 > {place}`"
        raise StartError(f"the {role} token in {place} must be one line of {MIN_LENGTH} or more printable characters; {make}")
    return secret
