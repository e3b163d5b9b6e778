"""Sizes that decide how much memory training's ops take. No torch here: what a training needs is told from them as well."""

from __future__ import annotations

PART_QUERIES = 64
"""Of `anchor_attention` on a CPU: queries that are computed together."""
TILE = 8192
"""Of `block_loss_labels`: tokens of the vocabulary at a time; a row of a tile lives in the registers of one program. A power
of two."""
ROWS = 1024
"""Of `block_loss_labels`: rows of hidden states at a time."""
BUFFER_BYTES = {"cuda": 256 << 20, "cpu": 96 << 20}
"""Of `block_loss_goal`: scores and goal scores. A chunk's products want some hundred rows on a GPU; a CPU is content with a
few."""
CACHED_BYTES = 1 << 20
"""Of `block_loss_goal`: scores that the plain version takes through its steps at a time."""
