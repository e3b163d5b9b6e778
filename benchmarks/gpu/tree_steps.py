"""Measures what a step of draft trees costs at the size of Qwen3-8B, and how much a tree has to accept to pay.

vLLM runs a target of that shape with random weights, as `server_sizes` does: with slots for trees, its V2 runner, its scheduler
a step ahead, and CUDA graphs for 0 and 15 drafts. Requests of one context are served at once. While they decode, the policy
changes from no drafts to the drafter's chain of 15, to 4 tokens of it and to trees, in turn, several times. Almost no draft is
accepted, but a step takes the same time. 4 drafts have no full graph, as on any server that captured none for them: whether
they are faster than 15 tells where `controller.equal_lengths = "never"` pays.

    steps     milliseconds of a decode step by batch size, context and what is verified: median and range of the turns' medians
    pays      tokens that a tree has to emit for each of the chain's, and for each of a step without drafts, to be as fast
    gains     tokens a second of a tree over the chain, if it accepts as published: see `PUBLISHED`

    python -m benchmarks.gpu.tree_steps                       # a GPU with 140 GB
    python -m benchmarks.gpu.tree_steps --shape small         # a CPU: tries the benchmark itself

The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.kept import Kept
from benchmarks.server import shapes
from benchmarks.server.measured import commit, hardware
from benchmarks.server.vllm_server import IN_PROCESS

CHAIN, SHORT_CHAIN, SLOTS = 15, 4, 63
NODES = (15, 31, 63)
BATCHES, CONTEXTS = (1, 8, 32, 64), (1024, 8192)
PUBLISHED = {"chain": (6.5, 7.8), "tree": (9.5, 10.7)}
"""Tokens a step on Qwen3-8B at batch 1, least and most of several tasks: DFlash's chain, and DDTree's trees on it."""
SETTLING_STEPS, COUNTED_STEPS = 5, 12
Document = dict[str, Any]


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="qwen3-8b", help="of the target that is served")
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help="requests at once")
    parser.add_argument("--contexts", type=int, nargs="*", default=CONTEXTS, help="tokens of a request's prompt")
    parser.add_argument("--turns", type=int, default=3, help="of each kind of step, at each batch size and context")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs, as trees are switched on by default")
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file, after each batch size")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = {name: value for name, value in vars(arguments).items() if name != "out"}
    kept = Kept(arguments.out, {"plan": plan, "hardware": hardware(), "commit": commit(), "torch": torch.__version__})
    kept.update(device=torch.cuda.get_device_name() if device.type == "cuda" else "cpu", steps={}, pays={}, gains={})
    folder = Path(tempfile.mkdtemp(prefix="honed-trees-"))
    try:
        target = shapes.write_target(folder / "target", arguments.shape)
        drafter = shapes.write_drafter(folder / "drafter", arguments.shape, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        began_s = time.perf_counter()
        engine = Engine(folder, target, drafter, max(arguments.batches), max(arguments.contexts), arguments.eager)
        kept.update(seconds_to_start=round(time.perf_counter() - began_s, 1), engine=engine.about())
        for context in arguments.contexts:
            for batch in arguments.batches:
                key, seen = f"{batch} x {context}", engine.measure(batch, context, arguments.turns)
                steps, pays = {name: spread(values) for name, values in seen.items()}, break_even(seen)
                kept.update(
                    steps={**kept.document["steps"], key: steps},
                    pays={**kept.document["pays"], key: pays},
                    gains={**kept.document["gains"], key: gains(seen)},
                )
                print(f"{key}: {json.dumps(steps)} {json.dumps(pays)}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    kept.update(ok=True, when=time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    print(json.dumps({name: kept.document[name] for name in ("device", "steps", "pays", "gains")}), flush=True)
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads needn't end first


class Engine:
    """vLLM in this process, with honed attached."""

    def __init__(
        self, folder: Path, target: Path, drafter: Path, most_requests: int, most_context: int, is_eager: bool
    ) -> None:
        is_small, graphs = not torch.cuda.is_available(), () if is_eager else (0, CHAIN)
        from honed.daemon.install.vllm_args import make

        given = make(
            folder, drafter=str(drafter), tree_slots=SLOTS, graphs=() if is_small else graphs, max_num_seqs=most_requests
        )
        speculative = json.loads(given.flags[given.flags.index("--speculative-config") + 1])
        speculative["draft_load_config"] = {"load_format": "auto"}  # vLLM builds its fused projection when it loads weights
        os.environ.update(IN_PROCESS | given.environment)
        most_tokens = most_context + 512
        options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True}
        if not is_small:
            os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
            cache_bytes = int(1.1 * most_requests * most_tokens * _cache_bytes_of_token(target))
            options = {"dtype": "bfloat16", "enforce_eager": is_eager, "kv_cache_memory_bytes": cache_bytes}
            options["max_num_batched_tokens"] = max(8192, 2 * most_requests * (SLOTS + 1))
        from vllm import LLM

        from honed.attach.plugin import register

        register()
        llm = LLM(
            str(target),
            skip_tokenizer_init=True,
            load_format="dummy",
            max_model_len=most_tokens,
            max_num_seqs=most_requests,
            enable_prefix_caching=False,
            scheduler_cls="honed.attach.scheduler.make_scheduler",
            worker_extension_cls="honed.attach.worker.HonedWorkerExtension",
            speculative_config=speculative,
            **options,
        )
        self._engine, self._core = llm.llm_engine, llm.llm_engine.engine_core.engine_core
        self._honed: Any = self._core.scheduler._honed
        self._vocab, self._number, self._generation = int(self._engine.model_config.get_vocab_size()), 0, 0
        self._has_trees = True
        self._honed.before_schedule()
        self._choose_side()
        worker = self._core.model_executor.driver_worker
        trees = getattr(worker, "worker", worker)._honed_trees
        if trees is None:
            raise RuntimeError(f"this engine verifies no trees: {self.about()['limits']}")
        while not trees._warm_up.is_over:
            time.sleep(0.1)
        self._num_tree_steps, place = 0, trees._place

        def counted(*given: Any) -> Any:
            step = place(*given)
            self._num_tree_steps += step is not None
            return step

        trees._place = counted

    def about(self) -> Document:
        """honed's description of the engine."""
        hello = self._honed._hello()
        return {name: getattr(hello, name) for name in ("vllm_version", "runner", "capabilities", "limits", "captured_lengths")}

    def measure(self, batch: int, context: int, turns: int) -> dict[str, list[float]]:
        """Serve so many requests at once; medians in ms of a decode step, of each turn, by what is verified."""
        from vllm import SamplingParams

        params = SamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True, detokenize=False)
        self._verify(0, False)
        names = []
        for _ in range(batch):
            names.append(str(self._number))
            prompt = [(7 * self._number + 31 * i) % (self._vocab - 8) for i in range(context)]
            self._engine.add_request(names[-1], {"prompt_token_ids": prompt}, params)
            self._number += 1
        started: set[str] = set()
        while len(started) < batch:
            started |= {out.request_id for out in self._engine.step() if out.outputs[0].token_ids}
        chains = [("none", 0, False), ("chain", CHAIN, False), (f"{SHORT_CHAIN} drafts", SHORT_CHAIN, False)]
        kinds = [*chains, *((f"{nodes} nodes", nodes, True) for nodes in NODES)]
        found: dict[str, list[float]] = {name: [] for name, _, _ in kinds}
        for turn in range(turns):
            for name, length, has_trees in kinds[turn % len(kinds) :] + kinds[: turn % len(kinds)]:
                self._verify(length, has_trees)
                for _ in range(SETTLING_STEPS):
                    self._engine.step()
                before = self._num_tree_steps
                found[name].append(1e3 * statistics.median(self._timed() for _ in range(COUNTED_STEPS)))
                if self._num_tree_steps - before != COUNTED_STEPS * has_trees:
                    raise RuntimeError(f"{self._num_tree_steps - before} of {COUNTED_STEPS} steps with {name} verified trees")
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests() or self._core.batch_queue:
            self._engine.step()
        return found

    def _timed(self) -> float:
        began_s = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - began_s

    def _verify(self, length: int, has_trees: bool) -> None:
        """Put a static policy in force."""
        from honed.adapt.protocol.wire import Policy

        self._has_trees, self._generation = has_trees, self._generation + 1
        policy = Policy(generation=self._generation, ttl_s=1e9, kind="static", static_k=length, max_k=SLOTS, equal_lengths=True)
        self._honed._on_policy(policy)
        self._honed.before_schedule()

    def _choose_side(self) -> None:
        """Let `_has_trees` decide between chains and trees: a static policy alone gives trees."""
        decider = self._honed._decider
        decide = decider.decide
        decider.decide = lambda *given, **more: decide(*given, **more)._replace(has_trees=self._has_trees)


