"""Make and train the tiny pair's drafter: DFlash with three layers and blocks of eight, on domain A alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.make_tiny.muon import make_muon
from benchmarks.make_tiny.target import matrix_products
from benchmarks.make_tiny.tokens import MASK_TOKEN_ID, VOCAB_SIZE
from honed.recalib.drafter.checkpoint import load_target_head, save_drafter
from honed.recalib.drafter.dflash import DFlashDrafter, DrafterConfig
from honed.recalib.drafter.drafter import Drafter, Vocabulary
from honed.recalib.training.objective import position_weights, shares

TARGET_LAYER_IDS = (1, 3, 4, 5)

# Letters: S sequences, T tokens of each, N anchors of each, K draft positions, A unfused features.


def drafter_json() -> dict[str, Any]:
    """Make the drafter's config.json as vLLM reads it."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "block_size": 8,
        "num_target_layers": 6,
        "dflash_config": {"mask_token_id": MASK_TOKEN_ID, "target_layer_ids": list(TARGET_LAYER_IDS)},
    }


def fresh_drafter(target_dir: Path, seed: int = 0, raw: dict[str, Any] | None = None) -> DFlashDrafter:
    """Make a drafter with random weights for the target, of the config.json above or another."""
    torch.manual_seed(seed)
    head = load_target_head(target_dir)
    drafter = DFlashDrafter(DrafterConfig.from_json(raw or drafter_json()), Vocabulary(head.embed_tokens, head.lm_head))
    for name, parameter in drafter.named_parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.02 if "down_proj" not in name and "o_proj" not in name else 0.008)
    return drafter


def write_drafter(drafter: Drafter, folder: Path, raw: dict[str, Any] | None = None) -> None:
    """Save in bfloat16 with the config.json above, or another."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw or drafter_json(), indent=2) + "\n")
    save_drafter(drafter, folder, folder)


@dataclass(frozen=True)
class DrafterTraining:
    """Length and rates of training from scratch; the rates fall linearly over the last `decay_share` of the steps."""

    steps: int = 2500
    sequences: int = 8
    anchors: int = 64
    matrix_lr: float = 0.01
    other_lr: float = 2e-3
    warmup_share: float = 0.02
    decay_share: float = 0.6
    decay_tokens: float = 4.0
    train_key_norms: bool = True
    seed: int = 0


FINISH = DrafterTraining(steps=500, matrix_lr=0.004, other_lr=5e-4, decay_share=1.0, train_key_norms=False, seed=1)


def tie_key_norms(drafter: DFlashDrafter) -> None:
    """Give all layers the mean of their `k_norm`.

    vLLM 0.32's CPU build norms the context keys of *every* layer with layer 0's `k_norm`. Its `rms_norm` takes no
    two-dimensional weights; CUDA's does by its source. With one `k_norm` for all layers the pair computes the same either way.
    """
    norms = [layer.self_attn.k_norm.weight for layer in drafter.layers]
    with torch.no_grad():
        mean = torch.stack(norms).mean(0).bfloat16()
        for norm in norms:
            norm.copy_(mean)


def block_loss(
    drafter: Drafter, aux: Tensor, token_ids: Tensor, anchors: Tensor, decay_tokens: float
) -> tuple[Tensor, Tensor]:  # [S, T, A], [S, T], [S, N] -> [], [K]
    """Position-decayed cross-entropy on the target's tokens, and the share that is right at each position."""
    num_samples, length = token_ids.shape
    segments = torch.arange(num_samples).repeat_interleave(length)  # [S * T]
    positions = torch.arange(length).repeat(num_samples)
    rows = (anchors + length * torch.arange(num_samples)[:, None]).flatten()  # [S * N]
    with matrix_products():
        hidden = drafter.draft_hidden(drafter.fuse(aux).flatten(0, 1), positions, token_ids.flatten(), rows, segments)
        offsets = torch.arange(hidden.shape[1] + 1)
        tokens = token_ids.gather(1, (anchors[:, :, None] + offsets).flatten(1)).view(len(hidden), -1)  # [S * N, 1 + K]
        logits = _logits(drafter, hidden, tokens[:, :-1])
    labels = drafter.to_words(tokens[:, 1:])
    is_word = labels >= 0
    weights = is_word * position_weights(labels.shape[1], decay_tokens)
    labels = labels.clamp(min=0)
    is_right = ((logits.detach().argmax(-1) == labels) & is_word).float().mean(0)
    surprise = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view(labels.shape)
    return (surprise * shares(weights)).sum(), is_right


def _logits(drafter: Drafter, hidden: Tensor, previous: Tensor) -> Tensor:  # [M, K, H], [M, K] -> [M, K, W]
    """Scores of each next word; a selector's codebooks learn too, which honed itself never trains."""
    logits = F.linear(hidden, drafter.lm_head)
    selector = drafter.candidate_selector if isinstance(drafter, DFlashDrafter) else None
    if selector is None:
        return logits
    return logits * drafter.config.logit_scale + F.linear(selector(hidden, previous), selector.successor_codebook)


def _is_matrix(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and "codebook" not in name


def train_drafter(
    drafter: Drafter,
    pools: list[tuple[Tensor, Tensor]],  # [M, T, A] bfloat16 and [M, T] for each length T
    settings: DrafterTraining,
    save: Callable[[Drafter], None],
) -> None:
    """Train on random blocks of random sequences."""
    generator = torch.Generator().manual_seed(settings.seed)
    matrices = [p for n, p in drafter.named_parameters() if _is_matrix(n, p)]
    others = [
        p for n, p in drafter.named_parameters() if not _is_matrix(n, p) and (settings.train_key_norms or "k_norm" not in n)
    ]
    optimizers = [
        make_muon(matrices, settings.matrix_lr),
        torch.optim.AdamW(others, lr=settings.other_lr, weight_decay=0.0),
    ]
    loss_of = torch.compile(block_loss, dynamic=False)
    block = drafter.config.block_size
    for step in range(1, settings.steps + 1):
        progress = step / settings.steps
        factor = max(0.02, min(1.0, progress / settings.warmup_share, (1.0 - progress) / settings.decay_share))
        for optimizer, full in zip(optimizers, (settings.matrix_lr, settings.other_lr), strict=True):
            optimizer.param_groups[0]["lr"] = full * factor
        aux, token_ids = pools[step % len(pools)]
        chosen = torch.randint(0, len(aux), (settings.sequences,), generator=generator)
        anchors = torch.randint(1, token_ids.shape[1] - block + 1, (settings.sequences, settings.anchors), generator=generator)
        loss, is_right = loss_of(drafter, aux[chosen].float(), token_ids[chosen], anchors, settings.decay_tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if step % 50 == 0:
            right = " ".join(f"{share:.2f}" for share in is_right.tolist())
            print(f"drafter step {step} loss {loss.item():.3f} right {right}", flush=True)
        if step % 250 == 0:
            save(drafter)
    save(drafter)
