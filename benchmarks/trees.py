"""Draft trees on a running vLLM against its own chain: the tiny pair, V1's runner in step, held-out prompts of both domains.

    tau, tau_t08   acceptance length at temperature 0 and 0.8, of vLLM's chain of 7 and of trees of 7, 15, 31 and 63 nodes
    promised       length that the values of nodes, learned from trees of 63, promise for smaller trees, over what these had
    estimated      length that the gate tells from the chain's answers, without an engine, over what the engine had
    equal          share of the answers at temperature 0 whose tokens are the chain's
    seconds        wall time of each run; on a CPU, where a tree's rows cost full price

The last line of stdout is JSON. The exit code is 1 when a bar is missed: at temperature 0 A >= 1.25 times the chain with 15
nodes and >= 1.35 times with 63, B >= 1.2 times with 15; promises within 10 %; all answers equal.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from benchmarks.make_tiny import continuations
from benchmarks.server.client_load import Prompt
from benchmarks.server.measured import commit, hardware
from benchmarks.server.processes import ROOT
from benchmarks.server.recalib_engine import Engine, read_prompts
from honed.adapt.acceptance.rounds import rounds_by_workload
from honed.adapt.acceptance.tree_gains import TreeGains
from honed.adapt.protocol.wire import Policy
from honed.recalib.drafter.checkpoint import load_drafter
from honed.recalib.gate.evaluate import expected_acceptance_length
from honed.recalib.gate.gate import GateSettings, judge

Document = dict[str, Any]

TINY = ROOT / "benchmarks" / "tiny"
RESULTS = ROOT / "benchmarks" / "results"
CHAIN, SLOTS, BUDGETS = 7, 63, (7, 15, 31, 63)
NAMES = {0.0: "tau", 0.8: "tau_t08"}


class Server:
    """An engine with slots for drafts, of which a policy takes some."""

    def __init__(self, folder: Path, slots: int) -> None:
        os.environ["HONED_TREES"] = str(int(slots > CHAIN))
        speculative = {"method": "dflash", "model": str(TINY / "drafter"), "num_speculative_tokens": slots}
        self.engine = Engine(folder, TINY / "target", TINY / "drafter", max_num_seqs=16, speculative_config=speculative)
        self.honed = self.engine._core.scheduler._honed
        self.honed.before_schedule()
        capabilities = self.honed._hello().capabilities
        assert ("trees" in capabilities) == (slots > CHAIN), self.honed._hello().limits

    def measure(self, prompts: list[Prompt], budget: int, temperature: float) -> tuple[Document, list[list[int]], list[Any]]:
        """Answer the prompts with drafts of `budget` tokens or nodes: figures, tokens, and the logged batches."""
        from tests.e2e.logged import take_batches

        self.honed._on_policy(Policy(generation=1, ttl_s=1e9, kind="static", static_k=budget, max_k=budget))
        self.honed.before_schedule()
        take_batches(self)  # type: ignore[arg-type]
        before, began_s = self.engine._counters(), time.monotonic()
        answers = self.engine.generate(prompts, temperature)
        seconds = time.monotonic() - began_s
        rounds, _, accepted = (now - then for now, then in zip(self.engine._counters(), before, strict=True))
        figures = {"tau": round(1 + accepted / rounds, 4), "rounds": rounds, "seconds": round(seconds, 1)}
        return figures, answers, take_batches(self)  # type: ignore[arg-type]


def values_of(batches: list[Any]) -> TreeGains:
    """What nodes were worth in these batches."""
    gains = TreeGains(SLOTS, 1e9)
    for batch in batches:
        for _, rounds in rounds_by_workload(batch):
            if rounds.trees is not None:
                gains.observe(rounds.trees)
    return gains


class Estimate:
    """Acceptance lengths without an engine, from its answers, as a recalibration's gate tells them."""

    def __init__(self) -> None:
        self._model = Qwen3ForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
        self._drafter = load_drafter(TINY / "drafter", TINY / "target")
        self._tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))

    def lengths(self, prompts: list[Prompt], answers: list[list[int]]) -> dict[str, float]:
        """Tell the lengths of chains and trees by their names in the result."""
        samples = []
        for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            cut = continuations.Prompt(str(number), tuple(self._tokenizer.encode(prompt.text).ids))
            samples.append(continuations.as_sample(self._model, self._drafter, cut, answer, ""))
        told = expected_acceptance_length(self._drafter, samples)
        (figures,) = judge(told.sessions, told.sessions, [], GateSettings(min_sessions=1)).figures
        return {"chain7": figures.parent, **figures.parent_trees}


