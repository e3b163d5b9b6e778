"""Make trained pairs of other kinds, each from the tiny pair's text and tokenizer.

    python -m benchmarks.make_pairs sliding dflash2 eagle3 mtp hybrid --work /tmp/tiny --out build/pairs

sliding   the tiny target; its drafter with a window of 64 tokens in every layer and its own head of 3,072 words: some minutes
dflash2   the tiny target; its drafter with DFlash2's convolutions and selector: some minutes
eagle3    the tiny target; an EAGLE-3 drafter of its own with 3,072 words, from nothing: some minutes
mtp       the tiny target under Qwen3.5's names, with an MTP head of its own, from nothing: some minutes
hybrid    a target of Qwen3.5's kind (Gated DeltaNet, M-RoPE) with a drafter of its own, from nothing: most of an hour

As in the tiny pair, a target knows both domains, and its drafter domain A alone.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel, Qwen3ForCausalLM

from benchmarks.make_pairs.hybrid import SHAPE, fresh_hybrid, load_hybrid, save_hybrid
from benchmarks.make_pairs.kinds import (
    change_tensors,
    eagle3_json,
    fresh_eagle3,
    make_dflash2,
    reduce_vocabulary,
    slide,
    write_eagle3,
)
from benchmarks.make_pairs.mtp import make_tiny_mtp_target, write_mtp_head
from benchmarks.make_tiny.corpus import Document, load_documents
from benchmarks.make_tiny.drafter import (
    FINISH,
    TARGET_LAYER_IDS,
    DrafterTraining,
    drafter_json,
    fresh_drafter,
    tie_key_norms,
    train_drafter,
    write_drafter,
)
from benchmarks.make_tiny.loops import LoopTraining, discourage_loops
from benchmarks.make_tiny.pair import drafter_pools, write_all_prompts
from benchmarks.make_tiny.target import TargetTraining, train_target
from benchmarks.make_tiny.tokens import END_TOKEN_ID, VOCAB_SIZE, token_stream
from honed.recalib.drafter.checkpoint import load_drafter
from honed.recalib.drafter.drafter import Drafter
from honed.recalib.drafter.mtp import MtpDrafter
from honed.recalib.registry.head_of_target import extract_head

TINY = Path(__file__).parents[1] / "tiny"
WINDOW, NUM_WORDS = 64, 3072
PROMPT_FILES = ("prompts_a.jsonl", "prompts_b.jsonl", "traffic_a.jsonl", "traffic_b.jsonl")

Pools = list[tuple[Tensor, Tensor]]


def frequent_words(streams: list[Tensor]) -> Tensor:  # -> [W], rising
    """The tokens that the target's training text has most often."""
    counts = torch.cat(streams).bincount(minlength=VOCAB_SIZE)
    return counts.topk(NUM_WORDS).indices.sort().values


def continue_training(folder: Path, target: Path, pools: Pools, settings: DrafterTraining) -> None:
    """Train a drafter that was changed, all its parameters, and write them into its files."""

    def save(drafter: Drafter) -> None:
        change_tensors(folder, dict(drafter.named_parameters()))

    train_drafter(load_drafter(folder, target), pools, settings, save)


def from_tiny(kind: str, folder: Path, streams: list[Tensor], pools: Pools, steps: int) -> None:
    """Change the tiny pair's drafter, and let it learn what it is now."""
    for name in ("drafter", *PROMPT_FILES):
        copy = shutil.copytree if name == "drafter" else shutil.copyfile
        copy(TINY / name, folder / name)
    target, drafter = TINY / "target", folder / "drafter"
    if kind == "sliding":
        reduce_vocabulary(drafter, target, frequent_words(streams))
        slide(drafter, WINDOW)
    else:
        make_dflash2(drafter, scale=0.01)
    continue_training(drafter, target, pools, replace(FINISH, steps=steps))


def make_eagle3(folder: Path, streams: list[Tensor], pools: Pools, settings: DrafterTraining) -> None:
    """Train an EAGLE-3 drafter for the tiny target, which drafts five tokens."""
    for name in PROMPT_FILES:
        shutil.copyfile(TINY / name, folder / name)
    words = frequent_words(streams)
    layers = [layer + 1 for layer in TARGET_LAYER_IDS[:3]]  # vLLM counts the embedding's output as 0
    more = {"eagle_aux_hidden_state_layer_ids": layers, "draft_vocab_size": len(words)}
    raw = eagle3_json(TINY / "target", **more)
    drafter = fresh_eagle3(TINY / "target", raw, words)
    read = [(aux[..., : drafter.config.feature_size], ids) for aux, ids in pools]

    def save(_: Drafter) -> None:
        write_eagle3(drafter, folder / "drafter", raw)

    train_drafter(drafter, read, settings, save)


