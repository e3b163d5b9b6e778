"""Runs a rule that chooses draft lengths on simulated traffic, as an engine would: continuous batching, step by step.

A step admits arrived requests while there is room, computes their prompts whole (they emit one token), and gives every other
running request a verify round. The rule chooses lengths, the drafter drafts the longest of them, random numbers say how many
are accepted, and simulated time advances by the step's true cost. With `is_pipelined` the order is that of the attachment in
vLLM: lengths are chosen, and drafts made, a step ahead of their verification, before that step's own results are known.

Times are separate: the rule's clock and the logged durations carry the trace's noise; an outcome's seconds are the true ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol, runtime_checkable

import numpy as np

from benchmarks.simulated.event_log import EventLog
from benchmarks.simulated.features import Drafts
from benchmarks.simulated.traffic import Cost, Traffic
from honed.adapt.lengths.length_policy import LengthPolicy
from honed.adapt.protocol.arrays import Floats, Ints
from honed.adapt.protocol.wire import EventBatch

_CHUNK = 4096


@dataclass(frozen=True, slots=True)
class Truth:
    """The truth of the step to be decided, known only to the oracle and the judge."""

    survival: Floats  # [n, K]
    cost: Cost
    num_requests: int
    """Includes those in prefill, unlike n."""
    context_tokens: int
    num_prefill_tokens: int
    is_block_shortened: bool
    drafts: Drafts | None = None
    """The drafts that can be verified; None if they show nothing. `survival` is that of drafts not seen yet."""

    @property
    def prompt_s(self) -> float:
        """Time that prompts add to the step when nothing is drafted. They are computed with any drafts."""
        if not self.num_prefill_tokens:
            return 0.0
        count, none = len(self.survival), np.array(0)
        tokens, rest = np.array([count + self.num_prefill_tokens, count]), self.context_tokens
        with_prompts = self.cost.seconds(self.num_requests, tokens[0], rest, self.num_prefill_tokens, none)
        return float(with_prompts - self.cost.seconds(count, tokens[1], rest, 0, none))


@runtime_checkable
class SeesTruth(Protocol):
    """A rule that gets the truth before each decision."""

    def see(self, truth: Truth) -> None:
        """Take in the truth of the step that `decide` will be about."""


Judge = Callable[[Truth], float]
"""Returns the best goodput of a step's verify rounds, in expected tokens per second without the prompts' time."""


@dataclass
class Outcome:
    """Results of a run; arrays have one entry per step."""

    tokens: Ints
    """Tokens emitted in the step."""
    seconds: Floats
    """True seconds, without noise."""
    round_seconds: Floats
    """The same without the time of prompts."""
    num_requests: Ints
    """Verify rounds in the step, including those without drafts."""
    num_draft_tokens: Ints
    block: Ints
    expected: Floats
    """Expected tokens of the rounds with the chosen lengths by the true curves, bonus tokens included."""
    best: Floats
    """The judge's best goodput on the same step; NaN without a judge, or without rounds."""
    reasons: list[str]
    work: Floats
    """The trace's clock at the end of the step: tokens emitted, and work skipped while the system was empty."""
    finished: dict[str, int] = field(default_factory=dict)
    """Tokens of each finished request."""
    unfinished: dict[str, int] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Goodput of the whole run."""
        return float(self.tokens.sum() / self.seconds.sum())

    def seconds_between(self, begin: float, end: float) -> float:
        """Return the true seconds of a stretch of the trace's work."""
        clock = np.concatenate([[0.0], self.work])
        spent = np.concatenate([[0.0], np.cumsum(self.seconds)])
        at = np.interp([begin, end], clock, spent)
        return float(at[1] - at[0])

    def phases(self, *bounds: float) -> list[tuple[float, float]]:
        """Split the run at points of its work: (work, seconds) of each phase."""
        edges = [0.0, *bounds, float(self.work[-1])]
        return [(b - a, self.seconds_between(a, b)) for a, b in pairwise(edges)]


