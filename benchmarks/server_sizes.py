"""honed at a server's sizes, on one GPU: its cost to vLLM in a step, a swap's duration, and how training shares the device.

vLLM runs a target of Qwen3-8B's shape with CUDA graphs, its V2 runner and its scheduler a step ahead, speculating with a DFlash
drafter of the published shape. Weights are random, since nothing can be downloaded: almost no draft is accepted, but a step
takes the same time. Two engines do the same work in turn, one of them with honed attached; the policy is a static length, so
that both do the same.

    steps     milliseconds of a decode step with honed / without, by batch size; capturing no request, or every one
    swap      time for which copying the drafter's weights held the engine's thread, beside the device's best time for as many
              bytes (`copy_`, bytes read and written)
    train     training tokens a second, peak memory beside the estimate, time for which a unit of work holds the device
    yield     bursts of requests with the trainer at work between them and without: gaps between a burst's tokens, and the
              trainer's delay in stopping after the engine's busy flag was raised

    python -m benchmarks.server_sizes                      # a GPU of 80 GB or more
    python -m benchmarks.server_sizes --shape small        # a CPU: tries the benchmark itself

The last line of stdout is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernels.timing import measure_ceilings
from benchmarks.server import shapes
from benchmarks.server.measured import commit, hardware, percentile
from benchmarks.server.vllm_server import IN_PROCESS

K = 15
PROMPT_TOKENS, TOKENS = 128, 96
BATCHES, MOST_SEQS = (1, 16, 64), 64
SWAPS = 4
BURST_SIZE, BURST_TOKENS, REST_S = 8, 48, 0.7
TRAIN_UPDATES, ROWS = 12, 256


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes.SHAPES, default="qwen3-8b", help="of the target that is served")
    parser.add_argument("--also-train", choices=shapes.SHAPES, nargs="*", default=["qwen3-32b"])
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES, help=f"requests at once, up to {MOST_SEQS}")
    parser.add_argument("--rounds", type=int, default=4, help="turns of either engine at each batch size")
    parser.add_argument("--bursts", type=int, default=12, help="with training, and as many without")
    parser.add_argument("--updates", type=int, default=TRAIN_UPDATES, help="that the trainer is timed over")
    parser.add_argument("--attention", default="", help="vLLM's attention backend; its own choice by default")
    parser.add_argument("--out", type=Path, default=None, help="also write the result to this file, after each part")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    result: dict[str, Any] = {
        "shape": arguments.shape,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "hardware": hardware(),
        "commit": commit(),
        "plan": {"batches": list(arguments.batches), "rounds": arguments.rounds, "bursts": arguments.bursts},
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }

    def keep(**parts: Any) -> None:
        result.update(parts)
        print(json.dumps(parts), flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result, indent=2) + "\n")

    folder = Path(tempfile.mkdtemp(prefix="honed-sizes-"))
    try:
        target = shapes.write_target(folder / "target", arguments.shape)
        drafters = [shapes.write_drafter(folder / f"drafter-{n}", arguments.shape, device, n) for n in range(2)]
        keep(copy_bytes_per_s=measure_ceilings(device, 10).bytes_per_s)
        torch.cuda.empty_cache()
        about = {"target": target, "drafter": drafters[0], "attention": arguments.attention, "is_small": device.type == "cpu"}
        with contextlib.ExitStack() as stack:
            work = {"runtime_dir": folder, "updates": arguments.updates}
            trainer = stack.enter_context(child(train, work | {"shape": arguments.shape}))  # compiles meanwhile
            with child(play_engine, about | {"runtime_dir": None}) as plain:
                honed = stack.enter_context(child(play_engine, about | {"runtime_dir": folder}))
                keep(engine={"plain": plain.recv(), "honed": honed.recv()}, trainer_warm_up_s=trainer.recv())
                keep(steps=measure_steps(plain, honed, arguments.batches, arguments.rounds))
            keep(swap=measure_swaps(honed, drafters, result["copy_bytes_per_s"]))
            keep(train={arguments.shape: ask(trainer, "go")})
            keep(**{"yield": measure_bursts(honed, trainer, arguments.bursts)})
        for shape in arguments.also_train:
            with child(train, work | {"shape": shape}) as trainer:
                trainer.recv()
                keep(train=result["train"] | {shape: ask(trainer, "go")})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({name: result[name] for name in ("device", "shape", "steps", "swap", "train", "yield")}))
    return 0


@contextlib.contextmanager
def child(work: Any, about: dict[str, Any]) -> Iterator[Connection]:
    """Start a spawned process that ends when its connection does."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=guarded, args=(work, theirs, about), daemon=False)
    process.start()
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        process.join(30)
        if process.is_alive():
            process.terminate()
            process.join()


