"""The tiny pair in vLLM's engine in this process, with honed attached: it captures, swaps, and counts rounds.

Two functions of vLLM 0.32's CPU build are fixed first; a GPU's are right. One is its stand-in for `expand_kernel`, without
which it samples from garbage when it speculates at T > 0. The other is the norm of the context keys, which uses layer 0's
weights in every layer. Neither is related to honed.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.server.client_load import Prompt

NUM_DRAFT_TOKENS = 7
NUM_EMITTED_TOKENS = 96
CONCURRENCY = 64
PARTS = 4


@dataclass(frozen=True)
class Rounds:
    """Verify rounds and accepted drafts of each part of the prompts; the bootstrap draws parts."""

    parts: tuple[tuple[int, int], ...]

    @property
    def acceptance_length(self) -> float:
        """tau, bonus token included."""
        return 1.0 + sum(a for _, a in self.parts) / max(1, sum(n for n, _ in self.parts))


class Engine:
    """A running engine; `with` ends it.

    Args:
        features: captured features, "fused" or "layers".
        method, num_draft_tokens: how it speculates.
        options: engine arguments besides, or instead.
    """

    def __init__(
        self,
        runtime_dir: Path,
        target: Path,
        drafter: Path,
        features: str = "layers",
        method: str = "dflash",
        num_draft_tokens: int = NUM_DRAFT_TOKENS,
        **options: Any,
    ) -> None:
        os.environ.update(
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
            VLLM_CPU_KVCACHE_SPACE="1",
            VLLM_LOGGING_LEVEL="WARNING",
            VLLM_NO_USAGE_STATS="1",
            DO_NOT_TRACK="1",
            HF_HUB_OFFLINE="1",
            HONED_RUNTIME_DIR=str(runtime_dir),
            HONED_FEATURES=features,
            HONED_RING_BYTES=str(256 << 20),
        )
        from vllm import LLM

        from honed.attach.engine import engine_hook

        engine_hook.install()  # vLLM loads plugins once in a process, maybe before honed was switched on
        mend_vllm_cpu()
        arguments: dict[str, Any] = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": CONCURRENCY,
            "max_num_batched_tokens": 512 * CONCURRENCY,  # no split prompts: with a seed they stop vLLM's CPU build
            "disable_log_stats": False,
            "enable_prefix_caching": False,
            "seed": 0,
            "scheduler_cls": "honed.attach.scheduler.make_scheduler",
            "worker_extension_cls": "honed.attach.worker.HonedWorkerExtension",
            "speculative_config": {"method": method, "model": str(drafter), "num_speculative_tokens": num_draft_tokens},
        }
        self._llm = LLM(str(target), **arguments | options)
        self._core = self._llm.llm_engine.engine_core.engine_core
        self.target, self.num_draft_tokens = target, num_draft_tokens
        self.ring = runtime_dir / "engines" / "engine-0" / "ring"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self._llm.llm_engine.engine_core.shutdown()

    def generate(
        self, prompts: Sequence[Prompt], temperature: float = 0.0, workload: str = "", seed: int = 0
    ) -> list[list[int]]:
        """Return token ids of the answers; with a workload they are labelled, and captured while capture is on."""
        from vllm import SamplingParams

        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=NUM_EMITTED_TOKENS,
                seed=seed + i if temperature else None,
                extra_args={"honed_workload": workload, "honed_session": p.session} if workload else {"honed_capture": 0},
            )
            for i, p in enumerate(prompts)
        ]
        outputs = self._llm.generate([p.text for p in prompts], params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def measure(self, prompts: Sequence[Prompt], temperature: float = 0.0) -> Rounds:
        """Count rounds by vLLM's own counters; every draft is whole, but those at a request's end."""
        parts = []
        for i in range(PARTS):
            before = self._counters()
            self.generate(prompts[i::PARTS], temperature, seed=1000 * i)
            rounds, drafted, accepted = (now - then for now, then in zip(self._counters(), before, strict=True))
            assert drafted > 0.9 * self.num_draft_tokens * rounds, "something cut the drafts"
            parts.append((rounds, accepted))
        return Rounds(tuple(parts))

    def capture(self, is_on: bool, version: str) -> None:
        """Capture every request that begins from now on, or none."""
        self._rpc("honed_capture", 1.0 if is_on else 0.0, version)

    def swap(self, version: str, folder: Path) -> float:
        """Swap a version into the running engine, as the daemon does; return the copy's milliseconds."""
        self._rpc("honed_stage", [(version, str(folder), "")])
        while (state := self._rpc("honed_staged", version)) == "staging":
            time.sleep(0.005)
        if state:
            raise RuntimeError(f"{version} can't be swapped in: {state}")
        return float(self._rpc("honed_apply", version, False)["copy_ms"])

    def _rpc(self, method: str, *args: Any) -> Any:
        return self._core.model_executor.collective_rpc(method, args=args)[0]

    def _counters(self) -> tuple[int, int, int]:
        found = {metric.name: metric for metric in self._llm.get_metrics()}
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        return tuple(int(found[f"vllm:spec_decode_{name}"].value) for name in names)  # type: ignore[return-value]


def read_prompts(path: Path, limit: int) -> list[Prompt]:
    """Read the first prompts of a file."""
    lines = path.read_text().splitlines()[:limit]
    return [Prompt(found["session"], found["prompt"]) for found in map(json.loads, lines)]


def mend_vllm_cpu() -> None:
    """Make vLLM 0.32's CPU build compute what its GPU build does; other builds stay unchanged."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = _expand
    DFlashQwen3Model._normalize_context_k = _normalize_context_k


def _expand(output: torch.Tensor, value: torch.Tensor, ends: torch.Tensor, old: int, new: int, MAX_NUM_TOKENS: int = 0) -> None:
    """Copy each request's value (such as its temperature) to its draft tokens."""
    counts = torch.diff(ends.long(), prepend=ends.new_zeros(1).long())
    output.copy_(torch.where(value == old, torch.full_like(value, new), value).repeat_interleave(counts))


def _normalize_context_k(self: Any, all_k: torch.Tensor) -> torch.Tensor:  # [L, T, G, D]
    """RMSNorm of the context keys with each layer's own weights."""
    x = all_k.float()
    normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._rms_norm_eps)
    return (normed * self._k_norm_weights[:, None, None, :].float()).to(all_k.dtype)
