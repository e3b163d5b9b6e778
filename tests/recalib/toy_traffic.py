"""A model pair and traffic for tests of the trainer: text that a drafter can learn in seconds.

Each workload has tokens of its own and walks round a cycle of them, so the next token is a function of the last and a small
drafter learns it. Features are the embedding plus noise.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from honed.adapt.protocol.sample_ring import FLAG_PREFILL, FLAG_REJECTED
from honed.attach.capture.ring_writer import RingWriter
from honed.recalib.drafter.checkpoint import save_drafter
from honed.recalib.drafter.dflash import DFlashDrafter, DrafterConfig
from honed.recalib.drafter.drafter import Vocabulary

VOCAB, WIDTH, PROMPT = 53, 32, 5
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "block_size": 4,
    "num_target_layers": 3,
    "dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 2]},
}
CYCLES = {"a": (3, 25, 2), "b": (28, 25, 7)}
"""First token, length of the cycle, stride."""


def make_pair(folder: Path) -> tuple[Path, Path]:
    """Checkpoints of a target (what a drafter needs of one) and of an untrained drafter, in bfloat16."""
    torch.manual_seed(0)
    target, drafter = folder / "target", folder / "drafter"
    for path in (target, drafter):
        path.mkdir(parents=True)
    head = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_hidden_layers": 3, "tie_word_embeddings": True}
    (target / "config.json").write_text(json.dumps(head))
    embed = torch.randn(VOCAB, WIDTH)
    save_file({"model.embed_tokens.weight": embed, "model.norm.weight": torch.ones(WIDTH)}, target / "m.safetensors")
    (drafter / "config.json").write_text(json.dumps(CONFIG))
    save_drafter(DFlashDrafter(DrafterConfig.from_json(CONFIG), Vocabulary(embed, embed)), drafter, drafter)
    return target, drafter


def tokens(workload: str, start: int, count: int) -> np.ndarray:
    """Text of a workload."""
    first, length, stride = CYCLES[workload]
    return (first + (start + stride * np.arange(count)) % length).astype(np.int32)


def features(ids: np.ndarray, seed: int) -> np.ndarray:
    """bfloat16 rows as their 16 bits."""
    embed = np.random.default_rng(0).normal(size=(VOCAB, WIDTH))
    rows = embed[ids] + np.random.default_rng(seed).normal(scale=0.1, size=(len(ids), WIDTH))
    return torch.tensor(rows).to(torch.bfloat16).view(torch.uint16).numpy()


def write_sessions(
    ring: RingWriter, workload: str, count: int, rows: int = 80, seed: int = 0, version: str = "", label: str = ""
) -> None:
    """Captured requests, one a session: a prompt, then verify rounds of one to four rows, then the end.

    `label`: that of the requests; default: the workload.
    """
    rng = np.random.default_rng((seed, *workload.encode()))
    for i in range(count):
        ids = tokens(workload, int(rng.integers(VOCAB)), rows)
        values, request, at = features(ids, i), f"{workload}{seed}-{i}", PROMPT
        name = label or workload
        ring.write_rows(request, name, version, 0, ids[:at], values[:at], FLAG_PREFILL)
        while at < rows:
            end = min(at + int(rng.integers(1, 5)), rows)
            is_whole = end - at == int(CONFIG["block_size"])  # type: ignore[call-overload]
            flags = 0 if is_whole else FLAG_REJECTED
            ring.write_rows(request, name, version, at, ids[at:end], values[at:end], flags)
            at = end
        ring.write_end(request, name)
