"""Simulated traffic with known truth: requests, acceptance probabilities of their drafts, and costs of engine steps.

A `Trace` is a description and a seed. `Traffic` is drawn from it once, so that every rule that chooses draft lengths meets the
same requests with the same random numbers. A draft token is accepted if u(request, token position) < a_j, and u belongs to the
position, not to the round that reaches it.

The trace's clock counts *work*: tokens emitted so far. Arrivals, drift and changes of cost happen at points of the work, never
of time. With time, a faster rule would get emptier batches, and would look slower for it. A trace ends when `num_tokens` were
emitted, so all rules do the same work and differ in the seconds for it.

Letters: K = configured number of draft tokens, W = workloads, R = requests of the trace, n = requests in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from benchmarks.simulated.features import DraftFeatures, Feature
from honed.adapt.acceptance.estimate import EDGE
from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.steps.step_time import pad_tokens

_NUM_RANKS = 2048
"""Beta variates per workload and position; a request's rank selects its acceptance."""
_NUM_STAGES = 1000
"""Steps of slow drift over a whole trace."""
_TABLE_TOKENS = 16_384


@dataclass(frozen=True)
class Cost:
    """True cost of a step: base + r·R + f(padded tokens) + c·context + p·prefill + drafting(block, R), in seconds.

    It has the shape of `StepTimeModel`, but f may be any function.
    """

    base_s: float
    token_seconds: Callable[[Floats], Floats]
    """f: seconds by number of scheduled tokens."""
    per_request_s: float = 0.0
    per_context_token_s: float = 0.0
    per_prefill_token_s: float = 0.0
    drafting_s: float = 0.0
    drafting_per_request_s: float = 0.0
    per_block_token_s: float = 0.0
    per_block_token_and_request_s: float = 0.0
    captured_tokens: tuple[int, ...] = ()
    mixed_s: float = 0.0
    """Added time of a step whose requests' lengths differ, such as for a lost captured graph. Not in `seconds`."""

    def seconds(self, num_requests: int, num_tokens: Ints, context_tokens: int, num_prefill_tokens: int, block: Ints) -> Floats:
        """Price steps; totals of tokens and blocks are broadcast against each other."""
        fixed = self.base_s + self.per_request_s * num_requests
        fixed += self.per_context_token_s * context_tokens + self.per_prefill_token_s * num_prefill_tokens
        drafting = (block > 0) * (self.drafting_s + self.drafting_per_request_s * num_requests)
        drafting = drafting + block * (self.per_block_token_s + self.per_block_token_and_request_s * num_requests)
        seconds: Floats = self._table.take(num_tokens, mode="clip") + (fixed + drafting)
        return seconds

    @cached_property
    def _table(self) -> Floats:
        tokens = pad_tokens(np.arange(_TABLE_TOKENS, dtype=np.int64), self.captured_tokens)
        return np.asarray(self.token_seconds(tokens.astype(np.float64)), dtype=np.float64)


def linear(per_token_s: float, *knees: tuple[float, float]) -> Callable[[Floats], Floats]:
    """Make a token cost that gets steeper by (slope) beyond each (tokens)."""

    def seconds(tokens: Floats) -> Floats:
        total = per_token_s * tokens
        for knee, slope in knees:
            total = total + slope * np.maximum(tokens - knee, 0.0)
        return total

    return seconds


def roofline(memory_s: float, per_token_s: float, sharpness: float = 6.0, tile: int = 1) -> Callable[[Floats], Floats]:
    """Make a token cost that is flat while reading the weights takes longer, then grows: (memory^s + compute^s)^(1/s).

    Tokens are computed in whole tiles, so the cost also has stairs.
    """

    def seconds(tokens: Floats) -> Floats:
        compute = per_token_s * np.ceil(tokens / tile) * tile
        total: Floats = memory_s * (1.0 + (compute / memory_s) ** sharpness) ** (1.0 / sharpness)
        return total

    return seconds


@dataclass(frozen=True)
class Drift:
    """Move of a workload's curve to another one, from share `at` of the trace's work on, over a share `over` of the work."""

    at: float
    acceptance: tuple[float, ...]
    over: float = 0.0


