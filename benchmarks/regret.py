"""Regret: the loss of honed's choice of draft lengths against an oracle, on simulated traffic with known truth.

Every trace of `regret_traces` is run by honed's own loop (decider and controller as in production), by the oracle of
`benchmarks.simulated.oracle`, by fixed lengths, and by a table whose lengths are tuned on the trace's mean curve and the true
costs: more than one would have. All do the same work with the same luck.
Regret is 1 − the oracle's seconds / the rule's. The output has:

    regret    after a warm-up of 2,000 verify rounds or 20 simulated seconds, whichever ends later
    cold      the same with the warm-up counted
    path      on honed's own steps: expected tokens of its lengths, against the best on the same step; without prompts and luck
    ahead     as regret, with lengths chosen and drafts made a step ahead, as the attachment must; the oracle needn't
    recovered after an abrupt change: rounds of each request (= engine steps) until goodput on the path is within 8 % of the
        best, over the last 50 steps since the change and over the 200 to come; 0: it is over the first 200
    lost      in those first 200: missed goodput, in steps at the best goodput, beyond what the 200 before missed

The trace `contexts-mixed` isn't one of the twenty and runs only when named; acceptance falls with the context length there.

Without named traces, the ones of `jump_traces` follow: `jump_ratio` compares honed with the best fixed length where step times
jump.

`static-best` is the fixed length that turns out best on each trace. --ablate replaces one estimate after another by the truth
(`regret_truths`). Regret is relative to all of the engine's time. Two fifths of that on average are prompts, the same under
every rule; "path" excludes them, and "ahead" is nearest to an engine. The last line of stdout is JSON; the exit code is 1 when
a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.server.measured import commit, hardware
from benchmarks.simulated.dictated import Dictated
from benchmarks.simulated.engine import Outcome, simulate
from benchmarks.simulated.jump_traces import JUMPS, ratio_to_best_length
from benchmarks.simulated.oracle import run_oracle, run_steered
from benchmarks.simulated.regret_traces import EXTRA, TRACES
from benchmarks.simulated.regret_truths import TRUTHS, WithTruth, tuned_table
from benchmarks.simulated.traffic import Trace, Traffic
from honed.adapt.protocol.arrays import Floats

WARM_UP_ROUNDS, WARM_UP_S = 2000, 20.0
ROLLING_STEPS, SETTLED_STEPS, RECOVERED = 50, 200, 0.92
BARS = {"mean": 0.03, "worst": 0.08, "after_drift_rounds": 200, "worst_jump_ratio": 0.97}


@dataclass
class Row:
    """One trace."""

    name: str
    regret: float
    cold: float
    path: float
    ahead: float
    recovered: list[int]
    lost: list[float]
    steps: int
    draft_tokens: tuple[float, float]
    """Mean per round: honed's and the oracle's."""
    contenders: dict[str, float] = field(default_factory=dict)
    ablations: dict[str, float] = field(default_factory=dict)


def warm_up_work(outcome: Outcome) -> float:
    """Return the work done by the end of the warm-up."""
    rounds, seconds = np.cumsum(outcome.num_requests), np.cumsum(outcome.seconds)
    step = max(int(np.searchsorted(rounds, WARM_UP_ROUNDS)), int(np.searchsorted(seconds, WARM_UP_S)))
    return float(outcome.work[min(step, len(rounds) - 1)])


def regret(outcome: Outcome, oracle: Outcome, begin: float, end: float) -> float:
    """Compare the seconds of the same work."""
    return 1.0 - oracle.seconds_between(begin, end) / outcome.seconds_between(begin, end)


def path_shares(outcome: Outcome) -> tuple[Floats, Floats]:
    """Expected tokens of each step, and the best on the same step."""
    rounds = outcome.num_requests > 0
    return np.where(rounds, outcome.expected, 0.0), np.where(rounds, outcome.best * outcome.round_seconds, 0.0)


def recovery(outcome: Outcome, work: float) -> int:
    """Count the steps after a change until goodput is back: over the last 50 of them at most, and over the 200 to come."""
    expected, best = (np.concatenate([[0.0], np.cumsum(one)]) for one in path_shares(outcome))
    begin = int(np.searchsorted(outcome.work, work))
    for now in range(begin, len(outcome.work) - SETTLED_STEPS):
        since, until = max(now - ROLLING_STEPS, begin), now + SETTLED_STEPS
        is_back = now == begin or expected[now] - expected[since] >= RECOVERED * (best[now] - best[since])
        if is_back and expected[until] - expected[now] >= RECOVERED * (best[until] - best[now]):
            return now - begin
    return len(outcome.work) - begin


def lost_steps(outcome: Outcome, work: float) -> float:
    """Goodput that the 200 steps after a change missed, in steps at the best goodput, beyond what the 200 before missed."""
    expected, best = path_shares(outcome)
    begin = int(np.searchsorted(outcome.work, work))
    before, after = slice(max(begin - SETTLED_STEPS, 0), begin), slice(begin, begin + SETTLED_STEPS)
    missed = [float((best[part] - expected[part]).sum() / max(best[part].sum(), 1e-12)) for part in (before, after)]
    return (missed[1] - missed[0]) * SETTLED_STEPS


def measure(trace: Trace, is_quick: bool, is_ablated: bool, seeds: int) -> Row:
    """Run honed, the oracle and, unless `is_quick`, the others on one trace."""
    traffic = Traffic(trace)
    oracle, runs = run_oracle(traffic), [run_steered(traffic, seed=seed) for seed in range(seeds)]
    end = float(min([oracle.work[-1], *(run.work[-1] for run in runs)]))
    warm, path = [warm_up_work(run) for run in runs], [path_shares(run) for run in runs]
    recovered = [round(statistics.median(recovery(run, at * trace.num_tokens) for run in runs)) for at in trace.events]
    lost = [statistics.mean(lost_steps(run, at * trace.num_tokens) for run in runs) for at in trace.events]
    ahead = run_steered(traffic, is_pipelined=True)
    row = Row(
        trace.name,
        statistics.mean(regret(run, oracle, begin, end) for run, begin in zip(runs, warm, strict=True)),
        statistics.mean(regret(run, oracle, 0.0, end) for run in runs),
        statistics.mean(1.0 - float(expected.sum() / best.sum()) for expected, best in path),
        regret(ahead, oracle, warm_up_work(ahead), min(end, float(ahead.work[-1]))),
        recovered,
        lost,
        len(runs[0].seconds),
        (_mean_length(runs[0]), _mean_length(oracle)),
    )
    if not is_quick:
        row.contenders = contenders(traffic, oracle, statistics.mean(warm), end)
    if is_ablated:
        for name, truths in TRUTHS.items():
            policy = WithTruth(traffic, truths)
            run = simulate(traffic, policy, on_batch=policy.take)
            row.ablations[name] = regret(run, oracle, warm[0], end)
    return row


def contenders(traffic: Traffic, oracle: Outcome, begin: float, end: float) -> dict[str, float]:
    """Regret of all drafts, of the tuned table, and of the best fixed length, after the same warm-up."""
    k = traffic.trace.num_spec_tokens
    table, *statics = (
        regret(simulate(traffic, rule), oracle, begin, end)
        for rule in (Dictated(k, k, tuned_table(traffic)), *(Dictated(k, length) for length in range(k + 1)))
    )
    return {"static": statics[-1], "table": table, "static-best": min(statics)}


def _mean_length(outcome: Outcome) -> float:
    return float(outcome.num_draft_tokens.sum() / outcome.num_requests.sum())


def show(row: Row) -> None:
    """Print one trace's line."""
    recovered = " ".join(f"{steps}/{lost:.0f}" for steps, lost in zip(row.recovered, row.lost, strict=True)) or "-"
    lengths = f"{row.draft_tokens[0]:5.2f} {row.draft_tokens[1]:5.2f}"
    others = " ".join(f"{value:7.1%}" for value in {**row.contenders, **row.ablations}.values())
    shares = f"{row.regret:7.2%} {row.cold:7.2%} {row.path:7.2%} {row.ahead:7.2%}"
    print(f"{row.name:22s} {row.steps:6d} {lengths} {shares} {recovered:>9s}  {others}", flush=True)


