"""Predicts other rules' tokens per second on logged traffic, with intervals.

The text is kept: the same requests emit the same tokens. At every logged step a rule chooses draft lengths k' for the requests
in it. A round that drafted k and accepted a would have accepted min(a, k') where k' ≤ k or the round broke (a < k), exactly.
Other outcomes are *modelled*: those beyond k, and rounds that would have begun within a logged one. `walk` follows each
request's text to the number of rounds ρ_i that begin within each logged round i.

The load is kept (a closed loop: a step keeps its number of requests). A step s of N_s requests lasts F_s, as `seconds`
has it. Its surplus or missing rounds, Δ_s = Σ_{i in s} (ρ_i − 1), are Δ_s / N_s more steps without prefill, of D_s:

    tokens per second = Σ_i emitted_i / Σ_s (F_s + Δ_s / N_s · D_s)

Tokens are those that verify rounds emit, as vLLM counts them: without a prompt's first token, with tokens that a stop cuts off.
Time is the engine's busy time. Where requests arrive by themselves, a slower rule would also make them queue; this isn't
modelled.

A request waits for whole steps: its time per output token is Σ_i (F_s + (ρ_i − 1) · D_s) / Σ_i emitted_i over its rounds.

Intervals are 95 %. They cover the spread between requests, in up to `MOST_CLUSTERS` groups of consecutive ones of each cell,
with Student's t where these are few. They cover the spread of estimates used throughout (acceptance with few trials, step
times), by resampling; and `Prices.doubt`. With fewer requests than `LEAST_REQUESTS` there is no interval.

Letters: S = steps, R = verify rounds, Q = requests, K = draft tokens that the engine was configured for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from honed.adapt.control.settings import ControllerSettings
from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.replay.acceptance import Counts, believe
from honed.adapt.replay.log import Log
from honed.adapt.replay.rules import Rule, lengths_of
from honed.adapt.replay.seconds import Prices, Shape, StepRows, price
from honed.adapt.replay.walk import Odds, Text

MOST_CLUSTERS = 64
NUM_RESAMPLES = 16
LEAST_REQUESTS = 5
"""With fewer requests, their spread is unknown."""
_T_FREEDOM = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 60.0, np.inf)
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.306, 2.228, 2.131, 2.086, 2.042, 2.000, 1.960)
"""Student's 97.5 % quantile by degrees of freedom."""


@dataclass(frozen=True)
class Figure:
    """An estimate and its 95 % interval; None: unknown, with so few requests."""

    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Prediction:
    """A rule's predicted figures."""

    policy: str
    tokens_per_s: Figure | None
    """None: the log has only one draft length, so the cost of another is unknown."""
    ratio: Figure | None
    """Tokens per second over those logged."""
    tpot_s: Figure | None
    """Time per output token of a request from its first token on, seconds, mean over requests."""
    tpot_p95_s: float | None
    """The 95th percentile over requests."""
    acceptance_length: float
    """Tokens per verify round, bonus token included, over all rounds."""
    draft_tokens_per_round: float
    exact_rounds: float
    """Share of the rounds that begin where a logged one did, with an outcome that the logged one determines."""
    exact_tokens: float
    """Share of the tokens that come from those rounds."""
    exact_seconds: float
    """Share of the time that is predicted from logged steps of the same batch size, draft length and block."""
    graph_steps: float | None
    """Share of the steps without prefill whose draft lengths have CUDA graphs; None: no graphs for certain lengths are known,
    or there are no such steps."""


@dataclass(frozen=True)
class Logged:
    """The log's own figures."""

    tokens_per_s: float
    tpot_s: float
    tpot_p95_s: float
    acceptance_length: float
    draft_tokens_per_round: float
    tokens: int
    seconds: float
    rounds: int
    requests: int
    steps: int


@dataclass(frozen=True)
class _View:
    """One view of the log: all of it, or a resample."""

    odds: Odds
    prices: Prices


@dataclass(frozen=True)
class _Outcome:
    """A rule's outcome for each logged round, [R]."""

    seconds: Floats
    """NaN: unknown."""
    rounds: Floats
    """ρ_i, rounds that begin within the logged one."""
    exact_rounds: Floats
    """Those among them that begin where it began, and whose outcome it determines."""
    waits: Floats
    """Seconds that the round's request takes for them; NaN: unknown."""