@dataclass(frozen=True)
class Workload:
    """Requests of one kind."""

    name: str
    acceptance: tuple[float, ...]
    """[K] mean conditional acceptance a_j; a shorter one repeats its last figure."""
    strength: float = 20.0
    """Requests vary as Beta(strength·a_j, strength·(1 − a_j)) around it."""
    is_one_rank: bool = True
    """True: a request is easy or hard at all positions alike. False: each position is drawn separately."""
    output_tokens: tuple[int, int] = (64, 512)
    """Range, drawn uniformly in the logarithm."""
    prompt_tokens: tuple[int, int] = (64, 1024)
    weight: float = 1.0
    since: float = 0.0
    """Share of the trace's requests before the first of this kind."""
    drift: tuple[Drift, ...] = ()
    decay: float = 0.0
    """Log-odds that acceptance loses with every doubling of the context beyond `decay_from` tokens."""
    decay_from: int = 512
    feature: Feature | None = None
    """Features of its drafts; None: nothing, and all tokens of a request are alike."""


@dataclass(frozen=True)
class Load:
    """Number of requests, by one of three: fixed numbers at a time, Poisson arrivals, bursts."""

    concurrency: tuple[tuple[float, int], ...] = ()
    """Closed loop: (share of the work from which on, requests in the system)."""
    utilisation: float = 0.0
    """Poisson: expected output tokens that arrive per token emitted; below 1 the queue stays finite."""
    burst: int = 1
    """Size of the groups in which Poisson arrivals come."""


@dataclass(frozen=True)
class Trace:
    """A whole simulated run of an engine."""

    name: str
    seed: int
    num_spec_tokens: int
    max_num_seqs: int
    num_tokens: int
    """Work: the trace ends when this many were emitted."""
    workloads: tuple[Workload, ...]
    load: Load
    costs: tuple[tuple[float, Cost], ...]
    """(share of the work from which on, cost of a step)."""
    is_block_shortened: bool = True
    """vLLM's V1 runner drafts the chosen length, and nothing for 0; V2 always drafts K."""
    noise: float = 0.03
    """Standard deviation of the logarithm of measured step times; their mean stays true."""
    stall_share: float = 0.0
    """Share of the steps whose measured time is three times as long."""
    slow_factor: float = 1.0
    """Factor on measured step times in the machine's slow periods, which are half of the time."""
    spell_steps: float = 100.0
    """Mean length of a period, slow or quick."""
    max_prefill_tokens: int = 8192
    events: tuple[float, ...] = field(default=())
    """Shares of the work where something changes abruptly and the rule has to recover."""


