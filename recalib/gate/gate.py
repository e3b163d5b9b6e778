"""The gate: compares a candidate with its parent on held-out sessions, by workload, and decides whether it may serve.

The figure is the gain g = tau(candidate) / tau(parent), tau = 1 + accepted / rounds over a workload's sessions. Sessions are
compared, not rounds: rounds of one conversation aren't independent, and both drafters saw the same text. The rules:

    a workload that must gain    g > 1 + margin, and p <= (1 - confidence) * share
                                 with fewer than `sessions_needed`: refused, too few to judge
    any other                    with `min_sessions` or more: g >= 1 - max_loss, or its interval reaches 1 and
                                 g >= 1 - SURE_LOSSES * max_loss; with fewer it isn't judged

p is the probability of such a gain if the two were equal. Then their figures could as well be swapped in any session, so p is
the share of all swaps whose gain is as large. It is exact for any number of sessions; 6 give 1/64 at best.

1 - confidence is the error of a whole procedure: how often a candidate that equals its parent passes. `share` is an attempt's
part of it, and the parts of all attempts that answer one alarm until one wins add up to 1. A second blend is judged only after
the first has gained, so it adds no error. If several workloads must gain, all of them must. If none must, all sessions together
must.

The intervals of all other workloads hold together with that confidence, each with an equal part of the error (Bonferroni). By
estimates alone, few sessions would often refuse an equal candidate, the more workloads the likelier. The canary watches each
workload's loss again, on more evidence.

No torch here: the daemon reads the settings.

Source: R. A. Fisher, The Design of Experiments (1935), section 21 (the randomization test); fixed sequences of tests need no
correction: W. Maurer et al., Multiple comparisons in drug clinical trials (1995).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from honed.adapt.protocol.ranges import COUNT, SHARE, Range, Ranges, check_ranges
from honed.adapt.protocol.wire import GateFigures

if TYPE_CHECKING:
    from honed.recalib.gate.evaluate import SessionFigures

# Letters: S sessions, R resamples.

SWAPS_PER_ERROR = 10
"""Random swaps for each time that the error goes into 1: p is told from it well enough."""
MOST_AT_ONCE = 1 << 14
"""Swaps in memory at a time."""


TREE_SIZES = (7, 15, 31, 63)
"""Nodes of the draft trees whose acceptance is told. It decides nothing here."""
SURE_LOSSES = 4
"""A loss of so many times `max_loss` counts whatever its interval."""


@dataclass(frozen=True)
class GateSettings:
    """Settings of the gate: sample sizes, margins and confidence."""

    min_sessions: int = 6
    """Minimum held-out sessions for judging a workload."""
    margin: float = 0.0
    """Gain that the estimate must exceed."""
    max_loss: float = 0.03
    """Largest loss allowed for a workload that needn't gain, if it is sure that there is one; four times as much if not."""
    confidence: float = 0.95
    """Probability that no candidate passes that equals its parent, over all attempts and blends that answer one alarm until
    one wins. Confidence of the interval, too."""
    resamples: int = 2000
    """Resamples of the bootstrap, and swaps of the test where there are too many to try all. A small error takes more swaps."""
    seed: int = 0
    """Seed of both."""

    RANGES: ClassVar[Ranges] = {
        "min_sessions": COUNT,
        "margin": Range(0, 10),
        "max_loss": SHARE,
        "confidence": Range(0, 0.9999, excludes_low=True),
        "resamples": Range(100, 1_000_000),
        "seed": Range(0),
    }

    def __post_init__(self) -> None:
        check_ranges(self)

    def error(self, share: float) -> float:
        """Largest p that passes in an attempt with this share of the error."""
        return (1.0 - self.confidence) * share

    def num_swaps(self, share: float) -> int:
        """Random swaps of the test: n of them give p = 1 / (n + 1) at best, so that few could let nothing pass."""
        return max(self.resamples, math.ceil(SWAPS_PER_ERROR / self.error(share)))

    def sessions_needed(self, share: float) -> int:
        """Held-out sessions with which a candidate can pass: n of them give p = 2^-n at best."""
        return max(self.min_sessions, math.ceil(-math.log2(self.error(share)) - 1e-9))


@dataclass(frozen=True)
class Verdict:
    """Result: whether the candidate passes, the figures, and the reasons against it (one sentence each)."""

    passed: bool
    figures: list[GateFigures] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    @property
    def has_gained(self) -> bool:
        """Whether the candidate has gained wherever it must."""
        return all(figure.passed for figure in self.figures if figure.must_gain)


