"""Estimates of an engine's acceptance: curves of the engine and its workloads, and the effects of contexts and drafts.

A workload's curve is its own right-censored hazard, shrunk to the engine's. A request's (in the engine, `request_beliefs`) is
shrunk to its workload's. Drift tests run beside. Workloads beyond MAX_WORKLOADS share the engine's curve and aren't tested,
until one with its own curve has been silent for `_SILENT_FORGETTINGS`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from honed.adapt.acceptance.context_shift import (
    NUM_BUCKETS,
    ContextCounts,
    estimate_effect,
    shift_for,
    shifted_curves,
    tilt,
    trials_design_effect,
)
from honed.adapt.acceptance.depth_calibration import DepthCalibration, DepthLines, count_rounds
from honed.adapt.acceptance.estimate import RequestTable, reached_and_accepted, scale_odds, shrunk_estimate, survival
from honed.adapt.acceptance.forgetting import AdaptiveCounts
from honed.adapt.acceptance.reliability import Reliability
from honed.adapt.acceptance.rounds import Rounds
from honed.adapt.acceptance.traffic import Traffic
from honed.adapt.acceptance.tree_gains import TreeGains
from honed.adapt.control.explanation import describe
from honed.adapt.control.settings import ControllerSettings
from honed.adapt.monitor.drift import MOST_TRIALS, Alarm, DriftMonitor, Past
from honed.adapt.protocol.arrays import Floats
from honed.adapt.protocol.wire import WorkloadPrior
from honed.adapt.protocol.workloads import MAX_WORKLOADS

_KEPT_AFTER_SWAP = 0.02
"""Share of the counts that survives a change of weights: a first guess for the new ones."""
_MOST_DESIGN_EFFECT = 8.0
"""A round counts for at least an eighth of an independent one, so that changes within running requests are noticed."""
_ALIKE = 512.0
"""Pseudo-rounds of a workload's curve against a request's own, where requests' own rounds aren't learned from."""
_SILENT_FORGETTINGS = 10.0
"""Independent rounds of the engine, in `forgetting_rounds`, without one of a workload, until its curve may be replaced."""


class _Workload:
    def __init__(self, num_spec_tokens: int, chain_tokens: int, forgetting_rounds: float) -> None:
        self.counts = AdaptiveCounts(chain_tokens, forgetting_rounds)
        self.requests = RequestTable(chain_tokens)
        self.reliability = Reliability()
        self.depths = DepthCalibration(chain_tokens)
        self.lines = DepthLines.none(chain_tokens)
        self.contexts = ContextCounts(chain_tokens, forgetting_rounds)
        self.trees = TreeGains(num_spec_tokens, forgetting_rounds)
        self.traffic = Traffic(chain_tokens, forgetting_rounds)
        self.last_round = 0.0  # of the engine's


class AcceptanceBeliefs:
    """Learns from the verify rounds of one engine.

    Args:
        num_spec_tokens: most nodes of a tree; without trees, K.
        chain_tokens: K, tokens that the drafter drafts.
    """

    def __init__(self, num_spec_tokens: int, chain_tokens: int, settings: ControllerSettings) -> None:
        self.num_spec_tokens, self._chain_tokens = num_spec_tokens, chain_tokens
        self.settings = settings
        self._counts = AdaptiveCounts(chain_tokens, settings.forgetting_rounds)
        self._trees = TreeGains(num_spec_tokens, settings.forgetting_rounds)
        self._traffic = Traffic(chain_tokens, settings.forgetting_rounds)
        self._traffic_trees = TreeGains(num_spec_tokens, settings.forgetting_rounds)
        """The same as `_trees`, with equal weights of all rounds."""
        self.has_trees = True
        """Whether the engine can verify trees; without, what they have taught is of no use."""
        self._num_seen = 0.0
        """Independent rounds of the engine."""
        self._workloads: dict[str, _Workload] = {}
        self._others = _Workload(num_spec_tokens, chain_tokens, settings.forgetting_rounds)
        self._drift = DriftMonitor(chain_tokens, settings.drift)
        self._context_effect: Floats = np.zeros(NUM_BUCKETS)
        self._depths, self._lines = DepthCalibration(chain_tokens), DepthLines.none(chain_tokens)

    def take_new_weights(self, version: str, is_swap: bool) -> None:
        """Forget most of what the old weights taught, unless the new ones are the same under a name."""
        if is_swap:
            for one in (self._counts, self._trees, self._traffic, self._traffic_trees):
                one.forget(_KEPT_AFTER_SWAP)
            for workload in (*self._workloads.values(), self._others):
                for known in (workload.counts, workload.trees, workload.traffic):
                    known.forget(_KEPT_AFTER_SWAP)
                workload.requests.clear()
                workload.contexts.forget(_KEPT_AFTER_SWAP)
                workload.depths, workload.lines = DepthCalibration(self._chain_tokens), DepthLines.none(self._chain_tokens)
            self._depths, self._lines = DepthCalibration(self._chain_tokens), DepthLines.none(self._chain_tokens)
        self._drift.reset(version)

    def observe(self, name: str, rounds: Rounds, now_s: float | None = None) -> list[Alarm]:
        """Fold in rounds of a workload; return the drift that was found.

        Args:
            now_s: wall-clock time of the rounds; None: unknown.
        """
        workload = self._workload(name)
        columns = (rounds.num_draft_tokens, rounds.num_accepted_tokens, rounds.num_invalid_tokens)
        reached, accepted = reached_and_accepted(columns[0], columns[1], self._chain_tokens, columns[2])
        verified = np.clip(columns[0] - np.maximum(columns[2], 0), 0, self._chain_tokens)
        curve, shift = self._shift(self._curve(workload, self.engine_curve()), workload)
        theta = workload.requests.theta(rounds.request, reached, accepted, curve, self._request_strength(workload))
        design_effect = self._design_effect(workload)
        information = workload.requests.information(rounds.request, reached, workload.requests.strength())
        for mine, shifted in shifted_curves(curve, shift, rounds.position):
            mine = mine[information[mine] > 0.0]  # of the others no past is known
            predicted = scale_odds(shifted, theta[mine][:, None])
            expected = workload.lines.apply(predicted)
            workload.reliability.observe(survival(expected), verified[mine], accepted[mine])
            for traffic in (workload.traffic, self._traffic):
                traffic.observe(expected, reached[mine], accepted[mine], float(information[mine].sum()))
            counts = count_rounds(predicted, reached[mine], accepted[mine])
            for depths in (workload.depths, self._depths):
                depths.add(counts, len(predicted), design_effect)
        self._count_undrafted(workload, rounds, curve)
        workload.contexts.observe(rounds.position, reached, accepted, information)
        alike = np.full(len(rounds), information.mean())
        for trees, worth in ((workload.trees, information), (self._trees, information), (self._traffic_trees, alike)):
            if rounds.trees is not None and rounds.is_chain is not None:
                trees.observe(rounds.trees, worth[~rounds.is_chain])
            if self._verifies_trees:
                trees.observe_firsts(accepted >= 1, worth)
        self._counts.observe(*columns, weights=information, theta=theta)
        workload.counts.observe(*columns, weights=information, theta=theta)
        alarms = []
        if workload is not self._others:
            strength = self.settings.request_strength or workload.requests.strength(MOST_TRIALS)
            past = Past(workload.requests, rounds.request, strength)
            alarms = self._drift.observe(name, *columns, past=past, now_s=now_s)
        workload.requests.observe(rounds.request, reached, accepted)
        self._num_seen += float(information.sum())
        workload.last_round = self._num_seen
        return alarms

    def _count_undrafted(self, workload: _Workload, rounds: Rounds, curve: Floats) -> None:
        """Count rounds without drafts as their requests' pasts predict them: else those that accept least would be missing."""
        none = np.zeros(len(rounds.undrafted), dtype=np.int64)
        theta = workload.requests.theta(rounds.undrafted, none, none, curve, self._request_strength(workload))
        expected = workload.lines.apply(scale_odds(curve, theta[:, None]))
        for traffic in (workload.traffic, self._traffic):
            traffic.observe(expected, none, none, 0.0)

    def _workload(self, name: str) -> _Workload:
        """Get a workload's estimates, new ones for a new workload, or `_others` while there is no room for it."""
        found = self._workloads.pop(name, None)
        if found is None:
            if len(self._workloads) >= MAX_WORKLOADS:  # in order of last mention: the first is the stalest
                stalest = next(iter(self._workloads))
                silence = self._num_seen - self._workloads[stalest].last_round
                if silence < _SILENT_FORGETTINGS * self.settings.forgetting_rounds:
                    return self._others
                del self._workloads[stalest]
                self._drift.forget(stalest)
            found = _Workload(self.num_spec_tokens, self._chain_tokens, self.settings.forgetting_rounds)
        self._workloads[name] = found
        return found

    def priors(self) -> list[WorkloadPrior]:
        """Priors from which the engine starts requests: the engine's own curve, then every workload's.

        Where trees are verified these are of nodes. Those of chains follow.
        """
        chains = self._priors_of_chains()
        if not self._verifies_trees:
            return chains
        return [*self._priors_of_trees(), *(msgspec.structs.replace(one, keeps_chain=True) for one in chains)]

    @property
    def _verifies_trees(self) -> bool:
        return self.has_trees and self._trees.is_known

    def _priors_of_chains(self) -> list[WorkloadPrior]:
        engine, workloads = self.engine_curve(), self._workloads.items()
        strengths = {name: self._request_strength(workload) for name, workload in workloads}
        pooled = float(np.median(list(strengths.values()))) if strengths else self.settings.request_strength or 8.0
        self._context_effect = estimate_effect(
            [(one.contexts, trials_design_effect(one.requests, strengths[name])) for name, one in workloads]
        )
        around = self._depths.lines()
        self._lines = around.rounded()
        priors = [_prior("", pooled, *self._shift(engine), self._lines)]
        for name, one in workloads:
            one.lines = one.depths.lines(around).rounded()
            priors.append(_prior(name, strengths[name], *self._shift(self._curve(one, engine), one), one.lines))
        return priors

    def _priors_of_trees(self) -> list[WorkloadPrior]:
        """What nodes are worth, in the place of conditional acceptance; requests of a workload count as alike."""
        engine = self._trees.values(self._counts.weights)
        found = [("", self._trees.acceptance(self._counts.weights))]
        found += [(name, one.trees.acceptance(one.counts.weights, engine)) for name, one in self._workloads.items()]
        return [WorkloadPrior(name, [round(value, 4) for value in curve.tolist()], _ALIKE) for name, curve in found]

    def describe_engine(self) -> dict[str, object]:
        """Plain figures of the engine as a whole, for JSON."""
        return describe(self._counts, self.typical_curve(), self._shift(self.engine_curve())[1])

    def describe_workloads(self) -> dict[str, dict[str, object]]:
        """Plain figures of every workload, for JSON."""
        engine = self.engine_curve()
        return {
            name: {
                **describe(
                    one.counts,
                    one.traffic.curve(one.counts.weights, one.lines.apply(self._curve(one, engine))),
                    self._shift(engine, one)[1],
                ),
                "request_strength": round(self._request_strength(one), 2),
                "design_effect": round(self._design_effect(one), 3),
                "drift": self._drift.figures(name),
                "reliability": {
                    "expected_calibration_error": one.reliability.error,
                    "bins": one.reliability.bins(),
                    "by_depth": [] if one.lines.are_none else one.lines.rows(),
                },
            }
            for name, one in self._workloads.items()
        }

    def engine_curve(self) -> Floats:
        """Conditional acceptance of a request without history, over all workloads, [K]."""
        return self._counts.estimate()

    def typical_curve(self) -> Floats:
        """Conditional acceptance of the chains in a typical round, [K]."""
        return self._traffic.curve(self._counts.weights, self._lines.apply(self.engine_curve()))

    def typical_nodes(self) -> Floats | None:
        """The same as if nodes of trees were a chain's tokens, [N]; None: trees aren't verified."""
        return self._traffic_trees.acceptance(self._counts.weights) if self._verifies_trees else None

    def _curve(self, workload: _Workload, engine: Floats) -> Floats:
        strength = self.settings.workload_strength
        return workload.counts.estimate(lambda trials, successes: shrunk_estimate(trials, successes, engine, strength))

    def _shift(self, curve: Floats, workload: _Workload | None = None) -> tuple[Floats, list[float]]:
        """Remove the contexts' effect from a curve (None: the engine's): the curve at factor 1, factors by context length."""
        if not self._context_effect.any():
            return curve, []
        contexts = [one.contexts for one in ((*self._workloads.values(), self._others) if workload is None else [workload])]
        shift = shift_for(self._context_effect, np.sum([one.weight for one in contexts], axis=0))
        return (scale_odds(curve, tilt(shift, np.sum([one.recent for one in contexts], axis=0))) if shift else curve), shift

    def _request_strength(self, workload: _Workload) -> float:
        return self.settings.request_strength or workload.requests.strength()

    def _design_effect(self, workload: _Workload) -> float:
        return min(workload.requests.design_effect(workload.requests.strength()), _MOST_DESIGN_EFFECT)


def _prior(name: str, strength: float, curve: Floats, shift: list[float], lines: DepthLines) -> WorkloadPrior:
    return WorkloadPrior(
        workload=name,
        acceptance=[round(value, 4) for value in curve.tolist()],
        strength=round(strength, 2),
        context_shift=shift,
        depth_intercepts=[] if lines.are_none else lines.intercepts.tolist(),
        depth_slopes=[] if lines.are_none else lines.slopes.tolist(),
    )
