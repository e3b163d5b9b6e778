"""Comparison of a new drafter version with the old one, in turns on live traffic: promote, roll back, or nothing is proven.

The two serve in short windows. Windows come in pairs, and a coin decides which version begins. After each pair the evidence
grows (`evidence` has the test and the reason why it holds at every look). It is gathered for all traffic and per workload:

    worse   as soon as e ≥ 1/α somewhere: with 0.94·α on all traffic, with 0.06·α / (i·(i+1)) on the i-th workload seen
    better  likewise, once every workload with `LEAST_SHARE` of the traffic is shown to lose little (`evidence.MARGINS`), unless
            some workload looks bad

Other hosts' trials of the same two versions can be added (`hear`). They decide on all traffic only, and only where this host's
own traffic points the same way. The allowance of all traffic is then shared by both tests.

After `max_pairs` without either, nothing was proven. A version that only waits for a workload's proof has three times as many.
A limit of rounds would be wrong: where thousands are verified in a window, it came before any evidence could.
Batches are told apart by their drafter version, so the exact time of an engine's swap doesn't matter. Those of other versions
are ignored. Nothing here reads a clock or tosses the coin.

Of draft trees nodes are compared, by their number: each drafter's n-th best. Trees in whose round a request ends are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from honed.adapt.acceptance.estimate import count_trials
from honed.adapt.acceptance.rounds import Rounds, rounds_by_workload
from honed.adapt.monitor.evidence import Evidence
from honed.adapt.protocol.arrays import Floats
from honed.adapt.protocol.ranges import COUNT, PROBABILITY, SECONDS, Range, Ranges, check_ranges
from honed.adapt.protocol.wire import EventBatch
from honed.adapt.protocol.workloads import WorkloadNames

Decision = Literal["undecided", "better", "worse", "unproven"]

ALL = ""
"""Name of all traffic, beside the workloads'."""
_SHARE_OF_ALL = 0.94
LOG_DOUBT = math.log(10.0)
"""A workload with so much evidence of a loss blocks a promotion."""
LOG_HELD = math.log(20.0)
"""ln of the e-value that shows that a workload loses little."""
LEAST_SHARE = 0.01
PATIENCE = 3
"""Times `max_pairs` for a version that is better on all traffic, while a workload isn't shown to lose little."""
_LOG10 = math.log(10.0)
_WORSE, _BETTER = 0, 1
FALSE_PROMOTION = 0.01
"""Probability of calling a version better that accepts no more drafts."""
LEAST_PAIRS = 25
"""Pairs of its own after which a host follows others' evidence, if its own traffic points the same way."""


