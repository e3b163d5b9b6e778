"""An engine's document for the API. The class is also the document's schema, so its fields are listed once."""

from __future__ import annotations

import math
from dataclasses import dataclass

from honed.daemon.ingest.engines import Engine
from honed.daemon.store.rollups import Counts


@dataclass(frozen=True, kw_only=True, slots=True)
class EnginePolicy:
    """The policy in force."""

    generation: int
    kind: str
    age_s: float
    """Seconds since its arrival, reported by the engine; negative: none."""
    fallback: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineView:
    """An engine."""

    engine_id: str
    boot_id: str
    connected: bool
    silent_s: float
    """Seconds since its latest message. After a day an engine whose process is gone is forgotten."""
    asleep: bool
    """vLLM's sleep mode has removed its weights from the device; no training or swap meanwhile."""
    note: str
    model_name: str
    target_path: str
    vllm_version: str
    honed_version: str
    runner: str
    method: str
    num_spec_tokens: int
    max_num_seqs: int
    capabilities: list[str]
    limits: list[str]
    untrained: list[str]
    """Reasons why its target and drafter can't be trained; empty if they can."""
    captured_tokens: list[int]
    """Decode steps' token counts with full CUDA graphs, ascending; empty: none, or unknown yet."""
    captured_lengths: list[int]
    """Draft lengths of these graphs; empty: any mix."""
    captures: str
    """Kind of this engine's samples, "fused" or "layers"; "": it captures none."""
    drafter_version: str
    drafter_generation: int
    target_updates: int
    """Number of target weight updates in its vLLM since its start."""
    num_running: int
    num_waiting: int
    policy: EnginePolicy
    decide_us_p50: float
    decide_us_p99: float
    log_us_p50: float
    log_us_p99: float
    errors: int
    rounds: int
    draft_tokens: int
    accepted_tokens: int
    lost_rounds: int
    lost_draft_tokens: int
    lost_accepted_tokens: int
    missing_batches: int
    malformed_batches: int
    loss_age_s: float
    """Seconds since the last report of lost, missing or malformed data; −1: none since the daemon's start."""
    draft_tokens_per_round: float
    tree_share: float
    """Share of the rounds with drafts that verified a draft tree."""
    tokens_per_s: float
    captured_rows: int
    nonfinite_rows: int
    """Captured rows with NaN or infinity, which were dropped, since its vLLM's start."""
    pooled_requests: int
    """Requests counted as workload "other" since its vLLM's start, because clients send too many labels."""
    drafted_by_position: list[int]
    accepted_by_position: list[int]


def age_s(at_s: float, now_s: float) -> float:
    """Seconds since `at_s`; −1: never."""
    return now_s - at_s if at_s > -math.inf else -1.0


def _limits(engine: Engine) -> list[str]:
    """What honed can't do on this engine, as it says itself, and what its CUDA graphs and the settings leave."""
    if engine.hello is None:
        return []
    few: str = engine.controller.settings.why_few_lengths(engine.hello.num_spec_tokens) if engine.controller else ""
    return [*engine.hello.limits, *filter(None, [few])]


def engine_view(engine: Engine, now_s: float, is_connected: bool, recent: Counts, tokens_per_s: float, hint: str) -> EngineView:
    """One engine; `recent` are its rounds of the last minute, `hint` a remark on the checkpoint it came with."""
    hello, status, policy, boot = engine.hello, engine.status, engine.policy, engine.boot
    stored = boot.stored
    rounds = recent if recent.rounds else stored
    return EngineView(
        engine_id=engine.engine_id,
        boot_id=boot.boot_id,
        connected=is_connected,
        silent_s=now_s - engine.last_seen_s,
        asleep=engine.is_asleep,
        note="; ".join(filter(None, (engine.note, engine.drafter_note, hint))),
        model_name=hello.model_name if hello else "",
        target_path=hello.target_path if hello else "",
        vllm_version=hello.vllm_version if hello else "",
        honed_version=hello.honed_version if hello else "",
        runner=hello.runner if hello else "",
        method=hello.method if hello else "",
        num_spec_tokens=hello.num_spec_tokens if hello else 0,
        max_num_seqs=hello.max_num_seqs if hello else 0,
        capabilities=hello.capabilities if hello else [],
        limits=_limits(engine),
        untrained=hello.untrained if hello else [],
        captured_tokens=hello.captured_tokens if hello else [],
        captured_lengths=hello.captured_lengths if hello else [],
        captures=hello.features if hello and hello.capture_path else "",
        drafter_version=engine.live_version,
        drafter_generation=status.drafter_generation if status else 0,
        target_updates=status.target_updates if status else 0,
        num_running=status.num_running if status else 0,
        num_waiting=status.num_waiting if status else 0,
        policy=EnginePolicy(
            generation=status.policy_generation if status else 0,
            kind=policy.kind if policy else "",
            age_s=status.policy_age_s if status else -1.0,
            fallback=status.fallback if status else "no_policy",
            reason=policy.override if policy else "",
        ),
        decide_us_p50=status.decide_us_p50 if status else 0.0,
        decide_us_p99=status.decide_us_p99 if status else 0.0,
        log_us_p50=status.log_us_p50 if status else 0.0,
        log_us_p99=status.log_us_p99 if status else 0.0,
        errors=status.errors if status else 0,
        rounds=stored.rounds,
        draft_tokens=stored.draft_tokens,
        accepted_tokens=stored.accepted_tokens,
        lost_rounds=boot.lost.get("lost_rounds", 0),
        lost_draft_tokens=boot.lost.get("lost_draft_tokens", 0),
        lost_accepted_tokens=boot.lost.get("lost_accepted_tokens", 0),
        missing_batches=boot.missing_batches,
        malformed_batches=boot.malformed_batches,
        loss_age_s=age_s(boot.lost_at_s, now_s),
        draft_tokens_per_round=rounds.draft_tokens_per_round,
        tree_share=rounds.tree_share,
        tokens_per_s=tokens_per_s,
        captured_rows=status.captured_rows if status else 0,
        nonfinite_rows=status.capture_nonfinite_rows if status else 0,
        pooled_requests=status.pooled_requests if status else 0,
        drafted_by_position=stored.drafted.tolist(),
        accepted_by_position=stored.accepted.tolist(),
    )
