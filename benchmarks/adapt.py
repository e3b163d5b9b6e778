"""Draft lengths on a running vLLM: honed's choice against every fixed one, a tuned table, other rules, and no speculation.

The target is the tiny pair's, made dear by layers that change nothing (`stacked_target`), so that a draft pass costs a small
part of a target step as it does on a real server. Every rule runs in the same server, switched over the admin API; "none" is
a second server without speculation. Regimes are concurrency x traffic; in each, rules take turns on the same prompts.
Greedy and of fixed length, so every run gives the same tokens. The table (as vLLM's own: draft length by batch size) is tuned
first, on mixed traffic, and then put into honed's settings.

A machine has spells of a minute in which everything on it is slower by a tenth and more. So every rule is compared with what
honed gave beside it: honed has its turn first, last, and between any `GAP` others, and a ratio is of honed's speed at the
other's time, interpolated between the turns before and after it. The others' order rotates from repeat to repeat.

Draft lengths matter while tokens are generated. On a CPU a prompt's token costs as much as a generated one in a full batch, so
long prompts and short answers would fill a run with work that is the same under every rule: prompts are the last
`--prompt-chars` characters of the tiny pair's, and answers are of `--max-tokens`.

A run is some seconds of a server that has been at work before and goes on afterwards (`play_full`). honed has seen mixed
traffic at every concurrency before, and then all that the other rules do, as a daemon that has run for minutes would have.
The shifting trace plays every regime once, without a pause. From honed's own run on it `honed replay` says what each fixed
length would have given there, and that is held against what it did give.

Single runs scatter by several per cent. So after `--repeats` of all rules those go on, for `--finals` more, that the ratios
are about: honed's, none, and the fixed lengths that were within `NEAR` of the best one there. On the trace all go on, since
what is foretold of every fixed length is held against what it gave.

Where there are two cores or more the target has one to itself, as it would have a GPU, and everything else, the clients
included, shares the others. Prompts are computed in every run (no prefix caching). Both servers are started anew for every
repeat: the speed of one and the same program differs by some per cent from process to process. On a virtual machine the host
may give the target's core to others, up to a third of the time and then again not at all; such stolen time, as the kernel
counts it, is taken off for every rule alike, and a run that lost more than `MOST_STOLEN` is made again, once: the one of the
two that lost less counts. `by_the_clock` has the same ratios of all time.

It takes some two hours (`--trace-only`: one), and may be interrupted: what was measured of a regime's repeat,
or of the trace's, is kept in `--kept`, and the next call with the same plan and commit goes on from there.

The best of the fixed lengths is chosen afterwards, and so is in part the luckiest; `ratio_to_static_chosen_before` takes in
each repeat the one that was best in the others. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import httpx2
import vllm_server
from client_load import Played, Prompt, play, play_full, read_prompts
from demo_figures import toml
from honed_side import engine_of, start_daemon, vllm_args, wait_attached
from measured import commit, hardware
from processes import ROOT, Child, ProcessError, Processes, free_port
from stacked_target import make_stacked_target
from target_core import pin_target, stolen_share
from vllm_server import Server

from honed.daemon.client import AdminClient, AdminError
from honed.daemon.replay import Question, replay

Document = dict[str, Any]
Turns = list[tuple[str, float]]
"""The runs of a repeat in the order of time: rule, tokens/s."""
Rates = dict[str, list[Turns]]
"""A regime's repeats."""

STATICS = tuple(f"static-{k}" for k in (1, 2, 3, 5, 7))
OURS = "goodput"
OTHERS = ("none", *STATICS, "table", "threshold", "kelly")
OTHERS_ON_TRACE = (*STATICS, "table")
GAP = 3
"""Other rules' runs between two of honed's."""
CONCURRENCY = (1, 4, 16)
TRAFFIC = ("a", "b", "mixed")
REGIMES = tuple((c, t) for c in CONCURRENCY for t in TRAFFIC)
REQUESTS = {1: 2, 4: 8, 16: 24}
"""Requests of a run, by concurrency."""
SHIFTS = ((1, "a"), (16, "b"), (4, "mixed"), (16, "a"), (1, "b"), (4, "a"), (16, "mixed"), (4, "b"), (1, "mixed"))
"""The shifting trace."""
NEAR = 0.08
"""Fixed lengths that are slower than the best one by more than this aren't measured further."""
MOST_STOLEN = 0.02
MIN_COST_RATIO = 8.0
COST_REPEATS = 5
WARM_UP_RUNS = 2
FLAGS = ("--no-enable-prefix-caching",)
LOGGED_S = 3.0
"""Within this time the daemon has stored what the engine did."""