class Replay:
    """A log, ready for predictions.

    Args:
        log: at least one round, or ValueError.
        num_spec_tokens: K; at least the log's longest draft.
        settings: the engine's settings, with its known CUDA graphs; None: the defaults.
        can_shorten: whether the engine drafts a shorter block (`EngineHello.shortens_block`); None: judged by the log.
        can_skip: whether a runner that can't shorten can still skip drafting where no request wants any (V2 with DFlash).
        mask: rounds that count in the figures, [R]; None: all. Rules always choose for all rounds.
    """

    def __init__(
        self,
        log: Log,
        num_spec_tokens: int,
        seed: int = 0,
        settings: ControllerSettings | None = None,
        can_shorten: bool | None = None,
        can_skip: bool = False,
        mask: npt.NDArray[np.bool_] | None = None,
    ) -> None:
        if not len(log.step):
            raise ValueError("the log has no verify rounds")
        self.log, self.num_spec_tokens, self._seed = log, max(num_spec_tokens, log.most_drafted), seed
        self._settings = settings or ControllerSettings()
        has_rounds = np.flatnonzero(log.rounds_in_step)
        self._can_shorten = len(np.unique(log.block[has_rounds])) > 1 if can_shorten is None else can_shorten
        self._can_skip = can_skip
        self._mask = np.ones(len(log.step)) if mask is None else mask.astype(np.float64)
        nearest = np.searchsorted(has_rounds, np.arange(len(log.seconds)))
        self._payer = has_rounds[np.minimum(nearest, len(has_rounds) - 1)]  # step whose rounds pay for a step without any
        self._cluster, self._stratum = _clusters(log)
        self._is_asked = np.bincount(self._cluster, self._mask) > 0.0
        self._num_requests = len(np.unique(log.request[self._mask > 0]))
        self._text = Text(log, self.num_spec_tokens)
        counts = Counts.of(log, self.num_spec_tokens)
        rows = StepRows(log, self._settings.captured_tokens, np.random.default_rng(seed))
        self._beliefs = believe(counts, log.cell, len(log.cells))
        self._whole = _View(self._text.odds(self._beliefs), price(rows))
        self._resamples = list(self._resample(counts, rows, np.random.default_rng([seed, 1])))

    @property
    def logged(self) -> Logged:
        """Sum up the log itself."""
        log, w = self.log, self._mask
        rounds, tokens, seconds = float(w.sum()), float(w @ log.emitted), float(w @ self._shares(log.seconds))
        tpot = self._tpot(log.seconds[log.step])
        return Logged(
            tokens / seconds,
            float(tpot.mean()),
            float(np.quantile(tpot, 0.95)),
            tokens / rounds,
            float(w @ log.drafted) / rounds,
            round(tokens),
            seconds,
            round(rounds),
            self._num_requests,
            len(np.unique(log.step[w > 0])),
        )

    def predict(self, rule: Rule) -> Prediction:
        """Replay one rule."""
        log, w, prices = self.log, self._mask, self._whole.prices
        lengths = lengths_of(rule, log, self.num_spec_tokens, self._beliefs, prices.model, self._settings, self._seed)
        shape = self._shape(lengths)
        got = self._evaluate(lengths, shape, self._whole)
        rounds, tokens = float(w @ got.rounds), float(w @ log.emitted)
        speed, ratio, tpot, tpot_p95, exact_seconds = None, None, None, None, 0.0
        if np.isfinite(got.seconds).all():
            variance = self._variance(lengths, shape, got.seconds)
            speed = self._figure(w * log.emitted, w * got.seconds, variance)
            ratio = self._figure(w * self._shares(log.seconds), w * got.seconds, variance)
            of_requests = self._tpot(got.waits)
            tpot, tpot_p95 = self._mean_tpot(got.waits, variance), float(np.quantile(of_requests, 0.95))
            exact_seconds = float(w @ (got.seconds * prices.is_seen(shape)[log.step])) / float(w @ got.seconds)
        return Prediction(
            rule.text,
            speed,
            ratio,
            tpot,
            tpot_p95,
            tokens / rounds,
            float(w @ (got.rounds * lengths)) / rounds,
            float(w @ got.exact_rounds) / rounds,
            float(w @ (got.exact_rounds * np.minimum(np.minimum(log.accepted, lengths) + 1, log.emitted))) / tokens,
            exact_seconds,
            self._graph_steps(lengths),
        )

    # --- one evaluation -----------------------------------------------------------------------------------------------

    def _evaluate(self, lengths: Ints, shape: Shape, view: _View) -> _Outcome:
        log = self.log
        begins = self._text.walk(lengths, view.odds)
        rounds = self._text.rounds(begins)
        is_known = (lengths <= log.drafted) | (log.accepted < log.drafted) | log.is_struck
        exact_rounds = begins[self._text.begin] * is_known
        if not view.prices.model.is_ready:
            is_same = bool((lengths == log.drafted).all())
            unknown = np.full(len(rounds), np.nan)
            seconds, waits = (self._shares(log.seconds), log.seconds[log.step]) if is_same else (unknown, unknown)
            return _Outcome(seconds, rounds, exact_rounds, waits)
        whole = np.where(log.rounds_in_step > 0, view.prices.seconds(shape), log.seconds)
        another = view.prices.seconds(_without_prefill(shape))
        share = another / np.maximum(log.num_requests, log.rounds_in_step)
        return _Outcome(
            self._shares(whole) + (rounds - 1.0) * share[log.step],
            rounds,
            exact_rounds,
            whole[log.step] + (rounds - 1.0) * another[log.step],
        )

    def _tpot(self, waits: Floats) -> Floats:
        """Seconds per token of each request in the figures."""
        log, w = self.log, self._mask
        tokens = np.bincount(log.request, w * log.emitted, len(log.cell))
        tpot: Floats = np.bincount(log.request, w * waits, len(log.cell))[tokens > 0] / tokens[tokens > 0]
        return tpot

    def _mean_tpot(self, waits: Floats, variance: float) -> Figure:
        log, w = self.log, self._mask
        tokens, rounds = (np.bincount(log.request, w * each, len(log.cell))[log.request] for each in (log.emitted, 1.0))
        return self._figure(w * waits / np.maximum(tokens, 1.0), w / np.maximum(rounds, 1.0), variance)

    def _graph_steps(self, lengths: Ints) -> float | None:
        log, known = self.log, self._settings.captured_lengths
        if not (known or self._settings.are_lengths_equal):
            return None
        shortest, longest = np.full(len(log.seconds), self.num_spec_tokens), np.zeros(len(log.seconds), dtype=np.int64)
        np.minimum.at(shortest, log.step, lengths)
        np.maximum.at(longest, log.step, lengths)
        has_graph = (shortest == longest) & (np.isin(longest, known) if known else True)
        chosen = np.zeros(len(log.seconds), dtype=bool)
        chosen[log.step[self._mask > 0]] = True
        chosen &= log.num_prefill_tokens == 0
        if self._settings.equal_up_to >= 0:  # larger steps have none in any case
            chosen &= np.bincount(log.step, minlength=len(chosen)) <= self._settings.equal_up_to
        return float(has_graph[chosen].mean()) if chosen.any() else None

    def _shares(self, seconds: Floats) -> Floats:
        """Divide steps' seconds among the rounds that pay for them, [R]."""
        log = self.log
        due = np.bincount(self._payer, seconds, len(seconds))
        shares: Floats = (due / np.maximum(log.rounds_in_step, 1))[log.step]
        return shares

    def _shape(self, lengths: Ints) -> Shape:
        """Describe the log's steps with other lengths."""
        log, count = self.log, len(self.log.seconds)
        more = np.bincount(log.step, lengths - log.drafted, count).astype(np.int64)
        block = np.zeros(count, dtype=np.int64)
        np.maximum.at(block, log.step, lengths)
        if not self._can_shorten:
            block = np.where(block > 0, self.num_spec_tokens, 0) if self._can_skip else log.block
        per_round = np.bincount(log.step, lengths, count) / np.maximum(log.rounds_in_step, 1)
        return Shape(
            log.num_requests,
            log.num_tokens + more,
            log.context_tokens,
            log.num_prefill_tokens,
            per_round,
            block,
        )

    # --- how sure -----------------------------------------------------------------------------------------------------

    def _figure(self, gain: Floats, cost: Floats, variance: float) -> Figure:
        """Divide Σ gain by Σ cost; add the variance of the logarithm between clusters within their strata.

        With n clusters a stratum's share v of the variance has n − 1 degrees of freedom, the total V has V² / Σ (v² / (n − 1)).
        Source: Satterthwaite, An Approximate Distribution of Estimates of Variance Components (1946).
        """
        value = float(gain.sum() / cost.sum())
        if self._num_requests < LEAST_REQUESTS:
            return Figure(value, None, None)
        shift = np.bincount(self._cluster, gain / gain.sum() - cost / cost.sum())[self._is_asked]
        stratum = self._stratum[self._is_asked]
        number = np.bincount(stratum)
        others = np.maximum(number - 1, 1)
        centred = shift - (np.bincount(stratum, shift) / np.maximum(number, 1))[stratum]
        scatter = np.bincount(stratum, centred**2) * number / others
        total = float(scatter.sum()) + variance
        crowd = float((scatter**2 / others).sum()) / max(total, 1e-300) ** 2
        factor = float(np.exp(_student(crowd) * np.sqrt(total)))
        return Figure(value, value / factor, value * factor)

    def _variance(self, lengths: Ints, shape: Shape, seconds: Floats) -> float:
        """Estimate the variance of log(Σ seconds) due to estimates that are used throughout."""
        w = self._mask
        doubt = float((w * seconds) @ self._whole.prices.doubt(shape)[self.log.step]) / float(w @ seconds)
        others = [float(w @ self._evaluate(lengths, shape, view).seconds) for view in self._resamples]
        return doubt**2 + float(np.var(np.log(others), ddof=1))

    def _resample(self, counts: Counts, rows: StepRows, rng: np.random.Generator) -> Iterator[_View]:
        log = self.log
        _, first = np.unique(log.request, return_index=True)
        members = [np.flatnonzero(self._stratum == number) for number in np.unique(self._stratum)]
        for _ in range(NUM_RESAMPLES):
            drawn = np.zeros(len(self._stratum))
            for group in members:
                drawn[group] = np.bincount(rng.integers(0, len(group), len(group)), minlength=len(group))
            weights = drawn[self._cluster][first]
            odds = self._text.odds(believe(counts, log.cell, len(log.cells), weights, rng), weights)
            # By runs of steps: an engine is slow for a while, not for one step.
            run = np.arange(len(log.seconds)) * MOST_CLUSTERS // len(log.seconds)
            yield _View(odds, price(rows, rng.poisson(1.0, MOST_CLUSTERS).astype(np.float64)[run]))


