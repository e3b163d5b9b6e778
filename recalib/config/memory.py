"""Estimate of a training's memory and disk, made before it begins, and the refusal of a training that doesn't fit.

    weights      float32 master weights of the drafter, and its parent's for comparison
    target       embedding and head, and the drafter's and its parent's own; the server's are in another process, not shared
    copies       of trained parameters, in the type of matrix products where that isn't float32: the backward pass needs them
    gradients    of the trained parameters, float32
    optimizer    AdamW's two moments
    context      features of the packed rows, and their keys and values in every layer
    layers       activations kept for the backward pass: of all layers, or of one with gradient checkpointing
    loss         a tile of scores, or the scores of a few rows, and gradients of hidden states; never [N, K, V]

The first four are exact. The others count the tensors alive at the peak of `MicroTrainer.step`.
`tests/recalib/config/test_memory.py` compares the estimate with the measured peak: it must be neither too low nor far too high.
No torch here: `honed doctor` gives the trainer's answer in advance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from honed.kernels.training.sizes import BUFFER_BYTES, CACHED_BYTES, PART_QUERIES, ROWS, TILE
from honed.recalib.config.drafter import DrafterConfig, Eagle3, Mtp
from honed.recalib.config.training import Precision, TrainingSettings

# Letters: T packed rows, N blocks, K draft positions, B = K + 1, V vocabulary, H width, I MLP width, L layers.

FLOAT = 4
GIB = 2**30
RESERVE_SHARE = 0.1
"""Least share of free memory left to others: allocators round up, and the engine's use varies."""


class MemoryBudgetError(ValueError):
    """A training that doesn't fit. The text says what it needs, what there is and what would make it fit."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes at the peak, by purpose."""

    parts: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Sum over all purposes."""
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
    own_values: int | None = None,
    shared_bytes: int = FLOAT,
    compute_bytes: int = FLOAT,
) -> MemoryEstimate:
    """Estimate one training's memory.

    Args:
        rows: T of a micro-step.
        is_fused: whether rows are fused features, rather than the target's concatenated layers.
        is_head_tied: whether the target's head and embedding are one tensor.
        own_values: of the drafter's own embedding and head; None: unknown, and taken as those of a reduced vocabulary's head.
        shared_bytes: per value of the embedding and the head; 2 if they are kept in bfloat16.
        compute_bytes: per value that a layer keeps; 2 under bfloat16.
    """
    num_frozen, num_trained = count_parameters(config, settings)
    blocks = settings.anchors_per_micro_step
    embedding = config.vocab_size * config.hidden_size * shared_bytes
    heads = 0 if is_head_tied else embedding
    reduced = (config.draft_vocab_size or 0) * config.hidden_size
    heads += FLOAT * reduced  # the target's rows of the drafter's words
    heads += 2 * FLOAT * (reduced if own_values is None else own_values)  # the drafter's own, and its parent's
    experts = config.mtp.experts if config.mtp else None
    if experts is not None:
        heads += 3 * experts.count * experts.intermediate_size * config.hidden_size * shared_bytes
    if config.pair_rank:  # the head with columns for pairs, for drafter and parent
        heads += 2 * config.num_words * (config.hidden_size + config.pair_rank) * shared_bytes
    parts = {
        "weights": 2 * FLOAT * (num_frozen + num_trained),
        "target": embedding + heads,
        "copies": compute_bytes * num_trained if compute_bytes < FLOAT else 0,
        "gradients": FLOAT * num_trained,
        "optimizer": 2 * FLOAT * num_trained,
        "context": _context_bytes(config, settings, rows, is_fused, compute_bytes),
        "layers": _layer_bytes(config, settings, blocks, rows, compute_bytes),
        "loss": _loss_bytes(config, blocks),
    }
    return MemoryEstimate(parts)


def estimate_and_cures(
    config: DrafterConfig, settings: TrainingSettings, rows: int, **about: Any
) -> tuple[MemoryEstimate, list[tuple[str, MemoryEstimate]]]:
    """Estimate a training's memory with its settings and with smaller ones, cheapest change first.

    Args:
        about: passed on to `estimate`.
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


def usable_bytes(free: int, limit_bytes: int = 0, reserve: int = 0) -> int:
    """Return what a training may take: nine tenths of the free memory, or the limit if that is lower.

    Args:
        reserve: bytes of the free memory that engines will still want. They are left, where they are more than a tenth.
    """
    usable = max(min(int(free * (1.0 - RESERVE_SHARE)), free - reserve), 0)
    return min(limit_bytes, usable) if limit_bytes else usable


