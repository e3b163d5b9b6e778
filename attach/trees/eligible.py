"""Requests whose next tokens depend on more than the path to a node: they keep vLLM's own chain."""

from __future__ import annotations

from typing import Any


def needs_chain(sampling_params: Any) -> bool:
    """Whether a request's sampler takes the rows before a draft for its ancestors, which in a tree they aren't.

    That is so for penalties, bad words, grammars, log-probabilities, and processors that look at the output so far.
    """
    p = sampling_params
    return (
        p is None
        or p.presence_penalty != 0.0
        or p.frequency_penalty != 0.0
        or p.repetition_penalty != 1.0
        or p.min_tokens > 0
        or p.min_p > 0.0
        or bool(p.bad_words)
        or p.num_logprobs is not None
        or p.prompt_logprobs is not None
        or p.structured_outputs is not None
        or bool(p.logit_bias)
        or bool(p.allowed_token_ids)
        or getattr(p, "thinking_token_budget", None) is not None
    )
