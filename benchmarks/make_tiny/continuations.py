"""Output of the tiny target: greedy continuations, the hidden states a drafter sees, and the choice of useful texts.

Small models fall into loops, and any drafter predicts a loop perfectly, so looping texts would inflate every figure. A rule
excludes them by the target's text alone, never by acceptance.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.make_tiny.corpus import Document
from benchmarks.make_tiny.decode import continue_greedily
from benchmarks.make_tiny.drafter import TARGET_LAYER_IDS
from benchmarks.make_tiny.tokens import END_TOKEN_ID
from honed.recalib.drafter.dflash import DFlashDrafter
from honed.recalib.samples.sample import TrainingSample

NUM_EMITTED_TOKENS = 96
PROMPT_TOKENS = (64, 96, 128, 160)
LONGEST_PERIOD_TOKENS = 24
REPEATING_SHARE = 0.8
MIN_EMITTED_TOKENS = 64

# Letters: S sequences, P prompt tokens, T all tokens, A auxiliary layers x width.


@dataclass(frozen=True)
class Prompt:
    """A stretch of one document that starts at the start of a line."""

    session: str
    token_ids: tuple[int, ...]


def cut_prompts(tokenizer: Tokenizer, documents: list[Document], per_document: int, num_tokens: int, seed: int) -> list[Prompt]:
    """Cut up to `per_document` non-overlapping stretches from each document, `num_tokens` long, at line starts."""
    rng = random.Random(seed)
    ends_line = {i for i in range(tokenizer.get_vocab_size()) if "\n" in tokenizer.decode([i])}
    prompts = []
    for document in documents:
        ids = tokenizer.encode(document.text).ids
        if len(ids) < num_tokens + 8:
            continue
        starts = [0, *(i + 1 for i, t in enumerate(ids[: -num_tokens - 8]) if t in ends_line)]
        taken: list[int] = []
        for start in rng.sample(starts, min(len(starts), 20 * per_document)):
            if len(taken) < per_document and all(abs(start - other) > num_tokens for other in taken):
                taken.append(start)
                prompts.append(Prompt(document.name, tuple(ids[start : start + num_tokens])))
    return prompts


def emitted_length(emitted: list[int]) -> int:
    """Count the tokens before the end of text."""
    return emitted.index(END_TOKEN_ID) if END_TOKEN_ID in emitted else len(emitted)


def is_repeating(emitted: list[int]) -> bool:
    """Tell whether the second half repeats itself: at some period up to 24 tokens, 80 % of it equals the text before."""
    half = len(emitted) // 2
    for period in range(1, min(LONGEST_PERIOD_TOKENS, half) + 1):
        same = sum(emitted[i] == emitted[i - period] for i in range(half, len(emitted)))
        if same >= REPEATING_SHARE * (len(emitted) - half):
            return True
    return False


def is_useful(emitted: list[int]) -> bool:
    """Tell whether a text is long enough and not a loop."""
    length = emitted_length(emitted)
    return length >= MIN_EMITTED_TOKENS and not is_repeating(emitted[:length])


@torch.inference_mode()
def aux_hidden_states(model: PreTrainedModel, token_ids: Tensor) -> Tensor:  # [S, T] -> [S, T, A]
    """Concatenate the outputs of the target's layers that the drafter reads."""
    outputs: dict[int, Tensor] = {}

    def keep(layer_id: int) -> object:
        return model.model.layers[layer_id].register_forward_hook(
            lambda _module, _given, out: outputs.update({layer_id: out if isinstance(out, Tensor) else out[0]})
        )

    hooks = [keep(layer_id) for layer_id in TARGET_LAYER_IDS]
    model.model(token_ids, use_cache=False)
    for hook in hooks:
        hook.remove()  # type: ignore[attr-defined]
    return torch.cat([outputs[layer_id] for layer_id in TARGET_LAYER_IDS], dim=-1)


def told(model: PreTrainedModel, prompts: list[Prompt], batch_sequences: int = 128) -> Iterator[tuple[Prompt, list[int]]]:
    """Yield each prompt (all of one length) with the target's answer, without loops and short ones."""
    for start in range(0, len(prompts), batch_sequences):
        batch = prompts[start : start + batch_sequences]
        ids = continue_greedily(model, torch.tensor([p.token_ids for p in batch]), NUM_EMITTED_TOKENS)
        for prompt, row in zip(batch, ids.tolist(), strict=True):
            emitted = row[len(prompt.token_ids) :]
            if is_useful(emitted):
                yield prompt, emitted[: emitted_length(emitted)]


@torch.inference_mode()
def as_sample(
    model: PreTrainedModel, drafter: DFlashDrafter | None, prompt: Prompt, emitted: list[int], workload: str
) -> TrainingSample:
    """Make the sample that a server would have captured for this request: features fused for the drafter, or unfused ones."""
    ids = torch.tensor([*prompt.token_ids, *emitted])
    features = aux_hidden_states(model, ids[None])[0]
    return TrainingSample(
        features if drafter is None else drafter.fuse(features),
        ids,
        torch.arange(len(ids)),
        prompt.session,
        workload,
        num_prompt_tokens=len(prompt.token_ids),
        is_fused=drafter is not None,
    )
