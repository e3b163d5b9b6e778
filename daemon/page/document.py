"""Data of the status page as one JSON document: figures from the API's views, and the series for its plots.

Anyone who reaches the read-only listener can read it, so it holds figures and names but no free text of operators.
Making it reads a window's roll-ups, so it is made at most every CACHE_S seconds for all browsers together.
"""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from honed.daemon.page import weights
from honed.daemon.service import Service
from honed.daemon.store.rollups import POSITION_SUMS, SUMS, Counts
from honed.daemon.store.store import Store
from honed.daemon.views import views
from honed.daemon.views.findings import findings
from honed.daemon.views.plain_json import finite

CACHE_S = 2.0
MOST_WORKLOADS = 6
"""Most distinguishable lines; the rest is summed as "others"."""
MOST_POSITIONS = 24
MOST_ENGINES = 8
"""Most engines by name, connected ones first; sums are over all."""
OTHERS = "others"
ENGINE_FIELDS = (
    "engine_id",
    "connected",
    "model_name",
    "vllm_version",
    "honed_version",
    "num_spec_tokens",
    "drafter_version",
    "num_running",
    "num_waiting",
    "policy",
    "decide_us_p99",
    "log_us_p99",
    "lost_rounds",
    "draft_tokens_per_round",
    "tokens_per_s",
    "rounds",
)
STATUS_FIELDS = (
    "version",
    "uptime_s",
    "state",
    "generation",
    "acceptance",
    "events",
    "trainer",
    "training_paused",
    "drafters",
)

Document = dict[str, Any]


@dataclass(frozen=True)
class Window:
    """A past time span and its plot's resolution."""

    span_s: int
    step_s: int
    resolution_s: int
    """Resolution of its roll-ups."""


WINDOWS = {
    "5min": Window(300, 5, 1),
    "1h": Window(3600, 60, 60),
    "7d": Window(7 * 86400, 3600, 3600),
}


