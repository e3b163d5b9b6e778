"""`block_size.choose` for a large batch whose curves were tabulated beforehand, where a shorter block isn't cheaper.

That is the common case beside a GPU, and it runs between two engine steps, when numpy's code has left the caches. So numpy
adds up the curves and looks the answer up; what is between, a few figures for each level, is plain Python: some forty calls of
numpy took as long in a tight loop, but 2.7 times as long after other work.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from honed.adapt.acceptance import Floats, Ints
from honed.adapt.block_size import LEVEL_LOWER, LEVEL_VALUES, LEVELS, all_but_least_likely, level_of, levels_of
from honed.adapt.block_size_exact import Choice, OperatingPoint, nothing
from honed.adapt.step_time import StepTimeModel

_VALUES: list[float] = LEVEL_VALUES.tolist()


@dataclass(frozen=True, slots=True)
class CurveTable:
    """A set of curves that many batches will share, with what each of them admits up to every level."""

    by_depth: Floats  # [K, C]
    levels: npt.NDArray[np.intp]  # [K, C]
    up_to: Floats  # [C, 2L] entries up to each level, then their gains
    lengths: Ints  # [L, C] the same entries: they are a length

    @classmethod
    def of(cls, gains: npt.NDArray[np.floating]) -> CurveTable:
        """Tabulate gains [C, K], as `choose` takes them."""
        by_depth = np.ascontiguousarray(gains.T, dtype=np.float64)
        levels = levels_of(by_depth, None)
        is_admitted = (levels[:, :, None] <= np.arange(LEVELS)).astype(np.float64)  # [K, C, L]
        admitted, gained = is_admitted.sum(axis=0), (is_admitted * by_depth[:, :, None]).sum(axis=0)
        lengths = np.ascontiguousarray(admitted.T.astype(np.int64))
        return cls(by_depth, levels, np.concatenate([admitted, gained], axis=1), lengths)


def choose_shared(
    table: CurveTable,
    group: Ints,
    model: StepTimeModel,
    *,
    is_latency: bool = False,
    context_tokens: int = 0,
    num_prefill_tokens: int = 0,
    previous: OperatingPoint | None = None,
    hysteresis: float = 0.0,
) -> Choice:
    """As `choose`, for models that don't price blocks (`is_block_priced`).

    Args:
        group: curve of each request, [N].
    """
    count, depth = len(group), len(table.by_depth)
    sums = (np.bincount(group, minlength=len(table.up_to)).astype(np.float64) @ table.up_to).tolist()
    fixed = model.fixed_seconds_of_rounds(count, context_tokens, num_prefill_tokens)
    base = count + num_prefill_tokens
    without = (1 if is_latency else count) / (fixed + model.seconds_of_tokens(base))
    seconds = fixed + (model.block_seconds(count, depth, context_tokens) if depth else 0.0)
    if hysteresis <= 0.0:
        previous = None
    held_level = level_of(previous.threshold) if previous is not None and previous.cap > 0 else -1

    def rate_of(total: int, gained: float) -> float:
        taken = seconds + model.seconds_of_tokens(total)
        return count / (taken * (count - gained)) if is_latency else (count + gained) / taken

    rate = held = rate_of(base, 0.0)
    best, level, left_out, before = 0.0, -1, 0, base
    for this, (admitted, gained) in enumerate(zip(sums[:LEVELS], sums[LEVELS:], strict=True)):
        total = base + int(admitted)
        if total > before:
            rate = rate_of(total, gained)
            if rate > best:
                best, level, left_out = rate, this, 0
            fitting = model.captured_at_most(total)
            if before < fitting < total:  # as many of the level as fill a captured graph
                fitted = rate_of(fitting, gained - (total - fitting) * _VALUES[this])
                if fitted > best:
                    best, level, left_out = fitted, this, total - fitting
            before = total
        if this == held_level:
            held = rate
    if previous is not None:
        if held_level < 0:
            if best <= without * (1.0 + hysteresis):
                return nothing(count, without)
        elif held >= without and best <= held * (1.0 + hysteresis):
            point = OperatingPoint(previous.threshold, depth)
            return Choice(table.lengths[held_level].take(group).tolist(), point, held, without, is_held=True)
    if best <= without:
        return nothing(count, without)
    point = OperatingPoint(float(LEVEL_LOWER[level]), depth)
    if left_out:
        lengths = all_but_least_likely(table.by_depth[:, group], table.levels[:, group], level, left_out)
    else:
        lengths = table.lengths[level].take(group)
    return Choice(lengths.tolist(), point, best, without)
