"""The real vLLM engine in this process, with honed attached, for tests.

HONED_TEST_RUNNER chooses the model runner, one a process: v1, v2, or v1-async and v2-async, with a scheduler that runs a step
ahead, as is usual on CUDA. Tests marked `runners` say the same of all four. Where there is a CUDA device, vLLM runs on it;
where there is none, V2 runs under Triton's interpreter, some hundred times slower.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from tests.tools import ROOT

TARGET = ROOT / "benchmarks" / "tiny" / "target"
DRAFTER = ROOT / "benchmarks" / "tiny" / "drafter"
IS_CUDA = torch.cuda.is_available()
RUNNER = os.environ.get("HONED_TEST_RUNNER", "v2-async" if IS_CUDA else "v1")
IS_V2 = RUNNER in ("v2", "v2-async")
IS_SLOW = IS_V2 and not IS_CUDA
"""Whether Triton's interpreter runs the engine: fewer and shorter requests."""
IS_ASYNC = RUNNER in ("v1-async", "v2-async")
ARE_DRAFTS_KNOWN = RUNNER != "v1-async"
"""Whether the ids of drafts can be logged: V1's scheduler is told them for grammars only when it runs ahead."""
K = 7
ATTENTION = "TRITON_ATTN"
"""On CUDA: it takes float32, in which the greedy answers of different batches can be held against each other. Triton would
multiply float32 with ten bits (TRITON_F32_DEFAULT)."""


def held_out(number: int, num_chars: int) -> list[str]:
    """Beginnings of held-out prompts, half of them of each domain."""
    texts = []
    for name in ("a", "b"):
        lines = (ROOT / "benchmarks" / "tiny" / f"prompts_{name}.jsonl").read_text().splitlines()
        texts += [json.loads(line)["prompt"][:num_chars] for line in lines[: number // 2]]
    return texts


def prepare(runtime_dir: Path | None) -> None:
    """Set what vLLM reads from the environment; call before the first import of vllm in the process."""
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_LOGGING_LEVEL="WARNING",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
    )
    if IS_CUDA:
        os.environ.update(VLLM_USE_V2_MODEL_RUNNER=str(int(IS_V2)), TRITON_F32_DEFAULT="ieee")
    if runtime_dir is None:
        os.environ.pop("HONED_RUNTIME_DIR", None)
    else:
        os.environ["HONED_RUNTIME_DIR"] = str(runtime_dir)


def schedule_ahead() -> None:
    """Let vLLM schedule a step before it has the last one's results, as it does on CUDA: its CPU platform says no to that."""
    from vllm.platforms.cpu import CpuPlatform

    decided = CpuPlatform.check_and_update_config
    if getattr(decided, "is_ahead", False):
        return

    def decide(vllm_config: Any) -> None:
        decided(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    decide.is_ahead = True  # type: ignore[attr-defined]
    CpuPlatform.check_and_update_config = staticmethod(decide)
    if not IS_V2:
        do_without_streams()


def do_without_streams() -> None:
    """Give V1, when it is scheduled ahead, streams and events of a device on which everything is done in order."""

    class Nothing:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.device = torch.device("cpu")

        def record(self, *_: Any) -> None: ...

        def synchronize(self) -> None: ...

        def wait_stream(self, _: Any) -> None: ...

    cuda: Any = torch.cuda
    cuda.Event = cuda.Stream = cuda.current_stream = Nothing
    cuda.stream = nullcontext


class TestEngine:
    """vLLM's `LLM`, and the parts of it that tests look into."""

    __test__ = False

    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.honed = getattr(self.scheduler, "_honed", None)

    def generate(self, prompts: list[Any], **params: Any) -> list[list[int]]:
        """Token ids of each prompt's completion; `extra` is one extra_args dict a prompt."""
        from vllm import SamplingParams

        extra = params.pop("extra", [None] * len(prompts))
        sampling = [SamplingParams(**params, extra_args=e) for e in extra]
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        self.end_steps()
        return [list(out.outputs[0].token_ids) for out in outputs]

    def end_steps(self) -> None:
        """End the steps that were scheduled ahead for requests that have ended since."""
        while self.core.batch_queue:
            self.llm.llm_engine.step()

    def empty_step(self, prompt: str) -> list[Any]:
        """Pause the engine as `pause_generation(mode="keep")` does, right after a request has left, and let it go on.

        The step in between schedules nothing: vLLM's worker takes all requests out of its batch, and back in afterwards.

        Returns:
            outputs of requests that ended meanwhile.
        """
        from vllm import SamplingParams
        from vllm.v1.core.sched.interface import PauseState

        self.llm.llm_engine.add_request("leaves", prompt, SamplingParams(max_tokens=8))
        self.llm.llm_engine.abort_request(["leaves"])
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        outputs = list[Any]()
        while self.scheduler.has_requests() or self.core.batch_queue:
            outputs += self.llm.llm_engine.step()
        self.scheduler.set_pause_state(PauseState.UNPAUSED)
        return [one for one in outputs if one.finished]

    def counters(self) -> dict[str, int]:
        """vLLM's own counters of speculative decoding."""
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        found = {m.name.removeprefix("vllm:spec_decode_"): m.value for m in self.llm.get_metrics() if hasattr(m, "value")}
        return {name: int(found[name]) for name in names}

    def rpc(self, method: str, *args: Any) -> Any:
        """A method of the worker extension."""
        return self.rpcs(method, *args)[0]

    def rpcs(self, method: str, *args: Any) -> list[Any]:
        """The same on each rank."""
        found: list[Any] = self.core.model_executor.collective_rpc(method, args=args)
        return found

    def checksums(self) -> list[str]:
        """Of the drafter that serves, by each rank."""
        self.rpc("honed_begin_checksum")
        _, _, num_parts = self.rpc("honed_checksum", 0)
        for part in range(1, num_parts):
            self.rpc("honed_checksum", part)
        while not all(sums := [found for found, _, _ in self.rpcs("honed_checksum", -1)]):
            time.sleep(0.001)
        return sums

    def checksum(self) -> str:
        """The same by the first."""
        return self.checksums()[0]


@contextmanager
def engine(
    runtime_dir: Path | None, target: Path = TARGET, drafter: Path = DRAFTER, max_num_seqs: int = 8, **options: Any
) -> Iterator[TestEngine]:
    """Start an engine; honed is attached when `runtime_dir` is given."""
    prepare(runtime_dir)
    if IS_ASYNC and not IS_CUDA:
        schedule_ahead()
    from vllm import LLM

    from honed.attach.engine import engine_hook

    if runtime_dir is not None:
        # vLLM loads plugins once in a process, which may have been before honed was switched on.
        engine_hook.install()
    attach = {
        "scheduler_cls": "honed.attach.scheduler.make_scheduler",
        "worker_extension_cls": "honed.attach.worker.HonedWorkerExtension",
    }
    settings: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": 512,
        "max_num_seqs": max_num_seqs,
        "enforce_eager": True,
        "disable_log_stats": False,
        "enable_prefix_caching": False,
        "speculative_config": {"method": "dflash", "model": str(drafter), "num_speculative_tokens": K},
    }
    if IS_CUDA:
        settings |= {"async_scheduling": IS_ASYNC, "attention_backend": ATTENTION}
        settings |= {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.05}
    llm = LLM(str(target), **(settings | (attach if runtime_dir else {}) | options))
    try:
        yield TestEngine(llm)
    finally:
        llm.llm_engine.engine_core.shutdown()
