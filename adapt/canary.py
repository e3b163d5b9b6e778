"""Watches a swap: are the new weights' drafts accepted less often than the old ones' were?

Per workload and position there are counts from before the swap (the baseline) and, growing, from after it. With p_j the old
weights' conditional acceptance, whose uncertainty is its Beta(s + ½, f + ½) posterior from the baseline, the new counts have
under a relative loss θ the marginal likelihood

    M(θ) = Π_j ∫ Beta(p; s⁰_j + ½, f⁰_j + ½) · (p(1−θ))^s_j · (1 − p(1−θ))^f_j dp

    e_roll_back = mean over θ ∈ ROLL_BACK_LOSSES of M(θ) / max over θ ∈ {0, tolerated_loss} of M(θ)
                  (a quarter of the mean's weight is on losses at a single position, M with θ there and 0 elsewhere)
    e_keep      = mean over θ ∈ {−10 %, 0, tolerated/2} of M(θ) / max over θ ∈ {loss, 2·loss} of M(θ)

M(θ)/M(0) is a martingale when the new weights are like the old, so both are e-processes: P(e ever ≥ 1/α) ≤ α, at every look,
on average over baselines (the uncertainty of a short baseline is integrated over, never taken for zero). With W workloads
the bar is W/α. Conditional acceptance is compared position by position, so a k that changed meanwhile makes no difference;
a workload without baseline isn't watched. After `max_rounds` without proof of a loss the weights are kept: drift detection
goes on anyway.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from honed.adapt.acceptance import Floats, count_trials
from honed.adapt.ranges import COUNT, PROBABILITY, Range, Ranges, check_ranges
from honed.adapt.rounds import rounds_by_workload
from honed.adapt.wire import EventBatch

ROLL_BACK_LOSSES = (0.05, 0.1, 0.2, 0.4)
_MIN_BASELINE_TRIALS = 20.0
_NODES = 65
_LOG10 = math.log(10.0)


@dataclass(frozen=True, slots=True)
class CanarySettings:
    """How sure the watch has to be, and how long it may take."""

    false_roll_back: float = 0.01
    """Probability of rolling back weights that are no worse."""
    false_keep: float = 0.01
    """Probability of an early "keep" for weights that lose `loss` or more."""
    tolerated_loss: float = 0.0
    """Relative loss of conditional acceptance that isn't held against new weights, however many rounds show it. Since the
    smallest loss that is bet on is 5 %, one below about 2.5 % hardly ever is, even at 0; more than 0 costs detection time.
    """
    loss: float = 0.10
    """Relative loss that must not stay."""
    max_rounds: int = 5000
    """Rounds without proof of a loss after which the weights stay."""
    min_rounds: int = 50
    """Rounds of a workload before anything is decided on it."""

    RANGES: ClassVar[Ranges] = {
        **dict.fromkeys(("false_roll_back", "false_keep"), PROBABILITY),
        "tolerated_loss": Range(0, 1, excludes_high=True),
        "loss": Range(0, 0.5, excludes_low=True, excludes_high=True),  # twice as much is bet against as well
        "max_rounds": COUNT,
        "min_rounds": Range(0),
    }

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True)
class Baseline:
    """A workload's counts with the old weights, per position."""

    trials: tuple[float, ...]  # [K]
    successes: tuple[float, ...]  # [K]
    design_effect: float = 1.0
    """By how much the rounds repeat each other; both sides' counts are divided by it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of the new weights so far."""

    decision: str
    """"undecided", "keep" or "roll_back"."""
    workload: str = ""
    """Workload that decided it or looks worst; "" before there is one."""
    evidence: float = 0.0
    """log₁₀ of the e-value against the new weights, there."""
    evidence_keep: float = 0.0
    """log₁₀ of the e-value for them, there."""
    rounds: int = 0
    """Rounds with the new weights, all watched workloads together."""
    loss: float = 0.0
    """Estimated relative loss of conditional acceptance, there; negative: a gain."""
    text: str = ""


class _Watched:
    """One workload's baseline and its counts since the swap."""

    def __init__(self, baseline: Baseline, settings: CanarySettings) -> None:
        trials = np.asarray(baseline.trials, dtype=np.float64)
        successes = np.clip(np.asarray(baseline.successes, dtype=np.float64), 0.0, trials)
        self.num_spec_tokens = len(trials)
        self._effect = max(baseline.design_effect, 1.0)
        self._use = trials / self._effect >= _MIN_BASELINE_TRIALS
        n, s = trials[self._use] / self._effect, successes[self._use] / self._effect
        self._mean = (s + 0.5) / (n + 1.0)
        self._nodes, self._log_weights = _posterior_nodes(n, s)  # [J, nodes]
        nulls = (0.0, settings.tolerated_loss)
        fine = (-0.1, 0.0, settings.tolerated_loss / 2.0)
        self._losses = (*ROLL_BACK_LOSSES, *nulls, *fine, settings.loss, 2.0 * settings.loss)
        scaled = [np.clip(self._nodes * (1.0 - loss), 1e-6, 1.0 - 1e-6) for loss in self._losses]
        self._log_pass = np.log(scaled)  # [losses, J, nodes]
        self._log_fail = np.log1p(-np.array(scaled))
        self.trials: Floats = np.zeros(self.num_spec_tokens)
        self.successes: Floats = np.zeros(self.num_spec_tokens)
        self.rounds = 0
        self.log_e_roll_back = 0.0
        self.log_e_keep = 0.0

    @property
    def is_useful(self) -> bool:
        return bool(self._use.any())

    def observe(self, trials: Floats, successes: Floats, rounds: int) -> None:
        self.trials += trials
        self.successes += successes
        self.rounds += rounds
        s = self.successes[self._use, None] / self._effect
        f = (self.trials - self.successes)[self._use, None] / self._effect
        terms = self._log_weights + s * self._log_pass + f * self._log_fail
        by_position = np.logaddexp.reduce(terms, axis=2)  # [losses, J]
        log_m = by_position.sum(axis=1)  # [losses]
        bets = len(ROLL_BACK_LOSSES)
        worse, null, fine, lost = log_m[:bets], log_m[bets : bets + 2], log_m[bets + 2 : bets + 5], log_m[bets + 5 :]
        alone = by_position[:bets] - by_position[bets] + null[0]
        against = np.logaddexp(_log_mean(worse) + math.log(0.75), _log_mean(alone.ravel()) + math.log(0.25))
        self.log_e_roll_back = float(against) - float(null.max())
        self.log_e_keep = _log_mean(fine) - float(lost.max())

    def loss(self) -> float:
        expected = float(self.trials[self._use] @ self._mean)
        return 1.0 - float(self.successes[self._use].sum()) / expected if expected > 0.0 else 0.0


