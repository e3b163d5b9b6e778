"""Chooses the number of verified draft tokens for every request of a batch.

    goodput   maximise (N + Σ_i Σ_{j ≤ k_i} S_i(j)) / T         tokens per second of the batch
    latency   maximise N / (T · Σ_i 1/E_i(k_i))                  tokens per second of a request (harmonic mean)

with T = T(N + Σ_i k_i tokens, block = max_i k_i, context, prefill) and E_i(k) = 1 + Σ_{j ≤ k} S_i(j). T leaves out what the
step's prompts add to it when nothing is drafted: they are computed in any case. Either way a draft adds its gain to a sum:
g = S_i(j), or g = 1/E_i(j−1) − 1/E_i(j), and g never grows with j. So for a given total and cap on the block it is best to
admit the largest g anywhere in the batch, and the admitted drafts of a request are a prefix. The search therefore runs over two
numbers: a threshold on g, and a cap b on the block. k = 0 for all requests is a separate candidate, without the drafter's cost.

For a small batch each value is its own threshold and the answer is the optimum (`compiled.exact`). For a large one values are
sorted into `LEVELS` equal levels by one counting pass (`compiled.by_levels`). A level is admitted whole, unless a captured
graph size lies within it: then exactly as many as fit are, the largest first. Among requests with equal g the earlier in the
batch goes first; apart from that a permutation of the batch permutes the answer.

The chosen length's estimate is too good on average, being the best of several. Only not drafting needs no estimate of
acceptance. So near break-even nothing is drafted: with hysteresis on, drafting has to promise that much more than not drafting.
Less is required where drafts add little to a step (`DEAR`): the possible loss is no larger.

Source: Smith and Winkler, Management Science 52 (2006), "The optimizer's curse".

Losslessness rests on non-anticipation: the only inputs are survival estimates from finished rounds and the batch's shape. The
drafts to be cut aren't an input, so the choice of verified drafts is independent of their values.

Letters: N = requests, C = survival curves, K = configured number of draft tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.steps.step_time import StepTimeModel

PRICED = ("goodput", "latency")
"""Kinds of policy that choose by prices."""
LEVELS = 64
LEVEL_VALUES: Floats = 1.0 - (np.arange(LEVELS) + 0.5) / LEVELS
"""Typical gain of each level, the largest first."""
PARTS, PART_BITS = 65_535, 10
"""Gains of large batches are rounded to parts; so many of their lower bits distinguish gains of one level."""
MOST_ENTRIES = 512
"""Most candidates (entries times caps) for which each is its own threshold."""
DEAR = 0.2
"""Drafts that add at least this share to a step's time must promise the full hysteresis; cheaper ones proportionally less."""
NO_PREVIOUS = -1
"""Placeholder for a cap: there is no previous choice."""
LOST_GRAPH = 1.25
"""Assumed factor on a step's time without its CUDA graph: a guess, since it differs from model to model."""
Parts: TypeAlias = npt.NDArray[np.uint16]
Found: TypeAlias = tuple[Ints, int, float, int, float, float, float, bool]
"""Draft lengths [N], the longest of them, threshold, cap (0: no drafts), rate, rate without drafts, the best with drafts,
whether the previous choice was kept."""


class OperatingPoint(NamedTuple):
    """Parameters of a choice that hysteresis keeps while batches change."""

    threshold: float
    cap: int
    """Longest block; 0: nothing is drafted."""


class Choice(NamedTuple):
    """Draft lengths of a batch and their predicted rates."""

    num_draft_tokens: list[int]  # [N]
    point: OperatingPoint
    rate: float
    """The maximised rate, per second: expected tokens of the batch, or of a typical request in latency mode."""
    rate_without: float
    """The same without drafts."""
    rate_drafting: float = 0.0
    """The best rate with drafts, chosen or not; 0: no drafts are possible, or it isn't computed (trees)."""

    @property
    def margin(self) -> float:
        """Predicted relative gain of drafting over not drafting; below 0: a loss."""
        return self.rate_drafting / self.rate_without - 1.0


def nothing(count: int, rate: float) -> Choice:
    """No drafts for any request."""
    return Choice([0] * count, OperatingPoint(1.0, 0), rate, rate)


def latency_gains(survival: npt.NDArray[np.floating]) -> Floats:
    """Reduction of a request's time per token by each draft: 1/E(j−1) − 1/E(j) of survival [..., K]."""
    expected = 1.0 + np.cumsum(survival, axis=-1, dtype=np.float64)
    gains: Floats = survival / ((expected - survival) * expected)
    return gains


@dataclass(frozen=True, slots=True)
class CurveTable:
    """A set of curves; many batches may share it."""

    gains: Floats  # [C, K]
    parts: Parts  # [C, K], the same in `PARTS`: a large batch reads many curves, which are no longer in the caches

    @classmethod
    def of(cls, gains: npt.NDArray[np.floating]) -> CurveTable:
        """Tabulate gains [C, K], as `choose` takes them."""
        made = np.ascontiguousarray(gains, dtype=np.float64)
        return cls(made, np.rint(made * PARTS).astype(np.uint16))