def make_mtp(folder: Path, pools: Pools, settings: DrafterTraining) -> None:
    """Train an MTP head for the tiny target."""
    for name in PROMPT_FILES:
        shutil.copyfile(TINY / name, folder / name)
    target, head = make_tiny_mtp_target(TINY / "target", folder / "target"), folder / "drafter"
    head.mkdir()
    extract_head(target, head)
    drafter = load_drafter(head, target)
    assert isinstance(drafter, MtpDrafter)

    def save(_: Drafter) -> None:
        write_mtp_head(drafter, target)
        extract_head(target, head)

    train_drafter(drafter, pools, settings, save)


@torch.inference_mode()
def last_hidden_states(model: PreTrainedModel, token_ids: Tensor) -> Tensor:  # [S, T] -> [S, T, H]
    """The target's last hidden states, after its final norm."""
    found: Tensor = model.model(token_ids, use_cache=False).last_hidden_state
    return found


def make_hybrid(
    folder: Path, documents: list[Document], tokenizer: Tokenizer, streams: list[Tensor], given: argparse.Namespace
) -> None:
    """Train a hybrid target and its drafter from nothing."""
    target = folder / "target"
    target.mkdir(exist_ok=True)
    # Domain B's documents are short: a target that learned their ends from so little text would hardly say anything there.
    streams = [stream[stream != END_TOKEN_ID] for stream in streams]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(TINY / "target" / name, target / name)
    if "target" in given.stages:
        settings = TargetTraining(minutes=given.target_minutes, sequence_tokens=256)
        torch.manual_seed(settings.seed)
        fresh = fresh_hybrid()

        def save_target() -> None:
            save_hybrid(fresh, target)

        train_target(fresh, streams, settings, save_target, compiles=False)
    model = load_hybrid(target)
    if "loops" in given.stages:

        def save_model() -> None:
            save_hybrid(model, target)

        discourage_loops(model, streams, LoopTraining(minutes=given.loop_minutes), save_model)
        model = load_hybrid(target)  # as it is served, in bfloat16
    if "drafter" in given.stages:
        pools = drafter_pools(model, tokenizer, documents)
        raw = drafter_json() | SHAPE | {"num_hidden_layers": 2}
        drafter = fresh_drafter(target, raw=raw)

        def save(trained: Drafter) -> None:
            write_drafter(trained, folder / "drafter", raw)

        train_drafter(drafter, pools, replace(DrafterTraining(), steps=given.drafter_steps), save)
        tie_key_norms(drafter)
        train_drafter(drafter, pools, FINISH, save)
    if "prompts" in given.stages:
        write_all_prompts(model, tokenizer, documents, folder)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pairs", nargs="+", choices=("sliding", "dflash2", "eagle3", "mtp", "hybrid"))
    parser.add_argument("--work", type=Path, required=True, help="folder for the downloaded source of domain B")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--target-minutes", type=float, default=20.0, help="hybrid: the target, processor time")
    parser.add_argument("--loop-minutes", type=float, default=5.0, help="hybrid: against loops, the same")
    parser.add_argument("--drafter-steps", type=int, default=DrafterTraining.steps, help="hybrid: steps of the drafter")
    parser.add_argument("--stages", nargs="+", default=["target", "loops", "drafter", "prompts"], help="hybrid: what to make")
    parser.add_argument("--steps", type=int, default=600, help="sliding and dflash2: steps after the change")
    parser.add_argument("--eagle3-steps", type=int, default=1000, help="eagle3: steps of the drafter")
    parser.add_argument("--mtp-steps", type=int, default=1000, help="mtp: steps of the head")
    given = parser.parse_args()
    documents = load_documents(given.work)
    tokenizer = Tokenizer.from_file(str(TINY / "target" / "tokenizer.json"))
    streams = [token_stream(tokenizer, documents, "a", "train"), token_stream(tokenizer, documents, "b", "train")]
    pools: Pools = []
    for kind in given.pairs:
        folder = given.out / kind
        if kind != "hybrid":
            tiny = Qwen3ForCausalLM.from_pretrained(TINY / "target", dtype=torch.float32).eval()
            if not pools and kind != "mtp":
                pools = drafter_pools(tiny, tokenizer, documents)
            unfinished = given.out / f"{kind}.unfinished"  # a pair that was interrupted must not be taken for a trained one
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
            if kind == "eagle3":
                make_eagle3(unfinished, streams, pools, replace(DrafterTraining(), steps=given.eagle3_steps))
            elif kind == "mtp":
                read = drafter_pools(tiny, tokenizer, documents, last_hidden_states)
                make_mtp(unfinished, read, replace(DrafterTraining(), steps=given.mtp_steps))
            else:
                from_tiny(kind, unfinished, streams, pools, given.steps)
            shutil.rmtree(folder, ignore_errors=True)
            unfinished.rename(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            make_hybrid(folder, documents, tokenizer, streams, given)


if __name__ == "__main__":
    main()
