"""Errors as problem documents (RFC 9457), and the count of requests, for every listener."""

from __future__ import annotations

from collections import Counter
from typing import Any

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

log = structlog.get_logger("honed.api")

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
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return problem(422, "Invalid request", f"{where}: {first['msg']}")

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


def methods_of(app: FastAPI, request: Request) -> set[str]:
    """All methods of a path. If two templates match ({id} and {id}:cancel), the longer one counts."""
    fitting = [r for r in app.routes if isinstance(r, Route) and r.matches(request.scope)[0] is not Match.NONE]
    meant = max((route.path for route in fitting), key=len, default="")
    return {method for route in fitting if route.path == meant for method in route.methods or ()}
