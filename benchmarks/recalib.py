"""Gain of one recalibration on a running vLLM, and its cost to the old workload: trained pairs.

The drafter was made for domain A. Live traffic of both domains is captured from the engine. Then one recalibration as the
trainer does it (samples, mixture, training, gate, registry) is swapped into the running engine. vLLM's counters measure
held-out prompts again, of documents that were in neither the traffic nor any training.

    kv_frozen, full   both scopes: B after / before and A after / before, at temperature 0 and 0.8; wall seconds from request to
                      the version in the registry, gate included; label tokens of the training
    sampled           traffic that is sampled at temperature 0.8: B and A after / before at both temperatures
    fine_tuned_recovered   the target is fine-tuned (LoRA), which lowers A's acceptance length; the share of that loss which one
                           recalibration on A's traffic from the fine-tuned target recovers
    pairs             B and A after / before at temperature 0 for pairs of other kinds: `sliding` (windows, a reduced
                      vocabulary), `eagle3`, `mtp`, `dflash2`, `hybrid` (Gated DeltaNet, M-RoPE); made first if they aren't in
                      build/pairs; for `eagle3` and `mtp` with scope full, too

Both scopes learn from one capture, of the concatenated layers: kv-frozen fuses them with the frozen `fc`, which equals a
capture of fused features. Intervals are 95 % bootstraps over four parts of the prompts. The last line of stdout is JSON. The
exit code is 1 when a bar is missed (kv-frozen: B >= 1.4 and A >= 0.98 at temperature 0 within 10 minutes; recovered >= 0.6;
pairs: B >= 1.25 and A >= 0.97).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.make_tiny.continuations import is_useful
from benchmarks.server import recalib_engine, recalib_pair
from benchmarks.server.client_load import Prompt
from benchmarks.server.measured import commit, hardware
from benchmarks.server.processes import ROOT
from benchmarks.server.recalib_engine import Engine, Rounds, read_prompts
from benchmarks.server.recalib_site import SHORT, Document, Plan, Site, compare
from benchmarks.server.recalib_target import fine_tune

TINY = ROOT / "benchmarks" / "tiny"
RESULTS = ROOT / "benchmarks" / "results"
MIN_GAIN_B, MIN_KEPT_A, MAX_SECONDS, MIN_RECOVERED = 1.4, 0.98, 600.0, 0.6
FINE_TUNE_PROMPTS = 240
"""The last of A's traffic prompts; live traffic uses the first ones."""


def both_scopes(folder: Path, plan: Plan, useful_a: Sequence[Prompt]) -> Document:
    """Measure everything with the original target; also the acceptance of A's useful prompts before it is fine-tuned."""
    held = {w: read_prompts(TINY / f"prompts_{w}.jsonl", plan.heldout) for w in "ab"}
    details: Document = {}
    with Engine(folder / "run", TINY / "target", TINY / "drafter") as engine:
        site = Site(folder, engine, plan, TINY / "drafter")
        before = {(w, t): engine.measure(held[w], t) for w in "ab" for t in (0.0, 0.8)}
        before_move = engine.measure(useful_a)
        tell("before", {f"{w} at {t}": round(r.acceptance_length, 3) for (w, t), r in before.items()})
        site.play("a", read_prompts(TINY / "traffic_a.jsonl", plan.traffic_a))
        site.play("b", read_prompts(TINY / "traffic_b.jsonl", plan.traffic_b))
        found: Document = {"before_move": before_move}
        for scope in ("kv-frozen", "full"):
            told = site.recalibrate("b", scope)
            compared = {(w, t): compare(before[w, t], engine.measure(held[w], t)) for w in "ab" for t in (0.0, 0.8)}
            site.swap_back()
            name = scope.replace("-", "_")
            found[name] = {
                "b_gain_t0": compared["b", 0.0]["ratio"],
                "b_gain_t08": compared["b", 0.8]["ratio"],
                "a_ratio_t0": compared["a", 0.0]["ratio"],
                "a_ratio_t08": compared["a", 0.8]["ratio"],
                "seconds": told["seconds"],
                "tokens": told["tokens"],
            }
            details[name] = told | {f"{w} at {t}": c for (w, t), c in compared.items()}
            tell(scope, found[name])
    return found | {"details": details}


def on_sampled_traffic(folder: Path, plan: Plan) -> Document:
    """Learn from traffic that is sampled at temperature 0.8; measure held-out prompts at both temperatures."""
    held = {w: read_prompts(TINY / f"prompts_{w}.jsonl", plan.heldout) for w in "ab"}
    with Engine(folder / "run", TINY / "target", TINY / "drafter") as engine:
        site = Site(folder, engine, plan, TINY / "drafter")
        before = {(w, t): engine.measure(held[w], t) for w in "ab" for t in (0.0, 0.8)}
        site.play("a", read_prompts(TINY / "traffic_a.jsonl", plan.traffic_a), 0.8)
        site.play("b", read_prompts(TINY / "traffic_b.jsonl", plan.traffic_b), 0.8)
        told = site.recalibrate("b", "kv-frozen")
        found = told | {f"{w} at {t}": compare(rounds, engine.measure(held[w], t)) for (w, t), rounds in before.items()}
        tell("sampled", found)
    return found


