"""Acceptance of a pair in stock vLLM, on files of prompts, by vLLM's own counters."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NUM_DRAFT_TOKENS = 7
NUM_EMITTED_TOKENS = 96


@dataclass(frozen=True)
class Counters:
    """vLLM's counters of speculative decoding."""

    num_drafts: int
    num_accepted_tokens: int
    accepted_by_position: tuple[int, ...]

    def __sub__(self, earlier: Counters) -> Counters:
        pairs = zip(self.accepted_by_position, earlier.accepted_by_position, strict=True)
        return Counters(
            self.num_drafts - earlier.num_drafts,
            self.num_accepted_tokens - earlier.num_accepted_tokens,
            tuple(later - former for later, former in pairs),
        )

    @property
    def acceptance_length(self) -> float:
        """tau, bonus token included."""
        return 1.0 + self.num_accepted_tokens / max(1, self.num_drafts)


def open_engine(target: Path, drafter: Path) -> Any:
    """Open vLLM in this process: float32, DFlash with 7 draft tokens."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
    from vllm import LLM

    return LLM(
        str(target),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=32,
        disable_log_stats=False,
        speculative_config={
            "method": "dflash",
            "model": str(drafter),
            "num_speculative_tokens": NUM_DRAFT_TOKENS,
        },
    )


def read_counters(engine: Any) -> Counters:
    """Read the current counters."""
    found = {metric.name: metric for metric in engine.get_metrics() if "spec_decode" in metric.name}
    return Counters(
        found["vllm:spec_decode_num_drafts"].value,
        found["vllm:spec_decode_num_accepted_tokens"].value,
        tuple(found["vllm:spec_decode_num_accepted_tokens_per_pos"].values),
    )


def measure(engine: Any, prompts: list[str], num_emitted_tokens: int = NUM_EMITTED_TOKENS) -> Counters:
    """Continue all prompts greedily; return the counters' rise."""
    from vllm import SamplingParams

    before = read_counters(engine)
    engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=num_emitted_tokens), use_tqdm=False)
    return read_counters(engine) - before


def main() -> None:
    """Command line: one line of JSON for each file of prompts."""
    parser = argparse.ArgumentParser(description="Acceptance length in vLLM at temperature 0 with 7 draft tokens.")
    parser.add_argument("target", type=Path)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("prompts", type=Path, nargs="+")
    given = parser.parse_args()
    engine = open_engine(given.target, given.drafter)
    for path in given.prompts:
        counted = measure(engine, [json.loads(line)["prompt"] for line in path.read_text().splitlines()])
        shares = [round(n / counted.num_drafts, 3) for n in counted.accepted_by_position]
        figures = {"prompts": path.name, "acceptance_length": round(counted.acceptance_length, 3)}
        print(json.dumps(figures | {"num_drafts": counted.num_drafts, "accepted_share_by_position": shares}), flush=True)


if __name__ == "__main__":
    main()
