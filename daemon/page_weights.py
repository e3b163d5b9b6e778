"""The status page's part about weights: versions, what the gate said, the watch over a fresh one, and what is under way."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from honed.daemon.service import Service

MOST_VERSIONS = 8
PROGRESS = (
    "state", "samples", "sessions", "steps", "max_steps", "tokens", "loss", "train_seconds", "max_seconds", "elapsed_s",
    "preemptions", "gate", "version", "workloads",
)  # fmt: skip

Document = dict[str, Any]


def progress(operation: Document | None) -> Document | None:
    """The operation under way, without what its operator wrote."""
    if operation is None:
        return None
    fields = ("operation_id", "kind", "state", "stage", "created_unix_s")
    detail = {name: operation["detail"][name] for name in PROGRESS if name in operation["detail"]}
    return {field: operation[field] for field in fields} | {"detail": detail}


def weights(service: Service) -> Document:
    """The newest versions and those with a role, newest first; and the watch."""
    listing = service.drafters.listing()
    roles: dict[str, list[str]] = {}
    for role, version in listing["aliases"].items():
        if version:
            roles.setdefault(version, []).append(role)
    newest = sorted(listing["versions"], key=lambda one: -one["created_unix_s"])
    kept = newest[:MOST_VERSIONS]
    kept += [one for one in newest[MOST_VERSIONS:] if one["version"] in roles]
    with service.lock:
        outcomes = _outcomes(service)
        found = {"watch": _watch(service)}
    versions = [
        {
            "version": one["version"],
            "roles": roles.get(one["version"], []),
            "parent": one["parent"],
            "created_unix_s": one["created_unix_s"],
            "bytes": one["bytes"],
            "state": one["state"],
            "gate": (one["figures"] or {}).get("gate") or [],
            "watched": outcomes.get(one["version"], ""),
        }
        for one in kept
    ]
    return found | {"versions": versions}


def _outcomes(service: Service) -> dict[str, str]:
    """Version -> how its watch ended, or that it goes on."""
    found: dict[str, str] = {}
    for operation in service.operations.listing():
        version = operation.detail.get("version")
        if version and version not in found and operation.kind != "rollback":
            ended = str(operation.detail.get("watch", ""))
            if ended.startswith("rolled back"):  # what follows may be an operator's reason
                ended = "rolled back"
            found[version] = "under watch" if operation.stage == "watching" else ended
    return found


def _watch(service: Service) -> Document | None:
    """Evidence for and against the version under watch, in each engine, by workload; `bar` is what decides."""
    watch = service.lifecycle.watch
    if watch is None:
        return None
    settings = service.settings.watch_settings()
    engines = []
    for engine_id, one in sorted(watch.by_engine.items()):
        figures = one.figures()
        count = max(len(figures), 1)
        verdict = one.verdict
        engines.append(
            {
                "engine_id": engine_id,
                "decision": verdict.decision,
                "rounds": verdict.rounds,
                "max_rounds": settings.max_rounds,
                "text": verdict.text,
                "bar_roll_back": math.log10(count / settings.false_roll_back),
                "bar_keep": math.log10(count / settings.false_keep),
                "workloads": [{"workload": name} | row for name, row in figures.items()],
            }
        )
    return {"version": watch.version, "previous": watch.previous, "engines": engines}
