"""honed against vLLM's adaptive verification, whose own code runs (`vllm_adaptive`), on the same simulated traffic and costs.

Every rule does the same work with the same luck. Goodput is tokens per simulated second after honed's warm-up (2,000 verify
rounds or 20 simulated seconds, whichever ends later). The output has ratios of goodput. The first three and the last are
medians over seeds (± half their range), the rest are from the first seed:

    ahead       honed / vLLM, with lengths chosen a step ahead, as the attachment must; vLLM needn't
    at once     as ahead, if it needn't either
    fed         vLLM's rule / vLLM, with step costs and each workload's acceptance from honed
    oracle      an oracle that knows requests and costs, but not the drafts / vLLM
    sees        an oracle that also knows the drafts' own acceptance / vLLM

vLLM's rule sees the present drafts before it cuts them. honed's doesn't: it chooses before they are made. So `oracle` bounds
honed where the drafter can't be shortened, and `sees` bounds vLLM. Where vLLM refuses adaptive verification, it runs with K
drafts for every request, and the rule's goodput there is printed as `anyway`. honed is informed of such a backend
(`equal_lengths`). The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.regret import warm_up_work
from benchmarks.server.measured import commit, hardware
from benchmarks.simulated.against_scenarios import SCENARIOS, Scenario
from benchmarks.simulated.dictated import Dictated
from benchmarks.simulated.engine import Outcome, simulate
from benchmarks.simulated.oracle import Oracle, Steered
from benchmarks.simulated.traffic import Traffic
from benchmarks.simulated.vllm_adaptive import AdaptiveVerification, FedVerification
from honed.adapt.control.settings import ControllerSettings

COLUMNS = ("ahead", "at once", "fed", "oracle", "sees", "anyway")
NUM_SPREAD = 3
"""Leading columns that are over all seeds."""


def run_honed(traffic: Traffic, seed: int, is_pipelined: bool = False) -> Outcome:
    """Run honed's own loop."""
    cost = traffic.cost(0.0)
    settings = ControllerSettings(
        captured_tokens=cost.captured_tokens, equal_lengths="always" if cost.mixed_s > 0.0 else "never"
    )
    policy = Steered(traffic, settings, seed)
    return simulate(traffic, policy, on_batch=policy.take, is_pipelined=is_pipelined)


def run_all_drafts(traffic: Traffic) -> Outcome:
    """Run vLLM without adaptive verification: K drafts for every request."""
    k = traffic.trace.num_spec_tokens
    return simulate(traffic, Dictated(k, k))


def measure(scenario: Scenario, seed: int, is_bounded: bool) -> dict[str, float]:
    """Run everything on a scenario's traffic of this seed; return ratios to vLLM's goodput, and that itself as "vllm"."""
    traffic = Traffic(replace(scenario.trace, seed=1000 + seed))
    fed = FedVerification(traffic, seed)
    runs = {
        "ahead": run_honed(traffic, seed, is_pipelined=True),
        "at once": run_honed(traffic, seed),
        "fed": simulate(traffic, fed, on_batch=fed.take),
        "anyway": simulate(traffic, AdaptiveVerification(traffic, seed)),
    }
    begin = max(warm_up_work(runs[name]) for name in ("ahead", "at once", "fed"))
    if is_bounded:
        runs["oracle"] = simulate(traffic, Oracle())
        runs["sees"] = simulate(traffic, Oracle(sees_drafts=True))
    vllm = run_all_drafts(traffic) if scenario.is_refused else runs["anyway"]
    end = float(min(run.work[-1] for run in (*runs.values(), vllm)))
    assert end > 1.2 * begin, f"{scenario.trace.name}: too little work is left after the warm-up"
    seconds = vllm.seconds_between(begin, end)
    ratios = {name: seconds / run.seconds_between(begin, end) for name, run in runs.items()}
    lengths = {f"k_{name}": float(run.num_draft_tokens.sum() / run.num_requests.sum()) for name, run in runs.items()}
    return ratios | lengths | {"vllm": (end - begin) / seconds}


def main() -> int:
    """Measure, print, and end with one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", help="names; all of them when none is given")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file")
    args = parser.parse_args()
    names = [one.trace.name for one in SCENARIOS]
    if unknown := set(args.scenarios) - set(names):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    began_s, seeds = time.monotonic(), list(range(1, args.seeds + 1))
    heads = " ".join(f"{name:>15s}" for name in COLUMNS[:NUM_SPREAD]) + "".join(f" {name:>7s}" for name in COLUMNS[NUM_SPREAD:])
    print(f"{'scenario':24s} {'tokens/s':>8s}  k: vLLM honed {heads}")
    found: dict[str, list[dict[str, float]]] = {}
    for scenario in SCENARIOS:
        if args.scenarios and scenario.trace.name not in args.scenarios:
            continue
        rows = found[scenario.trace.name] = [measure(scenario, seed, seed == seeds[0]) for seed in seeds]
        shares = " ".join(f"{_median(rows, name):7.4f} ±{_spread(rows, name):.4f}" for name in COLUMNS[:NUM_SPREAD])
        shares += "".join(f" {_median(rows, name):7.4f}" for name in COLUMNS[NUM_SPREAD:])
        lengths = f"{_median(rows, 'k_anyway'):7.2f} {_median(rows, 'k_ahead'):5.2f}"
        print(f"{scenario.trace.name:24s} {_median(rows, 'vllm'):8.0f} {lengths}  {shares}", flush=True)
    keys = {
        "honed": "ahead",
        "honed_at_once": "at once",
        "vllm_fed": "fed",
        "oracle": "oracle",
        "oracle_that_sees_drafts": "sees",
        "vllm_rule_where_refused": "anyway",
    }
    figures = {
        "ratio": {name: {key: round(_median(rows, one), 4) for key, one in keys.items()} for name, rows in found.items()},
        "half_range": {
            name: {key: round(_spread(rows, one), 4) for key, one in keys.items() if one in (*COLUMNS[:NUM_SPREAD], "anyway")}
            for name, rows in found.items()
        },
        "vllm_tokens_per_s": {name: round(_median(rows, "vllm"), 1) for name, rows in found.items()},
        "refused_by_vllm": [one.trace.name for one in SCENARIOS if one.is_refused and one.trace.name in found],
        "seeds": seeds,
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "seconds": round(time.monotonic() - began_s, 1),
    }
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")
    print(json.dumps(figures))
    return 0


def _median(rows: list[dict[str, float]], name: str) -> float:
    return statistics.median(row[name] for row in rows if name in row)


def _spread(rows: list[dict[str, float]], name: str) -> float:
    """Half the range."""
    values = [row[name] for row in rows if name in row]
    return (max(values) - min(values)) / 2


if __name__ == "__main__":
    sys.exit(main())
