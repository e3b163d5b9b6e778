"""The gate: compares a candidate with its parent on held-out sessions, by workload, and decides whether it may serve.

The figure is the gain g = tau(candidate) / tau(parent), tau = 1 + accepted / rounds over a workload's sessions. Its interval
comes from a paired bootstrap over *sessions*: rounds of one conversation aren't independent, and both drafters saw the same
text. The rules:

    a workload that must gain    with `full_sessions` or more: g_low > 1 + margin
                                 with fewer: that, or g > 1 + few_margin and g_low > few_floor
                                 with fewer than `min_sessions`: refused, too few to judge
    any other                    with `min_sessions` or more: g >= 1 - max_loss; with fewer it isn't judged

If no workload must gain, all sessions together must. No torch here: the daemon reads the settings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from honed.adapt.protocol.ranges import COUNT, PROBABILITY, SHARE, Range, Ranges, check_ranges
from honed.adapt.protocol.wire import GateFigures

if TYPE_CHECKING:
    from honed.recalib.gate.evaluate import SessionFigures

# Letters: S sessions, R resamples.


@dataclass(frozen=True)
class GateSettings:
    """Settings of the gate: sample sizes, margins and confidence."""

    min_sessions: int = 6
    """Minimum held-out sessions for judging a workload."""
    full_sessions: int = 30
    """Number of sessions from which the interval alone decides."""
    margin: float = 0.0
    """Gain that the interval's lower end must exceed."""
    few_margin: float = 0.03
    """Gain that passes with fewer than `full_sessions`, if `few_floor` is met."""
    few_floor: float = 0.98
    """Value that the interval's lower end must exceed for `few_margin`."""
    max_loss: float = 0.03
    """Largest loss allowed for a workload that needn't gain."""
    confidence: float = 0.95
    """Confidence of the interval."""
    resamples: int = 2000
    """Resamples of the bootstrap."""
    seed: int = 0
    """Seed of the bootstrap."""

    RANGES: ClassVar[Ranges] = {
        **dict.fromkeys(("min_sessions", "full_sessions"), COUNT),
        **dict.fromkeys(("margin", "few_margin"), Range(0, 10)),
        **dict.fromkeys(("few_floor", "max_loss"), SHARE),
        "confidence": PROBABILITY,
        "resamples": Range(100, 1_000_000),
        "seed": Range(0),
    }

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class Verdict:
    """Result: whether the candidate passes, the figures, and the reasons against it (one sentence each)."""

    passed: bool
    figures: list[GateFigures] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)


def judge(
    parent: Iterable[SessionFigures],
    candidate: Iterable[SessionFigures],
    must_gain: Iterable[str],
    settings: GateSettings,
) -> Verdict:
    """Compare two drafters on the same held-out sessions.

    Args:
        parent, candidate: figures of both; several of one session and workload are added up.
        must_gain: workloads that must gain; none: all sessions together, reported as workload "".

    Raises:
        ValueError: the two weren't judged on the same sessions.
    """
    before, after = _by_workload(parent), _by_workload(candidate)
    if {w: set(s) for w, s in before.items()} != {w: set(s) for w, s in after.items()}:
        raise ValueError("parent and candidate were judged on different sessions: the comparison means nothing")
    wanted = sorted(set(must_gain))
    figures, reasons = [], []
    for workload in wanted or [""]:
        pairs = _pairs(before, after, [workload] if workload else sorted(before))
        figure, reason = _judge_gain(workload, pairs, settings)
        figures.append(figure)
        reasons.append(reason)
    for workload in sorted(set(before) - set(wanted)):
        figure, reason = _judge_loss(workload, _pairs(before, after, [workload]), settings)
        figures.append(figure)
        reasons.append(reason)
    reasons = [reason for reason in reasons if reason]
    return Verdict(passed=not reasons, figures=figures, reasons=reasons)


Counts = dict[str, dict[str, tuple[int, int]]]
"""workload -> session -> (rounds, accepted)."""