def value_bytes(device: str, precision: Precision, has_bfloat16: bool = True) -> tuple[int, int]:
    """Return `estimate`'s (`shared_bytes`, `compute_bytes`), as `precision.compute_dtype` sets them.

    Args:
        has_bfloat16: whether a GPU multiplies it fast.
    """
    is_gpu = device.startswith("cuda")
    is_short = precision == "bfloat16" or (precision == "auto" and is_gpu and has_bfloat16)
    return FLOAT // 2 if is_gpu and is_short else FLOAT, FLOAT // 2 if is_short else FLOAT


def state_bytes(config: DrafterConfig, settings: TrainingSettings) -> int:
    """Size of a training's saved state on disk: trained weights and AdamW's two moments."""
    return 3 * FLOAT * count_parameters(config, settings)[1]


def version_bytes(config: DrafterConfig, settings: TrainingSettings) -> int:
    """Size of a drafter version's weights in bfloat16, as most drafters are published."""
    head = (config.draft_vocab_size or 0) * config.hidden_size
    return FLOAT // 2 * (sum(count_parameters(config, settings)) + head)


def count_parameters(config: DrafterConfig, settings: TrainingSettings) -> tuple[int, int]:
    """Count a drafter's (frozen, trained) parameters."""
    if config.eagle3 is not None:
        return _count_eagle3(config, config.eagle3, settings)
    if config.mtp is not None:
        return _count_mtp(config, config.mtp, settings)
    h, d, layers = config.hidden_size, config.head_dim, config.num_hidden_layers
    queries, values = config.num_attention_heads * d, config.num_key_value_heads * d
    kv_path = config.feature_size * h + h + layers * (2 * h * values + d)
    biases = layers * (queries + h) if config.attention_bias else 0
    kv_path += 2 * layers * values if config.attention_bias else 0
    others = h + biases + layers * (2 * h * queries + d + 3 * h * config.intermediate_size + 2 * h)
    frozen = 0
    if config.convolution is not None:
        taps, groups = config.convolution.taps, h // config.convolution.group_size
        others += layers * 2 * 2 * taps * h * (1 + groups)
    if config.selector is not None:
        others += config.selector.rank * h
        frozen = 2 * config.selector.rank * config.vocab_size  # the codebooks
    if config.markov is not None:
        others += config.markov.rank * config.vocab_size
        frozen = config.markov.rank * config.num_words
    return (frozen, kv_path + others) if settings.scope == "full" else (frozen + kv_path, others)


def _count_eagle3(config: DrafterConfig, eagle3: Eagle3, settings: TrainingSettings) -> tuple[int, int]:
    h, d = config.hidden_size, config.head_dim
    queries, values = config.num_attention_heads * d, config.num_key_value_heads * d
    norms = config.feature_size * (eagle3.norm_before_fc + eagle3.norms_features)
    kv_path = norms + config.feature_size * h + 2 * h + 2 * 2 * h * values
    others = 2 * h + 3 * h * queries + 3 * h * config.intermediate_size
    if config.attention_bias:
        kv_path, others = kv_path + 2 * values, others + queries + (0 if eagle3.has_head_norms else h)
    if eagle3.has_head_norms:
        kv_path, others = kv_path + d, others + d
    return (0, kv_path + others) if settings.scope == "full" else (kv_path, others)


def _count_mtp(config: DrafterConfig, mtp: Mtp, settings: TrainingSettings) -> tuple[int, int]:
    h, d = config.hidden_size, config.head_dim
    queries, values = config.num_attention_heads * d, config.num_key_value_heads * d
    asked = queries * (2 if mtp.has_gate else 1)
    head_norm = 0 if mtp.is_mimo else d
    kv_path = 2 * h * h + 3 * h + 2 * h * values + head_norm
    others = 2 * h + head_norm + h * asked + h * queries + 3 * h * config.intermediate_size
    if config.attention_bias:
        kv_path, others = kv_path + 2 * values, others + asked
    router = 0
    if mtp.experts is not None:
        router, others = h * mtp.experts.count, others + h
    return (router, kv_path + others) if settings.scope == "full" else (router + kv_path, others)


