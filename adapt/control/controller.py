"""Turns an engine's event batches into estimates, and these into its policy.

`observe` folds a batch into the estimates of acceptance (`acceptance_beliefs`) and of steps (`step_beliefs`); `propose` makes
the policy; `beliefs` explains both. Nothing here reads a clock: `now_s` is an argument, and steps carry their own clock.

A policy's generation grows only with a material change: kind, limits, overrides, a conditional acceptance by more than 0.5 %, a
predicted step time by more than 1 %. Otherwise the very same object is proposed again.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Sequence

import msgspec

from honed.adapt.acceptance.rounds import rounds_by_workload, steps_with_trees
from honed.adapt.control.acceptance_beliefs import AcceptanceBeliefs
from honed.adapt.control.explanation import Plans, best_plan
from honed.adapt.control.policy_change import what_changed
from honed.adapt.control.settings import ControllerSettings, Override
from honed.adapt.control.step_beliefs import StepBeliefs, step_rows
from honed.adapt.monitor.drift import Alarm
from honed.adapt.protocol.wire import EventBatch, Policy

Event = Alarm
"""Events that `observe` may report."""

_YOUNG_EXPLORING = 5.0
"""Factor on exploring while the step-time model is young."""
_COMPARE_SHARE = 0.1
"""Where drafts aren't worth their time, two versions would take hours to show which is better. The cost, at most a draft's pass
in so many steps, lasts only as long as they take turns."""
_SETTLING_BATCHES = 64
"""Batches from the end of turns within which the version that stays may come back: a busy engine sends four per second."""
MOST_REASONS, OTHER_REASON = 32, "other"
"""Reasons of an engine's decisions that are counted apart; the rest counts under one name."""
_CHANGES_KEPT = 32