@dataclass
class Kept:
    """A file with what was measured so far, for a run that goes on where another one was interrupted."""

    path: Path
    plan: Document

    NAMES: ClassVar[tuple[str, ...]] = ("rates", "clock_rates", "latencies", "replays")

    def load(self, bench: Bench) -> list[tuple[int, int]]:
        """Give a bench what an interrupted run of the same plan measured; that run's table, empty where there was none."""
        try:
            held = json.loads(self.path.read_text())
        except FileNotFoundError:
            return []
        if held["plan"] != self.plan:
            raise ProcessError(f"{self.path} is of another plan or commit: {held['plan']}; remove it to start anew")
        for name in self.NAMES:
            setattr(bench, name, held[name])
        return [(batch, length) for batch, length in held["table"]]

    def save(self, bench: Bench) -> None:
        """Keep what a bench has measured: whole repeats only, so call it at the end of one."""
        held = {"plan": self.plan, "table": bench.table} | {name: getattr(bench, name) for name in self.NAMES}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(held))
        part.replace(self.path)


@dataclass
class Bench:
    """The servers, and what has been measured: tokens/s and inter-token latency by phase and regime."""

    processes: Processes
    runtime_dir: Path
    client: AdminClient
    target: str
    max_tokens: int
    prompts: dict[str, list[Prompt]]
    daemon: Child | None = None
    plain: Server | None = None
    attached: Server | None = None
    rates: Rates = field(default_factory=dict)
    clock_rates: Rates = field(default_factory=dict)
    """As `rates`, but by the clock: of all time, stolen or not."""
    latencies: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    cost: Document = field(default_factory=dict)
    used: Server | None = None
    """The server that ran last: it goes on using the CPU for a second."""
    replays: list[Document] = field(default_factory=list)
    """What `honed replay` said of honed's first run of every repeat of the shifting trace."""
    kept: Kept | None = None
    table: list[tuple[int, int]] = field(default_factory=list)

    async def start(self, environment: dict[str, str]) -> None:
        """Both servers, one after the other; those that run are stopped."""
        for server in (self.plain, self.attached):
            if server is not None:
                await asyncio.to_thread(self.processes.stop, server.child)
        args, pinned = vllm_args(environment), pin_target()
        self.plain = vllm_server.start(
            self.processes, "vllm-none", extra=FLAGS, environment=pinned, target=self.target, is_speculating=False
        )
        await asyncio.to_thread(vllm_server.wait, self.plain)
        self.attached = vllm_server.start(
            self.processes, "vllm-attached", extra=[*FLAGS, *args["flags"]], environment={**args["environment"], **pinned},
            target=self.target,
        )  # fmt: skip
        await asyncio.to_thread(vllm_server.wait, self.attached)
        await asyncio.to_thread(wait_attached, self.attached.child, self.client)
        for server in (self.plain, self.attached):  # the first steps of a process are slow
            await play(server.url, self.prompts["mixed"][:16], concurrency=16, max_tokens=16, ignore_eos=True)

    def start_daemon(self, table: Sequence[tuple[int, int]]) -> dict[str, str]:
        """Start the daemon, or start it again with a table; its environment for honed's other commands."""
        if self.daemon is not None:
            self.processes.stop(self.daemon)
        config = self.runtime_dir / "honed.toml"
        sections: Document = {
            "paths": {"runtime_dir": self.runtime_dir, "state_dir": self.runtime_dir / "state"},
            "http": {"metrics_listen": f"127.0.0.1:{free_port()}"},
            "recalibration": {"automatic": False},
        }
        if table:
            sections["controller"] = {"table": [list(row) for row in table]}
        config.write_text(toml(sections))
        self.daemon, environment = start_daemon(self.processes, config, self.client)
        if self.attached is not None:
            wait_attached(self.attached.child, self.client)
        return environment

    async def use(self, rule: str) -> None:
        """Put a rule in force and wait until the engine says that it is."""
        for name in ("draft_tokens", "policy"):
            try:
                self.client.delete(f"/v1/overrides/{name}")
            except AdminError:
                continue
        if rule.startswith("static-"):
            body = {"value": int(rule.removeprefix("static-")), "ttl_s": 3600, "reason": "benchmark"}
            self.client.put("/v1/overrides/draft_tokens", body)
        elif rule not in ("none", "goodput"):
            self.client.put("/v1/overrides/policy", {"value": rule, "ttl_s": 3600, "reason": "benchmark"})
        sent = self.client.get("/v1/engines")[0]["policy"]["generation"]
        until_s = time.monotonic() + 15.0
        await asyncio.sleep(1.2)  # the daemon steers once a second
        wanted = "static" if rule.startswith("static-") else rule
        while time.monotonic() < until_s:
            policy = engine_of(self.client).get("policy") or {}
            if rule == "none" or (policy.get("kind") == wanted and policy.get("generation") >= sent and not policy["fallback"]):
                return
            await asyncio.sleep(0.2)
        raise ProcessError(f"the engine doesn't follow {rule}: {engine_of(self.client).get('policy')}")

    async def run(self, rule: str, concurrency: int, traffic: str) -> Played:
        """One run of a rule that is in force."""
        server = self.plain if rule == "none" else self.attached
        assert server is not None
        pool = self.prompts[traffic]
        chosen = [pool[i % len(pool)] for i in range(REQUESTS[concurrency])]
        played = await play_full(
            server.url, chosen, concurrency=concurrency, max_tokens=self.max_tokens, ignore_eos=True,
            workload="" if rule == "none" else "default",
        )  # fmt: skip
        if played.num_failed:
            raise ProcessError(next(reply.error for reply in played.replies if reply.error))
        return played

    async def measure(self, key: str, rule: str, concurrency: int, traffic: str) -> float:
        """One run, or the better of two, noted; tokens/s."""
        played = await self.run(rule, concurrency, traffic)
        if stolen_share([played]) > MOST_STOLEN:
            again = await self.run(rule, concurrency, traffic)
            played = min(played, again, key=lambda one: stolen_share([one]))
        gaps = [(r.seconds - r.first_token_s) / max(len(r.token_ids) - 1, 1) for r in played.replies if r.seconds]
        self.latencies.setdefault(key, {}).setdefault(rule, []).append(1e3 * statistics.median(gaps))
        return self.note(key, rule, [played])

    def begin(self, key: str) -> None:
        """A repeat of a regime, or of the trace, begins."""
        self.rates.setdefault(key, []).append([])
        self.clock_rates.setdefault(key, []).append([])

    def note(self, key: str, rule: str, played: Sequence[Played]) -> float:
        """Note the speed of a run in one or more parts; tokens per second that was ours."""
        tokens, seconds = sum(part.num_tokens for part in played), sum(part.seconds for part in played)
        stolen = stolen_share(played)
        rate = tokens / seconds / (1.0 - stolen)
        self.rates[key][-1].append((rule, rate))
        self.clock_rates[key][-1].append((rule, tokens / seconds))
        print(f"{key:12s} {rule:10s} {rate:7.1f} tok/s ({stolen:.0%} of the time stolen)", flush=True)
        return rate

    async def turn_to(self, rule: str) -> None:
        """Change to a rule; a server that was used before and isn't now has stopped spinning."""
        server = self.plain if rule == "none" else self.attached
        await self.use(rule)
        if self.used is not server and self.plain is not None and self.attached is not None:
            await vllm_server.quiet([self.plain, self.attached])
        self.used = server

    async def tune(self) -> list[tuple[int, int]]:
        """The table: for each concurrency the best fixed length on mixed traffic, none included."""
        best: dict[int, tuple[float, int]] = {}
        for concurrency in CONCURRENCY:
            self.begin(f"tuning-{concurrency}")
        for rule in ("static-0", *STATICS):
            await self.turn_to(rule)
            for concurrency in CONCURRENCY:
                rate = await self.measure(f"tuning-{concurrency}", rule, concurrency, "mixed")
                best[concurrency] = max(best.get(concurrency, (0.0, 0)), (rate, int(rule.removeprefix("static-"))))
        # A length is used up to half-way (geometrically) to the next batch size that was tuned.
        bounds = [round((a * b) ** 0.5) for a, b in itertools.pairwise(CONCURRENCY)]
        return [(bound, best[c][1]) for bound, c in zip([*bounds, CONCURRENCY[-1]], CONCURRENCY, strict=True)]

    async def warm_up(self) -> None:
        """Let a daemon that was just started see some traffic."""
        await self.turn_to(OURS)
        for concurrency in CONCURRENCY * WARM_UP_RUNS:
            await self.run(OURS, concurrency, "mixed")

    async def regimes(self, repeats: int, finals: int, environment: dict[str, str]) -> None:
        """Every regime, every rule, `repeats` times, then the finalists; each with new servers."""
        for repeat in range(repeats + finals):
            left = [regime for regime in enumerate(REGIMES) if len(self.rates.get("{}-{}".format(*regime[1]), ())) <= repeat]
            if repeat and left:
                await self.start(environment)
            for number, (concurrency, traffic) in left:
                key = f"{concurrency}-{traffic}"
                others = OTHERS if repeat < repeats else ("none", *finalists(self.rates[key]))
                self.begin(key)
                for rule in in_turns(others, repeat * 3 + number):
                    await self.turn_to(rule)
                    await self.measure(key, rule, concurrency, traffic)
                self.keep()

    async def shifting(self, repeats: int) -> None:
        """The trace, by the rules that it is about."""
        for repeat in range(len(self.rates.get("shifting", ())), repeats):
            self.begin("shifting")
            for number, rule in enumerate(in_turns(OTHERS_ON_TRACE, repeat)):
                await self.turn_to(rule)
                began_s = time.time()
                self.note("shifting", rule, [await self.run(rule, c, traffic) for c, traffic in SHIFTS])
                if number == 0:
                    await asyncio.sleep(LOGGED_S)
                    self.replays.append(self.replay(began_s, time.time()))
            self.keep()

    def keep(self) -> None:
        """A repeat has been measured to its end."""
        if self.kept is not None:
            self.kept.save(self)

    def replay(self, since_s: float, until_s: float) -> Document:
        """What `honed replay` says of fixed lengths, from the log of that time."""
        policies = tuple(rule.replace("-", ":") for rule in STATICS)
        database = self.runtime_dir / "state" / "honed.db"
        return replay(database, Question(policies=policies, since_s=since_s, until_s=until_s))

    async def costs(self, layers: int) -> Document:
        """What a draft pass and a target step of one request take, in ms.

        A step with one draft token takes a draft pass and a token's verification more than one without; a step with two takes
        another token's verification more than that, and hardly more of the draft pass, which makes the block at once.
        """
        assert self.attached is not None
        step_ms: dict[str, list[float]] = {"static-0": [], "static-1": [], "static-2": []}
        for _ in range(COST_REPEATS):
            for rule, found in step_ms.items():
                await self.turn_to(rule)
                before = self.attached.counters()
                played = await play(
                    self.attached.url, self.prompts["a"][:1], concurrency=1, max_tokens=128, ignore_eos=True, workload="default"
                )
                rounds = (await vllm_server.settled(self.attached) - before).drafts or played.num_tokens - 1
                found.append(1e3 * sum(reply.seconds - reply.first_token_s for reply in played.replies) / rounds)
        target, one, two = (statistics.median(found) for found in step_ms.values())
        draft = (one - target) - (two - one)
        return {
            "draft_pass_ms": draft, "draft_token_ms": two - one, "target_step_ms": target, "ratio": target / draft,
            "extra_layers": layers,
        }  # fmt: skip


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1, help="runs of every rule in every regime")
    parser.add_argument("--finals", type=int, default=2, help="further runs of the rules that the ratios are about")
    parser.add_argument("--trace-repeats", type=int, default=2, help="runs of every rule on the shifting trace")
    parser.add_argument("--trace-only", action="store_true", help="leave the nine steady regimes out")
    parser.add_argument("--extra-layers", type=int, default=100, help="layers without effect added to the target")
    parser.add_argument("--max-tokens", type=int, default=96, help="tokens of every request's answer")
    parser.add_argument("--prompt-chars", type=int, default=128, help="characters of every prompt, its last ones")
    parser.add_argument("--out", type=Path, default=None, help="result file (default: benchmarks/results)")
    parser.add_argument("--kept", type=Path, default=ROOT / "build" / "adapt-kept.json", help="file for an interrupted run")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "adapt-logs", help="folder for logs")
    arguments = parser.parse_args()
    try:
        vllm_server.check_pair()
        result = asyncio.run(run(arguments))
    except KeyboardInterrupt:
        print("adapt: stopped; everything that it started has ended", file=sys.stderr)
        return 130
    except (ProcessError, AdminError, OSError, httpx2.HTTPError) as error:
        print(f"adapt: {error}", file=sys.stderr)
        return 1
    out = arguments.out or ROOT / "benchmarks" / "results" / f"adapt-{time.strftime('%Y-%m-%d')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {out}")
    shown = (
        "ratio_to_best_static",
        "ratio_to_none",
        "ratio_to_static_chosen_before",
        "shifting",
        "replay_error",
        "spread",
        "cost",
        "by_the_clock",
    )
    result["by_the_clock"].pop("tokens_per_s")
    print(json.dumps({key: result[key] for key in shown}), flush=True)
    return 0


