"""Requests whose tokens aren't drawn from the target's own distribution alone."""

from __future__ import annotations

from typing import Any


def is_steered(sampling_params: Any) -> bool:
    """Whether penalties, bad words, a grammar, biases, a least length or a thinking budget forbid or favour tokens."""
    p = sampling_params
    return (
        p.presence_penalty != 0.0
        or p.frequency_penalty != 0.0
        or p.repetition_penalty != 1.0
        or p.min_tokens > 0
        or bool(p.bad_words)
        or p.structured_outputs is not None
        or bool(p.logit_bias)
        or bool(p.allowed_token_ids)
        or getattr(p, "thinking_token_budget", None) is not None
    )
