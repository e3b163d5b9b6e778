"""Chooses how many draft tokens every request of a batch gets verified.

    goodput   maximise (N + Σ_i Σ_{j ≤ k_i} S_i(j)) / T         tokens per second of the batch
    latency   maximise N / (T · Σ_i 1/E_i(k_i))                  tokens per second of a request (harmonic mean)

with T = T(N + Σ_i k_i tokens, block = max_i k_i, context, prefill), less what the step's prompts add to it when nothing is
drafted (they have to be computed whatever is drafted), and E_i(k) = 1 + Σ_{j ≤ k} S_i(j). Either way a draft adds
its gain to a sum: g = S_i(j), or g = 1/E_i(j−1) − 1/E_i(j), and g never grows with j. So for a given total and cap on the block
it is best to admit the largest g anywhere in the batch, and what is admitted of a request is a prefix. The search therefore
runs over two numbers: a threshold on g, and a cap b on the block. k = 0 for everybody is a candidate of its own, priced
without the drafter.

For a small batch each value is its own threshold and the answer is the optimum (`block_size_exact`). For a large one, here,
values are sorted into `LEVELS` equal levels by one counting pass. A level is admitted whole, unless a captured graph size
lies within it: then exactly as many as fit are, the largest first. Of requests with equal g the earlier in the batch goes
first; apart from that a permutation of the batch permutes the answer. Requests that share a curve can be passed as one
(`group`): cost then grows with the number of curves. `block_size_shared` does the same for curves that many steps share.

Non-anticipation, on which losslessness rests: the only inputs are survival estimates from finished rounds and the batch's
shape. Nothing of the drafts that are about to be cut enters, so which drafts get verified is independent of what they are.

Letters: N = requests, C = their distinct survival curves, K = configured number of draft tokens, L = levels, B = caps that are
tried (K, or 1 when a shorter block isn't cheaper).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from honed.adapt.acceptance import Floats, Ints
from honed.adapt.block_size_exact import MOST_ENTRIES, Choice, OperatingPoint, choose_exact, work
from honed.adapt.step_time import StepTimeModel

LEVELS = 64


def allocate(
    survival: npt.NDArray[np.floating],
    model: StepTimeModel,
    *,
    context_tokens: int = 0,
    num_prefill_tokens: int = 0,
    ceilings: Ints | None = None,
    previous: OperatingPoint | None = None,
    hysteresis: float = 0.0,
) -> Ints:
    """Choose draft lengths [N]; see `choose`."""
    choice = choose(
        survival, model, context_tokens=context_tokens, num_prefill_tokens=num_prefill_tokens,
        ceilings=ceilings, previous=previous, hysteresis=hysteresis,
    )  # fmt: skip
    return np.array(choice.num_draft_tokens, dtype=np.int64)


def latency_gains(survival: npt.NDArray[np.floating]) -> Floats:
    """What each draft takes off a request's time per token: 1/E(j−1) − 1/E(j) of survival [..., K]."""
    expected = 1.0 + np.cumsum(survival, axis=-1, dtype=np.float64)
    gains: Floats = survival / ((expected - survival) * expected)
    return gains


def choose(
    gains: npt.NDArray[np.floating],
    model: StepTimeModel,
    *,
    is_latency: bool = False,
    group: Ints | None = None,
    context_tokens: int = 0,
    num_prefill_tokens: int = 0,
    ceilings: Ints | None = None,
    previous: OperatingPoint | None = None,
    hysteresis: float = 0.0,
) -> Choice:
    """Choose the draft lengths of the highest rate.

    Args:
        gains: g(j) of each curve, [C, K], non-increasing along the last axis: survival, or `latency_gains` of it.
        is_latency: which of the two the gains are.
        group: curve of each request, [N]; None: one request per curve.
        ceilings: most draft tokens of each curve, [C]; None: K for all.
        previous: kept unless the best choice's rate is more than `hysteresis` (relative) above its.
    """
    count = len(gains) if group is None else len(group)
    num_spec_tokens = gains.shape[1]
    if work(count, num_spec_tokens, model) <= MOST_ENTRIES:
        curves = gains.tolist()
        if ceilings is not None:
            curves = [curve[: max(ceiling, 0)] for curve, ceiling in zip(curves, ceilings.tolist(), strict=True)]
        return choose_exact(
            curves if group is None else [curves[row] for row in group.tolist()], model, is_latency=is_latency,
            context_tokens=context_tokens, num_prefill_tokens=num_prefill_tokens,
            previous=previous, hysteresis=hysteresis,
        )  # fmt: skip
    by_depth = np.ascontiguousarray(gains.T)  # [K, C]: depth first, so that reductions run over contiguous curves
    copies = None if group is None else np.bincount(group, minlength=len(gains))
    levels, is_block_priced = levels_of(by_depth, ceilings), model.is_block_priced and num_spec_tokens > 1
    admitted, gained = _cumulate(levels, by_depth, copies, is_block_priced)  # [B, L]
    batch = _Batch(count, num_spec_tokens, context_tokens, num_prefill_tokens, is_latency)
    found = _search(batch, model, admitted, gained, previous, hysteresis)
    if found.left_out:
        some, theirs = by_depth[: found.point.cap], levels[: found.point.cap]
        if group is not None:
            some, theirs = some[:, group], theirs[:, group]
        lengths = all_but_least_likely(some, theirs, found.level, found.left_out)
    else:
        lengths = np.add.reduce(levels[: found.point.cap] <= found.level, axis=0, dtype=np.int64)
        lengths = lengths if group is None else lengths[group]
    return Choice(lengths.tolist(), found.point, found.rate, found.rate_without, found.is_held)


class _Batch(NamedTuple):
    num_requests: int
    num_spec_tokens: int
    context_tokens: int
    num_prefill_tokens: int
    is_latency: bool