class SwapWatch:
    """Decides about one swap from the batches that follow it; a decision stays."""

    def __init__(
        self, settings: CanarySettings, baselines: Mapping[str, Baseline], drafter_version: str = ""
    ) -> None:
        self.settings = settings
        self._version = drafter_version
        watched = {workload: _Watched(baseline, settings) for workload, baseline in baselines.items()}
        self._watched = {workload: one for workload, one in watched.items() if one.is_useful}
        self._rounds = 0
        text = "" if self._watched else "no workload has enough rounds from before the swap to compare with"
        self._verdict = Verdict("undecided", text=text)

    @property
    def verdict(self) -> Verdict:
        """What is known so far."""
        return self._verdict

    def observe(self, batch: EventBatch) -> Verdict:
        """Fold in a batch; those of other drafter versions are ignored. Raises ValueError for unequal columns."""
        if self._verdict.decision != "undecided" or (self._version and batch.drafter_version != self._version):
            return self._verdict
        for workload, rounds in rounds_by_workload(batch):
            self._rounds += len(rounds)
            one = self._watched.get(workload)
            if one is not None:
                counts = count_trials(
                    rounds.num_draft_tokens, rounds.num_accepted_tokens, one.num_spec_tokens, rounds.num_invalid_tokens
                )
                one.observe(*counts, len(rounds))
        self._verdict = self._judge()
        return self._verdict

    def figures(self) -> dict[str, dict[str, float]]:
        """Describe every watched workload for people."""
        return {
            workload: {
                "rounds": one.rounds,
                "log10_e_roll_back": round(one.log_e_roll_back / _LOG10, 3),
                "log10_e_keep": round(one.log_e_keep / _LOG10, 3),
                "loss": round(one.loss(), 4),
            }
            for workload, one in self._watched.items()
        }

    def _judge(self) -> Verdict:
        settings, count = self.settings, max(len(self._watched), 1)
        seen = {name: one for name, one in self._watched.items() if one.rounds > 0}
        if seen:
            name, worst = max(seen.items(), key=lambda item: item[1].log_e_roll_back)
            bar = math.log(count / settings.false_roll_back)
            if worst.log_e_roll_back >= bar and worst.rounds >= settings.min_rounds:
                return self._say("roll_back", name, worst, "accepts fewer of the new weights' drafts")
            bar = math.log(count / settings.false_keep)
            if all(
                one.rounds >= settings.min_rounds and one.log_e_keep >= bar for one in self._watched.values()
            ):
                return self._say("keep", name, worst, "was the worst, and it is as good as before")
            if self._rounds >= settings.max_rounds:
                return self._say("keep", name, worst, f"shows no proven loss after {self._rounds} rounds")
            return self._say("undecided", name, worst, "looks worst so far")
        if self._rounds >= settings.max_rounds:
            return Verdict("keep", rounds=self._rounds, text="no workload could be compared with before the swap")
        return Verdict("undecided", rounds=self._rounds, text=self._verdict.text)

    def _say(self, decision: str, workload: str, one: _Watched, why: str) -> Verdict:
        evidence, keep, loss = one.log_e_roll_back / _LOG10, one.log_e_keep / _LOG10, one.loss()
        text = f"workload {workload!r} {why}: loss {loss:+.1%}, e-value 10^{evidence:.1f} against, 10^{keep:.1f} for"
        return Verdict(decision, workload, evidence, keep, self._rounds, loss, text)


def _posterior_nodes(trials: Floats, successes: Floats) -> tuple[Floats, Floats]:
    """Lay nodes over each position's posterior (six standard deviations), with logarithms of normalised weights."""
    alpha, beta = successes + 0.5, trials - successes + 0.5
    total = alpha + beta
    mean, deviation = alpha / total, np.sqrt(alpha * beta / (total**2 * (total + 1.0)))
    low = np.maximum(mean - 6.0 * deviation, 1e-6)[:, None]
    high = np.minimum(mean + 6.0 * deviation, 1.0 - 1e-6)[:, None]
    nodes = low + (high - low) * (np.arange(_NODES) + 0.5) / _NODES
    log_density = (alpha - 1.0)[:, None] * np.log(nodes) + (beta - 1.0)[:, None] * np.log1p(-nodes)
    return nodes, log_density - np.logaddexp.reduce(log_density, axis=1, keepdims=True)


def _log_mean(values: Floats) -> float:
    return float(np.logaddexp.reduce(values)) - math.log(len(values))
