"""How much memory a training will need, said before it begins, and why it can't begin where that isn't there.

    weights      float32 master weights of the drafter, and its parent's for comparison
    target       embedding and head, shared with nobody: the server's own are in another process
    gradients    of what trains, float32
    optimizer    AdamW's two moments, and the moving average where one is kept
    context      features of the packed rows, and their keys and values in every layer
    layers       what a layer keeps for the way back: all of them, or one at a time with gradient checkpointing
    loss         a tile of scores, or the scores of a few rows, and gradients of hidden states; never [N, K, V]

The first four are exact; the others count the tensors that are alive together at the worst moment of `MicroTrainer.step`. The
estimate is held against the measured peak in `tests/recalib/config/test_memory.py`: it must not be too low, nor idle talk.
No torch here: `honed doctor` says beforehand what the trainer will say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from honed.kernels.training.sizes import BUFFER_BYTES, CACHED_BYTES, PART_QUERIES, ROWS, TILE
from honed.recalib.config.drafter import DrafterConfig
from honed.recalib.config.training import Precision, TrainingSettings

# Letters: T packed rows, N blocks, K draft positions, B = K + 1, V vocabulary, H width, I MLP width, L layers.

FLOAT = 4
GIB = 2**30
RESERVE_SHARE = 0.1
"""Of what is free, left to others: allocators round up, and the engine breathes."""


class MemoryBudgetError(ValueError):
    """A training that doesn't fit; the text says what it needs, what there is and what would make it fit."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the worst moment, by purpose."""

    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        named = ", ".join(f"{name} {in_words(size)}" for name, size in self.parts.items() if size)
        return f"{in_words(self.total_bytes)} ({named})"


def estimate(
    config: DrafterConfig,
    settings: TrainingSettings,
    rows: int,
    *,
    is_fused: bool = True,
    is_head_tied: bool = False,
    shared_bytes: int = FLOAT,
    compute_bytes: int = FLOAT,
) -> MemoryEstimate:
    """What one training needs.

    Args:
        rows: T of a micro-step.
        is_fused: whether rows are fused features, rather than the target's layers side by side.
        is_head_tied: whether head and embedding are one tensor.
        shared_bytes: of a value of the embedding and the head; 2 where they are kept in bfloat16.
        compute_bytes: of a value that a layer keeps; 2 under bfloat16.
    """
    num_frozen, num_trained = count_parameters(config, settings)
    blocks = settings.anchors_per_micro_step
    head = config.vocab_size * config.hidden_size * shared_bytes
    parts = {
        "weights": 2 * FLOAT * (num_frozen + num_trained),
        "target": head if is_head_tied else 2 * head,
        "gradients": FLOAT * num_trained,
        "optimizer": FLOAT * num_trained * (3 if settings.ema_decay else 2),
        "context": _context_bytes(config, settings, rows, is_fused, compute_bytes),
        "layers": _layer_bytes(config, settings, blocks, rows, compute_bytes),
        "loss": _loss_bytes(config, blocks),
    }
    return MemoryEstimate(parts)


def estimate_and_cures(
    config: DrafterConfig, settings: TrainingSettings, rows: int, **about: Any
) -> tuple[MemoryEstimate, list[tuple[str, MemoryEstimate]]]:
    """What a training needs, and what it would need with other settings, those first that cost least.

    Args:
        about: as `estimate` takes them.
    """
    needed = estimate(config, settings, rows, **about)
    blocks, gathered = settings.anchors_per_micro_step, settings.micro_steps_per_update
    cures = []
    if not settings.gradient_checkpointing:
        settings = replace(settings, gradient_checkpointing=True)
        cures.append(("trainer.gradient_checkpointing = true makes it fit", estimate(config, settings, rows, **about)))
    while blocks > 1:
        blocks, gathered = blocks // 2, gathered * 2
        settings = replace(settings, anchors_per_micro_step=blocks, micro_steps_per_update=gathered)
        changes = [
            "trainer.gradient_checkpointing = true",
            f"trainer.anchors_per_micro_step = {blocks}",
            f"trainer.micro_steps_per_update = {gathered}",
        ]
        cures.append((f"{', '.join(changes)} make it fit", estimate(config, settings, rows, **about)))
    return needed, cures


def usable_bytes(free: int, limit_bytes: int = 0) -> int:
    """What a training may take: the limit if there is one, but no more than nine tenths of what is free."""
    usable = int(free * (1.0 - RESERVE_SHARE))
    return min(limit_bytes, usable) if limit_bytes else usable