def _context_bytes(config: DrafterConfig, settings: TrainingSettings, rows: int, is_fused: bool, compute_bytes: int) -> int:
    width = config.hidden_size if is_fused else config.feature_size
    values = config.num_key_value_heads * config.head_dim
    kept = 6 if settings.scope == "full" else 3  # K before and after norm and rotation, V; "full" keeps more
    rest = 2 * config.hidden_size if not is_fused else 0
    if config.drafts_one_by_one:  # embeddings, both inputs normed, and joined
        rest += 5 * config.hidden_size
    return rows * FLOAT * (2 * width + rest) + rows * compute_bytes * config.num_hidden_layers * kept * values


def _layer_bytes(config: DrafterConfig, settings: TrainingSettings, blocks: int, rows: int, compute_bytes: int) -> int:
    if config.drafts_one_by_one:
        return _unrolled_layer_bytes(config, settings, blocks, rows, compute_bytes)
    tokens = blocks * config.block_size
    h, heads, d = config.hidden_size, config.num_attention_heads, config.head_dim
    queries, values = heads * d, config.num_key_value_heads * d
    part = max(1, PART_QUERIES // config.block_size) * config.block_size
    read = math.ceil(tokens / part) * (rows + part)  # keys read by all parts of the attention together
    # Norms in float32, their inputs and outputs, projections before and after rotation, the MLP's three and its products.
    row = 8 * h + 7 * queries + 6 * values + 5 * config.intermediate_size
    if config.convolution is not None:  # two of two sides: kernels, shifted inputs and sums
        row += 4 * h * (2 * config.convolution.taps + 2)
    kept = (tokens * row + 2 * read * values) * compute_bytes + tokens * heads * FLOAT
    passing = 2 * read * values * compute_bytes + part * read * FLOAT  # one layer's gradients of keys and values; the masks
    if settings.gradient_checkpointing:
        return kept + passing + config.num_hidden_layers * tokens * h * FLOAT
    return config.num_hidden_layers * kept + passing


def _unrolled_layer_bytes(config: DrafterConfig, settings: TrainingSettings, blocks: int, rows: int, compute_bytes: int) -> int:
    """As `_layer_bytes`: the layer runs once for each token, and each run reads all keys."""
    h, heads, d, k = config.hidden_size, config.num_attention_heads, config.head_dim, config.num_draft_tokens
    queries, values = heads * d, config.num_key_value_heads * d
    part = min(blocks, PART_QUERIES)
    read = math.ceil(blocks / part) * (rows + part * k)
    row = 10 * h + 4 * queries + (4 + k) * values + 3 * config.intermediate_size
    experts = config.mtp.experts if config.mtp else None
    if experts is not None:  # chosen rows, the three products, and their weighted sum
        row += experts.top_k * (4 * experts.intermediate_size + 3 * h) + 4 * experts.count
    kept = (blocks * row + 2 * read * values) * compute_bytes + part * read * FLOAT + blocks * heads * FLOAT
    passing = 2 * (read + rows) * values * compute_bytes + part * read * FLOAT
    if settings.gradient_checkpointing:
        return kept + passing + k * blocks * (2 * h + 2 * values) * FLOAT
    return k * kept + passing


def _loss_bytes(config: DrafterConfig, blocks: int) -> int:
    """Loss memory. Kept blocks always use the parent's distribution, whatever the loss of fresh ones; that takes the most."""
    tokens, h, v = blocks * config.num_draft_tokens, config.hidden_size, config.num_words
    by_labels = min(tokens, ROWS) * (min(TILE, v) + h)
    scores = min(2 * tokens * v, max(max(BUFFER_BYTES.values()) // FLOAT, 2 * v))
    by_goal = scores * 5 // 4 + 3 * min(tokens * v, CACHED_BYTES // FLOAT)
    return FLOAT * (max(by_labels, by_goal) + 5 * tokens * h)


def check_fits(needed: MemoryEstimate, available_bytes: int, where: str, cures: list[tuple[str, MemoryEstimate]]) -> None:
    """Refuse a training that doesn't fit.

    Args:
        where: "cpu", "cuda:0 beside the engine", …
        cures: changes of settings to try, with the memory needed then, cheapest first.

    Raises:
        MemoryBudgetError: cause and cure.
    """
    if needed.total_bytes <= available_bytes:
        return
    able = [text for text, less in cures if less.total_bytes <= available_bytes]
    cure = able[0] if able else "train on a device with more memory (trainer.device), such as the CPU"
    raise MemoryBudgetError(f"training needs {needed}, and {where} has {in_words(available_bytes)} for it: {cure}")


def in_words(size: int) -> str:
    """Format a size: 1.5 GiB, 12 MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{math.ceil(size / 2**20)} MiB"