def after_fine_tuning(folder: Path, plan: Plan, target: Path, useful_a: Sequence[Prompt], before_move: Rounds) -> Document:
    """Measure the loss of A by the fine-tuning, and the share that one recalibration recovers."""
    with Engine(folder / "run", target, TINY / "drafter") as engine:
        site = Site(folder, engine, plan, TINY / "drafter")
        moved = engine.measure(useful_a)
        site.play("a", read_prompts(TINY / "traffic_a.jsonl", plan.traffic_b))
        told = site.recalibrate("a", "kv-frozen")
        recalibrated = engine.measure(useful_a)
    lengths = [r.acceptance_length for r in (before_move, moved, recalibrated)]
    lost, won = lengths[0] - lengths[1], lengths[2] - lengths[1]
    return told | {
        "prompts": len(useful_a),
        "acceptance_length": dict(zip(("before", "moved", "recalibrated"), (round(x, 4) for x in lengths), strict=True)),
        "recovered": round(won / lost, 4) if lost > 0 else 0.0,
        "gain": compare(moved, recalibrated),
    }


def moved_target(folder: Path, plan: Plan) -> tuple[Path, list[Prompt], Document]:
    """Fine-tune the target; choose the held-out prompts of A that it answers without a loop, by its text alone."""
    from tokenizers import Tokenizer
    from transformers import Qwen3ForCausalLM

    from benchmarks.make_tiny.decode import continue_greedily

    torch.set_num_threads(plan.threads)
    prompts = [p.text for p in read_prompts(TINY / "traffic_a.jsonl", 600)[-FINE_TUNE_PROMPTS:]]
    told: Document = dict(fine_tune(TINY / "target", folder / "target", prompts, plan.fine_tune_steps))
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
    held = read_prompts(TINY / "prompts_a.jsonl", plan.heldout)
    by_length: dict[int, list[tuple[Prompt, list[int]]]] = {}
    for prompt in held:
        ids = tokenizer.encode(prompt.text).ids
        by_length.setdefault(len(ids), []).append((prompt, ids))
    useful = []
    for length, group in by_length.items():
        rows = continue_greedily(model, torch.tensor([ids for _, ids in group]), recalib_engine.NUM_EMITTED_TOKENS)
        useful += [prompt for (prompt, _), row in zip(group, rows.tolist(), strict=True) if is_useful(row[length:])]
    tell("fine-tuned", told | {"useful prompts": len(useful)})
    return folder / "target", useful, told


def run(plan: Plan) -> Document:
    """Run the whole benchmark."""
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="honed-recalib-") as name:
        folder = Path(name)
        target, useful_a, tuned = moved_target(folder / "moved", plan)
        found = both_scopes(folder / "own", plan, useful_a)
        moved = after_fine_tuning(folder / "moved", plan, target, useful_a, found.pop("before_move"))
    details = found.pop("details")
    result = found | {"fine_tuned_recovered": moved["recovered"]}
    details |= {"fine_tuned": moved | {"lora": tuned}, "plan": asdict(plan), "wall_seconds": round(time.monotonic() - began_s)}
    return result | {"details": details}


def missed(result: Document) -> list[str]:
    """List the bars that this result doesn't reach."""
    others = recalib_pair.missed(result.get("pairs", {}))
    if "kv_frozen" not in result:
        return others
    frozen = result["kv_frozen"]
    bars = {
        f"kv-frozen: B x {frozen['b_gain_t0']}, at least {MIN_GAIN_B} is wanted": frozen["b_gain_t0"] >= MIN_GAIN_B,
        f"kv-frozen: A x {frozen['a_ratio_t0']}, at least {MIN_KEPT_A} is wanted": frozen["a_ratio_t0"] >= MIN_KEPT_A,
        f"kv-frozen: {frozen['seconds']} s, at most {MAX_SECONDS:g} are wanted": frozen["seconds"] <= MAX_SECONDS,
        f"fine-tuned: {result['fine_tuned_recovered']} won back, at least {MIN_RECOVERED} is wanted": (
            result["fine_tuned_recovered"] >= MIN_RECOVERED
        ),
    }
    return [text for text, is_reached in bars.items() if not is_reached] + others


def tell(what: str, figures: Document) -> None:
    """Print one line of progress."""
    print(f"{what}: {json.dumps(figures)}", file=sys.stderr, flush=True)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="a few minutes, to see that it works; the bars don't apply")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results; none in the short mode)")
    kinds = ["tiny", "sampled", *recalib_pair.KINDS]
    parser.add_argument("--only", nargs="+", choices=kinds, default=kinds, help="these parts")
    arguments = parser.parse_args()
    name = "-".join(["recalib", *(arguments.only if len(arguments.only) < len(kinds) else ())])
    plan = SHORT if arguments.short else Plan()
    result: Document = run(plan) if "tiny" in arguments.only else {}
    if "sampled" in arguments.only:
        with tempfile.TemporaryDirectory(prefix="honed-recalib-") as folder:
            result["sampled"] = on_sampled_traffic(Path(folder), plan)
    result["pairs"] = {
        kind: recalib_pair.run(kind, is_short=arguments.short) for kind in recalib_pair.KINDS if kind in arguments.only
    }
    result |= {"hardware": hardware(), "commit": commit(), "unix_s": round(time.time())}
    out = arguments.out or (None if arguments.short else RESULTS / f"{name}-{time.strftime('%Y-%m-%d')}.json")
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    failures = [] if arguments.short else missed(result)
    for text in failures:
        print(f"recalib: {text}", file=sys.stderr)
    print(json.dumps(result), flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