async def run(arguments: argparse.Namespace) -> Document:
    """Make the target, start everything, measure, stop everything."""
    pin_target()
    runtime_dir = Path(tempfile.mkdtemp(prefix="honed-bench-"))
    pools = {name: read_prompts(ROOT / "benchmarks" / "tiny" / f"prompts_{name}.jsonl") for name in ("a", "b")}
    for name, pool in pools.items():
        pools[name] = [dataclasses.replace(prompt, text=prompt.text[-arguments.prompt_chars :]) for prompt in pool]
    pools["mixed"] = [prompt for pair in zip(pools["a"], pools["b"], strict=True) for prompt in pair]
    try:
        target = make_stacked_target(ROOT / vllm_server.TARGET, runtime_dir / "target", arguments.extra_layers)
        with Processes(arguments.logs) as processes, AdminClient(runtime_dir / "admin.sock") as client:
            bench = Bench(processes, runtime_dir, client, str(target), arguments.max_tokens, pools)
            bench.kept = Kept(arguments.kept, plan_of(arguments) | {"commit": commit()})
            bench.table = bench.kept.load(bench)
            environment = await asyncio.to_thread(bench.start_daemon, bench.table)
            await bench.start(environment)
            if not bench.table:
                bench.table = await bench.tune()
                environment = await asyncio.to_thread(bench.start_daemon, bench.table)
            print(f"tuned table {bench.table}", flush=True)
            await bench.warm_up()
            if not arguments.trace_only:
                await bench.regimes(arguments.repeats, arguments.finals, environment)
            await bench.shifting(arguments.trace_repeats)
            bench.cost = await bench.costs(arguments.extra_layers)
            if bench.cost["ratio"] < MIN_COST_RATIO:
                print(f"a target step takes less than {MIN_COST_RATIO:g} draft passes: add --extra-layers", flush=True)
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)
    bench.kept.path.unlink(missing_ok=True)
    return summary(bench) | {
        "table": bench.table,
        "plan": plan_of(arguments),
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def plan_of(arguments: argparse.Namespace) -> Document:
    """What has to be the same in all parts of an interrupted run."""
    return {name: value for name, value in vars(arguments).items() if name not in ("out", "kept", "logs")}


def summary(bench: Bench) -> Document:
    """All figures, of the time that was ours, and the main ones by the clock as well."""
    by_the_clock = compared(bench.clock_rates)
    return compared(bench.rates) | {
        "replay_error": replay_errors(bench),
        "cost": {name: round(value, 3) for name, value in bench.cost.items()},
        "tokens_per_s": bench.rates,
        "inter_token_ms_p50": bench.latencies,
        "by_the_clock": by_the_clock | {"tokens_per_s": bench.clock_rates},
    }


def compared(measured: Rates) -> Document:
    """Ratios, their medians over the repeats and ranges; the best fixed length is chosen afterwards, by its median ratio."""
    to_best: dict[str, float] = {}
    to_none: dict[str, float] = {}
    to_chosen: dict[str, float] = {}
    spread: Document = {}
    best_static: dict[str, str] = {}
    for key in (key for c, t in REGIMES if (key := f"{c}-{t}") in measured):
        repeats = measured[key]
        best = best_static[key] = best_of(repeats)
        pairs = {"ratio_to_best_static": ratios(repeats, best), "ratio_to_none": ratios(repeats, "none")}
        to_best[key], to_none[key] = (round(statistics.median(values), 4) for values in pairs.values())
        to_chosen[key] = round(statistics.median(ratios_to_chosen_before(repeats)), 4)
        spread[key] = {name: [round(min(values), 4), round(max(values), 4)] for name, values in pairs.items()}
    trace = measured["shifting"]
    single = best_static["shifting"] = best_of(trace)
    pairs = {"to_best_single_static": ratios(trace, single), "to_tuned_table": ratios(trace, "table")}
    spread["shifting"] = {name: [round(min(values), 4), round(max(values), 4)] for name, values in pairs.items()}
    return {
        "ratio_to_best_static": to_best,
        "ratio_to_none": to_none,
        "ratio_to_static_chosen_before": to_chosen,
        "shifting": {name: round(statistics.median(values), 4) for name, values in pairs.items()},
        "spread": spread,
        "best_static": best_static,
    }


def replay_errors(bench: Bench) -> dict[str, float]:
    """Predicted over measured speed of each fixed length on the shifting trace, less 1; both relative to honed's own."""
    trace, errors = bench.rates["shifting"], {}
    for number, rule in enumerate(STATICS):
        predicted = [one["policies"][number]["ratio"] for one in bench.replays]
        if all(predicted):
            found = [ratio["value"] * own for ratio, own in zip(predicted, ratios(trace, rule), strict=False)]
            errors[rule] = round(statistics.median(found) - 1.0, 4)
    return errors


def in_turns(others: tuple[str, ...], by: int) -> list[str]:
    """A repeat's runs: the other rules, begun with another one; honed's first, last and between any `GAP` of them."""
    by %= len(others)
    rotated, order = others[by:] + others[:by], [OURS]
    for first in range(0, len(rotated), GAP):
        order += [*rotated[first : first + GAP], OURS]
    return order


def ratio(turns: Turns, at: int) -> float:
    """honed's tokens/s at the time of a turn over that turn's.

    Its logarithm is interpolated between honed's own turns before and after.
    """
    before = max(i for i in range(at) if turns[i][0] == OURS)
    after = min(i for i in range(at, len(turns)) if turns[i][0] == OURS)
    share = (at - before) / (after - before)
    return turns[before][1] ** (1.0 - share) * turns[after][1] ** share / turns[at][1]


def ratios(repeats: list[Turns], other: str) -> list[float]:
    """honed's tokens/s over another rule's, of every repeat in which that had a turn."""
    return [ratio(turns, at) for turns in repeats for at, (rule, _) in enumerate(turns) if rule == other]


def best_of(repeats: list[Turns]) -> str:
    """The fixed length that was best beside honed, by the median, of those that were measured to the end."""
    return min(survivors(repeats), key=lambda rule: statistics.median(ratios(repeats, rule)))


def finalists(repeats: list[Turns]) -> list[str]:
    """The fixed lengths that are worth another repeat: those within `NEAR` of the best one."""
    most = statistics.median(ratios(repeats, best_of(repeats))) / (1.0 - NEAR)
    return [rule for rule in survivors(repeats) if statistics.median(ratios(repeats, rule)) <= most]


def survivors(repeats: list[Turns]) -> list[str]:
    """The fixed lengths that no repeat has left out so far."""
    last = {rule for rule, _ in repeats[-1]}
    return [rule for rule in STATICS if rule in last]


def ratios_to_chosen_before(repeats: list[Turns]) -> list[float]:
    """honed's tokens/s in each repeat over those of the fixed length that was best in the other ones."""
    by_rule = {rule: ratios(repeats, rule) for rule in survivors(repeats)}
    found = []
    for repeat in range(len(repeats)):
        others = [other for other in range(len(repeats)) if other != repeat] or [repeat]
        chosen = min(by_rule, key=lambda rule: statistics.median(by_rule[rule][other] for other in others))
        found.append(by_rule[chosen][repeat])
    return found


if __name__ == "__main__":
    sys.exit(main())
