"""What a controller believes, as plain figures for people: curves, prices, and what would be drafted at which batch size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from honed.adapt.acceptance import AcceptanceCounts, Floats, acceptance_length, survival
from honed.adapt.block_size import latency_gains
from honed.adapt.context_shift import bucket_starts
from honed.adapt.step_time import StepTimeModel


def describe(counts: AcceptanceCounts, curve: Floats, shift: Sequence[float] = ()) -> dict[str, object]:
    """A level of the acceptance hierarchy: its curve, how much it rests on, and what the length of the context makes of it.

    `context_shift` is rows (from so many tokens of context on, factor on the failure odds); none where it makes no difference.
    """
    return {
        "acceptance": [round(value, 4) for value in curve.tolist()],
        "survival": [round(value, 4) for value in survival(curve).tolist()],
        "acceptance_length": round(acceptance_length(curve), 4),
        "rounds": counts.num_rounds,
        "trials": [round(value, 1) for value in counts.trials.tolist()],
        "context_shift": [list(row) for row in zip(bucket_starts(), shift, strict=False)],
    }


@dataclass(frozen=True, slots=True)
class Plans:
    """Prices batches of typical requests; everything is empty while there is no step-time model."""

    model: StepTimeModel
    acceptance: Floats  # [K] the engine's conditional acceptance
    context_tokens: float
    """Context of a typical request."""
    is_latency: bool
    fixed_length: int | None
    """Draft tokens for everybody when nothing is optimised."""

    def prices(self, sizes: Sequence[int]) -> list[dict[str, object]]:
        """Predicted milliseconds of a step by batch size and draft length (0 … K for everybody)."""
        if not self.model.is_ready:
            return []
        lengths = range(len(self.acceptance) + 1)
        return [{"num_requests": n, "by_length": [round(1e3 * self._seconds(n, n * k, k), 4) for k in lengths]} for n in sizes]

    def plan(self, count: int) -> dict[str, float]:
        """What would be drafted for so many requests, how long the step takes, and what that gains over k = 0."""
        if not self.model.is_ready or not len(self.acceptance):
            return {}
        curve = survival(self.acceptance)
        num_drafts = self._most_rewarding(curve, count) if self.fixed_length is None else self.fixed_length * count
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
        }

    def _most_rewarding(self, curve: Floats, count: int) -> int:
        # What `block_size.choose` comes to where all requests are alike: they are filled depth by depth. Without what it is
        # compiled by, which makes code at run time: the daemon may not.
        gains = latency_gains(curve) if self.is_latency else curve
        num_drafts, context_tokens = np.arange(count * len(curve) + 1), int(count * self.context_tokens)
        gained = np.concatenate([[0.0], np.cumsum(np.repeat(gains, count))])
        seconds = self.model.fixed_seconds(count, context_tokens, 0) + self.model.token_seconds(count + num_drafts)
        seconds += self.model.draft_seconds(count, len(curve), context_tokens)[-(-num_drafts // count)]
        rate = count / (seconds * (count - gained)) if self.is_latency else (count + gained) / seconds
        return int(rate.argmax())

    def _seconds(self, count: int, num_drafts: int, block: int) -> float:
        return self.model.seconds(count, count + num_drafts, int(count * self.context_tokens), 0, block)
