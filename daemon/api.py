"""The admin API: what operators and the command line may see and change. See models.py for the documents.

Changes take an `Idempotency-Key` (the same key gives the same operation), an optional `If-Match` (the registry's
generation; 412 when it has moved on), a reason, and land in the audit table. Nothing loads a path that a request names:
only versions of the registry. Errors are problem documents (RFC 9457).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any, Literal

import structlog
from fastapi import Depends, FastAPI, Header, Path, Query, Response

from honed.adapt import wire
from honed.daemon import canary_tables, models, views
from honed.daemon.errors import ConflictError, RequestError, StoreError
from honed.daemon.lifecycle import Lifecycle
from honed.daemon.limits import LOCAL_HOSTS, Limits, TokenBucket
from honed.daemon.metrics import CONTENT_TYPE, render
from honed.daemon.operations import Operation
from honed.daemon.plain_json import finite
from honed.daemon.problems import finish
from honed.daemon.recalibrations import START_TRAINER
from honed.daemon.service import Service

log = structlog.get_logger("honed.api")

ACTOR = "operator"
PROBLEMS: dict[int | str, dict[str, Any]] = {
    code: {"model": models.Problem, "content": {"application/problem+json": {}}}
    for code in (404, 409, 412, 413, 421, 422, 429, 503)
}

Name = Annotated[str, Path(min_length=1, max_length=200)]
Key = Annotated[str | None, Header(alias="Idempotency-Key", min_length=1, max_length=200)]


def expected_generation(if_match: Annotated[str | None, Header(alias="If-Match", max_length=40)] = None) -> int | None:
    """The registry's generation that the caller has seen. Raises RequestError when that isn't a number."""
    if if_match is None or if_match.strip() == "*":
        return None
    text = if_match.strip().removeprefix("W/").strip('"')
    if not (text.isascii() and text.isdecimal()):
        raise RequestError(
            f"If-Match takes the registry's generation, not {if_match!r}", cure="`honed drafters --json` has the present one."
        )
    return int(text)


Generation = Annotated[int | None, Depends(expected_generation)]


def make_app(service: Service) -> FastAPI:
    """The whole API, for the unix socket."""
    settings = service.settings.http
    app = FastAPI(title="honed", version=service.version, responses=PROBLEMS, docs_url=None, redoc_url=None)
    add_health(app, service)
    add_reading(app, service)
    add_changes(app, service)
    finish(app, service, other_routes="`/openapi.json` describes all there is.")
    bucket = TokenBucket(settings.mutations_per_minute, service.monotonic)
    app.add_middleware(Limits, max_body_bytes=settings.max_body_bytes, bucket=bucket)
    return app


def make_read_only_app(service: Service) -> FastAPI:
    """/metrics, /healthz and /readyz, for the loopback listener."""
    app = FastAPI(title="honed", version=service.version, responses=PROBLEMS, docs_url=None, redoc_url=None, openapi_url=None)
    add_health(app, service)
    socket = service.settings.paths.admin_socket
    finish(
        app,
        service,
        other_routes="This is honed's port for metrics: /metrics, /healthz and /readyz. "
        f"The admin API is on the unix socket {socket}: leave --url out, or give --socket.",
    )
    app.add_middleware(Limits, max_body_bytes=1024, hosts=LOCAL_HOSTS)
    return app


def add_health(app: FastAPI, service: Service) -> None:
    @app.get("/healthz")
    def healthz(response: Response) -> models.Health:
        """Whether the process works: 503 when one of its threads has ended or hangs."""
        problems = service.problems
        response.status_code = 503 if problems else 200
        return models.Health(status="failing" if problems else "ok", problems=problems)

    @app.get("/readyz")
    def readyz(response: Response) -> models.Health:
        """Whether it is of use: also 503 while the database refuses."""
        problems = list(service.problems)
        if service.store.is_failing:
            problems.append(f"database: {service.store.last_error}")
        response.status_code = 503 if problems else 200
        return models.Health(status="not ready" if problems else "ready", problems=problems)

    @app.get("/metrics")
    def metrics() -> Response:
        return Response(render(service), media_type=CONTENT_TYPE)


def add_reading(app: FastAPI, service: Service) -> None:
    @app.get("/v1/status", response_model=models.StatusView)
    def status() -> Any:
        return views.status(service)

    @app.get("/v1/config")
    def config() -> dict[str, Any]:
        return service.settings.model_dump(mode="json")

    @app.get("/v1/engines", response_model=list[models.EngineView])
    def engines() -> Any:
        return views.engines(service)

    @app.get("/v1/engines/{engine_id}/beliefs")
    def beliefs(engine_id: Name) -> dict[str, Any]:
        with service.lock:
            engine = service.engines.get(engine_id)
            found: dict[str, Any] = finite(service.steering.beliefs(engine))
            return found

    @app.get("/v1/workloads", response_model=list[models.WorkloadView])
    def workloads(window_s: Annotated[float, Query(ge=0, le=1e9, allow_inf_nan=False)] = 300.0) -> Any:
        return views.workloads(service, window_s)

    @app.get("/v1/timeline", response_model=models.Timeline)
    def timeline(
        resolution: Literal["1s", "1min", "1h"] = "1min",
        since: Annotated[float | None, Query(ge=0, le=1e12, allow_inf_nan=False)] = None,
        workload: models.Label = "",
    ) -> Any:
        span = 600 * views.RESOLUTIONS[resolution]
        return views.timeline(service, resolution, service.clock() - span if since is None else since, workload)

    @app.get("/v1/drafters", response_model=models.Drafters)
    def drafters() -> Any:
        return finite(service.drafters.listing())

    @app.get("/v1/operations", response_model=list[models.OperationView])
    def operations() -> Any:
        with service.lock:
            return [finite(operation.view()) for operation in service.operations.listing()]

    @app.get("/v1/operations/{operation_id}", response_model=models.OperationView)
    def operation(operation_id: Name) -> Any:
        with service.lock:
            return finite(service.operations.get(operation_id).view())

    @app.get("/v1/canaries", response_model=list[models.CanaryRow])
    def canaries(limit: Annotated[int, Query(ge=1, le=1000)] = 50) -> Any:
        return finite(canary_tables.listing(service.store, limit))

    @app.get("/v1/canaries/{operation_id}", response_model=models.CanaryView)
    def canary(operation_id: Name) -> Any:
        return finite(views.canary(service, operation_id))

    @app.get("/v1/overrides", response_model=list[models.OverrideView])
    def overrides() -> Any:
        with service.lock:
            return service.overrides.listing()

    @app.get("/v1/audit", response_model=list[models.AuditRow])
    def audit(limit: Annotated[int, Query(ge=1, le=10_000)] = 200) -> Any:
        return service.store.read("SELECT * FROM audit ORDER BY id DESC LIMIT ?", (limit,))

    @app.get("/v1/events", response_model=list[models.EventRow])
    def events(
        after: Annotated[int, Query(ge=0, le=2**62)] = 0, limit: Annotated[int, Query(ge=1, le=10_000)] = 1000
    ) -> Any:
        return service.store.read(
            "SELECT id, engine_id, boot_id, seq, received_unix_ns, drafter_version, rounds, bytes FROM batches "
            "WHERE id > ? ORDER BY id LIMIT ?",
            (after, limit),
        )


def add_changes(app: FastAPI, service: Service) -> None:
    lifecycle: Lifecycle = service.lifecycle

    def change(generation: int | None, key: str | None, act: Callable[[], Operation]) -> dict[str, Any]:
        """Run `act` under the lock unless this key was seen; answer when the operation is on disk, if the disk works."""
        with service.lock:
            operation = service.operations.by_key(key)
            if operation is None:
                service.drafters.check_generation(generation)
                operation = act()
        settle(service)
        with service.lock:
            view: dict[str, Any] = finite(operation.view())
            return view

    @app.post("/v1/recalibrations", status_code=202, response_model=models.OperationView)
    def recalibrate(body: models.RecalibrationRequest, generation: Generation, key: Key = None) -> Any:
        arguments = body.model_dump()
        return change(generation, key, lambda: service.recalibrations.recalibrate(**arguments, actor=ACTOR, key=key))

    @app.post("/v1/operations/{operation_id}:cancel", status_code=202, response_model=models.OperationView)
    def cancel(operation_id: Name, generation: Generation, body: models.ReasonRequest | None = None) -> Any:
        reason = body.reason if body else ""
        return change(generation, None, lambda: service.recalibrations.cancel(operation_id, reason=reason, actor=ACTOR))

    @app.post("/v1/drafters/{version}:promote", status_code=202, response_model=models.OperationView)
    def promote(
        version: Name, generation: Generation, body: models.PromoteRequest | None = None, key: Key = None
    ) -> Any:
        asked = body or models.PromoteRequest()
        return change(
            generation,
            key,
            lambda: lifecycle.promote(version, reason=asked.reason, actor=ACTOR, force=asked.force, key=key),
        )

    @app.post("/v1/drafters:rollback", status_code=202, response_model=models.OperationView)
    def rollback(generation: Generation, body: models.ReasonRequest | None = None, key: Key = None) -> Any:
        reason = body.reason if body else ""
        return change(generation, key, lambda: lifecycle.roll_back(reason=reason, actor=ACTOR, key=key))

    @app.post("/v1/engines/{engine_id}:verify", status_code=202, response_model=models.OperationView)
    def verify(engine_id: Name, generation: Generation, body: models.ReasonRequest | None = None, key: Key = None) -> Any:
        reason = body.reason if body else ""
        return change(generation, key, lambda: service.checksums.verify(engine_id, reason=reason, actor=ACTOR, key=key))

    def done(generation: int | None, action: str, reason: str, act: Callable[[], object]) -> dict[str, Any]:
        """A change that is over when it is made."""
        with service.lock:
            service.drafters.check_generation(generation)
            act()
            service.journal.audit(ACTOR, action, "", reason)
            current = service.drafters.generation
        settle(service)
        return {"status": "accepted", "generation": current}

    @app.post("/v1/training:pause", status_code=202, response_model=models.Accepted)
    def pause(generation: Generation, body: models.ReasonRequest | None = None) -> Any:
        return done(generation, "training.pause", body.reason if body else "", lambda: service.trainer.pause(True))

    @app.post("/v1/training:resume", status_code=202, response_model=models.Accepted)
    def resume(generation: Generation, body: models.ReasonRequest | None = None) -> Any:
        return done(generation, "training.resume", body.reason if body else "", lambda: service.trainer.pause(False))

    @app.post("/v1/samples:purge", status_code=202, response_model=models.Accepted)
    def purge(generation: Generation, body: models.ReasonRequest | None = None) -> Any:
        if not service.trainer.is_connected:
            raise ConflictError("no trainer is connected: nobody holds samples", cure=START_TRAINER)
        tell = service.trainer.tell
        return done(generation, "samples.purge", body.reason if body else "", lambda: tell(wire.Purge()))

    @app.put("/v1/overrides/{name}", response_model=models.OverrideView)
    def set_override(name: Name, body: models.OverrideRequest, generation: Generation) -> Any:
        with service.lock:
            service.drafters.check_generation(generation)
            now_s = service.monotonic()
            most = service.engines.drafts_most(now_s)
            service.overrides.set(name, body.value, body.ttl_s, body.reason, ACTOR, most)
            service.steer(now_s)
            made = next(o for o in service.overrides.listing() if o["name"] == name)
        settle(service)
        return made

    @app.delete("/v1/overrides/{name}", status_code=204)
    def clear_override(name: Name, generation: Generation) -> None:
        with service.lock:
            service.drafters.check_generation(generation)
            service.overrides.clear(name, "", ACTOR)
            service.steer(service.monotonic())
        settle(service)


def settle(service: Service) -> None:
    """Wait until what was written under the lock is on disk. A disk that refuses doesn't undo what was decided."""
    with contextlib.suppress(StoreError):
        service.store.write(lambda db: None, timeout_s=5.0)
