"""A controller's estimates as plain figures for people: curves, costs, and draft lengths by batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from honed.adapt.acceptance.context_shift import bucket_starts
from honed.adapt.acceptance.estimate import acceptance_length, survival
from honed.adapt.acceptance.forgetting import AdaptiveCounts
from honed.adapt.lengths.block_size import PRICED, choose_equal, latency_gains
from honed.adapt.lengths.length_policy import dictated_length, round_down
from honed.adapt.lengths.policy_tables import are_equal, limit_of, shared_lengths_of
from honed.adapt.protocol.arrays import Floats
from honed.adapt.protocol.wire import Policy
from honed.adapt.steps.step_time import StepTimeModel


def describe(counts: AdaptiveCounts, curve: Floats, shift: Sequence[float] = ()) -> dict[str, object]:
    """Describe a level of the acceptance hierarchy: its curve, the data behind it, and the effect of the context's length.

    `context_shift` is rows (least tokens of context, factor on the failure odds); empty where it makes no difference.
    """
    return {
        "acceptance": [round(value, 4) for value in curve.tolist()],
        "survival": [round(value, 4) for value in survival(curve).tolist()],
        "acceptance_length": round(acceptance_length(curve), 4),
        "acceptance_length_error": round(length_error(curve, counts.effective_trials), 4),
        "rounds": counts.num_rounds,
        "trials": [round(value, 1) for value in counts.trials.tolist()],
        "context_shift": [list(row) for row in zip(bucket_starts(), shift, strict=False)],
    }


def length_error(acceptance: Floats, trials: Floats) -> float:  # [K], [K]
    """Standard error of the acceptance length, to first order: each position's share has a binomial's variance."""
    survived = survival(acceptance)
    after = np.cumsum(survived[::-1])[::-1]  # [K] expected accepted drafts from each position on
    slopes = np.divide(after, acceptance, out=np.zeros_like(after), where=acceptance > 0.0)
    return float(np.sqrt((slopes**2 * acceptance * (1.0 - acceptance) / np.maximum(trials, 1.0)).sum()))


def best_plan(plans: Sequence[Plans], count: int) -> dict[str, Any]:
    """Choose the plan for so many requests, of chains or of trees, that promises more tokens; empty where there is none.

    Args:
        plans: of chains, and then perhaps of trees, to which all other lengths than priced ones belong.
    """
    policy = plans[0].policy
    if len(plans) > 1 and policy is not None and policy.kind not in (*PRICED, "off"):
        plans = plans[1:]
    elif policy is None or policy.kind == "off":
        plans = plans[:1]
    made = [plan for one in plans if (plan := one.plan(count))]
    return max(made, key=lambda plan: float(plan["predicted_tokens_per_s"]), default={})


@dataclass(frozen=True, slots=True)
class Plans:
    """Costs of batches of typical requests under a policy; everything is empty while there is no step-time model."""

    model: StepTimeModel
    acceptance: Floats  # [K] the engine's conditional acceptance
    context_tokens: float
    """Context of a typical request."""
    policy: Policy | None
    """The policy in force; None: the engine drafts K."""
    has_trees: bool = False
    """Whether drafts are nodes of trees, and the model is of steps that verify trees."""

    def prices(self, sizes: Sequence[int]) -> list[dict[str, object]]:
        """Predicted milliseconds of a step by batch size and draft length (0 … K for all requests)."""
        if not self.model.is_ready:
            return []
        lengths = range(len(self.acceptance) + 1)
        return [{"num_requests": n, "by_length": [round(1e3 * self._seconds(n, n * k, k), 4) for k in lengths]} for n in sizes]

    def plan(self, count: int) -> dict[str, Any]:
        """Predict draft lengths for so many requests, the step's time, and the gain over k = 0."""
        if not self.model.is_ready or not len(self.acceptance):
            return {}
        curve = survival(self.acceptance)
        num_drafts = self._num_drafts(curve, count)
        depth, rest = divmod(num_drafts, count)
        block = depth + (rest > 0)
        seconds = self._seconds(count, num_drafts, block)
        goodput = (count + count * float(curve[:depth].sum()) + rest * float(curve[depth:block].sum())) / seconds
        return {
            "num_requests": count,
            "draft_tokens_per_request": round(num_drafts / count, 3),
            "block": block,
            "predicted_step_seconds": seconds,
            "predicted_tokens_per_s": goodput,
            "speedup": goodput * self._seconds(count, 0, 0) / count,
            "has_trees": self.has_trees,
        }

    def _num_drafts(self, curve: Floats, count: int) -> int:
        """Draft tokens of a batch, as `adapt.lengths.decider` chooses them."""
        policy, k = self.policy, len(curve)
        if policy is None or policy.kind == "off":
            return count * k
        limit = limit_of(policy, k)
        if policy.kind in PRICED:
            is_latency = policy.kind == "latency"
            gains = (latency_gains(curve) if is_latency else curve)[:limit]
            if not are_equal(policy, count):
                return self._most_rewarding(gains, count, is_latency)
            choice = choose_equal(
                (count * gains).tolist(),
                count,
                self.model,
                is_latency=is_latency,
                context_tokens=int(count * self.context_tokens),
                captured_lengths=policy.captured_lengths,
            )
            return count * choice.point.cap
        shared = () if "draft_tokens" in policy.override else shared_lengths_of(policy, limit)
        return count * round_down(dictated_length(policy, count, limit), shared)

    def _most_rewarding(self, gains: Floats, count: int, is_latency: bool) -> int:
        # The result of `block_size.choose` where all requests are alike: they are filled depth by depth. Without its compiler,
        # which makes code at run time: the daemon may not.
        num_drafts, context_tokens = np.arange(count * len(gains) + 1), int(count * self.context_tokens)
        gained = np.concatenate([[0.0], np.cumsum(np.repeat(gains, count))])
        seconds = self.model.fixed_seconds(count, context_tokens, 0) + self.model.token_seconds(count + num_drafts)
        seconds += self.model.draft_seconds(count, len(gains), context_tokens)[-(-num_drafts // count)]
        seconds *= self.model.kind_factors(count, num_drafts)
        rate = count / (seconds * (count - gained)) if is_latency else (count + gained) / seconds
        return int(rate.argmax())

    def _seconds(self, count: int, num_drafts: int, block: int) -> float:
        return self.model.seconds(count, count + num_drafts, int(count * self.context_tokens), 0, block)
