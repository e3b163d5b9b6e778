"""A process with two vLLM engines, and the contenders forked from it; see `lockstep`.

    python -m benchmarks.server.lockstep_engine SOCKET CORE TARGET SPECULATIVE_CONFIG PAUSE

One engine speculates, the other doesn't; the target's weights are in memory once. The process forks a contender on each
request. One that speculates attaches honed as vLLM does, by building its scheduler with `make_scheduler`. A contender serves
loads by calling its engine's `step`. Only its main thread, which computes, runs on CORE; honed's publisher uses the others, as
beside a GPU.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Client, Connection
from typing import Any

from benchmarks.server.lockstep import Load, Seen

WORKER = "honed.attach.worker.HonedWorkerExtension"


class Clock:
    """Replacement of the module `time`: its monotonic clock stands still during others' turns."""

    def __init__(self) -> None:
        self._away_ns, self._still_ns = 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def monotonic_ns(self) -> int:
        """Nanoseconds, without the time away."""
        return self._still_ns or time.monotonic_ns() - self._away_ns

    def monotonic(self) -> float:
        """Seconds, without the time away."""
        return self.monotonic_ns() / 1e9

    def wait(self, connection: Connection) -> Any:
        """Receive something; until then the clock stands still."""
        self._still_ns = self.monotonic_ns()
        try:
            return connection.recv()
        finally:
            self._away_ns, self._still_ns = time.monotonic_ns() - self._still_ns, 0


class PublishersClock:
    """Replacement of the module `time` for a thread that continues while its engine's clock stands still.

    Only the nanoseconds, which date the steps, are that clock's.
    """

    def __init__(self, clock: Clock) -> None:
        self.monotonic_ns = clock.monotonic_ns

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class DraftPasses:
    """Times an engine's draft passes, as vLLM makes them: `seconds` of each."""

    def __init__(self, engine: Any) -> None:
        self.seconds: list[float] = []
        drafter = getattr(_runner_of(engine), "drafter", None)
        if drafter is None:
            return
        propose = drafter.propose

        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.perf_counter()
            drafts = propose(*args, **kwargs)
            self.seconds.append(time.perf_counter() - began_s)
            return drafts

        drafter.propose = timed


class Run:
    """A load served in a steady state: all places are taken, by requests at different stages.

    The first requests, one a place, have staggered lengths. Output counts from when they all have a token until a place finds
    no further prompt. In between as many requests begin as end, whatever the rule.
    """

    def __init__(self, engine: Any, passes: DraftPasses, load: Load) -> None:
        self._engine, self._passes, self._load = engine, passes, load
        passes.seconds.clear()
        self._waiting = deque(enumerate(load.prompts))
        self._tokens: dict[str, int] = {}
        self._times: dict[str, tuple[float, float]] = {}
        """Time of each request's first and last token, on the clock of the run's steps."""
        self._now_s = 0.0
        self._is_counting = self._is_over = False
        self._num_tokens, self._seconds, self._num_steps = 0, 0.0, 0
        lengths = [self._length(number) for number in range(len(load.prompts))]
        self._all_tokens = sum(lengths)
        for _ in range(load.concurrency):
            self._begin()

    def go(self, seconds: float) -> Seen:
        """Step for `seconds`."""
        until_s = self._now_s + seconds
        while self._now_s < until_s and not self._is_over:
            self._step()
        gaps = [(last - first) / max(self._tokens[name] - 1, 1) for name, (first, last) in self._times.items() if last > first]
        done, passes = sum(self._tokens.values()) / self._all_tokens, self._passes.seconds
        return Seen(done, self._is_over, self._num_tokens, self._seconds, self._num_steps, _median_ms(gaps), _median_ms(passes))

    def _length(self, number: int) -> int:
        places = self._load.concurrency
        return max(1, round(min(number + 1, places) / places * self._load.max_tokens))

    def _begin(self) -> bool:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if not self._waiting:
            return False
        number, prompt = self._waiting.popleft()
        params = SamplingParams(
            temperature=0.0,
            max_tokens=self._length(number),
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"honed_workload": "default"},
        )
        self._tokens[str(number)] = 0
        self._engine.add_request(str(number), prompt, params)
        return True

    def _step(self) -> None:
        began_s = time.perf_counter()
        outputs = self._engine.step()
        took_s = time.perf_counter() - began_s
        self._now_s += took_s
        num_tokens, ended = 0, 0
        for output in outputs:
            came = len(output.outputs[0].token_ids)
            if came:
                num_tokens += came
                self._tokens[output.request_id] += came
                first_s, _ = self._times.get(output.request_id, (self._now_s, 0.0))
                self._times[output.request_id] = first_s, self._now_s
            ended += output.finished
        if self._is_counting:
            self._num_tokens += num_tokens
            self._seconds += took_s
            self._num_steps += 1
        elif len(self._times) >= self._load.concurrency:
            self._is_counting = True
        for _ in range(ended):
            if not self._begin():
                self._end()
                return

    def _end(self) -> None:
        self._is_over = True
        self._engine.abort_request(list(self._tokens))
        while self._engine.has_unfinished_requests():
            self._engine.step()


