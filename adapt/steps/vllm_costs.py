"""honed's step times as the two cost curves of vLLM's adaptive verification.

vLLM measures them once, at start, by dummy steps: the time of drafting by requests, and of a target step by tokens. They don't
follow another process on the device, other clocks, or longer contexts. `AdaptiveVerificationManager.set_cost_curves` takes new
ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from honed.adapt.steps.step_time import StepTimeModel

Curve: TypeAlias = list[tuple[int, float]]
"""(requests or tokens, milliseconds), ascending."""
GROWTH = 1.25
"""Growth from a size that isn't captured to the next point of a curve."""


def cost_curves(
    model: StepTimeModel,
    *,
    num_requests: int,
    context_tokens: int,
    num_spec_tokens: int,
    max_num_seqs: int,
    max_tokens: int,
    captured_tokens: Sequence[int] = (),
) -> tuple[Curve, Curve]:
    """Costs of drafting by requests, and of the rest of a step by tokens, both for batches like the present one.

    Args:
        model: one that is ready.
        num_requests, context_tokens: of the present batch.
        max_tokens: most tokens of a step.
        captured_tokens: sizes that steps are padded to. Beyond the largest, vLLM interpolates linearly between points. Sizes
            before the first of these points cost as much as it: so it is the next token. (Without captured sizes every size
            costs as much as the next point.)
    """
    per_request = context_tokens / max(num_requests, 1)
    batches = sorted({*_growing(1, max_num_seqs), max_num_seqs})
    draft = [(n, 1e3 * model.block_seconds(n, num_spec_tokens, round(n * per_request))) for n in batches]
    fixed = model.fixed_seconds(num_requests, context_tokens, 0)
    largest = max(captured_tokens, default=0)
    sizes = np.array(sorted({*captured_tokens, *_growing(largest + 1, max_tokens), max_tokens}), dtype=np.int64)
    verify = [(int(t), 1e3 * (fixed + seconds)) for t, seconds in zip(sizes, model.token_seconds(sizes), strict=True)]
    return draft, verify


def are_alike(one: tuple[Curve, Curve], other: tuple[Curve, Curve], tolerance: float = 0.03) -> bool:
    """Whether two pairs of curves have the same points, and no cost that differs by more than a share."""
    for mine, theirs in zip(one, other, strict=True):
        if [size for size, _ in mine] != [size for size, _ in theirs]:
            return False
        if any(abs(a - b) > tolerance * max(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True)):
            return False
    return True


def _growing(first: int, most: int) -> list[int]:
    sizes, size = [], first
    while size <= most:
        sizes.append(size)
        size = max(size + 1, round(size * GROWTH))
    return sizes