def judge(
    parent: Iterable[SessionFigures],
    candidate: Iterable[SessionFigures],
    must_gain: Iterable[str],
    settings: GateSettings,
    share: float = 1.0,
) -> Verdict:
    """Compare two drafters on the same held-out sessions.

    Args:
        parent, candidate: figures of both; several of one session and workload are added up.
        must_gain: workloads that must gain; none: all sessions together, reported as workload "".
        share: this attempt's part of the error.

    Raises:
        ValueError: the two weren't judged on the same sessions.
    """
    parent, candidate = list(parent), list(candidate)
    before, after = _by_workload(parent), _by_workload(candidate)
    if {w: set(s) for w, s in before.items()} != {w: set(s) for w, s in after.items()}:
        raise ValueError("parent and candidate were judged on different sessions: the comparison means nothing")
    wanted = sorted(set(must_gain))
    figures, reasons = [], []
    for workload in wanted or [""]:
        pairs = _pairs(before, after, [workload] if workload else sorted(before))
        figure, reason = _judge_gain(workload, pairs, settings, share)
        figures.append(figure)
        reasons.append(reason)
    others = {workload: _pairs(before, after, [workload]) for workload in sorted(set(before) - set(wanted))}
    num_judged = max(sum(len(pairs) >= settings.min_sessions for pairs in others.values()), 1)
    for workload, pairs in others.items():
        figure, reason = _judge_loss(workload, pairs, settings, num_judged)
        figures.append(figure)
        reasons.append(reason)
    reasons = [reason for reason in reasons if reason]
    for i, figure in enumerate(figures):
        of_parent, of_candidate = (_tree_lengths(sessions, figure.workload) for sessions in (parent, candidate))
        figures[i] = msgspec.structs.replace(figure, parent_trees=of_parent, candidate_trees=of_candidate)
    return Verdict(passed=not reasons, figures=figures, reasons=reasons)


def _tree_lengths(sessions: Iterable[SessionFigures], workload: str) -> dict[str, float]:
    """Acceptance length by number of nodes, over one workload's rounds or ("") over all; empty without trees."""
    counts = np.array([s.tree_rounds for s in sessions if s.tree_rounds and workload in ("", s.workload)], np.int64)
    if not len(counts):
        return {}
    rounds, accepted = counts.sum(axis=0).T
    lengths = (1.0 + accepted / np.maximum(rounds, 1)).tolist()
    return {str(size): length for size, length in zip(TREE_SIZES, lengths, strict=True)}


Counts = dict[str, dict[str, tuple[int, int]]]
"""workload -> session -> (rounds, accepted)."""


def _by_workload(sessions: Iterable[SessionFigures]) -> Counts:
    counts: Counts = {}
    for s in sessions:
        rounds, accepted = counts.setdefault(s.workload, {}).get(s.session, (0, 0))
        counts[s.workload][s.session] = (rounds + s.num_rounds, accepted + s.num_round_accepted_tokens)
    return counts


def _pairs(before: Counts, after: Counts, workloads: Iterable[str]) -> NDArray[np.int64]:  # [S, 4]
    """Rounds and accepted of the parent, then of the candidate, for each session that had rounds, whatever its workloads."""
    found: dict[str, NDArray[np.int64]] = {}
    for workload in workloads:
        for session in sorted(before.get(workload, {})):
            counts = (*before[workload][session], *after[workload][session])
            found[session] = found.get(session, np.zeros(4, np.int64)) + np.array(counts, np.int64)
    rows = [row for row in found.values() if row[0] and row[2]]
    return np.array(rows, np.int64).reshape(-1, 4)


def _judge_gain(workload: str, pairs: NDArray[np.int64], settings: GateSettings, share: float) -> tuple[GateFigures, str]:
    low, high, parent, candidate = _interval(pairs, settings)
    p_value = swap_p_value(pairs, settings.num_swaps(share), settings.seed)
    named = f"workload {workload!r}" if workload else "the traffic as a whole"
    needed, most = settings.sessions_needed(share), settings.error(share)
    reason = ""
    if len(pairs) < needed:
        reason = f"{named} has {len(pairs)} held-out sessions, {needed} are needed to judge a gain"
    elif p_value > most or candidate / parent <= 1.0 + settings.margin:
        chance = f"by chance with p = {p_value:.3f}, at most {most:.3g} passes"
        reason = f"no sure gain on {named}: {_range(candidate / parent, low, high)}; {chance}"
    return _figures(workload, pairs, (low, high, parent, candidate), not reason, True, p_value), reason


