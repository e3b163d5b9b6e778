"""Write the tiny drafter's candidates at every position of the tiny target's answers, for `honed replay --trees`.

python -m benchmarks.make_tiny.candidates benchmarks/tiny --domain a --temperature 0.8 --out candidates.jsonl
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3ForCausalLM

from benchmarks.make_tiny.continuations import NUM_EMITTED_TOKENS, Prompt, as_sample, emitted_length, is_useful
from benchmarks.make_tiny.decode import continue_greedily, continue_sampled
from benchmarks.make_tiny.prompts import read_prompts
from honed.adapt.trees.candidate_log import CandidateRequest, render_line
from honed.recalib.drafter.checkpoint import load_drafter
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.samples.sample import TrainingSample, pack

NUM_CANDIDATES = 8
ANCHORS_PER_PASS = 32

# Letters: P anchors (every emitted token's predecessor), K depths, m candidates a depth.


class Pair:
    """Target, drafter and tokenizer of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
        self.model = Qwen3ForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()
        self.drafter = load_drafter(folder / "drafter", folder / "target")


def candidate_requests(
    pair: Pair, domain: str, temperature: float, num_prompts: int, seed: int = 0
) -> Iterator[CandidateRequest]:
    """Make candidates for the answers to the first held-out prompts of a domain; skip loops and short answers."""
    prompts = read_prompts(pair.folder / f"prompts_{domain}.jsonl", pair.tokenizer)[:num_prompts]
    for prompt, emitted in answers(pair.model, prompts, temperature, seed):
        sample = as_sample(pair.model, pair.drafter, prompt, emitted, domain)
        candidates, log_probs = candidates_of(pair.drafter, sample)
        yield CandidateRequest(
            request=f"{zlib.crc32(bytes(str(prompt.token_ids), 'ascii')):08x}",
            workload=f"tiny-{domain}",
            temperature=temperature,
            tokens=np.array(emitted, dtype=np.int64),
            starts=np.arange(len(emitted), dtype=np.int64),
            candidates=candidates.numpy(),
            log_probs=log_probs.double().numpy(),
            first_position=len(prompt.token_ids),
        )


def answers(
    model: Qwen3ForCausalLM, prompts: list[Prompt], temperature: float, seed: int
) -> Iterator[tuple[Prompt, list[int]]]:
    """Yield each prompt with the target's answer, in the prompts' order."""
    said: dict[Prompt, list[int]] = {}
    for length in sorted({len(p.token_ids) for p in prompts}):
        batch = [p for p in prompts if len(p.token_ids) == length]
        ids = torch.tensor([p.token_ids for p in batch])
        if temperature > 0.0:
            rows = continue_sampled(model, ids, NUM_EMITTED_TOKENS, temperature, seed + length)
        else:
            rows = continue_greedily(model, ids, NUM_EMITTED_TOKENS)
        said |= {prompt: row[length:] for prompt, row in zip(batch, rows.tolist(), strict=True)}
    for prompt in prompts:
        if is_useful(said[prompt]):
            yield prompt, said[prompt][: emitted_length(said[prompt])]


@torch.inference_mode()
def candidates_of(drafter: DFlashDrafter, sample: TrainingSample) -> tuple[Tensor, Tensor]:  # 2 x [P, K, m]
    """Find the most likely tokens at every depth after every anchor, with their log-probabilities."""
    packed = pack([sample])
    anchors = torch.arange(sample.num_prompt_tokens - 1, sample.num_tokens - 1)
    ids, values = [], []
    for part in anchors.split(ANCHORS_PER_PASS):
        logits = drafter(packed.features, packed.positions, packed.token_ids, part, packed.segments)  # [N, K, V]
        top = logits.float().log_softmax(-1).topk(NUM_CANDIDATES)
        ids.append(top.indices)
        values.append(top.values)
    return torch.cat(ids), torch.cat(values)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--domain", choices=("a", "b"), default="a")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    with given.out.open("wb") as file:
        for request in candidate_requests(Pair(given.folder), given.domain, given.temperature, given.prompts):
            file.write(render_line(request))


if __name__ == "__main__":
    main()
