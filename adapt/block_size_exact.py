"""The optimum for a small batch, in plain Python. `block_size` says what is maximised.

Every gain g_i(j) is a threshold that is tried, with every cap on the block where a shorter one is cheaper. No numpy on purpose:
this runs between two engine steps, when numpy's code has left the caches and a dozen of its calls take longer than a few
hundred loop turns of an interpreter that is warm anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from honed.adapt.step_time import StepTimeModel

MOST_ENTRIES = 256
"""Up to so much work (see `work`) this is the faster way."""


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """What a choice comes down to, and what hysteresis holds on to while batches come and go."""

    threshold: float
    cap: int
    """Longest block; 0: nothing is drafted."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Draft lengths of a batch and what is expected of them."""

    num_draft_tokens: list[int]  # [N]
    point: OperatingPoint
    rate: float
    """What was maximised, per second: expected tokens of the batch, or of a typical request when latency counts."""
    rate_without: float
    """The same with nothing drafted."""
    is_held: bool = False
    """The best choice gained too little over the previous operating point, which was kept."""


def nothing(count: int, rate: float) -> Choice:
    """No drafts for anybody."""
    return Choice([0] * count, OperatingPoint(1.0, 0), rate, rate)


def work(count: int, num_spec_tokens: int, model: StepTimeModel) -> int:
    """Number of candidates that `choose_exact` has to look at for N requests and K draft tokens."""
    entries = count * num_spec_tokens
    return entries * (num_spec_tokens + 1) // 2 if model.is_block_priced else entries


def choose_exact(
    gains: Sequence[Sequence[float]],
    model: StepTimeModel,
    *,
    is_latency: bool = False,
    context_tokens: int = 0,
    num_prefill_tokens: int = 0,
    previous: OperatingPoint | None = None,
    hysteresis: float = 0.0,
) -> Choice:
    """Choose the draft lengths of the highest rate; of equal gains those of the earlier request go first.

    Args:
        gains: g(j) of each request up to its ceiling, [N][k_max of that request], non-increasing.
        model: a step-time model that is ready.
        is_latency: what the gains are of, see `block_size.latency_gains`.
        previous: kept unless the best choice's rate is more than `hysteresis` (relative) above its.
    """
    count = len(gains)
    depth = max(map(len, gains), default=0)
    fixed = model.fixed_seconds_of_rounds(count, context_tokens, num_prefill_tokens)
    base = count + num_prefill_tokens
    prices = model.token_prices(base, base + count * depth + 1)
    without = (1 if is_latency else count) / (fixed + prices[0])
    best, best_order, best_cap, best_num = without, [0][:0], 0, 0
    held, held_order, held_num = -1.0, best_order, 0
    # Depth first: entry e is request e % N at depth e // N + 1, and a cap of b leaves the entries below b·N.
    flat = [curve[j] if j < len(curve) else -1.0 for j in range(depth) for curve in gains]
    order = [e for e in sorted(range(len(flat)), key=flat.__getitem__, reverse=True) if flat[e] >= 0.0]
    held_cap = 0 if previous is None or previous.cap <= 0 else min(previous.cap, depth) if model.is_block_priced else depth
    for cap in range(depth, 0, -1) if model.is_block_priced else (depth,) * (depth > 0):
        if cap < depth:
            order = [e for e in order if e < cap * count]
        values = [flat[e] for e in order]
        constant = fixed + model.block_seconds(count, cap, context_tokens)
        sums = zip(accumulate(values, initial=0.0), prices, strict=False)
        if is_latency:
            rates = [count / ((constant + price) * (count - gained)) for gained, price in sums]
        else:
            rates = [(count + gained) / (constant + price) for gained, price in sums]
        top = max(rates)
        if top > best:
            best, best_order, best_cap, best_num = top, order, cap, rates.index(top)
        if cap == held_cap and previous is not None:
            held_num = bisect_left(values, -previous.threshold, key=float.__neg__)
            held, held_order = rates[held_num], order
    if previous is not None and hysteresis > 0.0:
        if held_num == 0:
            if best <= without * (1.0 + hysteresis):
                return nothing(count, without)
        elif held >= without and best <= held * (1.0 + hysteresis):
            return Choice(_lengths(held_order[:held_num], count), previous, held, without, is_held=True)
    if best_num == 0:
        return nothing(count, without)
    # Half-way to the next value: a small change of either doesn't change what a held threshold admits.
    following = flat[best_order[best_num]] if best_num < len(best_order) else 0.0
    point = OperatingPoint(0.5 * (flat[best_order[best_num - 1]] + following), best_cap)
    return Choice(_lengths(best_order[:best_num], count), point, best, without)


def choose_equal(
    gains: Sequence[float],
    count: int,
    model: StepTimeModel,
    *,
    is_latency: bool = False,
    context_tokens: int = 0,
    num_prefill_tokens: int = 0,
    previous: OperatingPoint | None = None,
    hysteresis: float = 0.0,
    captured_lengths: Sequence[int] = (),
) -> Choice:
    """Choose one length for everybody, for engines on which lengths that differ lose the captured graph.

    Args:
        gains: Σ_i g_i(j) of the batch by depth, [k_max].
        count: N.
        captured_lengths: the lengths, beside 0, that may be chosen; empty: all.
        previous: its cap is kept unless the best rate is more than `hysteresis` (relative) above that length's.
    """
    fixed = model.fixed_seconds_of_rounds(count, context_tokens, num_prefill_tokens)
    base, rates = count + num_prefill_tokens, []
    for k, gained in enumerate(accumulate(gains, initial=0.0)):
        drafting = model.block_seconds(count, k, context_tokens) if k else 0.0
        seconds = fixed + model.seconds_of_tokens(base + k * count) + drafting
        rates.append(count / (seconds * (count - gained)) if is_latency else (count + gained) / seconds)
    open_ = [k for k in captured_lengths if 0 < k < len(rates)] if captured_lengths else range(1, len(rates))
    best = held = max((0, *open_), key=rates.__getitem__)
    if previous is not None and (before := min(max(previous.cap, 0), len(gains))) in (0, *open_):
        held = before
    is_held = held != best and rates[best] <= rates[held] * (1.0 + hysteresis)
    k = held if is_held else best
    return Choice([k] * count, OperatingPoint(0.0 if k else 1.0, k), rates[k], rates[0], is_held)


def _lengths(entries: list[int], count: int) -> list[int]:
    lengths = [0] * count
    for entry in entries:
        lengths[entry % count] += 1
    return lengths