class PageDocuments:
    """The documents by window, remade when too old. Thread-safe."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.Lock()
        self._made: dict[str, tuple[float, bytes]] = {}

    def get(self, name: str) -> bytes:
        """The JSON text of a window. Raises StoreError."""
        # Held while making it, so that other threads wait for this document instead of making another.
        with self._lock:
            made_s, text = self._made.get(name, (-math.inf, b""))
            if self._service.monotonic() - made_s >= CACHE_S:
                text = msgspec.json.encode(finite(document(self._service, name)))
                self._made[name] = (self._service.monotonic(), text)
            return text


def document(service: Service, name: str) -> Document:
    """All data of the page. Raises StoreError."""
    window = kept_window(WINDOWS[name], service.store)
    until = int(service.clock()) // window.step_s * window.step_s + window.step_s
    times = list(range(until - window.span_s, until, window.step_s))
    status = views.status(service)
    everyone = sorted(status["engines"], key=lambda engine: not engine["connected"])
    engines = everyone[:MOST_ENGINES]
    since = times[0]
    believed = views.beliefs(service, [engine["engine_id"] for engine in engines])
    return {
        "t": service.clock(),
        "window": name,
        "step_s": window.step_s,
        "times": times,
        "status": {field: status[field] for field in STATUS_FIELDS} | {"store": {"bytes": status["store"]["bytes"]}},
        "findings": [{"level": one.level, "text": one.text} for one in findings(status)],
        "engines": [{field: engine[field] for field in ENGINE_FIELDS} for engine in engines],
        "engines_total": {
            "engines": len(everyone),
            "connected": sum(engine["connected"] for engine in everyone),
            "tokens_per_s": sum(engine["tokens_per_s"] for engine in everyone),
        },
        "operation": weights.progress(status["operation"]),
        "overrides": [{field: one[field] for field in ("name", "value", "ttl_s")} for one in status["overrides"]],
        "workloads": views.workloads(service, float(WINDOWS[name].span_s), window.resolution_s, believed),
        **series(service.store, window, times),
        "load": [load(service, engine_id, since, beliefs) for engine_id, beliefs in believed.items()],
        **weights.weights(service),
        "marks": marks(service.store, since),
    }


def kept_window(window: Window, store: Store) -> Window:
    """The window with a resolution that is kept for so long; if that is coarser than its steps, these are as long."""
    resolution_s = store.finest_kept(window.span_s, window.resolution_s)
    if resolution_s <= window.step_s:
        return replace(window, resolution_s=resolution_s)
    return Window(window.span_s + resolution_s, resolution_s, resolution_s)


def series(store: Store, window: Window, times: list[int]) -> Document:
    """Acceptance by workload, and by workload and position, a value for each time; null if nothing was verified."""
    rows = store.scan(
        f"""SELECT (bucket_s - ?1) / ?2 AS time, workload, {SUMS}, {POSITION_SUMS} FROM rollups
            WHERE resolution_s = ?3 AND bucket_s >= ?1 AND bucket_s < ?4 GROUP BY 1, 2""",
        (times[0], window.step_s, window.resolution_s, times[-1] + window.step_s),
    )
    cells: dict[str, dict[int, Counts]] = defaultdict(lambda: defaultdict(Counts))
    totals: dict[str, int] = defaultdict(int)
    for row in rows:
        cells[row["workload"]][row["time"]] = Counts.from_sums(row)
        totals[row["workload"]] += row["rounds"]
    merged = merge(cells, sorted(totals, key=lambda name: (-totals[name], name)))
    found = [
        {
            "workload": workload,
            "rounds": [points[i].rounds if i in points else 0 for i in range(len(times))],
            "length": [points[i].acceptance_length or None if i in points else None for i in range(len(times))],
            "draft_tokens": [points[i].draft_tokens_per_round or None if i in points else None for i in range(len(times))],
            "positions": by_position(points, len(times)),
            "by_position": mean_by_position(points),
        }
        for workload, points in merged.items()
    ]
    return {"acceptance": found}


def merge(cells: dict[str, dict[int, Counts]], names: list[str]) -> dict[str, dict[int, Counts]]:
    """Workloads with most rounds by name, all others as one."""
    most = MOST_WORKLOADS if len(names) <= MOST_WORKLOADS else MOST_WORKLOADS - 1
    merged = {name: cells[name] for name in names[:most]}
    for name in names[most:]:
        rest = merged.setdefault(OTHERS, defaultdict(Counts))
        for index, counts in cells[name].items():
            rest[index].add(counts)
    return merged


def by_position(points: dict[int, Counts], length: int) -> list[list[float | None]]:
    """P(position accepted | those before it accepted), positions × times."""
    width = min(MOST_POSITIONS, max((len(counts.tried) for counts in points.values()), default=0))
    table: list[list[float | None]] = [[None] * length for _ in range(width)]
    for index, counts in points.items():
        for position in range(min(width, len(counts.tried), len(counts.accepted))):
            if tried := int(counts.tried[position]):
                table[position][index] = round(int(counts.accepted[position]) / tried, 4)
    return table


def mean_by_position(points: dict[int, Counts]) -> list[float | None]:
    """The same over all times."""
    total = Counts()
    for counts in points.values():
        total.add(counts)
    pairs = zip(total.accepted.tolist(), total.tried.tolist(), strict=False)
    return [round(accepted / tried, 4) if tried else None for accepted, tried in pairs][:MOST_POSITIONS]


def load(service: Service, engine_id: str, since: float, beliefs: Document) -> Document:
    """Draft length against load: measured by slot, and the controller's choice by batch size."""
    with service.lock:
        slots = [
            (slot.t, round(slot.requests_per_step, 2), round(slot.draft_tokens_per_request, 3), slot.budget)
            for slot in service.load.slots(engine_id, since)
        ]
    step_time = beliefs.get("step_time") or {}
    return {
        "engine_id": engine_id,
        "slots": slots,
        "plan": [(p["num_requests"], p["draft_tokens_per_request"]) for p in beliefs.get("draft_tokens_by_batch") or []],
        "predicted_s": step_time.get("predicted_seconds"),
        "measured_s": step_time.get("measured_seconds"),
        "speedup": beliefs.get("speedup_estimate"),
    }


def marks(store: Store, since: float) -> list[Document]:
    """Changes of weights or decisions. Operators' reasons, which follow a colon, are removed."""
    rows = store.read("SELECT t, kind, text, engine_id FROM marks WHERE t >= ? ORDER BY id DESC LIMIT 100", (since,))
    return [row | {"text": row["text"].partition(":")[0]} for row in reversed(rows)]
