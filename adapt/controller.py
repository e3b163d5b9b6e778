"""Turns an engine's event batches into what is believed of it, and that into its policy.

`observe` folds a batch into the acceptance of engine and workloads, the step-time model and the drift tests; `propose` makes
the policy; `beliefs` explains both. Nothing here knows the time: `now_s` is an argument, and steps carry their own clock.

A policy's generation grows only when something material changed: kind, limits, overrides, a conditional acceptance by more
than 0.5 %, a predicted step time by more than 1 %. Otherwise the very same object is proposed again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import numpy as np

from honed.adapt.acceptance import (
    Floats,
    RequestTable,
    chain_estimate,
    reached_and_accepted,
    scale_odds,
    shrunk_estimate,
    survival,
)
from honed.adapt.beliefs import Plans, describe
from honed.adapt.calibration import Calibration
from honed.adapt.canary import Baseline
from honed.adapt.contenders import CONTENDERS
from honed.adapt.context_shift import (
    NUM_BUCKETS,
    ContextCounts,
    estimate_effect,
    shift_for,
    shifted_curves,
    tilt,
    trials_design_effect,
)
from honed.adapt.draft_features import FeatureRegression
from honed.adapt.drift import Alarm, DriftMonitor, DriftSettings
from honed.adapt.forgetting import AdaptiveCounts
from honed.adapt.policy_change import what_changed
from honed.adapt.ranges import COUNT, DRAFT_TOKENS, SHARE, OneOf, Range, Ranges, check_ranges
from honed.adapt.rounds import Rounds, rounds_by_workload
from honed.adapt.step_time import PARAMETERS, StepTimeLearner, StepTimeSettings
from honed.adapt.step_watch import StepWatch
from honed.adapt.wire import EventBatch, Policy, StepColumns, WorkloadPrior

Event = Alarm
"""What `observe` may report."""

MODES = ("goodput", "latency", "off", *CONTENDERS)
_YOUNG_EXPLORING = 5.0
"""By how much more is explored while the step-time model is young."""
_KEPT_AFTER_SWAP = 0.02
"""Share of the counts that survives a change of weights: a guess until the new ones have shown themselves."""
_MOST_DESIGN_EFFECT = 8.0
_SMOOTHING = 0.02
_CHANGES_KEPT = 32


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """How an engine is steered."""

    mode: str = "goodput"
    """"goodput" (most predicted tokens per second of the batch), "latency" (of each request), "off" (observe only) or a rule
    of adapt.contenders ("static", …)."""
    static_k: int = -1
    """Draft tokens of mode "static" and of every fallback; −1: all the engine was configured for."""
    max_k: int = -1
    """Never draft more than this; −1: no limit but the engine's."""
    request_ceiling: int = -1
    hysteresis: float = 0.02
    explore_share: float = 0.02
    """0 also keeps the step-time model from getting ready on an engine whose draft lengths never vary."""
    forgetting_rounds: float = 4000.0
    request_strength: float = 0.0
    """Pseudo-rounds of a workload's curve against a request's own; 0: estimated from how much requests differ."""
    workload_strength: float = 24.0
    """Pseudo-rounds of the engine's curve against a workload's own."""
    policy_ttl_s: float = 10.0
    capture_share: float = 0.25
    """Share of requests whose context features are captured, so that there are samples when a recalibration is called for."""
    captured_tokens: tuple[int, ...] = ()
    """Token counts of the captured CUDA graphs; empty: none, or unknown."""
    table: tuple[tuple[int, int], ...] = ()
    """Of mode "table": (largest batch in requests, draft tokens), ascending; beyond the last row its length goes on."""
    max_workloads: int = 32
    equal_lengths: bool = False
    """One length for all requests of a step, for attention backends whose CUDA graphs take no other (FlashAttention 2)."""
    drift: DriftSettings = field(default_factory=DriftSettings)
    step_time: StepTimeSettings = field(default_factory=StepTimeSettings)

    RANGES: ClassVar[Ranges] = {
        "mode": OneOf(MODES),
        **dict.fromkeys(("static_k", "max_k", "request_ceiling"), DRAFT_TOKENS),
        **dict.fromkeys(("hysteresis", "explore_share", "capture_share"), SHARE),
        **dict.fromkeys(("forgetting_rounds", "captured_tokens", "max_workloads"), COUNT),
        **dict.fromkeys(("request_strength", "workload_strength"), Range(0)),
        "policy_ttl_s": Range(0, 3600, excludes_low=True),
    }

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.mode == "table" and not self.table:
            raise ValueError('mode "table" needs a table: rows (largest batch in requests, draft tokens)')
        if any(len(row) != 2 or row[0] < 1 or row[1] < 0 for row in self.table):
            raise ValueError(f"table takes rows (largest batch >= 1, draft tokens >= 0), not {self.table!r}")