def value_bytes(device: str, precision: Precision) -> tuple[int, int]:
    """(`shared_bytes`, `compute_bytes`) of `estimate`, as `precision.compute_dtype` has them on a GPU with bfloat16."""
    is_gpu = device.startswith("cuda")
    is_short = precision == "bfloat16" or (precision == "auto" and is_gpu)
    return FLOAT // 2 if is_gpu and is_short else FLOAT, FLOAT // 2 if is_short else FLOAT


def count_parameters(config: DrafterConfig, settings: TrainingSettings) -> tuple[int, int]:
    """(frozen, trained) of a drafter."""
    h, d, layers = config.hidden_size, config.head_dim, config.num_hidden_layers
    queries, values = config.num_attention_heads * d, config.num_key_value_heads * d
    kv_path = config.feature_size * h + h + layers * (2 * h * values + d)
    biases = layers * (queries + h) if config.attention_bias else 0
    kv_path += 2 * layers * values if config.attention_bias else 0
    others = h + biases + layers * (2 * h * queries + d + 3 * h * config.intermediate_size + 2 * h)
    return (0, kv_path + others) if settings.scope == "full" else (kv_path, others)


def _context_bytes(config: DrafterConfig, settings: TrainingSettings, rows: int, is_fused: bool, compute_bytes: int) -> int:
    width = config.hidden_size if is_fused else config.feature_size
    values = config.num_key_value_heads * config.head_dim
    kept = 6 if settings.scope == "full" else 3  # K before and after its norm and rotation, V; more for the way back
    rest = 2 * config.hidden_size if not is_fused else 0
    return rows * FLOAT * (2 * width + rest) + rows * compute_bytes * config.num_hidden_layers * kept * values


def _layer_bytes(config: DrafterConfig, settings: TrainingSettings, blocks: int, rows: int, compute_bytes: int) -> int:
    tokens = blocks * config.block_size
    h, heads, d = config.hidden_size, config.num_attention_heads, config.head_dim
    queries, values = heads * d, config.num_key_value_heads * d
    part = max(1, PART_QUERIES // config.block_size) * config.block_size
    read = math.ceil(tokens / part) * (rows + part)  # keys that the parts of the attention read, all together
    # One of norms in float32, their inputs and outputs, projections before and after rotation, MLP's three and its products.
    row = 8 * h + 7 * queries + 6 * values + 5 * config.intermediate_size
    kept = (tokens * row + 2 * read * values) * compute_bytes + tokens * heads * FLOAT
    passing = 2 * read * values * compute_bytes + part * read * FLOAT  # one layer's gradients of keys and values; the masks
    if settings.gradient_checkpointing:
        return kept + passing + config.num_hidden_layers * tokens * h * FLOAT
    return config.num_hidden_layers * kept + passing


def _loss_bytes(config: DrafterConfig, blocks: int) -> int:
    """Kept blocks are held to the parent's distribution whatever the loss of fresh ones, and that takes most."""
    tokens, h, v = blocks * config.num_draft_tokens, config.hidden_size, config.vocab_size
    by_labels = min(tokens, ROWS) * (min(TILE, v) + h)
    scores = min(2 * tokens * v, max(max(BUFFER_BYTES.values()) // FLOAT, 2 * v))
    by_goal = scores * 5 // 4 + 3 * min(tokens * v, CACHED_BYTES // FLOAT)
    return FLOAT * (max(by_labels, by_goal) + 5 * tokens * h)


def check_fits(needed: MemoryEstimate, available_bytes: int, where: str, cures: list[tuple[str, MemoryEstimate]]) -> None:
    """Refuse what doesn't fit.

    Args:
        where: "cpu", "cuda:0 beside the engine", …
        cures: changes of settings that are to be tried, and what would be needed then, cheapest first.

    Raises:
        MemoryBudgetError: cause and cure.
    """
    if needed.total_bytes <= available_bytes:
        return
    able = [text for text, less in cures if less.total_bytes <= available_bytes]
    cure = able[0] if able else "train on a device with more memory (trainer.device), the CPU for one"
    raise MemoryBudgetError(f"training needs {needed}, and {where} has {in_words(available_bytes)} for it: {cure}")


def in_words(size: int) -> str:
    """1.5 GiB, 12 MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{math.ceil(size / 2**20)} MiB"