def _judge_loss(workload: str, pairs: NDArray[np.int64], settings: GateSettings, num_judged: int) -> tuple[GateFigures, str]:
    low, high, parent, candidate = _interval(pairs, settings, num_judged)
    is_judged = len(pairs) >= settings.min_sessions
    gain, most = candidate / parent, settings.max_loss
    is_loss = is_judged and gain < 1.0 - most and (high < 1.0 or gain < 1.0 - SURE_LOSSES * most)
    reason = f"loss on workload {workload!r}: {_range(candidate / parent, low, high)}" if is_loss else ""
    return _figures(workload, pairs, (low, high, parent, candidate), not reason, False, is_judged=is_judged), reason


def _range(gain: float, low: float, high: float) -> str:
    return f"gain {gain:.3f}, between {low:.3f} and {high:.3f}"


def _figures(
    workload: str,
    pairs: NDArray[np.int64],
    found: tuple[float, float, float, float],
    passed: bool,
    must_gain: bool,
    p_value: float = 1.0,
    is_judged: bool = True,
) -> GateFigures:
    low, high, parent, candidate = found
    return GateFigures(
        workload=workload,
        sessions=len(pairs),
        parent=parent,
        candidate=candidate,
        gain_low=low,
        gain_high=high,
        passed=passed,
        must_gain=must_gain,
        p_value=p_value,
        is_judged=is_judged,
    )


def _interval(pairs: NDArray[np.int64], settings: GateSettings, num_intervals: int = 1) -> tuple[float, float, float, float]:
    """Low and high end of the gain, and both acceptance lengths; without sessions the interval is unbounded.

    Args:
        num_intervals: number of those that hold together with the confidence.
    """
    if not len(pairs):
        return 0.0, float(2**31), 1.0, 1.0
    gains = bootstrap_gains(pairs, settings.resamples, settings.seed)
    tail = (1.0 - settings.confidence) / 2.0 / num_intervals
    low, high = np.quantile(gains, [tail, 1.0 - tail])
    parent, candidate = _lengths(pairs.sum(axis=0))
    return float(low), float(high), float(parent), float(candidate)


def bootstrap_gains(pairs: NDArray[np.int64], resamples: int, seed: int) -> NDArray[np.float64]:  # [S, 4] -> [R]
    """Gains of `resamples` draws of S sessions with replacement; both drafters' counts of a session stay together."""
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(pairs), np.full(len(pairs), 1.0 / len(pairs)), size=resamples)  # [R, S]
    parent, candidate = _lengths(weights @ pairs)
    return np.asarray(candidate / parent, np.float64)


def swap_p_value(pairs: NDArray[np.int64], resamples: int, seed: int) -> float:  # [S, 4]
    """Share of the swaps of parent and candidate, session by session, whose gain is at least the one found.

    All 2^S of them, or `resamples` random ones and the one found where those are fewer.
    """
    num_sessions = len(pairs)
    if not num_sessions:
        return 1.0
    is_whole = 2.0**num_sessions <= resamples + 1
    num_swaps, rng = 2**num_sessions if is_whole else resamples + 1, np.random.default_rng(seed)
    found, num_larger = math.inf, 0
    for first in range(0, num_swaps, MOST_AT_ONCE):
        numbers = np.arange(first, min(first + MOST_AT_ONCE, num_swaps))
        if is_whole:
            swaps = numbers[:, None] >> np.arange(num_sessions) & 1  # [up to MOST_AT_ONCE, S]
        else:
            swaps = rng.integers(0, 2, (len(numbers), num_sessions))
            swaps[numbers == 0] = 0
        parent, candidate = _lengths(pairs.sum(axis=0) + swaps @ (pairs[:, [2, 3, 0, 1]] - pairs))
        gains = candidate / parent
        found = float(gains[0]) if first == 0 else found
        num_larger += int(np.sum(gains >= found * (1.0 - 1e-12)))
    return num_larger / num_swaps


def _lengths(sums: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # [..., 4] -> 2 x [...]
    """tau of parent and candidate from summed counts."""
    return 1.0 + sums[..., 1] / sums[..., 0], 1.0 + sums[..., 3] / sums[..., 2]