def guarded(work: Any, connection: Connection, about: dict[str, Any]) -> None:
    """Run it; errors are printed, and the other side sees the connection end."""
    try:
        work(connection, **about)
    except (EOFError, BrokenPipeError):  # the other side is done
        pass
    except BaseException:
        traceback.print_exc()
    connection.close()
    sys.stdout.flush()
    os._exit(0)  # vLLM's and NCCL's threads needn't end first


def ask(connection: Connection, *words: Any) -> Any:
    """Send a process a command; return its answer."""
    connection.send(words)
    return connection.recv()


def play_engine(
    connection: Connection, target: Path, drafter: Path, attention: str, is_small: bool, runtime_dir: Path | None
) -> None:
    """Run a process with vLLM that follows commands."""
    os.environ.update(IN_PROCESS)
    os.environ.pop("HONED_RUNTIME_DIR", None)
    if not is_small:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    options: dict[str, Any] = {}
    if runtime_dir is not None:
        os.environ["HONED_RUNTIME_DIR"] = str(runtime_dir)
        options["scheduler_cls"] = "honed.attach.scheduler.make_scheduler"
        options["worker_extension_cls"] = "honed.attach.worker.HonedWorkerExtension"
    from vllm import LLM

    if runtime_dir is not None:
        from honed.attach.engine import engine_hook

        engine_hook.install()
    if is_small:
        options |= {"dtype": "float32", "enforce_eager": True}
    else:
        sizes = [(K + 1) * n for n in (1, 2, 4, 8, 16, 32, 48, 64)]
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        options |= {"dtype": "bfloat16", "kv_cache_memory_bytes": 4 << 30, "compilation_config": graphs}
        options["gpu_memory_utilization"] = 0.3
        options |= {"attention_backend": attention} if attention else {}
    began_s = time.perf_counter()
    loaded = {"draft_load_config": {"load_format": "auto"}}  # vLLM builds its fused projection when it loads weights
    llm = LLM(
        str(target),
        skip_tokenizer_init=True,
        load_format="dummy",
        max_model_len=1024,
        max_num_seqs=MOST_SEQS,
        enable_prefix_caching=False,
        **options,
        speculative_config={"method": "dflash", "model": str(drafter), "num_speculative_tokens": K, **loaded},
    )
    side = Engine(llm)
    if runtime_dir is not None:
        side.attach()
    connection.send({"seconds_to_start": round(time.perf_counter() - began_s, 1)} | side.about())
    while True:
        name, *words = connection.recv()
        connection.send(getattr(side, name)(*words))