class Traffic:
    """The requests of a trace and their random numbers, drawn once; all arrays are in order of arrival."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        rng = np.random.default_rng(trace.seed)
        self._base = np.array([_full(one.acceptance, trace.num_spec_tokens) for one in trace.workloads])  # [W, K]
        lengths = _draw_lengths(rng, trace)
        self.workload: Ints = lengths[0]  # [R]
        self.output_tokens: Ints = lengths[1]
        self.prompt_tokens: Ints = lengths[2]
        self.log_odds: Floats = self._draw_log_odds(rng)  # [R, K]
        self.request_ids = [f"{trace.name}-{index}" for index in range(len(self.workload))]
        drawn = np.random.default_rng([trace.seed, 4]).integers(2**64, size=len(self.workload), dtype=np.uint64)
        self.hashes: npt.NDArray[np.uint64] = drawn
        room = self.output_tokens + trace.num_spec_tokens + 1
        self.luck_start: Ints = np.concatenate([[0], np.cumsum(room)[:-1]])
        self.luck: npt.NDArray[np.float32] = np.random.default_rng([trace.seed, 1]).random(int(room.sum()), dtype=np.float32)
        self.arrivals = self._draw_arrivals(np.random.default_rng([trace.seed, 2]))
        self.noise_seed = [trace.seed, 3]
        features = [workload.feature for workload in trace.workloads]
        self.draft_features = DraftFeatures(features, trace.seed, len(self.luck)) if any(features) else None

    def concurrency(self, work: float) -> int:
        """Return the requests that a closed loop keeps in the system."""
        return next(n for at, n in reversed(self.trace.load.concurrency) if work >= at * self.trace.num_tokens)

    def cost(self, work: float) -> Cost:
        """Return a step's cost at this point."""
        return next(cost for at, cost in reversed(self.trace.costs) if work >= at * self.trace.num_tokens)

    def stage(self, work: float) -> int:
        """Number the stretches of work within which no curve moves."""
        return int(work / self.trace.num_tokens * _NUM_STAGES + 1e-9) if self._is_drifting else 0

    def shift(self, stage: int) -> Floats:
        """Change of each workload's log-odds since the start, [W, K]."""
        shift, share = np.zeros_like(self._base), stage / _NUM_STAGES
        for row, workload in enumerate(self.trace.workloads):
            now = _log_odds(self._base[row])
            for drift in workload.drift:
                progress = float(np.clip((share - drift.at) / drift.over, 0.0, 1.0)) if drift.over else float(share >= drift.at)
                now = now + progress * (_log_odds(_full(drift.acceptance, len(now))) - now)
            shift[row] = now - _log_odds(self._base[row])
        return shift

    def decay(self, requests: Ints, contexts: Ints) -> Floats:
        """Decrease of requests' log-odds by their context lengths, [n]."""
        rate, begin = (column[self.workload[requests]] for column in self._decay)
        decay: Floats = rate * np.log2(np.maximum(contexts / begin, 1.0))
        return decay

    @cached_property
    def is_decaying(self) -> bool:
        """Return whether any workload's acceptance depends on the context length."""
        return any(workload.decay for workload in self.trace.workloads)

    @cached_property
    def _decay(self) -> tuple[Floats, Floats]:
        columns = np.array([(one.decay, one.decay_from) for one in self.trace.workloads], dtype=np.float64).T
        return columns[0], columns[1]

    def typical(self, stage: int) -> Floats:
        """Return each workload's mean curve as log-odds, drift included, [W, K]."""
        return _log_odds(self._base) + self.shift(stage)

    @cached_property
    def _is_drifting(self) -> bool:
        return any(workload.drift for workload in self.trace.workloads)

    def _draw_log_odds(self, rng: np.random.Generator) -> Floats:
        log_odds = np.empty((len(self.workload), self.trace.num_spec_tokens))
        for row, workload in enumerate(self.trace.workloads):
            mine = self.workload == row
            a, strength = self._base[row], workload.strength
            variates = np.sort(rng.beta(strength * a, strength * (1.0 - a), (_NUM_RANKS, len(a))), axis=0)
            shape = (int(mine.sum()), 1 if workload.is_one_rank else len(a))
            rank = np.broadcast_to(rng.integers(0, _NUM_RANKS, shape), (shape[0], len(a)))
            log_odds[mine] = _log_odds(np.take_along_axis(variates, rank, axis=0))
        return log_odds

    def _draw_arrivals(self, rng: np.random.Generator) -> Floats | None:
        """Draw the work at which each request arrives; None in a closed loop."""
        load = self.trace.load
        if load.concurrency:
            return None
        groups = -(-len(self.workload) // load.burst)
        gap = float(self.output_tokens.mean()) * load.burst / load.utilisation
        return np.repeat(np.cumsum(rng.exponential(gap, groups)), load.burst)[: len(self.workload)]


def _draw_lengths(rng: np.random.Generator, trace: Trace) -> tuple[Ints, Ints, Ints]:
    """Draw (workload, output tokens, prompt tokens) of as many requests as the trace's work can need."""
    weights = np.array([one.weight for one in trace.workloads])
    means = np.array([np.mean(one.output_tokens) for one in trace.workloads])
    longest = max(one.output_tokens[1] for one in trace.workloads)
    most = max([trace.max_num_seqs, *(n for _, n in trace.load.concurrency)])
    # The log-uniform mean is below the middle: twice the number for the middle is always enough.
    count = int(2.0 * (trace.num_tokens + most * longest) / float(weights @ means / weights.sum())) + most
    workload = np.empty(count, dtype=np.int64)
    since = np.array([one.since for one in trace.workloads])
    progress = np.arange(count) / max(trace.num_tokens / float(weights @ means / weights.sum()), 1.0)
    pick = rng.random(count)
    for begin in np.unique(since):
        there = np.cumsum(np.where(since <= begin, weights, 0.0))
        late = progress >= begin
        workload[late] = np.searchsorted(there / there[-1], pick[late], side="right")
    bounds = np.log([[one.output_tokens, one.prompt_tokens] for one in trace.workloads])  # [W, 2, 2]
    low, high = bounds[workload, :, 0], bounds[workload, :, 1]
    drawn = np.exp(low + (high - low) * rng.random((count, 2))).round().astype(np.int64)
    return workload, np.maximum(drawn[:, 0], 1), np.maximum(drawn[:, 1], 1)


def _full(acceptance: tuple[float, ...], num_spec_tokens: int) -> Floats:
    curve = list(acceptance[:num_spec_tokens])
    return np.clip(np.array(curve + [curve[-1]] * (num_spec_tokens - len(curve))), EDGE, 1.0 - EDGE)


def _log_odds(acceptance: Floats) -> Floats:
    clipped = np.clip(acceptance, 1e-4, 1.0 - 1e-4)
    odds: Floats = np.log(clipped / (1.0 - clipped))
    return odds
