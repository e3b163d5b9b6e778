"""Slots for trees: a server is started with more draft tokens than its drafter drafts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

NODES_SHARE = 0.5
"""Most of a step's tokens that trees may take: the rest is for prompts, and for requests that vLLM schedules last."""


def block_tokens_of(speculative_config: Any) -> int:
    """Draft tokens of the drafter's block; those that the server was started with, unless trees can grow from its drafter.

    Only DFlash's can, whose block's first token is the anchor. 0 for an engine that doesn't speculate.
    """
    if speculative_config is None:
        return 0
    slots = int(speculative_config.num_speculative_tokens)
    if speculative_config.method != "dflash":
        return slots
    config = getattr(speculative_config.draft_model_config, "hf_config", None)
    block = int(getattr(config, "block_size", 0) or (getattr(config, "dflash_config", None) or {}).get("block_size") or 0)
    return min(block - 1, slots) if block > 1 else slots


def reserve(scheduler: Any, block_tokens: int) -> None:
    """Let a scheduler reserve room for what the drafter drafts.

    vLLM reserves room for as many tokens as there are slots, in every step, whether anything is drafted or not: with 63 slots
    and `--max-num-batched-tokens 2048` only 32 requests would get into a step.
    """
    config = scheduler.vllm_config
    speculative = copy.copy(config.speculative_config)
    spare = int(speculative.num_speculative_tokens) - block_tokens
    slots = int(speculative.max_num_new_slots_for_drafting) - spare
    shown = {"max_num_new_slots_for_drafting": property(lambda _: slots)}
    speculative.__class__ = type(type(speculative).__name__, (type(speculative),), shown)
    own = copy.copy(config)
    own.speculative_config = speculative
    scheduler.vllm_config = own
    scheduler.num_lookahead_tokens -= spare


def fitting(lengths: Sequence[int], room: int, least: int) -> list[int]:
    """Lower the largest of a step's lengths until all have room together, but none below `least`, a chain's."""
    if sum(lengths) <= room:
        return list(lengths)
    left, most = room, least
    for place, length in enumerate(ordered := sorted(lengths)):
        if length * (len(ordered) - place) > left:
            most = max(left // (len(ordered) - place), least)
            break
        left -= length
    return [min(length, most) for length in lengths]