@dataclass(frozen=True, slots=True)
class Override:
    """An operator's order, in force until `until_s` on the clock of `propose`."""

    name: str
    """"draft_tokens" (that many for everybody), "capture_share" (0 … 1) or "policy" (a mode)."""
    value: int | float | str
    until_s: float

    def __post_init__(self) -> None:
        if self.name not in ("draft_tokens", "capture_share", "policy"):
            raise ValueError(f"there is no override {self.name!r}")
        if self.name == "policy" and self.value not in MODES:
            raise ValueError(f"policy must be one of {', '.join(MODES)}, not {self.value!r}")
        if self.name != "policy" and not (isinstance(self.value, int | float) and self.value >= 0):
            raise ValueError(f"{self.name} must be a number ≥ 0, not {self.value!r}")


class _Workload:
    def __init__(self, num_spec_tokens: int, forgetting_rounds: float) -> None:
        self.counts = AdaptiveCounts(num_spec_tokens, forgetting_rounds)
        self.requests = RequestTable(num_spec_tokens)
        self.calibration = Calibration()
        self.contexts = ContextCounts(num_spec_tokens, forgetting_rounds)
        self.features = FeatureRegression(forgetting_rounds)


class EngineController:
    """What is believed of one engine."""

    def __init__(
        self,
        engine_id: str,
        num_spec_tokens: int,
        max_num_seqs: int,
        settings: ControllerSettings | None = None,
    ) -> None:
        self.engine_id = engine_id
        self.num_spec_tokens = max(num_spec_tokens, 0)
        self.max_num_seqs = max(max_num_seqs, 1)
        self.settings = settings or ControllerSettings()
        self._counts = AdaptiveCounts(self.num_spec_tokens, self.settings.forgetting_rounds)
        self._workloads: dict[str, _Workload] = {}
        self._drift = DriftMonitor(self.num_spec_tokens, self.settings.drift)
        self._steps = StepTimeLearner(self.settings.step_time, self.settings.captured_tokens)
        self._drafter_version: str | None = None
        self._boot_id = ""
        self._last_end_ns = 0
        self._typical: dict[str, float] = {}
        self._policy: Policy | None = None
        self._changes: deque[tuple[int, str]] = deque(maxlen=_CHANGES_KEPT)
        self._decisions: Counter[str] = Counter()
        self._watch = StepWatch()
        self._world_changes = 0
        self._context_effect: Floats = np.zeros(NUM_BUCKETS)

    # --- in -----------------------------------------------------------------------------------------------------------

    def observe(self, batch: EventBatch) -> list[Event]:
        """Fold in a batch, in the order of its sequence numbers; return what has to be told.

        Raises ValueError, before anything was folded in, for a batch whose columns don't fit together.
        """
        by_workload = list(rounds_by_workload(batch))
        steps = _step_rows(batch.steps)
        if batch.drafter_version != self._drafter_version:
            self._take_new_weights(batch.drafter_version)
        if batch.boot_id != self._boot_id:
            self._boot_id, self._last_end_ns = batch.boot_id, 0
        self._observe_steps(steps)
        self._decisions.update(batch.steps.decision)
        events: list[Event] = []
        for name, rounds in by_workload:
            events += self._observe_rounds(name, rounds)
        return events

    def _take_new_weights(self, version: str) -> None:
        is_swap = self._drafter_version not in (None, "")  # "" is the same weights before the daemon named them
        self._drafter_version = version
        if is_swap:
            self._counts.forget(_KEPT_AFTER_SWAP)
            for workload in self._workloads.values():
                workload.counts.forget(_KEPT_AFTER_SWAP)
                workload.requests.clear()
                workload.contexts.forget(_KEPT_AFTER_SWAP)
                workload.features = FeatureRegression(self.settings.forgetting_rounds)
        self._drift.reset(version)

    def _observe_rounds(self, name: str, rounds: Rounds) -> list[Event]:
        workload = self._workloads.pop(name, None) or _Workload(self.num_spec_tokens, self.settings.forgetting_rounds)
        if len(self._workloads) >= self.settings.max_workloads:  # in order of last mention: the first is the stalest
            stalest = next(iter(self._workloads))
            del self._workloads[stalest]
            self._drift.forget(stalest)
        self._workloads[name] = workload
        columns = (rounds.num_draft_tokens, rounds.num_accepted_tokens, rounds.num_invalid_tokens)
        reached, accepted = reached_and_accepted(columns[0], columns[1], self.num_spec_tokens, columns[2])
        verified = np.clip(columns[0] - np.maximum(columns[2], 0), 0, self.num_spec_tokens)
        curve, shift = self._shift(self._curve(workload, self._engine_curve()), workload)
        for mine, shifted in shifted_curves(curve, shift, rounds.position):
            workload.calibration.observe(survival(shifted), verified[mine], accepted[mine])
        workload.contexts.observe(rounds.position, reached, accepted)
        design_effect = self._design_effect(workload)
        if rounds.feature is not None:
            workload.features.observe(rounds.request, rounds.feature, reached, accepted, curve, design_effect)
        self._counts.observe(*columns, design_effect=design_effect)
        workload.counts.observe(*columns, design_effect=design_effect)
        workload.requests.observe(rounds.request, reached, accepted)
        return self._drift.observe(name, *columns, design_effect=self._design_effect(workload))

    def _observe_steps(self, rows: Sequence[tuple[int, ...]]) -> None:
        model = self._steps.model()
        for end_ns, duration_us, requests, tokens, prefill, drafted, context, block in rows:
            # Asynchronous scheduling starts a step before the previous one ended: what counts is the time between ends.
            since_last = end_ns - self._last_end_ns if self._last_end_ns else duration_us * 1000
            self._last_end_ns = end_ns
            seconds = min(duration_us * 1000, since_last if since_last > 0 else duration_us * 1000) / 1e9
            self._steps.observe(requests, tokens, context, prefill, drafted, block, seconds)
            if requests <= 0:
                continue
            figures = {"num_requests": requests, "context_tokens": context / requests, "step_seconds": seconds}
            if model.is_ready:
                predicted = model.seconds(requests, tokens, context, prefill, block)
                figures["predicted_step_seconds"] = predicted
                is_familiar = self._steps.is_familiar(requests, prefill, drafted, block)
                if is_familiar and (changed_steps := self._watch.observe(seconds, predicted)):
                    self._steps.restart(changed_steps)
                    self._world_changes += 1
                    model = self._steps.model()
            for name, value in figures.items():
                held = self._typical.get(name, value)
                self._typical[name] = held + _SMOOTHING * (value - held)

    # --- out ----------------------------------------------------------------------------------------------------------

    def propose(self, now_s: float, override: Override | Sequence[Override] | None = None) -> Policy:
        """Make the policy that is right now; the previous one, unchanged, while nothing material is different."""
        overrides = [override] if isinstance(override, Override) else list(override or ())
        policy = self._make_policy([one for one in overrides if one.until_s > now_s])
        reason = what_changed(self._policy, policy, self.max_num_seqs)
        if self._policy is not None and not reason:
            return self._policy
        self._changes.append((policy.generation, reason))
        self._policy = policy
        return policy

    def _make_policy(self, overrides: Sequence[Override]) -> Policy:
        settings, k = self.settings, self.num_spec_tokens
        kind, static_k, capture_share = settings.mode, self._static_k(), settings.capture_share
        for one in overrides:
            if one.name == "capture_share":
                capture_share = min(float(one.value), 1.0)
            elif one.name == "policy":
                kind = str(one.value)
            else:
                kind, static_k = "static", min(int(one.value), k)
        model = self._steps.model()
        engine = self._engine_curve()
        strengths = {name: self._request_strength(workload) for name, workload in self._workloads.items()}
        pooled = float(np.median(list(strengths.values()))) if strengths else settings.request_strength or 8.0
        workloads = self._workloads.items()
        self._context_effect = estimate_effect(
            [(one.contexts, trials_design_effect(one.requests, strengths[name])) for name, one in workloads]
        )
        priors = [_prior("", pooled, *self._shift(engine))]
        priors += [
            _prior(name, strengths[name], *self._shift(self._curve(one, engine), one), one.features) for name, one in workloads
        ]
        return Policy(
            engine_id=self.engine_id,
            generation=(self._policy.generation if self._policy else 0) + 1,
            ttl_s=settings.policy_ttl_s,
            kind=kind,
            static_k=static_k,
            max_k=max(k if settings.max_k < 0 else min(settings.max_k, k), static_k if overrides else 0),
            priors=priors,
            step_seconds=[float(f"{value:.6g}") for value in model.parameters],
            draft_seconds=[float(f"{v:.6g}") for v in model.draft_seconds(1, k).tolist()] if model.is_ready else [],
            captured_tokens=list(settings.captured_tokens),
            hysteresis=settings.hysteresis,
            explore_share=min(settings.explore_share * (_YOUNG_EXPLORING if self._steps.is_young else 1.0), 1.0),
            request_ceiling=settings.request_ceiling,
            capture_share=capture_share,
            table=list(settings.table),
            equal_lengths=settings.equal_lengths,
            override=",".join(sorted({one.name for one in overrides})),
        )

    def baseline(self) -> dict[str, Baseline]:
        """Return every workload's counts with the present weights, for a SwapWatch; take them just before the swap."""
        return {
            name: Baseline(
                tuple(one.counts.trials.tolist()), tuple(one.counts.successes.tolist()), self._design_effect(one)
            )
            for name, one in self._workloads.items()
        }

    def beliefs(self) -> dict[str, object]:
        """Describe what is believed, in plain figures that JSON can carry."""
        engine, model = self._engine_curve(), self._steps.model()
        context = self._typical.get("context_tokens", 0.0)
        fixed_length = None if self.settings.mode in ("goodput", "latency") else self._static_k()
        plans = Plans(model, engine, context, self.settings.mode == "latency", fixed_length)
        sizes = [2**power for power in range(self.max_num_seqs.bit_length())]
        typical = max(1, min(round(self._typical.get("num_requests", 1.0)), self.max_num_seqs))
        return {
            "engine_id": self.engine_id,
            "drafter_version": self._drafter_version or "",
            "num_spec_tokens": self.num_spec_tokens,
            "engine": describe(self._counts, engine, self._shift(engine)[1]),
            "workloads": {
                name: {
                    **describe(one.counts, self._curve(one, engine), self._shift(engine, one)[1]),
                    "request_strength": round(self._request_strength(one), 2),
                    "design_effect": round(self._design_effect(one), 3),
                    "drift": self._drift.figures(name),
                    "calibration": {
                        "expected_calibration_error": one.calibration.error,
                        "bins": one.calibration.bins(),
                    },
                }
                for name, one in self._workloads.items()
            },
            "step_time": {
                "is_ready": model.is_ready,
                "num_steps": self._steps.num_steps,
                "parameters": dict(zip(PARAMETERS, model.parameters, strict=False)),
                "measured_seconds": self._typical.get("step_seconds"),
                "predicted_seconds": self._typical.get("predicted_step_seconds"),
                "context_tokens_per_request": self._typical.get("context_tokens"),
                "num_requests": self._typical.get("num_requests"),
                "spread": self._watch.spread,
                "world_changes": self._world_changes,
            },
            "step_ms": plans.prices(sizes),
            "decisions": dict(self._decisions),
            "changes": [{"generation": generation, "reason": reason} for generation, reason in self._changes],
            "draft_tokens_by_batch": [plan for size in sizes if (plan := plans.plan(size))],
            "speedup_estimate": plans.plan(typical).get("speedup"),
            "policy": None if self._policy is None else msgspec.to_builtins(self._policy),
        }

    # --- estimates ----------------------------------------------------------------------------------------------------

    def _static_k(self) -> int:
        k = self.settings.static_k
        return self.num_spec_tokens if k < 0 else min(k, self.num_spec_tokens)

    def _engine_curve(self) -> Floats:
        return chain_estimate(self._counts.trials, self._counts.successes)

    def _curve(self, workload: _Workload, engine: Floats) -> Floats:
        counts = workload.counts
        return shrunk_estimate(counts.trials, counts.successes, engine, self.settings.workload_strength)

    def _shift(self, curve: Floats, workload: _Workload | None = None) -> tuple[Floats, list[float]]:
        """Take the contexts out of a curve (None: the engine's): what holds at factor 1, and the factor by context length."""
        if not self._context_effect.any():
            return curve, []
        contexts = [one.contexts for one in (self._workloads.values() if workload is None else [workload])]
        shift = shift_for(self._context_effect, np.sum([one.weight for one in contexts], axis=0))
        return (scale_odds(curve, tilt(shift, np.sum([one.recent for one in contexts], axis=0))) if shift else curve), shift

    def _request_strength(self, workload: _Workload) -> float:
        return self.settings.request_strength or workload.requests.strength()

    def _design_effect(self, workload: _Workload) -> float:
        return min(workload.requests.design_effect(workload.requests.strength()), _MOST_DESIGN_EFFECT)


def _step_rows(steps: StepColumns) -> list[tuple[int, ...]]:
    columns = (
        steps.end_ns, steps.duration_us, steps.num_requests, steps.num_tokens,
        steps.num_prefill_tokens, steps.num_draft_tokens, steps.context_tokens, steps.num_drafting,
    )  # fmt: skip
    if len({len(column) for column in columns}) > 1:
        raise ValueError("batch has step columns of unequal length")
    return list(zip(*columns, strict=True))


def _prior(
    name: str, strength: float, curve: Floats, shift: list[float], features: FeatureRegression | None = None
) -> WorkloadPrior:
    weight = round(features.weight, 3) if features is not None else 0.0
    return WorkloadPrior(
        workload=name, acceptance=[round(value, 4) for value in curve.tolist()], strength=round(strength, 2),
        context_shift=shift, feature_mean=round(features.mean, 3) if features is not None and weight else 0.0,
        feature_weight=weight,
    )  # fmt: skip
