"""Requests and answers of the admin API. Requests refuse unknown fields and wrong types; answers may get new fields."""

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
    """0: from the settings."""
    dry_run: bool = False


class PromoteRequest(ReasonRequest):
    force: bool = False
    """Promote even if no engine is connected, it is active already or it failed before; without a trial."""
    dry_run: bool = False
    """Only check whether it would succeed."""


class RollbackRequest(ReasonRequest):
    version: Label = ""
    """The one that is to go; empty: the candidate, the one being promoted or else the active one. Needed within a minute after
    another one went, unless If-Match is given."""
    dry_run: bool = False


class OverrideRequest(ReasonRequest):
    value: Annotated[int, Field(ge=-(2**31), lt=2**31)] | Annotated[float, Field(allow_inf_nan=False)] | Label
    ttl_s: Annotated[float, Field(gt=0, le=30 * 86400, allow_inf_nan=False)]


class Health(BaseModel):
    status: str
    problems: list[str] = []


class Accepted(BaseModel):
    """A completed change."""

    status: str = "accepted"
    generation: int


class Acceptance(BaseModel):
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    delivered_tokens: int
    """Tokens of all decode rounds up to their requests' ends."""
    acceptance_length: float
    """vLLM's figure: 1 + accepted_tokens / rounds, tokens past a request's end included."""
    tokens_per_round: float
    """Tokens delivered per round with drafts, up to the requests' ends."""
    acceptance_rate: float
    draft_tokens_per_round: float


class TrainerView(BaseModel):
    trainer_id: str
    device: str
    yields_to: list[str]
    """Id patterns of the engines that it yields to."""
    state: str
    operation_id: str
    samples: int
    samples_bytes: int
    spilled_bytes: int
    """Samples on disk."""
    lost_records: int
    """Samples overwritten in the ring before being read, since the trainer's start: HONED_RING_BYTES is too small."""
    defective_rings: int
    """Sample rings that can't be read, or not all of them; the trainer's log names each."""
    nonfinite_rows: int
    """Rows with NaN or infinity that it read from rings and dropped, since its start."""
    dropped_updates: int
    """Updates in its present operation whose loss or gradient wasn't finite; they changed no weight."""
    sessions: int
    steps: int
    max_steps: int
    tokens: int
    loss: float
    train_seconds: float
    preemptions: int
    """Pre-emptions in its present operation."""
    preemption_s_p50: float
    """Time from work's arrival until the trainer stopped, of the last 1000 since the daemon's start; p99 too."""
    preemption_s_p99: float
    preemption_computing_s_p99: float
    """Compute time of the trainer within these, which delays users."""
    preemption_delays_s: list[float]
    """Each of the last 100, the latest last."""
    preemption_computing_s: list[float]
    """Most compute time of the trainer within each of these; on shared cores it waited the rest for a core."""
    idle_ratio: float
    beside_seconds: float
    """Training beside requests since its start, with trainer.when = "spare"."""
    beside_duty: float
    """Share of the time with requests that it may take now."""
    beside_harm: float
    """Estimate of what that adds to the time of serving's steps, as a share, and its standard error."""
    beside_harm_error: float
    beside_slow_share: float
    """Share of steps beside training that are slower than 99 of 100 without."""
    beside_limit: str
    """What made beside_duty fall: "mean" or "p99" of the steps' times; empty if it has grown since."""
    beside_pause: str
    """Why nothing may run beside requests now; empty if it may."""
    device_reason: str
    """Why the operation isn't on the device that trainer.device prefers; empty if it is."""


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
    """Drift that a recalibration has not answered yet, or perhaps not wholly."""

    engine_id: str
    workload: str
    text: str
    failed_attempts: int
    answers: int
    """Recalibrations that won something for it; another one follows, since more may be won."""
    due_in_s: float | None
    """Seconds to the next attempt; 0: as soon as possible; null: given up."""
    hindrance: str
    """Reason why the latest attempt failed."""


class StatusView(BaseModel):
    version: str
    daemon_id: str
    uptime_s: float
    state: str
    problems: list[str]
    generation: int
    engines: list[EngineView]
    runtime: dict[str, str]
    """The runtime directory and its filesystem's type."""
    trainer: TrainerView | None
    training_paused: bool
    recalibrates: bool
    """Whether drift begins a recalibration (`recalibration.automatic`)."""
    drafters: dict[str, str | None]
    drafter_problems: dict[str, str]
    """Aliases that are damaged, or whose version is removed or damaged, and why; "floor" too."""
    verdict_problem: str
    """Why the verdict of a trial isn't carried out yet; empty: it is."""
    web_config_problem: str
    """Why the last change of `http.metrics_web_config` isn't in use; empty: it is."""
    shared_registry: dict[str, int | float | str] | None
    """Traffic with `registry.url` since the daemon's start, and its latest error; null without sharing."""
    acceptance: dict[str, Acceptance]
    events: dict[str, int | float]
    store: dict[str, int | float | str]
    background: dict[str, float | str]
    """Age of the oldest job in the background, and what it touches."""
    log: dict[str, int | float | str]
    """Failed writes of the daemon's log."""
    cut_sums: dict[str, float]
    """Resolutions whose sums `store.max_rollup_bytes` keeps for less than their age, and the seconds that they go back."""
    operation: OperationView | None
    canary: dict[str, Any] | None
    """The running trial of a drafter version: serving version, evidence so far."""
    drift_alarms: list[DriftAlarmView]
    overrides: list[OverrideView]


class WorkloadView(Acceptance):
    engine_id: str
    workload: str
    drafter_version: str
    window_s: float
    by_position: list[float]
    """P(draft j accepted | drafts before it accepted), over rounds that verified it."""
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
    delivered_tokens: int
    draft_tokens_per_round: float


class Mark(BaseModel):
    t: float
    kind: str
    text: str
    engine_id: str


class Timeline(BaseModel):
    since: float
    """Unix time from which on all points are there; later than the request's where there would be too many."""
    points: list[TimelinePoint]
    marks: list[Mark]


class Drafters(BaseModel):
    generation: int
    aliases: dict[str, str | None]
    versions: list[dict[str, Any]]


class CanaryRow(BaseModel):
    """A trial of one drafter version against another on live traffic."""

    operation_id: str
    kind: str
    """"canary": the new version was not active yet; "watch": it was."""
    old: str
    new: str
    began_unix_s: float
    ended_unix_s: float | None
    decision: str
    """"" while running; better, worse, unproven, withdrawn or stopped."""
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
    """A problem document (RFC 9457), with what to do."""

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    cure: str = ""
