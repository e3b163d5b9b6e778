"""Chooses the number of verified tree nodes for every request of a batch.

    goodput   maximise (N + Σ_i Σ_{j ≤ n_i} g_i(j)) / T          tokens per second of the batch
    latency   maximise N / (T · Σ_i 1/E_i(n_i))                   tokens per second of a request (harmonic mean)

with g_i(j) = exp(score) of the j-th node that request i's tree admits, T = T(N + Σ_i n_i tokens, context, prefill) and
E_i(n) = 1 + Σ_{j ≤ n} g_i(j). A best-first tree admits nodes by falling score, and the first n nodes of any tree are the best
n. So g is a curve like the survival that `block_size` cuts: the optimum admits the largest gains anywhere in the batch. One
sort and one sum give every total's cost, captured sizes included. Unlike `block_size`'s levels this resolves gains of 1 % and
below, where trees end. The cost of drafting depends on the depth of the block, never on the number of nodes.

There are two decisions. *Before* the drafter runs: is it worth running? Only earlier rounds' expected gains are known then
(`TreeBudget.is_worth_drafting`, with the drafter's time). *After*: how many nodes? The drafter's time is spent then, whatever
is verified (`TreeBudget.allocate`, `sunk`).

Trees are lossless although they are cut by the very drafts that are verified. A chain of *sampled* drafts must not be cut so:
its acceptance test assumes that a draft's value doesn't decide whether it is tested. A tree samples nothing. Candidates, scores
and so the trees of the whole batch are functions of the prefixes alone, fixed before the target computes anything. At every
node that the walk reaches, the target samples one token from its own distribution given the path. The walk follows the child
that equals it; without one it stops, and still emits the token. So each emitted token is the target's own sample for any tree;
the tree only decides how many come from one pass. A tree must never depend on tokens that the target has already sampled
*beyond* the prefix.

Letters: N = requests, B = nodes of a request's tree (the largest it may have).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from honed.adapt.lengths.block_size import Choice, OperatingPoint, latency_gains, nothing
from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.steps.step_time import PARAMETERS, StepTimeModel


@dataclass(frozen=True, slots=True)
class TreeLimits:
    """Limits on every choice; None: no limit."""

    most_nodes: int | None = None
    """Nodes of all requests together."""
    most_tokens: int | None = None
    """Tokens scheduled in the step: one for each request, prefill, nodes."""
    is_within_captured: bool = False
    """Stay within the largest captured size, if any. A batch that exceeds it without nodes gets none."""

    def nodes(self, base_tokens: int, model: StepTimeModel) -> float:
        """Number of nodes that fit beside so many tokens."""
        limits: list[float] = [float("inf") if self.most_nodes is None else self.most_nodes]
        if self.most_tokens is not None:
            limits.append(self.most_tokens - base_tokens)
        if self.is_within_captured and model.captured_tokens:
            limits.append(model.captured_tokens[-1] - base_tokens)
        return max(min(limits), 0)


def stack_gains(gains: Sequence[Floats]) -> Floats:
    """Put requests' gains, each as long as its tree, into one table [N, B], 0 where a tree has no more nodes."""
    table = np.zeros((len(gains), max(map(len, gains), default=0)))
    for row, curve in zip(table, gains, strict=True):
        row[: len(curve)] = curve
    return table


