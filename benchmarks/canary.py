"""Error rate and duration of canaries: many simulated ones at once, with honed's own test.

Old and new version take turns in pairs of windows. A round drafts 1 to 7 tokens with equal probability. Every position is
accepted with a given conditional probability, the new version's being that many per cent lower or higher. The simulation only
makes numpy arrays of counts; `adapt.monitor.evidence` and `adapt.monitor.canary` weigh them and set the bars. For each
acceptance curve there are 10,000 canaries (1,000 with two workloads, or on a busy server) of A/A, -10 % and +5 %: share
promoted, share rolled back, rounds needed (both versions together). Besides a loss of 10 % of conditional acceptance there is
one of 10 % of the acceptance length, which is more where little is accepted. Another case has dependent rounds: every window
shifts all its log-odds, as when one long request fills it. Equal versions must not be distinguished by that, and a loss must
be found. A busy server verifies thousands of rounds in a window. A last case has two workloads: a version that gains on one
and loses on the other (`OPPOSITE`) must not be promoted, whatever their shares of the traffic. Cases that come near the bar
of 1 % are simulated again with 10,000. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.server.measured import commit, hardware
from honed.adapt.acceptance.estimate import acceptance_length, scale_odds
from honed.adapt.monitor.canary import LOG_DOUBT, LOG_HELD, PATIENCE, CanarySettings
from honed.adapt.monitor.evidence import Evidence
from honed.adapt.protocol.arrays import Floats, Ints

CURVES = {
    "high": (0.85, 0.82, 0.80, 0.80, 0.78, 0.78, 0.77),
    "medium": (0.75, 0.72, 0.70, 0.70, 0.68, 0.68, 0.65),
    "low": (0.55, 0.50, 0.50, 0.50, 0.45, 0.45, 0.45),
}
"""Conditional acceptance by position; acceptance lengths at 7 draft tokens: 4.3, 3.2 and 2.0."""
MOOD = 0.5
TWO = {"+6/-9": (0.06, -0.09), "+3/-5": (0.03, -0.05), "+5/+5": (0.05, 0.05), "+20/0": (0.20, 0.0)}
"""Changes on two workloads."""
OPPOSITE = ("+6/-9", "+3/-5")
NEAR_BAR, AGAIN = 0.005, 100
"""Share of opposite changes promoted from which on they are simulated again, ten times as many; and the seeds of that."""
SHARES = {"1:1": (0.5, 0.5), "9:1": (0.9, 0.1)}
CHANGES = {"a/a": 0.0, "-10 %": -0.10, "+5 %": 0.05}
BUSY_ROUNDS, BUSY_CHANGES, BUSY_RUNS = 4000, {"+1 %": 0.01}, 1000
"""Rounds of a window of half a second where 8,000 are verified in a second."""


@dataclass(frozen=True)
class Outcome:
    """Results of the canaries of one kind."""

    promoted: float
    rolled_back: float
    unproven: float
    median_rounds: dict[str, float]
    """Medians over the promoted and the rolled-back ones; verify rounds of both versions."""


def simulate(
    acceptance: tuple[float, ...],
    change: float | tuple[float, ...],
    runs: int,
    settings: CanarySettings | None = None,
    seed: int = 0,
    mood: float = 0.0,
    shares: tuple[float, ...] = (1.0,),
    window_rounds: int = 0,
) -> Outcome:
    """Run canaries to their verdicts, all at once.

    Args:
        change: relative change of conditional acceptance, for all workloads or one for each.
        mood: standard deviation of the shift of a window's log-odds.
        shares: of the rounds, by workload.
        window_rounds: of a window, on a server that verifies more of them in its time than the settings ask for.
    """
    settings, rng = settings or CanarySettings(), np.random.default_rng(seed)
    changes = change if isinstance(change, tuple) else (change,) * len(shares)
    old = np.array(acceptance)
    new = [np.clip(old * (1.0 + one), 0.0, 0.995) for one in changes]
    workloads = [Evidence(len(old), (runs,)) for _ in shares]
    everything = Evidence(len(old), (runs,)) if len(shares) > 1 else workloads[0]
    evidence = [everything, *workloads] if len(shares) > 1 else workloads
    bars = np.array([[settings.log_bar(way, number) for way in ("worse", "better")] for number in range(len(evidence))])
    window_rounds = window_rounds or settings.window_rounds
    decided, rounds, pairs = np.zeros(runs, np.int64), np.zeros(runs), 0
    is_waiting = np.zeros(runs, dtype=bool)
    while not (decided > 0).all() and pairs < settings.max_pairs * (PATIENCE if (is_waiting & (decided == 0)).any() else 1):
        counts = rng.multinomial(window_rounds, shares, size=(2, runs))  # [2, runs, W]
        score, information = np.zeros(runs), np.zeros(runs)
        for number, one in enumerate(workloads):
            curves = zip((old, new[number]), counts[..., number], strict=True)
            weighed = one.weigh(*(column for curve, tried in curves for column in window(rng, curve, tried, mood)))
            one.add(*weighed)
            score, information = score + weighed[0], information + weighed[1]
        if len(shares) > 1:
            everything.add(score, information)
        pairs += 1
        log_e = np.array([one.log_e for one in evidence])  # [1 + W, runs, 2]
        worse, better = (log_e >= bars[:, None]).any(axis=0).T
        of_all = sum(one.rounds for one in workloads)
        held = np.array([one.log_e_held(one.rounds / of_all) >= LOG_HELD for one in workloads]).all(axis=0) | (
            len(workloads) == 1
        )
        better &= (log_e[..., 0] < LOG_DOUBT).all(axis=0)
        is_waiting = better & ~held
        found = np.where(worse, 1, np.where(better & held, 2, 0))
        found = np.where((pairs >= settings.max_pairs) & ~is_waiting & (found == 0), 3, found)
        rounds[(decided == 0) & (found > 0)] = 2 * window_rounds * pairs
        decided = np.where(decided == 0, found, decided)
    taken = {name: rounds[decided == value] for name, value in (("rolled_back", 1), ("promoted", 2))}
    return Outcome(
        promoted=float(np.mean(decided == 2)),
        rolled_back=float(np.mean(decided == 1)),
        unproven=float(np.mean((decided == 0) | (decided == 3))),
        median_rounds={name: float(np.median(values)) for name, values in taken.items() if len(values)},
    )


def window(rng: np.random.Generator, acceptance: Floats, rounds: Ints, mood: float = 0.0) -> tuple[Floats, Floats]:
    """Trials and successes of one window each, both [runs, K]; draft lengths are 1 … K with equal probability.

    Args:
        rounds: of each window, [runs].
    """
    k, runs = len(acceptance), len(rounds)
    failing = np.exp(mood * rng.standard_normal(runs)) if mood else np.ones(runs)
    trials, successes = np.empty((runs, k)), np.empty((runs, k))
    tried = rounds
    for position in range(k):
        passed = rng.binomial(tried, scale_odds(acceptance[position], failing))
        trials[:, position], successes[:, position] = tried, passed
        # Of the rounds that drafted this position, those that drafted the next as well.
        tried = rng.binomial(passed, (k - position - 1) / (k - position))
    return trials, successes


def change_for_length(acceptance: tuple[float, ...], ratio: float) -> float:
    """Find the relative change of conditional acceptance, at all positions, that scales the acceptance length by `ratio`."""
    curve = np.array(acceptance)
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2.0
        is_short = acceptance_length(curve * middle) < ratio * acceptance_length(curve)
        low, high = (middle, high) if is_short else (low, middle)
    return low - 1.0


def run(runs: int) -> dict[str, Any]:
    """Run all curves and changes."""
    figures: dict[str, Any] = {}
    for number, (name, curve) in enumerate(CURVES.items()):
        outcomes = {label: simulate(curve, change, runs, seed=number) for label, change in CHANGES.items()}
        shorter = simulate(curve, change_for_length(curve, 0.9), runs, seed=number)
        moody = simulate(curve, 0.0, runs, seed=number, mood=MOOD)
        moody_loss = simulate(curve, CHANGES["-10 %"], runs, seed=number, mood=MOOD)
        figures[name] = {
            "false_promotions": {label: outcomes[label].promoted for label in ("a/a", "-10 %")},
            "false_roll_backs": {label: outcomes[label].rolled_back for label in ("a/a", "+5 %")},
            "with_moods_a/a": {"promoted": moody.promoted, "rolled_back": moody.rolled_back},
            "with_moods_found_minus_10": moody_loss.rolled_back,
            "with_moods_median_rounds_minus_10": moody_loss.median_rounds.get("rolled_back"),
            "found_minus_10": outcomes["-10 %"].rolled_back,
            "median_rounds_minus_10": outcomes["-10 %"].median_rounds.get("rolled_back"),
            "median_rounds_minus_10_of_length": shorter.median_rounds.get("rolled_back"),
            "found_plus_5": outcomes["+5 %"].promoted,
            "median_rounds_plus_5": outcomes["+5 %"].median_rounds.get("promoted"),
        }
        busy = {
            label: simulate(curve, change, BUSY_RUNS, seed=number, window_rounds=BUSY_ROUNDS)
            for label, change in (CHANGES | BUSY_CHANGES).items()
        }
        figures[name]["busy"] = {label: vars(outcome) for label, outcome in busy.items()}
        cases = {f"{label} at {ratio}": (changes, shares) for label, changes in TWO.items() for ratio, shares in SHARES.items()}
        two = {
            label: simulate(curve, changes, runs // 10, seed=number, shares=shares)
            for label, (changes, shares) in cases.items()
        }
        for label, (changes, shares) in cases.items():
            if label.startswith(OPPOSITE) and two[label].promoted > NEAR_BAR:
                two[label] = simulate(curve, changes, runs, seed=AGAIN + number, shares=shares)
        figures[name]["two_workloads"] = {label: vars(outcome) for label, outcome in two.items()}
        figures[name]["promoted_opposite"] = max(one.promoted for label, one in two.items() if label.startswith(OPPOSITE))
        print(f"{name}: {figures[name]}", flush=True)
    return figures


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="canaries of each kind")
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file")
    arguments = parser.parse_args()
    figures = run(arguments.runs)
    result = {
        "curves": figures,
        "runs": arguments.runs,
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    promoted_opposite = max(one["promoted_opposite"] for one in figures.values())
    print(json.dumps({"runs": arguments.runs, "promoted_opposite": promoted_opposite, **figures}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
