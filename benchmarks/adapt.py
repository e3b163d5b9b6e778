"""Draft lengths on a running vLLM: honed's choice against every fixed one, a tuned table, and no speculation.

The target is the tiny pair's, made expensive by layers that change nothing (`stacked_target`), so that a draft pass costs a
small part of a target step, as on a real server. Each contender is a vLLM engine. Those that speculate have honed attached and
a daemon of their own, whose settings name the rule. "none" doesn't speculate. Regimes are concurrency x traffic. honed's
choice, which remembers hundreds of rounds, sees a regime's traffic for 24 requests or more before it is measured. The shifting
trace plays every regime for 40 to 160 steps, without a pause. Nothing is trained,
so nothing is captured (`bench-capture` measures that cost). Requests don't name their traffic. They are greedy and of fixed
length, so every run emits the same tokens. Prompts are computed in every run (no prefix caching). The table (as vLLM's own:
draft length by batch size) is tuned first, on mixed traffic.

All contenders' runs are cut into slices, which alternate on a core reserved for them, as they would have a GPU (`lockstep`). So
a slow period of the machine affects all. Repeats begin with new engines; the daemons continue with what they had learned. On a
virtual machine the host may give the core to others; nothing is subtracted for that.

Draft lengths matter while tokens are generated. On a CPU a prompt's token costs as much as a generated one in a full batch, so
long prompts and short answers would fill a run with work that is equal under every rule. So prompts are the last
`--prompt-chars` characters of the tiny pair's.

`honed replay` predicts each fixed length from honed's own run on the trace, and the prediction is compared with the
measurement.

The comparison's reliability is also measured: at a concurrency where the table's length is one of the fixed ones, two engines
do the same. `same_twice` is the one's speed over the other's.

`--pair eagle3` and `--pair mtp` take drafters that draft one token after the other, at the lengths that people use
(`make_pairs` makes the pairs). They leave out the trace. So does `--tree-slots N`: honed chooses
among chains and trees of up to N nodes, "chains" is honed's choice among chains, and "tree-N" are fixed trees. Its target is
made expensive by wide MLPs instead of layers: their weights are read from memory in every step. So a row costs less than with
many small layers, yet some 8 % of a step here. `--pause PASS_MS ROW_MS` simulates a device on which rows are cheap, as on a GPU
with few requests: the target's passes wait instead of being costly.

The best fixed length is chosen afterwards, and so partly by luck; `ratio_to_static_chosen_before` takes in each repeat the one
that was best in the others. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.demo.figures import toml
from benchmarks.make_tiny.stacked_target import make_stacked_target
from benchmarks.make_tiny.target_core import pin_target, target_core
from benchmarks.server import vllm_server
from benchmarks.server.client_load import read_prompts
from benchmarks.server.honed_side import engine_of, start_daemon, wait_attached
from benchmarks.server.lockstep import Load, Lockstep, Seen
from benchmarks.server.measured import commit, hardware
from benchmarks.server.processes import ROOT, Child, ProcessError, Processes, free_port
from benchmarks.server.recalib_pair import path_with_torchvision
from honed.daemon.client.client import AdminClient, AdminError
from honed.daemon.commands.replay import Question, replay

Document = dict[str, Any]
Rates = dict[str, list[dict[str, float]]]
"""Tokens/s by regime, repeat and rule."""

LENGTHS = (1, 2, 3, 5, 7)
OURS = "goodput"
CHAINS = "chains"
CONCURRENCY = (1, 4, 16)
TRAFFIC = ("a", "b", "mixed")
REGIMES = tuple((c, t) for c in CONCURRENCY for t in TRAFFIC)
REQUESTS = {1: 6, 4: 16, 16: 32}
"""Requests of a run, by concurrency: 100 to 400 steps, since single steps of a shared machine vary by tens of per cent."""
REQUESTS_ON_TRACE = {1: 3, 4: 8, 16: 24}
SETTLING = {1: 4, 4: 2, 16: 2}
"""Runs of a regime that honed sees before it is measured: at least 24 requests, and a hundred steps."""
SHIFTS = ((1, "a"), (16, "b"), (4, "mixed"), (16, "a"), (1, "b"), (4, "a"), (16, "mixed"), (4, "b"), (1, "mixed"))
"""The shifting trace."""
TINY, PAIRS = ROOT / "benchmarks" / "tiny", ROOT / "build" / "pairs"
NUM_DRAFT_TOKENS = {"dflash": 7, "eagle3": 5, "mtp": 3}
MIN_COST_RATIO = 8.0
SETTLED_S = 3.0
"""Time in which a daemon stores its engine's events, receives its state and sends it a policy."""