def choose_nodes(
    gains: Floats,
    model: StepTimeModel,
    *,
    is_latency: bool = False,
    context_tokens: int = 0,
    num_prefill_tokens: int = 0,
    ceilings: Ints | None = None,
    limits: TreeLimits = TreeLimits(),  # frozen: sharing the default is safe
    previous: OperatingPoint | None = None,
    hysteresis: float = 0.0,
) -> Choice:
    """Choose the numbers of nodes with the highest rate; `num_draft_tokens` of the answer are nodes.

    Among equal gains the earlier request's come first; apart from that a permutation of the batch permutes the answer.

    Args:
        gains: g(j) of each request in order of admission, [N, B], within 0 … 1 and non-increasing. Goodput's gains in
            latency mode too.
        model: ready. If its drafter has a cost, drafting anything costs a block of 1; in `sunk` the whole block is paid.
        ceilings: most nodes of each request, [N]; None: B for all.
        previous: kept unless the best choice's rate is more than `hysteresis` (relative) above its rate.

    Raises:
        ValueError: a NaN, a gain outside 0 … 1, or one larger than that of the node before.
    """
    gains = _checked(gains)
    count, width = gains.shape
    if not count:
        return nothing(0, 0.0)
    worth = latency_gains(gains) if is_latency else gains
    allowed = gains > 0.0
    if ceilings is not None:
        allowed &= np.arange(width) < np.asarray(ceilings, dtype=np.int64)[:, None]
    entries = np.flatnonzero(allowed.T.ravel())  # depth first: among equal gains the earlier node, then the earlier request
    values = worth.T.ravel()[entries]
    order = np.argsort(-values, kind="stable")
    values = values[order]
    base = count + num_prefill_tokens
    most = int(min(limits.nodes(base, model), len(values)))
    fixed = model.fixed_seconds(count, context_tokens, num_prefill_tokens)
    without = (1 if is_latency else count) / (fixed + model.seconds_of_tokens(base))
    if not most:
        return nothing(count, without)
    gained = np.concatenate([[0.0], np.cumsum(values[:most])])
    seconds = fixed + model.token_seconds(np.arange(base, base + most + 1))
    seconds[1:] += model.block_seconds(count, 1, context_tokens)
    rates = count / (seconds * (count - gained)) if is_latency else (count + gained) / seconds

    def admit(num: int, point: OperatingPoint, is_held: bool = False) -> Choice:
        nodes = np.bincount(entries[order[:num]] % count, minlength=count).tolist()
        return Choice(nodes, point, float(rates[num]), without, is_held)

    num = int(rates.argmax())
    if previous is not None and hysteresis > 0.0:
        held = int((values[:most] >= previous.threshold).sum()) if previous.cap > 0 else 0
        if rates[held] >= without and rates[num] <= rates[held] * (1.0 + hysteresis):
            return admit(held, previous, is_held=True) if held else nothing(count, without)
    if not num:
        return nothing(count, without)
    following = float(values[num]) if num < len(values) else 0.0
    return admit(num, OperatingPoint(0.5 * (float(values[num - 1]) + following), width))


def _checked(gains: Floats) -> Floats:
    gains = np.asarray(gains, dtype=np.float64)
    if gains.ndim != 2:
        raise ValueError(f"gains must be [requests, nodes], not {gains.ndim}-dimensional")
    if not ((gains >= 0.0) & (gains <= 1.0 + 1e-6)).all():
        raise ValueError("gains must be probabilities; there is a NaN or one outside 0 … 1")
    if (gains[:, 1:] > gains[:, :-1] + 1e-12).any():
        raise ValueError("a request's gains must not grow: give them in a best-first tree's order of admission")
    return gains


_MOST_BATCHES = 32


@lru_cache(maxsize=8)
def sunk(model: StepTimeModel, num_depths: int) -> StepTimeModel:
    """Costs after a block of so many depths is drafted: the drafter's cost is paid, with or without nodes."""
    p = dict(zip(PARAMETERS, model.parameters, strict=True))
    base = p["base"] + p.pop("drafting") + num_depths * p.pop("per_block_token")
    per_request = p["per_request"] + p.pop("drafting_per_request") + num_depths * p.pop("per_block_token_and_request")
    per_context_token = p["per_context_token"] + p.pop("drafting_per_context_token")
    p |= {"base": base, "per_request": per_request, "per_context_token": per_context_token}
    return replace(StepTimeModel.of(model.captured_tokens, **p), kinds=model.kinds)


@dataclass(frozen=True, slots=True)
class TreeBudgetSettings:
    """Settings for cutting a server's trees."""

    most_nodes_per_request: int = 64
    limits: TreeLimits = TreeLimits()
    is_latency: bool = False
    hysteresis: float = 0.005
    remembered_rounds: int = 256
    """Remembered trees of each workload, the latest."""
    min_rounds: int = 64
    """Trees of a workload before its drafter may be skipped."""
    recheck_steps: int = 16
    """Steps for which the decision whether to draft is kept, for batches of the same composition."""
    explore_steps: int = 32
    """While the drafter is skipped, it still runs after so many steps to update its trees' expected gains. Each time these are
    still too small the wait doubles, up to sixteen times this."""