def _without_prefill(shape: Shape) -> Shape:
    """Describe steps with the same number of requests, all of them decoding."""
    tokens = np.where(shape.prefill > 0, np.rint(shape.requests * (1.0 + shape.drafted)).astype(np.int64), shape.tokens)
    return Shape(shape.requests, tokens, shape.context, np.zeros_like(shape.prefill), shape.drafted, shape.block)


def _student(inverse_freedom: float) -> float:
    """Standard deviations from the estimate to a 95 % interval's end, by 1 / degrees of freedom."""
    return float(np.interp(inverse_freedom, 1.0 / np.array(_T_FREEDOM[::-1]), _T[::-1]))


def _clusters(log: Log) -> tuple[Ints, Ints]:
    """Group requests: consecutive ones of a cell, up to `MOST_CLUSTERS` groups of each.

    Requests that are alone in their cells make up one stratum; else a stratum is a cell.

    Returns: cluster of each round [R], stratum of each cluster.
    """
    stratum = np.where(np.bincount(log.cell)[log.cell] > 1, log.cell, len(log.cells))
    first = np.full(len(log.cell), len(log.request))
    np.minimum.at(first, log.request, np.arange(len(log.request)))
    order = np.lexsort([first, stratum])
    size = np.bincount(stratum)
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order)) - (np.cumsum(size) - size)[stratum[order]]
    group = place * MOST_CLUSTERS // np.maximum(size, MOST_CLUSTERS)[stratum]
    keys, cluster = np.unique(stratum * MOST_CLUSTERS + group, return_inverse=True)
    return cluster[log.request], keys // MOST_CLUSTERS
