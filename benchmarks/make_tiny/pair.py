"""Make the tiny pair: a real target and drafter, small enough for a repository, trained from text on two CPU cores.

    python -m benchmarks.make_tiny.pair --work /tmp/tiny --out benchmarks/tiny

takes about three quarters of an hour. Training stops by the clock, so weights differ from machine to machine; the text, its
split and the prompts' selection rule don't. The result is described in `benchmarks/tiny/README.md`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, Qwen3ForCausalLM

from benchmarks.make_tiny.continuations import (
    NUM_EMITTED_TOKENS,
    PROMPT_TOKENS,
    aux_hidden_states,
    cut_prompts,
    is_repeating,
)
from benchmarks.make_tiny.corpus import Document, Domain, Split, load_documents
from benchmarks.make_tiny.decode import continue_greedily
from benchmarks.make_tiny.drafter import FINISH, DrafterTraining, fresh_drafter, tie_key_norms, train_drafter, write_drafter
from benchmarks.make_tiny.loops import LoopTraining, discourage_loops
from benchmarks.make_tiny.prompts import useful_prompts, write_prompts
from benchmarks.make_tiny.target import TargetTraining, fresh_target, save_target, train_target
from benchmarks.make_tiny.tokens import save_tokenizer, token_stream, train_tokenizer
from honed.recalib.drafter.drafter import Drafter

MAX_SEQUENCES_PER_LENGTH = 900
PROMPT_FILES: dict[Split, str] = {"heldout": "prompts", "traffic": "traffic"}


def make_target(documents: list[Document], tokenizer: Tokenizer, out: Path, given: argparse.Namespace) -> None:
    """Train next-token prediction on both domains, then a few minutes against loops."""
    streams = [token_stream(tokenizer, documents, "a", "train"), token_stream(tokenizer, documents, "b", "train")]
    settings = replace(TargetTraining(), minutes=given.target_minutes)
    model = fresh_target(settings.seed)

    def save() -> None:
        save_target(model, out)

    train_target(model, streams, settings, save)
    discourage_loops(model, streams, replace(LoopTraining(), minutes=given.loop_minutes), save)


def drafter_pools(
    model: PreTrainedModel,
    tokenizer: Tokenizer,
    documents: list[Document],
    features: Callable[[PreTrainedModel, Tensor], Tensor] = aux_hidden_states,
) -> list[tuple[Tensor, Tensor]]:  # [M, T, A] bfloat16, [M, T] for each T
    """Domain A's text and the target's continuation, for each prompt length, with the features for the drafter."""
    chosen = [d for d in documents if d.domain == "a" and d.split == "train"]
    pools = []
    for length in PROMPT_TOKENS:
        prompts = cut_prompts(tokenizer, chosen, 5, length, seed=length)[:MAX_SEQUENCES_PER_LENGTH]
        rows: list[Tensor] = []
        for start in range(0, len(prompts), 128):
            batch = torch.tensor([p.token_ids for p in prompts[start : start + 128]])
            told = continue_greedily(model, batch, NUM_EMITTED_TOKENS)
            rows += [row.clone() for row in told if not is_repeating(row[length:].tolist())]
        ids = torch.stack(rows)
        aux = torch.cat([features(model, part).bfloat16().clone() for part in ids.split(32)])
        pools.append((aux, ids))
    return pools


def make_drafter(model: Qwen3ForCausalLM, tokenizer: Tokenizer, documents: list[Document], given: argparse.Namespace) -> None:
    """Train from scratch on domain A, then briefly with one `k_norm` for all layers."""

    def save(drafter: Drafter) -> None:
        write_drafter(drafter, given.out / "drafter")

    pools = drafter_pools(model, tokenizer, documents)
    drafter = fresh_drafter(given.out / "target")
    train_drafter(drafter, pools, replace(DrafterTraining(), steps=given.drafter_steps), save)
    tie_key_norms(drafter)
    train_drafter(drafter, pools, FINISH, save)


def write_all_prompts(model: PreTrainedModel, tokenizer: Tokenizer, documents: list[Document], out: Path) -> None:
    """Write held-out prompts and traffic of both domains."""
    domains: tuple[Domain, ...] = ("a", "b")
    for split, name in PROMPT_FILES.items():
        for domain in domains:
            prompts = useful_prompts(model, tokenizer, documents, domain, split)
            write_prompts(out / f"{name}_{domain}.jsonl", tokenizer, prompts)
            print(f"{name}_{domain}: {len(prompts)} prompts, {len({p.session for p in prompts})} documents", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the tiny pair from text.")
    parser.add_argument("--work", type=Path, required=True, help="folder for the downloaded source of domain B")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target-minutes", type=float, default=TargetTraining.minutes)
    parser.add_argument("--loop-minutes", type=float, default=LoopTraining.minutes)
    parser.add_argument("--drafter-steps", type=int, default=DrafterTraining.steps)
    parser.add_argument("--stages", nargs="+", default=["target", "drafter", "prompts"])
    given = parser.parse_args()
    target = given.out / "target"
    target.mkdir(parents=True, exist_ok=True)
    documents = load_documents(given.work)
    if "target" in given.stages:
        save_tokenizer(train_tokenizer(documents), target)
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    if "target" in given.stages:
        make_target(documents, tokenizer, target, given)
    model = Qwen3ForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    if "drafter" in given.stages:
        make_drafter(model, tokenizer, documents, given)
    if "prompts" in given.stages:
        write_all_prompts(model, tokenizer, documents, given.out)


if __name__ == "__main__":
    main()
