"""Writes docs/models.md: which published drafters are trained, and why others aren't, by the rules that the engine asks.

`python -m docs.make.models_page ROOT` writes the page of a checkout.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docs.make.published import HEADS, PUBLISHED
from honed.recalib.config.drafter import DrafterConfig, Eagle3, Mtp
from honed.recalib.config.memory import GIB, estimate, value_bytes
from honed.recalib.config.trainer import TrainerSettings

PAGE = "docs/models.md"
HEAD = """# Published drafters

`make reference` writes this page. `docs/make/published.py` has what is known of each drafter, `adapt/models/trainable.py` the
rules. An engine asks the same rules when it starts, with what vLLM has loaded. `honed engines` and `honed doctor` give its
answer.

*Yes* means: honed captures samples, trains the drafter and swaps it. Draft lengths are tuned for all of them. With
other MTP heads than those that are trained that wasn't tried.
No published drafter's own weights were trained here. Pairs of most of their kinds were, at toy size: `make test-zoo`.
[Training](training.md#which-drafters-are-trained) says which kinds are trained.

| drafter | target | structure | can be trained |
|---|---|---|---|
"""
OWN_HEADS = """
## Targets with an MTP head

The head is in the target's checkpoint.

| target | structure | can be trained |
|---|---|---|
"""
MEMORY = """
## Memory of a training

The trainer's own estimate, with default settings, in GiB. A training takes at most nine tenths of the memory that is free, so
a ninth more than this has to be free. Where engines will still want more than a tenth, that has to be free as well.
`honed doctor` gives the estimate for your drafter. Samples come on top
(`trainer.sample_bytes`). On a GPU the engine's memory comes on top as well.

| drafter | CPU, `kv-frozen` | CPU, `full` | GPU, `kv-frozen` | GPU, `full` |
|---|---|---|---|---|
"""
QWEN3 = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936}
DFLASH = {"num_hidden_layers": 5, "block_size": 16, "mask_token_id": 0, "target_layer_ids": (1, 9, 17, 25, 33)}
EAGLE3 = {"num_hidden_layers": 1, "block_size": 4, "mask_token_id": 0, "target_layer_ids": (2, 16, 29)}
LLAMAS = Eagle3(
    norm_before_residual=True,
    norm_before_fc=False,
    norms_features=False,
    feeds_normed=False,
    has_head_norms=False,
    num_features=3,
)
MIMOS = Mtp(has_gate=False, is_mimo=True)
SIZES: dict[str, dict[str, Any]] = {
    "DFlash, 5 layers with Qwen3-4B's sizes": QWEN3 | DFLASH | {"hidden_size": 2560, "intermediate_size": 9728},
    "DFlash, 5 layers with Qwen3-8B's sizes": QWEN3 | DFLASH | {"hidden_size": 4096, "intermediate_size": 12_288},
    "EAGLE-3 with Llama-3.1-8B's sizes, 32,000 words": QWEN3
    | EAGLE3
    | {"hidden_size": 4096, "intermediate_size": 14_336, "vocab_size": 128_256, "draft_vocab_size": 32_000, "eagle3": LLAMAS},
    "MTP head with MiMo-7B's sizes": QWEN3
    | EAGLE3
    | {"hidden_size": 4096, "intermediate_size": 11_008, "vocab_size": 151_680, "attention_bias": True, "mtp": MIMOS},
}

TIED = ("DFlash, 5 layers with Qwen3-4B's sizes",)
"""Of `SIZES`: the target's head is its embedding."""


def text() -> str:
    """The page."""
    rows = []
    for one in PUBLISHED:
        rows.append(f"| {one.drafter} | {one.target} | {one.traits} | {_answer(one.reasons())} |")
    heads = [f"| {one.target} | {one.structure} | {_answer(one.reasons())} |" for one in HEADS]
    parts = HEAD, "\n".join(rows), OWN_HEADS, "\n".join(heads), MEMORY, "\n".join(map(_memory_row, SIZES))
    return "".join(part if part.endswith("\n") else part + "\n" for part in parts)


def _answer(reasons: list[str]) -> str:
    return f"no: {'; '.join(reasons)}" if reasons else "yes"


def _memory_row(name: str) -> str:
    """A drafter's memory by device and scope."""
    config = DrafterConfig(**SIZES[name], target_hidden_size=SIZES[name]["hidden_size"])
    cells = []
    for device in ("cpu", "cuda"):
        shared, compute = value_bytes(device, "auto")
        for scope in ("kv-frozen", "full"):
            trainer = TrainerSettings()
            settings = trainer.training(scope, config.block_size, config.hidden_size)
            rows, is_tied = trainer.rows_per_micro_step, name in TIED
            needed = estimate(config, settings, rows, is_head_tied=is_tied, shared_bytes=shared, compute_bytes=compute)
            cells.append(f"{needed.total_bytes / GIB:.1f}")
    return f"| {name} | {' | '.join(cells)} |"


if __name__ == "__main__":
    (Path(sys.argv[1]) / PAGE).write_text(text())
