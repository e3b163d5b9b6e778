"""Notices when a workload's drafts are accepted less often than before, or than other workloads' are.

Every workload has a reference curve: its conditional acceptance over a long horizon, less `REFERENCE_Z` standard errors, so
that a young reference promises less. Three tests compare each batch's trials and successes with it:

- An e-process by betting, against "acceptance ≥ (1 − TOLERATED_LOSS) · reference at every position". A batch multiplies the
  wealth by the likelihood ratio of a worse p₁ < p₀: p₁/p₀ for each success, (1−p₁)/(1−p₀) for each failure. Its mean is ≤ 1
  while acceptance is ≥ p₀. As the moment of change is unknown, wealth is summed over all starting points (Shiryaev–Roberts):
  R ← (R + 1)·factor. R − (batches so far) is a supermartingale. So a false alarm at R ≥ A comes at most once in A batches on
  average, at any number of looks, as long as p₀ is right (below). Alarms of kind "regressed" come from this test alone.
- Page–Hinkley on the batches' standardised deviations from the tolerated level: quick, without such a bound. It makes the state
  "suspect" and stops the reference from learning what may be the new normal.
- The same bet without restarts, for a workload's first rounds, against "(1 − low_gap) · the best other workload". Its alarm has
  kind "low_for_new_workload" and is false with probability ≤ `FALSE_LOW` per workload.

A workload's state is the first of these that holds:

    drifted    it regressed less than `rearm_rounds` ago, by age: the reference is being relearned at the new level
    suspect    Page–Hinkley's statistic is high, for `rearm_rounds` at most; then it is held against the new level
    low        it was found low; until it is surely within `low_gap` of the best other one, or for `new_workload_rounds`
    learning   it had fewer than `min_reference_rounds` rounds
    stable

A busy engine has `REFERENCE_ROUNDS` in a second, and its long horizon would be one second: a decline over a minute, or a week,
would lower the reference too. So horizons are in rounds of *age*, at most `REFERENCE_ROUNDS` in `reference_s`. Only the least
number of rounds for a test is in actual rounds.

Rounds of one request resemble each other, and a rule that drafts more for easy requests while load is high would make an
acceptance that depends on load. So a round is compared with what its request's own past lets expect, as in
`adapt.acceptance.estimate`: p₀ has its failure odds times θ. After n rounds that past shows most of a loss as well, so the loss
that is bet on shrinks by 1 / (1 + (n − 1)·ρ), and evidence comes from requests' first rounds. What pasts don't explain, as
requests with easy and hard stretches, is measured: evidence is divided by the dispersion of recent requests' sums (an e-value's
power < 1 is an e-value).

Source: Shin, Ramdas, Rinaldo, arXiv 2203.03532, "E-detectors"; Page, Biometrika 41 (1954).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from honed.adapt.acceptance.estimate import (
    EDGE,
    AcceptanceCounts,
    RequestTable,
    acceptance_length,
    chain_estimate,
    reached_and_accepted,
    scale_odds,
)
from honed.adapt.protocol.arrays import Floats, Ints, IntsLike
from honed.adapt.protocol.ranges import COUNT, Range, Ranges, check_ranges

_LOSSES = np.array([0.1, 0.25, 0.5])
"""Relative losses below the tolerated level, bet on in equal parts."""
_FEW = 50.0
"""Variance of successes for which a dispersion of 1 is assumed at first."""
_FARTHEST_OF_A_WALK = 1.83
"""Mean square of the farthest that a random walk gets from 0, over that of its end: twice Catalan's constant."""
_LOG10 = math.log(10.0)
TOLERATED_LOSS = 0.03
"""A relative loss of conditional acceptance that isn't worth an alarm."""
REFERENCE_ROUNDS = 50_000.0
"""Horizon of the reference, as exponential forgetting. It is no shorter than `reference_s`."""
RECENT_ROUNDS = 200.0
"""Horizon of the recent acceptance in an alarm, in rounds; a later round of a request counts for less than one."""
REFERENCE_Z = 2.0
"""Standard errors by which the reference is lowered, so that its own uncertainty raises no alarm. Recent acceptance must
also be so many above the low level to end state "low"."""
SUSPECT_SLACK = 0.5
"""Page–Hinkley's δ, in standard deviations of a batch: the test shows where a loss may have begun."""
SUSPECT_LEVEL = 15.0
"""Page–Hinkley's λ, in standard deviations of a batch."""
MOST_TRIALS = 32.0
"""Trials at a position that a request weighs as, at most, in the estimate of how requests differ."""
FALSE_LOW = 1e-3
"""Probability of wrongly calling a new workload low."""
MIN_LOW_ROUNDS = 100
"""Rounds before a new workload can be called low."""