def choose(
    gains: npt.NDArray[np.floating] | CurveTable,
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
    """Choose the draft lengths with the highest rate.

    Args:
        gains: g(j) of each curve, [C, K], non-increasing along the last axis: survival, or `latency_gains` of it.
        is_latency: the gains are `latency_gains`.
        group: curve of each request, [N]; None: one request per curve.
        ceilings: most draft tokens of each request, [N]; None: K for all.
        previous: kept unless the best choice's rate is more than `hysteresis` (relative) above its rate. Nothing is drafted
            unless that is better than not drafting by more than `hysteresis`: twice as much where nothing was drafted before,
            less where drafts cost less than `DEAR`.
    """
    from honed.adapt.lengths import compiled

    table = gains if isinstance(gains, CurveTable) else CurveTable.of(gains)
    num_curves, depth = table.gains.shape
    count = num_curves if group is None else len(group)
    seconds, captured_below = model.price_tables(count * (depth + 1) + num_prefill_tokens)
    if not num_prefill_tokens:
        seconds = compiled.with_kinds(seconds, *model.kind_table(), count, depth, model.parameter_array, context_tokens)
    found = compiled.search(
        table.gains,
        table.parts,
        np.arange(count) if group is None else group,
        np.full(count, depth) if ceilings is None else ceilings,
        model.parameter_array,
        seconds,
        captured_below,
        context_tokens,
        num_prefill_tokens,
        is_latency,
        to_hold(previous, hysteresis),
    )
    return choice_of(found)


def to_hold(previous: OperatingPoint | None, hysteresis: float) -> tuple[float, int, float]:
    """Previous choice for `compiled.search`: its threshold and cap, and the hysteresis."""
    if previous is None or hysteresis <= 0.0:
        return 1.0, NO_PREVIOUS, 0.0
    return previous.threshold, previous.cap, hysteresis


def promised(costs: float, is_begun: bool, hysteresis: float) -> float:
    """Required relative gain of drafting over not drafting, where drafts add this share to a step's time."""
    return (1.0 if is_begun else 2.0) * hysteresis * min(max(costs, 0.0) / DEAR, 1.0)


def choice_of(found: Found) -> Choice:
    """Make a choice from the result of `compiled.search`."""
    lengths, _, threshold, cap, rate, without, drafting, _ = found
    return Choice(lengths.tolist(), OperatingPoint(threshold, cap), rate, without, drafting)


def rates_of(
    lengths: Ints,
    gains: Floats,
    model: StepTimeModel,
    *,
    is_latency: bool = False,
    context_tokens: int = 0,
    num_prefill_tokens: int = 0,
) -> tuple[Floats, Floats]:
    """Rates of given lengths, as `choose` computes them, and seconds of such steps: for each of M ways, [M].

    Args:
        lengths: draft tokens of each request in each way, [M, N].
        gains: g(j) of each request, [N, K].
    """
    count = len(gains)
    sums = np.concatenate([np.zeros((count, 1)), np.cumsum(gains, axis=1)], axis=1)
    gained = sums[np.arange(count), lengths].sum(axis=1)
    num_drafts, block = lengths.sum(axis=1), lengths.max(axis=1)
    seconds = model.draft_seconds(count, gains.shape[1], context_tokens).take(block)
    seconds += model.fixed_seconds_of_rounds(count, context_tokens, num_prefill_tokens)
    seconds += model.token_seconds(num_drafts + (count + num_prefill_tokens))
    if not num_prefill_tokens:
        seconds *= model.kind_factors(count, num_drafts)
    rates: Floats = count / (count - gained) / seconds if is_latency else (count + gained) / seconds
    return rates, seconds


def _round_seconds(
    model: StepTimeModel, count: int, num_drafts: int, block: int, context_tokens: int, num_prefill_tokens: int
) -> float:
    """T of a step with so many requests and drafts, without what its prompts add to it when nothing is drafted."""
    fixed = model.fixed_seconds_of_rounds(count, context_tokens, num_prefill_tokens)
    drafting = model.block_seconds(count, block, context_tokens) if block else 0.0
    seconds = fixed + model.seconds_of_tokens(count + num_prefill_tokens + num_drafts) + drafting
    return seconds * model.kind_factor(count, num_drafts, num_prefill_tokens)


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
    ceilings: Ints | None = None,
) -> Choice:
    """Choose one length for all requests, for engines on which unequal lengths lose the captured graph.

    Requests with a lower ceiling get that instead. This costs the graph, `LOST_GRAPH` times the step, and is chosen where the
    others' drafts are worth it.

    Args:
        gains: Σ_i g_i(j) of the batch by depth, over the requests whose ceilings allow it, [k_max].
        count: N.
        ceilings: most draft tokens of each request, [N]; None: no ceilings.
        captured_lengths: the lengths, beside 0, that may be chosen; empty: all.
        previous, hysteresis: as in `choose`; the cap is kept.
    """
    rates: list[float] = []
    seconds_of: list[float] = []
    for k, gained in enumerate(accumulate(gains, initial=0.0)):
        num_drafts = k * count if ceilings is None else int(np.minimum(ceilings, k).sum())
        seconds = _round_seconds(model, count, num_drafts, k, context_tokens, num_prefill_tokens)
        if num_drafts < k * count:
            seconds *= LOST_GRAPH
        rates.append(count / (seconds * (count - gained)) if is_latency else (count + gained) / seconds)
        seconds_of.append(seconds)

    def least(k: int, is_begun: bool) -> float:
        return rates[0] * (1.0 + promised(seconds_of[k] / seconds_of[0] - 1.0, is_begun, hysteresis))

    open_ = [k for k in captured_lengths if 0 < k < len(rates)] if captured_lengths else range(1, len(rates))
    best = held = max((0, *open_), key=rates.__getitem__)
    if previous is not None and (before := min(max(previous.cap, 0), len(gains))) in (0, *open_):
        held = before
    if previous is not None and rates[best] <= least(best, bool(held)):
        best = held = 0
    elif held and rates[held] <= least(held, True):
        held = best
    k = held if held > 0 and rates[best] <= rates[held] * (1.0 + hysteresis) else best
    lengths = [k] * count if ceilings is None else np.minimum(ceilings, k).tolist()
    drafting_rate = max((rates[k] for k in open_), default=0.0)
    return Choice(lengths, OperatingPoint(0.0 if k else 1.0, k), rates[k], rates[0], drafting_rate)