class _Found(NamedTuple):
    """Levels up to `level` are admitted (−1: nothing is), less `left_out` entries of the last."""

    level: int
    left_out: int
    point: OperatingPoint
    rate: float
    rate_without: float
    is_held: bool


def _search(
    batch: _Batch,
    model: StepTimeModel,
    admitted: Floats,  # [B, L]
    gained: Floats,  # [B, L]
    previous: OperatingPoint | None,
    hysteresis: float,
) -> _Found:
    count, num_spec_tokens, is_latency = batch.num_requests, batch.num_spec_tokens, batch.is_latency
    is_block_priced = len(admitted) > 1
    fixed = model.fixed_seconds_of_rounds(count, batch.context_tokens, batch.num_prefill_tokens)
    base_tokens = count + batch.num_prefill_tokens
    without = (1 if is_latency else count) / (fixed + model.seconds_of_tokens(base_tokens))
    nothing = _Found(-1, 0, OperatingPoint(1.0, 0), without, without, False)
    seconds = model.draft_seconds(count, num_spec_tokens, batch.context_tokens)[-len(admitted) :, None] + fixed
    totals = admitted.astype(np.int64)
    totals += base_tokens
    rate = _rate(count, gained, model.token_seconds(totals) + seconds, is_latency)
    best_rate, surplus = rate, totals
    if model.captured_tokens:
        surplus = _surplus(model, totals, base_tokens)
        fitted = model.token_seconds(totals - surplus) + seconds
        best_rate = np.maximum(rate, _rate(count, gained - surplus * LEVEL_VALUES, fitted, is_latency))
    row, level = divmod(int(best_rate.argmax()), LEVELS)
    best = float(best_rate[row, level])
    if previous is not None and hysteresis > 0.0:
        held_level = level_of(previous.threshold)
        if previous.cap <= 0 or held_level < 0:
            if best <= without * (1.0 + hysteresis):
                return nothing
        else:
            held_cap = min(previous.cap, num_spec_tokens) if is_block_priced else num_spec_tokens
            held = float(rate[held_cap - 1 if is_block_priced else 0, held_level])
            if held >= without and best <= held * (1.0 + hysteresis):
                return _Found(held_level, 0, OperatingPoint(previous.threshold, held_cap), held, without, True)
    if best <= without:
        return nothing
    point = OperatingPoint(float(LEVEL_LOWER[level]), row + 1 if is_block_priced else num_spec_tokens)
    return _Found(level, int(surplus[row, level]) if best > rate[row, level] else 0, point, best, without, False)


def levels_of(by_depth: npt.NDArray[np.floating], ceilings: Ints | None) -> npt.NDArray[np.intp]:
    """Sort survival [K, C] into levels, most likely first; L: above its ceiling, never admitted."""
    levels = ((1.0 - by_depth) * (LEVELS - 1e-3)).astype(np.intp)
    if ceilings is not None:
        levels = np.where(np.arange(len(by_depth))[:, None] < ceilings, levels, LEVELS)
    return levels


LEVEL_LOWER: Floats = 1.0 - np.arange(1, LEVELS + 1) / LEVELS
LEVEL_VALUES: Floats = LEVEL_LOWER + 0.5 / LEVELS


def level_of(threshold: float) -> int:
    """Last level that is wholly admitted at a threshold, −1 when none is."""
    return min(int((1.0 - threshold + 1e-9) * LEVELS), LEVELS) - 1


def _cumulate(
    levels: npt.NDArray[np.intp], by_depth: npt.NDArray[np.floating], copies: Ints | None, is_block_priced: bool
) -> tuple[Floats, Floats]:
    """Sum the entries of depth ≤ cap and level ≤ l, for every cap and level: how many, and their gains, both [B, L]."""
    width = LEVELS + 1
    num_rows = len(levels) if is_block_priced else 1
    flat = (levels + _DEPTHS[: len(levels)] * width if is_block_priced else levels).ravel()
    weights, gains = None, by_depth
    if copies is not None:
        weights, gains = np.broadcast_to(copies, levels.shape).ravel(), by_depth * copies
    sums = np.empty((2, num_rows, LEVELS))
    for row, weight in enumerate((weights, gains.ravel())):
        sums[row] = np.bincount(flat, weight, num_rows * width).reshape(num_rows, width)[:, :-1]
    np.add.accumulate(sums, axis=2, out=sums)
    if is_block_priced:
        np.add.accumulate(sums, axis=1, out=sums)
    return sums[0], sums[1]


_DEPTHS = np.arange(4096)[:, None]


def _rate(count: int, gained: Floats, seconds: Floats, is_latency: bool) -> Floats:
    """What is maximised, from the sum of gains."""
    return count / (seconds * (count - gained)) if is_latency else (count + gained) / seconds


def _surplus(model: StepTimeModel, totals: Ints, base_tokens: int) -> Ints:
    """Entries to leave out of each level so that the total is the captured size within it, [B, L]; 0 where there is none."""
    before = np.full_like(totals, base_tokens)
    before[:, 1:] = totals[:, :-1]
    table = model.captured_below
    below = table.take(totals, mode="clip")
    surplus: Ints = np.where((below > before) & (totals < len(table)), totals - below, 0)
    return surplus


def all_but_least_likely(by_depth: npt.NDArray[np.floating], levels: npt.NDArray[np.intp], level: int, left_out: int) -> Ints:
    """Admit everything above a level, and of the level itself all but its `left_out` least likely entries."""
    lengths: Ints = (levels < level).sum(axis=0)
    depth, request = np.nonzero(levels == level)
    kept = np.argsort(-by_depth[depth, request], kind="stable")[: len(request) - left_out]
    return lengths + np.bincount(request[kept], minlength=len(lengths))