@dataclass(frozen=True, slots=True)
class DriftSettings:
    """Definition of drift, and the required certainty."""

    batches_per_false_alarm: float = 1e6
    """Batches between two false alarms, on average, for each workload."""
    min_reference_rounds: int = 400
    """Before so many rounds a workload only teaches its reference: nothing is tested."""
    reference_s: float = 86_400.0
    """Time in which at most `REFERENCE_ROUNDS` count as age, for the reference, `rearm_rounds` and `new_workload_rounds`. Else
    a busy engine would forget the normal level within seconds."""
    rearm_rounds: int = 4000
    """Rounds of age after an alarm in which the reference is relearned and no second alarm is raised."""
    low_gap: float = 0.25
    """A new workload is low when its conditional acceptance is this much (relative) below the best other one's."""
    new_workload_rounds: int = 20_000
    """Rounds of age for which a workload is new, and for which it is called low at most."""

    RANGES: ClassVar[Ranges] = {
        "low_gap": Range(0, 1, excludes_high=True),
        **dict.fromkeys(("min_reference_rounds", "rearm_rounds", "new_workload_rounds"), Range(0)),
        "batches_per_false_alarm": COUNT,
        "reference_s": Range(0, excludes_low=True),
    }

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True)
class Alarm:
    """A workload does worse than it should; with the evidence."""

    kind: str
    """"regressed" or "low_for_new_workload"."""
    workload: str
    drafter_version: str
    positions: tuple[int, ...]
    """Positions (from 1) that show it by themselves; if none does, the one with the most evidence."""
    evidence: float
    """log₁₀ of the e-value."""
    rounds: int
    """Rounds of the workload seen with this drafter version."""
    acceptance_length: float
    reference_length: float
    text: str
    since_s: float = 0.0
    """Unix time at which the change most likely began; 0: unknown, or the workload was always so."""


class Past(NamedTuple):
    """What earlier rounds showed of the requests of a batch's rounds."""

    table: RequestTable
    request: npt.NDArray[np.uint64]
    """Of each round, [R]."""
    strength: float
    """Pseudo-rounds of the workload's curve against a request's own; estimated with `MOST_TRIALS`."""


class Trials:
    """The trials of a batch's R rounds, one after the other: N of them."""

    def __init__(self, reached: Ints, accepted: Ints, past: Past | None) -> None:
        self.reached, self.accepted, self.past = reached, accepted, past
        self.round: Ints = np.repeat(np.arange(len(reached)), reached)  # [N]
        self.position: Ints = np.arange(len(self.round)) - np.repeat(np.cumsum(reached) - reached, reached)  # [N]
        self.is_success = self.position < accepted[self.round]  # [N]
        self.information: Floats = np.ones(len(reached))
        """Independent rounds that each round is worth, [R]."""
        if past is not None:
            self.information = past.table.information(past.request, reached, past.strength)
        self.share: Floats = np.sqrt(self.information)
        """Share of a change of the workload's curve that the past of each round's request doesn't show yet, [R]."""
        self.weight = self.share[self.round]  # [N]

    def theta(self, curve: Floats) -> Floats:  # [K] -> [R]
        """Failure odds of the rounds' requests relative to a curve, from their earlier rounds."""
        if self.past is None:
            return np.ones(len(self.reached))
        table, request, strength = self.past
        return table.theta(request, self.reached, self.accepted, curve, strength)

    def predict(self, curve: Floats) -> Floats:  # [K] -> [N]
        """Probability of success of each trial, if a request without history has this curve."""
        return scale_odds(curve[self.position], self.theta(curve)[self.round])

    def deviation(self, curve: Floats, tolerated: float) -> float:
        """How far successes are from the tolerated level, in standard deviations."""
        predicted = self.predict(curve) * (1.0 - tolerated)
        variance = float((predicted * self.weight**2) @ (1.0 - predicted))
        return float((self.is_success - predicted) @ self.weight) / math.sqrt(max(variance, 1e-9))

    def count_into(self, counts: AcceptanceCounts) -> None:
        """Count the rounds, each by what its request's past leaves open, as it counts in a bet."""
        counts.observe(self.reached, self.accepted, weights=self.share, theta=self.theta(_curve(counts)))


