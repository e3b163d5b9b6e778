"""What learning online wins: measured for a recalibration by its length, and simulated for days of drifting traffic.

    curve   the tiny pair, whose drafter was made for A, on live traffic of B: recalibrations of several lengths, each swapped
            into the running engine. vLLM's counters measure held-out prompts of both. Tokens trained on, and seconds.
    again   after the longest, more of that length, each from the version before, until the gate refuses one (at most 3)
    days    `simulated.drifting`: weeks of a server of Qwen3-8B's size, whose steps and training were measured on an H200. Its
            traffic moves to a new domain once a day on average. Drafters need the tokens of the curve, 10 or 100 times as many.
            By arm: acceptance length, accepted tokens won per 1,000 requests and per second of the device's time, hours to half
            of the gain.

`--curve` takes the curve of a kept result. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from benchmarks.server.measured import RESULTS, commit, hardware, keep
from benchmarks.server.processes import ROOT
from benchmarks.server.recalib_engine import Engine, read_prompts
from benchmarks.server.recalib_site import Plan, Site, compare
from benchmarks.server.vllm_server import check_pair
from benchmarks.simulated.drifting import ARMS, Curve, Outcome, Rules, Server, run
from honed.daemon.lifecycle.drift_alarms import MAX_ATTEMPTS, WORTH_MORE
from honed.daemon.settings.sections import RecalibrationSettings
from honed.recalib.config.trainer import TrainerSettings
from honed.recalib.training.training_run import TRAINING_SHARE

Document = dict[str, Any]

TINY = ROOT / "benchmarks" / "tiny"
STEPS = (25, 50, 100, 200, 400, 800, 1600)
SHORT_STEPS = (25, 50)
SHORT_PROMPTS = 32
MOST_AGAIN = 3
SLICES, SIZES = RESULTS / "time-slices-h200-2026-11-28.json", RESULTS / "gpu-h200-2026-11-28.json"
SIZES_BATCH = RESULTS / "gpu-h200-2026-11-27.json", RESULTS / "server-sizes-h200-2026-11-26.json"
"""A step's time with 16 requests and with 64."""
MOST_REQUESTS = 64
LOADS: tuple[float | Literal["day"], ...] = (0.02, 0.3, 0.6, 0.9, "day")
NEEDS = (1.0, 10.0, 100.0)
DAYS, SEEDS, MOVES_PER_DAY = 14, 10, 1.0


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few minutes, to see that it works; nothing is kept")
    parser.add_argument("--curve", type=Path, help="result whose curve is taken instead of a measured one")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results)")
    arguments = parser.parse_args()
    if arguments.curve is not None:
        kept = json.loads(arguments.curve.read_text())
        curve, again = kept["curve"], kept["again"]
    else:
        check_pair()
        with tempfile.TemporaryDirectory(prefix="honed-gain-") as folder:
            curve, again = measured(Path(folder), SHORT_STEPS if arguments.short else STEPS, is_short=arguments.short)
    result = {
        "curve": curve,
        "again": again,
        "days": days(curve, 1 if arguments.short else SEEDS),
        "server": asdict(server()),
        "rules": asdict(rules()),
        "plan": {"days": DAYS, "seeds": SEEDS, "moves_per_day": MOVES_PER_DAY, "most_requests": MOST_REQUESTS},
        "sources": [path.name for path in (SLICES, SIZES, *SIZES_BATCH)],
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if not arguments.short or arguments.out is not None:
        keep(result, "gain", arguments.out)
    print(json.dumps({"curve": curve, "again": again, "days": result["days"]}), flush=True)
    return 0


def measured(folder: Path, steps: Sequence[int], *, is_short: bool) -> tuple[list[Document], list[Document]]:
    """Recalibrate for B with each number of micro-steps, from the same samples; then again, each from the version before.

    Returns:
        the curve, whose first row is the drafter as it was, and the recalibrations after its last one.
    """
    plan = Plan()
    held = {w: read_prompts(TINY / f"prompts_{w}.jsonl", SHORT_PROMPTS if is_short else plan.heldout) for w in "ab"}
    with Engine(folder / "run", TINY / "target", TINY / "drafter") as engine:
        site = Site(folder, engine, plan, TINY / "drafter")
        before = {w: engine.measure(held[w]) for w in "ab"}
        site.play("a", read_prompts(TINY / "traffic_a.jsonl", plan.traffic_a))
        site.play("b", read_prompts(TINY / "traffic_b.jsonl", plan.traffic_b))

        def row(number: int) -> Document:
            site.settings = replace(site.settings, max_steps=number)
            told = site.recalibrate("b", "kv-frozen")
            if not told["refused"]:
                told |= {w: compare(before[w], engine.measure(held[w])) for w in "ab"}
            print(json.dumps(told), file=sys.stderr, flush=True)
            return told

        curve: list[Document] = [{"tokens": 0} | {w: {"after": round(n.acceptance_length, 4)} for w, n in before.items()}]
        for number in steps:
            curve.append(row(number))
            if number != steps[-1]:
                site.swap_back()
        again = list[Document]()
        while not (last := [*curve, *again][-1])["refused"] and len(again) < (1 if is_short else MOST_AGAIN):
            site.go_on_from(last["version"])
            again.append(row(steps[-1]))
    return curve, again


def days(curve: Sequence[Document], seeds: int) -> Document:
    """Simulate each need, load and arm; figures are means over the seeds."""
    swapped = [row for row in curve if "b" in row]
    whole = Curve([row["tokens"] for row in swapped], [row["b"]["after"] for row in swapped])
    found: Document = {}
    for need in NEEDS:
        for load in LOADS:
            outcomes: dict[str, list[Outcome]] = {
                arm: [
                    run(
                        arm,
                        whole.stretched(need),
                        server(),
                        rules(),
                        load,
                        most_requests=MOST_REQUESTS,
                        days=DAYS,
                        moves_per_day=MOVES_PER_DAY,
                        seed=seed,
                    )
                    for seed in range(seeds)
                ]
                for arm in ARMS
            }
            name = load if load == "day" else f"{100 * load:.0f} %"
            found.setdefault(f"{need:g} x", {})[name] = {arm: _row(of, outcomes["none"]) for arm, of in outcomes.items()}
    return found


def _row(outcomes: Sequence[Outcome], none: Sequence[Outcome]) -> Document:
    def mean(name: str, of: Sequence[Outcome] = outcomes) -> float:
        return statistics.fmean(getattr(outcome, name) for outcome in of)

    won = mean("accepted_per_1000_requests") - mean("accepted_per_1000_requests", none)
    requests_a_day = statistics.fmean(outcome.requests_per_day for outcome in outcomes)
    device_s = mean("device_s_per_day")
    return {
        "acceptance_length": round(mean("lengths"), 4),
        "won_per_1000_requests": round(won),
        "device_s_per_day": round(device_s, 1),
        "won_per_device_s": round(won * requests_a_day / 1000 / device_s) if device_s else 0,
        "hours_to_half": round(mean("hours_to_half"), 2),
        "versions_per_day": round(mean("versions"), 2),
    }


def server() -> Server:
    """A server of Qwen3-8B's size on an H200, by kept results."""
    parts = json.loads(SIZES.read_text())["parts"]
    sizes = parts["server-sizes"]
    at_16, at_64 = (json.loads(path.read_text()) for path in SIZES_BATCH)
    arms = json.loads(SLICES.read_text())["arms"]
    (stream,) = [arm for arm in arms if arm["kind"] == "stream" and arm["duty_asked"] == 0.02]
    return Server(
        step_requests=(1, 16, 64),
        step_ms=(
            sizes["steps"]["1"]["step_ms"]["attached"],
            at_16["parts"]["server-sizes"]["step_ms"]["16"]["attached"],
            at_64["steps"]["64"]["step_ms"]["attached"],
        ),
        train_tokens_per_s=sizes["train"]["qwen3-8b"]["tokens_per_s"],
        # Parent and candidate are judged; a forward pass takes a third of the time of a micro-step.
        judged_tokens=2 * TrainerSettings().max_gate_rows / 3,
        unit_ms=stream["unit_ms"],
        held_ms=stream["held_ms"]["mean"],
        harm_per_duty=stream["harm_over_duty"],
        trial_s=parts["whole-trainer"]["details"]["seconds_of"]["canary"],
    )


def rules() -> Rules:
    """Defaults of honed's settings."""
    trainer, of_8b = TrainerSettings(), json.loads(SIZES.read_text())["parts"]["server-sizes"]["train"]["qwen3-8b"]
    step_s = of_8b["whole_micro_step_ms"] / 1e3
    return Rules(
        deadline_s=trainer.deadline_s,
        training_share=TRAINING_SHARE,
        min_interval_s=RecalibrationSettings().min_interval_s,
        max_attempts=MAX_ATTEMPTS,
        worth_more=WORTH_MORE,
        most_tokens=min(trainer.max_steps * step_s, RecalibrationSettings().max_seconds) * of_8b["tokens_per_s"],
        latency_budget=trainer.latency_budget,
        p99_budget=trainer.p99_budget,
    )


if __name__ == "__main__":
    sys.exit(main())
