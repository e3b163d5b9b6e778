"""The changing routes of the admin API.

Each change takes an `Idempotency-Key` (see replies.py), an optional `If-Match` (the registry's generation; 412 if it has
changed) and a reason. The answer is sent when the change is on disk and in the audit table. A request can't name a path to
load, only a version of the registry.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path
from pydantic import BaseModel
from pydantic.json_schema import SkipJsonSchema

from honed.daemon.api import models
from honed.daemon.api.access import Actor
from honed.daemon.api.replies import Replies, check_same, fingerprint
from honed.daemon.errors import RequestError, StoreError
from honed.daemon.service import Service
from honed.daemon.store.operations import Operation
from honed.daemon.store.store import Store
from honed.daemon.views.plain_json import finite

GENERATION = r'^(\*|(W/)?"?[0-9]{1,18}"?)$'

Name = Annotated[str, Path(min_length=1, max_length=200)]
Key = Annotated[
    str | SkipJsonSchema[None],
    Header(alias="Idempotency-Key", min_length=1, max_length=200, description="A fresh one for each change."),
]


def expected_generation(
    if_match: Annotated[
        str | SkipJsonSchema[None],
        Header(
            alias="If-Match", max_length=40, description="The registry's generation.", json_schema_extra={"pattern": GENERATION}
        ),
    ] = None,
) -> int | None:
    """The registry's generation known to the caller. Raises RequestError if it isn't a number."""
    if if_match is None or if_match.strip() == "*":
        return None
    text = if_match.strip().removeprefix("W/").strip('"')
    if not (text.isascii() and text.isdecimal() and len(text) <= 18):
        raise RequestError(
            f"If-Match takes the registry's generation, not {if_match!r}", cure="`honed drafters --json` shows the present one."
        )
    return int(text)


Generation = Annotated[int | None, Depends(expected_generation)]


class Changes:
    """Makes each change once, in order, under the lock."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._replies = Replies(service.monotonic)

    def operation(self, generation: int | None, key: str | None, asked: str, act: Callable[[], Operation]) -> dict[str, Any]:
        """Begin an operation, or return the one that this key began."""
        service = self._service
        with service.lock:
            operation = self._earlier(key, asked)
            if operation is None:
                service.drafters.check_generation(generation)
                operation = act()
                if not operation.is_planned:
                    service.operations.note_request(operation, asked)
        settle(service.store)
        with service.lock:
            view: dict[str, Any] = finite(operation.view())
            return view

    def done(self, generation: int | None, key: str | None, asked: str, act: Callable[[], Any]) -> Any:
        """Make a change that ends at once; `act` returns the answer."""
        service = self._service
        with service.lock:
            reply = self._earlier(key, asked)
            if reply is None:
                service.drafters.check_generation(generation)
                reply = act()
                self._replies.keep(key, asked, reply)
        settle(service.store)
        return reply

    def _earlier(self, key: str | None, asked: str) -> Any:
        """The earlier result for this key. Raises ReusedKeyError."""
        operation = self._service.operations.by_key(key)
        if operation is not None and key is not None:
            check_same(key, operation.request_hash, asked)
            return operation
        return self._replies.find(key, asked)


