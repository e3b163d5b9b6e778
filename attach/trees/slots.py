"""Slots for trees: a server is started with more draft tokens than its drafter drafts."""

from __future__ import annotations

from typing import Any


def block_tokens_of(speculative_config: Any) -> int:
    """Draft tokens of the drafter's block; those that the server was started with, if its config names no block."""
    slots = int(speculative_config.num_speculative_tokens)
    config = getattr(speculative_config.draft_model_config, "hf_config", None)
    block = int(getattr(config, "block_size", 0) or 0)
    return min(block - 1, slots) if block > 1 else slots
