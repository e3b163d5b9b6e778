"""The whole procedure that answers a drift alarm, simulated: up to six attempts, each with a candidate in both blends.

Held-out sessions differ in length and difficulty. A round accepts tokens one by one with the session's probability, up to a
whole block. All attempts judge on the same sessions, with the same figures of the parent. Every drafter has an effect of its
own on each session, with mean zero: training makes some conversations better and others worse. A candidate that gains has
better odds everywhere besides. Half-way to its parent it has the mean of both drafters' odds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from honed.adapt.acceptance.estimate import scale_odds
from honed.adapt.protocol.arrays import Floats
from honed.daemon.lifecycle.drift_alarms import MAX_ATTEMPTS, error_share
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.gate.evaluate import SessionFigures
from honed.recalib.gate.gate import GateSettings, judge

BLOCK = 7
"""Draft tokens of a round."""
EFFECT = 0.15
"""Standard deviation of a drafter's effect on a session, in log-odds."""


@dataclass(frozen=True)
class Outcome:
    """Shares of procedures in which a candidate passed."""

    first_attempt: float
    any_attempt: float


def simulate(
    num_sessions: int,
    change: float,
    runs: int,
    settings: GateSettings | None = None,
    attempts: int = MAX_ATTEMPTS,
    seed: int = 0,
) -> Outcome:
    """Run procedures until a candidate passes or all attempts have failed.

    Args:
        change: of a candidate's log-odds of acceptance; 0: it equals its parent.
    """
    settings, rng = settings or GateSettings(), np.random.default_rng(seed)
    passed = [_first_pass(num_sessions, change, settings, attempts, rng) for _ in range(runs)]
    return Outcome(sum(at == 0 for at in passed) / runs, sum(at >= 0 for at in passed) / runs)


def acceptance_length(change: float, seed: int = 0, num_sessions: int = 4000) -> float:
    """Return the acceptance length over many sessions."""
    rng = np.random.default_rng(seed)
    sessions = _drafted(*_sessions(num_sessions, rng), np.full(num_sessions, change), rng)
    return 1.0 + sum(s.num_round_accepted_tokens for s in sessions) / sum(s.num_rounds for s in sessions)


def _first_pass(num_sessions: int, change: float, settings: GateSettings, attempts: int, rng: np.random.Generator) -> int:
    """Number of the attempt that passed; −1: none."""
    tokens, difficulty = _sessions(num_sessions, rng)
    before = EFFECT * rng.standard_normal(num_sessions)
    parent = _drafted(tokens, difficulty, before, rng)
    for attempt in range(attempts):
        after = change + EFFECT * rng.standard_normal(num_sessions)
        for blend in TrainerSettings().blends:
            candidate = _drafted(tokens, difficulty, before + blend * (after - before), rng)
            verdict = judge(parent, candidate, ["w"], settings, error_share(attempt))
            if verdict.passed:
                return attempt
            if not verdict.has_gained:
                break
    return -1


def _sessions(count: int, rng: np.random.Generator) -> tuple[Floats, Floats]:
    """Emitted tokens of each session, and its probability of accepting a draft token."""
    return np.exp(rng.normal(5.5, 0.7, count)).clip(40, 4000), rng.beta(7.0, 3.0, count)


def _drafted(tokens: Floats, difficulty: Floats, shifts: Floats, rng: np.random.Generator) -> list[SessionFigures]:
    """Figures of a drafter whose log-odds differ by `shifts` from the sessions' own."""
    found = []
    for number, (length, chance) in enumerate(zip(tokens, scale_odds(difficulty, np.exp(-shifts)), strict=True)):
        emitted = rng.geometric(1.0 - chance, int(length)).clip(max=BLOCK + 1)
        rounds = int(np.searchsorted(emitted.cumsum(), length)) + 1
        accepted = int(emitted[:rounds].sum()) - rounds
        found.append(SessionFigures(str(number), "w", int(length), 0, rounds, accepted))
    return found
