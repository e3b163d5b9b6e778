"""The daemon's live state and stored sums as documents for the API. Only reads."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import numpy as np

from honed.daemon.errors import UnknownError, there_are
from honed.daemon.service import Service
from honed.daemon.store import canary_tables
from honed.daemon.store.rollups import POSITION_SUMS, SUMS, Counts
from honed.daemon.store.store import Store
from honed.daemon.views.engine_view import age_s, engine_view

RECENT_S = 60
RATE_S = 10
MAX_POINTS = 20_000
RESOLUTIONS = {"1s": 1, "1min": 60, "1h": 3600}


def acceptance(counts: Counts) -> dict[str, Any]:
    return {
        "rounds": counts.rounds,
        "draft_tokens": counts.draft_tokens,
        "accepted_tokens": counts.accepted_tokens,
        "delivered_tokens": counts.delivered_tokens,
        "acceptance_length": counts.acceptance_length,
        "tokens_per_round": counts.tokens_per_round,
        "acceptance_rate": counts.acceptance_rate,
        "draft_tokens_per_round": counts.draft_tokens_per_round,
    }


def status(service: Service) -> dict[str, Any]:
    """Overview of the service."""
    recent = recent_by_engine(service.store, service.clock())
    last_minute = Counts()
    for counts, _ in recent.values():
        last_minute.add(counts)
    total = total_counts(service.store)
    faults = service.drafters.faults()
    oldest_job_s, oldest_job = service.oldest_job() or (0.0, "")
    rollup_bytes = service.store.rollup_bytes
    names = {seconds: name for name, seconds in RESOLUTIONS.items()}
    cuts = {names[resolution]: back_s for resolution, back_s in service.store.cuts_s().items()}
    with service.lock:
        problems = service.problems
        operation = service.rollout.current
        figures, now_s = service.ingest.figures, service.monotonic()
        return {
            "version": service.version,
            "daemon_id": service.daemon_id,
            "uptime_s": now_s - service.started_s,
            "state": "degraded" if problems or service.store.is_failing else "ok",
            "problems": problems,
            "generation": service.drafters.generation,
            "engines": engines(service, recent),
            "runtime": {"dir": str(service.settings.paths.runtime_dir), "filesystem": service.runtime_filesystem},
            "trainer": service.trainer.view(),
            "training_paused": service.trainer.is_paused,
            "recalibrates": service.settings.recalibration.automatic,
            "drafters": {n: v for n, v in service.drafters.aliases().items() if n != "floor"},
            "drafter_problems": faults,
            "verdict_problem": service.rollout.due.problem if service.rollout.due is not None else "",
            "web_config_problem": service.web_config.fault if service.web_config is not None else "",
            "shared_registry": service.sharing.view(),
            "acceptance": {"last_minute": acceptance(last_minute), "total": acceptance(total)},
            "events": {
                "received_rounds": figures.rounds,
                "lost_rounds": sum(e.boot.lost.get("lost_rounds", 0) for e in service.engines.by_id.values()),
                "loss_age_s": age_s(max((e.boot.lost_at_s for e in service.engines.by_id.values()), default=-np.inf), now_s),
                "batches": figures.batches,
                "lag_s": figures.lag_s,
                "batch_age_s": age_s(figures.last_batch_unix_s, service.clock()),
                "rejected_frames": sum(figures.rejected.values()),
                "rejected_age_s": age_s(figures.rejected_at_s, now_s),
                "duplicate_batches": figures.duplicates,
                "pooled_labels": service.ingest.workloads.num_pooled,
                "pooled_rounds": service.live.pooled_rounds,
                "queued_batches": service.store.queued_batches,
            },
            "store": {
                "bytes": service.store.size_bytes,
                "rollup_bytes": rollup_bytes,
                "errors": service.store.errors,
                "last_error": service.store.last_error,
                "error_age_s": age_s(service.store.failed_at_s, now_s),
            },
            "background": {"oldest_job_s": oldest_job_s, "oldest_job": oldest_job},
            "log": {
                "errors": service.log_stream.errors,
                "last_error": service.log_stream.last_error,
                "error_age_s": age_s(service.log_stream.failed_at_s, now_s),
            },
            "cut_sums": cuts,
            "operation": operation.view() if operation is not None else None,
            "canary": trial.view() if (trial := service.rollout.trial) is not None else None,
            "drift_alarms": service.recalibrations.alarms.view(now_s),
            "overrides": service.overrides.listing(),
        }


def engines(service: Service, recent: dict[str, tuple[Counts, float]] | None = None) -> list[dict[str, Any]]:
    """All engines seen since the daemon started, without those that were away for a day."""
    found = recent if recent is not None else recent_by_engine(service.store, service.clock())
    with service.lock:
        now_s = service.monotonic()
        documents = []
        known, active = service.engines.by_id.values(), service.drafters.active
        is_served = any(
            service.engines.is_connected(one, now_s) and service.drafters.is_for(active, one.hello) for one in known if active
        )
        for engine in known:
            counts, tokens_per_s = found.get(engine.engine_id, (Counts(), 0.0))
            is_connected = service.engines.is_connected(engine, now_s)
            hint = service.drafters.hint(engine.boot.own_version, engine.live_version, engine.hello, is_active_served=is_served)
            documents.append(asdict(engine_view(engine, now_s, is_connected, counts, tokens_per_s, hint)))
        return documents


def recent_by_engine(store: Store, now_unix_s: float) -> dict[str, tuple[Counts, float]]:
    """Each engine's rounds of the last minute, without positions, and its recent tokens per second.

    Where sums by second are kept for less than that, they are those since the full minute or hour before.
    """
    now, resolution = int(now_unix_s), store.finest_kept(RECENT_S, 1)
    since = (now - RECENT_S) // resolution * resolution
    # The present second isn't over; the last one may not be committed yet.
    rated = range(now - RATE_S - 1, now - 1) if resolution == 1 else range(since, now)
    found: dict[str, tuple[Counts, float]] = {}
    delivered: dict[str, int] = defaultdict(int)
    rows = store.read(
        f"""SELECT engine_id, bucket_s, {SUMS} FROM rollups WHERE resolution_s = ? AND bucket_s BETWEEN ? AND ?
            GROUP BY bucket_s, engine_id""",
        (resolution, since, now),
    )
    for row in rows:
        counts, _ = found.setdefault(row["engine_id"], (Counts(), 0.0))
        counts.add(Counts.from_sums(row))
        if row["bucket_s"] in rated:
            delivered[row["engine_id"]] += row["delivered_tokens"]
    return {engine_id: (counts, delivered[engine_id] / len(rated)) for engine_id, (counts, _) in found.items()}


def total_counts(store: Store) -> Counts:
    """All rounds ever stored, without positions."""
    (row,) = store.read(f"SELECT {SUMS} FROM boots")
    return Counts.from_sums(row)


def beliefs(service: Service, engine_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The estimates of these engines' controllers; {} without one. Made outside the lock, since events wait for it."""
    with service.lock:
        engines = {name: service.engines.by_id.get(name) for name in engine_ids}
        controllers = {name: service.steering.controller(one) if one is not None else None for name, one in engines.items()}
    return {name: dict(one.beliefs()) if one is not None else {} for name, one in controllers.items()}


