"""Errors as problem documents (RFC 9457), and the count of answers, for every listener."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import MutableMapping, Sequence
from typing import Any, get_args

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from honed.daemon.api import models
from honed.daemon.api.limits import Receive, Scope, Send
from honed.daemon.errors import (
    ConflictError,
    ForbiddenError,
    HonedError,
    PreconditionError,
    RequestError,
    ReusedKeyError,
    StoreError,
    UnauthorizedError,
    UnknownError,
)
from honed.daemon.settings.plain_errors import sentence

log = structlog.get_logger("honed.api")

_JSON = re.compile(r"application/(.+\+)?json\b")
_KIND = re.compile(r"constrained-\w+|int|float|str")

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
STATUS_OF: dict[type[HonedError], tuple[int, str]] = {
    UnauthorizedError: (401, "Unauthorized"),
    ForbiddenError: (403, "Not with this token"),
    UnknownError: (404, "Not found"),
    ConflictError: (409, "Not possible now"),
    PreconditionError: (412, "Changed meanwhile"),
    RequestError: (422, "Invalid request"),
    ReusedKeyError: (422, "Key was used before"),
    StoreError: (503, "Storage unavailable"),
}


class CountedApp(FastAPI):
    """A listener's application, which counts its answers, also those of its middleware and of Starlette's.

    Args:
        requests: counts them by method, route and status.
        head_as_get: HEAD, which load balancers like to ask, is answered and counted as GET; the server leaves the body out.
    """

    def __init__(self, requests: Counter[tuple[str, str, str]], *, head_as_get: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._requests, self._head_as_get = requests, head_as_get

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._head_as_get and scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}

        async def count(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                nowhere = "unauthenticated" if status == 401 else "unknown"
                method = scope["method"] if scope["method"] in METHODS else "other"
                self._requests[method, getattr(scope.get("route"), "path", nowhere), str(status)] += 1
            await send(message)

        await super().__call__(scope, receive, count)


def finish(app: FastAPI, *, other_routes: str = "") -> None:
    """Add error handling to a listener.

    Args:
        other_routes: hint for an unknown route.
    """

    def problem(status: int, title: str, detail: str, cure: str = "") -> JSONResponse:
        document = models.Problem(title=title, status=status, detail=detail, cure=cure)
        return JSONResponse(document.model_dump(), status, media_type="application/problem+json")

    @app.exception_handler(HonedError)
    def on_honed_error(request: Request, error: HonedError) -> JSONResponse:
        status, title = STATUS_OF.get(type(error), (500, "Internal error"))
        return problem(status, title, str(error), error.cure)

    @app.exception_handler(RequestValidationError)
    def on_invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        known, kind = _fields_of(request), request.headers.get("content-type", "")
        if known and isinstance(error.body, bytes | str) and not _JSON.match(kind):
            detail = f"the body is sent {f'as {kind}' if kind else 'without a type'}"
            return problem(422, "Invalid request", detail, "Send it as `Content-Type: application/json`.")
        detail, is_about_names = _explain(error.errors(), known)
        return problem(422, "Invalid request", detail, f"It takes {', '.join(known)}." if known and is_about_names else "")

    @app.exception_handler(HTTPException)
    def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        asked, cure = f"{request.method} {request.url.path}", ""
        methods = ", ".join(sorted(methods_of(app, request)))
        if error.status_code == 404:
            asked, cure = f"{asked} isn't a route of {request.url.netloc}", other_routes
        elif error.status_code == 405:
            asked, cure = f"{request.url.path} doesn't take {request.method}", f"It takes {methods}."
        answer = problem(error.status_code, str(error.detail), asked, cure)
        answer.headers.update(error.headers or {})
        if error.status_code == 405:  # Starlette lists only the first matching route's methods
            answer.headers["allow"] = methods
        return answer

    @app.exception_handler(Exception)
    def on_failure(request: Request, error: Exception) -> JSONResponse:
        log.exception("a request failed", path=request.url.path, error=str(error))
        return problem(500, "Internal error", "a bug, or a machine fault", "See `journalctl -u honed`.")


def _explain(errors: Sequence[Any], known: list[str]) -> tuple[str, bool]:
    """The first value's fault, and whether it is about what the body holds rather than about a value.

    A value that may be of several kinds has an error for each: those of the kind that it is count, else all.
    """
    name, is_of_body = _name_of(errors[0]), errors[0]["loc"][0] == "body"
    of_value = [error for error in errors if _name_of(error) == name]
    of_value = [error for error in of_value if not error["type"].endswith("_type")] or of_value
    first, *others = dict.fromkeys(sentence(error, known) for error in of_value)
    text = " or ".join((first, *(other.removeprefix("must be ") for other in others)))
    return f"{name or 'the body'} {text}", is_of_body and (not name or errors[0]["type"] in ("missing", "extra_forbidden"))


def _name_of(error: Any) -> str:
    """A value's name, without the part of a request that it is in, and without the kind that pydantic tried."""
    names = [str(part) for part in error["loc"][1:] if not _KIND.fullmatch(str(part))]
    return "" if error["type"] == "json_invalid" else ".".join(names)


def _fields_of(request: Request) -> list[str]:
    """Names of the fields of a route's body."""
    body = getattr(request.scope.get("route"), "body_field", None)
    kinds = () if body is None else (body.field_info.annotation, *get_args(body.field_info.annotation))
    return [name for kind in kinds for name in getattr(kind, "model_fields", ())]


def methods_of(app: FastAPI, request: Request) -> set[str]:
    """All methods of a path. If two templates match ({id} and {id}:cancel), the longer one counts."""
    fitting = [r for r in app.routes if isinstance(r, Route) and r.matches(request.scope)[0] is not Match.NONE]
    meant = max((route.path for route in fitting), key=len, default="")
    return {method for route in fitting if route.path == meant for method in route.methods or ()}