class SimulatedEngine:
    """A simulated engine in the middle of a trace."""

    def __init__(
        self,
        traffic: Traffic,
        policy: LengthPolicy,
        on_batch: Callable[[EventBatch, float], None] | None = None,
        judge: Judge | None = None,
        is_pipelined: bool = False,
    ) -> None:
        self.traffic, self.policy, self.judge, self.is_pipelined = traffic, policy, judge, is_pipelined
        self.now_s, self.num_emitted, self.skipped = 0.0, 0, 0.0
        self._log = EventLog(traffic, on_batch) if on_batch else None
        self._seer = policy if isinstance(policy, SeesTruth) else None
        self._running: Ints = np.zeros(0, dtype=np.int64)  # requests, in order of admission
        self._emitted: Ints = np.zeros(0, dtype=np.int64)  # tokens of each
        self._pending: Ints = np.zeros(0, dtype=np.int64)  # lengths chosen a step ahead
        self._ids: list[str] = []
        self._next = 0
        self._done = np.zeros(len(traffic.workload), dtype=np.int64)
        self._noise: Floats = np.zeros(0)
        self._rows: list[tuple[float, ...]] = []
        self._reasons: list[str] = []
        self._stage = -1
        self._survival: Floats = np.zeros((0, traffic.trace.num_spec_tokens))
        self._acceptance: Floats = self._survival
        self._depth = np.arange(traffic.trace.num_spec_tokens)
        self._log_odds: Floats = self._survival
        self._typical: Floats = self._survival
        self._centre: Floats = self._survival

    def run(self) -> Outcome:
        """Do the trace's work."""
        trace, traffic = self.traffic.trace, self.traffic
        while self.num_emitted + self.skipped < trace.num_tokens:
            self._step()
        if self._log is not None:
            self._log.flush(self.now_s)
        columns = np.array(self._rows).T
        tokens, rounds, drafted, block = (column.astype(np.int64) for column in columns[[0, 3, 4, 5]])
        running = set(self._running.tolist())
        finished = {traffic.request_ids[i]: int(self._done[i]) for i in range(self._next) if i not in running}
        return Outcome(
            tokens,
            columns[1],
            columns[2],
            rounds,
            drafted,
            block,
            columns[6],
            columns[7],
            self._reasons,
            columns[8],
            finished,
            dict(zip(self._ids, self._emitted.tolist(), strict=True)),
        )

    # --- a step -------------------------------------------------------------------------------------------------------

    def _step(self) -> None:
        trace, traffic = self.traffic.trace, self.traffic
        newcomers = self._admit()
        count, work = len(self._running), self.num_emitted + self.skipped
        cost, prefill = traffic.cost(work), int(traffic.prompt_tokens[newcomers].sum())
        contexts = traffic.prompt_tokens[self._running] + self._emitted
        self._refresh(traffic.stage(work), contexts)
        in_all, drafts = int(contexts.sum()) + prefill, self._draft()
        truth = Truth(self._survival, cost, count + len(newcomers), in_all, prefill, trace.is_block_shortened, drafts)
        lengths, block, reason = self._choose(truth, contexts, newcomers)
        accepted = self._verify(lengths, self._acceptance if drafts is None else drafts.acceptance)
        drafted = int(lengths.sum())
        tokens = count + drafted + prefill
        true_s = float(cost.seconds(truth.num_requests, np.array(tokens), truth.context_tokens, prefill, np.array(block)))
        true_s += cost.mixed_s * bool(count and lengths.min() != lengths.max())
        step = len(self._rows)
        if step % _CHUNK == 0:
            self._noise = _draw_noise(traffic, step // _CHUNK)
        seconds = true_s * float(self._noise[step % _CHUNK])
        self.now_s += seconds
        best = self.judge(truth) if self.judge is not None and count else np.nan
        emitted = np.minimum(accepted + 1, traffic.output_tokens[self._running] - self._emitted)
        expected = count + float(np.where(self._depth < lengths[:, None], self._survival, 0.0).sum())
        num_emitted = int(emitted.sum()) + len(newcomers)
        self.num_emitted += num_emitted
        work = self.num_emitted + self.skipped
        self._rows.append((num_emitted, true_s, true_s - truth.prompt_s, count, drafted, block, expected, best, work))
        self._reasons.append(reason)
        if self._log is not None:
            row = (
                step + 1,
                round(self.now_s * 1e9),
                round(seconds * 1e6),
                truth.num_requests,
                tokens,
                prefill,
                drafted,
                truth.context_tokens,
                block,
                reason,
            )
            self._log.add(row, (self._running, contexts - 1, lengths, accepted, emitted), self.now_s)
        if count:
            self.policy.observe(self._ids, lengths.tolist(), accepted.tolist())
        self._emitted = self._emitted + emitted
        self._finish_and_join(newcomers)

    def _choose(self, truth: Truth, contexts: Ints, newcomers: Ints) -> tuple[Ints, int, str]:
        """Return the lengths to verify in this step, the block to draft in it, and why."""
        trace, count = self.traffic.trace, len(self._running)
        whole_block = 0 if trace.is_block_shortened else trace.num_spec_tokens
        if not self.is_pipelined:
            if not count:
                return self._running, whole_block, "prefill"
            if self._seer is not None:
                self._seer.see(truth)
            in_all = truth.context_tokens - truth.num_prefill_tokens
            decision = self.policy.decide(self._ids, in_all, truth.num_prefill_tokens, self.now_s, contexts.tolist())
            lengths = np.array(decision.num_draft_tokens, dtype=np.int64)
            return lengths, whole_block or max(int(lengths.max()), decision.block), decision.reason
        lengths = self._pending
        ids = self._ids + [self.traffic.request_ids[index] for index in newcomers.tolist()]
        lengths_of_all = contexts.tolist() + self.traffic.prompt_tokens[newcomers].tolist()
        decision = self.policy.decide(ids, truth.context_tokens, 0, self.now_s, lengths_of_all)
        self._pending = np.array(decision.num_draft_tokens, dtype=np.int64)
        return lengths, whole_block or int(self._pending.max(initial=0)), decision.reason

    def _at(self) -> Ints:
        """Indices of the random numbers for each request's next tokens, [n, K]."""
        at: Ints = (self.traffic.luck_start[self._running] + self._emitted)[:, None] + self._depth
        return at

    def _draft(self) -> Drafts | None:
        """Draft K tokens for each request, if drafts show something."""
        features = self.traffic.draft_features
        if features is None:
            return None
        workload = self.traffic.workload[self._running]
        return features.drafts(self._at(), workload, self._centre, self._log_odds, self._typical)

    def _verify(self, lengths: Ints, acceptance: Floats) -> Ints:
        """Draw how many drafts of each request are accepted, [n]."""
        if not len(lengths):
            return lengths
        passed = self.traffic.luck[self._at()] < acceptance
        run = np.where(passed.all(axis=1), len(self._depth), passed.argmin(axis=1))
        accepted: Ints = np.minimum(run, lengths)
        return accepted

    def _admit(self) -> Ints:
        """Admit arrived requests while there is room; an empty system skips to the next arrival without spending time."""
        traffic, trace = self.traffic, self.traffic.trace
        work, room = self.num_emitted + self.skipped, trace.max_num_seqs - len(self._running)
        if traffic.arrivals is None:
            here = min(traffic.concurrency(work), trace.max_num_seqs) - len(self._running)
        else:
            if not len(self._running) and traffic.arrivals[self._next] > work:
                self.skipped += float(traffic.arrivals[self._next]) - work
                work = float(traffic.arrivals[self._next])
            here = int(np.searchsorted(traffic.arrivals, work, side="right")) - self._next
        here = max(min(here, room), 0)
        budget = np.cumsum(traffic.prompt_tokens[self._next : self._next + here]) <= trace.max_prefill_tokens
        count = max(int(budget.sum()), min(here, 1))
        first, self._next = self._next, self._next + count
        for index in range(first, self._next):
            self.policy.start(traffic.request_ids[index], trace.workloads[traffic.workload[index]].name)
        return np.arange(first, self._next)

    def _finish_and_join(self, newcomers: Ints) -> None:
        """Remove finished requests; requests with computed prompts have their first token."""
        traffic = self.traffic
        over = self._emitted >= traffic.output_tokens[self._running]
        if not len(newcomers) and not over.any():
            return
        running = np.concatenate([self._running, newcomers])
        emitted = np.concatenate([self._emitted, np.ones(len(newcomers), dtype=np.int64)])
        over = np.concatenate([over, traffic.output_tokens[newcomers] <= 1])
        for index, tokens in zip(running[over].tolist(), emitted[over].tolist(), strict=True):
            self._done[index] = tokens
            self.policy.finish(traffic.request_ids[index])
        self._running, self._emitted = running[~over], emitted[~over]
        if self.is_pipelined:
            self._pending = self._pending[~over]
        self._ids = [traffic.request_ids[index] for index in self._running.tolist()]
        self._stage = -1

    def _refresh(self, stage: int, contexts: Ints) -> None:
        """Recompute the true curves when the batch or the truth has changed."""
        if stage == self._stage and not self.traffic.is_decaying:
            return
        traffic, self._stage = self.traffic, stage
        log_odds: Floats = traffic.log_odds[self._running]
        if stage:
            log_odds += traffic.shift(stage)[traffic.workload[self._running]]  # a copy: indexed by an array
        if traffic.is_decaying:
            log_odds = log_odds - traffic.decay(self._running, contexts)[:, None]
        self._acceptance = 1.0 / (1.0 + np.exp(-log_odds))
        self._survival = np.cumprod(self._acceptance, axis=1, dtype=np.float64)
        if traffic.draft_features is not None:
            workload = traffic.workload[self._running]
            self._log_odds, self._typical = log_odds, traffic.typical(stage)[workload]
            self._centre = traffic.draft_features.centre(log_odds, workload)


def simulate(
    traffic: Traffic,
    policy: LengthPolicy,
    *,
    on_batch: Callable[[EventBatch, float], None] | None = None,
    judge: Judge | None = None,
    is_pipelined: bool = False,
) -> Outcome:
    """Run a rule on a trace's traffic.

    Args:
        on_batch: gets (batch, simulated time) about every `BATCH_S`, as the daemon would.
        judge: computes the best goodput on every step of the run.
        is_pipelined: choose lengths a step ahead, as the attachment must.
    """
    return SimulatedEngine(traffic, policy, on_batch, judge, is_pipelined).run()


def _draw_noise(traffic: Traffic, chunk: int) -> Floats:
    trace, rng = traffic.trace, np.random.default_rng([*traffic.noise_seed, chunk])
    factor: Floats = np.exp(trace.noise * rng.standard_normal(_CHUNK) - 0.5 * trace.noise**2)
    factor *= np.where(rng.random(_CHUNK) < trace.stall_share, 3.0, 1.0)
    if trace.slow_factor != 1.0:
        turns = np.cumsum(rng.random(_CHUNK) < 1.0 / trace.spell_steps)
        factor *= np.where((turns + rng.integers(2)) % 2, trace.slow_factor, 1.0)
    return factor
