"""An oracle's best result on a simulated trace, and honed's own loop to compare with it.

The oracle knows every request's true curve and the true, expected cost of a step, and maximises the goodput of its rounds,

    (n + Σ_i Σ_{j ≤ k_i} S_i(j)) / (T(tokens + Σ_i k_i, block = max_i k_i) − time of the step's prompts)

exactly, whatever shape T has: for each cap on the block, all n·K entries are admitted one by one, the most likely first. It
doesn't know the random draws. Prompts are computed with any drafts. If the ratio included their time, drafts would look cheap
beside it, and the whole trace would take longer (up to a quarter on the traces of `benchmarks/regret.py`).

A rule's regret is 1 − its goodput / the oracle's on the same trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from benchmarks.simulated.engine import Outcome, Truth, simulate
from benchmarks.simulated.traffic import Traffic
from honed.adapt.control.controller import EngineController
from honed.adapt.control.settings import ControllerSettings
from honed.adapt.lengths.decider import Decider
from honed.adapt.lengths.length_policy import Decision
from honed.adapt.protocol.arrays import Ints
from honed.adapt.protocol.wire import EventBatch, Policy

PROPOSE_S = 1.0
"""Interval at which the daemon makes a policy."""


def best_lengths(truth: Truth) -> tuple[Ints, float]:
    """Search for the lengths of highest goodput: (lengths [n], expected tokens per second)."""
    survival, cost = truth.survival, truth.cost
    count, num_spec_tokens = survival.shape
    base, prompt_s = count + truth.num_prefill_tokens, truth.prompt_s
    shape = (truth.context_tokens, truth.num_prefill_tokens)
    nothing = np.array(0 if truth.is_block_shortened else num_spec_tokens)
    without = count / (float(cost.seconds(truth.num_requests, np.array(base), *shape, nothing)) - prompt_s)
    if cost.mixed_s:
        return _best_where_mixing_costs(truth, without)
    flat = survival.ravel()
    order = np.argsort(-flat, kind="stable")
    caps = np.arange(1, num_spec_tokens + 1) if truth.is_block_shortened else np.array([num_spec_tokens])
    is_in = (order % num_spec_tokens) < caps[:, None]  # [caps, n·K]
    mass = count + np.cumsum(np.where(is_in, flat[order], 0.0), axis=1)
    totals = base + np.cumsum(is_in, axis=1)
    goodput = mass / (cost.seconds(truth.num_requests, totals, *shape, caps[:, None]) - prompt_s)
    row, last = divmod(int(goodput.argmax()), len(flat))
    if goodput[row, last] <= without:
        return np.zeros(count, dtype=np.int64), without
    admitted = order[: last + 1][is_in[row, : last + 1]]
    return np.bincount(admitted // num_spec_tokens, minlength=count), float(goodput[row, last])


def _best_where_mixing_costs(truth: Truth, without: float) -> tuple[Ints, float]:
    """The same if unequal lengths cost `mixed_s`: also tries each length for all requests."""
    plain = replace(truth, cost=replace(truth.cost, mixed_s=0.0))
    lengths, _ = best_lengths(plain)
    options = [lengths, *(np.full(len(lengths), k) for k in range(1, truth.survival.shape[1] + 1))]
    depth = np.arange(truth.survival.shape[1])
    best = (np.zeros(len(lengths), dtype=np.int64), without)
    for option in options:
        block = int(option.max()) if truth.is_block_shortened else truth.survival.shape[1]
        tokens = len(option) + truth.num_prefill_tokens + int(option.sum())
        shape = (truth.num_requests, np.array(tokens), truth.context_tokens, truth.num_prefill_tokens, np.array(block))
        seconds = float(truth.cost.seconds(*shape)) - truth.prompt_s + truth.cost.mixed_s * (option.min() != option.max())
        rate = float(len(option) + np.where(depth < option[:, None], truth.survival, 0.0).sum()) / seconds
        if rate > best[1]:
            best = option, rate
    return best


def judge(truth: Truth) -> float:
    """Return the best goodput of a step, for `simulate`."""
    return best_lengths(truth)[1]


class Oracle:
    """A rule that gets the truth; with `sees_drafts` also the drafts that it cuts."""

    def __init__(self, sees_drafts: bool = False) -> None:
        self._sees_drafts = sees_drafts
        self._truth: Truth | None = None

    def see(self, truth: Truth) -> None:
        """Take in the truth of the step that `decide` will be about."""
        if self._sees_drafts and truth.drafts is not None:
            truth = replace(truth, survival=np.cumprod(truth.drafts.acceptance, axis=1, dtype=np.float64))
        self._truth = truth

    def start(self, request_id: str, workload: str = "default", ceiling: int = -1) -> None:
        """Do nothing: the truth comes with each step."""

    def finish(self, request_id: str) -> None:
        """Do nothing."""

    def observe(
        self,
        request_ids: Sequence[str],
        num_draft_tokens: Sequence[int],
        num_accepted_tokens: Sequence[int],
    ) -> None:
        """Learn nothing."""

    def decide(
        self,
        request_ids: Sequence[str],
        context_tokens: int,
        num_prefill_tokens: int,
        now_s: float,
        contexts: Sequence[int] | None = None,
    ) -> Decision:
        """Choose the optimum of the step shown last."""
        assert self._truth is not None
        assert len(self._truth.survival) == len(request_ids)
        lengths = best_lengths(self._truth)[0].tolist()
        return Decision(lengths, max(lengths, default=0), "oracle")


class Steered:
    """Decider and controller as in production: batches as they come, a policy about once a second, both learning."""

    def __init__(self, traffic: Traffic, settings: ControllerSettings | None = None, seed: int = 0) -> None:
        trace = traffic.trace
        if settings is None:
            settings = ControllerSettings(captured_tokens=trace.costs[0][1].captured_tokens)
        self.decider = Decider(trace.num_spec_tokens, trace.max_num_seqs, seed)
        self.controller = EngineController("synthetic", trace.num_spec_tokens, trace.max_num_seqs, settings)
        self.start, self.finish = self.decider.start, self.decider.finish
        self.observe, self.decide = self.decider.observe, self.decider.decide
        self._due_s = 0.0

    def take(self, batch: EventBatch, now_s: float) -> None:
        """Learn from a batch, and put a new policy in force when one is due."""
        self.controller.observe(batch)
        if now_s >= self._due_s:
            self._due_s = now_s + PROPOSE_S
            self.put_in_force(self.controller.propose(now_s), now_s)

    def put_in_force(self, policy: Policy, now_s: float) -> None:
        """Send the policy to the engine; an experiment may change it on the way."""
        self.decider.set_policy(policy, now_s)


def run_steered(
    traffic: Traffic, settings: ControllerSettings | None = None, seed: int = 0, is_pipelined: bool = False
) -> Outcome:
    """Run honed's own loop on a trace; every step is judged."""
    policy = Steered(traffic, settings, seed)
    return simulate(traffic, policy, on_batch=policy.take, judge=judge, is_pipelined=is_pipelined)


def run_oracle(traffic: Traffic) -> Outcome:
    """Run the oracle on a trace."""
    return simulate(traffic, Oracle())