class EngineController:
    """Estimates for one engine."""

    def __init__(
        self,
        engine_id: str,
        num_spec_tokens: int,
        max_num_seqs: int,
        settings: ControllerSettings | None = None,
        *,
        tells_steps: bool = False,
        chain_tokens: int = 0,
    ) -> None:
        self.engine_id = engine_id
        self.num_spec_tokens = max(num_spec_tokens, 0)
        self._chain_tokens = min(chain_tokens, self.num_spec_tokens) or self.num_spec_tokens
        self.max_num_seqs = max(max_num_seqs, 1)
        self.settings, self._tells_steps = settings or ControllerSettings(), tells_steps
        self._acceptance = AcceptanceBeliefs(self.num_spec_tokens, self._chain_tokens, self.settings)
        self._steps = StepBeliefs(self.settings.step_time, self.settings.captured_tokens)
        self._drafter_version = ""  # its last name
        self._turns: frozenset[str] = frozenset()
        self._settling: tuple[frozenset[str], int] = frozenset(), 0
        """Versions that took turns, and the number of the batch until which the engine may go over to the one that stays."""
        self._num_batches = 0
        self.turns_ended = 0
        """How often turns were ended."""
        self._is_to_restart = False
        self._boot_id = ""
        self._policy: Policy | None = None
        self._changes: deque[tuple[int, str]] = deque(maxlen=_CHANGES_KEPT)
        self._decisions: Counter[str] = Counter()

    @property
    def has_trees(self) -> bool:
        """Whether the engine can verify draft trees; True until something else is said."""
        return self._acceptance.has_trees

    @has_trees.setter
    def has_trees(self, value: bool) -> None:
        self._acceptance.has_trees = value

    # --- in -----------------------------------------------------------------------------------------------------------

    def observe(self, batch: EventBatch) -> list[Event]:
        """Fold in a batch, in the order of its sequence numbers; return the events to report.

        Raises ValueError, before anything was folded in, for a batch whose columns don't fit together.
        """
        by_workload = list(rounds_by_workload(batch))
        steps = step_rows(batch.steps)
        with_trees = steps_with_trees(batch) if self.has_trees or batch.rounds.chain_tokens else []
        self._restart()
        if batch.drafter_version not in ("", self._drafter_version):  # "": the same weights, not yet named by the daemon
            before, self._drafter_version = self._drafter_version, batch.drafter_version
            pair, (settling, until) = {before, batch.drafter_version}, self._settling
            if not pair <= self._turns:
                is_known = before == "" or (pair <= settling and self._num_batches < until)
                self._acceptance.take_new_weights(batch.drafter_version, is_swap=not is_known)
                self._settling = frozenset(), 0
        self._num_batches += 1
        if batch.boot_id != self._boot_id:
            self._boot_id = batch.boot_id
            self._steps.new_clock()
        self._steps.observe(steps, with_trees)
        for reason, count in Counter(batch.steps.decision).items():
            is_kept = reason in self._decisions or len(self._decisions) < MOST_REASONS
            self._decisions[reason if is_kept else OTHER_REASON] += count
        events: list[Event] = []
        for name, rounds in by_workload:
            events += self._acceptance.observe(name, rounds, batch.sent_unix_ns / 1e9 or None)
        return events

    def take_turns(self, versions: Collection[str]) -> None:
        """Let these versions take turns from now on: they share the estimates, so that both get the same lengths."""
        self._turns = frozenset(versions)

    def end_turns(self) -> None:
        """Keep one version: forget the estimates when another appears, and restart the drift tests.

        What was learned holds for the version that stays, whichever served last. This waits for nothing: what is being learned
        is followed by the restart.
        """
        if self._turns:
            self._settling = self._turns, self._num_batches + _SETTLING_BATCHES
            self._turns, self._is_to_restart = frozenset(), True
            self.turns_ended += 1

    def _restart(self) -> None:
        if self._is_to_restart:
            self._acceptance.take_new_weights(self._drafter_version, is_swap=False)
            self._is_to_restart = False

    # --- out ----------------------------------------------------------------------------------------------------------

    def propose(self, now_s: float, override: Override | Sequence[Override] | None = None) -> Policy:
        """Make the current policy; return the previous one, unchanged, while nothing material differs."""
        self._restart()
        overrides = [override] if isinstance(override, Override) else list(override or ())
        policy = self._make_policy([one for one in overrides if one.until_s > now_s])
        context_tokens = self._steps.typical.get("context_tokens", 0.0)
        reason = what_changed(self._policy, policy, self.max_num_seqs, context_tokens)
        if self._policy is not None and not reason:
            return self._policy
        self._changes.append((policy.generation, reason))
        self._policy = policy
        return policy

    def _make_policy(self, overrides: Sequence[Override]) -> Policy:
        settings, k = self.settings, self.num_spec_tokens
        kind, static_k, capture_share = settings.mode, self._static_k(), settings.capture_share
        max_k = limit = k if settings.max_k < 0 else min(settings.max_k, k)
        for one in overrides:
            if one.name == "capture_share":
                capture_share = min(float(one.value), 1.0)
            elif one.name == "policy":
                kind, static_k, max_k = str(one.value), self._static_k(), limit
            else:
                kind, static_k = "static", min(int(one.value), k)
                max_k = max(limit, static_k)
        model, tree_model = self._steps.model(), self._steps.tree_model()
        return Policy(
            generation=(self._policy.generation if self._policy else 0) + 1,
            ttl_s=settings.policy_ttl_s,
            kind=kind,
            static_k=static_k,
            fallback_k=self._static_k(),
            max_k=max_k,
            priors=self._acceptance.priors(),
            step_seconds=[float(f"{value:.6g}") for value in model.parameters],
            kind_effects=list(model.kinds),
            tree_step_seconds=[float(f"{value:.6g}") for value in tree_model.parameters],
            tree_kind_effects=list(tree_model.kinds),
            captured_tokens=list(settings.captured_tokens),
            hysteresis=settings.hysteresis,
            explore_share=min(settings.explore_share * (_YOUNG_EXPLORING if self._steps.is_young else 1.0), 1.0),
            compare_share=_COMPARE_SHARE if self._turns else 0.0,
            request_ceiling=settings.request_ceiling,
            capture_share=capture_share,
            table=list(settings.table),
            equal_lengths=settings.are_lengths_equal,
            captured_lengths=list(settings.captured_lengths),
            equal_up_to=settings.equal_up_to,
            feeds_estimates=settings.feed_estimates,
            tells_steps=self._tells_steps,
            override=",".join(sorted({one.name for one in overrides})),
        )

    def beliefs(self) -> dict[str, object]:
        """Describe the estimates, in plain figures that JSON can carry."""
        self._restart()
        plans = self._plans()
        sizes = [2**power for power in range(self.max_num_seqs.bit_length())]
        return {
            "engine_id": self.engine_id,
            "drafter_version": self._drafter_version,
            "num_spec_tokens": self.num_spec_tokens,
            "engine": self._acceptance.describe_engine(),
            "workloads": self._acceptance.describe_workloads(),
            "step_time": self._steps.describe(),
            "step_ms": plans[0].prices(sizes),
            "tree_step_ms": plans[1].prices(sizes) if len(plans) > 1 else [],
            "decisions": dict(self._decisions),
            "changes": [{"generation": generation, "reason": reason} for generation, reason in self._changes],
            "draft_tokens_by_batch": [plan for size in sizes if (plan := best_plan(plans, size))],
            "speedup_estimate": self._speedup(plans),
            "policy": None if self._policy is None else msgspec.to_builtins(self._policy),
        }

    def headline(self) -> dict[str, float | None]:
        """Figures of `beliefs` that change all the time: seconds of a typical step, and the gain over not drafting."""
        self._restart()
        typical = self._steps.typical
        return {
            "predicted_seconds": typical.get("predicted_step_seconds"),
            "measured_seconds": typical.get("step_seconds"),
            "speedup": self._speedup(self._plans()),
        }

    def _plans(self) -> list[Plans]:
        """Of chains, and of trees if there are any."""
        context_tokens, nodes = self._steps.typical.get("context_tokens", 0.0), self._acceptance.typical_nodes()
        plans = [Plans(self._steps.model(), self._acceptance.typical_curve(), context_tokens, self._policy)]
        if nodes is not None:
            plans.append(Plans(self._steps.tree_model(), nodes, context_tokens, self._policy, has_trees=True))
        return plans

    def _speedup(self, plans: Sequence[Plans]) -> float | None:
        num_requests = max(1, min(round(self._steps.typical.get("num_requests", 1.0)), self.max_num_seqs))
        return best_plan(plans, num_requests).get("speedup")

    def _static_k(self) -> int:
        k = self.settings.static_k
        return self._chain_tokens if k < 0 else min(k, self.num_spec_tokens)