def _by_workload(sessions: Iterable[SessionFigures]) -> Counts:
    counts: Counts = {}
    for s in sessions:
        rounds, accepted = counts.setdefault(s.workload, {}).get(s.session, (0, 0))
        counts[s.workload][s.session] = (rounds + s.num_rounds, accepted + s.num_round_accepted_tokens)
    return counts


def _pairs(before: Counts, after: Counts, workloads: Iterable[str]) -> NDArray[np.int64]:  # [S, 4]
    """Rounds and accepted of the parent, then of the candidate, for each session that had rounds."""
    rows = [
        (*before[workload][session], *after[workload][session])
        for workload in workloads
        for session in sorted(before.get(workload, {}))
        if before[workload][session][0] and after[workload][session][0]
    ]
    return np.array(rows, np.int64).reshape(-1, 4)


def _judge_gain(workload: str, pairs: NDArray[np.int64], settings: GateSettings) -> tuple[GateFigures, str]:
    low, high, parent, candidate = _interval(pairs, settings)
    named = f"workload {workload!r}" if workload else "the traffic as a whole"
    reason = ""
    if len(pairs) < settings.min_sessions:
        reason = f"{named} has {len(pairs)} held-out sessions, {settings.min_sessions} are needed to judge a gain"
    elif low <= 1.0 + settings.margin:
        is_enough = len(pairs) < settings.full_sessions and low > settings.few_floor
        if not is_enough or candidate / parent <= 1.0 + settings.few_margin:
            reason = f"no sure gain on {named}: {_range(candidate / parent, low, high)}"
    return _figures(workload, pairs, (low, high, parent, candidate), not reason, True), reason


def _judge_loss(workload: str, pairs: NDArray[np.int64], settings: GateSettings) -> tuple[GateFigures, str]:
    low, high, parent, candidate = _interval(pairs, settings)
    is_loss = len(pairs) >= settings.min_sessions and candidate / parent < 1.0 - settings.max_loss
    reason = f"loss on workload {workload!r}: {_range(candidate / parent, low, high)}" if is_loss else ""
    return _figures(workload, pairs, (low, high, parent, candidate), not reason, False), reason


def _range(gain: float, low: float, high: float) -> str:
    return f"gain {gain:.3f}, between {low:.3f} and {high:.3f}"


def _figures(
    workload: str, pairs: NDArray[np.int64], found: tuple[float, float, float, float], passed: bool, must_gain: bool
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
    )


def _interval(pairs: NDArray[np.int64], settings: GateSettings) -> tuple[float, float, float, float]:
    """Low and high end of the gain, and both acceptance lengths; without sessions the interval is unbounded."""
    if not len(pairs):
        return 0.0, float(2**31), 1.0, 1.0
    gains = bootstrap_gains(pairs, settings.resamples, settings.seed)
    tail = (1.0 - settings.confidence) / 2.0
    low, high = np.quantile(gains, [tail, 1.0 - tail])
    parent, candidate = _lengths(pairs.sum(axis=0))
    return float(low), float(high), float(parent), float(candidate)


def bootstrap_gains(pairs: NDArray[np.int64], resamples: int, seed: int) -> NDArray[np.float64]:  # [S, 4] -> [R]
    """Gains of `resamples` draws of S sessions with replacement; both drafters' counts of a session stay together."""
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(len(pairs), np.full(len(pairs), 1.0 / len(pairs)), size=resamples)  # [R, S]
    parent, candidate = _lengths(weights @ pairs)
    return np.asarray(candidate / parent, np.float64)


def _lengths(sums: NDArray[np.int64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:  # [..., 4] -> 2 x [...]
    """tau of parent and candidate from summed counts."""
    return 1.0 + sums[..., 1] / sums[..., 0], 1.0 + sums[..., 3] / sums[..., 2]


def summarise(figures: Iterable[GateFigures]) -> list[dict[str, Any]]:
    """Summarise figures as rows, one per workload, for a version's manifest and for an operation's report."""
    rows: list[dict[str, Any]] = msgspec.to_builtins(list(figures))
    return rows
