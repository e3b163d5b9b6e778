"""Errors as problem documents (RFC 9457), and the count of requests, for every listener."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, get_args

import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

from honed.daemon.api import models
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


def finish(app: FastAPI, requests: Counter[tuple[str, str, str]], *, other_routes: str = "") -> None:
    """Add error handling and counting to a listener.

    Args:
        requests: counts them by method, route and status.
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
        known = _fields_of(request)
        detail, is_about_names = _explain(error.errors(), known)
        return problem(422, "Invalid request", detail, f"It takes {', '.join(known)}." if known and is_about_names else "")

    @app.exception_handler(HTTPException)
    def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        asked, cure = f"{request.method} {request.url.path}", ""
        if error.status_code == 404:
            asked, cure = f"{asked} isn't a route of {request.url.netloc}", other_routes
        answer = problem(error.status_code, str(error.detail), asked, cure)
        answer.headers.update(error.headers or {})
        if error.status_code == 405:  # Starlette lists only the first matching route's methods
            answer.headers["allow"] = ", ".join(sorted(methods_of(app, request)))
        return answer

    @app.exception_handler(Exception)
    def on_failure(request: Request, error: Exception) -> JSONResponse:
        log.exception("a request failed", path=request.url.path, error=str(error))
        return problem(500, "Internal error", "a bug, or a machine fault", "See `journalctl -u honed`.")

    @app.middleware("http")
    async def count(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        route = request.scope.get("route")
        path = getattr(route, "path", "unknown")
        requests[request.method if request.method in METHODS else "other", path, str(response.status_code)] += 1
        return response


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