class Dispersion:
    """How many times as much the sums of recent requests' successes stray as their pasts say: 1 where these say all.

    A sum may end where it should and have been far off between, in a request that grows harder. So the farthest counts.
    """

    def __init__(self) -> None:
        self._residual = self._variance = self._farthest = np.zeros(0)

    @property
    def value(self) -> float:
        """The factor, at least 1."""
        strayed = float(self._farthest @ self._farthest) / _FARTHEST_OF_A_WALK
        return max((strayed + _FEW) / (float(self._variance.sum()) + _FEW), 1.0)

    def observe(self, trials: Trials, curve: Floats) -> None:
        """Fold in a batch."""
        if trials.past is None:
            return
        table, request, _ = trials.past
        if not len(self._variance):
            self._residual, self._variance, self._farthest = np.zeros((3, len(table.owner)))
        slots, newcomers = table.places(request)
        predicted = trials.predict(curve)
        self._residual[newcomers] = self._variance[newcomers] = self._farthest[newcomers] = 0.0
        slots = slots[trials.round]
        self._residual += np.bincount(slots, (trials.is_success - predicted) * trials.weight, len(self._residual))
        self._variance += np.bincount(slots, predicted * (1.0 - predicted) * trials.weight**2, len(self._variance))
        self._farthest = np.maximum(self._farthest, np.abs(self._residual))


class Bet:
    """Wealth of bets that acceptance lies below p₀, at all positions or at one, and, if asked, from any starting point."""

    def __init__(self, num_spec_tokens: int, is_restarting: bool) -> None:
        self._is_restarting = is_restarting
        self._num_starts = 0 if is_restarting else 1
        self._log_wealth: Floats = np.full(len(_LOSSES), -np.inf if is_restarting else 0.0)
        self._log_positions: Floats = np.full((len(_LOSSES), num_spec_tokens), -np.inf if is_restarting else 0.0)
        self._rise: Floats = np.zeros(len(_LOSSES))
        """Of log wealth above its least so far (CUSUM)."""
        self._rising_since_s: Floats = np.zeros(len(_LOSSES))

    def observe(
        self, trials: Trials, curve: Floats, tolerated: float = 0.0, dispersion: float = 1.0, now_s: float = 0.0
    ) -> None:
        """Settle a batch's bets against "acceptance ≥ (1 − tolerated) · curve", both of which earlier batches determined."""
        null = trials.predict(curve) * (1.0 - tolerated)
        worse = null * (1.0 - _LOSSES[:, None] * trials.weight)
        ratio = np.log(np.where(trials.is_success, worse / null, (1.0 - worse) / (1.0 - null)))
        gain = np.array([np.bincount(trials.position, one, len(curve)) for one in ratio]) / max(dispersion, 1.0)
        if self._is_restarting:
            self._num_starts += 1
            self._log_wealth = np.logaddexp(self._log_wealth, 0.0)
            self._log_positions = np.logaddexp(self._log_positions, 0.0)
        self._rising_since_s[self._rise <= 0.0] = now_s
        self._rise = np.maximum(self._rise + gain.sum(axis=1), 0.0)
        self._log_wealth = self._log_wealth + gain.sum(axis=1)
        self._log_positions = self._log_positions + gain

    @property
    def log_e(self) -> float:
        """Natural logarithm of the e-value: three quarters bet on all positions, one quarter on a single one each."""
        everywhere = float(np.logaddexp.reduce(self._log_wealth)) - math.log(len(_LOSSES))
        somewhere = float(np.logaddexp.reduce(self._log_positions, axis=None)) - math.log(self._log_positions.size)
        return float(np.logaddexp(everywhere + math.log(0.75), somewhere + math.log(0.25)))

    @property
    def since_s(self) -> float:
        """When the loss that has the most evidence most likely began: as the sum of its logarithms was least."""
        return float(self._rising_since_s[int(self._log_wealth.argmax())])

    def positions(self) -> tuple[int, ...]:
        """Name the positions (from 0) whose own e-value is at least 20 a starting point, else the one with the largest."""
        log_e = np.logaddexp.reduce(self._log_positions, axis=0) - math.log(len(_LOSSES))
        strong = np.flatnonzero(log_e >= math.log(20.0 * max(self._num_starts, 1)))
        return tuple(strong.tolist()) or (int(log_e.argmax()),)


