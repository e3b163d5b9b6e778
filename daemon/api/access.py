"""Access to the admin API: users of the unix socket may do everything; over TCP the token decides.

There are two steps, so that a forgotten one refuses instead of allowing. `Authenticate` (outermost on its listener) identifies
the caller and answers 401 to unknown ones, before reading a body or a route. `needs` is the dependency of every router: it
refuses unauthenticated requests and tokens without the right (403). `Actor` is the name for the audit table.
"""

from __future__ import annotations

import pwd
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.security import HTTPBearer
from fastapi.security.http import HTTPAuthorizationCredentials

from honed.daemon.api.limits import ROLE, App, Receive, Scope, Send, answer
from honed.daemon.errors import ForbiddenError, UnauthorizedError
from honed.daemon.settings.tokens import Role, Tokens

USER_ID = "honed.user_id"
"""Key of a connection's state: user of the unix socket's peer process."""
CHALLENGE = 'Bearer realm="honed"'

_UNKNOWN = (
    "the token isn't one of this daemon's",
    "It must be one that the daemon read at its start: restart it after changing its tokens.",
)
_NO_TOKEN = "no token was given", "Send it as `Authorization: Bearer`; honed's own commands take --token-file."

bearer = HTTPBearer(auto_error=False, description="Over TCP only: the read or the admin token.")


class Authenticate:
    """ASGI middleware that notes the caller's role.

    Args:
        app: the protected application.
        tokens: None for a unix socket: its file's permissions select the users, who have every right.
    """

    def __init__(self, app: App, tokens: Tokens | None) -> None:
        self._app, self._tokens = app, tokens

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            role: Role | None = "admin"
            shown: list[bytes] = []
            if self._tokens is not None:
                shown = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
                role = self._tokens.role_of(shown[0]) if len(shown) == 1 else None
            if role is None:
                headers = [(b"www-authenticate", CHALLENGE.encode())]
                why, cure = _UNKNOWN if shown else _NO_TOKEN
                await answer(send, 401, "Unauthorized", why, cure, headers)
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