class TreeBudget:
    """The two decisions of a step, and their memory: the gains of recent trees."""

    def __init__(self, num_depths: int, settings: TreeBudgetSettings = TreeBudgetSettings()) -> None:  # frozen settings
        self.num_depths, self.settings = num_depths, settings
        self._recent: dict[str, deque[Floats]] = {}
        self._point: OperatingPoint | None = None
        self._is_skipping = False
        self._skipped, self._wait = 0, settings.explore_steps
        self._asked: tuple[object, ...] = ()
        self._age = 0

    def is_worth_drafting(
        self, workloads: Sequence[str], model: StepTimeModel, *, context_tokens: int = 0, num_prefill_tokens: int = 0
    ) -> bool:
        """Decide, before the drafter runs, whether to run it for a batch of requests of these workloads.

        Skipping begins when it is better, and ends when drafting is better by more than the hysteresis. The drafter always
        runs for a workload with few trees.
        """
        if not workloads:
            return False
        if any(len(self._recent.get(name, ())) < self.settings.min_rounds for name in workloads):
            return True
        if self._skipped >= self._wait:
            self._skipped, self._wait = 0, min(2 * self._wait, 16 * self.settings.explore_steps)
            self._asked = ()
            return True
        asked = (model, *sorted(workloads))
        self._age += 1
        if asked != self._asked or self._age >= self.settings.recheck_steps:
            self._asked, self._age = asked, 0
            ratio = self._promise(workloads, model, context_tokens, num_prefill_tokens)
            self._is_skipping = ratio <= 1.0 + self.settings.hysteresis * self._is_skipping
        if not self._is_skipping:
            self._skipped, self._wait = 0, self.settings.explore_steps
            return True
        self._skipped += 1
        return False

    def allocate(
        self,
        gains: Sequence[Floats],
        workloads: Sequence[str],
        model: StepTimeModel,
        *,
        context_tokens: int = 0,
        num_prefill_tokens: int = 0,
        ceilings: Ints | None = None,
    ) -> Choice:
        """Choose numbers of nodes once the trees are known, and remember their gains."""
        table = np.zeros((len(gains), self.settings.most_nodes_per_request))
        held = stack_gains(gains)[:, : table.shape[1]]
        table[:, : held.shape[1]] = held
        choice = self._choose(table, model, context_tokens, num_prefill_tokens, self._point, ceilings)
        self._point = choice.point
        for name, row in zip(workloads, table, strict=True):
            self._recent.setdefault(name, deque(maxlen=self.settings.remembered_rounds)).append(row)
        return choice

    def _choose(
        self,
        table: Floats,
        model: StepTimeModel,
        context_tokens: int,
        num_prefill_tokens: int,
        previous: OperatingPoint | None = None,
        ceilings: Ints | None = None,
    ) -> Choice:
        return choose_nodes(
            table,
            sunk(model, self.num_depths),
            is_latency=self.settings.is_latency,
            context_tokens=context_tokens,
            num_prefill_tokens=num_prefill_tokens,
            ceilings=ceilings,
            limits=self.settings.limits,
            previous=previous,
            hysteresis=self.settings.hysteresis,
        )

    def _promise(self, workloads: Sequence[str], model: StepTimeModel, context_tokens: int, num_prefill_tokens: int) -> float:
        """Estimate the best rate with the drafter over that without.

        Batches are made of remembered trees, and each is cut by itself. Cutting their mean instead would miss the value of
        knowing the tree (the best of a mean is less than the mean of the bests).
        """
        count = len(workloads)
        pools = [self._recent[name] for name in workloads]
        num_batches = min(-(-max(map(len, pools)) // count), _MOST_BATCHES)
        stride = max(1, max(map(len, pools)) // (num_batches * count))  # over all remembered trees, not the latest only
        batches = [
            np.stack([pool[(batch * count + place) * stride % len(pool)] for place, pool in enumerate(pools)])
            for batch in range(num_batches)
        ]
        tokens = seconds = 0.0
        for rows in batches:
            choice = self._choose(rows, model, context_tokens, num_prefill_tokens)
            won = 1.0 if self.settings.is_latency else count + _admitted(rows, choice.num_draft_tokens)
            tokens, seconds = tokens + won, seconds + won / choice.rate
        without = (1 if self.settings.is_latency else count) / (
            model.fixed_seconds(count, context_tokens, num_prefill_tokens) + model.seconds_of_tokens(count + num_prefill_tokens)
        )
        return tokens / seconds / without


def _admitted(gains: Floats, nodes: Sequence[int]) -> float:
    return float(gains[np.arange(gains.shape[1]) < np.asarray(nodes)[:, None]].sum())