def main() -> int:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="*", help="names; the twenty when none is given")
    parser.add_argument("--quick", action="store_true", help="only honed and the oracle")
    parser.add_argument("--ablate", action="store_true", help="replace one estimate after another by the truth")
    parser.add_argument("--seeds", type=int, default=1, help="runs of honed per trace, averaged (the trace stays the same)")
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file")
    args = parser.parse_args()
    there_are = {trace.name: trace for trace in TRACES + EXTRA}
    if unknown := set(args.traces) - there_are.keys():
        parser.error(f"no such trace: {', '.join(sorted(unknown))}; there are {', '.join(there_are)}")
    began_s, rows = time.monotonic(), []
    for trace in [trace for name, trace in there_are.items() if name in args.traces] or TRACES:
        row = measure(trace, args.quick, args.ablate, args.seeds)
        if not rows:
            names = " ".join(f"{name[:7]:>7s}" for name in {**row.contenders, **row.ablations})
            print(f"{'trace':22s}  steps    k    k*  regret    cold    path   ahead recov/los  {names}")
        rows.append(row)
        show(row)
    jump_ratio: dict[str, float] = {}
    for trace in JUMPS if not args.traces else ():
        ratios = [ratio_to_best_length(trace, seed) for seed in range(args.seeds)]
        jump_ratio[trace.name] = round(statistics.mean(ratios), 5)
        print(f"{trace.name:38s} {jump_ratio[trace.name]:.3f} times the best fixed length", flush=True)
    regrets = {row.name: round(row.regret, 5) for row in rows}
    figures = {
        "regret": regrets,
        "regret_with_cold_start": {row.name: round(row.cold, 5) for row in rows},
        "regret_on_path": {row.name: round(row.path, 5) for row in rows},
        "regret_ahead": {row.name: round(row.ahead, 5) for row in rows},
        "mean": round(statistics.mean(regrets.values()), 5),
        "worst": round(max(regrets.values()), 5),
        "mean_with_cold_start": round(statistics.mean(row.cold for row in rows), 5),
        "mean_on_path": round(statistics.mean(row.path for row in rows), 5),
        "worst_on_path": round(max(row.path for row in rows), 5),
        "mean_ahead": round(statistics.mean(row.ahead for row in rows), 5),
        "worst_ahead": round(max(row.ahead for row in rows), 5),
        "after_drift_rounds": {row.name: max(row.recovered) for row in rows if row.recovered},
        "lost_steps_after_drift": {row.name: round(max(row.lost), 1) for row in rows if row.lost},
        "contenders": _means([row.contenders for row in rows]),
        "ablations": _means([row.ablations for row in rows]),
        "jump_ratio": jump_ratio,
        "worst_jump_ratio": min(jump_ratio.values(), default=None),
        "mean_jump_ratio": round(statistics.mean(jump_ratio.values()), 5) if jump_ratio else None,
        "bars": BARS,
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(time.monotonic() - began_s, 1),
    }
    figures["passed"] = (
        figures["mean"] <= BARS["mean"]
        and figures["worst"] <= BARS["worst"]
        and all(ratio >= BARS["worst_jump_ratio"] for ratio in jump_ratio.values())
        and all(rounds <= BARS["after_drift_rounds"] for rounds in figures["after_drift_rounds"].values())
    )
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))
    return 0 if figures["passed"] else 1


def _means(tables: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.mean(table[name] for table in tables), 5) for name in tables[0]}


if __name__ == "__main__":
    sys.exit(main())
