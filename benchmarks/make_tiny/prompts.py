"""Prompts of the tiny pair: held-out ones for measurements, and others for live traffic."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from benchmarks.make_tiny.continuations import PROMPT_TOKENS, Prompt, as_sample, cut_prompts, told
from benchmarks.make_tiny.corpus import Document, Domain, Split
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.samples.sample import TrainingSample

PROMPTS_PER_DOCUMENT = {"a": 8, "b": 2}
MAX_PROMPTS: dict[Split, int] = {"heldout": 200, "traffic": 600}


def useful_prompts(
    model: PreTrainedModel, tokenizer: Tokenizer, documents: list[Document], domain: Domain, split: Split
) -> list[Prompt]:
    """Choose prompts whose greedy continuation doesn't loop, of all lengths, shuffled, limited in number."""
    chosen = [d for d in documents if d.domain == domain and d.split == split]
    random.Random(3).shuffle(chosen)
    wanted = MAX_PROMPTS[split] // len(PROMPT_TOKENS)
    prompts: list[Prompt] = []
    for number, length in enumerate(PROMPT_TOKENS):
        cut = cut_prompts(tokenizer, chosen, PROMPTS_PER_DOCUMENT[domain], length, seed=number)
        cut = [p for p in cut if survives_text(tokenizer, p)]
        random.Random(number).shuffle(cut)
        found: list[Prompt] = []
        for start in range(0, len(cut), 128):
            if len(found) < wanted:
                found += [prompt for prompt, _ in told(model, cut[start : start + 128])]
        prompts += found[:wanted]
    random.Random(4).shuffle(prompts)
    return prompts


def survives_text(tokenizer: Tokenizer, prompt: Prompt) -> bool:
    """Tell whether the prompt, sent as text, gives the same tokens again."""
    return bool(tokenizer.encode(tokenizer.decode(list(prompt.token_ids))).ids == list(prompt.token_ids))


def write_prompts(path: Path, tokenizer: Tokenizer, prompts: Iterable[Prompt]) -> None:
    """Write one JSON object a line: the document as `session`, and the text."""
    rows = ({"session": p.session, "prompt": tokenizer.decode(list(p.token_ids))} for p in prompts)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_prompts(path: Path, tokenizer: Tokenizer) -> list[Prompt]:
    """Read the prompts of a file, as tokens."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [Prompt(row["session"], tuple(tokenizer.encode(row["prompt"]).ids)) for row in rows]


def samples_of(
    model: PreTrainedModel, drafter: DFlashDrafter | None, prompts: list[Prompt], workload: str
) -> list[TrainingSample]:
    """Make the samples that a server would capture while it answers these prompts greedily; without a drafter, unfused ones."""
    samples: list[TrainingSample] = []
    for length in sorted({len(p.token_ids) for p in prompts}):
        of_length = [p for p in prompts if len(p.token_ids) == length]
        samples += [as_sample(model, drafter, p, emitted, workload) for p, emitted in told(model, of_length)]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(0)).tolist()
    return [samples[i] for i in order]