class PageHinkley:
    """Cumulative sum of downward deviations, in standard deviations, less a slack: Σ(−z − δ) above its minimum so far."""

    def __init__(self, slack: float) -> None:
        self._slack = slack
        self.statistic = 0.0

    def observe(self, deviation: float) -> None:
        """Fold in one batch's standardised deviation (negative: worse than the reference)."""
        self.statistic = max(self.statistic - deviation - self._slack, 0.0)


class _Workload:
    """State of one workload with one drafter version."""

    def __init__(self, num_spec_tokens: int, settings: DriftSettings) -> None:
        self.reference = AcceptanceCounts(num_spec_tokens, math.inf)
        self.normal = AcceptanceCounts(num_spec_tokens, math.inf)
        """The reference, until a suspicion ends without proof: then its level meanwhile, for Page–Hinkley alone."""
        self.suspected = AcceptanceCounts(num_spec_tokens, math.inf)
        """Rounds since the suspicion began."""
        self.recent = AcceptanceCounts(num_spec_tokens, RECENT_ROUNDS)
        self.regressed = Bet(num_spec_tokens, is_restarting=True)
        self.low = Bet(num_spec_tokens, is_restarting=False)
        self._settings = settings
        self.page_hinkley = PageHinkley(SUSPECT_SLACK)
        self.dispersion = Dispersion()
        self._shares = self._information = 1.0
        self.rounds = 0
        self.age = 0.0
        self.alarmed_at = self.suspect_since = self.low_since = -1.0
        """By age; below 0: never, or ended."""
        self._last_s: float | None = None
        self.was_low = False
        self.alarm = ""

    @property
    def design_effect(self) -> float:
        """Counted rounds that are worth an independent one."""
        return self._shares / self._information * self.dispersion.value

    def grow(self, trials: Trials, now_s: float | None) -> None:
        """Age by a batch's rounds, but by no more than the time since the last one allows."""
        settings, older = self._settings, float(len(trials.reached))
        if now_s is not None:
            elapsed_s = max(now_s - self._last_s, 0.0) if self._last_s is not None else 0.0
            self._last_s = now_s
            older = min(older, REFERENCE_ROUNDS * elapsed_s / settings.reference_s)
        self.rounds += len(trials.reached)
        self.age += older
        self._shares += float(trials.share.sum())
        self._information += float(trials.information.sum())
        if self.suspect_since < 0.0:
            for learned in (self.reference, self.normal):
                learned.scale(math.exp(-older / REFERENCE_ROUNDS))

    @property
    def state(self) -> str:
        """The first state in the module's docstring that holds."""
        settings = self._settings
        if self.is_drifted:
            return "drifted"
        if self.suspect_since >= 0.0:
            return "suspect"
        if self.low_since >= 0.0:
            return "low"
        return "learning" if self.rounds < settings.min_reference_rounds else "stable"

    @property
    def is_drifted(self) -> bool:
        """Whether the reference is still being relearned after an alarm."""
        return self.alarmed_at >= 0.0 and self.age - self.alarmed_at < self._settings.rearm_rounds