def _cache_bytes_of_token(target: Path) -> int:
    config = json.loads((target / "config.json").read_text())
    layers = int(config["num_hidden_layers"]) + 5  # the drafter's
    return 2 * 2 * layers * int(config["num_key_value_heads"]) * int(config["head_dim"])


def spread(values: Sequence[float]) -> list[float]:
    """Median, least and most."""
    return [round(value, 3) for value in (statistics.median(values), min(values), max(values))]


def break_even(seen: dict[str, list[float]]) -> Document:
    """A tree's step over the chain's, and over a step without drafts: what it has to emit for each of their tokens."""
    found: Document = {}
    for name, values in seen.items():
        if name.endswith("nodes"):
            pairs = {f"over_{other}": [a / b for a, b in zip(values, seen[other], strict=True)] for other in ("chain", "none")}
            found[name] = {other: spread(ratios) for other, ratios in pairs.items()}
    return found


def gains(seen: dict[str, list[float]]) -> Document:
    """Speed of the largest tree over the chain, if both accept as published."""
    largest = f"{max(NODES)} nodes"
    costs = statistics.median(a / b for a, b in zip(seen[largest], seen["chain"], strict=True))
    ratios = [tree / chain for tree, chain in zip(PUBLISHED["tree"], PUBLISHED["chain"], strict=True)]
    return {largest: [round(ratio / costs, 3) for ratio in ratios]}


if __name__ == "__main__":
    sys.exit(main())
