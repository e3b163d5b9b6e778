"""The admin API for operators and the command line. See models.py for the documents.

This file has the applications and the reading routes; changes.py has the changing routes; access.py has the rights. Errors are
problem documents (RFC 9457).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import structlog
from fastapi import APIRouter, Depends, FastAPI, Query, Response
from fastapi.responses import PlainTextResponse

from honed.daemon.api import models
from honed.daemon.api.access import Authenticate, needs
from honed.daemon.api.changes import Name, add_changes
from honed.daemon.api.follow import add_follow
from honed.daemon.api.limits import LOCAL_HOSTS, Limits, TokenBucket
from honed.daemon.api.passwords import Passwords
from honed.daemon.api.problems import CountedApp, finish
from honed.daemon.api.queries import only_known_parameters
from honed.daemon.metrics.render import CONTENT_TYPE, Scrapes
from honed.daemon.page.page import add_page
from honed.daemon.service import Service
from honed.daemon.settings.listen import check_address
from honed.daemon.settings.tokens import Tokens
from honed.daemon.settings.web_config import WebConfigFile
from honed.daemon.store import canary_tables
from honed.daemon.views import views
from honed.daemon.views.engine_view import EngineView
from honed.daemon.views.plain_json import finite
from honed.recalib.registry.shared import without_credentials

log = structlog.get_logger("honed.api")

MAX_BODY_BYTES = 64 << 10
"""Longest body of a request."""
PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": models.Problem, "content": {"application/problem+json": {}}}
    for code in (400, 401, 403, 404, 409, 412, 413, 421, 422, 429, 503)
}


def make_app(service: Service, tokens: Tokens | None = None) -> FastAPI:
    """The whole API.

    Args:
        tokens: tokens for TCP; None for the unix socket, whose file permissions decide.
    """
    settings = service.settings.http
    about: dict[str, Any] = {"title": "honed", "version": service.version, "responses": PROBLEMS}
    app = CountedApp(service.requests, **about, docs_url=None, redoc_url=None, redirect_slashes=False)
    known = Depends(only_known_parameters)
    reading = APIRouter(dependencies=[needs("read"), known])
    changing = APIRouter(dependencies=[needs("admin"), known])
    add_health(reading, service)
    add_reading(reading, service)
    add_follow(reading, service.store, service.is_ending)
    add_changes(changing, service)
    app.include_router(reading)
    app.include_router(changing)
    finish(app, other_routes="`/openapi.json` describes all routes.")
    bucket = TokenBucket(settings.mutations_per_minute, service.monotonic)
    hosts = _names_of(settings.admin_listen) if tokens is not None else frozenset[str]()
    app.add_middleware(Limits, max_body_bytes=MAX_BODY_BYTES, bucket=bucket, hosts=hosts)

    # The last added runs first, so unauthenticated requests use up no rate.
    app.add_middleware(Authenticate, tokens=tokens)
    return app


def make_read_only_app(service: Service, web_config: WebConfigFile | None = None, *, is_remote: bool = False) -> FastAPI:
    """The status page, /metrics, /healthz and /readyz.

    Args:
        web_config: users with their passwords; None: everybody may read.
        is_remote: the listener isn't on loopback, so it may have any name.
    """
    about: dict[str, Any] = {"title": "honed", "version": service.version, "responses": PROBLEMS}
    app = CountedApp(service.requests, head_as_get=True, **about, docs_url=None, redoc_url=None, openapi_url=None)
    router = APIRouter()
    add_health(router, service)
    app.include_router(router)
    add_page(app, service)
    socket = service.settings.paths.admin_socket
    finish(
        app,
        other_routes="This is honed's port for metrics: /metrics, /healthz, /readyz, and a status page at /. "
        f"The admin API is on the unix socket {socket}: leave --url out, or give --socket.",
    )
    app.add_middleware(
        Limits, max_body_bytes=1024, hosts=frozenset() if is_remote else _names_of(service.settings.http.metrics_listen)
    )
    if web_config is not None:
        app.add_middleware(Passwords, file=web_config)
    return app


def _names_of(address: str) -> frozenset[str]:
    """Names that a listener on loopback answers to."""
    return LOCAL_HOSTS | {check_address(address)[0]} if address else LOCAL_HOSTS


def add_health(app: APIRouter, service: Service) -> None:
    scrapes = Scrapes(service)

    @app.get("/healthz")
    def healthz(response: Response) -> models.Health:
        """Liveness: 503 if a thread has ended or hangs."""
        problems = service.problems
        response.status_code = 503 if problems else 200
        return models.Health(status="failing" if problems else "ok", problems=problems)

    @app.get("/readyz")
    def readyz(response: Response) -> models.Health:
        """Readiness: also 503 while the database refuses writes."""
        problems = list(service.problems)
        if service.store.is_failing:
            problems.append(f"database: {service.store.last_error}")
        response.status_code = 503 if problems else 200
        return models.Health(status="not ready" if problems else "ready", problems=problems)

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(scrapes.get(), media_type=CONTENT_TYPE)


def add_reading(app: APIRouter, service: Service) -> None:
    @app.get("/v1/status", response_model=models.StatusView)
    def status() -> Any:
        """Overview of the service."""
        return views.status(service)

    @app.get("/v1/config")
    def config() -> dict[str, Any]:
        """The settings in force, without the credentials in `registry.url`."""
        found = service.settings.model_dump(mode="json")
        found["registry"]["url"] = without_credentials(found["registry"]["url"])
        return found

    @app.get("/v1/engines", response_model=list[EngineView])
    def engines() -> Any:
        """Engines attached since the daemon started, without those that were away for a day."""
        return views.engines(service)

    @app.get("/v1/engines/{engine_id}/beliefs")
    def beliefs(engine_id: Name) -> dict[str, Any]:
        """The controller's estimates for an engine, and the resulting draft lengths."""
        with service.lock:
            service.engines.get(engine_id)  # raises UnknownError
        found: dict[str, Any] = finite(views.beliefs(service, [engine_id])[engine_id])
        return found

    @app.get("/v1/workloads", response_model=list[models.WorkloadView])
    def workloads(window_s: Annotated[float, Query(ge=0, le=1e9, allow_inf_nan=False)] = 300.0) -> Any:
        """Acceptance by engine, workload and drafter version; `window_s` 0: all time."""
        return views.workloads(service, window_s)

    @app.get("/v1/timeline", response_model=models.Timeline)
    def timeline(
        resolution: Literal["1s", "1min", "1h"] = "1min",
        since: Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False)] = None,
        workload: models.Label = "",
    ) -> Any:
        """Sums over time, with marks: swaps, drift, overrides. At most 20,000 points, the latest; they begin at `since`."""
        span = 600 * views.RESOLUTIONS[resolution]
        now = service.clock()
        return views.timeline(service.store, resolution, now - span if since is None else since, now, workload)

    @app.get("/v1/drafters", response_model=models.Drafters)
    def drafters() -> Any:
        """Versions in the registry, and the active one."""
        return finite(service.drafters.listing())

    @app.get("/v1/operations", response_model=list[models.OperationView])
    def operations() -> Any:
        """Recalibrations, promotions, roll-backs; newest first."""
        with service.lock:
            return [finite(operation.view()) for operation in service.operations.listing()]

    @app.get("/v1/operations/{operation_id}", response_model=models.OperationView)
    def operation(operation_id: Name) -> Any:
        """One operation in full."""
        with service.lock:
            return finite(service.operations.get(operation_id).view())

    @app.get("/v1/canaries", response_model=list[models.CanaryRow])
    def canaries(limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> Any:
        """Trials of two drafter versions in turns on live traffic; newest first."""
        return finite(canary_tables.listing(service.store, limit))

    @app.get("/v1/canaries/{operation_id}", response_model=models.CanaryView)
    def canary(operation_id: Name) -> Any:
        """One trial, with its evidence over time."""
        return finite(views.canary(service.store, operation_id))

    @app.get("/v1/overrides", response_model=list[models.OverrideView])
    def overrides() -> Any:
        """Overrides in force."""
        with service.lock:
            return service.overrides.listing()

    @app.get("/v1/audit", response_model=list[models.AuditRow])
    def audit(limit: Annotated[int, Query(ge=1, le=10_000)] = 200) -> Any:
        """Changes and who made them, newest first."""
        return service.store.read("SELECT * FROM audit ORDER BY id DESC LIMIT ?", (limit,))

    @app.get("/v1/batches", response_model=list[models.BatchRow])
    def batches(after: Annotated[int, Query(ge=0, le=2**62)] = 0, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000) -> Any:
        """Stored batches after a number, oldest first; poll it as a stream."""
        return service.store.read(
            "SELECT id, engine_id, boot_id, seq, received_unix_ns, drafter_version, rounds, bytes FROM batches "
            "WHERE id > ? ORDER BY id LIMIT ?",
            (after, limit),
        )