class DriftMonitor:
    """Watches all workloads of one engine; values in, alarms out."""

    def __init__(self, num_spec_tokens: int, settings: DriftSettings = DriftSettings()) -> None:
        self.settings = settings
        self._num_spec_tokens = num_spec_tokens
        self._workloads: dict[str, _Workload] = {}
        self._were_low: set[str] = set()
        """Workloads whose low level was told of these weights: a trial's end is no reason to tell it again."""
        self._drafter_version = ""

    def reset(self, drafter_version: str) -> None:
        """Start over: new weights have a new acceptance."""
        self._workloads.clear()
        if drafter_version != self._drafter_version:
            self._were_low.clear()
        self._drafter_version = drafter_version

    def forget(self, workload: str) -> None:
        """Drop one workload."""
        self._workloads.pop(workload, None)
        self._were_low.discard(workload)

    def observe(
        self,
        workload: str,
        num_draft_tokens: IntsLike,
        num_accepted_tokens: IntsLike,
        num_invalid_tokens: IntsLike | None = None,
        past: Past | None = None,
        now_s: float | None = None,
    ) -> list[Alarm]:
        """Fold in one batch's rounds of a workload; return the alarms that they raise.

        Args:
            past: of the rounds' requests, without these rounds; None: every round is of a request of its own.
            now_s: time of the rounds; None: all of them count as age.
        """
        if not len(num_draft_tokens) or not self._num_spec_tokens:
            return []
        held = self._workloads.get(workload)
        if held is None:
            held = self._workloads[workload] = _Workload(self._num_spec_tokens, self.settings)
            held.was_low = workload in self._were_low
        trials = Trials(
            *reached_and_accepted(num_draft_tokens, num_accepted_tokens, self._num_spec_tokens, num_invalid_tokens), past
        )
        trials.count_into(held.recent)
        alarms = []
        if held.rounds >= self.settings.min_reference_rounds:
            alarms += self._test_regression(workload, held, trials, now_s or 0.0)
        alarms += self._test_low(workload, held, trials)
        if held.rounds >= self.settings.min_reference_rounds:
            held.dispersion.observe(trials, _curve(held.normal))
        held.grow(trials, now_s)
        if held.suspect_since < 0.0:
            trials.count_into(held.reference)
            trials.count_into(held.normal)
        else:
            trials.count_into(held.suspected)
        return alarms

    def figures(self, workload: str) -> dict[str, object]:
        """Describe a workload for people: state, evidence, and the text of the alarm that began the state."""
        held = self._workloads.get(workload)
        if held is None:
            return {"state": "learning", "alarm": "", "evidence": 0.0, "page_hinkley": 0.0, "reference_length": 0.0}
        return {
            "state": held.state,
            "alarm": held.alarm if held.state in ("drifted", "low") else "",
            "evidence": round(max(held.regressed.log_e / _LOG10, -99.0), 3),
            "page_hinkley": round(held.page_hinkley.statistic, 3),
            "reference_length": round(_length(held.reference), 4),
        }

    def _test_regression(self, workload: str, held: _Workload, trials: Trials, now_s: float) -> list[Alarm]:
        settings = self.settings
        dispersion, lower = held.dispersion.value, lower_curve(held.reference, REFERENCE_Z, held.design_effect)
        held.regressed.observe(trials, lower, TOLERATED_LOSS, dispersion, now_s)
        held.page_hinkley.observe(trials.deviation(_curve(held.normal), TOLERATED_LOSS) / math.sqrt(dispersion))
        if held.regressed.log_e >= math.log(settings.batches_per_false_alarm):
            is_armed = not held.is_drifted
            alarm = self._alarm("regressed", workload, held, held.regressed, _length(held.reference))
            if is_armed:
                held.alarmed_at, held.alarm = held.age, alarm.text
            held.suspect_since = -1.0
            held.reference, held.normal = (AcceptanceCounts(self._num_spec_tokens, math.inf) for _ in range(2))
            for learned in (held.reference, held.normal):
                learned.trials += held.recent.trials
                learned.successes += held.recent.successes
            held.regressed = Bet(self._num_spec_tokens, is_restarting=True)
            held.page_hinkley = PageHinkley(SUSPECT_SLACK)
            return [alarm] if is_armed else []
        if held.is_drifted:  # a reference that is still learning makes nothing suspect afterwards
            held.page_hinkley = PageHinkley(SUSPECT_SLACK)
            return []
        if held.page_hinkley.statistic <= SUSPECT_LEVEL:
            held.suspect_since = -1.0
        elif held.suspect_since < 0.0:
            held.suspect_since, held.suspected = held.age, AcceptanceCounts(self._num_spec_tokens, math.inf)
        elif held.age - held.suspect_since >= settings.rearm_rounds:
            # Suspicion never became proof: the change is too small for an alarm, and is the new normal. The bet keeps the old
            # level in sight, for a day: several such losses together may be proven.
            held.page_hinkley, held.suspect_since = PageHinkley(SUSPECT_SLACK), -1.0
            held.normal = held.suspected
        return []

    def _test_low(self, workload: str, held: _Workload, trials: Trials) -> list[Alarm]:
        settings = self.settings
        if held.low_since >= 0.0 and held.age - held.low_since >= settings.new_workload_rounds:
            held.low_since = -1.0  # the low level is this workload's normal
        if held.low_since < 0.0 and (held.was_low or held.age > settings.new_workload_rounds):
            return []
        others = [
            other
            for name, other in self._workloads.items()
            if name != workload and other.rounds >= settings.min_reference_rounds
        ]
        if not others:
            return []
        best = max(others, key=lambda other: _length(other.reference))
        if held.low_since >= 0.0:
            if _is_near(held.recent, best.reference, settings, held.design_effect):
                held.low_since = -1.0
            return []
        curve = lower_curve(best.reference, REFERENCE_Z, best.design_effect) * (1.0 - settings.low_gap)
        held.low.observe(trials, curve, dispersion=held.dispersion.value)
        seen = held.rounds + np.count_nonzero(trials.reached)
        if held.low.log_e < math.log(1.0 / FALSE_LOW) or seen < MIN_LOW_ROUNDS:
            return []
        held.was_low, held.low_since = True, held.age
        self._were_low.add(workload)
        alarm = self._alarm("low_for_new_workload", workload, held, held.low, _length(best.reference))
        held.alarm = alarm.text
        return [alarm]

    def _alarm(self, kind: str, workload: str, held: _Workload, bet: Bet, reference_length: float) -> Alarm:
        length, evidence = _length(held.recent), bet.log_e / _LOG10
        positions = tuple(position + 1 for position in bet.positions())
        what = "fell below its reference" if kind == "regressed" else "is far below the best other workload's"
        where = f"position{'s' if len(positions) > 1 else ''} {', '.join(map(str, positions))}"
        text = (
            f"acceptance of workload {workload!r} {what}: acceptance length {length:.2f} against {reference_length:.2f}, "
            f"most at draft {where}, e-value 10^{evidence:.1f}"
        )
        since_s = bet.since_s if kind == "regressed" else 0.0
        version, rounds = self._drafter_version, held.rounds
        return Alarm(kind, workload, version, positions, evidence, rounds, length, reference_length, text, since_s)


def lower_curve(counts: AcceptanceCounts, z: float, design_effect: float) -> Floats:
    """Compute the curve less z standard errors, [K]; near 0 with next to no data, which then prove nothing."""
    trials = counts.trials / max(design_effect, 1.0) + 1.0
    mean = (counts.successes / max(design_effect, 1.0) + 0.5) / trials
    return np.clip(mean - z * np.sqrt(mean * (1.0 - mean) / trials), EDGE, 1.0 - EDGE)


def _is_near(recent: AcceptanceCounts, best: AcceptanceCounts, settings: DriftSettings, design_effect: float) -> bool:
    """Whether recent acceptance is above the low level by more than its noise."""
    low = _curve(best) * (1.0 - settings.low_gap)
    noise = math.sqrt(float(recent.trials @ (low * (1.0 - low))) * max(design_effect, 1.0))
    return float(recent.successes.sum() - recent.trials @ low) > REFERENCE_Z * noise


def _curve(counts: AcceptanceCounts) -> Floats:
    return chain_estimate(counts.trials, counts.successes)


def _length(counts: AcceptanceCounts) -> float:
    return acceptance_length(_curve(counts))