class Engine:
    """The commands of that process."""

    def __init__(self, llm: Any) -> None:
        self._llm_engine = llm.llm_engine
        self._core = llm.llm_engine.engine_core.engine_core
        self._honed = getattr(self._core.scheduler, "_honed", None)
        self._number, self._vocab = 0, int(llm.llm_engine.model_config.get_vocab_size())

    def attach(self) -> None:
        """Put a static policy in force."""
        from honed.adapt.protocol.wire import Policy

        if self._honed is None:
            raise RuntimeError("honed did not attach: see vLLM's log above")
        self._honed._on_policy(Policy(generation=1, ttl_s=1e9, kind="static", static_k=K, max_k=K))
        self._honed.before_schedule()

    def about(self) -> dict[str, Any]:
        """Return honed's description of the engine."""
        if self._honed is None:
            return {}
        hello = self._honed._hello()
        return {name: getattr(hello, name) for name in ("vllm_version", "runner", "capabilities", "limits", "captured_lengths")}

    def share(self, share: float) -> dict[str, float]:
        """Set the share of requests to capture from now on; return what was captured so far."""
        return dict(self._core.model_executor.collective_rpc("honed_capture", args=(share, "v-bench"))[0])

    def play(self, batch: int, num_tokens: int) -> dict[str, Any]:
        """Serve `batch` requests at once; milliseconds of each decode step, as the caller of `step` sees them.

        They are sampled, as most are in production: capturing such answers needs the target's most likely tokens, too.
        """
        from vllm import SamplingParams

        names, params = set(), SamplingParams(temperature=1.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        began_s = time.perf_counter()
        for _ in range(batch):
            name = str(self._number)
            prompt = [(7 * self._number + 31 * i) % (self._vocab - 8) for i in range(PROMPT_TOKENS)]
            self._llm_engine.add_request(name, {"prompt_token_ids": prompt}, params)
            names.add(name)
            self._number += 1
        started: set[str] = set()
        steps_ms, first_ms, emitted = [], [], 0
        while self._llm_engine.has_unfinished_requests():
            was_decoding, step_s = started == names, time.perf_counter()
            outputs = self._llm_engine.step()
            now_s = time.perf_counter()
            for out in outputs:
                if out.request_id not in started and out.outputs[0].token_ids:
                    first_ms.append(1e3 * (now_s - began_s))
                    started.add(out.request_id)
                if out.finished:
                    names.discard(out.request_id)
                    started.discard(out.request_id)
                    emitted += len(out.outputs[0].token_ids)
            if was_decoding and started == names and names:
                steps_ms.append(1e3 * (now_s - step_s))
        while self._core.batch_queue:
            self._llm_engine.step()
        return {"steps_ms": steps_ms, "first_ms": first_ms, "tokens": emitted}

    def swap(self, version: str, folder: str) -> dict[str, float]:
        """Swap to other weights; return the swap's figures."""
        import secrets

        from honed.adapt.protocol import wire

        results: list[Any] = []
        commands = self._honed.commands
        commands._report = results.append
        weights = wire.DrafterWeights(version=version, path=folder)
        began_s = time.perf_counter()
        commands.put(wire.SwapCommand(command_id=secrets.token_hex(8), weights=weights, drops_cache=False))
        while not results:
            if time.perf_counter() - began_s > 120:
                raise RuntimeError("the swap never ended")
            self._honed.before_schedule()
            time.sleep(0.001)
        if not results[0].ok:
            raise RuntimeError(f"the swap failed: {results[0].error}")
        return {**results[0].figures, "seconds": time.perf_counter() - began_s}

    def drafter_bytes(self) -> int:
        """Bytes of the drafter's own weights on the device."""
        worker = self._core.model_executor.driver_worker
        swapper = getattr(worker, "worker", worker)._honed_side.swapper
        return sum(live.numel() * live.element_size() for _, live, _ in swapper._live())


def measure_steps(plain: Connection, honed: Connection, batches: Sequence[int], rounds: int) -> dict[str, Any]:
    """By batch size, the median of a decode step; ratios within rounds in which all three had their turn."""
    found: dict[str, Any] = {}
    for batch in batches:
        ratios: dict[str, list[float]] = {"attached": [], "capturing": []}
        medians: dict[str, list[float]] = {"plain": [], "attached": [], "capturing": []}
        for number in range(rounds + 1):
            seen = {}
            for name in list(medians)[number % 3 :] + list(medians)[: number % 3]:
                if name == "plain":
                    seen[name] = ask(plain, "play", batch, TOKENS)
                    continue
                before = ask(honed, "share", float(name == "capturing"))
                seen[name] = ask(honed, "play", batch, TOKENS)
                time.sleep(0.2)  # captured rows are written meanwhile
                captured = ask(honed, "share", 0.0)["rows"] - before["rows"]
                if (captured > batch) != (name == "capturing"):  # an earlier request's last row comes with the next step
                    raise RuntimeError(f"{captured:g} rows were captured while {name}")
            if number == 0:
                continue  # warm-up
            for name, one in seen.items():
                medians[name].append(statistics.median(one["steps_ms"]))
            for name in ratios:
                ratios[name].append(medians[name][-1] / medians["plain"][-1])
        found[str(batch)] = {
            "step_ms": {name: round(statistics.median(values), 3) for name, values in medians.items()},
            "ratio": {name: spread(values, 4) for name, values in ratios.items()},
        }
        print(f"batch {batch}: {found[str(batch)]}", flush=True)
    return found


def measure_swaps(honed: Connection, drafters: Sequence[Path], bytes_per_s: float) -> dict[str, Any]:
    """Swap back and forth, with some tokens between two swaps."""
    ask(honed, "swap", "v-1", str(drafters[1]))  # makes what is made only once
    seen = []
    for number in range(SWAPS):
        ask(honed, "play", 4, 8)
        seen.append(ask(honed, "swap", f"v-{number % 2}", str(drafters[number % 2])))
    ask(honed, "play", 4, 8)  # lowers the busy flag, which a swap without requests leaves raised
    size = ask(honed, "drafter_bytes")
    names = [name for name in ("pause_ms", "copy_ms", "stage_ms", "seconds") if name in seen[0]]
    found: dict[str, Any] = {name: spread([one[name] for one in seen], 3) for name in names}
    return found | {"bytes": size, "limit_ms": round(2e3 * size / bytes_per_s, 3)}


def train(connection: Connection, shape: str, runtime_dir: Path, updates: int) -> None:
    """Train as the trainer does, from random samples; then, between bursts, while no engine has work."""
    from honed.recalib.config.memory import estimate
    from honed.recalib.process.busy_flags import BusyFlags
    from honed.recalib.samples.sample import TrainingSample
    from honed.recalib.training.micro_step import MicroTrainer, TrainingSettings
    from honed.recalib.training.pace import Pace
    from honed.recalib.training.precision import compute_dtype

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = TrainingSettings()
    shared = compute_dtype(device, settings.precision)
    drafter, parent = shapes.make_drafters(shape, device, shared, 2)
    config, parent = drafter.config, parent.requires_grad_(False)
    trainer, pace = MicroTrainer(drafter, settings, parent), Pace(0.05 if device.type == "cuda" else 0.0)
    generator = torch.Generator().manual_seed(1)

    def sample(number: int) -> TrainingSample:
        return TrainingSample(
            features=torch.randn(ROWS, config.hidden_size, generator=generator, dtype=torch.float32).to(torch.bfloat16),
            token_ids=torch.randint(config.vocab_size - 1, (ROWS,), generator=generator),
            positions=torch.arange(ROWS),
            session=str(number),
            workload="w",
        )

    samples = [sample(number) for number in range(4)]
    units_ms: list[float] = []
    flags = BusyFlags(runtime_dir / "engines", ["*"])
    stops_ms: list[float] = []

    def turns(until: Any, is_yielding: bool) -> int:
        """Do micro-steps until `until` returns true; return the number of trained tokens."""
        learnt, was_working = 0, False
        while not until():
            # Most draws are of samples that the drafter is held to its parent on.
            number = trainer.num_updates % len(samples)
            parts = trainer.parts([samples[number]], kept=[number > 0], pace=pace)
            while True:
                while is_yielding and flags.is_busy():
                    if was_working:
                        stops_ms.append(1e3 * (time.monotonic() - flags.raised_s))
                        was_working = False
                    if until():
                        return learnt
                    time.sleep(0.002)
                began_s = time.perf_counter()
                try:
                    next(parts)
                except StopIteration as end:
                    learnt += end.value.num_tokens
                    break
                finally:
                    units_ms.append(1e3 * (time.perf_counter() - began_s))
                    was_working = True
        return learnt

    began_s = time.perf_counter()
    turns(lambda: trainer.num_updates >= min(6, updates), False)  # compiles, and settles its pace
    if device.type == "cuda":
        torch.cuda.synchronize()
    warm_s = time.perf_counter() - began_s
    connection.send(round(warm_s, 1))
    connection.recv()  # to go on: whoever measures other things has done so
    flags.discover()
    units_ms.clear()
    began_s, before = time.perf_counter(), trainer.num_updates
    learnt = turns(lambda: trainer.num_updates >= before + updates, False)
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began_s
    peak_bytes = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    bare = MicroTrainer(drafter, settings)  # undivided
    times = []
    for _ in range(6):
        began_s = time.perf_counter()
        bare.step([samples[0]])
        times.append(time.perf_counter() - began_s)
    needed = estimate(
        config, settings, ROWS, shared_bytes=shared.itemsize, compute_bytes=compute_dtype(device, "auto").itemsize
    )
    del bare
    connection.send(
        {
            "tokens_per_s": round(learnt / seconds, 1),
            "updates": updates,
            "seconds": round(seconds, 3),
            "whole_micro_step_ms": round(1e3 * statistics.median(times), 2),
            "warm_up_s": round(warm_s, 1),
            "unit_ms": quantiles(units_ms),
            "units": len(units_ms),
            "parameters": sum(p.numel() for p in drafter.parameters()),
            "peak_bytes": peak_bytes,
            "estimated_bytes": needed.total_bytes,
        }
    )
    while True:
        (name,) = connection.recv()
        if name == "figures":
            connection.send(list(stops_ms))
            stops_ms.clear()
            continue
        connection.send("training")
        turns(connection.poll, True)


def measure_bursts(honed: Connection, trainer: Connection, bursts: int) -> dict[str, Any]:
    """Alternate bursts with training between them and without."""
    seen: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
    stops_ms: list[float] = []
    for number in range(2 * bursts):
        name = ("off", "on", "on", "off")[number % 4]
        if name == "on":
            ask(trainer, "begin")
        time.sleep(REST_S)
        seen[name].append(ask(honed, "play", BURST_SIZE, BURST_TOKENS))
        if name == "on":
            stops_ms += ask(trainer, "figures")  # this ends the training
    steps = {name: [ms for one in played for ms in one["steps_ms"]] for name, played in seen.items()}
    firsts = {name: [max(one["first_ms"]) for one in played] for name, played in seen.items()}
    return {
        "gap_ms": {name: quantiles(values) for name, values in steps.items()},
        "gap_mean_ratio": round(statistics.fmean(steps["on"]) / statistics.fmean(steps["off"]), 4),
        "gap_p99_ratio": round(percentile(steps["on"], 0.99) / percentile(steps["off"], 0.99), 4),
        "first_token_ms": {name: quantiles(values) for name, values in firsts.items()},
        "preempt_ms": quantiles(stops_ms) if stops_ms else {},
        "preemptions": len(stops_ms),
        "bursts": 2 * bursts,
    }


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Quantiles of milliseconds, and the mean: the median doesn't show what a few steps lose."""
    return {
        "mean": round(statistics.fmean(values), 3),
        "p50": round(percentile(values, 0.5), 3),
        "p99": round(percentile(values, 0.99), 3),
        "max": round(max(values), 3),
    }


def spread(values: Sequence[float], digits: int) -> dict[str, float]:
    """Median and range."""
    return {
        "median": round(statistics.median(values), digits),
        "min": round(min(values), digits),
        "max": round(max(values), digits),
    }


if __name__ == "__main__":
    sys.exit(main())
