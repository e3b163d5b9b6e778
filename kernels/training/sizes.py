"""Sizes that set the memory of the training ops. No torch here: a training's memory is also estimated from them."""

from __future__ import annotations

PART_QUERIES = 64
"""For `anchor_attention` on a CPU: queries that are computed together."""
TILE = 8192
"""For `block_loss_labels`: tokens of the vocabulary at a time; one program holds a row of a tile in registers. A power of
two."""
ROWS = 1024
"""For `block_loss_labels`: rows of hidden states at a time."""
BUFFER_BYTES = {"cuda": 256 << 20, "cpu": 96 << 20}
"""For `block_loss_goal`: scores and goal scores. A chunk's products need some hundred rows on a GPU, but only a few on a
CPU."""
CACHED_BYTES = 1 << 20
"""For `block_loss_goal`: scores that the plain version processes at a time."""
