"""The status page's part about weights: versions, gate results, the trial of a new version, the running operation."""

from __future__ import annotations

import math
from typing import Any

from honed.daemon.lifecycle.trial import Trial
from honed.daemon.service import Service
from honed.daemon.store.operations import Operations

MOST_VERSIONS = 8
PROGRESS = (
    "state",
    "samples",
    "sessions",
    "steps",
    "max_steps",
    "tokens",
    "loss",
    "train_seconds",
    "max_seconds",
    "elapsed_s",
    "preemptions",
    "gate",
    "version",
    "workloads",
)

Document = dict[str, Any]


def progress(operation: Document | None) -> Document | None:
    """The running operation without its operator's text."""
    if operation is None:
        return None
    fields = ("operation_id", "kind", "state", "stage", "created_unix_s")
    detail = {name: operation["detail"][name] for name in PROGRESS if name in operation["detail"]}
    return {field: operation[field] for field in fields} | {"detail": detail}


def weights(service: Service) -> Document:
    """The newest versions and those with a role, newest first; and the running trial."""
    listing = service.drafters.listing()
    roles: dict[str, list[str]] = {}
    for role, version in listing["aliases"].items():
        if version:
            roles.setdefault(version, []).append(role)
    newest = sorted(listing["versions"], key=lambda one: -one["created_unix_s"])
    kept = newest[:MOST_VERSIONS]
    kept += [one for one in newest[MOST_VERSIONS:] if one["version"] in roles]
    with service.lock:
        outcomes = _outcomes(service.operations)
        found = {"trial": _trial(service.rollout.trial)}
    versions = [
        {
            "version": one["version"],
            "roles": roles.get(one["version"], []),
            "parent": one["parent"],
            "created_unix_s": one["created_unix_s"],
            "bytes": one["bytes"],
            "state": one["state"],
            "gate": one["figures"]["gate"],
            "watched": outcomes.get(one["version"], ""),
        }
        for one in kept
    ]
    return found | {"versions": versions}


def _outcomes(operations: Operations) -> dict[str, str]:
    """Version -> result of its trial, or that it is running."""
    found: dict[str, str] = {}
    for operation in operations.listing():
        version = operation.detail.get("version")
        if version and version not in found and operation.kind != "rollback":
            ended = str(operation.detail.get("watch", ""))
            if ended.startswith("rolled back"):  # an operator's reason may follow
                ended = "rolled back"
            found[version] = "on trial" if operation.stage in ("watching", "canary") else ended
    return found


def _trial(trial: Trial | None) -> Document | None:
    """The version on trial: evidence for and against it by workload, in powers of ten; `bar_*` are the thresholds."""
    if trial is None:
        return None
    shown = trial.view()
    settings = trial.canary.settings
    fields = ("kind", "old", "new", "serving", "began_unix_s", "pairs", "rounds", "max_pairs", "text")
    workloads = [
        {
            "workload": name,
            "bar_worse": settings.log_bar("worse", number) / math.log(10.0),
            "bar_better": settings.log_bar("better", number) / math.log(10.0),
            **figures,
        }
        for number, (name, figures) in enumerate(shown["workloads"].items())
    ]
    return {field: shown[field] for field in fields} | {"workloads": workloads}
