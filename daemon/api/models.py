"""What the admin API takes and answers. Requests refuse unknown fields and other types; answers may grow new ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from honed.daemon.views.engine_view import EngineView

Text = Annotated[str, Field(max_length=1000)]
Label = Annotated[str, Field(max_length=200)]


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ReasonRequest(Request):
    reason: Text = ""


class RecalibrationRequest(ReasonRequest):
    engine_id: Label = ""
    workloads: Annotated[list[Label], Field(max_length=100)] = []
    scope: Literal["", "kv-frozen", "full"] = ""
    max_seconds: Annotated[float, Field(ge=0, le=86400, allow_inf_nan=False)] = 0.0
    """0: as in the settings."""
    dry_run: bool = False


class PromoteRequest(ReasonRequest):
    force: bool = False
    """Also when no engine is connected to take it, it is active already or it failed before; and it isn't watched."""
    dry_run: bool = False
    """Only check whether it would be done."""


class RollbackRequest(ReasonRequest):
    dry_run: bool = False


class OverrideRequest(ReasonRequest):
    value: int | float | Label
    ttl_s: Annotated[float, Field(gt=0, le=30 * 86400, allow_inf_nan=False)]


class Health(BaseModel):
    status: str
    problems: list[str] = []


class Accepted(BaseModel):
    """A change that is done already."""

    status: str = "accepted"
    generation: int


class Acceptance(BaseModel):
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    acceptance_length: float
    acceptance_rate: float
    draft_tokens_per_round: float


class TrainerView(BaseModel):
    trainer_id: str
    device: str
    yields_to: list[str]
    """Engines, as patterns of their ids, whose work it waits for."""
    state: str
    operation_id: str
    samples: int
    samples_bytes: int
    spilled_bytes: int
    """Samples on disk."""
    lost_records: int
    """Samples that the ring overwrote before they were read, since the trainer started: HONED_RING_BYTES is too small."""
    sessions: int
    steps: int
    max_steps: int
    tokens: int
    loss: float
    train_seconds: float
    preemptions: int
    """In its present operation."""
    preemption_s_p50: float
    """Of the last 1000 since the daemon started, from work's arrival until the trainer had stopped; p99 as well."""
    preemption_s_p99: float
    preemption_computing_s_p99: float
    """Of what the trainer still computed in these, which is what they take from users."""
    preemption_delays_s: list[float]
    """Of the last 100 one by one, the latest last."""
    preemption_computing_s: list[float]
    """What the trainer computed at most in each of these: on cores that it shares, the rest it waited for one of them."""
    idle_ratio: float


class OperationView(BaseModel):
    operation_id: str
    kind: str
    state: str
    stage: str
    created_unix_s: float
    finished_unix_s: float | None
    reason: str
    actor: str
    detail: dict[str, Any]
    error: str


class OverrideView(BaseModel):
    name: str
    value: int | float | str
    until_unix_s: float
    ttl_s: float
    reason: str
    actor: str
    created_unix_s: float


class DriftAlarmView(BaseModel):
    """Drift that no recalibration has answered yet."""

    engine_id: str
    workload: str
    text: str
    failed_attempts: int
    due_in_s: float | None
    """0: as soon as nothing is in the way; none: it was given up."""
    hindrance: str
    """Why the latest attempt couldn't begin, or what it failed of."""


class StatusView(BaseModel):
    version: str
    daemon_id: str
    uptime_s: float
    state: str
    problems: list[str]
    generation: int
    engines: list[EngineView]
    runtime: dict[str, str]
    """The runtime directory, and the type of the filesystem that it is on."""
    trainer: TrainerView | None
    training_paused: bool
    drafters: dict[str, str | None]
    shared_registry: dict[str, int | float | str] | None
    """Traffic with `registry.url` since the daemon started, and its latest error; null when nothing is shared."""
    acceptance: dict[str, Acceptance]
    events: dict[str, int | float]
    store: dict[str, int | float | str]
    operation: OperationView | None
    canary: dict[str, Any] | None
    """The trial of a drafter version that is under way: who serves, the evidence so far."""
    drift_alarms: list[DriftAlarmView]
    overrides: list[OverrideView]


class WorkloadView(Acceptance):
    engine_id: str
    workload: str
    drafter_version: str
    window_s: float
    by_position: list[float]
    """P(draft j accepted | drafts before it accepted), from the rounds that verified it."""
    drafted_by_position: list[int]
    accepted_by_position: list[int]
    drift: dict[str, Any]


class TimelinePoint(BaseModel):
    t: int
    workload: str
    drafter_version: str
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    emitted_tokens: int
    draft_tokens_per_round: float


class Mark(BaseModel):
    t: float
    kind: str
    text: str
    engine_id: str


class Timeline(BaseModel):
    points: list[TimelinePoint]
    marks: list[Mark]


class Drafters(BaseModel):
    generation: int
    aliases: dict[str, str | None]
    versions: list[dict[str, Any]]


class CanaryRow(BaseModel):
    """A trial of a drafter version against another on live traffic."""

    operation_id: str
    kind: str
    """"canary": the new version was not active yet; "watch": it was."""
    old: str
    new: str
    began_unix_s: float
    ended_unix_s: float | None
    decision: str
    """"" while it goes on; better, worse, unproven, withdrawn or stopped."""
    text: str


class CanaryPoint(BaseModel):
    """Evidence after a pair of windows."""

    t: float
    pairs: int
    rounds: int
    workload: str
    """"": all traffic."""
    evidence_worse: float
    """log10 of the e-value against the new version."""
    evidence_better: float
    change: float
    """Estimated relative change of conditional acceptance."""


class CanaryView(CanaryRow):
    points: list[CanaryPoint]


class AuditRow(BaseModel):
    id: int
    t: float
    actor: str
    action: str
    subject: str
    reason: str
    outcome: str


class BatchRow(BaseModel):
    id: int
    engine_id: str
    boot_id: str
    seq: int
    received_unix_ns: int
    drafter_version: str
    rounds: int
    bytes: int


class Problem(BaseModel):
    """RFC 9457, and what to do about it."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    cure: str = ""
