"""Train the tiny target not to loop: unlikelihood of the n-grams it repeats in its own greedy continuations.

A model of this size repeats itself within a few dozen greedy tokens. Loops are drafted perfectly, which would make every
acceptance figure meaningless. The cure is a few minutes of sequence-level unlikelihood, -log(1 - p) at each token that
completes an earlier n-gram of the continuation, mixed with ordinary next-token loss. Most continuations then don't loop.

Source: arXiv 1908.04319, section 4 (sequence-level unlikelihood).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.make_tiny.continuations import is_repeating
from benchmarks.make_tiny.decode import continue_greedily
from benchmarks.make_tiny.target import TargetTraining, crop_batch, matrix_products, next_token_loss

# Letters: S sequences, T tokens of each, P prompt tokens.


@dataclass(frozen=True)
class LoopTraining:
    """Length and strength of the unlikelihood phase."""

    minutes: float = 5.0
    """Processor time of one thread."""
    ngram_tokens: int = 6
    prompt_tokens: int = 80
    emitted_tokens: int = 72
    batch_sequences: int = 48
    updates_per_batch: int = 2
    learning_rate: float = 1e-4
    seed: int = 1


def completes_repeat(emitted: list[int], ngram_tokens: int) -> list[bool]:
    """Mark each token that completes an earlier n-gram."""
    seen: set[tuple[int, ...]] = set()
    flags = [False] * len(emitted)
    for end in range(ngram_tokens, len(emitted) + 1):
        ngram = tuple(emitted[end - ngram_tokens : end])
        flags[end - 1] = ngram in seen
        seen.add(ngram)
    return flags


def unlikelihood(model: PreTrainedModel, tokens: Tensor, is_repeat: Tensor) -> Tensor:  # [S, T], [S, T - 1] -> []
    """Mean of -log(1 - p(token)) over the tokens that complete a repeated n-gram."""
    with matrix_products():
        logits = model.lm_head(model.model(tokens[:, :-1]).last_hidden_state)
    chosen = logits[is_repeat].float().log_softmax(-1)
    log_p = chosen.gather(-1, tokens[:, 1:][is_repeat].unsqueeze(-1)).squeeze(-1)
    return -torch.log1p(-log_p.exp().clamp(max=1 - 1e-5)).sum() / max(1, int(is_repeat.sum()))


def discourage_loops(model: PreTrainedModel, streams: list[Tensor], settings: LoopTraining, save: Callable[[], None]) -> None:
    """Alternate greedy continuation and unlikelihood of its repetitions until the time is over."""
    generator = torch.Generator().manual_seed(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    crops = TargetTraining(sequence_tokens=settings.prompt_tokens - 1, batch_sequences=settings.batch_sequences)
    texts = TargetTraining(batch_sequences=8, sequence_tokens=256)
    began_s = time.process_time()
    while (progress := (time.process_time() - began_s) / (60 * settings.minutes)) < 1.0:
        prompts = crop_batch(streams, crops, generator)  # [S, P]
        tokens = continue_greedily(model.eval(), prompts, settings.emitted_tokens).clone()
        emitted = tokens[:, settings.prompt_tokens :].tolist()
        flags = [completes_repeat(row, settings.ngram_tokens) for row in emitted]
        is_repeat = F.pad(torch.tensor(flags), (settings.prompt_tokens - 1, 0))
        optimizer.param_groups[0]["lr"] = settings.learning_rate * min(1.0, 3.0 * (1.0 - progress))
        for _ in range(settings.updates_per_batch):
            kept = next_token_loss(model, crop_batch(streams, texts, generator))
            loss = kept + unlikelihood(model, tokens, is_repeat)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        num_loops = sum(is_repeating(row) for row in emitted)
        repeated = float(is_repeat.sum()) / (len(emitted) * settings.emitted_tokens)
        print(f"loops {num_loops}/{len(emitted)} repeated {repeated:.3f} next-token {kept.item():.3f}", flush=True)
    save()