@dataclass(frozen=True, slots=True)
class CanarySettings:
    """Required certainty of a verdict, and its time limits."""

    false_roll_back: float = 0.01
    """Probability of calling a version worse that accepts no fewer drafts."""
    window_rounds: int = 12
    """Verify rounds after which a window is over, if it has lasted `window_s`. A pair of windows can at most double the
    evidence, so windows should be short."""
    window_s: float = 0.5
    """Shortest window."""
    max_window_s: float = 30.0
    """A window with fewer rounds ends after this time, unless it has none at all."""
    reset_window_s: float = 30.0
    """Shortest window where a swap must drop cached keys and values (scope "full"): each swap preempts running requests."""
    max_pairs: int = 800
    """Nothing is proven without a verdict after so many pairs of windows; three times as many while one workload's proof is
    missing."""
    max_s: float = 3600.0
    """Nothing is proven without a verdict after so much time with traffic."""

    RANGES: ClassVar[Ranges] = {
        "false_roll_back": PROBABILITY,
        **dict.fromkeys(("window_rounds", "max_pairs"), COUNT),
        "window_s": Range(0, 3600),
        **dict.fromkeys(("max_window_s", "reset_window_s", "max_s"), SECONDS),
    }

    def __post_init__(self) -> None:
        check_ranges(self)

    def log_bar(self, decision: Literal["worse", "better"], number: int = 0) -> float:
        """ln of the e-value that decides, for all traffic (0) or for the `number`-th workload seen (from 1).

        The allowances add up to the settings' probability for any number of workloads.
        """
        allowed = self.false_roll_back if decision == "worse" else FALSE_PROMOTION
        share = _SHARE_OF_ALL if number == 0 else (1.0 - _SHARE_OF_ALL) / (number * (number + 1))
        return -math.log(allowed * share)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result so far for a new version."""

    decision: Decision
    workload: str = ALL
    """Workload of the decision, or the worst so far; "" for all traffic."""
    evidence_worse: float = 0.0
    """log₁₀ of the e-value against the new version, there."""
    evidence_better: float = 0.0
    """log₁₀ of the e-value for it, there."""
    change: float = 0.0
    """Estimated relative change of conditional acceptance, there."""
    rounds: int = 0
    """Rounds of complete pairs, both versions together."""
    pairs: int = 0
    text: str = ""


class _Counts:
    """Trials and successes of one version in the open pair, by workload; both [2K − 1].

    First the K positions of chains, then nodes 1 … K−1 of trees. Node 0 is a chain's first position. A drafter's own
    probabilities decide how much of its chain is in a tree, so chains within trees can't be compared. Whether node n is
    there the budget decides, which is the same for both.
    """

    def __init__(self, num_spec_tokens: int) -> None:
        self.num_spec_tokens = num_spec_tokens
        self.rounds = 0
        self.by_workload: dict[str, tuple[Floats, Floats]] = {}

    def add(self, workload: str, rounds: Rounds) -> None:
        mine, k = slice(None) if rounds.is_chain is None else rounds.is_chain, self.num_spec_tokens
        columns = rounds.num_draft_tokens[mine], rounds.num_accepted_tokens[mine], rounds.num_invalid_tokens[mine]
        counted = [np.concatenate([one, np.zeros(k - 1)]) for one in count_trials(*columns[:2], k, columns[2])]
        if rounds.trees is not None:
            for sums, one in zip(counted, rounds.trees.count(k, rounds.trees.is_whole.astype(np.float64)), strict=True):
                sums[0] += one[0]
                sums[k:] += one[1:]
        trials, successes = self.of(workload)
        self.by_workload[workload] = (trials + counted[0], successes + counted[1])
        self.rounds += len(rounds)

    def of(self, workload: str) -> tuple[Floats, Floats]:
        zeros = np.zeros(places_of(self.num_spec_tokens))
        return self.by_workload.get(workload, (zeros, zeros))


def places_of(num_spec_tokens: int) -> int:
    """Places that are compared one by one."""
    return 2 * num_spec_tokens - 1


class Canary:
    """One comparison of two versions.

    Args:
        old: proven version.
        new: version on trial.
        num_spec_tokens: K, the most of all engines.
        old_begins: the coin for the first pair.
        hears_others: whether other hosts' evidence may decide, too.
    """

    def __init__(
        self,
        settings: CanarySettings,
        old: str,
        new: str,
        num_spec_tokens: int,
        *,
        old_begins: bool,
        hears_others: bool = False,
    ) -> None:
        self.settings, self.old, self.new, self.num_spec_tokens = settings, old, new, num_spec_tokens
        self._hears_others = hears_others
        self.heard: dict[str, Floats] = {}
        """Sums of other trials' bets, by workload."""
        self.num_others = 0
        """Other hosts' trials that were heard of."""
        self.pairs = self.rounds = 0
        self._evidence: dict[str, Evidence] = {ALL: Evidence(places_of(num_spec_tokens))}
        self._workloads = WorkloadNames()
        self._order: tuple[str, str] = (old, new)
        self._place = 0
        self._verdict = Verdict("undecided", text="nothing was compared yet")
        self._open(old_begins)

    # --- windows ------------------------------------------------------------------------------------------------------

    @property
    def serving(self) -> str:
        """The version of the current window."""
        return self._order[self._place]

    @property
    def verdict(self) -> Verdict:
        """Result so far; a decision is final."""
        return self._verdict

    def is_window_over(self, age_s: float) -> bool:
        """Whether it is the other version's turn, or the pair is complete."""
        rounds, settings = self._counts[self.serving].rounds, self.settings
        if rounds >= settings.window_rounds:
            return age_s >= settings.window_s
        return rounds > 0 and age_s >= settings.max_window_s

    def observe(self, batch: EventBatch) -> bool:
        """Count a batch of either version; return whether it is one. Raises ValueError for unequal columns."""
        counts = self._counts.get(batch.drafter_version)
        if counts is not None:
            for workload, rounds in rounds_by_workload(batch):
                counts.add(self._workloads(workload or "(unnamed)"), rounds)  # "" is all traffic
        return counts is not None

    def turn(self, *, old_begins: bool) -> Verdict:
        """End the window; after a pair's second one weigh the pair and open the next, in which `old_begins` or not."""
        if self._place == 0:
            self._place = 1
        elif self._verdict.decision == "undecided":
            self._close()
            self._open(old_begins)
        return self._verdict

    def report(self) -> dict[str, Floats]:
        """Evidence by workload for other hosts ("": all traffic): each bet's ln, [2 + M, B]."""
        return {name: one.log_bets for name, one in self._evidence.items()}

    def hear(self, others: Mapping[str, Floats], num_others: int) -> None:
        """Take over the sums of other trials' reports, in place of those heard before. They count from the next pair on."""
        if self._hears_others:
            self.heard, self.num_others = dict(others), num_others

    def give_up(self, why: str) -> Verdict:
        """End for lack of time: an undecided comparison is unproven."""
        if self._verdict.decision == "undecided":
            self._verdict = self._say("unproven", self._verdict.workload, why)
        return self._verdict

    # --- for people and for the disk ----------------------------------------------------------------------------------

    def figures(self) -> dict[str, dict[str, float]]:
        """Plain figures of all traffic ("") and of every workload."""
        return {
            name: {
                "evidence_worse": round(float(one.log_e[_WORSE]) / _LOG10, 3),
                "evidence_better": round(float(one.log_e[_BETTER]) / _LOG10, 3),
                "change": round(float(one.change), 4),
            }
            for name, one in self._evidence.items()
        }

    def state(self) -> dict[str, Any]:
        """State from which to go on after a restart, without the open pair."""
        return {
            "old": self.old,
            "new": self.new,
            "num_spec_tokens": self.num_spec_tokens,
            "pairs": self.pairs,
            "rounds": self.rounds,
            "evidence": {name: one.state() for name, one in self._evidence.items()},
        }

    @classmethod
    def restored(
        cls, settings: CanarySettings, state: dict[str, Any], *, old_begins: bool, hears_others: bool = False
    ) -> Canary:
        """Go on from a `state`. Raises KeyError, TypeError, ValueError if it isn't one."""
        old, new, k = state["old"], state["new"], int(state["num_spec_tokens"])
        made = cls(settings, old, new, k, old_begins=old_begins, hears_others=hears_others)
        made.pairs, made.rounds = int(state["pairs"]), int(state["rounds"])
        made._evidence = {name: Evidence.restored(one) for name, one in state["evidence"].items()}
        made._workloads = WorkloadNames(made._evidence.keys() - {ALL})
        made._verdict = made._judge()
        return made

    # --- how it works -------------------------------------------------------------------------------------------------

    def _open(self, old_begins: bool) -> None:
        self._order = (self.old, self.new) if old_begins else (self.new, self.old)
        self._place = 0
        self._counts = {version: _Counts(self.num_spec_tokens) for version in self._order}

    def _close(self) -> None:
        """Weigh the pair: every workload by itself, and the sum of their scores for all traffic."""
        old, new = self._counts[self.old], self._counts[self.new]
        total: tuple[Floats, Floats] = (np.zeros(()), np.zeros(()))
        for workload in dict.fromkeys((*old.by_workload, *new.by_workload)):
            one = self._evidence.setdefault(workload, Evidence(places_of(self.num_spec_tokens)))
            score, information = one.weigh(*old.of(workload), *new.of(workload))
            one.add(score, information)
            total = (total[0] + score, total[1] + information)
        self._evidence[ALL].add(*total)
        self.pairs += 1
        self.rounds += old.rounds + new.rounds
        self._verdict = self._judge()

    def _judge(self) -> Verdict:
        worst, above_bar = self._farthest("worse")
        if above_bar >= 0.0:
            return self._say("worse", worst, "accepts fewer of the new version's drafts")
        together = f", together with other hosts' trials ({self.num_others})"
        if self._is_joined("worse"):
            return self._say("worse", ALL, f"accepts fewer of the new version's drafts{together}")
        best, above_bar = self._farthest("better")
        why = "accepts more of the new version's drafts"
        if above_bar < 0.0 and self._is_joined("better"):
            best, above_bar, why = ALL, 0.0, why + together
        is_doubtful = any(float(one.log_e[_WORSE]) >= LOG_DOUBT for one in self._evidence.values())
        unsure = self._unsure() if above_bar >= 0.0 else ""
        if above_bar >= 0.0 and not is_doubtful and not unsure:
            return self._say("better", best, why)
        worst = unsure or worst
        if self.pairs >= self.settings.max_pairs * (PATIENCE if unsure else 1):
            return self._say("unproven", worst, f"shows no proven difference after {self.rounds} rounds")
        return self._say("undecided", worst, "isn't shown to lose little yet" if unsure else "looks worst so far")

    def _is_joined(self, decision: Literal["worse", "better"]) -> bool:
        """Whether the evidence of all hosts decides, and this host's own traffic points the same way."""
        own, others = self._evidence[ALL], self.heard.get(ALL)
        if others is None or self.pairs < LEAST_PAIRS:
            return False
        points = own.change < 0.0 if decision == "worse" else own.change > 0.0
        which = _WORSE if decision == "worse" else _BETTER
        return bool(points and float(own.log_e_with(others)[which]) >= self._log_bar(decision))

    def _log_bar(self, decision: Literal["worse", "better"], number: int = 0) -> float:
        """As the settings have it; where others are heard, all traffic's is shared by two tests."""
        return self.settings.log_bar(decision, number) + (math.log(2.0) if self._hears_others and number == 0 else 0.0)

    def _unsure(self) -> str:
        """The workload that is least shown to lose little; "" when all are, or there is only one."""
        rounds = {name: one.rounds for name, one in self._evidence.items() if name != ALL}
        shares = {name: count / max(sum(rounds.values()), 1.0) for name, count in rounds.items()}
        held = {
            name: float(self._evidence[name].log_e_held(np.asarray(share), self.heard.get(name, 0.0)))
            for name, share in shares.items()
            if share >= LEAST_SHARE
        }
        least = min(held, key=held.__getitem__, default="")
        return least if len(held) > 1 and held[least] < LOG_HELD else ""

    def _farthest(self, decision: Literal["worse", "better"]) -> tuple[str, float]:
        """Name of the evidence farthest above its bar (or least below), and the distance."""
        which = _WORSE if decision == "worse" else _BETTER
        above = {
            name: float(one.log_e[which]) - self._log_bar(decision, number)
            for number, (name, one) in enumerate(self._evidence.items())
        }
        return max(above.items(), key=lambda item: item[1])

    def _say(self, decision: Decision, workload: str, why: str) -> Verdict:
        one = self._evidence[workload]
        worse, better = (float(value) / _LOG10 for value in one.log_e)
        where = f"workload {workload!r}" if workload else "all traffic"
        change = float(one.change)
        text = f"{where}: {why}: change {change:+.1%}, e-value 10^{worse:.1f} against, 10^{better:.1f} for"
        return Verdict(decision, workload, worse, better, change, self.rounds, self.pairs, text)