def workloads(
    service: Service, window_s: float, resolution_s: int = 0, believed: dict[str, dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Sums by engine, workload and drafter version over the last `window_s` seconds (0: all time).

    Args:
        resolution_s: of the roll-ups to read; 0: one that fits the window and is kept for that long.
        believed: a result of `beliefs`, if available.
    """
    finest = 1 if 0 < window_s <= 600 else 60 if 0 < window_s <= 86400 else 3600
    resolution = resolution_s or service.store.finest_kept(window_s or math.inf, finest)
    now = int(service.clock())
    since, until = (int(now - window_s) // resolution * resolution, now) if window_s else (0, 1 << 62)
    rows = service.store.scan(
        f"""SELECT engine_id, workload, drafter_version, {SUMS}, {POSITION_SUMS} FROM rollups
            WHERE resolution_s = ? AND bucket_s BETWEEN ? AND ? GROUP BY 1, 2, 3""",
        (resolution, since, until),
    )
    sums = {(row["engine_id"], row["workload"], row["drafter_version"]): Counts.from_sums(row) for row in rows}
    if believed is None:
        believed = beliefs(service, list(service.engines.by_id))
    return [
        {
            "engine_id": engine_id,
            "workload": workload,
            "drafter_version": version,
            "window_s": window_s,
            **acceptance(counts),
            "by_position": ratio(counts.accepted, counts.tried),
            "drafted_by_position": counts.drafted.tolist(),
            "accepted_by_position": counts.accepted.tolist(),
            "drift": drift_of(believed.get(engine_id, {}), workload),
        }
        for (engine_id, workload, version), counts in sorted(sums.items())
    ]


def ratio(part: np.ndarray[Any, Any], whole: np.ndarray[Any, Any]) -> list[float]:
    """part / whole; 0 where whole is 0."""
    size = min(len(part), len(whole))
    return [float(part[i] / whole[i]) if whole[i] else 0.0 for i in range(size)]


def drift_of(beliefs: dict[str, Any], workload: str) -> dict[str, Any]:
    """The controller's view of a workload's drift."""
    drift = (beliefs.get("workloads") or {}).get(workload, {}).get("drift")
    return drift if isinstance(drift, dict) else {"state": str(drift or "unknown"), "evidence": 0.0}


def timeline(store: Store, resolution: str, since: float, now: float, workload: str) -> dict[str, Any]:
    """Points of one resolution between two moments, oldest first, with the marks.

    A point is of a step, a workload and a version. There are `MAX_POINTS` at most, of whole steps; they begin at `since`.
    """
    step_s = RESOLUTIONS[resolution]
    begins_s = max(int(since), int(now) - MAX_POINTS * step_s)
    scanned = store.scan(
        """SELECT bucket_s AS t, workload, drafter_version, sum(rounds) AS rounds, sum(draft_tokens) AS draft_tokens,
             sum(accepted_tokens) AS accepted_tokens, sum(delivered_tokens) AS delivered_tokens
           FROM rollups WHERE resolution_s = ? AND bucket_s BETWEEN ? AND ? AND (? = '' OR workload = ?)
           GROUP BY 1, 2, 3 ORDER BY 1 DESC LIMIT ?""",
        (step_s, begins_s, int(now), workload, workload, MAX_POINTS + 1),
    )
    rows = list(scanned)
    if len(rows) > MAX_POINTS:  # of the oldest step some are missing
        begins_s = rows[-1]["t"] + step_s
        rows = [row for row in rows if row["t"] >= begins_s]
    for row in rows:
        row["draft_tokens_per_round"] = row["draft_tokens"] / row["rounds"] if row["rounds"] else 0.0
    marks = store.read("SELECT t, kind, text, engine_id FROM marks WHERE t >= ? ORDER BY id DESC LIMIT 1000", (since,))
    return {"since": begins_s, "points": rows[::-1], "marks": marks[::-1]}


def canary(store: Store, operation_id: str) -> dict[str, Any]:
    """A trial and its evidence over time. Raises UnknownError."""
    rows = canary_tables.listing(store, 1000)
    for row in rows:
        if row["operation_id"] == operation_id:
            return row | {"points": canary_tables.points(store, operation_id)}
    why = f"no trial {operation_id!r}; {there_are(row['operation_id'] for row in rows)}"
    raise UnknownError(why, cure="`honed canary` lists them.")
