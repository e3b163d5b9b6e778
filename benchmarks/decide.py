"""Time of the engine's thread for deciding a step, and for learning from it, at 16, 64 and 256 requests.

It measures `honed.adapt`'s decider alone: K = 15, three workloads, requests that come and go, a new policy every 200 steps,
rounds drawn from known acceptance. Each batch size has two figures. One has warm caches, call after call. For the other 64 MiB
are read before each call, which is nearer to an engine between two steps. Garbage collection is as in vLLM's engine core, which
freezes all objects after its start. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.server.measured import commit, hardware
from honed.adapt.lengths.decider import Decider
from honed.adapt.protocol.wire import Policy, WorkloadPrior
from honed.adapt.steps.step_time import StepTimeModel

K = 15
BATCHES = (16, 64, 256)
STEPS_PER_POLICY = 200
MODEL = StepTimeModel.of(
    base=5e-3,
    per_request=1e-5,
    per_token=2e-6,
    per_token_above_1024=5e-6,
    per_context_token=1e-8,
    per_prefill_token=2e-5,
    drafting=5e-4,
)
"""A memory-bound target up to 1,024 tokens, more expensive above, so that at 256 requests there is a budget to share; the
drafter always drafts K, as on CUDA."""
LEAST_DRAFTS = 1.0
"""Minimum per request and step: with fewer there would be almost nothing to decide and to learn."""
SHIFT = [0.5, 0.5, 0.6, 0.7, 0.8, 1.0, 1.3, 1.7, 2.0, 2.5, 3.0]
"""With --contexts: factors on the failure odds by context length; contexts range from 64 to 16,384 tokens."""
THRASH_BYTES = 64 << 20


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="steps measured for each batch size, after as many / 4")
    parser.add_argument("--contexts", action="store_true", help="acceptance depends on the length of the context")
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file")
    arguments = parser.parse_args()
    shift = SHIFT if arguments.contexts else []
    rows: dict[str, dict[str, Any]] = {}
    for batch in BATCHES:
        rows[str(batch)] = {"warm": measure(batch, arguments.steps, is_cold=False, shift=shift)}
        rows[str(batch)]["cold"] = measure(batch, max(arguments.steps // 8, 1), is_cold=True, shift=shift)
        for name, row in rows[str(batch)].items():
            spans = (
                f"{part} p50 {row[f'{part}_us'][0]:.0f} us, p99 {row[f'{part}_us'][1]:.0f} us" for part in ("decide", "learn")
            )
            print(f"{batch:4d} requests, {name}: {'; '.join(spans)}; {row['drafts']:.1f} drafts each", flush=True)
    result = {
        "p99_us": {batch: row["warm"]["decide_us"][1] for batch, row in rows.items()},
        "p99_us_cold": {batch: row["cold"]["decide_us"][1] for batch, row in rows.items()},
        "peak_mb": peak_mb(max(BATCHES)),
        "rows": rows,
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: result[name] for name in ("p99_us", "p99_us_cold", "peak_mb")}))
    return 0


class Engine:
    """A decider with a full batch of simulated requests."""

    def __init__(self, batch: int, seed: int = 0, shift: Sequence[float] = ()) -> None:
        self.decider = Decider(K, batch)
        self._rng = np.random.default_rng(seed)
        self._policies = [policy(self._rng, generation, shift) for generation in range(8)]
        self._contexts = [64 << (index % 9) for index in range(batch)] if shift else None
        self._steps = 0
        self.num_drafts = 0.0
        """Per request, over all steps."""
        self._next = 0
        self.ids: list[str] = []
        self._chances: list[float] = []
        for _ in range(batch):
            self._admit()

    def _admit(self) -> None:
        workload = ("chat", "code", "default")[self._next % 3]
        self.ids.append(f"cmpl-{self._next:032x}-0")
        self._chances.append(float(self._rng.beta(8, 3) if workload == "code" else self._rng.beta(3, 4)))
        self.decider.start(self.ids[-1], workload)
        self._next += 1

    def turn(self) -> tuple[int, int]:
        """Run one step; return nanoseconds to (decide, learn)."""
        if self._steps % STEPS_PER_POLICY == 0:
            tables = self.decider.tabulate(self._policies[self._steps // STEPS_PER_POLICY % len(self._policies)], 0.0)
            self.decider.use(tables)
        self._steps += 1
        for _ in range(int(self._rng.poisson(0.02 * len(self.ids)))):  # requests of 50 steps end, others begin
            self.decider.finish(self.ids.pop(0))
            self._chances.pop(0)
            self._admit()
        began = time.perf_counter_ns()
        lengths = self.decider.decide(self.ids, 500 * len(self.ids), 0, 0.0, self._contexts).num_draft_tokens
        decided = time.perf_counter_ns()
        self.num_drafts += sum(lengths) / len(lengths)
        run = self._rng.geometric(1.0 - np.clip(self._chances, 0.0, 0.98)) - 1
        accepted = np.minimum(run, lengths).tolist()
        begun = time.perf_counter_ns()
        self.decider.observe(self.ids, lengths, accepted)
        return decided - began, time.perf_counter_ns() - begun


def measure(batch: int, steps: int, *, is_cold: bool, shift: Sequence[float] = ()) -> dict[str, Any]:
    """(p50, p99) in microseconds to decide and to learn, and the drafts per request and step."""
    engine = Engine(batch, shift=shift)
    thrash = np.ones(THRASH_BYTES // 8)
    taken = np.zeros((steps, 2))
    for _ in range(steps // 4):
        engine.turn()
    gc.collect()
    gc.freeze()
    for step in range(steps):
        if is_cold:
            thrash.sum()
        taken[step] = engine.turn()
    decide, learn = np.quantile(taken, (0.5, 0.99), axis=0).T / 1e3
    drafts = engine.num_drafts / (steps + steps // 4)
    if drafts < LEAST_DRAFTS:
        raise RuntimeError(f"{drafts:.2f} drafts per request at a batch of {batch}: most decisions are not to draft")
    return {
        "decide_us": (round(decide[0], 1), round(decide[1], 1)),
        "learn_us": (round(learn[0], 1), round(learn[1], 1)),
        "drafts": round(drafts, 2),
    }


def peak_mb(batch: int, steps: int = 400) -> float:
    """Peak memory of a decider and its policies, in MiB."""
    tracemalloc.start()
    engine = Engine(batch)
    for _ in range(steps):
        engine.turn()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return round(peak / 2**20, 2)


def policy(rng: np.random.Generator, generation: int, shift: Sequence[float]) -> Policy:
    """Make a goodput policy for three workloads, with a separate price for every kind of step."""
    priors = [
        WorkloadPrior(
            workload=name,
            acceptance=np.clip(rng.normal(mean, 0.02, K), 0.05, 0.95).tolist(),
            strength=8.0,
            context_shift=list(shift),
        )
        for name, mean in (("", 0.6), ("chat", 0.55), ("code", 0.8))
    ]
    return Policy(
        generation=generation,
        ttl_s=1e9,
        kind="goodput",
        static_k=K,
        max_k=K,
        priors=priors,
        step_seconds=list(MODEL.parameters),
        captured_tokens=[*range(8, 512, 8), *range(512, 4097, 16)],
        kind_effects=[(batch, k, float(rng.normal(0.0, 0.02))) for batch in range(33) for k in range(K + 1)],
    )


if __name__ == "__main__":
    sys.exit(main())