def _median_ms(seconds: Sequence[float]) -> float:
    return 1e3 * statistics.median(seconds) if seconds else 0.0


def main() -> None:
    """Load, then fork on each request."""
    address, core, target, speculative, pause = *sys.argv[1:4], *map(json.loads, sys.argv[4:])
    plain, speculating = load_engines(target, speculative)
    for engine in (plain, speculating):
        prolong(_runner_of(engine).model, *pause)
    gc.collect()
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    connection = Client(address)
    while True:
        try:
            _, name, runtime_dir, has_trees = connection.recv()
        except EOFError:
            return
        if os.fork() == 0:
            connection.close()
            if not has_trees:
                only_chains()
            contend(speculating if runtime_dir else plain, name, runtime_dir, int(core), address)
            os._exit(0)


def load_engines(target: str, speculative: dict[str, Any]) -> tuple[Any, Any]:
    """Load one engine that only serves, and one with everything that honed needs, but not honed; they share target weights."""
    from honed.adapt.lengths import compiled
    from honed.attach.engine import engine_hook

    compiled.prepare()
    plain = load_engine(target)
    engine_hook.install()  # records the engine that is made next
    speculating = load_engine(target, speculative_config=speculative, worker_extension_cls=WORKER)
    share_weights(_runner_of(speculating).model, _runner_of(plain).model)
    return plain, speculating


def load_engine(target: str, **more: Any) -> Any:
    """Load vLLM's engine in this process."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=target,
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=16,
            enforce_eager=True,
            enable_prefix_caching=False,
            async_scheduling=False,
            **more,
        )
    )


def share_weights(source: Any, model: Any) -> None:
    """Let a model use the weight modules of another, equal one, packed copies included.

    Raises RuntimeError when it still has weights of its own.
    """
    modules = dict(source.named_modules())
    for name, module in list(model.named_modules()):
        if name in modules and next(module.parameters(recurse=False), None) is not None:
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, modules[name])
    shared = {id(parameter) for parameter in source.parameters()}
    own = [name for name, parameter in model.named_parameters() if id(parameter) not in shared]
    if own:
        raise RuntimeError(f"not shared: {', '.join(own[:5])}")


def prolong(model: Any, pass_ms: float, row_ms: float) -> None:
    """Let the target's passes wait after their computation, as for a device that is slower by the pass and by the row."""

    def wait(_module: Any, _given: Any, hidden: Any) -> None:
        rows = (hidden[0] if isinstance(hidden, tuple) else hidden).shape[0]
        time.sleep((pass_ms + row_ms * rows) / 1e3)

    if pass_ms or row_ms:
        model.register_forward_hook(wait)


def _runner_of(engine: Any) -> Any:
    return engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def contend(engine: Any, name: str, runtime_dir: str, core: int, address: str) -> None:
    """Serve as a contender until the connection closes."""
    clock, others = Clock(), set(range(os.cpu_count() or 1)) - {core}
    passes, run = DraftPasses(engine), None
    if runtime_dir:
        os.environ.update(HONED_RUNTIME_DIR=runtime_dir, HONED_ENGINE_ID=name)
        os.sched_setaffinity(0, others or {core})  # threads inherit it
        attach(engine, clock)
    os.sched_setaffinity(0, {core})
    connection = Client(address)
    while True:
        try:
            what, *args = clock.wait(connection)
        except EOFError:
            break
        if what == "play":
            run = Run(engine, passes, *args)
        connection.send(run.go(*args) if what == "go" and run is not None else name)
    if runtime_dir:
        engine.engine_core.engine_core.scheduler.shutdown()


def only_chains() -> None:
    """Let an engine with slots for trees verify its drafter's chain, and leave the other slots empty."""
    from honed.attach.trees import runner_v1

    runner_v1._misfit = lambda _: "chains are compared"


def attach(engine: Any, clock: Clock) -> None:
    """Give the engine a scheduler with honed attached, whose clock is `clock`."""
    from honed.attach.engine import attachment
    from honed.attach.events import publisher, step_recorder
    from honed.attach.scheduler import make_scheduler

    attachment.time = step_recorder.time = clock
    publisher.time = PublishersClock(clock)
    core = engine.engine_core.engine_core
    before = core.scheduler
    core.scheduler = make_scheduler(
        vllm_config=core.vllm_config,
        kv_cache_config=before.kv_cache_config,
        log_stats=core.log_stats,
        structured_output_manager=core.structured_output_manager,
        include_finished_set=False,
        block_size=before.block_size,
    )
    if getattr(core.scheduler, "_honed", None) is None:
        raise RuntimeError("honed did not attach: see above")


if __name__ == "__main__":
    main()