@dataclass
class Bench:
    """The contenders, and the measurements by regime."""

    processes: Processes
    folder: Path
    steps: Lockstep
    target: str
    pair: str
    tree_slots: int
    max_tokens: int
    pause: Sequence[float]
    """Milliseconds by which the target's every pass is longer, and each of its rows makes it longer."""
    concurrency: Sequence[int]
    """Those of the steady regimes."""
    settling: int
    """Multiplies `SETTLING`."""
    prompts: dict[str, list[str]]
    rates: Rates = field(default_factory=dict)
    latencies: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Inter-token latency in ms, by regime and rule."""
    replays: list[Document] = field(default_factory=list)
    """Results of `honed replay` for honed's run in every repeat of the shifting trace."""
    cost: Document = field(default_factory=dict)
    table: list[tuple[int, int]] = field(default_factory=list)
    daemons: dict[str, Child] = field(default_factory=dict)

    @property
    def statics(self) -> tuple[str, ...]:
        """The fixed lengths."""
        return tuple(f"static-{k}" for k in LENGTHS if k <= NUM_DRAFT_TOKENS[self.pair])

    @property
    def learning(self) -> tuple[str, ...]:
        """The rules that learn."""
        return (OURS, *[CHAINS] * bool(self.tree_slots))

    @property
    def has_trace(self) -> bool:
        """Whether the trace is played."""
        return self.pair == "dflash" and not self.tree_slots

    def has_trees(self, rule: str) -> bool:
        """Whether a rule's engine verifies trees."""
        return bool(self.tree_slots) and (rule == OURS or rule.startswith("tree-"))

    @property
    def rules(self) -> tuple[str, ...]:
        """All rules."""
        trees = [f"tree-{nodes}" for nodes in (7, 15, 31, 63) if nodes <= self.tree_slots]
        return (OURS, "none", *self.statics, *trees, "table", *self.learning[1:])

    @property
    def rules_on_trace(self) -> tuple[str, ...]:
        """The rules of the shifting trace."""
        return (OURS, *self.statics, "table")

    def start(self, rules: Sequence[str]) -> None:
        """Start new engines for these rules."""
        drafter = str((TINY if self.pair == "dflash" else PAIRS / self.pair) / "drafter")
        k = self.tree_slots or NUM_DRAFT_TOKENS[self.pair]
        speculative = {"method": self.pair, "model": drafter, "num_speculative_tokens": k}
        self.steps.load(self.target, speculative, has_trees=bool(self.tree_slots), pause=self.pause)
        for rule in rules:
            if rule == "none":
                self.steps.fork(rule)
                continue
            if rule not in self.daemons:
                self.daemons[rule] = self.start_daemon(rule)
            contender = self.steps.fork(rule, self.folder / rule, self.daemons[rule], has_trees=self.has_trees(rule))
            with self.client(rule) as client:
                wait_attached(contender.engine, client)
        time.sleep(SETTLED_S)

    def client(self, rule: str) -> AdminClient:
        """Return a client of a rule's daemon."""
        return AdminClient(self.folder / rule / "admin.sock")

    def start_daemon(self, rule: str) -> Child:
        """Start a daemon with a rule as its mode."""
        runtime_dir = self.folder / rule
        runtime_dir.mkdir()
        controller: Document = {"mode": rule, "capture_share": 0.0}
        if rule == CHAINS:
            controller |= {"mode": OURS, "max_k": NUM_DRAFT_TOKENS[self.pair]}
        elif rule.startswith(("static-", "tree-")):
            controller |= {"mode": "static", "static_k": int(rule.partition("-")[2])}
        elif rule == "table":
            controller["table"] = [list(row) for row in self.table]
        config = runtime_dir / "honed.toml"
        sections: Document = {
            "paths": {"runtime_dir": runtime_dir, "state_dir": runtime_dir / "state"},
            "http": {"metrics_listen": f"127.0.0.1:{free_port()}"},
            "recalibration": {"automatic": False},
            "controller": controller,
        }
        config.write_text(toml(sections))
        with self.client(rule) as client:
            return start_daemon(self.processes, config, client, name=f"honed-{rule}")[0]

    def check_rules(self, rules: Sequence[str]) -> None:
        """Raise ProcessError unless every engine follows its rule."""
        self.steps.wake_all()
        time.sleep(SETTLED_S)
        for rule in rules:
            if rule != "none":
                with self.client(rule) as client:
                    engine = engine_of(client)
                policy = engine.get("policy") or {}
                if ("trees" in engine["capabilities"]) != self.has_trees(rule):
                    raise ProcessError(f"{rule} verifies {'chains' if self.has_trees(rule) else 'trees'}: {engine['limits']}")
                wanted = "static" if rule.startswith(("static-", "tree-")) else OURS if rule == CHAINS else rule
                if policy.get("kind") != wanted or policy.get("fallback"):
                    raise ProcessError(f"the engine doesn't follow {rule}: {policy}")

    def play(
        self, rules: Sequence[str], concurrency: int, traffic: str, requests: Mapping[int, int] = REQUESTS
    ) -> Mapping[str, Seen]:
        """Run each rule once."""
        pool = self.prompts[traffic]
        chosen = tuple(pool[i % len(pool)] for i in range(requests[concurrency]))
        return self.steps.play(rules, Load(chosen, concurrency, self.max_tokens))

    def measure(self, key: str, rules: Sequence[str], concurrency: int, traffic: str) -> None:
        """Run each rule once, and record it."""
        seen = self.play(rules, concurrency, traffic)
        self.note(key, {rule: [one] for rule, one in seen.items()})
        for rule, one in seen.items():
            self.latencies.setdefault(key, {}).setdefault(rule, []).append(one.token_ms)

    def note(self, key: str, parts: Mapping[str, Sequence[Seen]]) -> None:
        """Record the speeds of runs in one or more parts."""
        rates = {
            rule: sum(part.num_tokens for part in seen) / sum(part.seconds for part in seen) for rule, seen in parts.items()
        }
        self.rates.setdefault(key, []).append(rates)
        print(f"{key:10s} " + ", ".join(f"{rule} {rate:.1f}" for rule, rate in rates.items()) + " tokens/s", flush=True)

    def tune(self) -> None:
        """Tune the table: for each concurrency the best fixed length on mixed traffic, none included."""
        rules = ("static-0", *self.statics)
        self.start(rules)
        self.play(rules, 4, "mixed")
        self.check_rules(rules)
        best = []
        for concurrency in self.concurrency:
            key = f"tuning-{concurrency}"
            self.measure(key, rules, concurrency, "mixed")
            rates = self.rates[key][-1]
            best.append(int(max(rates, key=rates.__getitem__).removeprefix("static-")))
        self.table = table_of(best, self.concurrency)
        print(f"tuned table {self.table}", flush=True)

    def regimes(self) -> None:
        """Measure every rule in every regime; learning rules have seen it for a while."""
        for concurrency, traffic in itertools.product(self.concurrency, TRAFFIC):
            for _ in range(self.settling * SETTLING[concurrency]):
                self.play(self.learning, concurrency, traffic)
            self.measure(f"{concurrency}-{traffic}", self.rules, concurrency, traffic)

    def shifting(self) -> None:
        """Measure the rules of interest on the trace."""
        self.steps.wake_all()
        time.sleep(SETTLED_S)
        began_s = time.time()
        parts = [self.play(self.rules_on_trace, c, traffic, REQUESTS_ON_TRACE) for c, traffic in SHIFTS]
        self.note("shifting", {rule: [part[rule] for part in parts] for rule in self.rules_on_trace})
        self.steps.wake_all()
        time.sleep(SETTLED_S)
        self.replays.append(self.replay(began_s, time.time()))

    def replay(self, since_s: float, until_s: float) -> Document:
        """Run `honed replay` for fixed lengths on the log of that time."""
        policies = tuple(rule.replace("-", ":") for rule in self.statics)
        return replay(self.folder / OURS / "state" / "honed.db", Question(policies=policies, since_s=since_s, until_s=until_s))

    def costs(self) -> None:
        """Measure a draft pass and a target step of one request, in ms: both as timed, the step without drafts.

        A drafter that drafts one token after the other fills its cache in every step: that pass isn't the target's.
        """
        seen = self.steps.play(("static-0", "static-1"), Load(self.prompts["a"][:1], 1, self.max_tokens))
        plain, draft = seen["static-0"], seen["static-1"].draft_ms
        target = 1e3 * plain.seconds / plain.num_steps - (0.0 if self.pair == "dflash" else plain.draft_ms)
        self.cost = {"draft_pass_ms": draft, "target_step_ms": target, "ratio": target / draft}
        print(f"target step {target:.1f} ms, draft pass {draft:.1f} ms", flush=True)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pair", choices=list(NUM_DRAFT_TOKENS), default="dflash", help="the drafter's kind")
    parser.add_argument("--tree-slots", type=int, default=0, help="most nodes of a draft tree; 0: no trees")
    parser.add_argument("--repeats", type=int, default=2, help="runs of every rule in every regime and on the trace")
    at_once = {"nargs": "*", "type": int, "choices": CONCURRENCY, "default": CONCURRENCY}
    parser.add_argument("--concurrency", help="requests at a time in the steady regimes, rising", **at_once)
    parser.add_argument("--settling", type=int, default=1, help="multiplies the requests that honed sees before a regime")
    parser.add_argument("--trace-only", action="store_true", help="leave the nine steady regimes out")
    parser.add_argument("--extra-layers", type=int, default=-1, help="silent layers added to the target; -1: 48, or none")
    parser.add_argument("--mlp-width", type=int, default=-1, help="width of its MLPs; -1: 16384 with trees; 0: as it is")
    pause = {"nargs": 2, "metavar": ("PASS_MS", "ROW_MS")}
    parser.add_argument("--pause", type=float, default=(0, 0), help="the target waits, instead of being costly", **pause)
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of every request's answer")
    parser.add_argument("--prompt-chars", type=int, default=128, help="characters of every prompt, its last ones")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: benchmarks/results)")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "adapt-logs", help="folder for logs")
    arguments = parser.parse_args()
    if arguments.tree_slots and (arguments.pair != "dflash" or arguments.tree_slots < NUM_DRAFT_TOKENS["dflash"]):
        parser.error("--tree-slots: trees grow from DFlash drafters, and hold its chain of 7")
    if arguments.extra_layers < 0:
        arguments.extra_layers = 0 if arguments.tree_slots or any(arguments.pause) else 48
    if arguments.mlp_width < 0:
        arguments.mlp_width = 16384 if arguments.tree_slots and not any(arguments.pause) else 0
    if arguments.trace_only and (arguments.pair != "dflash" or arguments.tree_slots):
        parser.error("--trace-only: the trace is played for chains of --pair dflash")
    arguments.out = arguments.out or ROOT / "benchmarks" / "results" / f"adapt-{time.strftime('%Y-%m-%d')}.json"
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        vllm_server.check_pair()
        if not (PAIRS / arguments.pair).exists() and arguments.pair != "dflash":
            make = f"python -m benchmarks.make_pairs {arguments.pair} --work build/pairs/sources --out build/pairs"
            raise ProcessError(f"{PAIRS / arguments.pair} is missing: `{make}` makes it")
        if arguments.pair == "mtp":
            os.environ["PYTHONPATH"] = path_with_torchvision()
        result = run(arguments)
    except KeyboardInterrupt:
        print("adapt: stopped; everything that it started has ended", file=sys.stderr)
        return 130
    except (ProcessError, AdminError, OSError, httpx2.HTTPError) as error:
        print(f"adapt: {error}", file=sys.stderr)
        return 1
    left_out = ("tokens_per_s", "inter_token_ms_p50", "best_static", "table", "plan", "hardware", "commit", "when")
    print(json.dumps({key: value for key, value in result.items() if key not in left_out}), flush=True)
    return 0