def add_changes(router: APIRouter, service: Service) -> None:
    """Add every route that changes something."""
    changes = Changes(service)
    lifecycle, recalibrations = service.lifecycle, service.recalibrations

    @router.post("/v1/recalibrations", status_code=202, response_model=models.OperationView)
    def recalibrate(body: models.RecalibrationRequest, generation: Generation, actor: Actor, key: Key = None) -> Any:
        """Train a candidate on captured samples, compare it, and swap it in if it is better."""
        arguments = body.model_dump()
        asked = fingerprint("recalibrate", arguments)
        stored: set[tuple[str, str]] = service.eligible.stored_workloads() if body.workloads else set()
        return changes.operation(
            generation, key, asked, lambda: recalibrations.recalibrate(**arguments, actor=actor, key=key, stored=stored)
        )

    @router.post("/v1/operations/{operation_id}:cancel", status_code=202, response_model=models.OperationView)
    def cancel(
        operation_id: Name, generation: Generation, actor: Actor, body: models.ReasonRequest | None = None, key: Key = None
    ) -> Any:
        """Cancel a recalibration, including its canary, or a running promotion. The active version and the other one stay."""
        reason = body.reason if body else ""

        def act() -> dict[str, Any]:
            view: dict[str, Any] = finite(recalibrations.cancel(operation_id, reason=reason, actor=actor).view())
            return view

        return changes.done(generation, key, fingerprint("cancel", operation_id, reason), act)

    @router.post("/v1/drafters/{version}:promote", status_code=202, response_model=models.OperationView)
    def promote(
        version: Name, generation: Generation, actor: Actor, body: models.PromoteRequest | None = None, key: Key = None
    ) -> Any:
        """Make a registry version active: swap it into the engines."""
        asked = body or models.PromoteRequest()
        service.drafters.read_ahead(version)
        arguments = {"reason": asked.reason, "force": asked.force, "dry_run": asked.dry_run}
        return changes.operation(
            generation,
            key,
            fingerprint("promote", version, arguments),
            lambda: lifecycle.promote(
                version, reason=asked.reason, actor=actor, force=asked.force, key=key, dry_run=asked.dry_run
            ),
        )

    @router.post("/v1/drafters:rollback", status_code=202, response_model=models.OperationView)
    def rollback(generation: Generation, actor: Actor, body: models.RollbackRequest | None = None, key: Key = None) -> Any:
        """Take the candidate or the version being promoted out, else the active one: go back to the previous whole version."""
        asked = body or models.RollbackRequest()
        if previous := service.drafters.alias("previous"):
            service.drafters.read_ahead(previous)
        return changes.operation(
            generation,
            key,
            fingerprint("rollback", asked.model_dump()),
            lambda: lifecycle.roll_back(
                version=asked.version,
                is_current=generation is not None,
                reason=asked.reason,
                actor=actor,
                key=key,
                dry_run=asked.dry_run,
            ),
        )

    @router.post("/v1/engines/{engine_id}:verify", status_code=202, response_model=models.OperationView)
    def verify(
        engine_id: Name, generation: Generation, actor: Actor, body: models.ReasonRequest | None = None, key: Key = None
    ) -> Any:
        """Compare the checksum of an engine's live weights with the registry's file."""
        reason = body.reason if body else ""
        return changes.operation(
            generation,
            key,
            fingerprint("verify", engine_id, reason),
            lambda: service.checksums.verify(engine_id, reason=reason, actor=actor, key=key),
        )

    def accept(
        generation: int | None, actor: str, key: str | None, action: str, body: BaseModel | None, act: Callable[[], object]
    ) -> Any:
        reason = str(getattr(body, "reason", ""))

        def run() -> dict[str, Any]:
            act()
            service.journal.audit(actor, action, "", reason)
            return {"status": "accepted", "generation": service.drafters.generation}

        return changes.done(generation, key, fingerprint(action, reason), run)

    @router.post("/v1/training:pause", status_code=202, response_model=models.Accepted)
    def pause(generation: Generation, actor: Actor, body: models.ReasonRequest | None = None, key: Key = None) -> Any:
        """Stop training between two micro-steps, until it is resumed."""
        return accept(generation, actor, key, "training.pause", body, lambda: service.pause_training(True))

    @router.post("/v1/training:resume", status_code=202, response_model=models.Accepted)
    def resume(generation: Generation, actor: Actor, body: models.ReasonRequest | None = None, key: Key = None) -> Any:
        """Resume training."""
        return accept(generation, actor, key, "training.resume", body, lambda: service.pause_training(False))

    @router.post("/v1/samples:purge", status_code=202, response_model=models.OperationView)
    def purge(generation: Generation, actor: Actor, body: models.ReasonRequest | None = None, key: Key = None) -> Any:
        """Delete every captured sample: in the engines' rings, the trainer's memory and on disk."""
        reason = body.reason if body else ""
        return changes.operation(
            generation,
            key,
            fingerprint("samples.purge", reason),
            lambda: service.purges.purge(reason=reason, actor=actor, key=key),
        )

    @router.put("/v1/overrides/{name}", response_model=models.OverrideView)
    def set_override(name: Name, body: models.OverrideRequest, generation: Generation, actor: Actor, key: Key = None) -> Any:
        """Replace a decision of the controller for a time: draft_tokens, capture_share or policy."""

        def act() -> dict[str, Any]:
            now_s = service.monotonic()
            most = service.engines.drafts_most(now_s)
            service.overrides.set(name, body.value, body.ttl_s, body.reason, actor, most)
            service.steer_soon()
            return next(one for one in service.overrides.listing() if one["name"] == name)

        return changes.done(generation, key, fingerprint("override.set", name, body.model_dump()), act)

    @router.delete("/v1/overrides/{name}", status_code=204)
    def clear_override(name: Name, generation: Generation, actor: Actor, key: Key = None) -> None:
        """Return a decision to the controller."""

        def act() -> bool:
            service.overrides.clear(name, "", actor)
            service.steer_soon()
            return True

        changes.done(generation, key, fingerprint("override.clear", name), act)


def settle(store: Store) -> None:
    """Wait until writes made under the lock are on disk. A disk error doesn't undo the change."""
    with contextlib.suppress(StoreError):
        store.write(lambda db: None, timeout_s=5.0)
