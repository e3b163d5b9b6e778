"""Honed's loop with one of its estimates replaced by the truth, to find the sources of regret.

Only the policy is changed on its way to the decider, so the unchanged decider and controller are measured.
"""

from __future__ import annotations

import msgspec
import numpy as np

from benchmarks.simulated.engine import Truth
from benchmarks.simulated.oracle import Steered
from benchmarks.simulated.traffic import Cost, Traffic
from honed.adapt.control.settings import ControllerSettings
from honed.adapt.lengths.length_policy import Decision
from honed.adapt.protocol.arrays import Floats
from honed.adapt.protocol.wire import EventBatch, Policy, WorkloadPrior
from honed.adapt.steps.step_time import StepTimeModel, fit_parameters

TRUTHS: dict[str, frozenset[str]] = {
    "no-explore": frozenset({"explore"}),
    "no-hyster": frozenset({"hysteresis"}),
    "no-delay": frozenset({"delay"}),
    "cost": frozenset({"cost"}),
    "curves": frozenset({"curves"}),
    "requests": frozenset({"curves", "requests"}),
    "cost+req": frozenset({"cost", "curves", "requests"}),
    "all": frozenset({"explore", "hysteresis", "delay", "cost", "curves", "requests"}),
}
"""True values in each ablation: "explore" and "hysteresis" switch these off (once the model is ready). "delay" is a policy with
every batch, "cost" the model fitted to the true cost, "curves" each workload's mean curve and spread, "requests" each request's
own curve."""


class WithTruth(Steered):
    """Decider and controller, with the truth in place of some of their estimates."""

    def __init__(self, traffic: Traffic, truths: frozenset[str]) -> None:
        super().__init__(traffic, ControllerSettings(captured_tokens=traffic.trace.costs[0][1].captured_tokens))
        self._traffic, self._truths = traffic, truths
        self._row_of = {name: row for row, name in enumerate(traffic.request_ids)}
        self._labels: dict[str, str] = {}
        self._free_labels = [f"slot-{n}" for n in range(4 * traffic.trace.max_num_seqs + 64)]
        self._truth: Truth | None = None
        self._models: dict[int, StepTimeModel] = {}
        self._sent: Policy | None = None
        self._told: tuple[object, ...] = ()
        if "requests" in truths:
            self.start, self.finish = self._start, self._finish  # type: ignore[method-assign]
        self.decide = self._decide  # type: ignore[method-assign]

    def see(self, truth: Truth) -> None:
        """Keep the truth of the step to be decided."""
        self._truth = truth

    def take(self, batch: EventBatch, now_s: float) -> None:
        """Learn from a batch."""
        if "delay" in self._truths:
            self._due_s = now_s
        super().take(batch, now_s)

    def put_in_force(self, policy: Policy, now_s: float) -> None:
        """Store the policy; it is changed and sent before the next decision."""
        self._sent, self._told = policy, ()

    def _start(self, request_id: str, workload: str = "default", ceiling: int = -1) -> None:
        label = self._labels[request_id] = self._free_labels.pop()
        self.decider.start(request_id, label, ceiling)

    def _finish(self, request_id: str) -> None:
        self._free_labels.append(self._labels.pop(request_id))
        self.decider.finish(request_id)

    def _decide(
        self,
        request_ids: list[str],
        context_tokens: int,
        num_prefill_tokens: int,
        now_s: float,
        contexts: list[int] | None = None,
    ) -> Decision:
        assert self._truth is not None
        stage = id(self._truth.survival) if "requests" in self._truths else self._stage(now_s)
        told = (stage, id(self._truth.cost))
        if told != self._told and (self._sent is not None or self._truths & {"cost", "curves"}):
            self._told = told
            sent = self._sent or self.controller.propose(now_s)
            self.decider.set_policy(self._changed(sent, request_ids), now_s)
        decision: Decision = self.decider.decide(request_ids, context_tokens, num_prefill_tokens, now_s, contexts)
        return decision

    def _stage(self, now_s: float) -> int:
        return int(now_s * 4) if "curves" in self._truths else 0

    def _changed(self, policy: Policy, request_ids: list[str]) -> Policy:
        assert self._truth is not None
        changes: dict[str, object] = {}
        if "cost" in self._truths:
            changes |= {"step_seconds": list(self._model(self._truth.cost).parameters), "kind_effects": []}
        if "explore" in self._truths and (policy.step_seconds or "cost" in self._truths):
            changes["explore_share"] = 0.0
        if "hysteresis" in self._truths:
            changes["hysteresis"] = 0.0
        if "requests" in self._truths:
            curves = _conditional(self._truth.survival)
            changes["priors"] = [WorkloadPrior(workload="", acceptance=curves.mean(axis=0).tolist())] + [
                WorkloadPrior(workload=self._labels[name], acceptance=curve.tolist(), strength=1e6)
                for name, curve in zip(request_ids, curves, strict=True)
            ]
        elif "curves" in self._truths:
            changes["priors"] = self._mean_curves(policy, request_ids)
        return msgspec.structs.replace(policy, **changes)

    def _mean_curves(self, policy: Policy, request_ids: list[str]) -> list[WorkloadPrior]:
        traffic = self._traffic
        now = _conditional(self._truth.survival) if self._truth is not None else np.zeros((0, 1))
        row = self._row_of[request_ids[0]]
        odds = np.log(now[0] / (1.0 - now[0]))
        priors = []
        for number, workload in enumerate(traffic.trace.workloads):
            drift = (odds - traffic.log_odds[row]) if traffic.workload[row] == number else None
            base = traffic.log_odds[traffic.workload == number]
            if drift is None:
                others = [i for i, name in enumerate(request_ids) if traffic.workload[self._row_of[name]] == number]
                if others:
                    mine = now[others[0]]
                    drift = np.log(mine / (1.0 - mine)) - traffic.log_odds[self._row_of[request_ids[others[0]]]]
            shift = drift if drift is not None else 0.0
            curve = (1.0 / (1.0 + np.exp(-(base + shift)))).mean(axis=0)
            priors.append(WorkloadPrior(workload=workload.name, acceptance=curve.tolist(), strength=workload.strength))
        return [msgspec.structs.replace(priors[0], workload=""), *priors]

    def _model(self, cost: Cost) -> StepTimeModel:
        if id(cost) not in self._models:
            self._models[id(cost)] = _fit(cost, self._traffic)
        return self._models[id(cost)]


