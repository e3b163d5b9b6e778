"""One recalibration of one trained pair of another kind, in a process of its own: the last line is JSON.

    python -m benchmarks.server.recalib_pair sliding --pairs build/pairs

B and A after / before at temperature 0, as `benchmarks.recalib` measures the tiny pair. DFlash2 runs on vLLM's V2 model
runner: on a CPU under Triton's interpreter, so with fewer prompts. On a CPU a hybrid runs in bfloat16 only.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.server.processes import ROOT

Document = dict[str, Any]

PAIRS = ROOT / "build" / "pairs"
MIN_GAIN_B, MIN_KEPT_A = 1.25, 0.97


@dataclass(frozen=True)
class Pair:
    """How a pair is run."""

    is_v2: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of `Engine`, and of vLLM's."""
    plan: dict[str, int] = field(default_factory=dict)
    """Fields of `Plan` that differ from the tiny pair's."""
    has_full: bool = False
    """Whether scope full is measured, too."""


KINDS = {
    "sliding": Pair(),
    "eagle3": Pair(options={"method": "eagle3", "num_draft_tokens": 5}, has_full=True),
    "mtp": Pair(options={"method": "mtp", "num_draft_tokens": 3}, has_full=True),
    "dflash2": Pair(is_v2=True, plan={"heldout": 24, "traffic_a": 64, "traffic_b": 128}),
    "hybrid": Pair(options={"dtype": "bfloat16", "language_model_only": True}, plan={"steps": 4000}),  # as many as by default
}


def measure(kind: str, folder: Path, is_short: bool) -> Document:
    """Measure one pair in this process."""
    pair = KINDS[kind]
    if pair.is_v2 and not torch.cuda.is_available():
        from tests.e2e import triton_on_cpu

        triton_on_cpu.install()
    from benchmarks.server.recalib_engine import Engine, read_prompts
    from benchmarks.server.recalib_site import Plan, Site, compare

    settings: dict[str, Any] = dict(pair.plan)
    if is_short:
        settings |= {"heldout": 8, "traffic_a": 32, "traffic_b": 48, "steps": 100}
    plan = Plan(**settings)
    own = folder / "target"
    target, drafter = own if own.exists() else ROOT / "benchmarks" / "tiny" / "target", folder / "drafter"
    held = {w: read_prompts(folder / f"prompts_{w}.jsonl", plan.heldout) for w in "ab"}
    with (
        tempfile.TemporaryDirectory(prefix="honed-recalib-") as scratch,
        Engine(Path(scratch) / "run", target, drafter, **pair.options) as engine,
    ):
        site = Site(Path(scratch), engine, plan, drafter)
        before = {w: engine.measure(held[w]) for w in "ab"}
        for w, amount in (("a", plan.traffic_a), ("b", plan.traffic_b)):
            site.play(w, read_prompts(folder / f"traffic_{w}.jsonl", amount))
        details: Document = {}
        for scope in ("kv-frozen", *["full"] * pair.has_full):
            told = site.recalibrate("b", scope)
            details[scope] = told | {w: compare(before[w], engine.measure(held[w])) for w in "ab"}
            site.swap_back()
    figures = {scope: _figures(found) for scope, found in details.items()}
    return figures.pop("kv-frozen") | figures | {"details": details | {"plan": asdict(plan)}}


def _figures(found: Document) -> Document:
    return {
        "b_gain_t0": found["b"]["ratio"],
        "a_ratio_t0": found["a"]["ratio"],
        "seconds": found["seconds"],
        "tokens": found["tokens"],
    }


def run(kind: str, pairs: Path = PAIRS, *, is_short: bool = False) -> Document:
    """Measure one pair in a process of its own; make it first if it isn't there (minutes; hybrid: most of an hour)."""
    if not (pairs / kind / "drafter" / "model.safetensors").exists():
        make = [
            sys.executable,
            "-m",
            "benchmarks.make_pairs",
            kind,
            "--work",
            str(pairs / "sources"),
            "--out",
            str(pairs),
        ]
        subprocess.run(make, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=True)
    environment = os.environ | {"PYTHONPATH": path_with_torchvision()}
    command = [sys.executable, "-m", "benchmarks.server.recalib_pair", kind, "--pairs", str(pairs), *["--short"] * is_short]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True)
    found: Document = json.loads(done.stdout.splitlines()[-1])
    return found


def path_with_torchvision() -> str:
    """Return a PYTHONPATH for vLLM's CPU build that also loads models which take images, such as Qwen3.5."""
    paths = [ROOT / "tests" / "zoo" / "site", ROOT / "build" / "zoo", ROOT, *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.pathsep.join(map(str, paths))


def missed(pairs: dict[str, Document]) -> list[str]:
    """List the bars that these results don't reach."""
    bars = {}
    for name, found in pairs.items():
        bars[f"{name}: B x {found['b_gain_t0']}, at least {MIN_GAIN_B} is wanted"] = found["b_gain_t0"] >= MIN_GAIN_B
        bars[f"{name}: A x {found['a_ratio_t0']}, at least {MIN_KEPT_A} is wanted"] = found["a_ratio_t0"] >= MIN_KEPT_A
    return [text for text, is_reached in bars.items() if not is_reached]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=list(KINDS))
    parser.add_argument("--pairs", type=Path, default=PAIRS, help="folder of the pairs")
    parser.add_argument("--short", action="store_true", help="to see that it works; the figures mean little")
    given = parser.parse_args()
    print(json.dumps(measure(given.kind, given.pairs / given.kind, given.short)), flush=True)
    os._exit(0)  # vLLM's threads may hold the process up


if __name__ == "__main__":
    main()