def run(num_prompts: int) -> Document:
    """Measure everything."""
    prompts = {name: read_prompts(TINY / f"prompts_{name.lower()}.jsonl", num_prompts) for name in "AB"}
    result: Document = {"tau": {}, "tau_t08": {}, "equal": {}}
    result |= {kind: {"tau": {}, "tau_t08": {}} for kind in ("promised", "estimated")}
    seconds: Document = {}
    estimate = Estimate()
    with tempfile.TemporaryDirectory(prefix="honed-trees-") as scratch:
        chain, chains = Server(Path(scratch) / "chain", CHAIN), {}
        for temperature, name in NAMES.items():
            for domain, texts in prompts.items():
                figures, chains[name, domain], _ = chain.measure(texts, CHAIN, temperature)
                result[name][domain] = {"chain7": figures["tau"]}
                seconds[f"{name} {domain} chain7"] = figures["seconds"]
                print(f"{name} {domain} chain: {figures}", file=sys.stderr, flush=True)
        chain.engine.__exit__()
        trees = Server(Path(scratch) / "trees", SLOTS)
        for temperature, name in NAMES.items():
            for domain, texts in prompts.items():
                same = total = 0
                promised: dict[str, float] = {}
                values = None
                for budget in sorted(BUDGETS, reverse=True):
                    figures, answers, batches = trees.measure(texts, budget, temperature)
                    result[name][domain][str(budget)] = figures["tau"]
                    seconds[f"{name} {domain} {budget}"] = figures["seconds"]
                    print(f"{name} {domain} {budget} nodes: {figures}", file=sys.stderr, flush=True)
                    if values is None:
                        values = values_of(batches).values()
                    else:
                        promised[str(budget)] = round(float(1 + values[:budget].sum()) / figures["tau"], 4)
                    same += sum(a == b for a, b in zip(answers, chains[name, domain], strict=True))
                    total += len(answers)
                result["promised"][name][domain] = promised
                told = estimate.lengths(texts, chains[name, domain])
                measured = result[name][domain]
                result["estimated"][name][domain] = {size: round(told[size] / measured[size], 4) for size in measured}
                if not temperature:
                    result["equal"][domain] = round(same / total, 4)
        errors = trees.honed.errors.count
        trees.engine.__exit__()
    return result | {"details": {"seconds": seconds, "prompts": num_prompts, "errors": errors}}


def missed(result: Document) -> list[str]:
    """List the bars that this result doesn't reach."""
    found = []
    for domain, nodes, wanted in (("A", "15", 1.25), ("A", "63", 1.35), ("B", "15", 1.2)):
        lengths = result["tau"][domain]
        if (ratio := lengths[nodes] / lengths["chain7"]) < wanted:
            found.append(f"{domain} with {nodes} nodes: {ratio:.3f} times the chain, at least {wanted} is wanted")
    for name, domains in result["promised"].items():
        for domain, ratios in domains.items():
            found += [
                f"{name} {domain}, {nodes} nodes: {ratio} of what was promised, within 10 % is wanted"
                for nodes, ratio in ratios.items()
                if not 0.9 <= ratio <= 1.1
            ]
    return found + [
        f"{domain}: {share} of the answers are the chain's" for domain, share in result["equal"].items() if share < 1
    ]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=40, help="held-out prompts of each domain")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results)")
    arguments = parser.parse_args()
    result = run(arguments.prompts)
    result |= {"hardware": hardware(), "commit": commit(), "unix_s": round(time.time())}
    out = arguments.out or RESULTS / f"trees-{time.strftime('%Y-%m-%d')}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    for text in (failures := missed(result)):
        print(f"trees: {text}", file=sys.stderr)
    print(json.dumps(result), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # vLLM's threads may hold the process up