def _fit(cost: Cost, traffic: Traffic) -> StepTimeModel:
    # Over all batches that the trace can have.
    trace, rng = traffic.trace, np.random.default_rng(0)
    k, most = trace.num_spec_tokens, _most_requests(traffic)
    rows, seconds = [], []
    for _ in range(4000):
        requests = int(np.exp(rng.uniform(0.0, np.log(most + 1.0))))
        block = int(rng.integers(0, k + 1))
        drafted = int(rng.integers(block, requests * block + 1))
        prefill = int(rng.integers(0, 2048)) if rng.random() < 0.2 else 0
        context, drafting = requests * int(rng.integers(50, 1500)), block if trace.is_block_shortened else k
        tokens = requests + drafted + prefill
        rows.append((requests, tokens, context, prefill, drafting, drafted > 0))
        seconds.append(float(cost.seconds(requests, np.array(tokens), context, prefill, np.array(drafting))))
    steps, times = np.array(rows, dtype=np.float64), np.array(seconds)
    parameters = fit_parameters(steps, times, np.ones(len(times)), times, cost.captured_tokens)
    return StepTimeModel(tuple(parameters.tolist()), cost.captured_tokens)


def tuned_table(traffic: Traffic) -> list[tuple[int, int]]:
    """Tune vLLM's table by batch size on the trace's mean curve at its start and the true cost."""
    trace, cost = traffic.trace, traffic.cost(0.0)
    mean = (1.0 / (1.0 + np.exp(-traffic.log_odds))).mean(axis=0)
    expected = np.concatenate([[1.0], 1.0 + np.cumsum(np.cumprod(mean))])
    lengths, table = np.arange(trace.num_spec_tokens + 1), []
    for power in range(trace.max_num_seqs.bit_length()):
        n = min(2**power, trace.max_num_seqs)
        block = lengths if trace.is_block_shortened else np.full_like(lengths, trace.num_spec_tokens)
        rate = n * expected / cost.seconds(n, n * (1 + lengths), n * 500, 0, block)
        table.append((n, int(rate.argmax())))
    return table


def _most_requests(traffic: Traffic) -> int:
    levels = [n for _, n in traffic.trace.load.concurrency]
    return min(max(levels, default=traffic.trace.max_num_seqs), traffic.trace.max_num_seqs)


def _conditional(survival: Floats) -> Floats:
    before = np.concatenate([np.ones((len(survival), 1)), survival[:, :-1]], axis=1)
    return np.clip(survival / before, 1e-3, 1.0 - 1e-3)