def run(arguments: argparse.Namespace) -> Document:
    """Make the target, start everything, measure, write the result after every repeat, stop everything."""
    pin_target()
    result: Document = {}
    folder = Path(tempfile.mkdtemp(prefix="honed-bench-"))
    pools = {
        name: [
            prompt.text[-arguments.prompt_chars :]
            for prompt in read_prompts(ROOT / "benchmarks" / "tiny" / f"prompts_{name}.jsonl")
        ]
        for name in ("a", "b")
    }
    pools["mixed"] = [prompt for pair in zip(pools["a"], pools["b"], strict=True) for prompt in pair]
    try:
        own = PAIRS / arguments.pair / "target"
        plain = own if own.exists() else TINY / "target"
        target = make_stacked_target(plain, folder / "target", arguments.extra_layers, arguments.mlp_width)
        with Processes(arguments.logs) as processes, Lockstep(processes, folder, max(target_core(), 0)) as steps:
            chosen = (arguments.pair, arguments.tree_slots, arguments.max_tokens, arguments.pause)
            loads = (arguments.concurrency, arguments.settling, pools)
            bench = Bench(processes, folder, steps, str(target), *chosen, *loads)
            bench.tune()
            bench.costs()
            if bench.cost["ratio"] < MIN_COST_RATIO:
                print(f"a target step takes less than {MIN_COST_RATIO:g} draft passes: make the target larger", flush=True)
            rules = bench.rules_on_trace if arguments.trace_only else bench.rules
            for _ in range(arguments.repeats):
                bench.start(rules)
                for concurrency in bench.concurrency:  # a process's first steps are slow, and a new daemon has no data
                    bench.play(rules, concurrency, "mixed")
                bench.check_rules(rules)
                if not arguments.trace_only:
                    bench.regimes()
                if bench.has_trace:
                    bench.shifting()
                result = result_of(bench, arguments)
                arguments.out.write_text(json.dumps(result, indent=2) + "\n")
                print(f"written to {arguments.out}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def result_of(bench: Bench, arguments: argparse.Namespace) -> Document:
    """Collect all figures so far."""
    return compared(bench.rates) | {
        "same_twice": same_twice(bench.rates, bench.table),
        "replay_error": replay_errors(bench.rates, bench.replays),
        "cost": {name: round(value, 3) for name, value in bench.cost.items()},
        "tokens_per_s": bench.rates,
        "inter_token_ms_p50": bench.latencies,
        "table": bench.table,
        "plan": {name: value for name, value in vars(arguments).items() if name not in ("out", "logs")},
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def table_of(lengths: Sequence[int], concurrency: Sequence[int] = CONCURRENCY) -> list[tuple[int, int]]:
    """Make the table: a length is used up to half-way (geometrically) to the next tuned batch size."""
    bounds = [round((a * b) ** 0.5) for a, b in itertools.pairwise(concurrency)]
    return list(zip([*bounds, CONCURRENCY[-1]], lengths, strict=True))


def compared(measured: Rates) -> Document:
    """Ratios, their medians over the repeats and ranges; the best fixed length is chosen afterwards, by its median ratio."""
    to_best: dict[str, float] = {}
    to_none: dict[str, float] = {}
    to_chosen: dict[str, float] = {}
    spread: Document = {}
    best_static: dict[str, str] = {}
    trees: dict[str, dict[str, float]] = {}
    for key in (key for c, t in REGIMES if (key := f"{c}-{t}") in measured):
        repeats = measured[key]
        best = best_static[key] = best_of(repeats)
        pairs = {"ratio_to_best_static": ratios(repeats, best), "ratio_to_none": ratios(repeats, "none")}
        to_best[key], to_none[key] = (round(statistics.median(values), 4) for values in pairs.values())
        to_chosen[key] = round(statistics.median(ratios_to_chosen_before(repeats)), 4)
        if CHAINS in repeats[0]:
            chains = [CHAINS, *statics_of(repeats)]
            all_others = [*chains, *(rule for rule in repeats[0] if rule.startswith("tree-"))]
            pairs["to_best_chain"] = ratios(repeats, best_of(repeats, chains))
            pairs["to_best_chain_or_tree"] = ratios(repeats, best_of(repeats, all_others))
            trees[key] = {name: round(statistics.median(pairs[name]), 4) for name in ("to_best_chain", "to_best_chain_or_tree")}
        spread[key] = {name: [round(min(values), 4), round(max(values), 4)] for name, values in pairs.items()}
    found: Document = {
        "ratio_to_best_static": to_best,
        "ratio_to_none": to_none,
        "ratio_to_static_chosen_before": to_chosen,
        "spread": spread,
        "best_static": best_static,
    }
    if trees:
        found["trees"] = trees
    if trace := measured.get("shifting"):
        single = best_static["shifting"] = best_of(trace)
        pairs = {"to_best_single_static": ratios(trace, single), "to_tuned_table": ratios(trace, "table")}
        spread["shifting"] = {name: [round(min(values), 4), round(max(values), 4)] for name, values in pairs.items()}
        found["shifting"] = {name: round(statistics.median(values), 4) for name, values in pairs.items()}
    return found


def same_twice(measured: Rates, table: Sequence[tuple[int, int]]) -> dict[str, list[float]]:
    """The table's tokens/s over those of the fixed length that it has there, of every repeat."""
    found: dict[str, list[float]] = {}
    for concurrency, traffic in REGIMES:
        rule = f"static-{next(length for bound, length in table if concurrency <= bound)}"
        if rule != "static-0":
            repeats = measured.get(f"{concurrency}-{traffic}", [])
            found[f"{concurrency}-{traffic}"] = [round(rates["table"] / rates[rule], 4) for rates in repeats]
    return found


def replay_errors(measured: Rates, replays: Sequence[Document]) -> dict[str, float]:
    """Predicted over measured speed of each fixed length on the shifting trace, minus 1; both relative to honed's own."""
    trace, errors = measured.get("shifting"), {}
    for number, rule in enumerate(statics_of(trace) if trace else ()):
        predicted = [one["policies"][number]["ratio"] for one in replays]
        if all(predicted):
            found = [ratio["value"] * own for ratio, own in zip(predicted, ratios(trace, rule), strict=True)]
            errors[rule] = round(statistics.median(found) - 1.0, 4)
    return errors


def ratios(repeats: Sequence[Mapping[str, float]], other: str) -> list[float]:
    """honed's tokens/s over another rule's, of every repeat."""
    return [rates[OURS] / rates[other] for rates in repeats]


def statics_of(repeats: Sequence[Mapping[str, float]]) -> list[str]:
    """The fixed lengths that were measured, rising; length 0 aside."""
    return [rule for rule in repeats[0] if rule.startswith("static-") and rule != "static-0"]


def best_of(repeats: Sequence[Mapping[str, float]], rules: Sequence[str] = ()) -> str:
    """The best of these rules, or of the fixed lengths, by the median of the ratios."""
    return min(rules or statics_of(repeats), key=lambda rule: statistics.median(ratios(repeats, rule)))


def ratios_to_chosen_before(repeats: Sequence[Mapping[str, float]]) -> list[float]:
    """honed's tokens/s in each repeat over those of the fixed length that was best in the other ones."""
    found = []
    for at, rates in enumerate(repeats):
        others = [*repeats[:at], *repeats[at + 1 :]] or list(repeats)
        found.append(rates[OURS] / rates[best_of(others)])
    return found


if __name__ == "__main__":
    sys.exit(main())
