"""Time that honed adds to vLLM's engine thread in a step, at 1, 16, 64 and 256 requests: to log it, to decide, to apply.

Two vLLM schedulers, one with honed attached and one without, take turns on the same simulated requests, step by step. Only the
model is missing: the simulation draws which drafts are accepted, and sleeps for as long as a step takes. Meanwhile the
publisher's thread works as beside a real model (there is no daemon to send to). Garbage collection is as in vLLM's engine core,
which freezes all objects after its start. K = 15, drafted by "ngram", which needs no model.

- log: recording the step's verify rounds and handing the step over; learn: the decider's processing of them
- decide: choosing the draft length of every request, under the policy `goodput`
- apply: cutting the drafts to the chosen lengths: `update_draft_token_ids`, less its time without honed (median)
- added: all of `schedule`, `update_from_output` and `update_draft_token_ids` under the policy `static` (so that both schedulers
  do the same), less the same without honed, step by step; and the number of added Python objects
- plain: the same without honed; machines and their days differ by more than a factor of 2, added / plain by less

Each batch size starts with new schedulers, after a quarter as many uncounted steps. The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.decide import policy
from benchmarks.server.measured import commit, hardware
from benchmarks.server.processes import ROOT
from benchmarks.server.vllm_server import IN_PROCESS, TARGET, check_pair
from honed.adapt.protocol.wire import Policy

K = 15
BATCHES = (1, 16, 64, 256)
PROMPT_TOKENS, MOST_TOKENS, BLOCK_SIZE = 64, 320, 16
Floats: TypeAlias = npt.NDArray[np.float64]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="steps measured for each batch size and policy")
    parser.add_argument("--model-ms", type=float, default=3.0, help="how long the model takes in a step")
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file")
    arguments = parser.parse_args()
    check_pair()
    prepare()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="honed-bench-") as folder:
        os.environ["HONED_RUNTIME_DIR"] = folder
        for batch in BATCHES:
            row = rows[str(batch)] = measure(batch, arguments.steps, arguments.model_ms / 1e3)
            print(f"{batch:4d} requests: " + ", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    result = {
        "log_us_p99": {batch: row["log_us"][1] for batch, row in rows.items()},
        "decide_us_p99": {batch: row["decide_us"][1] for batch, row in rows.items()},
        "apply_us_p99": {batch: row["apply_us"][1] for batch, row in rows.items()},
        "added_us_p50": {batch: row["added_us"][0] for batch, row in rows.items()},
        "added_to_plain": {batch: round(row["added_us"][0] / row["plain_us"][0], 3) for batch, row in rows.items()},
        "added_objects": {batch: row["added_objects"] for batch, row in rows.items()},
        "rows": rows,
        "plan": {"steps": arguments.steps, "model_ms": arguments.model_ms, "k": K},
        "hardware": hardware(),
        "commit": commit(),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    shown = ("log_us_p99", "decide_us_p99", "apply_us_p99", "added_us_p50", "added_to_plain", "added_objects")
    print(json.dumps({name: result[name] for name in shown}))
    return 0


def prepare() -> None:
    """Set the environment that vLLM reads at its first import."""
    os.environ.update(IN_PROCESS)


class Engine:
    """A vLLM scheduler, and a simulated model that accepts drafts at random: equal results for equal seeds."""

    def __init__(self, batch: int, *, is_attached: bool, seed: int = 0) -> None:
        import torch
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        from honed.attach.scheduler import make_scheduler

        num_blocks = batch * (MOST_TOKENS + PROMPT_TOKENS + 2 * K) // BLOCK_SIZE + batch + 64
        config = EngineArgs(
            str(ROOT / TARGET),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=batch,
            enforce_eager=True,
            enable_prefix_caching=False,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            speculative_config={"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 4},
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = num_blocks
        spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=64, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
        self.scheduler: Any = (make_scheduler if is_attached else Scheduler)(
            vllm_config=config,
            kv_cache_config=cache,
            structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_SIZE,
            log_stats=True,
        )
        self.honed: Any = getattr(self.scheduler, "_honed", None)
        if is_attached and self.honed is None:
            raise RuntimeError("honed did not attach: see vLLM's log above")
        self._rng = np.random.default_rng(seed)
        self._batch, self._next = batch, 0
        self._chances: dict[str, float] = {}
        self._output: Any = None

    def admit(self) -> None:
        """Fill the batch with new requests."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        while len(self.scheduler.requests) < self._batch:
            name = f"cmpl-{self._next:032x}-0"
            self._chances[name] = float(self._rng.beta(4, 3))
            tokens = int(self._rng.integers(MOST_TOKENS // 4, MOST_TOKENS))
            workload = ("chat", "code", "default")[self._next % 3]
            params = SamplingParams(
                max_tokens=tokens, ignore_eos=True, temperature=0.0, extra_args={"honed_workload": workload}
            )
            self.scheduler.add_request(Request(name, [1] * PROMPT_TOKENS, params, None))
            self._next += 1

    def schedule(self) -> int:
        """Schedule a step; return its nanoseconds."""
        began = time.perf_counter_ns()
        self._output = self.scheduler.schedule()
        return time.perf_counter_ns() - began

    def update(self) -> tuple[int, int]:
        """Update; return nanoseconds for (the step's results, its drafts)."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        output = self._output
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for name in ids:
            drafts = len(output.scheduled_spec_decode_tokens.get(name, ()))
            request = self.scheduler.requests[name]
            is_whole = request.num_computed_tokens >= request.num_tokens
            accepted = min(int(self._rng.geometric(1.0 - self._chances[name])) - 1, drafts)
            sampled.append([2] * (accepted + 1) if is_whole else [])
        runner_output = ModelRunnerOutput(ids, {name: i for i, name in enumerate(ids)}, sampled)
        began = time.perf_counter_ns()
        self.scheduler.update_from_output(output, runner_output)
        updated = time.perf_counter_ns()
        drafts = DraftTokenIds(ids, [[3] * K for _ in ids])
        begun = time.perf_counter_ns()
        self.scheduler.update_draft_token_ids(drafts)
        return updated - began, time.perf_counter_ns() - begun


@dataclass(frozen=True)
class Seen:
    """Times of steps on both schedulers, one row a step, columns (plain, attached)."""

    whole_ns: Floats
    drafts_ns: Floats
    """The part of it for taking in the drafts."""
    objects: Floats
    """Increase of Python objects over the step."""

    def added_ns(self) -> Floats:
        """The attached scheduler's time less the other's, step by step."""
        return self.whole_ns[:, 1] - self.whole_ns[:, 0]


def measure(batch: int, steps: int, model_s: float) -> dict[str, Any]:
    """Measure (p50, p99) in microseconds of each part."""
    plain, attached = Engine(batch, is_attached=False), Engine(batch, is_attached=True)
    try:
        static = Policy(generation=1, ttl_s=1e9, kind="static", static_k=K, max_k=K)
        same = run(plain, attached, steps, model_s, static)
        parts = watch(attached.honed)
        free = run(plain, attached, steps, model_s, policy(np.random.default_rng(1), 2, ()))
    finally:
        attached.scheduler.shutdown()
        plain.scheduler.shutdown()
    timed = {name: np.array(values[-steps:], dtype=float) for name, values in parts.items()}
    timed["apply"] = free.drafts_ns[:, 1] - np.median(free.drafts_ns[:, 0])
    timed["added"], timed["plain"] = same.added_ns(), same.whole_ns[:, 0]
    objects = float(np.median(same.objects[:, 1] - same.objects[:, 0]))
    return {f"{name}_us": quantiles_us(values) for name, values in timed.items()} | {"added_objects": round(objects)}


def run(plain: Engine, attached: Engine, steps: int, model_s: float, rule: Policy) -> Seen:
    """Step both in turn, under a policy for the attached one."""
    attached.honed._on_policy(rule)
    times, objects = np.zeros((2, steps, 2)), np.zeros((steps, 2))
    gc.collect()
    gc.freeze()
    for number in range(-(steps // 4), steps):
        for side, engine in enumerate((plain, attached)):
            engine.admit()
            before = sys.getallocatedblocks()
            scheduling = engine.schedule()
            time.sleep(model_s)
            update, drafts = engine.update()
            if number >= 0:
                times[:, number, side] = scheduling + update + drafts, drafts
                objects[number, side] = sys.getallocatedblocks() - before
    return Seen(times[0], times[1], objects)


def watch(honed: Any) -> dict[str, list[int]]:
    """Record nanoseconds of each part, step by step, from here on; as the attachment times them for its status."""
    parts: dict[str, list[int]] = {"log": [], "decide": [], "learn": []}

    def decided(duration_ns: int) -> None:
        parts["decide"].append(honed._decide_ns)
        parts["learn"].append(duration_ns - honed._decide_ns)

    honed.log_latency.record, honed.decide_latency.record = parts["log"].append, decided
    return parts


def quantiles_us(values_ns: Floats) -> tuple[float, float]:
    """(p50, p99) of durations."""
    p50, p99 = np.quantile(values_ns, (0.5, 0.99)) / 1e3
    return round(float(p50), 1), round(float(p99), 1)


if __name__ == "__main__":
    sys.exit(main())
